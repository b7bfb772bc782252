"""Shared loaders and streams in several processes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import purecompose as pc
from purecompose import algorithms as alg, compose, loop_events
from tests.data.test_position import Walk
from tests.helpers import errors_of, make_batch, make_state


KEY = pc.random.key(3)


class Counted:
    """Samples of several dtypes, which counts how often it is read."""

    def __init__(self, size: int) -> None:
        self.size, self.reads = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        pair = torch.tensor([index, index + 1])
        return {"pair": (pair.double(), pair.bfloat16()), "small": pair.to(torch.int16), "is_even": index % 2 == 0}


def noisy(sample: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    return {**sample, "noise": torch.rand(3, generator=generator) + torch.rand(())}


def epochs(data: Any) -> list[Any]:
    """Return the batches of the end of an epoch in keyed order, and of one in the stored order."""
    return [*data.epoch(KEY, 2, start=1), *data]


SIZES = {"even": (24, 8, 0), "ragged": (23, 7, 0), "a last batch of one": (13, 4, 0), "workers": (13, 4, 2)}
"""Numbers of samples, of samples in a batch and of workers."""


def loader(case: str) -> Any:
    num, batch_size, workers = SIZES[case]
    return pc.data.loader(Counted(num), batch_size, transform=noisy, workers=workers)


LENGTHS = [5, 2, 9, 12, 1, 7, 3, 8, 4, 11, 6, 2, 10]


def in_buckets(**settings: Any) -> Any:
    texts = [(torch.full((length,), float(number)), number) for number, length in enumerate(LENGTHS)]
    return pc.data.loader(texts, pc.data.buckets(LENGTHS, max_tokens=24, bounds=[4, 8, 12], **settings))


def trained(wrap: Callable[[Any], Any], step: Any) -> dict[str, Tensor]:
    data = torch.utils.data.TensorDataset(*make_batch(size=20))
    loaded = wrap(pc.data.loader(data, 8, transform=with_noise))
    state = pc.fit(step, make_state(), loaded, duration="2ep", evaluate=pc.Evaluator(loaded))
    return dict(state.params)


def with_noise(sample: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return sample[0] + torch.rand(4, generator=generator), sample[1]


def resumed_and_whole(step: Any, folder: str) -> list[dict[str, Tensor]]:
    """Train on a stream that each process reads, in two parts and in one."""

    def run(duration: str, name: str) -> dict[str, Tensor]:
        saved = pc.Checkpoints(f"{folder}/{name}")
        state = pc.fit(step, make_state(), Walk([]), duration=duration, checkpoints=saved, resume="auto")
        dist.barrier()  # the checkpoint is written
        return dict(state.params)

    run("8ba", "parts")
    return [run("2ep", "parts"), run("2ep", "whole")]


def broken(sample: Any) -> Any:
    if dist.get_rank() == 1:
        raise OSError("unreadable")
    return sample


def attempts() -> dict[str, Callable[[], Any]]:
    def read(data: Any, **options: Any) -> list[Any]:
        return list(pc.data.shared(pc.data.loader(data, 4, **options)))

    numbers = torch.arange(8.0)
    return {
        "unreadable": lambda: read(numbers, transform=broken, rng=None),
        "lengths": lambda: read([torch.ones(1 + (number > 1)) for number in range(4)]),
        "texts": lambda: read(["a", "b", "c", "d"]),
        "collate": lambda: read(numbers, collate=torch.stack),
        "longest": lambda: pc.data.shared(in_buckets(pad_to="longest")),
        "twice": lambda: pc.data.shared(pc.data.shared(pc.data.loader(numbers, 4))),
        "another loader": lambda: pc.data.shared([numbers]),  # pyright: ignore[reportArgumentType]
        "another mesh": lambda: pc.data.shared(pc.data.loader(numbers, 4), 2),
    }


def among_members() -> tuple[list[Any], str]:
    """Return the batches read by a group of all processes, and the error with a mesh of the first one."""
    batches = epochs(pc.data.shared(loader("even"), dist.group.WORLD))
    first = DeviceMesh("cpu", [0])
    return batches, errors_of({"": lambda: pc.data.shared(loader("even"), first)}).get("", "")


def results(mesh: Any, folder: str) -> dict[str, Any]:
    """Return the results of all scenarios in one of several processes."""
    del mesh
    found: dict[str, Any] = {}
    for case in SIZES:
        data = loader(case)
        found[case] = epochs(pc.data.shared(data)), data.dataset.reads
    found[".buckets"] = epochs(pc.data.shared(in_buckets()))
    found[".members"] = among_members()
    step = pc.data_parallel(compose(loop_events, [alg.mixup(1.0)]))
    found[".fit"] = [trained(pc.data.shared, step), trained(lambda data: data, step)]
    found[".stream"] = resumed_and_whole(step, folder)
    found[".errors"] = errors_of(attempts())
    return found
