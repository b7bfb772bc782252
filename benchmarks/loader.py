"""How many samples a second does `data.loader` read, beside torch's DataLoader?

    python benchmarks/loader.py [--data mnist.npz] [--blocks 15]

MNIST, or random images of its form, in shuffled batches of 64: as a data set of its own class, as a `TensorDataset`, as
a list, with noise drawn for each sample, and as JPEG files that Pillow decodes.
A block reads a part of an epoch; workers are kept between the blocks, as both loaders keep them.
"""

import pathlib
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import numpy as np
import torch
from _timing import Row, against, arguments, in_turn, parse, save
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from purecompose import data
from purecompose.random import key


BATCH_SIZE = 64


class Images(Dataset):
    """A data set as users write it."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Noisy(Images):
    """The same with noise from torch's global generator."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(inputs.shape), targets


class Files(Dataset):
    """Images that are decoded when they are read."""

    def __init__(self, paths: list[pathlib.Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.paths[index]) as image:
            return torch.from_numpy(np.array(image)).permute(2, 0, 1), index


def noisy(sample: tuple[Tensor, Tensor], rng: torch.Generator) -> tuple[Tensor, Tensor]:
    inputs, targets = sample
    return inputs + 0.1 * torch.randn(inputs.shape, generator=rng), targets


def images(path: pathlib.Path | None, num: int) -> tuple[Tensor, Tensor]:
    """MNIST, or random images of its form."""
    if path is not None:
        found = data.load(path)
        return found.train_inputs[:num].contiguous(), found.train_targets[:num].contiguous()
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, 1, 28, 28, generator=generator), torch.randint(10, (num,), generator=generator)


def written(folder: pathlib.Path, num: int, size: int = 96) -> list[pathlib.Path]:
    """JPEG files of smooth colours with noise."""
    rng = np.random.default_rng(0)
    paths = [folder / f"{number}.jpg" for number in range(num)]
    for path in paths:
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        coarse.resize((size, size), Image.Resampling.BILINEAR).save(path)
    return paths


def seconds_each(epoch: Callable[[], Iterable[Any]], num: int) -> float:
    """Seconds for a sample, over the first `num` samples of an epoch."""
    start, found = time.perf_counter(), 0
    for batch in epoch():
        found += len(batch[1])
        if found >= num:
            break
    return (time.perf_counter() - start) / found


def measure(name: str, workers: int, theirs: Dataset, ours: data.Loader, num: int, blocks: int) -> Row:
    """One row: a data set read by both."""
    by_torch = DataLoader(theirs, BATCH_SIZE, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    epochs = count()
    sides: dict[str, Callable[[], Iterable[Any]]] = {
        "DataLoader": lambda: by_torch,
        "ours": lambda: ours.epoch(key(0), next(epochs)),
    }
    for epoch in sides.values():  # starts the workers, and reads the data once
        seconds_each(epoch, num)
    seconds = in_turn(list(sides), lambda side: seconds_each(sides[side], num), blocks)
    ours.close()
    row: Row = {"data": name, "workers": workers}
    row |= {f"{side} samples/s": round(1 / sorted(values)[len(values) // 2]) for side, values in seconds.items()}
    return row | against(seconds, "ours", "DataLoader")


def main() -> None:
    """Measures, prints and saves."""
    parser = arguments(__doc__, blocks=15)
    parser.add_argument("--data", type=pathlib.Path, help="MNIST, as `data.load` reads it (random images)")
    args = parse(parser)
    torch.set_num_threads(1)
    num = 512 if args.short else 12_800
    inputs, targets = images(args.data, num)
    own, rows = Images(inputs, targets), TensorDataset(inputs, targets)
    listed: Any = list(zip(inputs, targets, strict=True))
    cases: list[tuple[str, Dataset, Callable[[int], data.Loader]]] = [
        ("its own class", own, lambda workers: data.loader(own, BATCH_SIZE, workers=workers)),
        ("TensorDataset", rows, lambda workers: data.loader(rows, BATCH_SIZE, workers=workers)),
        ("list", listed, lambda workers: data.loader(listed, BATCH_SIZE, workers=workers)),
        (
            "its own class, noise by rng",
            Noisy(inputs, targets),
            lambda workers: data.loader(own, BATCH_SIZE, workers=workers, transform=noisy),
        ),
        (
            "its own class, global noise",
            Noisy(inputs, targets),
            lambda workers: data.loader(Noisy(inputs, targets), BATCH_SIZE, workers=workers),
        ),
    ]
    results = []
    for name, theirs, make in cases:
        for workers in (0, 2):
            results.append(measure(name, workers, theirs, make(workers), num, args.blocks))
    with tempfile.TemporaryDirectory() as folder:
        files = Files(written(pathlib.Path(folder), num // 10 + BATCH_SIZE))
        for workers in (0, 2):
            ours = data.loader(files, BATCH_SIZE, workers=workers)
            results.append(measure("JPEG files of 96x96", workers, files, ours, len(files), args.blocks))
    save("loader", results, args.out, "pillow")


if __name__ == "__main__":
    main()
