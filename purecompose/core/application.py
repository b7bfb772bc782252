"""The application of one algorithm at one event."""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from typing import Any

from purecompose._support.functorch import is_fake
from purecompose.core.algorithm import Algorithm
from purecompose.core.context import Static
from purecompose.core.contract import Contract
from purecompose.core.operation import Operation, lift
from purecompose.core.state import State
from purecompose.errors import ContractError, FormError
from purecompose.time.event import Event


def application(algorithm: Algorithm, event: Event, pass_name: str) -> Operation:
    """Return one algorithm at one event as an operation.

    Args:
        algorithm: The algorithm.
        event: The event.
        pass_name: Name of the draws of forward passes at this event; the algorithm's own name is added.
    """

    def run(state: State, watch: Contract | None) -> State:
        before = state
        if algorithm.host:
            before = state.replace(static=Static(state.context, state.static.opened(later=event.sees_new_time)))
        if watch is None:
            after, exit_code = applied(algorithm, event, before)
        else:
            after, exit_code = watch.apply(algorithm, event, before, lambda: applied(algorithm, event, before))
        if algorithm.host:
            after = after.replace(static=Static(after.context, state.static.timestamp))
        elif after.static is not before.static:
            raise FormError(
                f"{algorithm.name} at {event} changed the static part (model, optimizer, time): "
                "only INIT and host algorithms may",
                event,
            )
        if watch is not None:
            watch.note(algorithm, event, state, after, exit_code)
        return after

    return lift(run, f"{pass_name} {algorithm.name}")


def applied(algorithm: Algorithm, event: Event, state: State) -> tuple[State, int | None]:
    """Call `apply` and return (state, exit code), checked; errors get a note with algorithm and event."""
    try:
        if algorithm.host and is_fake(state.key):
            raise RuntimeError(
                f"{algorithm.name}, a host algorithm, was traced with fake tensors: it acts in a part of the step that "
                "is compiled. Let it act outside of Microbatches, if another algorithm computes the gradient again "
                "with state.gradient; your own scope must set is_host in the operation that it lowers to"
            )
        return _checked_result(algorithm.apply(event, state), algorithm, event)
    except Exception as error:
        error.__dict__["algorithm"] = algorithm
        for note in (f"in {algorithm.name} at {event}", *_hints(error, algorithm, state)):
            error.add_note(note)
        raise


def _hints(error: Exception, algorithm: Algorithm, state: State) -> Iterator[str]:
    """Yield what is to be done about an error that `apply` raised, where this is known."""
    absent = [f"state.{name}" for name in ("batch", "outputs", "grads") if getattr(state, name) is None]
    if absent and isinstance(error, AttributeError | TypeError) and "NoneType" in str(error):
        yield (
            f"there {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} None: a step has its batch from the "
            "start, outputs from AFTER_FORWARD on, and grads from AFTER_BACKWARD on"
        )
    if isinstance(error, KeyError) and error.args == (algorithm.name,) and algorithm.name not in state.slots:
        yield "it has no slot: match Event.INIT too, on(Event.INIT, ...), and make the slot there"
    if isinstance(error, FrozenInstanceError):
        yield "a state is immutable: return state.replace(...) with the new value"


def _checked_result(result: Any, algorithm: Algorithm, event: Event) -> tuple[State, int | None]:
    exit_code = None
    if isinstance(result, tuple) and len(result) == 2:
        result, exit_code = result
    if not isinstance(result, State):
        raise ContractError(
            f"{algorithm.name}: apply at {event} must return a State or (State, exit code), got "
            f"{type(result).__name__}{' (is a return statement missing?)' if result is None else ''}"
        )
    return result, exit_code
