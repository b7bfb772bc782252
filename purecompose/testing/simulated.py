"""Several processes of `torch.distributed`, simulated by threads of this process that run in turn.

This uses the process group of torch's own tests, which is not public: it is the only module that does.
"""

import contextvars
import datetime
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from purecompose import tree
from purecompose.testing.law import NotJudged
from purecompose.testing.process import as_rank


T = TypeVar("T")

_C10D: Any = getattr(torch._C, "_distributed_c10d", None)


_PATIENCE = 120.0
"""Seconds of one turn after which all threads end: perhaps one holds a lock that another needs."""


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


def simulated(size: int, act: Callable[[Any], T]) -> list[T]:
    """Call a function in each of several simulated processes, with a mesh of them, and return the results.

    A process runs until it waits for a message from the others. They share the settings of this process, such as
    generators, but not its process groups. The function must create what it changes: a lock that a process holds
    while it waits would stop the others.

    Args:
        size: Number of processes.
        act: Function of a `torch.distributed.DeviceMesh` of one dimension, on the CPU.

    Raises:
        NotJudged: The installed torch cannot simulate processes.
        RuntimeError: The processes send messages of different forms, or different numbers of them. The first error in
            any process is raised as it is.

    Example:
        >>> def total(mesh):
        ...     number = torch.tensor(1.0 + mesh.get_local_rank())
        ...     dist.all_reduce(number)
        ...     return number
        >>> simulated(2, total)
        [tensor(3.), tensor(3.)]
    """
    threaded = _threaded()
    meshes: dict[int, Any] = {}
    turns = Turns(size, lambda rank: os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank)))
    store = _C10D.HashStore()

    def join(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store, timeout=_LIMIT)
            meshes[rank] = init_device_mesh("cpu", (size,))
        except Exception as error:
            raise NotJudged(f"{_CANNOT}: {error}") from error

    def take_part(rank: int) -> T:
        try:
            return act(meshes[rank])
        finally:
            dist.destroy_process_group()

    # torch 2.11 for CUDA, without a GPU, crashes if a thread that has ended was the first to enter this.
    with FakeTensorMode():
        pass
    with as_rank(0, size), _isolated(threaded, turns):
        return turns.run(take_part, join)


_LIMIT = datetime.timedelta(seconds=60)
"""How long processes wait for each other when they form a group."""


def _threaded() -> Any:
    """Return torch's module for process groups of threads.

    Raises:
        NotJudged: Something in it is missing.
    """
    try:
        found: Any = importlib.import_module("torch.testing._internal.distributed.multi_threaded_pg")
    except ImportError:
        found = None
    group = getattr(found, "ProcessLocalGroup", None)
    owners = {"ThreadLocalWorld": found, "ret_work": found, "_start_coll": group, "_end_coll": group}
    owners |= {"HashStore": _C10D, "_set_thread_isolation_mode": _C10D}
    if missing := [name for name, owner in owners.items() if not hasattr(owner, name)]:
        raise NotJudged(f"{_CANNOT}: it has no {', '.join(missing)}")
    return found


_CANNOT = f"torch {torch.__version__} cannot simulate processes by threads"


@contextmanager
def _isolated(threaded: Any, turns: Turns) -> Iterator[None]:
    """Return a scope in which each thread has process groups of its own, whose messages are sent in turn."""
    group: Any = threaded.ProcessLocalGroup
    world = threaded.ThreadLocalWorld()
    if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11 forgot them, which no group of threads has
        world.comms = []
    patched: dict[tuple[Any, str], Any] = {
        (group, "_start_coll"): lambda collective, group: _Message(collective, turns, threaded.ret_work),
        (group, "_end_coll"): lambda collective, group: None,
        (dist.distributed_c10d, "_world"): world,
        (sys, "excepthook"): sys.excepthook,  # each init_process_group wraps it
    }
    originals = {(owner, name): vars(owner)[name] for owner, name in patched}
    try:
        _C10D._set_thread_isolation_mode(True)
        for (owner, name), replacement in patched.items():
            setattr(owner, name, replacement)
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)
        _C10D._set_thread_isolation_mode(False)


class _Message:
    """A process's part in a message; torch's own would wait while it is the process's turn."""

    def __init__(self, collective: Any, turns: Turns, done: Callable[[Any], Any]) -> None:
        self._collective, self._turns, self._done = collective, turns, done

    def join(self, rank: int, data: Any) -> Any:
        """Send and receive the tensors of this process, into some of which the message writes."""
        words = [tree.describe(leaf) for leaf in tree.leaves(data) if isinstance(leaf, Tensor)]
        op = getattr(self._collective, "op", "")
        form = f"{type(self._collective).__name__} {getattr(op, 'op', op)} of {', '.join(words)}"
        self._turns.meet(rank, (form, data), self._send)
        return self._done(data)

    def _send(self, given: list[Any]) -> None:
        if len({form for form, _ in given}) > 1:
            forms = "; ".join(f"process {rank}: {form}" for rank, (form, _) in enumerate(given))
            raise RuntimeError(f"processes wait for each other: they send different messages ({forms})")
        self._collective.work([data for _, data in given])
