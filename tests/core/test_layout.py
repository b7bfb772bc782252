"""Batches without a dimension of examples: detection, with images of different sizes and their boxes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, batch as batches, optim
from purecompose.core.context import Layout, Splitter
from purecompose.testing.process import played
from tests.helpers import assert_near, trained_by_torch


Sample = tuple[Tensor, dict[str, Tensor]]

SAMPLES = Splitter(len, lambda batch, start, stop: batch[start:stop])


class Detector(nn.Module):
    """A model that returns its own losses, one for each image, from a list of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(3, 4)

    def forward(self, samples: list[Sample]) -> Tensor:
        boxes = [self.head(self.conv(image[None]).mean((2, 3)))[0] for image, _ in samples]
        return torch.stack(
            [(box - found["boxes"]).square().mean() for box, (_, found) in zip(boxes, samples, strict=True)]
        )


def loss(outputs: Tensor, targets: Any) -> Tensor:
    del targets
    return outputs.mean()


def make_batch(num: int, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def sample(index: int) -> Sample:
        image = torch.randn(1, 5 + index, 8 - index, generator=generator, dtype=torch.float64)
        return image, {"boxes": torch.rand(1 + index, 4, generator=generator, dtype=torch.float64)}

    return [sample(index) for index in range(num)]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return Detector().double()


def make_state(**options: Any) -> State:
    keys = {"input_field": batches.AS_ARGUMENT, "target_field": batches.WHOLE, "splitter": SAMPLES}
    return State.create(make_net(), loss=loss, optimizer=optim.sgd(0.1), **{**keys, **options})


BATCHES = [make_batch(5), make_batch(3, seed=1)]


def assert_as_in_torch(params: dict[str, Tensor]) -> None:
    assert_near(params, trained_by_torch(make_net(), lambda net, batch: net(batch).mean(), BATCHES))


def test_evaluation_weighs_by_examples():
    net, state = make_net(), make_state()
    expected = torch.cat([net(batch) for batch in BATCHES]).mean().item()
    assert pc.evaluate(state, BATCHES)["loss"] == pytest.approx(expected, rel=1e-12)
    metrics = {"worst": lambda outputs, targets: outputs.max(), "each": lambda outputs, targets: outputs}
    found = pc.evaluate(state, BATCHES, metrics)
    assert found["each"] == pytest.approx(expected, rel=1e-12)
    worst = [net(batch).max().item() for batch in BATCHES]
    assert found["worst"] == pytest.approx((5 * worst[0] + 3 * worst[1]) / 8, rel=1e-12)


def test_methods_that_take_rows_for_examples_are_refused():
    state, step = make_state(), pc.compose(pc.loop_events, [alg.mixup()])
    with pytest.raises(ValueError, match=r"mixup: expected examples along dimension 0 .* got Splitter"):
        step(step.init(state), BATCHES[0])


WHOLE = Splitter(len)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (pc.compose(pc.loop_events, microbatches=2), "microbatches=2"),
        (pc.compose(pc.loop_events, microbatch_size=1), "microbatch_size=1"),
        (pc.compose(pc.loop_events, [alg.gradient_noise_scale()]), "gradient_noise_scale"),
    ],
)
def test_whatever_would_cut_a_batch_without_parts_is_refused_by_name(step, name):
    state = make_state(splitter=WHOLE)
    for form in (step, pc.compile(step, backend="eager", quiet=True)):
        with pytest.raises(ValueError, match=rf"{name}: the batch would be cut, and Splitter.* has no parts: give"):
            form(step.init(state), BATCHES[0])


def test_a_batch_without_parts_is_counted_and_trained_on_as_a_whole():
    state, step = make_state(splitter=WHOLE), pc.compose(pc.loop_events)
    for batch in BATCHES:
        state = step(state, batch)
    assert_as_in_torch(state.params)
    assert state.timestamp.sample == 8
    play = played(step, 2)
    with pytest.raises(ValueError, match="data_parallel: the batch would be cut"):
        play(lambda one: one(make_state(splitter=WHOLE), BATCHES[0]))


def test_splitters_that_miscount_are_named():
    batch = BATCHES[0]
    with pytest.raises(ValueError, match=r"part\(batch, 0, 3\) has 5 examples, expected 3"):
        Layout(splitter=Splitter(len, lambda batch, start, stop: batch)).split(batch, 2)
    with pytest.raises(TypeError, match=r"Splitter.num_examples\(batch\).*int.*2.5"):
        Layout(splitter=Splitter(lambda batch: 2.5, SAMPLES.part)).num_examples(batch)  # pyright: ignore
    with pytest.raises(ValueError, match="cannot cut a batch of 5 examples into 6"):
        Layout(splitter=SAMPLES).split(batch, 6)
    with pytest.raises(TypeError, match="Splitter: part=2"):
        Splitter(len, 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="a splitter or a batch_dim, got both"):
        make_state(batch_dim=1)
    with pytest.raises(TypeError, match="expected a purecompose.batch.Splitter, got 'rows'"):
        make_state().replace(splitter="rows")
    with pytest.raises(ValueError, match="batch_dim"):
        make_state(splitter=None).replace(batch_dim=-1)


def test_tokens_are_counted_with_the_layout_of_the_state():
    """The batches have no padding; every form of a step counts up to the end of the run."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = {"input_ids": torch.arange(6).reshape(2, 3), "mask": mask, "y": torch.zeros(2, dtype=torch.int64)}
    options: dict[str, Any] = {"input_field": "input_ids", "target_field": "y", "duration": "7tok"}

    def make(key: int = 0, **more: Any) -> State:
        net = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(12, 2))
        return State.create(net, loss=pc.losses.cross_entropy, optimizer=optim.sgd(0.1), key=key, **options, **more)

    counted = make(num_tokens=lambda batch: int(batch["mask"].sum()))
    step = pc.compose(pc.loop_events)
    assert make().timestamp.token == 0 and step(make(), batch).timestamp.token == 6
    for form in (step, pc.compile(step, backend="eager", quiet=True)):
        assert form(counted, batch).timestamp.token == 3
    two = pc.stack_states([counted, counted.replace(key=pc.random.key(1))])
    assert pc.population(step, 2)(two, batch).timestamp.token == 3
    end = pc.fit(step, counted, [batch] * 9)
    assert (end.timestamp.batch, end.timestamp.token) == (3, 9)
    with pytest.raises(TypeError, match=r"num_tokens\(batch\).*2.5"):
        step(make(num_tokens=lambda batch: 2.5), batch)
    with pytest.raises(TypeError, match=r"num_tokens: expected a function \(batch\) -> int, got 6"):
        make(num_tokens=6)
