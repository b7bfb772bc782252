"""The law of draws: each depends on the run's key and the batch's number, under a name that no one else uses."""

import contextlib
import dataclasses
import math
import random as python_random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.random import Rng, draws as sources, salt
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.outer import after_batch, begun
from purecompose.testing.record import STEP_FIELDS, Act, Watched, compare
from purecompose.testing.subject import Subject
from purecompose.time.event import Event


# Minimal number of batches to try, so that a method that acts every few batches can draw in two of them.
_MOST_BATCHES = 4
_NETWORK = salt(".forward")
_TWIN, _TWIN_EVERY = "its_twin", 3


class _Draw(NamedTuple):
    """The inputs of the generator for a draw, except the example and the element. The key follows from the batch."""

    key: tuple[int, ...]
    salt: int


_Seen = dict[_Draw, Event]
"""The draws of one step, with the event of each."""


@define_law(
    "draws depend on the run's key and on the batch's number, each has a name of its own, and they share names with "
    "no one",
    "draw from state.rng(name) or state.example_rng(name), whose name begins with the algorithm's own, as the factory "
    "was given it, and says what is drawn: state.rng(f'{name}.order'); seed no generator of your own; what is to stay "
    "the same all through the run, draw at INIT and keep in state.slots[name]",
    exempt=never_acts,
    is_about_option=True,
    idle="it draws nothing at its events (what the network's own layers draw in a forward pass is not seen)",
)
def draws_keyed(subject: Subject, case: Case) -> bool:
    """Record the inputs of the algorithm's draws, in runs with two keys, in several batches, and with companions.

    No draw may occur again in the run with another key, or in another batch of the same run; nor may it equal a draw of
    a companion, of the network, or of the same algorithm under another name. Within a step draws may be repeated, since
    microbatches and further gradients do so on purpose; but within one application, draws of different sizes must have
    different names. A generator that the algorithm seeds itself must depend on the run's key. Draws under vmap are not
    observed.
    """
    if "bystander" not in case.others:
        case = dataclasses.replace(case, others=(*case.others, "bystander"))
    ours = _Recorder(subject, case)
    first = list(ours.steps(case.state()))
    other_key = list(_Recorder(subject, case).steps(case.state(key=case.seed + 1)))
    labels = f"with key {case.seed} and with key {case.seed + 1}"
    for mine, theirs in zip(first, other_key, strict=False):
        _check_apart(mine, theirs, f"the same draws in runs {labels}: they do not depend on the run's key")
    for number, later in enumerate(first[1:], 1):  # the first is INIT, which happens once
        for earlier in first[1:number]:
            _check_apart(later, earlier, "the same draws in two batches: they do not depend on the batch's number")
    twin = subject.renamed(_TWIN) if case.seed % _TWIN_EVERY == 0 else None
    if twin is not None:
        what = f"the same draws under the names {subject.name!r} and {_TWIN!r}: two of a kind are not independent"
        for mine, theirs in zip(first, _Recorder(twin, case).steps(case.state()), strict=False):
            _check_apart(mine, theirs, what)
    return any(first) or ours.seeds_itself


def _check_apart(mine: _Seen, theirs: _Seen, what: str) -> None:
    for draw, event in mine.items():
        if draw in theirs:
            raise Broken(f"{what} (key {draw.key}, salt {draw.salt})", event=event)


@dataclasses.dataclass
class _Application:
    """One application of an algorithm, and the sizes of its draws."""

    name: str
    event: Event
    sizes: dict[_Draw, int] = dataclasses.field(default_factory=dict)
    has_seeded: bool = False

    def note(self, draw: _Draw, size: int) -> None:
        """Record a draw; raise `Broken` if an earlier one of another size had the same name."""
        if self.sizes.setdefault(draw, size) != size:
            what = "two draws of different sizes under one name: they begin with the same numbers"
            raise Broken(f"{what} (key {draw.key}, salt {draw.salt})", event=self.event)


@contextlib.contextmanager
def _generators_noted(application: _Application) -> Iterator[None]:
    """Record whether a generator of torch, Python or NumPy is created."""
    numpy = sys.modules.get("numpy")
    places = [(torch, "Generator"), (python_random, "Random")]
    places += [(numpy.random, name) for name in ("default_rng", "RandomState")] if numpy is not None else []
    originals = [getattr(owner, name) for owner, name in places]

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            application.has_seeded = True
            return original(*args, **kwargs)

        return _called_by(make, original) if isinstance(original, type) else make

    try:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, noting(original))
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def _called_by(make: Callable[..., Any], original: type) -> type:
    """Return a class that creates instances with a function, and accepts the original's instances in `isinstance`."""

    class Meta(type(original)):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    return Meta(original.__name__, (original,), {})


class _Recorder:
    """A step that records the draws of each of its algorithms."""

    def __init__(self, subject: Subject, case: Case) -> None:
        self.subject, self.case = subject, case
        self.acting: list[_Application] = []
        self.seeds_itself = False
        self.drawn: dict[str, _Seen] = {}
        step = case.step(subject.algorithm)
        self.step = step.replace(algorithms=[self._watched(algorithm) for algorithm in step.algorithms])

    def steps(self, state: State) -> Iterator[_Seen]:
        """Yield the subject's draws at INIT and in each step, after checking their names, until it has drawn twice."""
        with self._recording():
            state = begun(self.step, state)
        yield self._taken()
        num = 0
        for index in range(max(self.case.num_batches, _MOST_BATCHES)):
            if num > 1 and index >= self.case.num_batches:
                return
            with self._recording():
                state = after_batch(self.step, state, self.case.batch(index))
            mine = self._taken()
            num += bool(mine)
            yield mine

    def _taken(self) -> _Seen:
        mine = self.drawn.pop(self.subject.name, {})
        for name, theirs in self.drawn.items():
            _check_apart(mine, theirs, f"it draws under a name of {name}: the two are not independent")
        for draw, event in mine.items():
            if draw.salt == _NETWORK:
                raise Broken("it draws under '.forward', the name of the network's own draws", event=event)
        self.drawn.clear()
        return mine

    def _watched(self, algorithm: Algorithm) -> Algorithm:
        def around(event: Event, state: State, act: Act) -> State:
            application = _Application(algorithm.name, event)
            self.acting.append(application)
            try:
                with _generators_noted(application):
                    after = act(state)
            finally:
                self.acting.pop()
            if application.has_seeded and algorithm.name == self.subject.name:
                self._check_follows_key(event, state, after, act)
            return after

        return Watched(algorithm, around, with_init=True).algorithm

    def _check_follows_key(self, event: Event, state: State, after: State, act: Act) -> None:
        """Raise `Broken` if an algorithm that has seeded a generator does the same with another key."""
        self.seeds_itself = True
        other = act(state.replace(key=state.key + 1))
        fields = [field for field in STEP_FIELDS if field != "key"]
        try:
            compare(after, other, ("", ""), fields=fields)
        except Broken:
            return
        raise Broken("it seeds a generator of its own, and does the same with another key", event=event)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Record the inputs of every draw while the context is active."""
        original: Callable[..., Tensor] = sources.numbers_of

        def listening(rng: Rng, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            if self.acting:
                application = self.acting[-1]
                with contextlib.suppress(RuntimeError):  # under vmap there is no single value
                    found = _Draw(tuple(rng.key.tolist()), int(rng.draw))
                    self.drawn.setdefault(application.name, {}).setdefault(found, application.event)
                    if application.name == self.subject.name:
                        num_lead = rng.streams().dim() - 1
                        application.note(found, math.prod(sizes[num_lead:]) * dtype.itemsize)
            return original(rng, sizes, dtype)

        sources.numbers_of = listening
        try:
            yield
        finally:
            sources.numbers_of = original
