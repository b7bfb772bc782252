"""The first batch at which something is true is found by halving, with the example that caused it."""

import math
from pathlib import Path

import pytest
import torch

import purecompose as pc
from purecompose import compose, loop_events, optim
from purecompose.analysis import RecordedRun, bisect, predicates
from tests.analysis.forms import Form, digests
from tests.helpers import make_mlp, make_state


SIZE = 4


def poisoned(kind: str, num_batches: int, seed: int) -> tuple[Form, int, int]:
    """Return a run with one bad example, the batch that contains it, and its number in the data."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SIZE * num_batches, 4, generator=generator)
    targets = inputs @ torch.randn(4, 3, generator=generator)
    place = int(torch.randint(len(inputs), (), generator=generator))
    if kind == "label":
        targets[place] = torch.nan
    else:
        inputs[place] *= 1e4
    data = pc.data.arrays(inputs, targets, SIZE)
    net = pc.nn.models.build("mlp", in_shape=(4,), num_classes=3, seed=seed, hidden=8)
    state = make_state(net, loss=pc.losses.mse, duration="1ep", optimizer=optim.sgd(0.01), key=seed)
    order = data.order(state.key, 0).tolist()
    return Form(compose(loop_events), state, data), order.index(place) // SIZE + 1, place


def found_in(folder: Path, kind: str, num_batches: int, seed: int) -> None:
    """Record a run with a bad example and find it."""
    form, batch, place = poisoned(kind, num_batches, seed)
    every = f"{max(1, num_batches // 100)}ba"
    pc.fit(*form, checkpoints=pc.Checkpoints(folder, keep="log", every=every, background=False))
    run, before = RecordedRun(folder, *form), digests(folder)
    # After a NaN the weights are NaN; a scaled example throws them far away, where they remain.
    predicate = predicates.not_finite() if kind == "label" else predicates.weight_norm_above(20.0)
    found = bisect(run, predicate, stays=True)
    assert found.batch == batch
    (words,) = found.unusual
    assert f"(number {place} of the data): " in words and words in str(found)
    assert ("targets are not finite" in words) == (kind == "label")
    index = form.data.order(form.state.key, 0).tolist().index(place) % SIZE
    assert words.startswith(f"example {index} ")
    assert torch.equal(found.data[0][index], form.data.inputs[place]) and found.before.timestamp.batch == batch - 1
    assert digests(folder) == before


@pytest.mark.parametrize("kind", ["label", "scale"])
def test_a_bad_example_is_named(kind: str, tmp_path: Path) -> None:
    found_in(tmp_path, kind, 200, seed=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A run of 40 batches, with a bad one in the middle."""
    inputs, targets = torch.randn(160, 4), torch.arange(160) % 3
    inputs[81] *= 1e4
    data = pc.data.arrays(inputs, targets, SIZE, shuffle=False)
    form = Form(compose(loop_events), make_state(make_mlp(), duration="1ep", optimizer=optim.sgd(0.01)), data)
    folder = tmp_path_factory.mktemp("run")
    pc.fit(*form, checkpoints=pc.Checkpoints(folder, keep="log", every="4ba", background=False))
    return RecordedRun(folder, *form)


def test_what_passes_is_found_by_a_scan(run: RecordedRun) -> None:
    found = bisect(run, lambda state: state.timestamp.batch in (21, 22), stays=False)
    assert found.batch == 21
    (words,) = found.unusual
    assert words.startswith("example 1 (number 81 of the data): inputs reach ") and "times the typical" in words
    after = run.step(found.before, found.data)
    assert pc.tree.diff(after, pc.analysis.replay(run, 21).state) == []


def test_examples_along_another_dimension_are_named(tmp_path: Path) -> None:
    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.linear(inputs[-1])

    inputs, targets = torch.randn(5, 5, 3), torch.arange(5) % 2
    inputs[-1, 4] = math.nan
    form = Form(compose(loop_events), make_state(Last(), batch_dim=1, duration="1ep"), [(inputs, targets)])
    pc.fit(*form, checkpoints=pc.Checkpoints(tmp_path, keep="log", background=False))
    found = bisect(RecordedRun(tmp_path, *form), predicates.not_finite(), stays=True)
    assert found.unusual == ("example 4: inputs are not finite",)


def test_a_predicate_that_does_not_stay_is_noticed(run: RecordedRun) -> None:
    def passes(state: pc.State) -> bool:
        return 21 <= state.timestamp.batch < 23 or state.timestamp.batch >= 24

    with pytest.raises(ValueError, match="passes holds at batch 21 and not at batch 23: it does not stay true"):
        bisect(run, passes, stays=True)
    with pytest.raises(ValueError, match="it never does, or does not stay true; then use stays=False"):
        bisect(run, lambda state: state.timestamp.batch == 21, stays=True)


def test_a_predicate_that_passes_between_two_checkpoints_or_later_is_noticed(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, read = RecordedRun.load, set[int]()
    monkeypatch.setattr(RecordedRun, "load", lambda run, found: (read.add(found.index.batch), load(run, found))[1])
    with pytest.raises(ValueError, match="holds at batch 5 and not at batch 40: it does not stay true"):
        bisect(run, lambda state: 5 <= state.timestamp.batch < 30, stays=True)
    for first in range(1, 41):
        read.clear()
        found = bisect(run, lambda state, first=first: state.timestamp.batch >= first, stays=True)
        assert found.batch == first
        assert len(read) <= math.ceil(math.log2(len(run.checkpoints))) + 1


@pytest.mark.parametrize("stays", [True, False])
def test_a_predicate_that_never_or_always_holds(run: RecordedRun, stays: bool) -> None:
    with pytest.raises(ValueError, match=r"not_finite\(\) does not hold at batch 40 of"):
        bisect(run, predicates.not_finite(), stays=stays)
    with pytest.raises(ValueError, match="holds in .*ba00000000 already, and .* has no earlier checkpoint"):
        bisect(run, lambda state: True, stays=stays)


def test_an_error_of_the_predicate_is_named(run: RecordedRun) -> None:
    def broken(state: pc.State) -> torch.Tensor:
        return state.metrics["nothing"] > 0

    before = digests(Path(run.path))
    with pytest.raises(RuntimeError, match="the predicate broken raised at batch 24: KeyError: 'nothing'") as caught:
        bisect(run, broken, stays=True)
    assert isinstance(caught.value.__cause__, KeyError)
    assert digests(Path(run.path)) == before
