"""Signals to end a run: recorded when they arrive, and obeyed between two batches."""

import os
import signal
import threading
from types import FrameType
from typing import Any


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A reusable context manager that records SIGINT and SIGTERM; a second signal takes effect immediately.

    Only Python's main thread may set handlers; in other threads it does nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._outside: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._outside = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def obey(self, message: str) -> None:
        """End the process according to the signal: SIGINT by `KeyboardInterrupt`, SIGTERM by `SystemExit` with 143.

        Args:
            message: A description of what was done before the end.
        """
        assert self.received is not None
        self._restore()
        number, self.received = self.received, None
        if number is signal.SIGINT:
            raise KeyboardInterrupt(message)
        error = SystemExit(128 + number)
        error.add_note(message)
        raise error

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._restore()
        if os.getpid() == self._process:
            self.received = signal.Signals(number)
        else:  # a child process forked within the scope: its earlier handler acts
            signal.raise_signal(number)

    def _restore(self) -> None:
        outside, self._outside = self._outside, {}
        for number, handler in outside.items():
            signal.signal(number, handler)
