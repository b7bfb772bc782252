"""Data whose position is not saved: a run says so, and no wrong position is left."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import purecompose as pc
from purecompose import compose, loop_events, tree
from purecompose.data.position import PositionedBatches, has_shuffle_buffer, position_at, position_holder
from purecompose.time import RunLength, Timestamp
from tests.data.test_position import (
    FIELDS,
    INPUTS,
    NUM,
    SIZE,
    TARGETS,
    MapStyle,
    Samples,
    Walk,
    hugging_face,
    run,
    stateful,
)
from tests.helpers import make_state


pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:Cannot (locate reference to|pickle)"),
]


class Strange(Walk):
    """Data whose state no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"order": object()}


def test_what_a_checkpoint_cannot_hold_is_left_out_with_a_warning(tmp_path):
    with pytest.warns(pc.errors.CheckpointWarning, match="the position of the data is not saved"):
        run(Strange([]), "2ba", tmp_path)
    with pytest.warns(pc.data.SkippingWarning, match="read from Strange.*no position of the data is saved"):
        with pytest.warns(pc.errors.CheckpointWarning):
            state = run(Strange([]), "3ba", tmp_path)
    assert state.timestamp.batch == 3


def test_a_missing_position_is_reported_at_the_start_of_an_epoch_too(tmp_path):
    fields = {"batches_per_epoch": 2}
    with pytest.warns(pc.errors.CheckpointWarning, match="not saved"):
        run(Strange([]), "1ep", tmp_path, fields)
    with (
        pytest.warns(pc.errors.CheckpointWarning),
        pytest.warns(pc.data.SkippingWarning, match="no position of the Strange"),
    ):
        run(Strange([]), "2ep", tmp_path, fields)


def test_a_position_that_was_missing_once_is_saved_again(tmp_path):
    class Late(Walk):
        def state_dict(self) -> dict[str, Any]:
            if self.place == SIZE:
                raise OSError("not yet")
            return super().state_dict()

    every = pc.Checkpoints(tmp_path, every="1ba", background=False)
    with pytest.warns(pc.errors.CheckpointWarning, match="OSError: not yet"):
        pc.fit(compose(loop_events), make_state(), Late([]), duration="2ba", checkpoints=every)
    assert run(Late([]), "3ba", tmp_path).timestamp.batch == 3  # without a warning


def test_a_state_dict_without_a_value_is_reported(tmp_path):
    class Empty(Walk):
        def state_dict(self) -> Any:
            return None

    with pytest.warns(pc.errors.CheckpointWarning, match="Empty.state_dict returns None"):
        run(Empty([]), "2ba", tmp_path)


def test_a_shuffle_buffer_is_filled_again_with_a_warning_and_gives_the_same_bits(tmp_path):
    whole = run(hugging_face([], 10), "2ep", tmp_path / "whole", FIELDS)
    run(hugging_face([], 10), "8ba", tmp_path / "parts", FIELDS)
    with pytest.warns(pc.data.SkippingWarning, match="leaves out its shuffle buffer"):
        resumed = run(hugging_face([], 10), "2ep", tmp_path / "parts", FIELDS)
    assert tree.equal(resumed.params, whole.params)


def test_a_shuffle_buffer_is_found_within_other_streams():
    datasets = pytest.importorskip("datasets", reason="tests a stream of Hugging Face")
    ordered, shuffled = hugging_face([]).dataset, hugging_face([], 10).dataset
    mixed = datasets.interleave_datasets([ordered, shuffled]).map(lambda row: row).take(9)
    assert has_shuffle_buffer(mixed) and has_shuffle_buffer(DataLoader(mixed, SIZE)) and not has_shuffle_buffer(ordered)


def test_the_order_of_later_epochs_is_not_promised_if_a_loader_has_its_own_generator(tmp_path):
    def make() -> Any:
        return stateful(MapStyle([]), shuffle=True, generator=torch.Generator().manual_seed(5))

    whole = run(make(), "1ep", tmp_path / "whole")
    run(make(), "2ba", tmp_path / "parts")
    with pytest.warns(pc.data.SkippingWarning, match="own generator"):
        resumed = run(make(), "1ep", tmp_path / "parts")
    assert tree.equal(resumed.params, whole.params)


def test_loaders_that_may_have_read_ahead_have_no_position():
    class Ahead(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter(list(super().__iter__()))

    samples = Samples([])
    assert position_holder(DataLoader(samples, SIZE)) is samples
    assert position_holder(Ahead(samples, SIZE)) is None
    assert position_holder(DataLoader(samples, SIZE, num_workers=1)) is None


def test_an_evaluator_may_not_move_the_position_that_is_saved(tmp_path):
    data, samples = Walk([]), Samples([])
    with pytest.raises(ValueError, match="'eval' uses the same Walk"):
        run(data, "2ba", tmp_path, evaluate=pc.Evaluator(data))
    with pytest.raises(ValueError, match="'eval' uses the same Samples"):
        run(DataLoader(samples, 4), "2ba", tmp_path, evaluate=pc.Evaluator(DataLoader(samples, 2)))
    pc.fit(compose(loop_events), make_state(), data, duration="2ba", evaluate=pc.Evaluator(data, num_batches=1))


# Positions that would be wrong


def two_read(data: Any) -> PositionedBatches:
    """Return the batches of an epoch after the first two."""
    batches = PositionedBatches(data, data, pc.random.key(0), 0, 0, None)
    assert len([next(batches) for _ in range(2)]) == batches.num_returned == 2
    return batches


def test_a_position_is_that_of_the_state_or_none():
    batches, start = two_read(Walk([])), Timestamp(run=RunLength(batches_per_epoch=6))
    saved = position_at(batches, start, start.advance_by(2))
    assert saved is not None and saved["state"]["place"] == 8 and not saved["is_over"]
    assert position_at(batches, start, start.advance_by(1)) is None


class Breaking(Walk):
    """Data that cannot read their third batch, but have moved."""

    error: BaseException = OSError("the reader was killed")

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number == 2:
                raise self.error
            yield batch


def test_an_error_of_reading_ahead_ends_only_a_run_that_needs_the_batch(tmp_path):
    with pytest.warns(pc.errors.CheckpointWarning, match="not saved.*the reader was killed"):
        assert run(Breaking([]), "2ba", tmp_path / "a").timestamp.batch == 2
    with pytest.raises(OSError, match="the reader was killed"):
        run(Breaking([]), "3ba", tmp_path / "b")


def test_each_further_request_raises_the_error():
    batches = two_read(Breaking([]))
    for _ in range(2):
        with pytest.raises(OSError, match="killed"):
            batches.position(is_over=None)
        with pytest.raises(OSError, match="killed"):
            next(batches)
    saved = batches.position(is_over=False)  # what the data returned before they moved
    assert saved is not None and saved["state"]["place"] == 8


@pytest.mark.parametrize("error", [OSError("killed"), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_no_position_is_taken_after_a_batch_that_could_not_be_read(error):
    data = Breaking([])
    data.error = error
    batches = two_read(data)
    with pytest.raises(type(error)):
        next(batches)
    with pytest.raises(Exception, match="killed|interrupted"):
        batches.position(is_over=False)


class Killed(IterableDataset):
    """A stream whose process is killed at its third batch, once a file exists."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __iter__(self) -> Any:
        for number in range(NUM):
            if number == 2 * SIZE and self.file.parent.exists():
                while not self.file.exists():
                    time.sleep(0.01)
                time.sleep(0.2)  # until the batch is waited for
                os.kill(os.getpid(), signal.SIGKILL)
            yield INPUTS[number], TARGETS[number]


def test_a_worker_that_is_killed_while_reading_ahead_ends_only_a_run_that_needs_the_batch(tmp_path):
    folder = tmp_path / "fragile"
    folder.mkdir()
    data = stateful(Killed(folder / "is read ahead"), num_workers=1, prefetch_factor=1)
    own_state = data.state_dict

    def state_dict() -> Any:
        found = own_state()
        (folder / "is read ahead").touch()
        return found

    data.state_dict = state_dict
    with pytest.warns(pc.errors.CheckpointWarning, match="not saved.*DataLoader worker"):
        assert run(data, "2ba", tmp_path / "parts").timestamp.batch == 2
    whole = run(stateful(Killed(tmp_path / "absent" / "file")), "1ep", tmp_path / "whole")
    with pytest.warns(pc.data.SkippingWarning, match="no position of the data is saved"):
        resumed = run(stateful(Killed(tmp_path / "absent" / "file")), "1ep", tmp_path / "parts")
    assert tree.equal(resumed.params, whole.params)
