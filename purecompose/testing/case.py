"""What laws are tried on: the algorithm under test, and cases, small situations with companions of the algorithm.

A case has plain values, so that its text creates it again, it shrinks to the simplest one that still breaks the law,
and it is the same in another process. A law must hold whatever other algorithms are in the step, so cases add some.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import batch as batches, random
from purecompose._support import specs
from purecompose._support.specs import shown
from purecompose.algorithms import BY_NAME, named
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step, compose
from purecompose.core.loop import loop_events
from purecompose.core.operation import Node
from purecompose.core.passes import DEFAULT_PASSES, Pass
from purecompose.core.program import StateFn, events_in
from purecompose.core.state import State
from purecompose.testing.tasks import TASKS, Task
from purecompose.time import RunLength, Timestamp
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, Predicate, on


class Subject(NamedTuple):
    """The algorithm under test, and the text that creates it again, in this process or another."""

    algorithm: Algorithm
    """The algorithm."""
    source: str | None = None
    """The text that creates it; `None` if there is none."""

    @classmethod
    def of(cls, given: Algorithm | Subject | str) -> Subject:
        """Take an algorithm, `"package.module:attribute"`, or a shipped one as a call, `"mixup(alpha=0.2)"`.

        The attribute may be an algorithm or a function without required arguments that returns one.

        Raises:
            TypeError: It is something else.
            ValueError: The text does not name an algorithm; `ImportError` if its module cannot be imported.

        Example:
            >>> Subject.of("mixup(0.4)").algorithm
            mixup(alpha=0.4, interpolate_loss=False, per_example=False)
        """
        if isinstance(given, Subject):
            return given
        if isinstance(given, Algorithm):
            return cls(given)
        if not isinstance(given, str):
            hint = f"; call it, as in {given.__name__}()" if inspect.isfunction(given) else ""
            raise TypeError(
                f"expected an Algorithm or a text such as 'my_module:name' or 'mixup(0.2)', got {shown(given)}{hint}"
            )
        return cls(
            _imported(given)
            if ":" in given.partition("(")[0]
            else specs.build(specs.parse_one(given), BY_NAME, "algorithm"),
            given,
        )

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return self.algorithm.name

    def changed(self, **changes: Any) -> Subject:
        """Return the subject with a changed algorithm."""
        return Subject(dataclasses.replace(self.algorithm, **changes), self.source)

    def rebuilt(self) -> Subject:
        """Return a subject with a new algorithm, if there is a source text; otherwise the same one."""
        return self if self.source is None else _rebuilt(self.source, self.algorithm.events)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the source text if there is one, since most algorithms are closures."""
        if self.source is None:
            return Subject, (self.algorithm,)
        return _rebuilt, (self.source, self.algorithm.events)

    def renamed(self, name: str) -> Subject | None:
        """Return the same algorithm with another name; `None` if no factory that accepts a name has made it."""
        if self.source is not None and ":" in self.source.partition("(")[0]:
            make = _found(self.source)
            if not isinstance(make, Algorithm) and "name" in inspect.signature(make).parameters:
                return Subject(make(name=name))
        try:
            return Subject(named(self.algorithm, name))
        except TypeError:
            return None

    def only_at(self, event: Event) -> Subject:
        """Return the subject with an algorithm that acts only at INIT and at one event."""
        return self.changed(match=self.algorithm.predicate & on(Event.INIT, event))


def _rebuilt(source: str, events: tuple[Event, ...]) -> Subject:
    """Return a new subject from a source text, which may act at fewer events than the algorithm from the text."""
    subject = Subject.of(source)
    if subject.algorithm.events == events:
        return subject
    return subject.changed(match=subject.algorithm.predicate & on(*events))


def _found(text: str) -> Any:
    module_name, _, attribute = text.partition(":")
    module = importlib.import_module(module_name)
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise ValueError(f"{text}: {error}") from error


def _imported(text: str) -> Algorithm:
    found = _found(text)
    if not isinstance(found, Algorithm) and callable(found):
        found = _called(text, found)
    if not isinstance(found, Algorithm):
        raise ValueError(f"{text} is {found!r} ({type(found).__name__}), expected an Algorithm or a function for one")
    return found


def _called(text: str, factory: Callable[..., Any]) -> Any:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        name
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in optional
    ]
    if required:
        attribute = text.rpartition(":")[2]
        raise ValueError(
            f"{text} has required arguments ({', '.join(required)}): define the algorithm in the module, as in "
            f"my_algorithm = {attribute}(...), and name that"
        )
    return factory()


# Cases


_WATCHED = (Event.AFTER_DATALOADER, Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)


def bystander(name: str = "bystander") -> Algorithm:
    """Return an algorithm that draws, counts and reports, and changes nothing that others read.

    Its slot has draws of the batch and of the first example, and counts of its events in several dtypes.
    """

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            zeros = torch.zeros(2, dtype=torch.float32, device=state.device)
            count = torch.zeros((), dtype=torch.int64, device=state.device)
            slot = {"draws": zeros, "example_draw": zeros[0], **_counts(count)}
            return state.replace(slots={**state.slots, name: slot})
        draws = random.uniform(state.rng(name), (2,))
        slot = {
            "draws": draws,
            "example_draw": random.uniform(state.example_rng(name), (state.num_examples,))[0],
            **_counts(state.slots[name]["count"] + 1),
        }
        return state.replace(slots={**state.slots, name: slot}, metrics={**state.metrics, f"{name}/draw": draws[0]})

    return Algorithm(name, on(Event.INIT, *_WATCHED), apply)


def _counts(count: Tensor) -> dict[str, Tensor]:
    """Return a count in several dtypes that algorithms often do not handle."""
    return {"count": count, "sum": 0.1 * count.to(torch.float64), "has_acted": count > 0}


def collector(name: str = "collector") -> Algorithm:
    """Return an algorithm that adds up the gradients of all batches in its slot, and changes nothing else."""

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            sums = {key: torch.zeros_like(state.params[key]) for key in state.context.trainable}
        else:
            grads = state.grads or {}
            sums = {key: kept + grads[key] if key in grads else kept for key, kept in state.slots[name].items()}
        return state.replace(slots={**state.slots, name: sums})

    return Algorithm(name, on(Event.INIT, Event.AFTER_TRAIN_BATCH), apply)


def noise(name: str = "noise", scale: float = 0.1) -> Algorithm:
    """Return an algorithm that adds keyed noise, drawn per example, to inputs that are one floating tensor."""

    def apply(event: Event, state: State) -> State:
        del event
        inputs = state.inputs
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            return state
        draws = random.normal(state.example_rng(name), inputs).to(inputs)
        return state.replace(inputs=inputs + scale * draws)

    return Algorithm(name, on(Event.AFTER_DATALOADER), apply, config={"scale": scale})


def shrink(name: str = "shrink", factor: float = 0.99) -> Algorithm:
    """Return an algorithm that shrinks the trainable parameters after the update."""

    def apply(event: Event, state: State) -> State:
        del event
        shrunk = {key: state.params[key] * factor for key in state.context.trainable}
        return state.replace(params={**state.params, **shrunk})

    return Algorithm(name, on(Event.BATCH_END), apply, config={"factor": factor})


COMPANIONS: Mapping[str, Callable[[str], Algorithm]] = MappingProxyType(
    {"bystander": bystander, "collector": collector, "noise": noise, "shrink": shrink}
)
"""Factories of the companions by name; each factory takes the name of its algorithm."""


COMPANY = "companion."
"""Prefix of the companions' names in a step, so that no algorithm has the same name."""

_USUAL_LR = 0.1


@dataclass(frozen=True, repr=False)
class Case:
    """A task at a point of a run, and the companions of an algorithm in its step.

    Args:
        task: The network and its batches.
        seed: Seed of weights, data and the run's key.
        batch_size: Number of examples in a batch.
        num_batches: Number of steps.
        start: Number of batches before the first step.
        batches_per_epoch: Length of the epoch.
        epochs: Length of the run in epochs.
        microbatches: Number of slices of a batch.
        lr: The hparam "lr", if the task's optimizer has one.
        others: Names of the `COMPANIONS` in the step.
        place: Number of companions that are listed before the algorithm.
    """

    task: Task = TASKS["vectors"]
    seed: int = 0
    batch_size: int = 4
    num_batches: int = 1
    start: int = 0
    batches_per_epoch: int = 2
    epochs: int = 4
    microbatches: int = 1
    lr: float = _USUAL_LR
    others: tuple[str, ...] = ()
    place: int = 0

    def state(self, *, dtype: torch.dtype | None = None, key: int | None = None) -> State:
        """Return a new state at the case's time, before `step.init`.

        Args:
            dtype: Dtype of the weights; by default the task's.
            key: Seed of the run's key; by default the case's seed.
        """
        run = {"duration": f"{self.epochs}ep", "batches_per_epoch": self.batches_per_epoch}
        state = self.task.make_state(self.seed, dtype=dtype, **run, **({} if key is None else {"key": key}))
        if self.lr != _USUAL_LR and "lr" in state.hparams:
            state = state.replace(hparams={**state.hparams, "lr": self.lr})
        tokens = batches.num_tokens(self.batch(0))
        return state.replace(timestamp=state.timestamp.advance_by(self.start, self.batch_size, tokens))

    def batch(self, index: int, dtype: torch.dtype | None = None) -> Any:
        """Return a new copy of the batch of a step; batches of different steps differ."""
        return self.task.make_batch(1000 * self.seed + self.start + index, self.batch_size, dtype)

    def batches(self, dtype: torch.dtype | None = None) -> list[Any]:
        """Return the batches of all steps."""
        return [self.batch(index, dtype) for index in range(self.num_batches)]

    def listed(self, *algorithms: Algorithm) -> list[Algorithm]:
        """Return the algorithms in their place among the companions."""
        others = [COMPANIONS[name](f"{COMPANY}{name}") for name in self.others]
        return [*others[: self.place], *algorithms, *others[self.place :]]

    def step(
        self,
        *algorithms: Algorithm,
        microbatches: int | None = None,
        passes: Iterable[Pass] = DEFAULT_PASSES,
        program: Iterable[Node | StateFn | str] = loop_events,
    ) -> Step:
        """Return the training step with these algorithms and the companions."""
        slices = self.microbatches if microbatches is None else microbatches
        return compose(program, self.listed(*algorithms), passes=passes, microbatches=slices)

    def __repr__(self) -> str:
        given = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Case({', '.join(given)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        del cycle
        printer.text(repr(self))  # Hypothesis would print every field of a dataclass


_LOOP = events_in(loop_events)
_LONGEST = 1024
"""Maximal length of a run in batches, unless a longer one is requested."""
_SHORT = 24
"""Number of batches up to which every start of a run is considered."""


class Moments(NamedTuple):
    """A run, and starts in it."""

    batches_per_epoch: int
    epochs: int
    acting: tuple[int, ...]
    """Batch counts before the steps in which the algorithm acts at the largest number of events."""
    near: tuple[int, ...]
    """All interesting batch counts: one batch before, at, and one after each change; in a short run, all."""


def find_moments(
    predicate: Predicate, *, batches_per_epoch: int, epochs: int, samples: int = 1, tokens: int = 0, room: int = 1
) -> Moments:
    """Return a run that is long enough for the predicate, and the starts of steps that act.

    Lengths are doubled until the algorithm acts at each event at which it may act, and at the first time early enough;
    a run has at most 1024 batches. A plain function is assumed to return True. INIT does not count, nor do events
    outside the loop if it acts within.

    `batches_per_epoch` and `epochs` are minimal lengths; `samples` and `tokens` are those of a batch; after a start at
    which it acts there are `room` more batches, if that is possible.
    """
    find = _find if _has_hash(predicate) else _find.__wrapped__
    return find(predicate, batches_per_epoch, max(epochs, -(-room // batches_per_epoch)), samples, tokens, room)


@functools.lru_cache(maxsize=4096)
def _find(predicate: Predicate, batches_per_epoch: int, epochs: int, samples: int, tokens: int, room: int) -> Moments:
    asked = _asked(predicate)
    runs: list[tuple[tuple[bool, bool], Moments]] = []
    for shape in _shapes(batches_per_epoch, epochs):
        acting = _acting(asked, *shape, samples, tokens)
        found = _moments(acting, *shape)
        is_complete = frozenset(asked) == frozenset().union(*acting)
        has_room = bool(found.acting) and found.acting[0] + room <= len(acting)
        runs.append(((is_complete, has_room or not asked), found))
        if all(runs[-1][0]):
            break
    return max(runs, key=lambda run: run[0])[1]  # the shortest of the best


def _asked(predicate: Predicate) -> dict[Event, Predicate]:
    """Return the predicate at each event of the loop or, if it never acts there, at the events outside."""
    left = {event: predicate.at(event) for event in Event if event is not Event.INIT}
    left = {event: asked for event, asked in left.items() if asked != NEVER}
    return {event: asked for event, asked in left.items() if event in _LOOP} or left


def _shapes(batches_per_epoch: int, epochs: int) -> Iterator[tuple[int, int]]:
    """Yield runs with longer epochs and with more epochs, doubling each time."""
    yield batches_per_epoch, epochs
    factor = 2
    while factor * batches_per_epoch * epochs <= _LONGEST:
        yield batches_per_epoch, factor * epochs
        yield factor * batches_per_epoch, epochs
        factor *= 2


def _acting(
    asked: dict[Event, Predicate], batches_per_epoch: int, epochs: int, samples: int, tokens: int
) -> list[frozenset[Event]]:
    """Return the events at which each step of a run acts."""
    now, found = Timestamp(run=RunLength(f"{epochs}ep", batches_per_epoch)), []
    for _ in range(batches_per_epoch * epochs):
        later = now.advance(samples, tokens)
        times = {event: later if event.sees_new_time else now for event in asked}
        found.append(frozenset(event for event, one in asked.items() if _answer(one, event, times[event])))
        now = later
    return found


def _answer(asked: Predicate, event: Event, now: Timestamp) -> bool:
    left, _ = asked.during(now)
    return not left.is_timed or left(event, _Moment(now))


class _Moment(NamedTuple):
    """The part of a state that a predicate about time reads."""

    timestamp: Timestamp


def _moments(acting: list[frozenset[Event]], batches_per_epoch: int, epochs: int) -> Moments:
    total = len(acting)
    changes = [start for start in range(1, total) if acting[start] != acting[start - 1]]
    near = {0, total - 1, *(change + offset for change in changes for offset in (-1, 0, 1))}
    starts = tuple(range(total)) if total <= _SHORT else tuple(sorted(near & set(range(total))))
    most = max(len(acting[start]) for start in starts)
    return Moments(
        batches_per_epoch, epochs, tuple(start for start in starts if len(acting[start]) == most > 0), starts
    )


def _has_hash(value: Any) -> bool:
    """Return whether a predicate can be hashed; one from a plain function may contain an unhashable object."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
