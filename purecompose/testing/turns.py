"""Threads of which one runs at a time, in a fixed order, until it waits for the others or ends."""

import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar


T = TypeVar("T")

_PATIENCE = 120.0
"""Seconds of one turn after which all threads end: one holds a lock, perhaps, that another needs."""


class Turns:
    """Threads with places from 0, which run in turn: a round of turns after the other, in the order of the places.

    So what they do is the same each time, although they share the settings of the process.
    """

    def __init__(self, size: int, on_turn: Callable[[int], object] = lambda place: None) -> None:
        """Prepare the threads.

        Args:
            size: Number of threads.
            on_turn: Function that is called with the place of a thread when its turn begins.
        """
        self._size, self._on_turn = size, on_turn
        self._condition = threading.Condition()
        self._turn = self._num_turns = self._num_ended = 0
        self._given: list[Any] = []
        self._error: BaseException | None = None

    def run(self, act: Callable[[int], T], prepare: Callable[[int], object] = lambda place: None) -> list[T]:
        """Call a function in each thread, with its place, and return the results.

        Args:
            act: The function.
            prepare: Function that each thread calls before its first turn, while others run.

        Raises:
            BaseException: The first error in any thread; then the others end as well, when they would wait.
            RuntimeError: Some threads wait for others that have ended, or a turn takes minutes.

        Example:
            >>> turns = Turns(2)
            >>> turns.run(lambda place: turns.meet(place, f"from {place}"))
            [['from 0', 'from 1'], ['from 0', 'from 1']]
        """
        results: dict[int, T] = {}

        def take_part(place: int) -> None:
            try:
                prepare(place)
                self._await_turn(place)
                results[place] = act(place)
                self._end()
            except _Abandoned:
                pass
            except BaseException as error:
                self._fail(error)

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(take_part, place), daemon=True)
            for place in range(self._size)
        ]
        for thread in threads:
            thread.start()
        try:
            self._await_end()
        except BaseException as error:  # an interrupt of the program
            self._fail(error)
        for thread in threads:
            thread.join(_PATIENCE)
        if self._error is not None:
            raise self._error
        return [results[place] for place in range(self._size)]

    def meet(self, place: int, given: Any, together: Callable[[list[Any]], object] = lambda given: None) -> list[Any]:
        """Wait until all threads have called this, and return what they have given, in the order of their places.

        Args:
            place: The place of the calling thread.
            given: What it gives to the others.
            together: Function of what all have given, which is called once, before any thread goes on.
        """
        if self._num_ended or self._error is not None:
            self._fail(RuntimeError(_DIFFERENT))
            raise _Abandoned
        all_given = self._given
        all_given.append(given)
        if len(all_given) == self._size:
            self._given = []
            try:
                together(all_given)
            except Exception as error:
                self._fail(error)
                raise _Abandoned from error
        self._pass_on()
        self._await_turn(place)
        return all_given

    def _end(self) -> None:
        if self._given:
            self._fail(RuntimeError(_DIFFERENT))
        self._num_ended += 1
        self._pass_on()

    def _pass_on(self) -> None:
        with self._condition:
            self._turn = (self._turn + 1) % self._size
            self._num_turns += 1
            self._condition.notify_all()

    def _await_turn(self, place: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == place or self._error is not None)
        if self._error is not None:
            raise _Abandoned
        self._on_turn(place)

    def _await_end(self) -> None:
        with self._condition:
            while self._num_ended < self._size and self._error is None:
                before = self._num_turns
                if not self._condition.wait(_PATIENCE) and self._num_turns == before:
                    raise RuntimeError(f"thread {self._turn} of {self._size} has not waited or ended in {_PATIENCE} s")

    def _fail(self, error: BaseException) -> None:
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()


_DIFFERENT = "processes wait for each other: they do not send equally many messages"


class _Abandoned(BaseException):
    """Ends a thread after an error in another; a BaseException, so that no handler treats it as an error."""
