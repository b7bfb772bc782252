"""What does a keyed draw cost in eager, and how many operations does it add to a graph?

    python benchmarks/draws.py [--short]

Draws of the sizes that methods use, from a bare key: in eager on one thread, beside `torch.rand` of 64 numbers, and as
operations of a graph traced by `make_fx`. For dropout, what a second layer adds to the first, whose examples' keys it
shares. "way" says what computes the draw: torch's kernels ("kernels", torch 2.15 or later), or tensor operations, with
Python's integers for small draws ("emulated").

Then the two emulations of `random/philox.py` beside each other, by the number of Philox blocks: where they cross is
`MOST_ON_HOST`. Targets for 64 uniforms and `mixup_batch`: 40 and 150 us emulated, 8 and 60 by kernels; for a dropout 5
operations by kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from _timing import Row, arguments, paired, parse, quartiles, save
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import dropout

from purecompose import random
from purecompose.functional import mixup_batch
from purecompose.nn.keyed.modules import keyed
from purecompose.random.philox import emulated, has_kernels, on_host


def draws() -> dict[str, Callable[[Tensor], Any]]:
    """Functions of a key."""
    x, y = torch.rand(64, 64), torch.randint(10, (64,))
    rows = torch.arange(64)
    return {
        "torch.rand, 64": lambda key: torch.rand(64),
        "uniform, 64": lambda key: random.uniform(key, 64),
        "uniform, a million": lambda key: random.uniform(key, 1_000_000),
        "uniform, 64 examples x 128": lambda key: random.uniform(random.Rng(key).per_example(rows), (64, 128)),
        "normal, 64": lambda key: random.normal(key, 64),
        "bernoulli, 64": lambda key: random.bernoulli(key, 0.5, 64),
        "permutation, 64": lambda key: random.permutation(key, 64),
        "beta, 1": lambda key: random.beta(key, 0.2, 0.2),
        "fold_in": lambda key: random.fold_in(key, 3),
        "split, 2": lambda key: random.split(key),
        "mixup_batch, 64 x 64": lambda key: mixup_batch(key, x, y),
    }


def dropouts(num: int) -> Callable[[Tensor], Tensor]:
    """Return a function of a key: dropout several times after each other, in a forward pass of 64 examples."""

    def forward(key: Tensor) -> Tensor:
        x = torch.ones(64, 128)
        with keyed(random.Rng(key), num_examples=64):
            for _ in range(num):
                x = dropout(x)
        return x

    return forward


def num_operations(fn: Callable[[Tensor], Any]) -> int:
    """Return the number of operations of a function's graph; those without a result to use are not counted."""
    graph = make_fx(fn)(random.key(0)).graph
    graph.eliminate_dead_code()
    return sum(node.op == "call_function" for node in graph.nodes)


def main() -> None:
    args = parse(arguments(__doc__, blocks=15))
    torch.set_num_threads(1)
    key, way = random.key(7), "kernels" if has_kernels("cpu") else "emulated"
    fns = {name: lambda draw=draw: draw(key) for name, draw in draws().items()}
    seconds = paired(fns, calls=args.calls, blocks=args.blocks)
    rows: list[Row] = []
    for name, draw in draws().items():
        low, middle, high = (round(second * 1e6, 1) for second in quartiles(seconds[name]))
        operations = "" if name.startswith("torch") else num_operations(draw)
        rows.append({"draw": name, "way": way, "us": middle, "quartiles": f"{low} {high}", "operations": operations})
    added = num_operations(dropouts(2)) - num_operations(dropouts(1))
    rows.append({"draw": "dropout, one more", "way": way, "us": "", "quartiles": "", "operations": added})

    for blocks in (16,) if args.short else (16, 256, 1024, 1536, 4096):
        shape = (4 * blocks,)
        ways = {
            "Python's integers": lambda shape=shape: on_host(key, shape, torch.float32),
            "tensor operations": lambda shape=shape: emulated(key, shape, torch.float32),
        }
        for way, values in paired(ways, calls=args.calls, blocks=args.blocks).items():
            low, middle, high = (round(second * 1e6, 1) for second in quartiles(values))
            what = {"draw": f"uniform, {blocks} blocks", "way": way, "us": middle, "quartiles": f"{low} {high}"}
            rows.append({**what, "operations": ""})
    save("draws", rows, args.out)


if __name__ == "__main__":
    main()
