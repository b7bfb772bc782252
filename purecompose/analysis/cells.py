"""Training of one cell of an ablation: a subset of the methods, with several seeds.

The seeds of a cell are a population where vmap can map its step, and are trained one after the other where not. In
both modes, a seed is trained on the same batches with the same draws, since both depend on its key.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, random
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.data.loaders import StateStream, draws_globally, epoch_batches, fixed_batches
from purecompose.data.seeding import kept_globals, load_numpy, seed_globals, seed_words
from purecompose.records import RunFolder
from purecompose.run.evaluation import Evaluator
from purecompose.run.fit import fit
from purecompose.run.start import start_of_run
from purecompose.time import Timestamp, TimeUnit
from purecompose.time.event import Event
from purecompose.transforms.compilation import CompiledStep
from purecompose.transforms.members import stacked
from purecompose.transforms.population import population, stack_states


_INITIAL = random.salt("initial state of an ablation")


@dataclass(frozen=True)
class Trainer:
    """Everything that the cells of an ablation have in common.

    Attributes:
        make_step: Function from algorithms to a step.
        state: Function from a seed to the initial state, or a state, which then gets the seed's key.
        data: The training data.
        evaluate: The evaluator of the metric.
        metric: The metric that is compared, such as "eval/accuracy".
        methods: All methods, by name.
        folder: The folder of the runs; `None` to keep nothing.
    """

    make_step: Callable[[list[Algorithm]], Step]
    state: Callable[[int], State] | State
    data: Any
    evaluate: Evaluator
    metric: str
    methods: Mapping[str, Algorithm]
    folder: Path | None = None

    def step(self, subset: frozenset[str]) -> Step:
        """Return the step with a subset of the methods.

        Raises:
            TypeError: `make_step` returned something else.
            ValueError: The step has other methods than it was given, or is not one of single states.
        """
        step = self.make_step([method for name, method in self.methods.items() if name in subset])
        if not isinstance(step, Step):
            raise TypeError(f"ablate: make_step: expected a Step, as compose returns, got {type(step).__name__}")
        names = {algorithm.name for algorithm in step.algorithms}
        if wrong := (names & self.methods.keys()) ^ subset:
            raise ValueError(
                f"ablate: make_step was given {', '.join(sorted(subset)) or 'no methods'} and returned a step that "
                f"differs in {', '.join(sorted(wrong))}: pass the list on, as in "
                "lambda methods: compose(loop_events, methods)"
            )
        return step

    def initial(self, step: Step, seed: int) -> State:
        """Return the initial state of a seed, with the memory of the step's algorithms.

        The global generators are seeded meanwhile, and restored afterwards.

        Raises:
            TypeError: `state` returned something else.
            ValueError: The state has no duration.
        """
        if isinstance(self.state, State):
            state = self.state.replace(key=random.key(seed))
        else:
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

    def train(self, subset: frozenset[str], name: str, seeds: Sequence[int], mode: str) -> tuple[list[float], str]:
        """Train seeds of a cell; return the metric at the end of each, and the mode, with its reason if there is one.

        Args:
            subset: The names of its methods.
            name: The name of the cell's folder.
            seeds: The seeds.
            mode: "population", "sequential", or "auto" for a population unless vmap refuses its step.
        """
        step, reason = self.step(subset), ""
        if isinstance(self.data, StateStream):
            reason = " (data.stream makes batches from a single state)"
        elif mode == "population" or (mode == "auto" and len(seeds) > 1):
            states = [self.initial(step, seed) for seed in seeds]
            try:
                return self._fit(*population_of(step, states, self.data, self.evaluate), name, seeds), "population"
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                if mode == "population":
                    raise
                reason = f" ({' '.join(str(error).split())})"
        given = ((self.initial(step, seed), seed) for seed in seeds)
        found = [self._fit(step, state, self.data, self.evaluate, name, [seed]) for state, seed in given]
        return found, f"sequential{reason}"

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
                run.begin(step, start, first_batch(data, start))
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


def check_repeated(where: str, folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if a folder has the results of other settings, with which this call would be mixed."""
    lines = [
        f"{name} was {saved.get(name, 'absent')}, and is {now.get(name, 'absent')}"
        for name in dict.fromkeys((*saved, *now))
        if saved.get(name) != now.get(name)
    ]
    if lines:
        what = "ablation" if where == "ablate" else where
        raise ValueError(
            f"{where}: folder={str(folder)!r} contains another {what}: {'; '.join(lines)}. Choose another folder, or "
            "repeat the earlier call"
        )


def first_batch(data: Any, state: State) -> Any:
    """Return the first batch of a run, or of a population's, on the state's device."""
    given = (
        [data.batch(state)] if isinstance(data, StateStream) else epoch_batches(data, state.key.reshape(-1, 2)[0], 0)
    )
    batch = next(iter(given))
    return batches.map_tensors(lambda tensor: tensor.to(state.device), batch)


def population_of(
    step: Step, states: Sequence[State], data: Any, evaluate: Evaluator, chunk_size: int | None = None
) -> tuple[Step, State, Any, Evaluator]:
    """Return step, state, data and evaluator of a population in which each member has its own order of the data.

    A compiled step becomes a compiled step of the population.
    """
    depends_on_key = callable(getattr(data, "epoch", None)) or draws_globally(data)
    depends_on_key |= isinstance(data, list | tuple) and draws_globally(evaluate.data)
    has_own_order = depends_on_key and any(not torch.equal(state.key, states[0].key) for state in states)
    composed = step.step if isinstance(step, CompiledStep) else step
    together = population(composed, len(states), chunk_size, "each" if has_own_order else "shared")
    if isinstance(step, CompiledStep):
        together = CompiledStep(together, step.options)
    if has_own_order:
        data = _OwnOrders(data, [state.key for state in states])
        evaluate = dataclasses.replace(evaluate, data=_Repeated(evaluate.data, [state.key for state in states]))
    return together, stack_states(states), data, evaluate


class _OwnOrders:
    """Data whose batches are those of each member, stacked."""

    def __init__(self, data: Any, keys: Sequence[Tensor]) -> None:
        self.data, self.keys = data, keys

    def __len__(self) -> int:
        return len(self.data)

    def epoch(self, key: Tensor, epoch: int, start: int = 0) -> Iterator[Any]:
        """Return the batches of an epoch; the order does not depend on `key`, since each member has its own."""
        del key
        orders = [epoch_batches(self.data, own, epoch, start) for own in self.keys]
        return (stacked(members) for members in zip(*orders, strict=True))

    def __iter__(self) -> Iterator[Any]:
        return self.epoch(self.keys[0], 0)


class _Repeated:
    """Evaluation data whose batches are given to each member: without copies, unless they depend on its key."""

    def __init__(self, data: Any, keys: Sequence[Tensor]) -> None:
        self.data, self.keys = data, keys

    def __iter__(self) -> Iterator[Any]:
        if draws_globally(self.data):
            orders = [fixed_batches(self.data, own) for own in self.keys]
            yield from (stacked(members) for members in zip(*orders, strict=True))
            return
        for batch in self.data:
            yield batches.map_tensors(lambda tensor: tensor.expand(len(self.keys), *tensor.shape), batch)


def _seeds_name(seeds: Sequence[int]) -> str:
    """Return the name of the folder of a run with these seeds."""
    if len(seeds) == 1:
        return f"seed-{seeds[0]}"
    if list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"seeds-{seeds[0]}-to-{seeds[-1]}"
    return f"seeds-{'-'.join(map(str, seeds))}"


def spread_moments(step: Step, state: State, batch: Any, num: int) -> list[Timestamp]:
    """Return points in the middle of `num` equal parts of a run; only its start if its length is in seconds.

    Args:
        step: The step.
        state: The state at the start, whose time has the run's length.
        batch: A batch; all are taken to have as many examples and tokens.
        num: Number of points.
    """
    now, layout, example = state.timestamp, state.context.layout, step.members.example(batch)
    samples, tokens = layout.num_examples(example), layout.num_tokens(example)
    total, duration = now.run.total_batches, now.run.duration
    sizes = {TimeUnit.SAMPLE: samples, TimeUnit.TOKEN: tokens}
    if total is None and duration is not None and sizes.get(duration.unit):
        total = duration.value / sizes[duration.unit]
    if total is None:
        return [now]
    chosen = dict.fromkeys(int(total * (i + 0.5) / num) for i in range(num))
    return [now.advance_by(number, samples, tokens) for number in chosen]
