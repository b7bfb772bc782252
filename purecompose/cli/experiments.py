"""`ablate`, `sweep`, `lr-range` and `sensitivity`: commands that train to compare methods and settings."""

import argparse
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from purecompose import analysis
from purecompose._support import specs
from purecompose._support.messages import say
from purecompose.algorithms import FACTORIES
from purecompose.analysis.sweeping import with_named_rate
from purecompose.cli.analysis import opened, usage_errors
from purecompose.cli.kinds import Data
from purecompose.cli.own import allowed_by
from purecompose.cli.settings import UsageError, add_settings, check_target, named, whole
from purecompose.cli.setup import Setup, completed, fixed_arithmetic, plain_warnings, prepare, reported_as
from purecompose.cli.sources import chosen
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.run.evaluation import Evaluator
from purecompose.schedule import Hparam, hparam
from purecompose.transforms.compilation import compile


_SEEDS = 8
"""Seeds of an ablation without --seeds."""


def _add_ablate_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `ablate`."""
    add = command.add_argument
    add("--out", type=named, metavar="FOLDER", help="write the runs, the table and a picture there, or resume them")
    add("--all-subsets", action="store_true", help="train all subsets of the methods (default: all, all but one, none)")
    add("--metric", help="the metric to compare (default: eval/accuracy; eval/loss for text)")
    add("--resolution", type=float, metavar="NUMBER", help="the smallest difference that matters (default: none)")
    add_settings(command)


def _add_sweep_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `sweep`."""
    add = command.add_argument
    add(
        "--values",
        action="append",
        required=True,
        metavar="NAME=LIST",
        help="lr=0.001,0.01,0.1, optimizer.weight_decay=..., mixup.alpha=...; repeat it to train all combinations",
    )
    add("--metric", help="the metric to rank by (default: eval/loss)")
    add("--out", type=named, metavar="FOLDER", help="write the run of the population there, or resume it")
    add_settings(command)


def _add_range_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `lr-range`."""
    add = command.add_argument
    add("--low", type=float, default=1e-5, metavar="RATE", help="first learning rate (default: 1e-5)")
    add("--high", type=float, default=1.0, metavar="RATE", help="last learning rate (default: 1)")
    add("--batches", type=whole, default=100, metavar="N", help="number of batches (default: 100)")
    add("--out", type=named, metavar="FILE", help="draw the losses: *.png, *.svg or *.pdf")
    add_settings(command)


def _add_sensitivity_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `sensitivity`."""
    add = command.add_argument
    add("run", metavar="RUN", help="the folder of a run")
    add("--window", required=True, metavar="FROM,TO", help="the part of the run: 100ba,150ba or 0.5dur,0.6dur")
    add("--to", required=True, metavar="LIST", help="settings: lr, optimizer.momentum, label_smoothing.smoothing, ...")
    add("--mode", choices=("auto", "forward", "reverse"), default="auto", help="differentiation mode (default: auto)")
    add("--data", help="where the run's data are now (default: as in its settings)")
    add("--allow-imports", action="store_true", help="import code that the settings of the run name")
    add("--not-strict", action="store_true", help="warn if the code, the data or versions are not those of the run")


class _Parts(NamedTuple):
    """What the runs of an experiment have in common, made from the settings of one run."""

    settings: Mapping[str, Any]
    data: Data
    setup: Setup

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator whose metrics decide, at the end of the run only."""
        own = next(one for one in self.setup.evaluators if one.label == self.setup.watched)
        return dataclasses.replace(own, every="1dur")

    def state(self, seed: int) -> State:
        """Return the state of a seed, as no method has changed it."""
        return prepare({**self.settings, "algorithms": "none", "seed": seed, "seeds": 1}, self.data).state

    def step_with(self, methods: Sequence[Algorithm]) -> Step:
        """Return the step with these methods."""
        step = self.setup.plain_step.replace(algorithms=methods)
        return compile(step, quiet=True) if self.settings["compile"] else step


@contextmanager
def _prepared(options: argparse.Namespace) -> Iterator[_Parts]:
    """Prepare the parts of an experiment from the options, with the arithmetic of a run."""
    settings, data = completed(chosen(options), allowed=allowed_by(options))
    with fixed_arithmetic(settings["threads"]), plain_warnings(), usage_errors(ValueError, TypeError, FileExistsError):
        yield _Parts(settings, data, prepare({**settings, "seeds": 1}, data))


def _show_ablation(options: argparse.Namespace) -> None:
    """Train with subsets of the methods, and print what each contributes."""
    with _prepared(options) as parts:
        num_seeds = _SEEDS if options.seeds is None else options.seeds
        first = parts.settings["seed"]
        found = analysis.ablate(
            parts.step_with,
            parts.state,
            parts.setup.train_data,
            parts.setup.plain_step.algorithms,
            evaluate=parts.evaluator,
            metric=options.metric or f"{parts.setup.watched}/{parts.setup.kind.decides}",
            seeds=range(first, first + num_seeds),
            design="all" if options.all_subsets else "leave_one_out",
            resolution=options.resolution,
            folder=options.out,
            report=lambda line: say(line, flush=True),
        )
        say(f"\n{found}")
        if options.out is not None and all(effect.interval is not None for effect in found.effects):
            picture = Path(options.out) / "ablation.png"
            if num_seeds >= analysis.FEWEST_SEEDS:
                say(f"\nthe picture is in {analysis.draw_ablation(found, picture)}")


def _show_sweep(options: argparse.Namespace) -> None:
    """Train a population over settings, and print them, the best first."""
    with _prepared(options) as parts:
        with reported_as("--values"):
            values = dict(map(_values, options.values))
            step, state = _with_names(parts.setup.plain_step, parts.setup.state, values)
        found = analysis.sweep(
            compile(step, quiet=True) if parts.settings["compile"] else step,
            state,
            parts.setup.train_data,
            values,
            evaluate=parts.evaluator,
            metric=options.metric or f"{parts.setup.watched}/loss",
            seeds=options.seeds or 1,
            folder=options.out,
        )
        say(found)


def _show_range(options: argparse.Namespace) -> None:
    """Train with a growing learning rate, and print the losses and a suggestion."""
    if options.out is not None:
        check_target("--out", options.out)
    with _prepared(options) as parts:
        step, state, data = parts.setup.step, parts.setup.state, parts.setup.train_data
        given = {"low": options.low, "high": options.high, "num_batches": options.batches}
        found = analysis.learning_rate_range(step, state, data, **given)
        say(found)
        if options.out is not None:
            say(f"the picture is in {analysis.draw_learning_rate_range(found, options.out)}")


def _show_sensitivity(options: argparse.Namespace) -> None:
    """Print how the loss after a window of a run depends on settings."""
    start, comma, stop = options.window.partition(",")
    if not comma:
        raise UsageError(f"--window: {options.window}: expected two points of the run, such as 100ba,150ba")
    names = [name.strip() for name in options.to.split(",")]
    with opened(options, options.run) as (run, setup), usage_errors(ValueError, TypeError, FileExistsError):
        window = analysis.window_of(run, start, stop)
        with reported_as("--to"):
            step, state = _with_names(setup.plain_step, window.state, names)
        evaluator = next(one for one in setup.evaluators if one.label == setup.watched)
        say(analysis.sensitivity(window._replace(step=step, state=state), evaluator, names, mode=options.mode))


def _with_names(step: Step, state: State, names: Iterable[str]) -> tuple[Step, State]:
    """Return the step and the state with named scalars in place of settings.

    Args:
        step: The step.
        state: The state.
        names: "lr", "optimizer.ARGUMENT" or "METHOD.ARGUMENT", which are also the names of the scalars.
    """
    for name in names:
        owner, dot, argument = name.partition(".")
        if name == "lr":
            state = with_named_rate(state, keeps_schedule=True)
        elif dot and owner == "optimizer":
            scalar = hparam(name, _number(getattr(state.optimizer, argument, None), name))
            changed = dataclasses.replace(state.optimizer, **{argument: scalar})
            state = state.replace(optimizer=changed).with_hparams([scalar])
        else:
            step, scalar = _with_named_argument(step, name)
            state = state.with_hparams([scalar])
    return step, state


def _with_named_argument(step: Step, name: str) -> tuple[Step, Hparam]:
    """Return the step in which an argument of a method is a named scalar, and the scalar."""
    owner, _, argument = name.partition(".")
    methods = {method.name: method for method in step.algorithms}
    if owner not in methods or owner not in FACTORIES or not argument:
        known = ", ".join(["lr", "optimizer.ARGUMENT", *(f"{one}.ARGUMENT" for one in methods if one in FACTORIES)])
        raise ValueError(f"{name}: there is no such setting in this run; there are {known}")
    call = specs.by_name(specs.parse_one(repr(methods[owner])), FACTORIES)
    if argument not in call.kwargs:
        raise ValueError(f"{name}: {owner} has the arguments {', '.join(call.kwargs)}")
    scalar = hparam(name, _number(call.kwargs[argument], name))
    named_call = dataclasses.replace(call, kwargs={**call.kwargs, argument: scalar})
    methods[owner] = specs.build(named_call, FACTORIES, "algorithm")
    return step.replace(algorithms=list(methods.values())), scalar


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: expected a setting that is a number, got {value!r}")
    return float(value)


def _values(text: str) -> tuple[str, list[float]]:
    """Return the name and the numbers in NAME=LIST."""
    name, equals, given = text.partition("=")
    try:
        numbers = [float(one) for one in given.split(",")]
    except ValueError:
        numbers = []
    if not equals or not name or not numbers:
        raise ValueError(f"{text}: expected a name and numbers, such as lr=0.001,0.01,0.1")
    return name.strip(), numbers


COMMANDS = (
    ("ablate", "train with and without each method, and show the effect of each", _show_ablation, _add_ablate_options),
    ("sweep", "train a population with different settings, and rank them", _show_sweep, _add_sweep_options),
    ("lr-range", "train with a growing learning rate, and suggest one", _show_range, _add_range_options),
    (
        "sensitivity",
        "show how the loss after a part of a run depends on its settings",
        _show_sensitivity,
        _add_sensitivity_options,
    ),
)
"""Name, help text, function and function that adds the options."""
EXAMPLES = {
    "ablate": """\
examples:
  python -m purecompose ablate --algorithms "mixup,label_smoothing,sam" --duration 10ep --seeds 8 --out runs/ablation
  python -m purecompose ablate --algorithms "mixup,label_smoothing" --all-subsets --resolution 0.002

The runs have the settings of `train`; --seeds is the number of seeds (default: 8). Settings of evaluation, stopping and
checkpoints have no effect: the metric is measured at the end of each run.
""",
    "sweep": """\
examples:
  python -m purecompose sweep --values lr=0.001,0.003,0.01,0.03 --duration 10ep --compile
  python -m purecompose sweep --values lr=0.001,0.01 --values mixup.alpha=0.1,0.4

--seeds is the number of seeds of each setting (default: 1).
""",
    "lr-range": "example:\n  python -m purecompose lr-range --optimizer adam --batches 200 --out range.png\n",
    "sensitivity": "example:\n  python -m purecompose sensitivity runs/a --window 100ba,150ba --to lr,mixup.alpha\n",
}
