"""The check in the first step that a loss is the mean over slices, of batches of any layout, in every kind of step."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, batch as batches, compose, loop_events
from purecompose.testing.ranks import played
from tests.helpers import make_batch, make_state, nt_xent


APART = r"examples together, but .* as the mean over {} slices.*losses\.over_batch"


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def centred(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs - outputs.mean(0), targets)


def spread(outputs: Tensor, targets: Tensor, weight: Any) -> Tensor:
    return F.cross_entropy(outputs, targets) - weight * outputs.std(0).mean()


SCHEDULED = functools.partial(spread, weight=pc.schedule.linear(0.0, 1.0))  # both are 0 in the first step
NAMED = functools.partial(spread, weight=pc.hparam("weight", 0.0))


@pytest.mark.parametrize(
    "loss, is_compiled, num_members",
    [
        (nt_xent, False, None),
        (SCHEDULED, False, None),
        (NAMED, True, 2),
        (summed, False, None),
        (centred, False, None),
        (centred, True, None),
        (centred, False, 2),
        (centred, True, 2),
    ],
)
def test_a_loss_that_is_not_a_mean_is_found_in_the_first_sliced_step(loss, is_compiled, num_members):
    state = make_state(loss=loss, duration="4ba")
    if num_members:
        state = pc.stack_states([state, make_state(loss=loss, duration="4ba", key=1)])

    def step(microbatches: int) -> pc.Step:
        made = compose(loop_events, microbatches=microbatches)
        made = pc.population(made, num_members) if num_members else made
        return pc.compile(made, backend="eager", quiet=True, donate=False) if is_compiled else made

    step(1)(state, make_batch())
    with pytest.raises(ValueError, match=APART.format(4)):
        step(4)(state, make_batch())


class Noisy(nn.Module):
    """A loss that draws, and has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.ones(())), nn.Dropout(0.5)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.scale * F.cross_entropy(self.drop(outputs), targets)


def shifted(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a difference of two large numbers, as that of a critic's scores may be."""
    return (1e4 + outputs[:, 0]).mean() - (1e4 + outputs[:, 1]).mean()


@pytest.mark.parametrize("num_members", [None, 2])
def test_random_rounded_and_partly_ignored_losses_are_not_taken_for_coupled(num_members):
    step = compose(loop_events, microbatches=4)
    inputs, targets = make_batch()
    for state, batch in (
        (make_state(loss=Noisy()), (inputs, targets)),
        (make_state(loss=shifted), make_batch(size=50)),
        (make_state(), (inputs, targets.index_fill(0, torch.arange(5), -100))),
    ):
        if num_members:
            pc.population(step, num_members)(pc.stack_states([state] * num_members), batch)
        else:
            step(state, batch)


@pytest.mark.parametrize("num_members", [None, 2])
def test_a_loss_without_its_number_of_terms_is_found_by_a_slice_in_which_nothing_counts(num_members):
    inputs, targets = make_batch()
    targets = targets.index_fill(0, torch.arange(2), -100)  # all of the first slice
    state, step = (
        make_state(loss=lambda outputs, targets: F.cross_entropy(outputs, targets)),
        compose(loop_events, microbatches=4),
    )
    if num_members:
        state, step = pc.stack_states([state] * num_members), pc.population(step, num_members)
    with pytest.raises(ValueError, match=r"but nan as the mean over 4 slices.*num_terms"):
        step(state, (inputs, targets))


class Positions(nn.Module):
    """Logits of each position of sequences (T, N, 4): as they are, flattened, or of the last position only."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.linear = form, nn.Linear(4, 3)

    def forward(self, inputs: Any) -> Tensor:
        logits = self.linear(inputs)
        return logits if self.form == "each" else logits[-1] if self.form == "last" else logits.flatten(0, 1)


class Nodes(nn.Module):
    """Logits of each node of a batch of graphs, or of each graph."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.linear = form, nn.Linear(4, 3)

    def forward(self, batch: Any) -> Tensor:
        logits = self.linear(batch["x"])
        sizes = batch["sizes"].tolist()
        if self.form == "graphs":
            return torch.stack([one.mean(0) for one in logits.split(sizes)])
        return logits if self.form == "nodes" else logits.repeat(2, 1)


class Flat:
    """Cross entropy over all positions or nodes, which it counts; `is_centred` compares them with each other."""

    def __init__(self, is_centred: bool) -> None:
        self.is_centred = is_centred

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = outputs.flatten(0, -2)
        targets = targets.flatten().repeat(len(outputs) // targets.numel())
        return F.cross_entropy(outputs - outputs.mean(0) if self.is_centred else outputs, targets)

    def num_terms(self, outputs: Tensor, targets: Tensor) -> int:
        return targets.numel()


def part_of(batch: Any, start: int, stop: int) -> Any:
    nodes = slice(int(batch["sizes"][:start].sum()), int(batch["sizes"][:stop].sum()))
    y = batch["y"][nodes] if len(batch["y"]) == len(batch["x"]) else batch["y"][start:stop]
    return {"x": batch["x"][nodes], "sizes": batch["sizes"][start:stop], "y": y}


GRAPHS = batches.Splitter(lambda batch: len(batch["sizes"]), part_of)
SIZES = (3, 2, 5, 1, 4, 2)


def made(form: str, is_centred: bool) -> tuple[State, Any]:
    """Return a state and a batch of six sequences or graphs."""
    torch.manual_seed(0)
    generator, loss = torch.Generator().manual_seed(0), Flat(is_centred)
    if form in ("each", "flattened", "last"):
        inputs = torch.randn(5, 6, 4, generator=generator)
        shape = (6,) if form == "last" else (5, 6)
        return make_state(Positions(form), loss=loss, batch_dim=1), (
            inputs,
            torch.randint(3, shape, generator=generator),
        )
    num = len(SIZES) if form == "graphs" else sum(SIZES)
    x, y = torch.randn(sum(SIZES), 4, generator=generator), torch.randint(3, (num,), generator=generator)
    options = {"input_field": batches.AS_ARGUMENT, "target_field": "y", "splitter": GRAPHS}
    return make_state(Nodes(form), loss=loss, **options), {"x": x, "sizes": torch.tensor(SIZES), "y": y}


def take_step(how: str, state: State, batch: Any) -> None:
    step = compose(loop_events, microbatches=3 if how == "slices" else 1)
    if how == "slices":
        step(state, batch)
    else:
        played(step, 2)(functools.partial(lambda one, s, b: one(s, b), s=state, b=batch))


@pytest.mark.parametrize("how", ["slices", "processes"])
@pytest.mark.parametrize("form", ["each", "flattened", "last", "graphs", "nodes"])
def test_batches_without_rows_are_checked(form, how):
    take_step(how, *made(form, is_centred=False))
    with pytest.raises(ValueError, match=APART.format(3 if how == "slices" else 2)):
        take_step(how, *made(form, is_centred=True))


def test_outputs_that_cannot_be_put_together_are_reported():
    state, batch = made("edges", is_centred=False)
    with pytest.warns(UserWarning, match=r"not known whether the loss .*Flat.* is a mean over examples.*Splitter"):
        take_step("processes", state, batch)
