"""How much of an MLP's step is its matrix products, in torch and in JAX?

    python benchmarks/products.py

The eight products of a training step of the MLP 64-128-128-10 with a batch of 64, and nothing else: what no compiler of
elementwise code can save. One thread, pinned to one core; torch multiplies by the library that it was built with, JAX
(where it is installed) by XLA's own code, all eight in one call. The sides take turns. Times are the processor's.
"""

import os


# Set before JAX is imported: later it has its threads.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
from _timing import Row, against, arguments, median_us, paired, parse, save


BATCH_SIZE = 64
LAYERS = ((64, 128), (128, 128), (128, 10))
"""Inputs and outputs of each layer."""
NUM_PRODUCTS = (2, 3, 3)
"""Forward, the gradient of the weight, and that of the inputs, which the first layer does not need."""


def by_torch() -> Callable[[], object]:
    """All products by `torch.mm`, into memory that is there; transposes are views, as in a step."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for num, (ins, outs) in zip(NUM_PRODUCTS, LAYERS, strict=True):
        x, weight, grad = torch.randn(BATCH_SIZE, ins), torch.randn(outs, ins), torch.randn(BATCH_SIZE, outs)
        pairs += [(x, weight.T), (grad.T, x), (grad, weight)][:num]
    results = [left @ right for left, right in pairs]

    def run() -> None:
        for (left, right), result in zip(pairs, results, strict=True):
            torch.mm(left, right, out=result)

    return run


def by_jax() -> Callable[[], object]:
    """All products in one jitted function, of weights of the shape (inputs, outputs), as is usual there."""
    jax: Any = importlib.import_module("jax")
    ones = jax.numpy.ones
    layers = [(ones((BATCH_SIZE, ins)), ones((ins, outs)), ones((BATCH_SIZE, outs))) for ins, outs in LAYERS]

    @jax.jit
    def products(layers: Any) -> Any:
        pairs = zip(NUM_PRODUCTS, layers, strict=True)
        return [[x @ weight, x.T @ grad, grad @ weight.T][:num] for num, (x, weight, grad) in pairs]

    return lambda: jax.block_until_ready(products(layers))


def main() -> None:
    args = parse(arguments(__doc__, blocks=40))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    sides = {"torch": by_torch()}
    if importlib.util.find_spec("jax"):
        sides["JAX"] = by_jax()
    seconds = paired(sides, calls=args.calls, blocks=args.blocks, clock=time.process_time)
    operations = sum(2 * num * BATCH_SIZE * ins * outs for num, (ins, outs) in zip(NUM_PRODUCTS, LAYERS, strict=True))
    rows: list[Row] = []
    for name in sides:
        us = median_us(seconds[name])
        rows.append({"side": name, "us": round(us, 1), "GFLOP/s": round(operations / us / 1e3, 1)})
        rows[-1] |= against(seconds, name, "torch")
    save("products", rows, args.out, *(["jax"] if "JAX" in sides else []))


if __name__ == "__main__":
    main()
