"""Checks of what is composed: of programs, algorithms and passes, and of a step in its first run."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from purecompose._support.messages import warn
from purecompose._support.objects import check_hidden
from purecompose._support.specs import shown
from purecompose.combinations import unsupported
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.context import Cut, Layout
from purecompose.core.loop import advance, lacking_events, loop_events
from purecompose.core.operation import Carry, Node, Operation, Purpose, walk
from purecompose.core.passes import Pass, order_by_constraints
from purecompose.core.program import Program, Stage, StateFn, Update, as_nodes, events_in
from purecompose.core.ranks import Ranks
from purecompose.core.scopes import Grad, Scope
from purecompose.core.state import State
from purecompose.nn.keyed.modules import detect
from purecompose.schedule import collect
from purecompose.time import Time, TimeUnit
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER


def with_usual_loop(given: Any, algorithms: Any) -> tuple[Any, Any]:
    """Return the program and the algorithms that `compose` was given: a list of algorithms is run by the usual loop.

    So is an empty list, as in a comparison with no method at all.
    """
    if isinstance(given, (Algorithm, Event, str)) or not isinstance(given, Iterable):
        hint = f"; put a single algorithm into a list, compose([{given}])" if isinstance(given, Algorithm) else ""
        raise TypeError(f"{given!r} is not a program: a tuple of events, stages and scopes, such as loop_events{hint}")
    given = tuple(given)
    for one in given:
        made = getattr(one, "__annotations__", {}).get("return")
        if callable(one) and getattr(made, "__name__", made) == "Algorithm":
            raise TypeError(f"compose: {one.__name__} is a factory: call it, as in compose([{one.__name__}()])")
    methods = [one for one in given if isinstance(one, Algorithm) or _is_foreign(one)]
    if not given and not algorithms:
        return loop_events, ()
    if not methods:
        return given, algorithms
    if len(methods) < len(given):
        raise TypeError(
            f"compose: {methods[0]} stands in the loop program; algorithms are the second argument, "
            "compose(loop_events, [...]), or the only one, compose([...])"
        )
    if not isinstance(algorithms, tuple) or algorithms:
        raise TypeError(
            f"compose: there are two lists of algorithms, of which the first has {methods[0]}: put all into one, "
            "compose([...]), or give the loop first, compose(loop_events, [...])"
        )
    return loop_events, methods


def as_algorithms(given: Iterable[Algorithm]) -> tuple[Algorithm, ...]:
    chosen = _as_tuple(given, "algorithms")
    for algorithm in chosen:
        if not isinstance(algorithm, Algorithm):
            hint = "call a factory, as in alg.mixup(alpha=0.2)"
            if _is_foreign(algorithm):
                hint = "pc.Algorithm(name, match, apply) makes one of functions of (event, state)"
            raise TypeError(f"expected an Algorithm, got {shown(algorithm)}; {hint}")
        check_hidden([algorithm.apply, algorithm.match, dict(algorithm.config)], algorithm.name)
    twice = [name for name, count in Counter(name for a in chosen for name in a.names).items() if count > 1]
    if twice:
        raise ValueError(f"two algorithms are named {twice[0]!r}; rename one of them, as in mixup(..., name='other')")
    return chosen


def _is_foreign(given: Any) -> bool:
    """Return whether an object is an algorithm by its methods, as those of Composer."""
    return not isinstance(given, type) and all(hasattr(given, method) for method in ("match", "apply"))


def as_passes(given: Iterable[Pass]) -> tuple[Pass, ...]:
    ordering = _as_tuple(given, "passes")
    for one_pass in ordering:
        if not callable(one_pass):
            raise TypeError(f"{one_pass!r} is not a pass: a function (algorithms, event) -> algorithms")
    return ordering


def as_program(given: Iterable[Node | StateFn | str]) -> Program:
    """Return the program, with names of events replaced by the events."""
    program = as_nodes(given)
    num_advances = sum(node == advance for node in walk(program))
    if num_advances > min(program.count(advance), 1):
        raise ValueError("a step moves the time by one batch: put `advance` into the program once, outside of scopes")
    is_later = False
    for node in walk(program):
        if isinstance(node, Stage):
            check_hidden(node.fn, f"the stage {node.name}")
        is_later = is_later or node == advance
        if isinstance(node, Event) and num_advances and node.sees_new_time != is_later:
            side = "after" if node.sees_new_time else "before"
            raise ValueError(f"{node} belongs {side} the program's advance")
    return program


def events_in_grad(program: Iterable[Node]) -> Iterator[Event]:
    return (event for node in walk(program) if isinstance(node, Grad) for event in events_in(node.body))


def check_no_host(event: Event, algorithms: Iterable[Algorithm]) -> None:
    """Raise a `ValueError` for a host algorithm at an event inside a `Grad`."""
    for algorithm in algorithms:
        if algorithm.host:
            raise unsupported("a Grad", "a host algorithm in it", f"{algorithm.name} at {event}")


def check_layout(
    layout: Layout, batch: Any, algorithms: Iterable[Algorithm], cut: Cut, ranks: Ranks | None = None
) -> None:
    """Raise a `ValueError` if the batch's layout does not allow what a method needs, or that the batch is cut."""
    acting = [algorithm for algorithm in algorithms if algorithm.predicate != NEVER]
    names = [algorithm.name for algorithm in acting if not _TAKES_ROWS.isdisjoint(algorithm.traits)]
    if names and not layout.has_rows(batch):
        raise ValueError(
            f"{', '.join(names)}: expected examples along dimension 0 of the batch's tensors, got "
            f"{layout.describe(batch)}; put examples first in the data, and let the network's forward arrange them"
        )
    if layout.can_cut(batch):
        return
    names = [algorithm.name for algorithm in acting if Trait.MEASURES_MICROBATCHES in algorithm.traits]
    names += [f"{name}={value}" for name, value in cut._asdict().items() if value is not None and cut.may_slice]
    names += ["data_parallel"] if ranks is not None and ranks.size > 1 else []
    if names:
        raise ValueError(
            f"{', '.join(names)}: the batch would be cut, and {layout.describe(batch)} has no parts: give "
            "State.create(splitter=batch.Splitter(num_examples, part)), with part(batch, start, stop) -> batch"
        )


def check_collects_once(program: Program, algorithms: Iterable[Algorithm]) -> None:
    """Raise a `ValueError` if a method adds up one gradient of each step and the program has several."""
    event = Event.AFTER_TRAIN_BATCH
    count = sum(node is event for node in walk(program))
    for algorithm in algorithms:
        acts = Trait.COLLECTS_GRADIENTS in algorithm.traits and algorithm.predicate.at(event) != NEVER
        if acts and count > min(program.count(event), 1):
            raise ValueError(
                f"{algorithm.name} adds up one gradient of each step: fire {event} once, outside of scopes and after "
                "all of the step's gradients"
            )


def check_constraints(algorithms: Iterable[Algorithm], passes: Iterable[Pass]) -> None:
    """Raise a `ValueError` for contradictory constraints, which would be found only in the first step otherwise."""
    if order_by_constraints in passes:
        for event in Event:
            order_by_constraints([a for a in algorithms if a.predicate.at(event) != NEVER], event)


def check_no_hosts_in_grad(program: Program, algorithms: Iterable[Algorithm]) -> None:
    """Raise a `ValueError` for a host algorithm that acts inside a `Grad`, if that is known without a state."""
    for event in events_in_grad(program):
        check_no_host(event, (a for a in algorithms if a.predicate.at(event) != NEVER and a.predicate.is_timed))


def warn_of_idle_algorithms(algorithms: Iterable[Algorithm], events: Collection[Event]) -> None:
    """Warn of algorithms that act at events which a training step lacks."""
    if any(event.is_eval or event.is_predict for event in events):
        return
    for line in lacking_events(algorithms, events):
        warn(f"{line}: it does nothing there. Put the event into the program; loop_events has all of them")


def warn_of_whole_batches(program: Program, cut: Cut) -> None:
    """Warn if batches are to be cut, and the program's gradient is not in a `Microbatches`."""
    scopes = {type(node) for node in walk(program) if isinstance(node, Scope)}
    if cut.may_slice and scopes == {Grad}:
        (number,) = (f"{name}={value}" for name, value in cut._asdict().items() if value is not None)
        warn(
            f"compose({number}) sets the slices of Microbatches, which the program does not have: batches are not cut. "
            "Put the Grad into one, Microbatches(Grad(...), Event.AFTER_BACKWARD)"
        )


_TAKES_ROWS = frozenset(
    {
        Trait.SELECTS_EXAMPLES,
        Trait.AUGMENTS_EXAMPLES,
        Trait.MIXES_EXAMPLES,
        Trait.CLIPS_EXAMPLES,
        Trait.SHORTENS_SEQUENCES,
    }
)


def _as_tuple(given: Any, role: str) -> tuple[Any, ...]:
    if not isinstance(given, Iterable):
        raise TypeError(f"{role}={given!r}: expected a list of {role}; put a single one into a list")
    return tuple(given)


def run_checked(
    operation: Operation,
    start: State,
    purpose: Purpose,
    *,
    program: Program,
    has_algorithms: bool,
    times: Collection[Time],
) -> State:
    """Run a step and check its contract; warn of programs that train nothing, repeat draws, or do not move time."""
    contract = purpose.watch
    assert contract is not None
    _warn_of_standing_time(start, times)
    with detect():
        end = operation(Carry(start), purpose).state
    contract.check(end)
    nodes = list(walk(program))
    kinds, has_advance, is_trained = {type(node) for node in nodes}, advance in nodes, end.params is not start.params
    # A program without `advance` may exist only for its algorithms, which look at the gradients.
    is_for_training = has_advance or not has_algorithms
    if is_for_training and Grad in kinds and Update not in kinds and not is_trained:
        warn(
            "the step trains nothing: its program has a Grad and no update, and no parameter has changed. Put "
            "`update` after the gradient, as loop_events does"
        )
    if contract.unapplied and Update in kinds:
        warn(
            f"{', '.join(contract.unapplied)} changed the gradients after the program's last update, which does not "
            "apply them: put `update` after the event, or let it act at one before the update"
        )
    if contract.has_drawn and is_trained and not has_advance:
        warn(
            "every step will repeat the draws of this one (dropout, noise, ...): the program has no `advance`, by "
            "which draws are numbered. Put `advance` after the update, as loop_events does"
        )
    return end


def _warn_of_standing_time(start: State, times: Collection[Time]) -> None:
    """Warn if time stands still within an epoch: epochs of unknown length must be ended by the caller."""
    run = start.static.opened(later=False).run
    if run.batches_per_epoch is not None:
        return
    units = {time.unit for time in (*collect(start.context.schedules, Time), *times)}
    in_epochs = run.duration is not None and run.duration.unit is TimeUnit.EPOCH
    if TimeUnit.EPOCH in units or (TimeUnit.DURATION in units and in_epochs):
        warn(
            "epochs have no known length: schedules and predicates stand still within an epoch. Give State.create "
            "batches_per_epoch=len(batches)"
        )
