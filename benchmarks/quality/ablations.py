"""What does each method of a recipe bring?

    PURECOMPOSE_DATA=folder python benchmarks/quality/ablations.py TASK [--seeds 5]

TASK is mnist, cifar10 or shakespeare. The recipe of that script trains for its number of batches with all its methods,
with all but each one, and with none (`pc.analysis.ablate`: the same initial weights, batches and draws on both sides of
a comparison; simultaneous 95 % intervals). The optimizer is the recipe's in all runs. The table has what a method adds
to the accuracy, in points, or to the validation loss, and the time of a step with all methods over that without the
method, interleaved in one process.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cifar10
import mnist
import shakespeare
import torch
from _cifar import length
from _fit import METRICS, Parts, new_state, new_step
from _task import TUNING_SEEDS, Settings, Task
from _timing import RESULTS, Row, paired, quartiles, save
from torch import nn

import purecompose as pc
from purecompose.analysis.effects import FEWEST_SEEDS


class Subject(NamedTuple):
    """A recipe and what it trains."""

    task: Task
    side: str
    parts: Callable[[Settings], Parts]
    net: Callable[[int], nn.Module]
    train: Callable[[int], Any]
    """The batches of this size."""
    test: Any
    length: Callable[[Settings], int]


def _mnist() -> Subject:
    data = mnist.images("mnist.npz")
    train, test = _batches(data)
    return Subject(mnist.TASK, "recipe", mnist.recipe_parts, mnist.network, train, test, mnist.length)


def _cifar10() -> Subject:
    setup = cifar10.SETUP
    train, test = _batches(setup.data({}))
    return Subject(cifar10.TASK, "recipe", setup.parts, setup.network, train, test, length)


def _shakespeare() -> Subject:
    text = shakespeare.load("tinyshakespeare.txt")
    train, test = _batches(text, shakespeare.EVALUATION_BATCH)

    def net(seed: int) -> nn.Module:
        return shakespeare.new_net(seed, text.num_classes)

    parts = shakespeare.recipe_parts
    return Subject(shakespeare.TASK, "recipe", parts, net, train, test, shakespeare.length)


def _batches(data: Any, test_size: int = 1000) -> tuple[Callable[[int], Any], Any]:
    def train(size: int) -> Any:
        return pc.data.arrays(data.train_inputs, data.train_targets, size, drop_last=True)

    return train, pc.data.arrays(data.test_inputs, data.test_targets, test_size, shuffle=False)


SUBJECTS: Mapping[str, Callable[[], Subject]] = {"mnist": _mnist, "cifar10": _cifar10, "shakespeare": _shakespeare}


def rows_of(subject: Subject, seeds: int) -> list[Row]:
    """Return a row for each method."""
    task = subject.task
    settings = task.settings(subject.side, task.precisions[0])
    parts, train = subject.parts(settings), subject.train(settings["batch_size"])
    num_batches, is_loss = subject.length(settings), task.is_lower_better

    def state(seed: int) -> pc.State:
        return new_state(subject.net(seed), parts, num_batches, seed, settings)

    metric = "loss" if is_loss else "accuracy"
    found = pc.analysis.ablate(
        lambda methods: new_step(methods, settings),
        state,
        train,
        parts.methods,
        evaluate=pc.Evaluator(subject.test, METRICS[metric], every="1dur"),
        metric=f"eval/{metric}",
        seeds=range(TUNING_SEEDS, TUNING_SEEDS + seeds),
        sequential=True,
        report=print,
    )
    times = _times(parts, state(0), train, settings)
    factor, digits, unit = (1, 3, "") if is_loss else (100, 2, " points")
    rows: list[Row] = []
    for effect in found.effects:
        interval = effect.interval
        assert interval is not None
        low, middle, high = quartiles(times[effect.method])
        rows.append(
            {
                "task": task.name,
                "method": effect.method,
                "measure": task.metric,
                "with it, minus without": f"{factor * interval.mean:+.{digits}f}{unit} "
                f"({factor * interval.low:+.{digits}f} to {factor * interval.high:+.{digits}f})",
                "verdict": effect.verdict,
                "time of a step with it, over that without": f"{middle:.2f} ({low:.2f} to {high:.2f})",
            }
        )
    return rows


def _times(parts: Parts, state: pc.State, train: Any, settings: Settings) -> dict[str, list[float]]:
    """Return the time of a step with all methods over that without each method, in blocks of steps."""
    batch = next(iter(train.epoch(pc.random.key(0), 0, 0)))

    def stepping(methods: list[pc.Algorithm]) -> Callable[[], None]:
        step = new_step(methods, settings)
        now = [step(step.init(state), batch)]

        def take() -> None:
            now[0] = step(now[0], batch)

        return take

    left_out = {one.name: [other for other in parts.methods if other is not one] for one in parts.methods}
    steps = {"all": stepping(parts.methods), **{name: stepping(rest) for name, rest in left_out.items()}}
    seconds = paired(steps, calls=5, blocks=12)
    return {name: [all_ / one for all_, one in zip(seconds["all"], seconds[name], strict=True)] for name in left_out}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("task", choices=list(SUBJECTS))
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, at least 5 (default %(default)s)")
    args = parser.parse_args()
    if args.seeds < FEWEST_SEEDS:
        parser.error("fewer than 5 seeds have no intervals")
    torch.set_num_threads(1)
    rows = rows_of(SUBJECTS[args.task](), args.seeds)
    save(f"quality_ablation_{args.task}", rows, RESULTS)


if __name__ == "__main__":
    main()
