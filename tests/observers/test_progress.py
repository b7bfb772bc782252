"""The display: correct contents, where it writes, and that it restores the terminal."""

import gc
import io
import re
import types

import pytest
import torch

from purecompose import (
    Checkpoints,
    Evaluator,
    Event,
    State,
    algorithms,
    compose,
    evaluate,
    fit,
    loop_events,
    losses,
    metrics,
    optim,
    population,
)
from purecompose.observers import History, Progress, progress
from tests.observers.observer_helpers import at, make_batches, make_population, make_state


HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def run(progress: Progress, duration: str = "3ep", **options: object) -> State:
    step, evaluator = compose(loop_events), Evaluator(make_batches(), {"accuracy": metrics.accuracy})
    return fit(step, make_state(duration), make_batches(), evaluate=evaluator, observers=[progress], **options)  # type: ignore[arg-type]


def test_without_a_terminal_there_is_a_plain_line_for_each_epoch() -> None:
    file = io.StringIO()
    end = run(Progress(file=file))
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["1.0/3 ep", "2.0/3 ep", "3.0/3 ep"]
    assert "\x1b" not in file.getvalue()
    accuracy = evaluate(end, make_batches(), {"accuracy": metrics.accuracy})["accuracy"]
    assert f"accuracy {accuracy:.1%}" in lines[-1]
    assert re.search(r"[\d.]+ ba/s  [\d.]+ s$", lines[-1])


def test_a_run_begins_with_what_methods_have_replaced() -> None:
    file, dropout = io.StringIO(), torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.1))
    step = compose(loop_events, [algorithms.gyro_dropout(0.5, 4, 2)])
    state = State.create(dropout, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), batches_per_epoch=4)
    fit(step, state, make_batches(), duration="1ep", observers=[Progress(file=file)])
    assert file.getvalue().splitlines()[0] == "gyro_dropout: modules replaced: 1 (1)"


def test_the_loss_is_a_running_mean() -> None:
    file, history = io.StringIO(), History()
    fit(compose(loop_events), make_state(), make_batches(), observers=[Progress(file=file), history])
    first, *rest = history.series("loss")[1]
    mean = first
    for loss in rest:
        mean += 0.05 * (loss - mean)
    assert f"loss {mean:.3f}" in file.getvalue().splitlines()[-1]


def test_a_run_that_was_at_its_end_has_no_line(tmp_path) -> None:
    checkpoints = Checkpoints(tmp_path, background=False)
    run(Progress(file=io.StringIO()), checkpoints=checkpoints)
    file = io.StringIO()
    run(Progress(file=file), checkpoints=checkpoints, resume="auto")
    assert file.getvalue() == ""
    run(Progress(file=file), "4ep", checkpoints=checkpoints, resume="auto")
    assert [line.split("  ")[0] for line in file.getvalue().splitlines()] == ["4.0/4 ep"]


def test_every_evaluation_has_its_line_with_all_evaluators() -> None:
    file = io.StringIO()
    share = {"accuracy": metrics.accuracy}
    evaluators = [Evaluator(make_batches(1), share, "1ep"), Evaluator(make_batches(1), share, "2ba", label="val")]
    fit(compose(loop_events), make_state("1ep"), make_batches(4), evaluate=evaluators, observers=[Progress(file=file)])
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["0.5/1 ep", "1.0/1 ep", "1.0/1 ep"]
    assert "val accuracy" in lines[0]
    assert "eval accuracy" in lines[-1] and "val accuracy" in lines[-1]


@pytest.mark.parametrize(("epoch", "lines"), [(100, [30, 60, 90]), (20, [20, 40, 60, 80]), (70, [30, 60, 70])])
def test_lines_come_seldom_within_an_epoch(monkeypatch, epoch: int, lines: list[int]) -> None:
    now, file = [0.0], io.StringIO()
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    shown, state = Progress(file=file), make_state("100ba")
    shown(Event.FIT_START, at(state, 0))
    for batch in range(1, 100):
        now[0] += 1.0
        shown(Event.BATCH_END, at(state, batch))
        if batch % epoch == 0:
            shown(Event.EPOCH_CHECKPOINT, at(state, batch))
    assert [int(line.partition("/")[0]) for line in file.getvalue().splitlines()] == lines


def test_a_run_without_a_length_of_its_own_counts_batches() -> None:
    file = io.StringIO()
    progress = Progress(file=file)
    state = make_state(None)
    for batch in make_batches():
        state = compose(loop_events)(state, batch)
        progress(Event.BATCH_END, state)
    progress(Event.FIT_END, state)
    assert file.getvalue().startswith("4 ba  loss ")


def test_a_live_display_shows_the_run_and_closes() -> None:
    file = io.StringIO()
    run(Progress(live=True, file=file))
    text = file.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "3.0/3 ep" in plain and "trained" in plain and "accuracy" in plain and "ba/s" in plain
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    assert text.rindex(SHOW_CURSOR) > text.rindex("3.0/3 ep")


def failing(event: Event, state: State) -> None:
    if event is Event.BATCH_END and state.timestamp.batch == 5:
        raise RuntimeError("the fifth batch")


def run_to_failure(progress: Progress) -> None:
    with pytest.raises(RuntimeError, match="the fifth batch"):
        fit(compose(loop_events), make_state(), make_batches(), observers=[progress, failing])


def test_after_an_exception_the_with_block_restores_the_terminal() -> None:
    file = io.StringIO()
    with Progress(live=True, file=file) as progress:
        run_to_failure(progress)
        assert SHOW_CURSOR not in file.getvalue()
    assert file.getvalue().count(SHOW_CURSOR) == 1


def test_after_an_exception_dropping_the_display_restores_the_terminal() -> None:
    file = io.StringIO()
    progress = Progress(live=True, file=file)
    run_to_failure(progress)
    del progress
    gc.collect()
    assert file.getvalue().count(SHOW_CURSOR) == 1


def test_a_populations_numbers_are_shown_as_ranges() -> None:
    file, history = io.StringIO(), History()
    step, evaluator = population(compose(loop_events), 3), Evaluator(make_batches(), {"accuracy": metrics.accuracy})
    observers = [Progress(file=file), history]
    fit(step, make_population(3), make_batches(), duration="1ep", evaluate=evaluator, observers=observers)
    mean, *rest = (torch.tensor(losses) for losses in history.series("loss")[1])
    for loss in rest:
        mean = mean.lerp(loss, 0.05)
    accuracies = history.series("eval/accuracy")[1][-1]
    assert f"loss {mean.min():.3f}..{mean.max():.3f}  " in file.getvalue()
    assert f"accuracy {min(accuracies):.1%}..{max(accuracies):.1%}  " in file.getvalue()  # type: ignore[call-overload]


@pytest.mark.parametrize(("batch_seconds", "left"), [(1.0, "58 s"), (60.0, "58 min"), (150.0, "2 h 25 min")])
def test_a_resumed_run_shows_the_time_that_the_rest_takes(monkeypatch, batch_seconds: float, left: str) -> None:
    now, file = [0.0], io.StringIO()
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    shown, state = Progress(file=file), make_state("100ba")
    shown(Event.FIT_START, at(state, 40))
    for batch in (41, 42):
        now[0] += batch_seconds
        shown(Event.BATCH_END, at(state, batch))
    shown(Event.EPOCH_CHECKPOINT, at(state, 42))
    last = file.getvalue().splitlines()[-1]
    assert last.startswith("42/100 ba") and last.endswith(f" s  {left} left")
