"""Data larger than memory: of files that are mapped, only the rows of a batch are read."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, TensorDataset

import purecompose as pc


NUM, WIDTH, SIZE = 2**14, 2**10, 128  # 64 MB, in batches of half a MB
NUMBERS = torch.arange(NUM)


def npy(folder: Path, start: int = 0, stop: int = NUM) -> Tensor:
    """Return rows that begin with their number, mapped from a file that is written first."""
    file = folder / f"{start}.npy"
    whole = np.lib.format.open_memmap(file, "w+", dtype=np.float32, shape=(stop - start, WIDTH))
    whole[:, 0] = np.arange(start, stop)
    whole.flush()
    return torch.from_numpy(np.load(file, mmap_mode="c"))


def arrays(folder: Path) -> Any:
    return pc.data.arrays(npy(folder), NUMBERS, SIZE)


def loader(folder: Path) -> Any:
    return pc.data.loader(TensorDataset(npy(folder), NUMBERS), SIZE)


def several_files(folder: Path) -> Any:
    parts = [TensorDataset(npy(folder, i, i + NUM // 4), NUMBERS[i : i + NUM // 4]) for i in range(0, NUM, NUM // 4)]
    return pc.data.loader(ConcatDataset(parts), SIZE)


def safetensors(folder: Path) -> Any:
    module = pytest.importorskip("safetensors.torch", reason="reads a file of safetensors")
    module.save_file({"rows": npy(folder)}, folder / "rows.safetensors")
    return pc.data.arrays(module.load_file(folder / "rows.safetensors")["rows"], NUMBERS, SIZE)


def arrow(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets", reason="reads a file of Arrow")
    arrow = pytest.importorskip("pyarrow")
    rows = arrow.FixedSizeListArray.from_arrays(arrow.array(npy(folder).numpy().reshape(-1)), WIDTH)
    table = datasets.table.InMemoryTable(arrow.table({"row": rows, "number": arrow.array(NUMBERS.numpy())}))
    # With a fingerprint it is not computed by pickling, which fails for some versions of pyarrow.
    datasets.Dataset(table, fingerprint="rows").save_to_disk(str(folder / "rows"))
    return pc.data.loader(datasets.load_from_disk(str(folder / "rows")).with_format("torch"), SIZE)


def own_memory() -> int:
    """Return the bytes of this process's memory that are not mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("make", [arrays, loader, several_files, safetensors, arrow], ids=lambda make: make.__name__)
def test_an_epoch_of_mapped_files_needs_memory_for_a_few_batches_only(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    next(iter(make(tmp_path / "first").epoch(pc.random.key(0), 0)))  # imports and threads need memory once
    reads = torch.zeros(NUM, dtype=torch.int64)
    before, most = own_memory(), 0
    for batch in make(tmp_path / "second").epoch(pc.random.key(0), 0):
        rows, numbers = batch.values() if isinstance(batch, dict) else batch
        assert torch.equal(rows[:, 0].long(), numbers) and not rows[:, 1:].any()
        reads[numbers] += 1
        most = max(most, own_memory())
    assert reads.eq(1).all()
    assert most - before < NUM * WIDTH * 4 / 8


def test_whole_batches_are_read_from_arrow_files(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"number": list(range(20)), "pair": [[i, 2 * i] for i in range(20)]}
    table = datasets.table.InMemoryTable.from_pydict(rows)
    datasets.Dataset(table, fingerprint="rows").save_to_disk(str(tmp_path / "rows"))
    mapped = datasets.load_from_disk(str(tmp_path / "rows")).with_format("torch")
    for batch in pc.data.loader(mapped, 8).epoch(pc.random.key(0), 0):
        assert torch.equal(batch["pair"], torch.stack([batch["number"], 2 * batch["number"]], 1))
