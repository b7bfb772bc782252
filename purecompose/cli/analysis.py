"""`replay`, `bisect` and `compare`, which analyse recorded runs; `ablate`, `sweep` and `lr-range`, which train to
compare methods and settings."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from purecompose import analysis
from purecompose._support import specs
from purecompose._support.messages import say
from purecompose._support.specs import check_number, check_whole
from purecompose.algorithms import BY_NAME
from purecompose.analysis import RecordedRun, predicates
from purecompose.analysis.proposing import proposed
from purecompose.analysis.sweeping import with_named_rate
from purecompose.cli.options import (
    Folder,
    Number,
    Run,
    Shown,
    Time,
    UsageError,
    imported,
    is_own,
    one_line,
    reported_as,
)
from purecompose.cli.parts import check
from purecompose.cli.results import KeptRun
from purecompose.cli.settings import Given, Settings, meant_setting
from purecompose.cli.setup import Data, Setup, arithmetic_of, completed, prepare
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.errors import CheckpointError, MismatchError
from purecompose.random import key
from purecompose.run.evaluation import Evaluator
from purecompose.run.saving.folder import check_replaceable
from purecompose.saving import save
from purecompose.schedule import Hparam, hparam
from purecompose.transforms.compilation import compile


_SEEDS = 8
"""Seeds of an ablation without --seeds."""
_WRONG = (ValueError, TypeError, FileNotFoundError, FileExistsError)
"""Errors of `analysis` about arguments and folders."""


@dataclass(frozen=True, kw_only=True)
class RecordedOptions(KeptRun):
    """A run that is replayed, on the command line.

    Attributes:
        run: Folder of a run.
        data: Where the run's data are now (default: as in its settings).
        allow_imports: Import code (my_module:name) that the settings of the run name.
        not_strict: Warn instead of stopping if the code, the data or versions are not those of the run.
    """

    not_strict: bool = False

    @contextmanager
    def opened(self) -> Iterator[tuple[RecordedRun, Setup]]:
        """Open the run with the arithmetic of its training; errors about arguments are usage errors."""
        settings, data = self.completed()
        with arithmetic_of(settings), reported_as("", *_WRONG):
            setup = prepare(settings, data)
            run = RecordedRun(
                self.run,
                setup.step,
                setup.state,
                setup.train_data,
                evaluate=setup.evaluators,
                stop=setup.stop,
                microbatches=setup.microbatches,
                strict=not self.not_strict,
            )
            yield run, setup


def replay(recorded: RecordedOptions, *, at: Time, out: Folder | None = None) -> None:
    """Compute the state of a run at any batch, from its checkpoints.

    Args:
        recorded: The run.
        at: Point of the run: 1234ba, 3ep, 0.5dur.
        out: Save the state there, as a checkpoint.

    Examples:
        python -m purecompose train --out runs/a --keep log
        python -m purecompose replay runs/a --at 1234ba --out state
    """
    if out is not None:
        with reported_as("--out"):
            check_replaceable(Path(out))
    with recorded.opened() as (run, _):
        found = analysis.replay(run, at)
        say(found)
        loss = found.state.loss
        say(f"loss {'none' if loss is None else loss.tolist()}")
        if out is not None:
            with reported_as("--out"):
                say(f"saved in {save(found.state, out, step=run.step)}")


def bisect(
    recorded: RecordedOptions, *, until: Annotated[str, Shown("PREDICATE")], stays: bool = False, passes: bool = False
) -> None:
    """Find the first batch of a run at which something is true, and the unusual examples in it.

    Args:
        recorded: The run.
        until: Predicate: loss_above(5.0), not_finite, weight_norm_above(100.0), or my_module:my_predicate, a function
            of a state.
        stays: Once true, it stays true: search by halving.
        passes: It may become false again: search from the start.

    Examples:
        python -m purecompose bisect runs/a --until not_finite --stays
        python -m purecompose bisect runs/a --until "loss_above(5.0)" --passes
    """
    if stays == passes:
        raise UsageError("bisect needs one of --stays, if what is true stays true, and --passes, if it may not")
    with reported_as("--until"):
        call = specs.parse_one(until)
        if is_own(call.name) and not call.args and not call.kwargs:
            predicate = imported(call.name)
        else:
            known = (predicates.loss_above, predicates.not_finite, predicates.weight_norm_above)
            predicate = specs.build(call, {one.__name__: one for one in known}, "predicate")
    with recorded.opened() as (run, _):
        try:
            found = analysis.bisect(run, predicate, stays=stays)
        except RuntimeError as error:
            if not str(error).startswith("bisect: the predicate"):
                raise
            raise UsageError(one_line(error)) from error
        say(found)


def compare(
    run_a: Run, run_b: Run, *, tolerance: Annotated[float, Shown("FRACTION")] = 0.0, allow_imports: bool = False
) -> None:
    """Show where two runs begin to differ, and why.

    Args:
        run_a: Folder of a run.
        run_b: Folder of the other.
        tolerance: Fraction of a tensor's largest magnitude by which it may differ; 0 compares bits.
        allow_imports: Import code (my_module:name) that the settings of a run name.

    Examples:
        python -m purecompose compare runs/a runs/b --tolerance 1e-5
    """
    folders: list[Any] = [Path(run_a), Path(run_b)]
    with ExitStack() as stack:
        runs = folders  # enough for a coarser answer
        try:
            options = [RecordedOptions(run, allow_imports=allow_imports) for run in (run_a, run_b)]
            runs = [stack.enter_context(one.opened())[0] for one in options]
        except (UsageError, CheckpointError):
            pass
        with reported_as("", *_WRONG):
            try:
                say(analysis.compare(*runs, tolerance=tolerance))
            except MismatchError as error:  # other versions, threads, ...: differences that are asked for
                say(analysis.compare(*folders, tolerance=tolerance))
                say(f"\nthe runs are not replayed: {one_line(error)}")


@contextmanager
def _prepared(given: Given) -> Iterator[tuple[Settings, Data, Setup]]:
    """Return settings, data and one run of an experiment from the options, with the arithmetic of a run."""
    settings, data = completed(given.chosen(), allowed=given.allowed)
    with arithmetic_of(settings), reported_as("", *_WRONG):
        yield settings, data, prepare(dataclasses.replace(settings, seeds=1), data)


def _at_end(setup: Setup) -> Evaluator:
    """Return the evaluator whose metrics decide, at the end of the run only."""
    decisive = next(one for one in setup.evaluators if one.label == setup.watched)
    return dataclasses.replace(decisive, every="1dur")


def ablate(given: Given, *, out: Folder | None = None, metric: str | None = None, sequential: bool = False) -> None:
    """Train with and without each method, and show the effect of each.

    Args:
        given: The settings of the runs. --seeds is the number of seeds (default: 8); settings of evaluation, stopping
            and checkpoints have no effect, since the metric is measured at the end of each run.
        out: Write the runs and the table there, or resume them.
        metric: Metric to compare (default: eval/accuracy; eval/loss for text).
        sequential: Train the seeds one after the other, and not as a population.

    Examples:
        python -m purecompose ablate --algorithms "mixup,sam" --duration 10ep --seeds 8 --out runs/ablation
    """
    if given.chosen().get("algorithms") == "none":
        raise UsageError("--algorithms: none: expected the methods to compare, such as mixup,sam")
    with _prepared(given) as (settings, data, setup):

        def state(seed: int) -> State:
            return prepare(dataclasses.replace(settings, algorithms="none", seed=seed, seeds=1), data).state

        def step_with(methods: Sequence[Algorithm]) -> Step:
            step = setup.plain_step.replace(algorithms=methods)
            return compile(step, quiet=True) if settings.compile else step

        num_seeds = settings.seeds if given.names("seeds") else _SEEDS
        found = analysis.ablate(
            step_with,
            state,
            setup.train_data,
            setup.plain_step.algorithms,
            evaluate=_at_end(setup),
            metric=metric or f"{setup.watched}/{setup.kind.decides}",
            seeds=range(settings.seed, settings.seed + num_seeds),
            sequential=sequential,
            folder=out,
            report=lambda line: say(line, flush=True),
        )
        say(f"\n{found}")


def sweep(
    given: Given,
    *,
    values: list[Annotated[str, Shown("NAME=VALUES")]],
    trials: Number | None = None,
    search: Literal["grid", "random", "optuna"] | None = None,
    rounds: Number = 4,
    metric: str | None = None,
) -> None:
    """Train populations with different settings, all combinations or those of a search, and print them by rank.

    Args:
        given: The settings of the run. --seeds is the number of seeds of each setting, --seed that of a search.
        values: Values of a setting: lr=0.001,0.01,0.1, optimizer.weight_decay=..., mixup.alpha=...; or a range, such as
            lr=log(1e-4,1e-1), mixup.alpha=uniform(0.1,0.5); may be repeated.
        trials: Number of settings of a search (default: all combinations).
        search: How to choose settings (default: random with --trials, otherwise grid).
        rounds: With --search optuna: number of populations one after the other, each with what the earlier ones taught.
        metric: Metric to rank by (default: eval/loss).

    Examples:
        python -m purecompose sweep --values lr=0.001,0.003,0.01,0.03 --duration 10ep --compile
        python -m purecompose sweep --values lr=0.001,0.01 --values mixup.alpha=0.1,0.4
        python -m purecompose sweep --values "lr=log(1e-4,1e-1)" --values "mixup.alpha=uniform(0,0.5)" --trials 20
        python -m purecompose sweep --values "lr=log(1e-4,1e-1)" --trials 20 --search optuna
    """
    with reported_as("--values"):
        found = dict(map(_values, values))
        if len(found) < len(values):
            raise ValueError(f"expected each name once, got {', '.join(text.partition('=')[0] for text in values)}")
    _check_values(given, found)
    with reported_as("", *_WRONG):
        proposed(found, search, trials, rounds, key(given.values.get("seed", 0)), is_better_lower=True)
    with _prepared(given) as (settings, _, setup):
        with reported_as("--values"):
            step, state = _with_names(setup.plain_step, setup.state, found)
        ranked = analysis.sweep(
            compile(step, quiet=True) if settings.compile else step,
            state,
            setup.train_data,
            found,
            evaluate=_at_end(setup),
            metric=metric or f"{setup.watched}/loss",
            trials=trials,
            search=search,
            rounds=rounds,
            seeds=settings.seeds,
        )
        say(ranked)


def _check_values(given: Given, values: Mapping[str, Any]) -> None:
    """Raise for values that a setting cannot have, before the data are loaded."""
    chosen = given.chosen()
    for name, numbers in values.items():
        owner, _, argument = ("optimizer.lr" if name == "lr" else name).partition(".")
        for number in (numbers.low, numbers.high) if isinstance(numbers, analysis.Range) else numbers:
            within = {**chosen.get("within", {}), owner: {**chosen.get("within", {}).get(owner, {}), argument: number}}
            check({**chosen, "within": within}, "--values")


_RANGES = {"log": partial(analysis.Range, log=True), "uniform": analysis.Range}


def _values(text: str) -> tuple[str, Any]:
    """Return the name and the numbers, or the range, in NAME=VALUES; `optimizer.lr` is lr."""
    name, _, given = text.partition("=")
    name = "lr" if name == "optimizer.lr" else name
    if name != "lr" and given and "." not in name:
        hint = meant_setting(name)
        raise ValueError(f"{name}: expected lr, optimizer.ARGUMENT or METHOD.ARGUMENT;{hint}".rstrip(";"))
    if "(" in given:
        call = specs.parse_one(given)
        if call.name in ("loguniform", "log_uniform"):
            raise ValueError(f"no range is called {call.name!r}; did you mean 'log', as in {name}=log(1e-4,1e-1)?")
        return name, specs.build(call, _RANGES, "range")
    try:
        return name, [float(one) for one in given.split(",")]
    except ValueError as error:
        raise ValueError(
            f"{text}: expected a name and numbers, such as lr=0.001,0.01,0.1, or a range, such as lr=log(1e-4,1e-1)"
        ) from error


def _with_names(step: Step, state: State, names: Iterable[str]) -> tuple[Step, State]:
    """Return step and state with named scalars in settings: "lr", "optimizer.ARGUMENT" or "METHOD.ARGUMENT"."""
    for name in names:
        owner, _, argument = name.partition(".")
        if name == "lr":
            state = with_named_rate(state, keeps_schedule=True)
        elif owner == "optimizer":
            scalar = _named(name, getattr(state.optimizer, argument, None))
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
    known = [one for one in methods if one in BY_NAME]
    if owner not in known:
        there = ", ".join(["lr", "optimizer.ARGUMENT", *(f"{one}.ARGUMENT" for one in known)])
        raise ValueError(f"{name}: there is no such setting in this run; there are {there}")
    call = specs.by_name(specs.parse_one(repr(methods[owner])), BY_NAME)
    if argument not in call.kwargs:
        raise ValueError(f"{name}: {owner} has the arguments {', '.join(call.kwargs)}")
    scalar = _named(name, call.kwargs[argument])
    changed = dataclasses.replace(call, kwargs={**call.kwargs, argument: scalar})
    methods[owner] = specs.build(changed, BY_NAME, "algorithm")
    return step.replace(algorithms=list(methods.values())), scalar


def _named(name: str, value: Any) -> Hparam:
    """Return a scalar with the number that it replaces as its default."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: expected a setting that is a number, got {value!r}")
    return hparam(name, float(value))


def lr_range(
    given: Given,
    *,
    low: Annotated[float, Shown("RATE")] = 1e-5,
    high: Annotated[float, Shown("RATE")] = 1.0,
    batches: Number = 100,
) -> None:
    """Train with a growing learning rate, and suggest one.

    Args:
        given: The settings of the run.
        low: First learning rate.
        high: Last learning rate.
        batches: Number of batches.

    Examples:
        python -m purecompose lr-range --optimizer adam --batches 200
    """
    with reported_as(""):
        check_number(low, "--low", 0, above=True)
        check_number(high, "--high", low, above=True)
        check_whole(batches, "--batches", 10)
    with _prepared(given) as (_, _, setup):
        given_to = setup.step, setup.state, setup.train_data
        say(analysis.learning_rate_range(*given_to, low=low, high=high, num_batches=batches))
