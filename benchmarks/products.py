"""How much of an MLP's step is its matrix products, in torch and in JAX?

    python benchmarks/products.py

The eight products of a training step of the MLP 64-128-128-10 with a batch of 64, and nothing else: what no compiler of
elementwise code can save. One thread, pinned to one core; torch multiplies by the library that it was built with, JAX
(where it is installed) by XLA's own code, all eight in one call. The sides take turns.
"""

import os


# Set before JAX is imported: later it has its threads.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from _timing import Row, against, arguments, median_us, paired, parse, save


FACTORS = (
    ((64, 64), (64, 128)), ((64, 128), (128, 128)), ((64, 128), (128, 10)),  # forward
    ((128, 64), (64, 10)), ((64, 10), (10, 128)),  # backward, layer by layer
    ((128, 64), (64, 128)), ((64, 128), (128, 128)),
    ((64, 64), (64, 128)),
)  # fmt: skip
"""Shapes of the factors; the first layer's inputs need no gradient."""


def by_torch() -> Callable[[], object]:
    """All products by `torch.mm`, into memory that is there."""
    pairs = [(torch.randn(left), torch.randn(right)) for left, right in FACTORS]
    results = [left @ right for left, right in pairs]

    def run() -> None:
        for (left, right), result in zip(pairs, results, strict=True):
            torch.mm(left, right, out=result)

    return run


def by_jax() -> Callable[[], object]:
    """All products in one jitted function."""
    jax: Any = importlib.import_module("jax")
    pairs = [(jax.numpy.ones(left), jax.numpy.ones(right)) for left, right in FACTORS]
    products = jax.jit(lambda pairs: [left @ right for left, right in pairs])
    return lambda: jax.block_until_ready(products(pairs))


def main() -> None:
    args = parse(arguments(__doc__, blocks=40))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    sides = {"torch": by_torch()}
    if importlib.util.find_spec("jax"):
        sides["JAX"] = by_jax()
    seconds = paired(sides, calls=args.calls, blocks=args.blocks)
    operations = sum(2 * rows * inner * columns for (rows, inner), (_, columns) in FACTORS)
    rows: list[Row] = []
    for name in sides:
        us = median_us(seconds[name])
        rows.append({"side": name, "us": round(us, 1), "GFLOP/s": round(operations / us / 1e3, 1)})
        rows[-1] |= against(seconds, name, "torch")
    save("products", rows, args.out, *(["jax"] if "JAX" in sides else []))


if __name__ == "__main__":
    main()
