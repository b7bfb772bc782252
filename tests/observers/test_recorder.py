"""The recorder: contents of records, when they are handed over, and that nothing waits or is lost."""

import gc
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from purecompose import (
    Evaluator,
    Event,
    State,
    compose,
    evaluate,
    fit,
    loop_events,
    metrics,
    optim,
    schedule,
    stack_states,
)
from purecompose.observers import History, NaNs, Progress, Recorder, learning_rate, memory, progress, speed
from purecompose.observers.recorder import Due
from purecompose.time import RunLength, Timestamp
from tests.observers.observer_helpers import Kept, at, count_reads, make_batches, make_state


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


def due_batches(every: object, points: list[Timestamp], start: Timestamp | None = None) -> list[int]:
    due = Due(every, "every")  # type: ignore[arg-type]
    if start is not None:
        due.start(start)
    return [point.batch for point in points if due(point)]


def walk(batches: int, run: RunLength, samples: int = 8) -> list[Timestamp]:
    points = [Timestamp(run=run)]
    for _ in range(batches):
        points.append(points[-1].advance(samples, tokens=3 * samples))
    return points[1:]


@given(st.integers(1, 7), st.integers(0, 20))
def test_multiples_of_batches_are_due_wherever_the_run_resumes(every: int, start: int) -> None:
    points = walk(40, RunLength())
    first = points[start - 1] if start else Timestamp()
    expected = [batch for batch in range(start + 1, 41) if batch % every == 0]
    assert due_batches(every, points[start:], first) == expected
    assert due_batches(f"{every}ba", points[start:]) == expected  # in a loop that fires no FIT_START


def test_fractions_of_the_run_are_due_in_its_batches() -> None:
    assert due_batches("0.1dur", walk(50, RunLength("50ba"))) == list(range(5, 51, 5))
    with pytest.raises(ValueError, match="need a run with a duration"):
        due_batches("0.1dur", walk(1, RunLength()))


def test_records_are_those_of_the_hand_written_loop() -> None:
    batches, step, history = make_batches(), compose(loop_events), History()
    end = fit(step, make_state(), batches, observers=[history])
    state, expected = make_state(), []
    for epoch in range(3):
        for index, batch in enumerate(batches):
            state = step(state, batch)
            assert state.loss is not None
            gone_by = epoch + (index == len(batches) - 1)
            expected.append({"batch": 4 * epoch + index + 1, "epoch": gone_by, "loss": state.loss.item()})
    assert history.records == expected
    assert all(torch.equal(end.params[name], state.params[name]) for name in state.params)


def test_evaluations_have_records_under_their_label() -> None:
    batches, history = make_batches(), History()
    evaluators = [
        Evaluator(batches, {"accuracy": metrics.accuracy}),
        Evaluator(batches[:1], {"accuracy": metrics.accuracy}, every="2ep", label="small"),
    ]
    end = fit(compose(loop_events), make_state(), batches, evaluate=evaluators, observers=[history])
    assert history.series("eval/accuracy")[0] == [4, 8, 12]
    assert history.series("small/accuracy")[0] == [8, 12]  # the last one at FIT_END
    expected = evaluate(end, batches, {"accuracy": metrics.accuracy})["accuracy"]
    assert history.series("eval/accuracy")[1][-1] == expected
    [record] = [record for record in history.records if "small/accuracy" in record and record["batch"] == 8]
    assert list(record) == ["batch", "epoch", "small/accuracy"]


def test_unread_values_are_bounded_and_right() -> None:
    history, state = History(), make_state()
    for value in range(2500):
        history(Event.BATCH_END, state.replace(loss=torch.tensor(float(value))))
    unread = sum(isinstance(record["loss"], torch.Tensor) for record in history._records)
    assert unread <= 1000
    assert history.series("loss")[1] == [float(value) for value in range(2500)]


def test_records_do_not_follow_a_loss_that_is_written_over() -> None:
    history, loss = History(), torch.tensor(1.0)
    history(Event.BATCH_END, make_state().replace(loss=loss))
    loss.fill_(2.0)
    assert history.series("loss")[1] == [1.0]


def test_metrics_of_several_kinds_become_plain_numbers() -> None:
    history = History()
    state = make_state().replace(
        loss=None, metrics={"kept": torch.tensor(5), "norm": torch.tensor(0.5, dtype=torch.float64)}
    )
    history(Event.BATCH_END, state)
    history(Event.EPOCH_START, state)
    assert history.records == [{"batch": 0, "epoch": 0, "kept": 5, "norm": 0.5}]
    assert type(history.records[0]["kept"]) is int


@pytest.mark.parametrize("event", [Event.BATCH_END, Event.EVAL_END])
@pytest.mark.parametrize("num_members", [None, 2])
def test_a_metric_that_is_not_a_single_number_is_skipped_with_one_warning(
    event: Event, num_members: int | None
) -> None:
    state = make_state()
    if num_members is not None:
        state = stack_states([state] * num_members)
    members = state.key.shape[:-1]
    metrics = {"by_class": torch.zeros(*members, 3), "mean": torch.zeros(members)}
    state = state.replace(metrics=metrics, loss=None, timestamp=state.timestamp.advance(4))
    for observer in (History(), Recorder(Kept())):
        with pytest.warns(
            UserWarning, match=r"metric 'by_class' is left out .* got a tensor of shape \(3,\)"
        ) as caught:
            observer(event, state)
            observer(event, state)
        assert len(caught) == 1


def recorder(**options: Any) -> Recorder:
    return Recorder(Kept(), group=1000, **options)


@pytest.mark.parametrize(
    ("make", "num_reads"),
    [
        (History, 0),
        (recorder, 3),  # one for each of the three epochs
        # One group of losses and of rates for each epoch; the speed's stopwatch waits at FIT_END.
        (lambda: recorder(monitors=[learning_rate(), memory(), speed()]), 4),
        (NaNs, 3),
        # The first batch, the ends of the epochs and of the run.
        (lambda: Progress(file=io.StringIO()), 7),
    ],
    ids=["history", "recorder", "monitors", "nans", "progress"],
)
def test_values_are_read_once_an_epoch(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], num_reads: int
) -> None:
    monkeypatch.setattr("purecompose.observers.diagnosis._SECONDS", math.inf)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_READS", math.inf)
    state, read = (
        make_state("60ba", optim.sgd(schedule.hparam("lr", 0.5) * schedule.linear())),
        count_reads(monkeypatch),
    )
    fit(compose(loop_events), state, make_batches(20))
    without = len(read)
    read.clear()
    fit(compose(loop_events), state, make_batches(20), observers=make())
    assert len(read) - without <= num_reads
