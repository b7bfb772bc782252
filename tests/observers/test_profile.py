"""The profiler's window: which batches are in a trace, and that nothing runs outside of it."""

import json
from pathlib import Path

import pytest
import torch

from purecompose import Event, State, compose, fit, loop_events
from purecompose.observers import Profile
from tests.observers.observer_helpers import make_batches, make_state


def is_on() -> bool:
    return torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


def steps_in(path: Path) -> set[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}


def multiplications_in(path: Path) -> int:
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("name") == "aten::addmm" for event in events)


def run(duration: str, *observers: object) -> State:
    return fit(compose(loop_events), make_state(duration), make_batches(), observers=observers)  # type: ignore[arg-type]


def test_a_trace_only_contains_the_active_batches(tmp_path: Path) -> None:
    run("14ba", Profile(tmp_path / "deep", wait=2, warmup=2, active=3))
    (path,) = (tmp_path / "deep").iterdir()
    assert path.name == "batches_5_to_7.json"
    assert multiplications_in(path) == 3  # one forward pass for each batch
    assert len(steps_in(path)) == 3


def test_the_profiler_is_off_outside_of_the_window(tmp_path: Path) -> None:
    on: dict[int, bool] = {}

    def look(event: Event, state: State) -> None:
        if event is Event.BEFORE_DATALOADER:
            on[state.timestamp.batch + 1] = is_on()

    run("8ba", Profile(tmp_path, wait=2, warmup=1, active=2), look)
    assert [batch for batch, was_on in on.items() if was_on] == [4, 5]  # not in 3, the warm-up, either


def test_a_run_that_ends_in_the_window_writes_a_partial_trace(tmp_path: Path) -> None:
    run("4ba", Profile(tmp_path, active=10))
    assert [path.name for path in tmp_path.iterdir()] == ["batches_3_to_4.json"]
    run("2ba", Profile(tmp_path / "none", wait=1, warmup=1))
    assert not (tmp_path / "none").exists()


def test_an_exception_leaves_no_profiler_running(tmp_path: Path) -> None:
    def failing(event: Event, state: State) -> None:
        if event is Event.BATCH_END and state.timestamp.batch == 4:
            raise RuntimeError("the fourth batch")

    with pytest.raises(RuntimeError, match="the fourth batch"), Profile(tmp_path) as observer:
        run("8ba", observer, failing)
    assert not is_on()
    assert [path.name for path in tmp_path.iterdir()] == ["batches_3_to_4.json"]


def test_a_folder_that_cannot_be_made_brings_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the folder's place")
    with pytest.warns(RuntimeWarning, match="Profile: .*batches_3_to_6.json cannot be written"):
        end = run("8ba", Profile(tmp_path / "file"))
    assert end.timestamp.batch == 8
