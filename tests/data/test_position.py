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
