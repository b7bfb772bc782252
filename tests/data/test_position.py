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


def hugging_face(reads: list[int]) -> Any:
    datasets = pytest.importorskip("datasets")
    columns = {"inputs": INPUTS.tolist(), "targets": TARGETS.tolist(), "number": list(range(NUM))}

    def noted(rows: list[dict[str, Any]]) -> Any:
        reads.extend(int(row.pop("number")) for row in rows)
        return torch.utils.data.default_collate(rows)

    # With a fingerprint it is not computed by pickling, which fails for some versions of pyarrow.
    rows = datasets.Dataset(datasets.table.InMemoryTable.from_pydict(columns), fingerprint="rows")
    stream = rows.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=1)
    return DataLoader(stream.with_format("torch"), SIZE, collate_fn=noted)


def loader_of_a_stream(reads: list[int]) -> Any:
    return DataLoader(Samples(reads), SIZE)


SOURCES = [Walk, loader_of_a_stream, stateful_loader, stateful_loader_of_a_stream, hugging_face]


def run(data: Any, duration: str, folder: Any, fields: dict[str, Any] | None = None) -> pc.State:
    state = make_state(**(fields or {}))
    return pc.fit(
        compose(loop_events), state, data, duration=duration, checkpoints=pc.Checkpoints(folder), resume="auto"
    )


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
