"""Microbatches found by trial, with simulated out-of-memory errors."""

import pathlib
import warnings
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Checkpoints, Event, State, compose, fit, loop_events
from purecompose.run.interruptions import Adaptive
from tests.helpers import assert_close, changing, make_batches, make_state


BATCHES = make_batches(4)


def greedy(most: int, error: type[RuntimeError] = torch.OutOfMemoryError) -> pc.Algorithm:
    """Return an algorithm that fails if more than `most` examples are computed at a time."""

    def check(state: State) -> State:
        if state.num_examples > most:
            raise error("CUDA out of memory. Tried to allocate 2.00 GiB")
        return state

    return changing("greedy", Event.BEFORE_FORWARD, check)


@pytest.mark.parametrize("most, slices", [(8, 1), (4, 2), (3, 4), (1, 8)])
def test_batches_are_halved_until_they_fit(most: int, slices: int) -> None:
    adaptive = Adaptive(compose(loop_events, [greedy(most)]))
    state = plain = make_state()
    reference = compose(loop_events, microbatches=slices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in BATCHES:
            state, plain = adaptive(state, batch), reference(plain, batch)
    assert adaptive.step.microbatches == slices
    assert len(caught) == slices.bit_length() - 1  # one warning for each halving; the number is remembered
    assert_close(state.params, plain.params)
    pc.tree.equal(state, plain)


def test_a_single_example_that_does_not_fit_is_an_error() -> None:
    adaptive = Adaptive(compose(loop_events, [greedy(0)]))
    with pytest.warns(UserWarning, match="out of memory"), pytest.raises(torch.OutOfMemoryError) as caught:
        adaptive(make_state(), BATCHES[0])
    assert any("single example" in note for note in caught.value.__notes__)


def test_other_errors_are_not_caught() -> None:
    def fail(state: State) -> State:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        Adaptive(compose(loop_events, [changing("fail", Event.BATCH_START, fail)]))(make_state(), BATCHES[0])


def test_a_donating_step_survives_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = pc.compile(compose(loop_events), backend="eager", quiet=True)
    adaptive = Adaptive(fast)
    state = adaptive(make_state(), BATCHES[0])
    from purecompose.transforms.compilation import parts

    run, failures = parts.CompiledPart.run, [True]

    def failing(self: Any, *arguments: Any, **options: Any) -> None:
        run(self, *arguments, **options)  # the step has already overwritten its buffers
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(parts.CompiledPart, "run", failing)
    larger = tuple(torch.cat([member, member]) for member in BATCHES[1])
    with pytest.warns(UserWarning, match="2 microbatches"):
        state = adaptive(state, larger)
    plain = compose(loop_events)
    assert_close(state.params, plain(plain(make_state(), BATCHES[0]), larger).params)


def test_fit_finds_the_number_and_remembers_it_in_checkpoints(tmp_path: pathlib.Path) -> None:
    settings = Checkpoints(tmp_path, background=False)
    with pytest.warns(UserWarning, match="2 microbatches"):
        fit(
            compose(loop_events, [greedy(4)]),
            make_state(),
            BATCHES,
            duration="1ep",
            microbatches="auto",
            checkpoints=settings,
        )
    path = pc.saving.newest(tmp_path)
    assert path is not None and pc.saving.read_index(path).memory["microbatches"] == 2
    for epochs in (2, 3):  # remembered each time, without a warning of a difference
        end = fit(
            compose(loop_events, [greedy(4)]),
            make_state(),
            BATCHES,
            duration=f"{epochs}ep",
            microbatches="auto",
            checkpoints=settings,
            resume="auto",
        )
        assert end.timestamp.epoch == epochs


def test_a_population_counts_the_examples_of_each_member() -> None:
    step = pc.population(compose(loop_events, [greedy(1)]), 2, batches="each")
    batch = tuple(torch.stack([member, member]) for member in BATCHES[0])
    adaptive = Adaptive(step)
    with pytest.warns(UserWarning, match="microbatches"):
        adaptive(pc.stack_states([make_state(), make_state()]), batch)
    assert adaptive.found == len(BATCHES[0][0])
