"""`ablate`: the effect of each method in a list on a metric of the run and on the step time.

All runs of a seed have common random numbers: the same initial weights, batches and draws. A draw depends only on the
key, the batch and the name of the method, so leaving out a method does not change the draws of the others, and the
difference between two runs is due to the method.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from purecompose._support.checks import check_whole, shown
from purecompose.analysis.cells import Trainer, check_repeated, first_batch, spread_moments
from purecompose.analysis.effects import Ablation, Cell, effects_of, name_of, subsets_of
from purecompose.core.algorithm import Algorithm
from purecompose.core.composable import as_algorithms
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.data.facts import check_batches, describe_data
from purecompose.data.loaders import StateStream, own_order
from purecompose.records.layout import write_json, write_text
from purecompose.records.reading import read_json
from purecompose.run.evaluation import Evaluator
from purecompose.run.rules import mode_of
from purecompose.run.saving.comparison import describe
from purecompose.time import Timestamp


_MODES = ("auto", "population", "sequential")


def ablate(
    make_step: Callable[[list[Algorithm]], Step],
    state: Callable[[int], State] | State,
    data: Any,
    methods: Iterable[Algorithm],
    *,
    evaluate: Evaluator,
    metric: str | None = None,
    seeds: int | Sequence[int] = 8,
    mode: str = "auto",
    time_rounds: int = 8,
    folder: str | os.PathLike[str] | None = None,
    report: Callable[[str], object] | None = None,
) -> Ablation:
    """Train with all methods, with all but each one and with none, and return the effect of each method.

    Every subset is trained with every seed. A method's effect is the metric of all methods minus the metric without
    it, for each seed; the 95 % intervals of all effects are simultaneous (see `analysis.simultaneous_intervals`). The
    step time is measured separately from the runs: the steps of all subsets are timed in turn at ten points of a run.

    Args:
        make_step: Function from a list of methods to a step, such as `lambda methods: compose(loop_events, methods)`.
        state: Function from a seed to the state at the start of a run, with its duration; it is called for each run,
            with the global generators seeded from the seed. Or one state, whose key is replaced for each seed: all
            seeds then have the same initial weights.
        data: Training data, as for `fit`.
        methods: The methods to compare. Methods that are never left out belong in `make_step`.
        evaluate: The evaluator. The metric of the last evaluation of each run is compared.
        metric: The metric, such as "eval/accuracy"; by default the evaluator's first.
        seeds: The number of seeds, from 0 on, or the seeds.
        mode: "population" to train the seeds of a subset at once, under vmap; "sequential" to train one after the
            other; or "auto" for a population unless vmap refuses its step. Results agree up to rounding.
        time_rounds: The number of times that steps are timed; with 0 the step time is not measured.
        folder: A folder for the runs and their results. The same call resumes an interrupted ablation, and with more
            seeds extends a finished one. Other methods, data or networks are refused.
        report: Function that is called with a line of text after each cell, such as `print`.

    Returns:
        The effects, which print as a table.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range; or the folder contains the results of
            another ablation.
        FileExistsError: The folder is not empty and contains no ablation.

    Example:
        >>> import torch
        >>> from purecompose import algorithms, compose, data, loop_events, losses, metrics, optim, random
        >>> inputs = random.normal(random.key(0), (64, 4))
        >>> train = data.arrays(inputs, (inputs[:, 0] > 0).long(), 16)
        >>> def new_state(seed):
        ...     net = torch.nn.Linear(4, 2)
        ...     return State.create(
        ...         net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), key=seed, duration="2ep"
        ...     )
        >>> result = ablate(
        ...     lambda methods: compose(loop_events, methods),
        ...     new_state,
        ...     train,
        ...     [algorithms.mixup(0.2), algorithms.label_smoothing(0.1)],
        ...     evaluate=Evaluator(train),
        ...     time_rounds=0,
        ... )
        >>> [cell.name for cell in result.cells]
        ['all', 'label_smoothing', 'mixup', 'none']
        >>> [effect.method for effect in result.effects]
        ['mixup', 'label_smoothing']
    """
    _check_arguments(data, evaluate, metric, mode)
    check_whole(time_rounds, "ablate: time_rounds", 0)
    chosen, numbers = _checked_methods(methods), _checked_seeds(seeds)
    names = list(chosen)
    subsets = subsets_of(names)
    metric = next(iter(evaluate.reported)) if metric is None else metric
    better = mode_of(metric, None, [evaluate])
    trainer = Trainer(make_step, state, data, evaluate, metric, chosen, None if folder is None else Path(folder))
    results = _Results(trainer, numbers[0])
    cells = {name_of(subset, names): subset for subset in subsets}
    for number, (name, subset) in enumerate(cells.items(), 1):
        results.train(name, subset, numbers, mode)
        if report is not None:
            mean = sum(results.values[name][seed] for seed in numbers) / len(numbers)
            report(f"[{number}/{len(cells)}] {name}: {metric} {mean:.5g}")
    seconds = step_times(trainer, cells, numbers[0], time_rounds) if time_rounds else {}
    found = {
        subset: Cell(
            name,
            tuple(one for one in names if one in subset),
            tuple(results.values[name][seed] for seed in numbers),
            tuple(seconds.get(name, ())),
            results.modes[name],
        )
        for name, subset in cells.items()
    }
    effects = effects_of(names, found, better)
    ablation = Ablation(metric, numbers, tuple(found.values()), effects, better, trainer.folder)
    if trainer.folder is not None:
        write_text(trainer.folder / _TABLE, f"{ablation}\n")
    return ablation


def _check_arguments(data: Any, evaluate: Any, metric: str | None, mode: str) -> None:
    """Raise if the data cannot be read again, or if the evaluator, its metric or the mode is wrong."""
    if not isinstance(evaluate, Evaluator):
        raise TypeError(f"ablate: evaluate: expected Evaluator(data, metrics), got {shown(evaluate)}")
    if not isinstance(data, StateStream):
        check_batches(data, "ablate: data")
    if isinstance(data, Iterator):
        raise TypeError("ablate: data: expected data that can be read again for each run, got an iterator")
    if (reason := own_order(data, has_position=True)) is not None:
        raise ValueError(f"ablate: data: expected the same batches in each run of a seed: {reason}")
    if metric is not None and metric not in evaluate.reported:
        raise ValueError(f"ablate: metric={metric!r}: the evaluator reports {', '.join(evaluate.reported)}")
    if mode not in _MODES:
        raise ValueError(f"ablate: mode={mode!r}: expected one of {', '.join(map(repr, _MODES))}")


def _checked_methods(methods: Iterable[Algorithm]) -> dict[str, Algorithm]:
    """Return the methods by name."""
    chosen = {method.name: method for method in as_algorithms(methods)}
    if not chosen or not chosen.keys().isdisjoint(("all", "none")):
        raise ValueError(f"ablate: methods: expected methods that are not called all or none, got {list(chosen)}")
    return chosen


def _checked_seeds(seeds: Any) -> tuple[int, ...]:
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        return tuple(range(check_whole(seeds, "ablate: seeds", 1)))
    if isinstance(seeds, str) or not isinstance(seeds, Sequence):
        raise TypeError(f"ablate: seeds: expected a number of seeds, or a list of them, got {shown(seeds)}")
    numbers = tuple(check_whole(seed, "ablate: seeds", 0) for seed in seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"ablate: seeds={list(numbers)}: expected at least one seed, and none twice")
    return numbers


_DECISIVE = ("optimizer", "loss", "precision", "program", "microbatches")
"""Parts of a run's description on which a metric depends."""
_FILE, _TABLE = "ablation.json", "ablation.txt"


class _Results:
    """The metric of each cell and seed; with a folder, every addition is written to `ablation.json` there.

    Attributes:
        values: The metric, by cell and seed.
        modes: The mode in which each cell was trained.

    Raises:
        ValueError: The folder has the results of another ablation; the message names the differences.
        FileExistsError: The folder contains something else.
    """

    def __init__(self, trainer: Trainer, seed: int) -> None:
        self._trainer, self._settings = trainer, _settings_of(trainer, seed)
        self.values: dict[str, dict[int, float]] = {}
        self.modes: dict[str, str] = {}
        folder = trainer.folder
        if folder is None:
            return
        if not (folder / _FILE).exists():
            if folder.exists() and any(folder.iterdir()):
                raise FileExistsError(
                    f"ablate: folder={str(folder)!r} is not empty and has no {_FILE}; choose another folder"
                )
            folder.mkdir(parents=True, exist_ok=True)
            self._write()
            return
        content = read_json(folder / _FILE)
        check_repeated("ablate", folder, content["settings"], self._settings)
        for name, cell in content["cells"].items():
            self.values[name] = {int(seed): value for seed, value in cell["values"].items()}
            self.modes[name] = cell["mode"]

    def train(self, name: str, subset: frozenset[str], seeds: Sequence[int], mode: str) -> None:
        """Train the seeds of a cell that have no result."""
        missing = [seed for seed in seeds if seed not in self.values.get(name, {})]
        if not missing:
            return
        found, self.modes[name] = self._trainer.train(subset, name, missing, mode)
        self.values.setdefault(name, {}).update(zip(missing, found, strict=True))
        if self._trainer.folder is not None:
            self._write()

    def _write(self) -> None:
        assert self._trainer.folder is not None
        cells = {
            name: {"mode": self.modes[name], "values": {str(seed): value for seed, value in values.items()}}
            for name, values in self.values.items()
        }
        write_json(self._trainer.folder / _FILE, {"settings": self._settings, "cells": cells})


def _settings_of(trainer: Trainer, seed: int) -> dict[str, str]:
    """Return what must be the same for results to be comparable."""
    step = trainer.step(frozenset(trainer.methods))
    state = trainer.initial(step, seed)
    described = describe(state, step)
    others = {name: words for name, words in described["algorithms"].items() if name not in trainer.methods}
    return {
        "metric": trainer.metric,
        "duration": str(state.timestamp.run.duration),
        "methods": ", ".join(map(repr, trainer.methods.values())),
        "model": hashlib.blake2b("\n".join(described["model"]).encode(), digest_size=6).hexdigest(),
        **{name: str(described[name]) for name in _DECISIVE},
        "methods that are never left out": ", ".join(others.values()) or "none",
        "evaluated batches": str(trainer.evaluate.num_batches or "all"),
        **{f"data: {name}": value for name, value in describe_data(trainer.data).items()},
        **{f"evaluation data: {name}": value for name, value in describe_data(trainer.evaluate.data).items()},
    }


_NUM_POINTS = 10
"""Number of points of a run at which steps are timed."""


def step_times(
    trainer: Trainer, cells: Mapping[str, frozenset[str]], seed: int, num_rounds: int
) -> dict[str, list[float]]:
    """Return the mean time of a step over the run, in seconds, for each cell and round.

    Only the steps are timed: no data are read, and what acts outside a step, such as averages that are formed at the
    end of an epoch, is left out. They are timed apart from the runs, whose modes, processes and load differ: a
    single process takes a step of each cell at the same points of the run, in turn, so that a slowdown affects all.

    Args:
        trainer: What the cells have in common.
        cells: The subset of each cell, by name.
        seed: The seed whose initial state is used at all points.
        num_rounds: The number of rounds.
    """
    timed = {name: _Timed(trainer, subset, seed) for name, subset in cells.items()}
    for one in timed.values():
        one.round()  # the first one checks contracts and compiles
    found: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(num_rounds):
        for name in timed if number % 2 else reversed(timed):
            found[name].append(timed[name].round())
    return found


class _Timed:
    """A cell's step at the points of a run."""

    def __init__(self, trainer: Trainer, subset: frozenset[str], seed: int) -> None:
        self.step: Step = trainer.step(subset)
        self.start: State = trainer.initial(self.step, seed)
        self.batch: Any = first_batch(trainer.data, self.start)
        self.moments: list[Timestamp] = spread_moments(self.step, self.start, self.batch, _NUM_POINTS)

    def round(self) -> float:
        """Return the mean time of a step at all points."""
        seconds = 0.0
        for moment in self.moments:
            # A compiled step overwrites the state that it is given.
            state = self.start.copy().replace(timestamp=moment)
            state.key.sum().item()  # waits for the device
            began = time.perf_counter()
            self.step(state, self.batch).key.sum().item()
            seconds += time.perf_counter() - began
        return seconds / len(self.moments)
