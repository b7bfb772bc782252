"""A `DataLoader` without a generator of its own, made to draw by the run's key.

`iter(DataLoader)` and its samplers, and transforms in the main process, draw from torch's global generator. While they
do, that generator stands at a state that follows from (key, epoch); afterwards it is what it was. So the order and
the augmentation of an epoch repeat, also when a run goes on in the middle of it, and nothing else is moved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from purecompose import random


__all__ = ["draws_globally", "keyed_batches"]


def draws_globally(data: object) -> bool:
    """Whether iterating over this reads torch's global generator: a `DataLoader` without one of its own."""
    return isinstance(data, DataLoader) and data.generator is None


def keyed_batches(data: "DataLoader[Any]", key: Tensor, epoch: int) -> Iterator[Any]:
    """The loader's batches in an order that follows from the run's key and the epoch.

    Args:
        data: A loader without a generator.
        key: The run's key, int64 of shape (2,).
        epoch: The number of epochs finished.
    """
    low, high = random.fold_in(random.fold_in(key, random.salt("data order")), epoch).tolist()
    seed = (high << 32) | low
    generator = torch.Generator().manual_seed(seed)
    with _in_place_of_the_global(generator):
        # The workers' seed comes from a generator apart: persistent workers draw it in their first epoch only, and
        # the order must not depend on which that is.
        data.generator = torch.Generator().manual_seed(seed ^ random.salt("workers"))
        try:
            loader = iter(data)
        finally:
            data.generator = None
    while True:
        with _in_place_of_the_global(generator):
            batch = next(loader, _END)
        if batch is _END:
            return
        yield batch


_END = object()


@contextmanager
def _in_place_of_the_global(generator: torch.Generator) -> Iterator[None]:
    """Lets the global CPU generator draw what this one would have drawn."""
    outside = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(outside)
