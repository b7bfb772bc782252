"""Is an ensemble that trains as one population better calibrated than one network, at equal time?

    PURECOMPOSE_DATA=folder python benchmarks/quality/ensemble.py

The folder contains `mnist.npz`. Eight perceptrons train at once, on the same batches, by a compiled step. The mean of
their probabilities is compared with one network for as many batches, with one for as many as take the same time, and
with a wider one in the same time. 5,000 training images are held out, to fit the temperature of each side: the number
by which its logarithms of probabilities are divided. Means over seeds, with 95 % intervals; seconds are processor time,
without compilation. The record of each run is a line of `results/quality/ensemble.jsonl`, and is not computed again.
"""

import argparse
import functools
import itertools
import json
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import torch
from _task import RECORDS, TUNING_SEEDS, commit, data_file
from _timing import RESULTS, Row, facts, median_us, paired, save
from torch import Tensor
from torchmetrics.classification import MulticlassCalibrationError

import purecompose as pc
from purecompose import State, analysis, compose, loop_events, metrics, optim, schedule
from purecompose.nn import models


@dataclass(frozen=True)
class Side:
    """What is trained."""

    num_members: int = 1
    hidden: int = 128
    is_equal_time: bool = False
    """True if it trains as long as the ensemble, False if for as many batches."""
    lr: float = 2e-3
    dropout: float = 0.0


SIDES = {
    "one network": Side(lr=0.005),
    "one network, equal time": Side(is_equal_time=True, lr=0.002, dropout=0.2),
    "one wider network, equal time": Side(hidden=640, is_equal_time=True, lr=0.002),
    "ensemble of 8": Side(num_members=8, lr=0.01),
}
ENSEMBLE = "ensemble of 8"
TUNING = [{"lr": lr, "dropout": dropout} for lr in (1e-3, 2e-3, 5e-3, 1e-2) for dropout in (0.0, 0.2)]
"""What is tried for each side, with another seed; the least loss on the held-out images is chosen."""
BATCH_SIZE = 128
BUDGETS = (3, 10)
"""Epochs of the ensemble and of the network for as many batches: before and after the latter has converged."""
HELD_OUT = 5000
Costs = Mapping[str, float]
"""Seconds of a batch, by side."""
MEASURES = ("accuracy", "loss", "calibration error", "temperature", "loss, scaled", "calibration error, scaled")


@functools.cache
def images(is_short: bool) -> tuple[pc.data.ImageData, pc.data.Split]:
    """Return the data, and their training images with some held out."""
    found = pc.data.load("digits" if is_short else data_file("mnist.npz"))
    num = 300 if is_short else HELD_OUT
    return found, pc.data.split(found.train_inputs, found.train_targets, num, seed=0)


@functools.cache
def step_of(num_members: int, backend: str) -> Any:
    """Return the compiled step, one for all seeds."""
    step = compose(loop_events)
    return pc.compile(step if num_members == 1 else pc.population(step, num_members), backend=backend, quiet=True)


@functools.cache
def optimizer_of(lr: float) -> Any:
    return optim.adamw(lr * schedule.linear(alpha_f=0.0, warmup="0.05dur"), weight_decay=0.01)


def new_state(side: Side, seed: int, num_batches: int, data: pc.data.ImageData) -> State:
    """Return the initial state; a network alone is the first member of the ensemble with its seed."""

    def member(number: int) -> State:
        net = models.build("mlp", in_shape=data.in_shape, num_classes=data.num_classes, seed=number,
                           hidden=(side.hidden, side.hidden), dropout=side.dropout)  # fmt: skip
        return State.create(
            net, loss=pc.losses.cross_entropy, optimizer=optimizer_of(side.lr), key=number, duration=f"{num_batches}ba"
        )

    members = [member(100 * seed + number) for number in range(side.num_members)]
    return members[0] if side.num_members == 1 else pc.stack_states(members)


def trained(side: Side, seed: int, num_batches: int, args: argparse.Namespace) -> tuple[State, float, float]:
    """Return the trained state, with the seconds of training and of compilation."""
    data, parts = images(args.short)
    train = pc.data.arrays(parts.train_inputs, parts.train_targets, BATCH_SIZE, drop_last=True)
    step, state = step_of(side.num_members, args.backend), new_state(side, seed, num_batches, data)
    start = time.perf_counter()
    step.warmup(state, next(iter(train)))
    compiling, start = time.perf_counter() - start, time.process_time()
    state = pc.fit(step, state, train)
    return state, time.process_time() - start, compiling


def log_probabilities(side: Side, state: State, inputs: Tensor, backend: str) -> Tensor:
    """Return the logarithms of the probabilities, (N, C), of a network or of the mean of the members."""
    parts = pc.predict(
        state, pc.data.arrays(inputs, torch.zeros(len(inputs)), 1000), step=step_of(side.num_members, backend)
    )
    each = torch.cat(parts, dim=-2).double().log_softmax(-1)
    return each if side.num_members == 1 else each.logsumexp(0) - math.log(side.num_members)


def fitted_temperature(logits: Tensor, targets: Tensor) -> float:
    """Return the temperature of the least loss, by Newton's method for its reciprocal, in which the loss is convex."""
    factor = torch.ones((), dtype=torch.float64)
    logits, right = logits.double(), logits.double().gather(1, targets[:, None])[:, 0]
    for _ in range(30):
        probabilities = (factor * logits).softmax(1)
        mean = (probabilities * logits).sum(1)
        slope = (mean - right).mean()
        curvature = ((probabilities * logits.square()).sum(1) - mean.square()).mean()
        factor = torch.maximum(factor - slope / curvature, factor / 2)
    return 1 / factor.item()


def quality(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Return accuracy, mean loss and expected calibration error."""
    of = {
        "accuracy": metrics.accuracy,
        "loss": metrics.mean_loss(pc.losses.cross_entropy),
        "calibration error": metrics.from_torchmetrics(MulticlassCalibrationError(logits.shape[1], n_bins=15)),
    }
    return {name: one.compute(one.update(one.init(), logits, targets)).item() for name, one in of.items()}


def record(name: str, side: Side, seed: int, epochs: int, costs: Costs, args: argparse.Namespace) -> dict[str, Any]:
    """Train and measure one side with one seed; `epochs` are those of the ensemble."""
    num_batches = length(name, epochs, costs, args)
    state, seconds, compiling = trained(side, seed, num_batches, args)
    data, parts = images(args.short)
    held_out = log_probabilities(side, state, parts.test_inputs, args.backend)
    test = log_probabilities(side, state, data.test_inputs, args.backend)
    temperature = fitted_temperature(held_out, parts.test_targets)
    scaled = quality(test / temperature, data.test_targets)
    return {
        "side": name,
        "settings": asdict(side),
        "seed": seed,
        "commit": commit(),
        "epochs": epochs,
        "parameters": sum(param.numel() for param in state.params.values()),
        "batches": num_batches,
        "seconds": round(seconds, 2),
        "compiling": round(compiling, 2),
        "held-out loss": pc.losses.cross_entropy(held_out, parts.test_targets).item(),
        **quality(test, data.test_targets),
        "temperature": temperature,
        **{f"{name}, scaled": value for name, value in scaled.items() if name != "accuracy"},
    }


def batch_costs(args: argparse.Namespace) -> Costs:
    """Return the seconds of a batch of each side that trains as long as the ensemble, and of the ensemble."""
    num = 4 if args.short else 100
    sides = {name: side for name, side in SIDES.items() if side.is_equal_time or name == ENSEMBLE}
    fns = {name: functools.partial(trained, side, TUNING_SEEDS, num, args) for name, side in sides.items()}
    seconds = paired(fns, calls=1, blocks=2 if args.short else 8, clock=time.process_time)
    return {name: median_us(seconds[name]) / num / 1e6 for name in fns}


def read(path: pathlib.Path | None) -> list[dict[str, Any]]:
    """Return the lines of a file of records."""
    return [] if path is None or not path.exists() else [json.loads(line) for line in path.read_text().splitlines()]


def write(path: pathlib.Path | None, line: Mapping[str, Any]) -> None:
    """Append a record to a file."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def costs_in(path: pathlib.Path | None, args: argparse.Namespace) -> Costs:
    """Return the costs of batches, which the first call measures and records."""
    costs = next((line["costs"] for line in read(path) if "costs" in line), None)
    if costs is None:
        costs = batch_costs(args)
        write(path, {"costs": costs, **facts()})
    return costs


def length(name: str, epochs: int, costs: Costs, args: argparse.Namespace) -> int:
    """Return the number of batches of a side."""
    usual = 8 if args.short else epochs * (len(images(args.short)[1].train_inputs) // BATCH_SIZE)
    return round(usual * costs[ENSEMBLE] / costs[name]) if SIDES[name].is_equal_time else usual


def rows_of(found: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each side, and one for the differences of the ensemble from each of the others, by budget."""
    rows: list[Row] = []
    for epochs in sorted({one["epochs"] for one in found if "side" in one}):
        of = {name: [one for one in found if (one.get("side"), one.get("epochs")) == (name, epochs)] for name in SIDES}
        for name, runs in of.items():
            rows.append(
                {
                    "epochs": epochs,
                    "side": name,
                    "parameters": runs[0]["parameters"],
                    "batches": runs[0]["batches"],
                    "seconds": f"{fmean(one['seconds'] for one in runs):.1f}",
                    **{measure: shown(measure, [one[measure] for one in runs]) for measure in MEASURES},
                }
            )
        for name, runs in of.items():
            pairs = list(zip(of[ENSEMBLE], runs, strict=True))
            if name != ENSEMBLE:
                differences = {measure: [a[measure] - b[measure] for a, b in pairs] for measure in MEASURES}
                row = {measure: shown(measure, values, "+") for measure, values in differences.items()}
                rows.append({"epochs": epochs, "side": f"ensemble less {name}", **row})
    return rows


def shown(measure: str, values: list[float], sign: str = "") -> str:
    """Return a mean with its interval: per cent for accuracy and calibration error."""
    is_share = measure.startswith(("accuracy", "calibration"))
    scaled = [100 * value if is_share else value for value in values]
    (one,) = analysis.simultaneous_intervals(torch.tensor([scaled], dtype=torch.float64))
    digits = f"{sign}.{2 if is_share or measure == 'temperature' else 4}f"
    mean, low, high = (format(number, digits) for number in (one.mean, one.low, one.high))
    return f"{mean} ({low} to {high})" if math.isfinite(one.low) else mean


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default %(default)s)")
    parser.add_argument("--tune", action="store_true", help="try other settings for each side, with another seed")
    parser.add_argument("--backend", default="inductor", help="what compiles (default %(default)s)")
    parser.add_argument("--short", action="store_true", help="a few batches of small images, to see that it runs")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the JSON (default: results/, with --short none)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = None if args.short else RECORDS / f"ensemble{'_tuning' if args.tune else ''}.jsonl"
    costs = costs_in(path, args)
    if args.tune:
        tune(path, costs, args)
        return
    found = read(path)
    done = {(one["side"], one["epochs"], one["seed"]) for one in found if "side" in one}
    budgets, seeds = (BUDGETS[:1], range(1)) if args.short else (BUDGETS, range(args.seeds))
    for epochs, seed, (name, side) in itertools.product(budgets, seeds, SIDES.items()):
        if (name, epochs, seed) not in done:
            found.append(record(name, side, seed, epochs, costs, args))
            write(path, found[-1])
            print(f"{name}, seed {seed}: {found[-1]['loss']:.4f} after {found[-1]['seconds']:.1f} s", flush=True)
    save("quality_ensemble", rows_of(found), args.out or (None if args.short else RESULTS))


def tune(path: pathlib.Path | None, costs: Costs, args: argparse.Namespace) -> None:
    """Try settings for each side with the smallest budget, and print the results."""
    done = [(one.get("side"), one.get("settings")) for one in read(path)]
    for (name, side), settings in itertools.product(SIDES.items(), TUNING):
        tried = replace(side, **settings)
        if (name, asdict(tried)) not in done:
            found = record(name, tried, TUNING_SEEDS, BUDGETS[0], costs, args)
            write(path, found)
            print(name, settings, {key: round(found[key], 4) for key in ("held-out loss", *MEASURES)}, flush=True)


if __name__ == "__main__":
    main()
