"""Algorithms that a worker imports: some correct, some with faults that only appear in the other process."""

import os
import sys

from purecompose import Algorithm, Event, State, on


def _plain(event: Event, state: State) -> State:
    del event
    return state.replace(params={name: param * 0.99 for name, param in state.params.items()})


def _elsewhere() -> bool:
    return "pytest" not in sys.modules


def fails_elsewhere() -> Algorithm:
    """Raises in every process except the test's."""

    def apply(event: Event, state: State) -> State:
        if _elsewhere():
            raise LookupError("no cache here")
        return _plain(event, state)

    return Algorithm("fails_elsewhere", on(Event.BATCH_END), apply)


def dies_elsewhere() -> Algorithm:
    """Ends the process."""

    def apply(event: Event, state: State) -> State:
        if _elsewhere():
            os._exit(7)
        return _plain(event, state)

    return Algorithm("dies_elsewhere", on(Event.BATCH_END), apply)


def talks() -> Algorithm:
    """Prints, and reads from the standard input, in the other process."""

    def apply(event: Event, state: State) -> State:
        if _elsewhere():
            print("hello", flush=True)
            os.write(1, b"hello")
            assert os.read(0, 1) == b""
        return _plain(event, state)

    return Algorithm("talks", on(Event.BATCH_END), apply)


def plain() -> Algorithm:
    """Does nothing wrong."""
    return Algorithm("plain", on(Event.BATCH_END, Event.AFTER_TRAIN_BATCH), _plain)
