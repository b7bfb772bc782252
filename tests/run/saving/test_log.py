"""`Checkpoints(keep="log")` spreads checkpoints over a run."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Checkpoints, compose, loop_events
from purecompose.run.saving.folder import all_in
from purecompose.run.saving.selection import surplus
from tests.helpers import make_batches, make_state


def kept(batches: range) -> list[int]:
    """Return the batches of the checkpoints that remain when one is written at each of these batches."""
    settings, found = Checkpoints("unused", keep="log"), list[Any]()
    for batch in batches:
        found = [SimpleNamespace(index=SimpleNamespace(batch=batch, metrics={})), *found]
        gone = surplus(found, settings)
        found = [one for one in found if all(one is not other for other in gone)]
    return [one.index.batch for one in reversed(found)]


@pytest.mark.parametrize(("length", "every"), [(100_000, 100), (100_000, 37), (5_000, 10), (300, 1), (6, 1)])
def test_about_log2_of_a_run_remain_evenly_spread(length: int, every: int) -> None:
    batches = kept(range(0, length + 1, every))
    assert len(batches) <= 2 + math.ceil(math.log2(length)) and len(batches) <= 20
    assert batches[0] == 0 and batches[-1] == length // every * every
    widest = max(after - before for before, after in itertools.pairwise(batches))
    assert widest <= max(every, 4 * length / len(batches))


def test_the_start_of_the_run_is_kept_and_continues_it(tmp_path: Path) -> None:
    step, state, batches = compose(loop_events), make_state(duration="4ep"), make_batches(4)
    settings = Checkpoints(tmp_path, keep="log", every="1ba", background=False)
    end = pc.fit(step, state, batches, checkpoints=settings)
    found = [one.index.batch for one in all_in(tmp_path)[0]]
    assert found[0] == 16 and found[-1] == 0 and len(found) == 2 + 5
    assert pc.tree.diff(pc.load(tmp_path / "ep0000-ba00000000", state), step.init(state)) == []
    again = pc.fit(step, state, batches, resume=tmp_path / "ep0000-ba00000000")
    assert pc.tree.diff(again, end) == []


def test_methods_see_the_start_again_after_the_first_checkpoint(tmp_path: Path) -> None:
    def count(event: pc.Event, state: pc.State) -> pc.State:
        now = torch.zeros(()) if event is pc.Event.INIT else state.slots["starts"] + 1
        return state.replace(slots={**state.slots, "starts": now})

    step = compose(loop_events, [pc.Algorithm("starts", pc.on(pc.Event.INIT, pc.Event.FIT_START), count)])
    state, settings = make_state(), Checkpoints(tmp_path, keep="log", background=False)
    pc.fit(step, state, make_batches(4), checkpoints=settings)
    for found in all_in(tmp_path)[0]:
        end = pc.fit(step, state, make_batches(4), resume=found.path, duration="3ep")
        assert end.slots["starts"] == 1, found.path


def test_the_best_one_is_kept_too() -> None:
    settings = Checkpoints("unused", keep="log", best="eval/loss")
    found: list[Any] = [
        SimpleNamespace(index=SimpleNamespace(batch=batch, metrics={"eval/loss": abs(batch - 7)}))
        for batch in range(99, -1, -1)
    ]
    assert 7 not in [one.index.batch for one in surplus(found, settings)]
