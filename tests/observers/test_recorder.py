"""The recorder: contents of records, when they are handed over, and that nothing waits or is lost."""

import gc
from typing import Any

import pytest
import torch

from purecompose import Evaluator, Event, State, compose, fit, loop_events, metrics, population
from purecompose.observers import Recorder
from tests.observers.observer_helpers import at, make_batches, make_population, make_state


class Groups:
    """A sink that remembers its calls."""

    def __init__(self) -> None:
        self.groups: list[list[dict[str, Any]]] = []
        self.calls: list[Any] = []

    def begin(self, batch: int) -> None:
        self.calls.append(batch)

    def write(self, records: list[dict[str, Any]]) -> None:
        self.groups.append(records)

    def close(self) -> None:
        self.calls.append("close")

    @property
    def records(self) -> list[dict[str, Any]]:
        return [record for group in self.groups for record in group]


def test_a_populations_numbers_are_lists() -> None:
    sink = Groups()
    evaluator = Evaluator(make_batches(), {"accuracy": metrics.accuracy})
    step = population(compose(loop_events), 3)
    fit(step, make_population(3), make_batches(), evaluate=evaluator, observers=Recorder(sink, every="4ba"))
    assert [sorted(record.keys() - {"batch", "epoch", "time/sample"}) for record in sink.records] == [
        ["loss"],
        ["eval/accuracy"],
    ] * 3
    assert all(len(record["loss"]) == 3 and len(set(record["loss"])) == 3 for record in sink.records[::2])


def test_slow_batches_are_handed_over_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("purecompose.observers.recorder.time.monotonic", lambda: now[0])
    sink = Groups()
    recorder = Recorder(sink, seconds=10)
    for batch in range(1, 6):
        recorder(Event.BATCH_END, at(make_state(), batch))
        now[0] += 4
    assert [len(group) for group in sink.groups] == [4]
    recorder.close()


def test_an_exception_loses_nothing() -> None:
    def failing(event: Event, state: State) -> None:
        if event is Event.BATCH_END and state.timestamp.batch == 3:
            raise RuntimeError("the third batch")

    sink = Groups()
    with pytest.raises(RuntimeError, match="the third batch"), Recorder(sink) as recorder:
        fit(compose(loop_events), make_state(), make_batches(), observers=[recorder, failing])
    assert [record["batch"] for record in sink.records] == [1, 2, 3] and sink.calls == [0, "close"]

    dropped = Groups()
    recorder = Recorder(dropped)
    recorder(Event.BATCH_END, at(make_state(), 1, loss=torch.tensor(2.0)))
    del recorder
    gc.collect()
    assert [record["loss"] for record in dropped.records] == [2.0] and dropped.calls == [0, "close"]


def test_a_recorder_serves_several_runs_and_a_users_loop() -> None:
    sink = Groups()
    recorder, step = Recorder(sink), compose(loop_events)
    end = fit(step, make_state("1ep"), make_batches(), observers=recorder)
    fit(step, end, make_batches(), duration="2ep", observers=recorder)
    assert sink.calls == [0, 4]
    recorder.close()
    assert sink.calls == [0, 4, "close"]
    recorder(Event.BATCH_END, step(end, make_batches()[0]))
    assert sink.calls == [0, 4, "close", 4]
    recorder.close()
    assert [record["batch"] for record in sink.records] == [1, 2, 3, 4, 5, 6, 7, 8, 5]


def test_numbers_of_monitors_are_in_the_records_of_due_batches() -> None:
    asked = []

    def weight(state: State) -> dict[str, Any]:
        asked.append(state.timestamp.batch)
        return {"weight": state.params["weight"].sum(), "two": 2, "batch": -1}

    sink = Groups()
    end = fit(
        compose(loop_events), make_state(), make_batches(), observers=Recorder(sink, every="6ba", monitors=weight)
    )
    assert asked == [6, 12]
    assert [record["batch"] for record in sink.records] == [6, 12]
    assert sink.records[-1]["weight"] == end.params["weight"].sum().item()
    assert sink.records[-1]["two"] == 2


def test_monitors_with_observe_get_every_event() -> None:
    class Watching:
        def __init__(self) -> None:
            self.seen: list[Event] = []

        def observe(self, event: Event, state: State) -> None:
            self.seen.append(event)

        def __call__(self, state: State) -> dict[str, Any]:
            return {"seen": len(self.seen)}

    sink, watching, seen = Groups(), Watching(), []
    recorder = Recorder(sink, monitors=[watching])
    fit(compose(loop_events), make_state("1ep"), make_batches(), observers=[recorder, lambda e, _: seen.append(e)])
    assert watching.seen == seen
    # `observe` is called before the monitor's number is requested.
    assert sink.records[0]["seen"] == seen.index(Event.BATCH_END) + 1


def test_a_sink_that_fails_is_tried_again_with_all_that_waits() -> None:
    class Flaky(Groups):
        works = False

        def write(self, records: list[dict[str, Any]]) -> None:
            if not self.works:
                raise OSError("no network")
            super().write(records)

    sink = Flaky()
    recorder = Recorder(sink, group=2)
    with pytest.warns(RuntimeWarning, match="no network") as warned:
        for batch in range(1, 8):
            recorder(Event.BATCH_END, at(make_state(), batch))
    assert len(warned) == 1
    sink.works = True
    recorder.flush()
    assert [record["batch"] for record in sink.records] == [1, 2, 3, 4, 5, 6, 7]
    recorder.flush()
    assert len(sink.groups) == 1
