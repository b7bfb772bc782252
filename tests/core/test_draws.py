"""Draws of the network within a step: in slices, on several processes, and in several forward passes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import Event, State, compose, loop_events
from purecompose.testing.ranks import played
from tests.helpers import changing


# Slices and processes

SIZE, NUM_SAMPLES = 8, 3


class Drawing(nn.Module):
    """A network that multiplies its weight, 1, by what it draws for n examples."""

    def __init__(self, draw: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.weight, self.draw = nn.Parameter(torch.ones(())), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.draw(len(x)) + x * 0


def mean_of_samples(n: int) -> Tensor:
    return torch.randn(NUM_SAMPLES, n).mean(0)


def sequence_first_dropout(n: int) -> Tensor:
    return torch.arange(31.0) @ F.dropout(torch.ones(31, n), 0.5)


def one_number(n: int) -> Tensor:
    return torch.rand(())


def one_permutation(n: int) -> Tensor:
    return torch.arange(31.0) @ torch.randperm(31).float()


DRAWS = [mean_of_samples, sequence_first_dropout, one_number, one_permutation]


def mean_loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return outputs.mean() if reduction == "mean" else outputs


def drawing_state(draw: Callable[[int], Tensor], key: int = 0) -> State:
    return State.create(Drawing(draw), loss=mean_loss, optimizer=pc.optim.sgd(1.0), key=key)


BATCH = torch.zeros(SIZE), torch.zeros(SIZE)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_gradient_of_samples_deviates_equally_far_in_any_number_of_slices(k):
    """The gradient is the mean of SIZE * NUM_SAMPLES independent standard normals."""
    step = compose(loop_events, microbatches=k)
    grads = [1 - step(drawing_state(mean_of_samples, key), BATCH).params["weight"] for key in range(300)]
    assert torch.stack(grads).std().item() == pytest.approx((SIZE * NUM_SAMPLES) ** -0.5, rel=0.15)


@pytest.mark.parametrize("draw", DRAWS)
def test_every_slice_of_every_process_draws_for_itself(draw):
    seen: list[float] = []
    keep = changing("keep", Event.AFTER_FORWARD, lambda state: seen.append(state.outputs[0].item()) or state)
    step, state = compose(loop_events, [keep], microbatches=2), drawing_state(draw)
    step(state, BATCH)
    assert len(set(seen)) == 2
    seen.clear()
    played(step, 2)(lambda one: one(state, BATCH))
    assert len(set(seen)) == 4


@pytest.mark.parametrize("draw", DRAWS)
def test_compiled_slices_draw_what_eager_slices_draw(draw):
    step, state = compose(loop_events, microbatches=4), drawing_state(draw)
    compiled = pc.compile(step, backend="eager", quiet=True)
    torch.testing.assert_close(compiled(state, BATCH).params, step(state, BATCH).params)
