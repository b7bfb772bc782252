"""The law of draws: each comes from the run's key and the batch's number, under a name of the algorithm's own."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from purecompose.algorithm import Algorithm
from purecompose.event import Event
from purecompose.random import draws as sources, salt
from purecompose.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.record import Act, Watched
from purecompose.testing.subject import Subject


__all__ = ["draws_keyed"]

# A method that acts in every few batches shall have the chance to draw in two of them.
_MOST_BATCHES = 4
_NETWORK = salt(".forward")


class _Draw(NamedTuple):
    """Where a draw takes its words from, but for the example and the element."""

    key: tuple[int, ...]
    salt: int
    batch: int


_Seen = dict[_Draw, Event]
"""Draws of one step, with the event of each."""


@define_law(
    "draws depend on the run's key and on the batch's number, and share their names with nobody",
    "draw from state.rng(name) or state.example_rng(name), whose name begins with the algorithm's own; what is to stay "
    "the same all through the run, draw at INIT and keep in state.slots[name]",
    exempt=never_acts,
    is_about_option=True,
    idle="it draws nothing at its events (what the network's own layers draw in a forward pass is not seen)",
)
def draws_keyed(subject: Subject, case: Case) -> bool:
    """Takes down from which words the algorithm draws: in runs with two keys, in several batches, beside others.

    No draw may recur in the run with another key, or in another batch of the same run; nor may it be one of a
    companion's, or stand in for the network's own. Within a step draws may recur: microbatches and further gradients
    repeat them on purpose. Draws under vmap are not seen.
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
    return any(first)


def _check_apart(mine: _Seen, theirs: _Seen, what: str) -> None:
    for draw, event in mine.items():
        if draw in theirs:
            raise Broken(f"{what} (key {draw.key}, salt {draw.salt}, batch {draw.batch})", event=event)


class _Recorder:
    """A step that takes down what each algorithm in it draws."""

    def __init__(self, subject: Subject, case: Case) -> None:
        self.subject, self.case = subject, case
        self.acting: list[tuple[str, Event]] = []
        self.drawn: dict[str, _Seen] = {}
        step = case.step(subject.algorithm)
        self.step = step.replace(algorithms=[self._watched(algorithm) for algorithm in step.algorithms])

    def steps(self, state: State) -> Iterator[_Seen]:
        """What the subject draws at INIT, and then in each step, until it has drawn in two; checked for its names."""
        with self._recording():
            state = self.step.init(state)
        yield self._taken()
        num = 0
        for index in range(max(self.case.num_batches, _MOST_BATCHES)):
            if num > 1 and index >= self.case.num_batches:
                return
            with self._recording():
                state = self.step(state, self.case.batch(index))
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
            self.acting.append((algorithm.name, event))
            try:
                return act(state)
            finally:
                self.acting.pop()

        return Watched(algorithm, around, with_init=True).algorithm

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Listens where every draw takes its words."""
        original: Callable[..., Tensor] = sources.philox_lanes

        def listening(element: Any, draw: Any, example: Any, batch: Any, key: Tensor) -> Tensor:
            if self.acting:
                name, event = self.acting[-1]
                with contextlib.suppress(RuntimeError):  # under vmap there is no single value
                    found = _Draw(tuple(key.tolist()), int(draw), int(batch))
                    self.drawn.setdefault(name, {}).setdefault(found, event)
            return original(element, draw, example, batch, key)

        sources.philox_lanes = listening
        try:
            yield
        finally:
            sources.philox_lanes = original
