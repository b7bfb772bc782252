"""Another process, in which a run continues from a snapshot.

One worker is started at the first request, since importing torch takes seconds, and serves until this process ends. For
each try it forks a child, and never runs an operation of torch itself: so every try happens in a fresh process, at a
cost of a few hundredths of a second. Where forking is not safe (macOS) or not available (Windows), the worker does the
work itself; state that an earlier try left in a closure may then be visible to the next one.

The fork server of `multiprocessing` would do most of this, but it imports the program's main module again in each
process, which does not work for scripts without a guard and for notebooks, and it keeps a PYTHONHASHSEED that is set.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import IO, Any, NamedTuple, NoReturn

from purecompose._support.device import read_settings, write_settings
from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.outer import after_batch
from purecompose.testing.snapshot import from_bytes, to_bytes
from purecompose.testing.subject import Subject
from purecompose.time.event import Event
from purecompose.time.predicates import on


CAN_FORK = hasattr(os, "fork") and sys.platform != "darwin"
_LIMIT, _SLACK = 60.0, 60.0
"""Seconds for one try, and additional seconds until the worker itself is given up, because it may have to start."""
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from purecompose.testing.worker import serve; serve(json.loads(sys.argv[2]))"
)


class WorkerError(RuntimeError):
    """The other process failed for a reason other than the algorithm's run."""


class RemoteError(Exception):
    """The run failed in the other process; the text is its error message."""


class Unportable(Exception):
    """The case or the algorithm cannot be sent to another process."""


Answer = tuple[type[Exception] | None, Any]
"""`None` with the snapshot at the end of the run, or the kind of an error with its text."""


class Request(NamedTuple):
    """The message with which a worker continues a run."""

    source: str
    events: tuple[str, ...]
    """The events at which the algorithm may act; a subject may act at fewer events than the one from its source."""
    case: bytes
    snapshot: bytes
    first: int
    num: int
    limit: float
    """Maximal duration in seconds, if the worker forks."""
    settings: dict[str, Any]
    """Torch's settings, on which bits depend."""
    path: list[str]
    directory: str


def resumed(algorithm: Algorithm, case: Case, snapshot: bytes, first: int, num: int) -> State:
    """Return the state some steps after a snapshot, with a new step and a new template."""
    step = case.step(algorithm)
    # A program that resumes a run first builds a network with other weights and rates, at time 0. Its values must not
    # matter.
    template = step.init(replace(case, seed=case.seed + 1, start=0, lr=2 * case.lr).state())
    state = step.fire(Event.AFTER_LOAD, from_bytes(snapshot, like=step.fire(Event.BEFORE_LOAD, template)))
    for index in range(first, first + num):
        state = after_batch(step, state, case.batch(index))
    return state


def resumed_elsewhere(subject: Subject, case: Case, snapshot: bytes, first: int, num: int) -> bytes:
    """Return a snapshot of the result of `resumed` in another process, with the algorithm created from its source."""
    if subject.source is None or subject.source.startswith("__main__:"):
        raise Unportable(f"{subject.algorithm!r} has no source text that means the same elsewhere")
    try:
        pickled = pickle.dumps(case)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Unportable(f"{case!r} cannot be pickled: {error}") from error
    if b"__main__" in pickled:  # the worker has another main module
        raise Unportable(f"{case!r} refers to the main module")
    events = tuple(event.value for event in subject.algorithm.events)
    environment = read_settings(), list(sys.path), os.getcwd()
    return _the_worker().ask(Request(subject.source, events, pickled, snapshot, first, num, _LIMIT, *environment))


class Worker:
    """A connection to the other process.

    Args:
        fork: True if each try gets its own child process.
    """

    def __init__(self, *, fork: bool = CAN_FORK) -> None:
        self._owner, self._lock = os.getpid(), threading.Lock()
        arguments = [json.dumps(value) for value in (sys.path, fork)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Results must not depend on the seed of string hashes, so it differs from this process's, even if set here.
            env={**os.environ, "PYTHONHASHSEED": "random"},
        )

    @property
    def is_alive(self) -> bool:
        """True if it runs, and was started by this process."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, request: Request) -> bytes:
        """Return the snapshot at the end; the errors are those of `resumed_elsewhere`."""
        with self._lock:
            error, found = self._exchange(request, request.limit + _SLACK)
        if error is None:
            return found
        raise error(found)

    def _exchange(self, request: Request, limit: float) -> Answer:
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(limit, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            _send(request, self._process.stdin)
            return pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            self.close()
            raise WorkerError(f"the other process ended with status {self._process.returncode}") from error
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process, which exits when its input is closed."""
        if self._owner != os.getpid():  # a fork of this process has a copy of this object
            return
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # the other end has ended
                pass
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_worker: Worker | None = None


def _the_worker() -> Worker:
    global _worker
    if _worker is None or not _worker.is_alive:
        _end_worker()
        _worker = Worker()
    return _worker


@atexit.register
def _end_worker() -> None:
    if _worker is not None:
        _worker.close()


# In the other process


def serve(fork: bool) -> None:
    """Answer requests on standard input until it is closed; output of algorithms is discarded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when its parent does, not at Ctrl-C
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    warnings.simplefilter("ignore")  # the parent has shown them; and numpy's idle threads do not prevent a fork
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            os._exit(0)  # immediately, because the process that closed the pipe waits
        answer = _answer_of_child(request, requests.fileno()) if fork else _answer(request)
        if answer is None:
            return
        _send(answer, answers)


def _answer_of_child(request: Request, parent: int) -> Answer | None:
    """Return the answer, computed in a new process; `None` if the parent has ended in the meantime."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _be_child(request, writing)
    os.close(writing)
    data = bytearray()
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe, parent], [], [], request.limit)
            # A parent that is ready to read has ended, because it sends nothing while it waits for an answer.
            if not ready or parent in ready:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None if ready else (RemoteError, f"no end after {request.limit:g} seconds")
            piece = pipe.read(1 << 20)
            if not piece:
                break
            data += piece
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        return RemoteError, f"the process ended with status {status}"
    answer, imported = pickle.loads(data)
    _import(imported)
    return answer


def _be_child(request: Request, writing: int) -> NoReturn:
    status = 1
    try:
        os.dup2(0, 2)  # errors are reported in the answer
        before = set(sys.modules)
        with os.fdopen(writing, "wb") as pipe:
            answer = _answer(request)
            _send((answer, [name for name in sys.modules if name not in before]), pipe)
        status = 0
    finally:
        os._exit(status)  # without the worker's clean-up, which the child must not run


def _import(names: Iterable[str]) -> None:
    """Import the modules that a child had to import, so that the next one has them: torch's first step loads 800.

    Only modules of installed packages: a module under development must be read again by each new process, and may start
    threads.
    """
    for name in names:
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and (spec.origin or "").startswith(_INSTALLED):
                importlib.import_module(name)
        except Exception:  # a module that was created by another one, or cannot be imported here
            continue


def _answer(request: Request) -> Answer:
    kind: type[Exception] = Unportable  # the case cannot be read
    try:
        sys.path[:] = request.path
        os.chdir(request.directory)
        write_settings(request.settings)
        case = pickle.loads(request.case)
        kind = WorkerError  # the algorithm cannot be created
        algorithm = _made(request.source, request.events)
        kind = RemoteError
        return None, to_bytes(resumed(algorithm, case, request.snapshot, request.first, request.num))
    except Exception as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return kind, f"{type(error).__name__}: {error}{notes}"


def _made(source: str, events: tuple[str, ...]) -> Algorithm:
    algorithm = Subject.of(source).algorithm
    if tuple(event.value for event in algorithm.events) == events:
        return algorithm
    return replace(algorithm, match=algorithm.predicate & on(*events))


def _send(message: Any, pipe: IO[bytes]) -> None:
    pickle.dump(message, pipe)
    pipe.flush()
