"""Signals that ask a run to end: noted when they come, obeyed between two batches."""

import signal
import threading
from types import FrameType
from typing import Any


__all__ = ["Interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A scope in which SIGINT and SIGTERM are noted; a second one acts at once, as it would have outside.

    Only Python's main thread may set handlers; in others the scope does nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._outside: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._outside = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def obey(self, message: str) -> None:
        """Ends the process as the signal asks: SIGINT by `KeyboardInterrupt`, SIGTERM by `SystemExit` with 143.

        Args:
            message: What was done first.
        """
        assert self.received is not None
        self._restore()
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt(message)
        error = SystemExit(128 + self.received)
        error.add_note(message)
        raise error

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._outside.items():
            signal.signal(number, handler)
        self._outside = {}
