"""Does a recipe cost more than its parts, in time or in compiled variants?

    python benchmarks/recipe_cost.py [--recipe hot] [--mode compiled] [--threads 1]

Time: a ResNet-20 on a batch of 64 images of 32x32, at two points of a run, with small images and with whole ones. The
plain step here is that with progressive resizing, without which the sizes would differ. What a method costs is the time
of the step with it alone over the plain step's, the median over blocks; the sum of the parts is the plain step's time
and all these. The steps take turns in blocks of one process, each block as long as SAM's interval or a multiple of it.
The quartiles of the ratio are those of 1,000 draws of blocks. Target: compiled, at most 1.15 of the sum.

Variants: a run of 100 batches from its start to its end, traced and not compiled; under "plain" stand those of
progressive resizing. Target: at most the sum of what the methods have, each alone. `--short` takes a ResNet-8.
"""

import argparse
import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from _subjects import Subject, going_on, new_state
from _timing import Row, arguments, paired, parse, save

import purecompose as pc
from purecompose import Algorithm, compose, loop_events
from purecompose.algorithms.recipes import RECIPES
from purecompose.nn import models


POINTS = {"small images": 10_000, "whole images": 90_000}
"""Batches of a run of 100,000: so long that nothing moves meanwhile."""
RESIZING = "progressive_resizing"


def subject(name: str) -> Subject:
    """The network and its batch."""
    net = models.build(name, in_shape=(3, 32, 32), num_classes=10, seed=0)
    torch.manual_seed(0)
    return Subject(net, torch.rand(64, 3, 32, 32), torch.randint(10, (64,)))


def lists_of(methods: Sequence[Algorithm]) -> dict[str, list[Algorithm]]:
    """The plain list, that of each part, and the whole one."""
    plain = [method for method in methods if method.name == RESIZING]
    parts = {method.name: [method, *plain] for method in methods if method.name != RESIZING}
    return {"plain": plain, **parts, "all": list(methods)}


def seconds_of(
    methods: Sequence[Algorithm], point: int, subject: Subject, mode: str, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of a step with each of the lists, by blocks."""
    fns = {}
    for name, chosen in lists_of(methods).items():
        step = compose(loop_events, chosen)
        state = step.init(new_state(subject))
        state = state.replace(timestamp=state.timestamp.replace(batch=point))
        run: Any = pc.compile(step, backend=args.backend, quiet=True) if mode == "compiled" else step
        fns[name] = going_on(run, state, (subject.inputs, subject.targets))
    return paired(fns, calls=args.calls, blocks=args.blocks)


def row_of(seconds: dict[str, list[float]]) -> Row:
    """What each part costs, their sum, and the whole over it."""
    plain, blocks = seconds["plain"], range(len(seconds["plain"]))
    extras = {
        name: [mine - base for mine, base in zip(own, plain, strict=True)]
        for name, own in seconds.items()
        if name not in ("plain", "all")
    }

    def sum_and_whole(chosen: Sequence[int]) -> tuple[float, float]:
        """By the medians over these blocks: the noise of seven medians is less than that of seven times."""
        parts = [statistics.median(own[i] for i in chosen) for own in (plain, *extras.values())]
        return sum(parts), statistics.median(seconds["all"][i] for i in chosen)

    draw = random.Random(0)
    ratios = []
    for _ in range(1000):  # bootstrap
        total, whole = sum_and_whole(draw.choices(blocks, k=len(blocks)))
        ratios.append(whole / total)
    low, _, high = statistics.quantiles(ratios, n=4)
    total, whole = sum_and_whole(blocks)
    return {
        "plain": round(1e6 * statistics.median(plain)),
        **{name: round(1e6 * statistics.median(own)) for name, own in extras.items()},
        "sum": round(1e6 * total),
        "all": round(1e6 * whole),
        "ratio": round(whole / total, 3),
        "quartiles": f"{low:.3f} {high:.3f}",
    }


def variants_of(methods: Sequence[Algorithm], subject: Subject) -> int:
    """How many variants a compiled step has after a whole run."""
    fast = pc.compile(compose(loop_events, methods), backend="eager", quiet=True)
    state = new_state(subject)
    state = state.replace(timestamp=state.timestamp.replace(run=pc.time.RunLength("100ba", batches_per_epoch=100)))
    state = fast.init(state)
    batch = (subject.inputs[:8], subject.targets[:8])
    for _ in range(100):
        state = fast(state, batch)
    return len(fast.variants())


def main() -> None:
    parser = arguments(__doc__, blocks=40, calls=5)
    parser.add_argument("--recipe", choices=list(RECIPES), default="hot", help="which (default %(default)s)")
    parser.add_argument("--mode", choices=["eager", "compiled"], help="only this; by default both")
    parser.add_argument("--threads", type=int, default=1, help="that torch computes with (default %(default)s)")
    args = parse(parser)
    torch.set_num_threads(args.threads)
    methods, network = pc.recipe(args.recipe).methods, subject("resnet8" if args.short else "resnet20")
    rows: list[Row] = []
    for mode in [args.mode] if args.mode else ["eager"] if args.short else ["eager", "compiled"]:
        for name, point in POINTS.items():
            found = row_of(seconds_of(methods, point, network, mode, args))
            rows.append({"recipe": args.recipe, "measured": f"{mode}, {name}, us", **found})
    numbers = {method.name: variants_of([method], network) for method in methods}
    whole, total = variants_of(methods, network), sum(numbers.values())
    counted: Row = {"plain": numbers.pop(RESIZING), **numbers, "sum": total, "all": whole}
    rows.append(
        {"recipe": args.recipe, "measured": "variants", **counted, "ratio": round(whole / total, 3), "quartiles": ""}
    )
    save("recipe_cost", rows, args.out)


if __name__ == "__main__":
    main()
