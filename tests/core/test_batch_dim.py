"""Batches of sequences (T, N, ...), whose examples lie along the second dimension."""

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, batch as batches, losses, optim, tree
from purecompose.testing.worker import played
from tests.helpers import assert_near, trained_by_torch


LENGTH, SIZE = 5, 6


class Reader(nn.Module):
    """A recurrent classifier of sequences, in torch's default layout; with `each` it classifies every position."""

    def __init__(self, *, each: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.gru, self.head, self.each, self.dropout = nn.GRU(3, 4), nn.Linear(4, 2), each, nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.gru(self.dropout(inputs))
        return self.head(hidden).flatten(0, 1) if self.each else self.head(hidden[-1])


def flat_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets.flatten())


def make_net(**options: object) -> Reader:
    torch.manual_seed(0)
    return Reader(**options).double()  # pyright: ignore[reportArgumentType]


def make_batch(size: int = SIZE, *, each: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    shape = (LENGTH, size) if each else (size,)
    inputs = torch.randn(LENGTH, size, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(2, shape, generator=generator)


def make_state(net: nn.Module, *, each: bool = False, batch_dim: int = 1) -> State:
    loss = flat_cross_entropy if each else losses.cross_entropy
    return State.create(net, loss=loss, optimizer=optim.sgd(0.1), batch_dim=batch_dim)


def torch_params(each: bool) -> dict[str, Tensor]:
    batches = [make_batch(size, each=each) for size in (SIZE, 4)]
    return trained_by_torch(
        make_net(each=each), lambda net, batch: flat_cross_entropy(net(batch[0]), batch[1]), batches
    )


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_slices_are_cut_along_the_examples(k, each):
    step, state = pc.compose(pc.loop_events, microbatches=k), make_state(make_net(each=each), each=each)
    for size in (SIZE, 4):
        state = step(state, make_batch(size, each=each))
    assert_near(state.params, torch_params(each))
    assert state.timestamp.sample == SIZE + 4


def test_processes_share_the_examples():
    play, state = played(pc.compose(pc.loop_events), 2), make_state(make_net(each=True), each=True)
    for size in (SIZE, 4):
        ours = play(lambda one, state=state, size=size: one(state, make_batch(size, each=True)))
        state = ours[0]
    assert tree.equal(ours[0].params, ours[1].params)
    assert_near(state.params, torch_params(True))


def test_inputs_and_targets_of_different_lengths_are_an_error():
    state, step = make_state(make_net(), batch_dim=0), pc.compose(pc.loop_events)
    message = r"5 \(by .*\) or 6 \(by .*\); for sequences \(T, N, ...\) use State.create\(batch_dim=1\)"
    with pytest.raises(ValueError, match=message):
        step.replace(microbatches=2)(state, make_batch())
    with pytest.raises(ValueError, match=message):
        played(step, 2)(lambda one: one(state, make_batch()))


@pytest.mark.parametrize(
    "method", [alg.mixup(), alg.selective_backprop(), alg.per_example_clipping(1.0), alg.randaugment()]
)
def test_methods_that_take_rows_for_examples_are_refused(method):
    step, state = pc.compose(pc.loop_events, [method]), make_state(make_net())
    with pytest.raises(ValueError, match=f"{method.name}: expected examples along dimension 0"):
        step(step.init(state), make_batch())


def test_split_slices_arrays_and_keeps_members_of_other_sizes_whole():
    batch = {
        "x": torch.zeros(5, 4, 2),
        "lengths": torch.arange(4),
        "array": torch.zeros(5, 4).numpy(),
        "w": torch.ones(3),
    }
    assert batches.num_examples(batch, "x", 1) == 4
    first, _ = batches.split(batch, 2, 4, 1)
    assert first["x"].shape == (5, 2, 2) and first["lengths"].tolist() == [0, 1]
    assert first["array"].shape == (5, 2) and first["w"] is batch["w"]
