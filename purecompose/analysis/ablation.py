"""`ablate`: the effect of each method in a list on a metric of the run.

All runs of a seed have common random numbers: the same initial weights, batches and draws, since a draw depends only on
the key, the batch and the name of the method.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from purecompose import random
from purecompose._support.specs import check_flag, check_whole, shown
from purecompose.analysis.effects import Ablation, Cell, effects_of, name_of, subsets_of
from purecompose.analysis.sweeping import population_of
from purecompose.core.algorithm import Algorithm
from purecompose.core.composable import as_algorithms
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.data.loaders import StateStream, check_batches, describe_data, own_order
from purecompose.data.position import kept_globals, load_numpy, seed_globals, seed_words
from purecompose.records import RunFolder
from purecompose.records.layout import read_json, write_json, write_text
from purecompose.run.evaluation import Evaluator
from purecompose.run.fit import fit, start_of_run
from purecompose.run.rules import mode_of
from purecompose.run.saving.comparison import describe, unequal
from purecompose.time.event import Event


def ablate(
    make_step: Callable[[list[Algorithm]], Step],
    state: Callable[[int], State],
    data: Any,
    methods: Iterable[Algorithm],
    *,
    evaluate: Evaluator,
    metric: str | None = None,
    seeds: int | Sequence[int] = 8,
    sequential: bool = False,
    folder: str | os.PathLike[str] | None = None,
    report: Callable[[str], object] | None = None,
) -> Ablation:
    """Train with all methods, with all but each one and with none, and return the effect of each method.

    Every subset is trained with every seed. A method's effect is the metric of all methods minus the metric without
    it, for each seed; the 95 % intervals of all effects are simultaneous (see `analysis.simultaneous_intervals`).

    Args:
        make_step: Function from a list of methods to a step, such as `lambda methods: compose(loop_events, methods)`.
        state: Function from a seed to the state at the start of a run, with its duration; it is called for each run,
            with the global generators seeded from the seed.
        data: Training data, as for `fit`.
        methods: The methods to compare. Methods that are never left out belong in `make_step`.
        evaluate: The evaluator. The metric of the last evaluation of each run is compared.
        metric: The metric, such as "eval/accuracy"; by default the evaluator's first.
        seeds: The number of seeds, from 0 on, or the seeds.
        sequential: True to train the seeds of a subset one after the other, for steps that vmap refuses and data made
            by `data.stream`; otherwise they are a population.
        folder: A folder for the runs and their results. The same call resumes an interrupted ablation, and with more
            seeds extends a finished one.
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
        ...     return State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), key=seed, duration="2ep")
        >>> def new_step(methods):
        ...     return compose(loop_events, methods)
        >>> methods = [algorithms.mixup(0.2), algorithms.label_smoothing(0.1)]
        >>> result = ablate(new_step, new_state, train, methods, evaluate=Evaluator(train))
        >>> [cell.name for cell in result.cells]
        ['all', 'label_smoothing', 'mixup', 'none']
        >>> [effect.method for effect in result.effects]
        ['mixup', 'label_smoothing']
    """
    _check_arguments(data, evaluate, metric, sequential)
    chosen, numbers = {method.name: method for method in as_algorithms(methods)}, _checked_seeds(seeds)
    if not chosen or not chosen.keys().isdisjoint(("all", "none")):
        raise ValueError(f"ablate: methods: expected methods that are not called all or none, got {list(chosen)}")
    names = list(chosen)
    subsets = subsets_of(names)
    metric = next(iter(evaluate.reported)) if metric is None else metric
    better = mode_of(metric, None, [evaluate])
    kept = None if folder is None else Path(folder)
    trainer = Trainer(make_step, state, data, evaluate, metric, chosen, kept, sequential)
    settings = _settings_of(trainer, numbers[0])
    values = {} if kept is None else _kept_values(kept, settings)
    found: dict[frozenset[str], Cell] = {}
    for number, subset in enumerate(subsets, 1):
        name = name_of(subset, names)
        known = values.setdefault(name, {})
        if missing := [seed for seed in numbers if seed not in known]:
            known.update(zip(missing, trainer.train(subset, name, missing), strict=True))
            if kept is not None:
                write_json(kept / _FILE, {"settings": settings, "cells": values})
        chosen_names = tuple(one for one in names if one in subset)
        found[subset] = cell = Cell(name, chosen_names, tuple(known[seed] for seed in numbers))
        if report is not None:
            report(f"[{number}/{len(subsets)}] {name}: {metric} {cell.mean:.5g}")
    effects = effects_of(names, found, better)
    ablation = Ablation(metric, numbers, tuple(found.values()), effects, better, trainer.folder)
    if trainer.folder is not None:
        write_text(trainer.folder / _TABLE, f"{ablation}\n")
    return ablation


def _check_arguments(data: Any, evaluate: Any, metric: str | None, sequential: bool) -> None:
    """Raise if the data cannot be read again, or if the evaluator or its metric is wrong."""
    if not isinstance(evaluate, Evaluator):
        raise TypeError(f"ablate: evaluate: expected Evaluator(data, metrics), got {shown(evaluate)}")
    check_flag(sequential, "ablate: sequential")
    if not isinstance(data, StateStream):
        check_batches(data, "ablate: data")
    elif not sequential:
        raise ValueError("ablate: data.stream makes batches from a single state: give sequential=True")
    if isinstance(data, Iterator):
        raise TypeError("ablate: data: expected data that can be read again for each run, got an iterator")
    if (reason := own_order(data, has_position=True)) is not None:
        raise ValueError(f"ablate: data: expected the same batches in each run of a seed: {reason}")
    if metric is not None and metric not in evaluate.reported:
        raise ValueError(f"ablate: metric={metric!r}: the evaluator reports {', '.join(evaluate.reported)}")


def _checked_seeds(seeds: Any) -> tuple[int, ...]:
    if isinstance(seeds, int):
        return tuple(range(check_whole(seeds, "ablate: seeds", 1)))
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise TypeError(f"ablate: seeds: expected a number of seeds, or a list of them, got {shown(seeds)}")
    numbers = tuple(check_whole(seed, "ablate: seeds", 0) for seed in seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"ablate: seeds={list(numbers)}: expected at least one seed, and none twice")
    return numbers


_INITIAL = random.salt("initial state of an ablation")


@dataclass(frozen=True)
class Trainer:
    """Everything that the cells of an ablation have in common; see the arguments of `ablate`."""

    make_step: Callable[[list[Algorithm]], Step]
    state: Callable[[int], State]
    data: Any
    evaluate: Evaluator
    metric: str
    methods: Mapping[str, Algorithm]
    folder: Path | None
    sequential: bool

    def step(self, subset: frozenset[str]) -> Step:
        """Return the step with a subset of the methods; raise if it has others than it was given."""
        step = self.make_step([method for name, method in self.methods.items() if name in subset])
        if not isinstance(step, Step):
            raise TypeError(f"ablate: make_step: expected a Step, as compose returns, got {type(step).__name__}")
        names = {algorithm.name for algorithm in step.algorithms}
        if wrong := (names & self.methods.keys()) ^ subset:
            raise ValueError(
                f"ablate: make_step was given {', '.join(sorted(subset)) or 'no methods'} and returned a step that "
                f"differs in {', '.join(sorted(wrong))}: pass the list on to compose"
            )
        return step

    def initial(self, step: Step, seed: int) -> State:
        """Return the initial state of a seed, with all memory; the global generators are seeded meanwhile."""
        load_numpy()
        with kept_globals():
            # A network draws its weights from torch's global generator: all cells of a seed need the same ones.
            seed_globals(seed_words((seed, 0), _INITIAL, 0, 0))
            state = self.state(seed)
        if not isinstance(state, State):
            raise TypeError(f"ablate: state({seed}): expected a State, got {type(state).__name__}")
        if state.timestamp.run.duration is None:
            raise ValueError('ablate: the state has no duration: give State.create one, such as duration="20ep"')
        return start_of_run(step, state, self.data)[0]

    def train(self, subset: frozenset[str], name: str, seeds: Sequence[int]) -> list[float]:
        """Train seeds of a cell, in the folder of that name; return the metric at the end of each."""
        step = self.step(subset)
        if self.sequential or len(seeds) == 1:
            given = ((self.initial(step, seed), seed) for seed in seeds)
            return [self._fit(step, state, self.data, self.evaluate, name, [seed]) for state, seed in given]
        states = [self.initial(step, seed) for seed in seeds]
        try:
            return self._fit(*population_of(step, states, self.data, self.evaluate), name, seeds)
        except Exception as error:
            error.add_note(f"in the population of the seeds of {name!r}; ablate(sequential=True) trains one by one")
            raise

    def _fit(self, step: Step, start: State, data: Any, evaluate: Evaluator, name: str, seeds: Sequence[int]) -> Any:
        """Train, and return the metric at the end: a list for a population."""
        found: dict[str, Tensor] = {}

        def note(event: Event, state: State) -> None:
            if event is Event.EVAL_END and self.metric in state.metrics:
                found[self.metric] = state.metrics[self.metric]

        if self.folder is None:
            fit(step, start, data, evaluate=evaluate, observers=note)
        else:
            settings = {"methods": [repr(algorithm) for algorithm in step.algorithms], "seeds": list(seeds)}
            path = self.folder / name.replace(" + ", "+").replace(" ", "-") / _seeds_name(seeds)
            with RunFolder(path, settings, resume=True) as run:
                run.begin(step, start)
                fit(
                    step,
                    start,
                    data,
                    evaluate=evaluate,
                    observers=[note, run.observer],
                    checkpoints=run.checkpoints(every="0.25dur", keep=1),
                    resume=run.resume,
                )
        return found[self.metric].tolist()


def _seeds_name(seeds: Sequence[int]) -> str:
    if len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"seeds-{seeds[0]}-to-{seeds[-1]}"
    return f"seed{'s' * (len(seeds) > 1)}-{'-'.join(map(str, seeds))}"


_DECISIVE = ("optimizer", "loss", "precision", "program", "microbatches")
"""Parts of a run's description on which a metric depends."""
_FILE, _TABLE = "ablation.json", "ablation.txt"


def _kept_values(folder: Path, settings: Mapping[str, str]) -> dict[str, dict[int, float]]:
    """Return the metric of each cell and seed in a folder, which is created if necessary."""
    if not (folder / _FILE).exists():
        if folder.exists() and any(folder.iterdir()):
            raise FileExistsError(
                f"ablate: folder={str(folder)!r} is not empty and has no {_FILE}; choose another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / _FILE, {"settings": settings, "cells": {}})
    content = read_json(folder / _FILE)
    if lines := unequal(content["settings"], settings, place="the folder"):
        raise ValueError(
            f"ablate: folder={str(folder)!r} contains another ablation: {'; '.join(lines)}. Choose another folder"
        )
    return {name: {int(seed): one for seed, one in cell.items()} for name, cell in content["cells"].items()}


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
        "sequential": str(trainer.sequential),
        "evaluated batches": str(trainer.evaluate.num_batches or "all"),
        **{f"data: {name}": value for name, value in describe_data(trainer.data).items()},
        **{f"evaluation data: {name}": value for name, value in describe_data(trainer.evaluate.data).items()},
    }
