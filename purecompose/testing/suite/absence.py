"""Laws of company: an algorithm that does not act or has nothing to do does not affect the others, nor do its draws."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose.algorithms import sometimes
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.repeated import Again
from purecompose.core.state import State
from purecompose.errors import FormError
from purecompose.random import Rng, draws as sources, salt
from purecompose.testing.case import Case, Subject, bystander
from purecompose.testing.law import Broken, acts_in_step, define_law, never_acts
from purecompose.testing.record import LASTING, Act, Watched, after_batch, begun, changed_context, compare
from purecompose.testing.suite.agreement import at_best_precision, rounding
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


_WITHOUT_MODEL = ("slots", "hparams", "key", "metrics")
"""Fields that can be compared even if INIT has replaced the network."""


def _only_init(algorithm: Algorithm) -> str | None:
    if algorithm.events == (Event.INIT,):
        return "it acts at INIT only: what it is for is what stays"
    return never_acts(algorithm)


@define_law(
    "an algorithm that does not match is absent: the step with it is the step without it, bit for bit",
    "let INIT make nothing but the algorithm's own slot (and surgery); match must not write",
    exempt=_only_init,
)
def absent_when_unmatched(subject: Subject, case: Case) -> bool:
    """Compare the step without the algorithm with one in which it acts at INIT only, and with the real one.

    The algorithm restricted to INIT is compared at INIT and after a step, each run from its own initial state. The real
    algorithm is compared in each batch in which it does not act, from the state that it has reached. Its own slot, and
    hparams that its settings name, may differ. If INIT has replaced something static (the network, by surgery, or the
    optimizer), the runs from two initial states may differ: then only the others' slots and metrics, the hparams and
    the key are compared. The comparison from one state remains complete.

    Returns:
        True if the algorithm can act at all, so that there are times at which it must be absent.
    """
    idle = subject.changed(match=subject.algorithm.predicate & on(Event.INIT))
    plain_step, idle_step = case.step(), case.step(idle.algorithm)
    start = case.state()
    ours, theirs = plain_step.init(case.state().with_hparams(subject.algorithm.hparams)), idle_step.init(start)
    fields = LASTING if changed_context(start, theirs) is None else _WITHOUT_MODEL
    labels = ("without the algorithm", "with it, acting at INIT only")
    compare(ours, theirs, labels, fields=fields, event=Event.INIT, without_slots=subject.algorithm.names)
    ours, theirs = plain_step(ours, case.batch(0)), idle_step(theirs, case.batch(0))
    compare(ours, theirs, labels, fields=fields, event=Event.INIT, without_slots=subject.algorithm.names)
    _check_unmatched(subject, case, plain_step)
    return subject.algorithm.predicate != NEVER


def _check_unmatched(subject: Subject, case: Case, plain_step: Step) -> None:
    """Compare the real step, batch by batch, with the plain one from the same state."""
    watched = Watched(subject.algorithm)
    step = case.step(watched.algorithm)
    state = begun(step, case.state())
    for batch in case.batches():
        watched.applications.clear()
        following = after_batch(step, state, batch)
        if not watched.acted:
            compare(plain_step(state, batch), following, ("without the algorithm", "with it, where it does not match"))
        state = following


@define_law(
    "an algorithm with neutral settings is the plain step, bit for bit",
    "let neutral settings match never: Algorithm(name, NEVER if alpha == 0 else on(...), apply)",
)
def neutral_setting(subject: Subject, case: Case) -> bool:
    """Compare the steps with and without an algorithm whose settings are neutral according to its author.

    Its own slot, its own metrics and hparams that its settings name may differ. It may act, as long as that has no
    effect.
    """
    plain_step, step = case.step(), case.step(subject.algorithm)
    ours = plain_step.init(case.state().with_hparams(subject.algorithm.hparams))
    theirs = step.init(case.state())
    labels = ("without the algorithm", "with neutral settings")
    compare(ours, theirs, labels, event=Event.INIT, without_slots=subject.algorithm.names)
    for batch in case.batches():
        ours, theirs = plain_step(ours, batch), after_batch(step, theirs, batch)
        compare(ours, _with_metrics_of(ours, theirs), labels, without_slots=subject.algorithm.names)
    return True


def _with_metrics_of(reference: State, state: State) -> State:
    """Return the state with only those metrics that the reference has, too."""
    return state.replace(metrics={name: value for name, value in state.metrics.items() if name in reference.metrics})


# Two batches are enough for laws about neighbours.
_FEW = 2


@define_law(
    "algorithms.sometimes with probability 1 is the algorithm, and with probability 0 the step without it",
    "let apply return the same structure, shapes and dtypes whatever the values are, and change only what follows from "
    "what it is given in the same step",
    exempt=lambda algorithm: None if acts_in_step(algorithm) else "it acts outside of training steps only",
    idle="it changes shapes, dtypes or structure, so it cannot be chosen by element",
)
@at_best_precision
def chosen_or_absent(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    """Compare a few steps, within rounding: targets that are not mixed become a mixture of one term and zeros.

    Its own slots and metrics may differ where it is not chosen.
    """
    method = subject.algorithm
    if method.host:
        return False
    names, batches, watched = method.names, case.batches(dtype)[:_FEW], Watched(method)
    start = case.state(dtype=dtype).with_hparams(method.hparams)
    for p, other in ((1.0, [watched.algorithm]), (0.0, [])):
        step, plain = case.step(sometimes(method, p)), case.step(*other)
        ours, theirs = begun(step, start), begun(plain, start)
        if p == 0 and changed_context(ours, theirs) is not None:
            break  # INIT has replaced layers, so that the runs differ
        for batch in batches:
            try:
                ours, theirs = after_batch(step, ours, batch), after_batch(plain, theirs, batch)
            except FormError:
                return False
            same = _with_metrics_of(theirs, ours) if p else ours.replace(metrics=theirs.metrics)
            labels = (f"with probability {p:g}", "always" if p else "without the algorithm")
            compare(same, theirs, labels, tolerance=rounding, without_slots=() if p else names)
    return watched.acted


@define_law(
    "its place in the list and inactive neighbours make no difference",
    "look things up by name (state.slots[name], state.metrics of your own), never by place or number, and take draws "
    "from state.rng(name)",
    exempt=never_acts,
)
def list_position_free(subject: Subject, case: Case) -> bool:
    """Add bystanders, which change only their own slots and metrics, before and after the algorithm."""
    watched = Watched(subject.algorithm)
    alone = case.step(watched.algorithm)
    among = alone.replace(algorithms=[bystander("a bystander"), *alone.algorithms, bystander("zz")])
    ours, theirs, event = begun(alone, case.state()), begun(among, case.state()), Event.INIT
    for batch in [None, *case.batches()[:_FEW]]:
        if batch is not None:
            ours, theirs, event = after_batch(alone, ours, batch), after_batch(among, theirs, batch), None
        own = {name: slot for name, slot in theirs.slots.items() if name in ours.slots}
        without = _with_metrics_of(ours, theirs.replace(slots=own))
        compare(ours, without, ("alone", "between two bystanders"), event=event)
    return watched.acted


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
    "draws depend on the run's key and on the batch's number, and each has a unique name, which no other method uses",
    "draw from state.rng(name) or state.example_rng(name), whose name begins with the algorithm's own, as the factory "
    "was given it, and says what is drawn: state.rng(f'{name}.order'); seed no generator of your own; what is to stay "
    "the same all through the run, draw at INIT and keep in state.slots[name]",
    exempt=never_acts,
    idle="it draws nothing at its events (what the network's own layers draw in a forward pass is not seen)",
)
def draws_keyed(subject: Subject, case: Case) -> bool:
    """Record the inputs of the algorithm's draws, in runs with two keys, in several batches, and with companions.

    No draw may occur again in the run with another key, or in another batch of the same run; nor may it equal a draw of
    a companion, of the network, or of the same algorithm under another name. Within a step draws may be repeated, since
    microbatches and further gradients do so on purpose; but within one application, draws of different sizes must have
    different names. Draws under vmap are not observed.
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
    return any(first)


def _check_apart(mine: _Seen, theirs: _Seen, what: str) -> None:
    for draw, event in mine.items():
        if draw in theirs:
            raise Broken(f"{what} (key {draw.key}, salt {draw.salt})", event=event)


_Acting = list[tuple[str, Event, dict[_Draw, int]]]
"""The applications that run, each with the sizes of its draws."""
_STEP = ""
"""In place of an algorithm's name: the step itself, which computes a gradient again."""


class _Recorder:
    """A step that records the draws of each of its algorithms."""

    def __init__(self, subject: Subject, case: Case) -> None:
        self.subject, self.case = subject, case
        self.drawn: dict[str, _Seen] = {}
        self.acting: _Acting = []
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
            self.acting.append((algorithm.name, event, {}))
            try:
                return act(state)
            finally:
                self.acting.pop()

        return Watched(algorithm, around, with_init=True).algorithm

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Record the inputs of every draw while the context is active.

        In a gradient that is computed again, the network and others repeat the draws of the step.
        """
        original: Callable[..., Tensor] = sources.numbers_of
        again = {name: getattr(Again, name) for name in ("__call__", "gradients")}

        def unheard(method: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self.acting.append((_STEP, Event.AFTER_TRAIN_BATCH, {}))
                try:
                    return method(*args, **kwargs)
                finally:
                    self.acting.pop()

            return run

        def listening(rng: Rng, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            with contextlib.suppress(RuntimeError):  # under vmap there is no single value
                if self.acting:
                    num_lead = rng.streams().dim() - 1
                    self._note(
                        _Draw(tuple(rng.key.tolist()), int(rng.draw)), math.prod(sizes[num_lead:]) * dtype.itemsize
                    )
            return original(rng, sizes, dtype)

        sources.numbers_of = listening
        for name, method in again.items():
            setattr(Again, name, unheard(method))
        try:
            yield
        finally:
            sources.numbers_of = original
            for name, method in again.items():
                setattr(Again, name, method)

    def _note(self, draw: _Draw, size: int) -> None:
        """Record a draw; raise `Broken` if an earlier one of another size had the same name."""
        name, event, seen = self.acting[-1]
        if name == _STEP:
            return
        self.drawn.setdefault(name, {}).setdefault(draw, event)
        if seen.setdefault(draw, size) != size and name == self.subject.name:
            what = "two draws of different sizes under one name: they begin with the same numbers"
            raise Broken(f"{what} (key {draw.key}, salt {draw.salt})", event=event)
