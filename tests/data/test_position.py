"""Data that know their position: a run continues where it ended, and reads no sample again."""

import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import purecompose as pc
from purecompose import compose, loop_events, tree
from purecompose.data.position import PositionedBatches, has_shuffle_buffer, position_at, position_holder
from purecompose.time import RunLength, Timestamp
from tests.helpers import make_batch, make_state


pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:Cannot (locate reference to|pickle)"),
]
NUM, SIZE = 22, 4  # an epoch of six batches, of which the last is smaller
INPUTS, TARGETS = make_batch(size=NUM)
FIELDS = {"input_field": "inputs", "target_field": "targets"}


class Walk:
    """Batches in an order that the data draw, from torch's global generator."""

    def __init__(self, reads: list[int]) -> None:
        self.reads, self.order, self.place = reads, torch.arange(NUM), 0

    def __iter__(self) -> Any:
        if self.place == 0:
            self.order = torch.randperm(NUM)
        while self.place < NUM:
            chosen = self.order[self.place : self.place + SIZE]
            self.place += len(chosen)
            self.reads += chosen.tolist()
            yield INPUTS[chosen] + torch.rand(4), TARGETS[chosen]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "place": self.place}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.order, self.place = saved["order"], saved["place"]


class Samples(IterableDataset):
    """A stream of samples."""

    def __init__(self, reads: list[int]) -> None:
        self.reads, self.place = reads, 0

    def __iter__(self) -> Any:
        while self.place < NUM:
            self.place += 1
            self.reads.append(self.place)
            yield INPUTS[self.place - 1], TARGETS[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.place = saved["place"]


class MapStyle:
    """Samples by their index."""

    def __init__(self, reads: list[int]) -> None:
        self.reads = reads

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads.append(index)
        return INPUTS[index] + torch.rand(4), TARGETS[index]


def stateful(data: Any, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="tests a loader of torchdata")
    return module.StatefulDataLoader(data, SIZE, **options)


def stateful_loader(reads: list[int]) -> Any:
    return stateful(MapStyle(reads), shuffle=True)


def stateful_loader_of_a_stream(reads: list[int]) -> Any:
    return stateful(Samples(reads))


def stateful_loader_of_hugging_face(reads: list[int]) -> Any:
    loader = hugging_face(reads)
    return stateful(loader.dataset, collate_fn=loader.collate_fn)


def hugging_face(reads: list[int], buffer_size: int = 1) -> Any:
    datasets = pytest.importorskip("datasets", reason="tests a stream of Hugging Face")
    columns = {"inputs": INPUTS.tolist(), "targets": TARGETS.tolist(), "number": list(range(NUM))}

    def noted(rows: list[dict[str, Any]]) -> Any:
        reads.extend(int(row.pop("number")) for row in rows)
        return torch.utils.data.default_collate(rows)

    # With a fingerprint it is not computed by pickling, which fails for some versions of pyarrow.
    rows = datasets.Dataset(datasets.table.InMemoryTable.from_pydict(columns), fingerprint="rows")
    stream = rows.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=buffer_size)
    return DataLoader(stream.with_format("torch"), SIZE, collate_fn=noted)


def loader_of_a_stream(reads: list[int]) -> Any:
    return DataLoader(Samples(reads), SIZE)


SOURCES = [
    Walk,
    loader_of_a_stream,
    stateful_loader,
    stateful_loader_of_a_stream,
    stateful_loader_of_hugging_face,
    hugging_face,
]


def run(data: Any, duration: str, folder: Any, fields: dict[str, Any] | None = None, **more: Any) -> pc.State:
    state = make_state(**(fields or {}))
    saved = pc.Checkpoints(folder)
    return pc.fit(compose(loop_events), state, data, duration=duration, checkpoints=saved, resume="auto", **more)


def check_resumes(make: Any, end: int, tmp_path: Any, fields: dict[str, Any] | None = None, length: int = 6) -> None:
    """Compare a run of three epochs with one that ends after some batches and continues with new data."""
    reads: list[int] = []
    fields = fields or {}
    if length < 6:
        fields = {**fields, "batches_per_epoch": length}
    torch.manual_seed(0)  # some loaders draw their own seed when they are made
    whole = run(make([]), "3ep", tmp_path / "whole", fields)
    torch.manual_seed(0)
    run(make([]), f"{end}ba", tmp_path / "parts", fields)
    torch.manual_seed(1)
    resumed = run(make(reads), "3ep", tmp_path / "parts", fields)
    assert tree.equal(resumed.params, whole.params) and resumed.timestamp == whole.timestamp
    epochs, batches = divmod(end, length)
    assert len(reads) == (3 - epochs) * min(NUM, length * SIZE) - batches * SIZE


def fields_of(make: Any) -> dict[str, Any] | None:
    return FIELDS if "hugging_face" in make.__name__ else None


@pytest.mark.parametrize("end", [2, 6, 9])
@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_a_run_continues_without_reading_a_sample_again(make, end, tmp_path):
    check_resumes(make, end, tmp_path, fields_of(make))


@pytest.mark.parametrize("end", [4, 6])
@pytest.mark.parametrize("make", [stateful_loader, stateful_loader_of_hugging_face, hugging_face])
def test_an_epoch_may_be_shorter_than_the_data(make, end, tmp_path):
    check_resumes(make, end, tmp_path, fields_of(make), length=4)


@pytest.mark.parametrize("end", [3, 7])
@pytest.mark.parametrize("make", [Walk, loader_of_a_stream, stateful_loader_of_a_stream])
def test_streams_that_continue_in_the_next_epoch_do_so_after_a_resume(make, end, tmp_path):
    fields = {"batches_per_epoch": 3}
    whole = run(make([]), "3ep", tmp_path / "whole", fields)
    run(make([]), f"{end}ba", tmp_path / "parts", fields)
    assert tree.equal(run(make([]), "3ep", tmp_path / "parts", fields).params, whole.params)


@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "kept workers"])
@pytest.mark.parametrize("end", [2, 6])
def test_workers_continue(end, persistent, tmp_path):
    def make(reads: list[int]) -> Any:
        del reads  # of the workers
        samples = torch.utils.data.TensorDataset(INPUTS, TARGETS)
        return stateful(samples, shuffle=True, num_workers=2, persistent_workers=persistent)

    torch.manual_seed(0)
    whole = run(make([]), "2ep", tmp_path / "whole")
    torch.manual_seed(0)
    run(make([]), f"{end}ba", tmp_path / "parts")
    assert tree.equal(run(make([]), "2ep", tmp_path / "parts").params, whole.params)


def test_streaming_continues_without_reading_a_sample_again(tmp_path, monkeypatch):
    streaming = streaming_or_skip(monkeypatch)
    with streaming.MDSWriter(out=str(tmp_path / "data"), columns={"inputs": "pkl", "targets": "int"}) as writer:
        for inputs, target in zip(INPUTS, TARGETS, strict=True):
            writer.write({"inputs": inputs.numpy(), "targets": int(target)})

    def make(reads: list[int]) -> Any:
        class Noted(streaming.StreamingDataset):
            def __getitem__(self, index: int) -> Any:
                reads.append(index)
                return super().__getitem__(index)

        streaming.base.util.clean_stale_shared_memory()
        options = {"shuffle": True, "shuffle_seed": 3, "allow_unsafe_types": True}
        data = Noted(local=str(tmp_path / "data"), batch_size=SIZE, **options)
        return streaming.StreamingDataLoader(data, batch_size=SIZE)

    for end in (2, 6, 9):
        check_resumes(make, end, tmp_path / str(end), FIELDS)
    short = {**FIELDS, "batches_per_epoch": 4}
    whole = run(make([]), "3ep", tmp_path / "short whole", short)
    run(make([]), "4ba", tmp_path / "short parts", short)
    assert tree.equal(run(make([]), "3ep", tmp_path / "short parts", short).params, whole.params)


def streaming_or_skip(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the package, without torchvision, which may not fit the installed torch: only images need it."""
    pytest.importorskip("transformers", reason="streaming imports it")
    missing = types.ModuleType("torchvision")
    missing.__file__ = missing.__name__  # `inspect` reads it of all modules
    missing.__getattr__ = lambda name: object  # type: ignore[method-assign]
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        monkeypatch.setitem(sys.modules, name, missing)
    return pytest.importorskip("streaming", reason="tests a loader of MosaicML Streaming")


# Data whose position is not saved, or not used


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
        pytest.warns(pc.data.SkippingWarning, match="no position of the St"),
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


class OfLoader(Samples):
    """A stream that must be given the number of samples, as MosaicML's `StreamingDataset` must."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:  # type: ignore[override]
        return {"place": num_samples}


def test_a_stream_that_only_its_loader_can_ask_is_reported(tmp_path):
    run(DataLoader(OfLoader([]), SIZE), "2ba", tmp_path)
    with pytest.warns(pc.data.SkippingWarning, match="dropped"), pytest.warns(match="use a StreamingDataLoader"):
        run(DataLoader(OfLoader([]), SIZE), "3ba", tmp_path)


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
    with pytest.raises(ValueError, match="'eval' reads the same Walk"):
        run(data, "2ba", tmp_path, evaluate=pc.Evaluator(data))
    with pytest.raises(ValueError, match="'eval' reads the same Samples"):
        run(DataLoader(samples, 4), "2ba", tmp_path, evaluate=pc.Evaluator(DataLoader(samples, 2)))
    pc.fit(compose(loop_events), make_state(), data, duration="2ba", evaluate=pc.Evaluator(data, num_batches=1))


# Which position is saved


def two_read(data: Any) -> PositionedBatches:
    """Return the batches of an epoch after the first two."""
    batches = PositionedBatches(data, data, pc.random.key(0), 0, 0, None)
    assert len([next(batches) for _ in range(2)]) == batches.num_returned == 2
    return batches


@pytest.mark.parametrize("make", [Walk, hugging_face], ids=lambda make: make.__name__)
def test_a_finished_run_that_is_evaluated_keeps_the_position(make, tmp_path):
    fields = fields_of(make)
    torch.manual_seed(0)
    whole = run(make([]), "2ep", tmp_path / "whole", fields)
    run(make([]), "2ba", tmp_path / "parts", fields)
    test = [{"inputs": INPUTS, "targets": TARGETS}] if fields else [(INPUTS, TARGETS)]
    run(make([]), "2ba", tmp_path / "parts", fields, evaluate=pc.Evaluator(test))
    assert tree.equal(run(make([]), "2ep", tmp_path / "parts", fields).params, whole.params)


@pytest.mark.parametrize("make", [hugging_face, stateful_loader_of_hugging_face], ids=lambda make: make.__name__)
def test_a_stream_that_has_continued_begins_its_next_iteration_at_the_start(make, tmp_path):
    data = make([])
    run(make([]), "2ba", tmp_path / "a", FIELDS)
    run(data, "3ba", tmp_path / "a", FIELDS)
    again = run(data, "2ba", tmp_path / "b", FIELDS)
    assert tree.equal(again.params, run(make([]), "2ba", tmp_path / "c", FIELDS).params)


def test_the_next_batch_is_read_only_if_the_length_of_the_epoch_is_unknown(tmp_path):
    for length, num_read in ((None, 12), (6, 8)):
        reads: list[int] = []
        run(Walk(reads), "2ba", tmp_path / str(length), {"batches_per_epoch": length})
        assert len(reads) == num_read


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
