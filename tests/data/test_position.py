"""Data that know their position: a run continues where it ended, and reads no sample again."""

import sys
import types
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import purecompose as pc
from purecompose import compose, loop_events, tree
from tests.helpers import make_batch, make_state


pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:Cannot (locate reference to|pickle)"),
]
NUM, SIZE = 22, 4  # an epoch of six batches, of which the last is smaller
INPUTS, TARGETS = make_batch(size=NUM)


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


def stateful_loader(reads: list[int]) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(MapStyle(reads), SIZE, shuffle=True)


def stateful_loader_of_a_stream(reads: list[int]) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(Samples(reads), SIZE)


def hugging_face(reads: list[int], buffer_size: int = 1) -> Any:
    datasets = pytest.importorskip("datasets")
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


SOURCES = [Walk, loader_of_a_stream, stateful_loader, stateful_loader_of_a_stream, hugging_face]


def run(data: Any, duration: str, folder: Any, fields: dict[str, Any] | None = None, **more: Any) -> pc.State:
    state = make_state(**(fields or {}))
    saved = pc.Checkpoints(folder)
    return pc.fit(compose(loop_events), state, data, duration=duration, checkpoints=saved, resume="auto", **more)


def check_resumes(make: Any, end: int, tmp_path: Any, fields: dict[str, Any] | None = None) -> None:
    """Compare a run of three epochs with one that ends after some batches and continues with new data."""
    reads: list[int] = []
    torch.manual_seed(0)  # some loaders draw their own seed when they are made
    whole = run(make([]), "3ep", tmp_path / "whole", fields)
    torch.manual_seed(0)
    run(make([]), f"{end}ba", tmp_path / "parts", fields)
    torch.manual_seed(1)
    resumed = run(make(reads), "3ep", tmp_path / "parts", fields)
    assert tree.equal(resumed.params, whole.params) and resumed.timestamp == whole.timestamp
    epochs, batches = divmod(end, 6)
    assert len(reads) == 3 * NUM - epochs * NUM - batches * SIZE


@pytest.mark.parametrize("end", [2, 6, 9])
@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_a_run_continues_without_reading_a_sample_again(make, end, tmp_path):
    fields = {"input_field": "inputs", "target_field": "targets"} if make is hugging_face else None
    check_resumes(make, end, tmp_path, fields)


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
        check_resumes(make, end, tmp_path / str(end), {"input_field": "inputs", "target_field": "targets"})


def streaming_or_skip(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the package, without torchvision, which may not fit the installed torch: only images need it."""
    pytest.importorskip("transformers")
    missing = types.ModuleType("torchvision")
    missing.__file__ = missing.__name__  # `inspect` reads it of all modules
    missing.__getattr__ = lambda name: object  # type: ignore[method-assign]
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        monkeypatch.setitem(sys.modules, name, missing)
    return pytest.importorskip("streaming")


def test_what_a_checkpoint_cannot_hold_is_left_out_with_a_warning(tmp_path):
    class Strange(Walk):
        def state_dict(self) -> dict[str, Any]:
            return {"order": object()}

    with pytest.warns(pc.errors.CheckpointWarning, match="the position of the data is not saved"):
        run(Strange([]), "2ba", tmp_path)
    with pytest.warns(pc.data.SkippingWarning, match="read from Strange"), pytest.warns(pc.errors.CheckpointWarning):
        state = run(Strange([]), "3ba", tmp_path)
    assert state.timestamp.batch == 3


FIELDS = {"input_field": "inputs", "target_field": "targets"}


def test_a_shuffle_buffer_is_read_again_with_a_warning_and_gives_the_same_bits(tmp_path):
    whole = run(hugging_face([], 10), "2ep", tmp_path / "whole", FIELDS)
    run(hugging_face([], 10), "8ba", tmp_path / "parts", FIELDS)
    with pytest.warns(pc.data.SkippingWarning, match="leaves out its shuffle buffer"):
        resumed = run(hugging_face([], 10), "2ep", tmp_path / "parts", FIELDS)
    assert tree.equal(resumed.params, whole.params)


@pytest.mark.parametrize("make", [Walk, hugging_face], ids=lambda make: make.__name__)
def test_a_finished_run_that_is_evaluated_keeps_the_position(make, tmp_path):
    fields = FIELDS if make is hugging_face else None
    torch.manual_seed(0)
    whole = run(make([]), "2ep", tmp_path / "whole", fields)
    run(make([]), "2ba", tmp_path / "parts", fields)
    test = [{"inputs": INPUTS, "targets": TARGETS}] if fields else [(INPUTS, TARGETS)]
    run(make([]), "2ba", tmp_path / "parts", fields, evaluate=pc.Evaluator(test))
    assert tree.equal(run(make([]), "2ep", tmp_path / "parts", fields).params, whole.params)


def test_a_stream_that_has_continued_begins_its_next_iteration_at_the_start(tmp_path):
    data = hugging_face([])
    run(hugging_face([]), "2ba", tmp_path / "a", FIELDS)
    run(data, "3ba", tmp_path / "a", FIELDS)
    again = run(data, "2ba", tmp_path / "b", FIELDS)
    assert tree.equal(again.params, run(hugging_face([]), "2ba", tmp_path / "c", FIELDS).params)


class Breaking(Walk):
    """Data that cannot read their third batch."""

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number == 2:
                raise OSError("the reader was killed")
            yield batch


def test_an_error_of_reading_ahead_ends_only_a_run_that_needs_the_batch(tmp_path):
    with pytest.warns(pc.errors.CheckpointWarning, match="not saved.*the reader was killed"):
        assert run(Breaking([]), "2ba", tmp_path / "a").timestamp.batch == 2
    with pytest.raises(OSError, match="the reader was killed"):
        run(Breaking([]), "3ba", tmp_path / "b")


def test_a_state_dict_without_a_value_is_reported(tmp_path):
    class Empty(Walk):
        def state_dict(self) -> Any:
            return None

    with pytest.warns(pc.errors.CheckpointWarning, match="Empty.state_dict returns None"):
        run(Empty([]), "2ba", tmp_path)


def test_data_sets_that_only_their_own_loader_can_ask_are_named(tmp_path):
    class OfLoader(Samples):
        def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:  # pyright: ignore
            return {"place": num_samples}

    run(DataLoader(OfLoader([]), SIZE), "2ba", tmp_path)
    with pytest.warns(pc.data.SkippingWarning, match="dropped"), pytest.warns(match="use a StreamingDataLoader"):
        run(DataLoader(OfLoader([]), SIZE), "3ba", tmp_path)


def test_an_evaluator_may_not_move_the_position_that_is_saved(tmp_path):
    data = Walk([])
    with pytest.raises(ValueError, match="'eval' reads the same Walk"):
        run(data, "2ba", tmp_path, evaluate=pc.Evaluator(data))
