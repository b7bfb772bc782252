"""Files of records: their contents after every kind of end and when a run is resumed."""

import errno
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from purecompose import Checkpoints, Evaluator, Event, State, compose, fit, loop_events, metrics
from purecompose.observers import History, Records, read_records, records as files
from tests.observers.observer_helpers import at, make_batches, make_state


def run(path: Path, state: State | None = None, duration: str = "3ep", **options: Any) -> State:
    evaluator = Evaluator(make_batches(), {"accuracy": metrics.accuracy})
    with Records(path, **options) as records:
        return fit(
            compose(loop_events),
            state or make_state(),
            make_batches(),
            duration=duration,
            evaluate=evaluator,
            observers=records,
        )


def no_constants(name: str) -> None:
    raise AssertionError(f"{name} is not valid JSON")


def test_a_file_holds_the_runs_records(tmp_path: Path) -> None:
    history = History()
    evaluator = Evaluator(make_batches(), {"accuracy": metrics.accuracy})
    records = Records(tmp_path / "deep" / "er" / "run.jsonl", group=3)
    fit(compose(loop_events), make_state(), make_batches(), evaluate=evaluator, observers=[history, records])
    found = read_records(records.path)
    assert [r.pop("time/sample") for r in found] == [8 * r["batch"] for r in history.records]
    assert found == history.records  # to the last bit, and ints as ints
    assert all(type(r["batch"]) is int for r in found)


def test_a_run_resumed_after_a_kill_ends_with_the_file_of_an_unbroken_run(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    run(whole)
    middle = run(killed, duration="5ba")  # the state of a checkpoint after batch 5
    run(killed, middle)
    text = killed.read_bytes()
    # Killed in the middle of a line, some batches after the checkpoint.
    lines = text.splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if b"9" in line.split(b",")[0])
    killed.write_bytes(b"".join(lines[:place]) + lines[place][:-5])
    assert max(record["batch"] for record in read_records(killed)) == 8
    run(killed, middle)
    extra = {"batch": 5, "epoch": 1, "time/sample": 40}  # the evaluation at the end of the first fit
    found = read_records(killed)
    [evaluation] = [r for r in found if r["batch"] == 5 and "eval/accuracy" in r]
    assert {name: evaluation[name] for name in extra} == extra
    assert [record for record in found if record is not evaluation] == read_records(whole)


def test_an_evaluation_that_is_already_recorded_is_not_written_twice(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run(path, duration="1ep")
    before = read_records(path)
    records = Records(path)
    again = at(make_state(), 4, metrics={"eval/accuracy": torch.tensor(0.5)})
    records(Event.FIT_START, again)
    records(Event.EVAL_END, again)
    other = again.replace(metrics={"small/accuracy": torch.tensor(0.5)})
    records(Event.EVAL_END, other)
    records.close()
    assert read_records(path)[:-1] == before and "small/accuracy" in read_records(path)[-1]


def test_a_new_run_renames_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    texts = []
    for duration in ("1ba", "2ba", "3ba"):
        run(path, duration=duration)
        texts.append(path.read_bytes())
    assert (tmp_path / "run.1.jsonl").read_bytes() == texts[0]
    assert (tmp_path / "run.2.jsonl").read_bytes() == texts[1]
    assert len(list(tmp_path.iterdir())) == 3


def test_an_evaluation_before_training_is_part_of_the_run(tmp_path: Path) -> None:
    records, state = Records(tmp_path / "run.jsonl"), make_state()
    records(Event.EVAL_END, state.replace(metrics={"eval/accuracy": torch.tensor(0.25)}))
    records.flush()
    fit(compose(loop_events), state, make_batches(), duration="1ba", observers=records)
    assert [record["batch"] for record in read_records(records.path)] == [0, 1]


def test_json_is_strict_and_represents_numbers_that_are_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Records(path) as records:
        for batch, loss in enumerate((1.5, math.nan, math.inf, -math.inf), start=1):
            records(Event.BATCH_END, at(make_state(), batch, loss=torch.tensor(loss)))
    lines = [json.loads(line, parse_constant=no_constants) for line in path.read_text().splitlines()]
    assert [line["loss"] for line in lines] == [1.5, "nan", "inf", "-inf"]
    losses = [record["loss"] for record in read_records(path)]
    assert losses[0] == 1.5 and math.isnan(losses[1]) and losses[2:] == [math.inf, -math.inf]


numbers = st.integers(-(2**63), 2**63) | st.floats() | st.booleans()
names = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x00"), min_size=1).filter(
    lambda name: name not in ("batch", "epoch")
)
values = st.dictionaries(names, numbers | st.lists(numbers, min_size=1, max_size=3), max_size=4)


@given(records=st.lists(values, max_size=6), cuts=st.sets(st.integers(0, 6)))
def test_any_records_come_back(tmp_path_factory: Any, records: list[dict[str, Any]], cuts: set[int]) -> None:
    """The numbers, the names and the number of groups are arbitrary."""
    path = tmp_path_factory.mktemp("records") / "run.jsonl"
    records = [{"batch": batch, "epoch": 0, **record} for batch, record in enumerate(records)]
    places = sorted({0, *cuts, len(records)})
    sink = files._File(path)
    sink.begin(-1)
    for start, end in zip(places, places[1:], strict=False):
        sink.write(records[start:end])
    if not records:
        path.touch()
    # repr tells -0.0 from 0.0, True from 1, and finds NaN equal to itself.
    assert repr([sorted(r.items()) for r in read_records(path)]) == repr([sorted(r.items()) for r in records])


class FullFile:
    """A file on a full disk: one write is partial, and the next ones write nothing."""

    def __init__(self, file: Any, disk: dict[str, int]) -> None:
        self.file, self.disk = file, disk

    def write(self, data: Any) -> int:
        part = bytes(data)[: self.disk["room"]]
        if len(data) and not part:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.disk["room"] -= len(part)
        return self.file.write(part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "FullFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return a dictionary that sets the number of bytes that the disk has room for."""
    found = {"room": 10**9}
    original = Path.open

    def opened(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = original(path, mode, *arguments, **options)
        return FullFile(file, found) if mode in ("ab", "wb") else file

    monkeypatch.setattr(files.Path, "open", opened)
    return found


@pytest.mark.parametrize("room", [0, 7, 150])
def test_a_full_disk_brings_one_warning_and_training_goes_on(tmp_path: Path, disk: dict[str, int], room: int) -> None:
    path = tmp_path / "run.jsonl"
    disk["room"] = room
    with pytest.warns(RuntimeWarning, match="No space left on device. Training continues") as warned:
        state = run(path, group=2)
    assert len(warned) == 1
    assert state.timestamp.batch == 12
    text = path.read_bytes() if path.exists() else b""
    assert len(text) <= room and (not text or text.endswith(b"\n"))  # nothing half-written


def test_a_file_that_holds_no_records_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("milk\nbread\n")
    with pytest.raises(ValueError, match=r"notes.*line 1.*expected a record of a run, got 'milk'"):
        Records(path)(Event.FIT_START, at(make_state(), 8))
    with pytest.raises(ValueError, match="line 1"):
        read_records(path)
    assert path.read_text() == "milk\nbread\n"


@pytest.mark.parametrize(
    "line, expected",
    [
        ('{"batch": 2, "loss": 1.0}', "epoch: expected a whole number, got None"),
        ('{"batch": true, "epoch": 0}', "batch: expected a whole number, got True"),
        ('{"batch": 2, "epoch": 0, "loss": [[1.0]]}', "loss: expected a number, or a list of numbers"),
        ('{"batch": 2, "epoch": 0, "loss": "low"}', "loss: expected a number"),
        ('{"batch": 2, "epoch": 0, "loss": null}', "loss: expected a number"),
        ('{"level": "INFO", "message": "started"}', "batch: expected a whole number, got None"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_line_that_is_not_a_record_is_named(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(f'{{"batch": 1, "epoch": 0, "loss": NaN}}\n{line}\n')
    with pytest.raises(ValueError, match=r"run.jsonl, line 2: expected a record of a run") as caught:
        read_records(path)
    assert expected in str(caught.value)


def test_a_second_run_syncs_its_records_after_the_first_ones_samples_were_renamed(tmp_path: Path) -> None:
    records = Records(tmp_path / "run.jsonl", every="1ba", monitors=lambda state: {"text": "first"})
    fit(compose(loop_events), make_state(), make_batches(), duration="2ep", observers=records)  # no checkpoint: no sync
    kept = Checkpoints(tmp_path / "checkpoints", every="1ba", background=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(compose(loop_events), make_state(), make_batches(), duration="1ep", observers=records, checkpoints=kept)
    assert (tmp_path / "run.1.samples").is_dir()
