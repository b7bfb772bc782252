"""Interruptions of a run: a signal, which is recorded when it arrives and obeyed between two batches, and a lack of
memory, after which a batch is cut into twice as many slices.

Several processes all end after the same batch.
"""

import itertools
import os
import re
import signal
import threading
from collections import deque
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from purecompose._support.messages import warn
from purecompose.core.compose import Step
from purecompose.core.ranks import Ranks
from purecompose.core.state import State


_NUMBERS = itertools.count()
"""Numbers of the runs in this process, which are the same in all processes."""
_AHEAD = 2
"""Number of batches that a process sends to its GPU ahead of time."""


class CommonEnd:
    """The batch after which all processes end.

    A process that has received a signal notes in the process group's store that all end after the next batch. No other
    can have gone further, since that batch needs its messages. Each looks into the store after every batch. With GPUs,
    to which a process sends at most two batches ahead of time, all end two batches later. When no batch follows, they
    ask each other.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sent: deque[torch.cuda.Event] = deque()
        self._place = f"purecompose/end/{next(_NUMBERS)}"
        self._store: Any = dist.distributed_c10d._get_default_store()

    def due(self, batch: int, received: signal.Signals | None, device: torch.device) -> signal.Signals | None:
        """Return the signal by which the run ends after this number of batches, if it does."""
        is_ahead = device.type == "cuda"
        if is_ahead:  # wait for the batch before the last ones, whose messages all processes have sent by then
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._sent.append(event)
            if len(self._sent) > _AHEAD:
                self._sent.popleft().synchronize()
        if received is not None:
            self._store.compare_set(self._place, "", f"{batch + 1 + _AHEAD * is_ahead} {int(received)}")
        elif not self._store.check([self._place]):
            return None
        last, number = map(int, self._store.get(self._place).split())
        return signal.Signals(number) if batch >= last else None

    def due_at_end(self, received: signal.Signals | None, device: torch.device) -> signal.Signals | None:
        """Return the signal that any process has received; all must ask, since no batch follows."""
        own = torch.tensor(int(received or 0), device=device)
        number = int(self._ranks.exchange([own], "max")[0])
        return signal.Signals(number) if number else None


class Interrupts:
    """A reusable context manager that records SIGINT and SIGTERM, in the main thread; a second signal acts at once.

    With `ranks`, all processes end by the signal that one of them receives.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.received: signal.Signals | None = None
        self._common_end = None if ranks is None else CommonEnd(ranks)
        self._outside: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._outside = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    @property
    def is_common(self) -> bool:
        """True if several processes end together."""
        return self._common_end is not None

    def is_due(self, state: State, *, is_at_end: bool = False) -> bool:
        """Return whether the run ends with this state, because this process, or another one, has received a signal."""
        due, common = self.received, self._common_end
        if common is not None and is_at_end:
            due = common.due_at_end(self.received, state.device)
        elif common is not None:
            due = common.due(state.timestamp.batch, self.received, state.device)
        if due is not None:
            self.received = due
        return due is not None

    def obey(self, message: str) -> NoReturn:
        """End the process according to the signal: SIGINT by `KeyboardInterrupt`, SIGTERM by `SystemExit` with 143."""
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


_OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory", re.IGNORECASE)


class Adaptive:
    """A step that is repeated with more microbatches when it runs out of memory, which computes the same.

    `found` is the number, kept for later batches, if it is not that of the original step.
    """

    def __init__(self, step: Step, found: int | None = None) -> None:
        self.step = step if found is None else step.replace(microbatches=found)
        self.found = found
        self._proven = 0

    def __call__(self, state: State, batch: Any) -> State:
        num_examples = self.step.num_examples(state, batch)
        while True:
            try:
                # A donating step that fails may have begun to overwrite the memory of its state.
                is_at_risk = num_examples > self._proven and state.lease is not None
                new = self.step(state.copy() if is_at_risk else state, batch)
            except RuntimeError as error:
                is_memory_spent = isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(str(error))
                if not is_memory_spent:
                    raise
                k = self.step.cut.num_slices(num_examples)
                if k >= num_examples:
                    error.add_note("microbatches='auto': the memory does not suffice for a single example either")
                    raise
                self.found = min(2 * k, num_examples)
                self.step: Step = self.step.replace(microbatches=self.found)
                self._proven = 0
                warn(
                    f"out of memory: from batch {state.timestamp.batch} on, batches are cut into "
                    f"{self.step.microbatches} microbatches"
                )
            else:
                self._proven = max(self._proven, num_examples)
                return new
            if state.device.type == "cuda":
                torch.cuda.empty_cache()
