"""What is the effect of six methods on the digits and on MNIST, and does the interval of a known null contain 0?

    python benchmarks/ablation.py [--data digits --data mnist.npz] [--seeds 8]

For each data set, a small convolutional network is trained with all six methods, all but each one, and none, with eight
seeds. The table has the accuracy with and without a method, and the difference with its simultaneous 95 % interval.
Training uses 300 images of the digits, or 1,000 of MNIST, which is read from the file given by --data. A full run
writes the table in docs/experiments.md, and the picture there (_ablation_picture.py).

The null is a method that changes each run but not the distribution of the results: it permutes each batch, so that
mixup mixes other examples. 200 ablations of three methods, with eight seeds each, use 1,600 seeds of a small network.
"""

import argparse
import json
import math
import pathlib
import re

import torch
from _ablation_picture import PICTURE, draw
from _timing import RESULTS, Row, arguments, parse, save

import purecompose as pc
from purecompose import Algorithm, Evaluator, Event, State, algorithms as alg, analysis, compose, data, loop_events, on
from purecompose.nn import models


DOCS = pathlib.Path(__file__).parents[1] / "docs"
METHODS = [
    alg.mixup(0.2),
    alg.label_smoothing(0.1),
    alg.cutout(length=0.25),
    alg.sam(0.05),
    alg.ema("20ba"),
    alg.selective_backprop(start=0.3, end=0.9, keep=0.5),
]
SIZES = {"digits": (300, 32, "30ep"), "mnist": (1000, 50, "8ep")}
"""Number of training images (few, so that regularisation matters), batch size, duration."""


def ablation(name: str, num_seeds: int, short: bool) -> analysis.Ablation:
    """Return the ablation of the six methods on a data set."""
    images = data.load(name)
    num, batch_size, duration = (128, 64, "2ep") if short else SIZES[pathlib.Path(name).stem]
    train = data.arrays(images.train_inputs[:num], images.train_targets[:num], batch_size, drop_last=True)
    test = data.arrays(images.test_inputs, images.test_targets, 1000, shuffle=False)
    optimizer = pc.optim.adam(5e-3 * pc.schedule.cosine(warmup="0.1dur"))

    def new_state(seed: int) -> State:
        net = models.build("cnn", in_shape=images.in_shape, num_classes=images.num_classes, seed=seed, width=8)
        return State.create(net, loss=pc.losses.cross_entropy, optimizer=optimizer, key=seed, duration=duration)

    return analysis.ablate(
        lambda methods: compose(loop_events, methods),
        new_state,
        train,
        METHODS[:2] if short else METHODS,
        evaluate=Evaluator(test, {"accuracy": pc.metrics.accuracy}, every="1dur"),
        seeds=num_seeds,
        report=print,
    )


def permuted() -> Algorithm:
    """Return the null: a method that permutes each batch."""

    def apply(event: Event, state: State) -> State:
        order = pc.random.permutation(state.rng("permuted"), state.num_examples)
        return state.replace(inputs=state.inputs[order], targets=state.targets[order])

    return Algorithm("permuted", on(Event.AFTER_DATALOADER), apply, runs_before=("mixup",))


def null(num_ablations: int, num_seeds: int) -> Row:
    """Return how often the interval of the null contains 0, and how often all intervals contain the true difference."""
    inputs = pc.random.normal(pc.random.key(0), (256, 8))
    targets = (inputs[:, 0] * inputs[:, 1] > 0).long()
    train = data.arrays(inputs[:128], targets[:128], 16)
    test = Evaluator(data.arrays(inputs[128:], targets[128:], 128, shuffle=False), every="1dur")

    def new_state(seed: int) -> State:
        net = models.build("mlp", in_shape=(8,), num_classes=2, seed=seed, hidden=16)
        optimizer = pc.optim.sgd(0.2, momentum=0.9)
        return State.create(net, loss=pc.losses.cross_entropy, optimizer=optimizer, key=seed, duration="3ep")

    found = analysis.ablate(
        lambda methods: compose(loop_events, [alg.mixup(0.5), *methods]),
        new_state,
        train,
        [permuted(), alg.label_smoothing(0.1), alg.gradient_clipping("norm", 0.5)],
        evaluate=test,
        seeds=num_ablations * num_seeds,
        report=print,
    )
    effects = torch.tensor([effect.differences for effect in found.effects], dtype=torch.float64)
    ablations = [analysis.simultaneous_intervals(rows) for rows in effects.split(num_seeds, dim=1)]
    # For the other methods, the mean over all seeds is taken as the true difference.
    truth = [0.0, *effects.mean(1).tolist()[1:]]
    covers = torch.tensor(
        [[one.low <= at <= one.high for one, at in zip(rows, truth, strict=True)] for rows in ablations]
    ).double()
    return {
        "data": f"{len(ablations)} ablations with {num_seeds} seeds",
        "method": "a null: permuted batches",
        "difference": f"{effects[0].mean():+.5f} ± {effects[0].std() / math.sqrt(effects.shape[1]):.5f} in all runs",
        "interval": f"contains 0 in {covers[:, 0].mean():.1%}",
        "verdict": f"all three contain the truth in {covers.all(1).double().mean():.1%}",
    }


def rows_of(name: str, found: analysis.Ablation) -> list[Row]:
    """Return a row for each method."""
    rows: list[Row] = []
    for effect in found.effects:
        interval = effect.interval
        assert interval is not None
        rows.append(
            {
                "data": name,
                "method": effect.method,
                "with": f"{effect.with_it:.2%}",
                "without": f"{effect.without_it:.2%}",
                "difference": f"{100 * interval.mean:+.2f}",
                "interval": f"{100 * interval.low:+.2f} to {100 * interval.high:+.2f}",
                "verdict": effect.verdict,
                "seeds needed": "over 1,000" if effect.seeds_needed > 1000 else effect.seeds_needed or "",
            }
        )
    return rows


def write_docs() -> None:
    """Write the table of the last full run into docs/experiments.md."""
    results = json.loads((RESULTS / "ablation.json").read_text())
    head = ["data", "method", "with", "without", "difference", "interval", "verdict", "seeds needed"]
    rows = [[str(row.get(name, "")) for name in head] for row in results["rows"] if row.get("with")]
    lines = [head, ["---"] * len(head), *rows]
    made = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    page = DOCS / "experiments.md"
    text = re.sub(r"(<!-- ablation -->\n)(\|.*\n)*", lambda found: found[1] + made, page.read_text())
    page.write_text(text)


def main() -> None:
    parser: argparse.ArgumentParser = arguments(__doc__, blocks=0)
    parser.add_argument("--data", action="append", help="digits, or the file mnist.npz; repeatable")
    parser.add_argument("--seeds", type=int, default=8, help="seeds of each subset (default %(default)s)")
    args = parse(parser)
    torch.set_num_threads(1)
    tail = null(4, 8) if args.short else null(200, 8)
    print(tail)
    rows: list[Row] = []
    for name in args.data or ["digits"]:
        found = ablation(name, 5 if args.short else args.seeds, args.short)
        print(f"\n{found}\n")
        rows += rows_of(pathlib.Path(name).stem, found)
    save("ablation", [*rows, tail], args.out)
    if args.out == RESULTS:
        write_docs()
        draw(rows, PICTURE)


if __name__ == "__main__":
    main()
