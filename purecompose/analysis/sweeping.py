"""`sweep`: train a population over named scalars, with one compiled graph for all settings."""

import itertools
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from purecompose import random
from purecompose._support.checks import check_flag, check_number, check_whole, shown
from purecompose._support.tables import table
from purecompose.analysis.cells import first_batch, population_of
from purecompose.analysis.halving import SuccessiveHalving
from purecompose.analysis.rates import with_named_rate
from purecompose.core.compose import Step
from purecompose.core.state import State, check_single
from purecompose.observers import History
from purecompose.records import RunFolder, read_run
from purecompose.records.layout import CONFIG
from purecompose.run.evaluation import Evaluator, Observer
from purecompose.run.fit import fit
from purecompose.run.rules import mode_of
from purecompose.transforms.compilation import CompiledStep, compile


@dataclass(frozen=True)
class Trial:
    """One setting of a sweep."""

    values: dict[str, float]
    """The named scalars at the end of the run, or when the setting was eliminated."""
    metric: float
    """The mean of the metric over the seeds, at the last evaluation."""
    by_seed: tuple[float, ...]
    """The metric of each seed."""
    earlier: tuple[tuple[str, dict[str, float]], ...] = ()
    """For a copy of another setting, the values with which its weights were trained before, each with the time until
    which they were used. Empty for a setting that was trained from the start."""
    eliminated_at: str | None = None
    """The rung at which the setting was eliminated; `None` for a setting that was trained to the end."""


@dataclass(frozen=True)
class Sweep:
    """The result of `sweep`; it prints as a table.

    Attributes:
        metric: The metric by which the trials are ranked.
        trials: The settings at the end, the best first; then the eliminated ones, the latest first.
        state: The state of the population at the end.
        best: The index of the best member in the state.
    """

    metric: str
    trials: tuple[Trial, ...]
    state: State
    best: int

    def __str__(self) -> str:
        names = list(self.trials[0].values)
        rows = [
            [*(f"{trial.values[name]:.4g}" for name in names), f"{trial.metric:.5g}", _history(trial)]
            for trial in self.trials
        ]
        return table([*names, self.metric, "trained"], rows)


def sweep(
    step: Step,
    state: State,
    data: Any,
    values: Mapping[str, Sequence[float]] | Iterable[Mapping[str, float]],
    *,
    evaluate: Evaluator,
    metric: str | None = None,
    seeds: int = 1,
    rungs: Sequence[str] = (),
    keep: float = 0.5,
    spread: float = 2.0,
    compiled: bool = False,
    chunk_size: int | None = None,
    observers: Observer | Iterable[Observer] = (),
    folder: str | os.PathLike[str] | None = None,
) -> Sweep:
    """Train a population with different values of named scalars, and rank them by a metric.

    All members have the same initial weights, batches and draws for the same seed, and are trained at once: a compiled
    step compiles one graph. If the optimizer's learning rate is a number, it can be swept as "lr": it becomes
    `hparam("lr", ...)`, times its schedule if it has one.

    With `rungs`, the worst settings are replaced at these times by copies of the best ones, with perturbed values; see
    `SuccessiveHalving`. `Trial.earlier` has the previous values of a copy.

    Args:
        step: The step of one member, as `compose` or `compile` makes it.
        state: The state at the start, with its duration.
        data: Training data, as for `fit`.
        values: For each name the values, of which all combinations are trained; or a list of settings, each a mapping
            from names to values.
        evaluate: The evaluator.
        metric: The metric, such as "eval/loss"; by default the evaluator's first.
        seeds: Number of keys with which each setting is trained: the state's, and others that follow from it.
        rungs: Times at which settings are replaced, such as ("0.25dur", "0.5dur").
        keep: Fraction of the settings that survive a rung, in (0, 1).
        spread: Largest factor by which a value of a copy is changed at the first rung, at least 1; its logarithm is
            halved at each following rung.
        compiled: True to compile a composed step.
        chunk_size: Number of members computed at a time, which bounds the memory; see `population`.
        observers: Observers of the run.
        folder: A folder for the run; the same call resumes an interrupted run in it, and other settings are refused.

    Returns:
        The trials, ranked by the metric, and the state of the population at the end.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range, the state has no such hparam, or the
            folder contains another sweep.

    Example:
        >>> from purecompose import compose, data, loop_events, losses, optim
        >>> inputs = random.normal(random.key(0), (64, 4))
        >>> train = data.arrays(inputs, (inputs[:, 0] > 0).long(), 16)
        >>> net = torch.nn.Linear(4, 2)
        >>> state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="4ep")
        >>> found = sweep(compose(loop_events), state, train, {"lr": [0.001, 0.1, 1.0]}, evaluate=Evaluator(train))
        >>> len(found.trials), found.trials[0].values["lr"] > 0.01
        (3, True)
    """
    check_single(state, "sweep", "give it the state of one member")
    if not isinstance(evaluate, Evaluator):
        raise TypeError(f"sweep: evaluate: expected Evaluator(data, metrics), got {shown(evaluate)}")
    if metric is not None and metric not in evaluate.reported:
        raise ValueError(f"sweep: metric={metric!r}: the evaluator reports {', '.join(evaluate.reported)}")
    check_whole(seeds, "sweep: seeds", 1)
    check_flag(compiled, "sweep: compiled")
    metric = metric or next(iter(evaluate.reported))
    mode = mode_of(metric, None, [evaluate])
    settings = _checked_settings(values)
    names = tuple(settings[0])
    state = step.init(with_named_rate(state, keeps_schedule=True) if "lr" in names else state)
    missing = [name for name in names if name not in state.hparams]
    if missing:
        raise ValueError(
            f"sweep: the state has no hparam {missing[0]!r}, only {sorted(state.hparams)}; write it in place of a "
            f'number, as in alg.label_smoothing(hparam("{missing[0]}", 0.1))'
        )
    members = _members(state, settings, seeds)
    if compiled and not isinstance(step, CompiledStep):
        step = compile(step)
    together, start, batches, evaluator = population_of(step, members, data, evaluate, chunk_size)
    halving = SuccessiveHalving(metric, names, tuple(rungs), keep, spread, seeds, mode) if rungs else None
    history = History()
    watching: list[Any] = [history, *([observers] if callable(observers) else observers)]
    options: dict[str, Any] = {"evaluate": evaluator, "adjust": () if halving is None else halving}
    if folder is None:
        end = fit(together, start, batches, observers=watching, **options)
    else:
        config = {"metric": metric, "seeds": seeds, **{name: [one[name] for one in settings] for name in names}}
        config |= {"rungs": [*map(str, rungs)], "keep": keep, "spread": spread} if rungs else {}
        _check_settings(Path(folder), config)
        with RunFolder(folder, config, resume=True) as run:
            run.begin(together, start, first_batch(batches, start))
            kept = {"checkpoints": run.checkpoints(every="0.1dur", keep=1), "resume": run.resume}
            end = fit(together, start, batches, observers=[*watching, run.observer], **options, **kept)
    found = history.series(metric)[1][-1]
    return _ranked(metric, mode, names, found, end, halving, seeds)


def _check_settings(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise if a folder has the run of another sweep, from which this one would continue with the settings there."""
    if not (folder / CONFIG).is_file():
        return
    saved = read_run(folder).config
    lines = [
        f"{name} was {saved.get(name, 'absent')}, and is {config.get(name, 'absent')}"
        for name in dict.fromkeys((*saved, *config))
        if saved.get(name) != config.get(name)
    ]
    if lines:
        raise ValueError(
            f"sweep: folder={str(folder)!r} contains another sweep: {'; '.join(lines)}. Choose another folder, or "
            "repeat the earlier call"
        )


def _members(state: State, settings: Sequence[Mapping[str, float]], seeds: int) -> list[State]:
    """Return the states of the population: the seeds of each setting follow each other."""
    keys = [state.key] + [random.fold_in(state.key, i) for i in range(1, seeds)]
    return [
        state.replace(key=key, hparams={**state.hparams, **_tensors(setting, state)})
        for setting in settings
        for key in keys
    ]


def _tensors(setting: Mapping[str, float], state: State) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float32, device=state.device) for name, value in setting.items()}


def _checked_settings(values: Any) -> list[dict[str, float]]:
    """Return the settings, all with the same names."""
    if isinstance(values, Mapping):
        for name, given in values.items():
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise TypeError(f"sweep: values[{name!r}]: expected a list of numbers, got {shown(given)}")
        columns = [[*given] for given in values.values()]
        settings: list[Any] = [dict(zip(values, one, strict=True)) for one in itertools.product(*columns)]
    else:
        settings = list(values)
    if len(settings) < 2 or not all(isinstance(one, Mapping) and one for one in settings):
        raise ValueError(
            f"sweep: values: expected at least two settings, such as {{'lr': [0.01, 0.1]}} or "
            f"[{{'lr': 0.01}}, {{'lr': 0.1}}], got {shown(values)}"
        )
    names = settings[0].keys()
    for i, one in enumerate(settings):
        if one.keys() != names:
            raise ValueError(
                f"sweep: values[{i}] has {sorted(one)}, and values[0] has {sorted(names)}: give the same names to all"
            )
    return [{name: check_number(float(one[name]), f"sweep: values of {name!r}") for name in names} for one in settings]


def _ranked(
    metric: str,
    mode: str,
    names: tuple[str, ...],
    found: Any,
    end: State,
    halving: SuccessiveHalving | None,
    seeds: int,
) -> Sweep:
    """Return the trials of a finished population, the best first."""
    by_setting = [tuple(found[i : i + seeds]) for i in range(0, len(found), seeds)]
    values = [{name: end.hparams[name][i * seeds].item() for name in names} for i in range(len(by_setting))]
    memory = None if halving is None else end.slots[halving.name]
    trials = [
        Trial(values[i], statistics.fmean(one), one, _earlier(halving, memory, i * seeds))
        for i, one in enumerate(by_setting)
    ]
    sign = 1 if mode == "min" else -1

    def badness(trial: Trial) -> float:
        return sign * trial.metric if math.isfinite(trial.metric) else math.inf

    order = sorted(range(len(trials)), key=lambda i: badness(trials[i]))
    out = sorted(_out(halving, memory, seeds), key=badness)
    rungs = [] if halving is None else [str(rung) for rung in halving.rungs]
    out.sort(key=lambda trial: -rungs.index(str(trial.eliminated_at)))
    return Sweep(metric, (*(trials[i] for i in order), *out), end, order[0] * seeds)


def _earlier(halving: SuccessiveHalving | None, memory: Any, member: int) -> tuple[tuple[str, dict[str, float]], ...]:
    """Return the values that a member had before its last ones, each with the rung until which it had them."""
    if halving is None:
        return ()
    rows = memory["values"][member].tolist()
    reached = [row for row in rows if not math.isnan(row[0])]
    return tuple(
        (str(halving.rungs[i]), dict(zip(halving.names, row, strict=True)))
        for i, (row, following) in enumerate(itertools.pairwise(reached))
        if row != following
    )


def _out(halving: SuccessiveHalving | None, memory: Any, seeds: int) -> list[Trial]:
    """Return the settings that were eliminated at a rung."""
    if halving is None:
        return []
    trials = []
    for rung, time in enumerate(halving.rungs):
        for group in memory["out"][:, rung].split(seeds):
            *setting, _ = group[0].tolist()
            if not math.isnan(setting[0]):
                found = tuple(group[:, -1].tolist())
                trials.append(
                    Trial(dict(zip(halving.names, setting, strict=True)), statistics.fmean(found), found, (), str(time))
                )
    return trials


def _history(trial: Trial) -> str:
    """Return how a setting was trained, in words."""
    if trial.eliminated_at is not None:
        return f"until {trial.eliminated_at}"
    if not trial.earlier:
        return "from start to end"
    parts = [
        f"{', '.join(f'{name}={value:.4g}' for name, value in values.items())} until {time}"
        for time, values in trial.earlier
    ]
    return f"a copy: {'; '.join(parts)}"
