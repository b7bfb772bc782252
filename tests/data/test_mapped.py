"""Data larger than memory: of files that are mapped, only the rows of a batch are read."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import purecompose as pc


NUM, WIDTH = 2**14, 2**10  # 64 MB


def own_memory() -> int:
    """Return the bytes of this process's memory that are not mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["arrays", "loader"])
def test_an_epoch_of_a_mapped_file_needs_no_memory_for_it(kind, tmp_path):
    whole = np.lib.format.open_memmap(tmp_path / "data.npy", "w+", dtype=np.float32, shape=(NUM, WIDTH))
    whole[:, 0] = np.arange(NUM)
    whole.flush()
    inputs, targets = torch.from_numpy(np.load(tmp_path / "data.npy", mmap_mode="c")), torch.arange(NUM)
    if kind == "arrays":
        data = pc.data.arrays(inputs, targets, 128)
    else:
        data = pc.data.loader(torch.utils.data.TensorDataset(inputs, targets), 128)
    before, most = own_memory(), 0
    for rows, numbers in data.epoch(pc.random.key(0), 0):
        assert torch.equal(rows[:, 0].long(), numbers)
        most = max(most, own_memory())
    assert most - before < whole.nbytes / 4


def test_whole_batches_are_read_from_arrow_files(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"number": list(range(20)), "pair": [[i, 2 * i] for i in range(20)]}
    table = datasets.table.InMemoryTable.from_pydict(rows)
    datasets.Dataset(table, fingerprint="rows").save_to_disk(str(tmp_path / "rows"))
    mapped = datasets.load_from_disk(str(tmp_path / "rows")).with_format("torch")
    for batch in pc.data.loader(mapped, 8).epoch(pc.random.key(0), 0):
        assert torch.equal(batch["pair"], torch.stack([batch["number"], 2 * batch["number"]], 1))
