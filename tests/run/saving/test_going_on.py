"""What a resumed run restores from its checkpoint, and the messages where it cannot."""

import json
import pathlib
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Algorithm, Checkpoints, Evaluator, Event, State, compose, fit, loop_events, on, training
from purecompose.errors import CheckpointError, CheckpointWarning, MismatchError
from purecompose.run.saving import folder as disk
from tests.helpers import assert_same, changing, make_batches, make_mlp, make_state


BATCHES = make_batches(4)


def start(**options: Any) -> State:
    return make_state(make_mlp(dropout=0.3), key=3, duration="3ep", **options)


def metrics_in(folder: pathlib.Path) -> dict[str, float]:
    """Return the metric of each checkpoint."""
    indexes = {path.name: json.loads((path / "index.json").read_text()) for path in sorted(folder.iterdir())}
    return {name: index["metrics"].get("eval/score") for name, index in indexes.items()}


def scores(values: list[float]) -> Evaluator:
    """Return an evaluator with these results, one after the other."""
    return Evaluator(BATCHES[:1], {"score": lambda outputs, targets: torch.tensor(values.pop(0))})


def best(folder: pathlib.Path, **options: Any) -> Checkpoints:
    return Checkpoints(folder, keep=1, best="eval/score", mode="max", background=False, **options)


def test_a_finished_run_keeps_the_metrics_of_its_end(tmp_path: pathlib.Path) -> None:
    halve = changing("halve", Event.FIT_END, lambda state: state.replace(buffers=state.buffers))
    step = compose(loop_events, [halve])
    fit(step, start(), BATCHES, evaluate=scores([0.5, 0.6, 0.9, 0.9]), checkpoints=best(tmp_path))
    assert metrics_in(tmp_path) == {"ep0003-ba00000012": pytest.approx(0.9)}
    again = {"evaluate": scores([0.9] * 2), "checkpoints": best(tmp_path), "resume": "auto"}
    fit(step, start(), BATCHES, **again)
    assert metrics_in(tmp_path) == {"ep0003-ba00000012": pytest.approx(0.9)}
    worse = scores([0.3, 0.2, 0.1, 0.1])
    fit(step, start(), BATCHES, duration="6ep", evaluate=worse, checkpoints=best(tmp_path), resume="auto")
    assert metrics_in(tmp_path) == {"ep0003-ba00000012": pytest.approx(0.9), "ep0006-ba00000024": pytest.approx(0.1)}


@pytest.mark.parametrize("is_population", [False, True])
@pytest.mark.parametrize(
    ("shorter", "duration", "longer"),
    [
        ("1ep", "2ep", "3ep"),
        ("5ba", "6ba", "9ba"),
        ("30sp", "50sp", "90sp"),  # batches of 8: it ends at 56
        ("100tok", "200tok", "300tok"),  # 32 in a batch: it ends at 224
    ],
)
def test_a_complete_run_is_complete_in_every_unit(
    shorter: str, duration: str, longer: str, is_population: bool, tmp_path: pathlib.Path
) -> None:
    batches = [{"input_ids": inputs, "labels": targets} for inputs, targets in BATCHES]
    step: Any = compose(loop_events)

    def run(length: str, **options: Any) -> State:
        keys = {"input_field": "input_ids", "target_field": "labels"}
        states = [make_state(make_mlp(dropout=0.3), key=key, duration=length, **keys) for key in (3, 4)]
        first = pc.stack_states(states) if is_population else states[0]
        return fit(pc.population(step, 2) if is_population else step, first, batches, **options)

    checkpoints = Checkpoints(tmp_path, keep=1, background=False)
    end = run(duration, checkpoints=checkpoints)
    assert_same(run(duration, checkpoints=checkpoints, resume="auto"), end)
    with pytest.raises(MismatchError, match=f"stands past the end of the run.*{shorter} here"):
        run(shorter, checkpoints=checkpoints, resume="auto")
    assert_same(run(longer, checkpoints=checkpoints, resume="auto"), run(longer))


def test_a_checkpoint_that_was_not_written_is_not_the_best(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = disk.write

    def flaky(target: pathlib.Path, *arguments: Any) -> None:
        if "ba00000004" in target.name:
            raise OSError("no space left")
        write(target, *arguments)

    monkeypatch.setattr(disk, "write", flaky)
    with pytest.warns(CheckpointWarning, match="no space left"):
        evaluator = scores([0.9, 0.8, 0.5, 0.5])
        fit(compose(loop_events), start(), BATCHES, evaluate=evaluator, checkpoints=best(tmp_path, every="3ep"))
    assert metrics_in(tmp_path) == {"ep0002-ba00000008": pytest.approx(0.8), "ep0003-ba00000012": pytest.approx(0.5)}


def test_a_manually_saved_state_does_not_fire_the_first_events_again(tmp_path: pathlib.Path) -> None:
    def halved(event: Event, state: State) -> State:
        return state.replace(params={name: value * 0.5 for name, value in state.params.items()})

    step = compose(loop_events, [Algorithm("halved", on(Event.FIT_START), halved)])
    for state in training(step, start(), BATCHES):
        if state.timestamp.batch == 5:
            pc.save(state, tmp_path / "mine", step=step)
            break
    assert_same(fit(step, start(), BATCHES, resume=tmp_path / "mine"), fit(step, start(), BATCHES))


def cut(step: Any, first: State, folder: pathlib.Path, **options: Any) -> Checkpoints:
    """Return the checkpoints of a run that ended after five batches."""
    settings = Checkpoints(folder, every="1ba", background=False)
    for state in training(step, first, BATCHES, checkpoints=settings, **options):
        if state.timestamp.batch == 5:
            break
    return settings


def with_rate(rate: float) -> State:
    return make_state(make_mlp(), duration="3ep", optimizer=pc.optim.sgd(pc.hparam("rate", rate)))


def test_the_checkpoints_hparams_are_used_with_a_message(tmp_path: pathlib.Path) -> None:
    step = compose(loop_events)
    settings = cut(step, with_rate(0.1), tmp_path)
    with pytest.warns(CheckpointWarning, match=r"hparam 'rate': 0.001 here is not taken over"):
        state = fit(step, with_rate(0.001), BATCHES, checkpoints=settings, resume="auto")
    assert state.hparams["rate"].item() == pytest.approx(0.1)
    replaced = with_rate(0.1).replace(hparams={"rate": 0.5})
    with pytest.warns(CheckpointWarning, match=r"hparam 'rate': 0.5 here"):
        fit(step, replaced, BATCHES, duration="4ep", checkpoints=settings, resume="auto")


def test_hparams_that_changed_during_the_run_are_not_a_difference(tmp_path: pathlib.Path) -> None:
    moving = changing("moving", Event.BATCH_END, lambda s: s.replace(hparams={"rate": s.hparams["rate"] * 0.9}))
    step = compose(loop_events, [moving])
    settings = cut(step, with_rate(0.1), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = fit(step, with_rate(0.1), BATCHES, checkpoints=settings, resume="auto")
    assert_same(state, fit(step, with_rate(0.1), BATCHES))


def test_a_found_number_of_microbatches_that_is_not_used_is_reported(tmp_path: pathlib.Path) -> None:
    def small(event: Event, state: State) -> State:
        if len(state.inputs) > 4:
            raise RuntimeError("out of memory")
        return state

    wide = compose(loop_events, [Algorithm("narrow", on(Event.BEFORE_FORWARD), lambda event, state: state)])
    narrow = compose(loop_events, [Algorithm("narrow", on(Event.BEFORE_FORWARD), small)])
    with pytest.warns(UserWarning, match="cut into 2 microbatches"):
        settings = cut(narrow, start(), tmp_path, microbatches="auto")
    with pytest.warns(CheckpointWarning, match="microbatches: 2 in the checkpoint, 1 here"):
        fit(wide, start(), BATCHES, checkpoints=settings, resume="auto")


def test_a_checkpoint_of_a_later_version_is_not_called_damaged(tmp_path: pathlib.Path) -> None:
    step = compose(loop_events)
    fit(step, start(), BATCHES, checkpoints=Checkpoints(tmp_path, background=False))
    index = max(tmp_path.glob("*/index.json"))
    index.write_text(index.read_text().replace('"version": 1', '"version": 2'))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="version 2"):
        fit(step, start(), BATCHES, checkpoints=Checkpoints(tmp_path), resume="auto")
    assert sorted(tmp_path.iterdir()) == before


def test_a_relative_folder_does_not_follow_the_working_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    states = training(compose(loop_events), start(), BATCHES, checkpoints=Checkpoints("mine", keep=1, background=False))
    for state in states:
        if state.timestamp.batch == 5:
            monkeypatch.chdir(tmp_path / "elsewhere")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["ep0003-ba00000012"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_end_that_is_due_twice_causes_no_warning(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = disk.write

    def slow(*arguments: Any) -> None:
        time.sleep(0.2)
        write(*arguments)

    monkeypatch.setattr(disk, "write", slow)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = Checkpoints(tmp_path, every="3ep")
        fit(compose(loop_events), start(), BATCHES, evaluate=Evaluator(BATCHES[:1]), checkpoints=settings)
    assert metrics_in(tmp_path).keys() == {"ep0003-ba00000012"}


# Signals


def test_a_signal_during_the_last_write_waits_for_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = disk.write

    def interrupted(target: pathlib.Path, *arguments: Any) -> None:
        if "ba00000012" in target.name:
            signal.raise_signal(signal.SIGTERM)
        write(target, *arguments)

    monkeypatch.setattr(disk, "write", interrupted)
    with pytest.raises(SystemExit) as caught:
        fit(compose(loop_events), start(), BATCHES, checkpoints=Checkpoints(tmp_path))
    assert caught.value.code == 143
    assert "ep0003-ba00000012" in metrics_in(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_data_workers_ended_by_a_signal_lose_no_batch(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    def batches() -> Iterator[Any]:
        yield from BATCHES[:3]
        signal.raise_signal(number)  # it was sent to the whole group of processes
        raise RuntimeError("DataLoader worker exited unexpectedly")

    settings = Checkpoints(tmp_path, every="100ep")
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        fit(compose(loop_events), start(batches_per_epoch=4), batches(), checkpoints=settings)
    assert "ep0000-ba00000003" in str(caught.value) + str(getattr(caught.value, "__notes__", ""))
    assert metrics_in(tmp_path).keys() == {"ep0000-ba00000003"}


class _Interrupting:
    """Data of an evaluation that are interrupted once, at the second batch of the given pass over them."""

    def __init__(self, number: int) -> None:
        self.number, self.num_passes, self.num_read = number, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.num_passes += 1
        for place, batch in enumerate(BATCHES):
            if (self.num_passes, place) == (self.number, 1):
                signal.raise_signal(signal.SIGTERM)
            self.num_read += self.num_passes == self.number
            yield batch


@pytest.mark.parametrize(("every", "number", "batch"), [("1ep", 2, 8), ("3ba", 1, 3), ("2ba", 2, 4)])
def test_a_signal_during_an_evaluation_ends_the_run_after_it(
    every: str, number: int, batch: int, tmp_path: pathlib.Path
) -> None:
    def run(data: Any, folder: str, resume: str | None = None) -> tuple[State, list[Any]]:
        records = pc.observers.Records(tmp_path / f"{folder}.jsonl")
        plateau = pc.ReduceOnPlateau("eval/loss", patience="1ba", min_delta=9.0)
        optimizer = pc.optim.sgd(pc.hparam("lr", 0.1))
        with records:
            state = fit(
                compose(loop_events),
                start(optimizer=optimizer),
                BATCHES,
                evaluate=Evaluator(data, every=every),
                adjust=plateau,
                observers=records,
                checkpoints=Checkpoints(tmp_path / folder, every="4ba", background=False),
                resume=resume,
            )
        return state, pc.observers.read_records(records.path)

    expected, records = run(BATCHES, "whole")
    data = _Interrupting(number)
    with pytest.raises(SystemExit) as caught:
        run(data, "ended")
    assert f"ba{batch:08d}" in caught.value.__notes__[0] and data.num_read == len(BATCHES)
    found, found_records = run(BATCHES, "ended", resume="auto")
    assert_same(found, expected)
    assert found_records == records
    assert metrics_of(tmp_path / "ended") == metrics_of(tmp_path / "whole")


def metrics_of(folder: pathlib.Path) -> dict[str, Any]:
    indexes = {path.name: json.loads((path / "index.json").read_text()) for path in sorted(folder.iterdir())}
    return {name: index["metrics"] for name, index in indexes.items()}
