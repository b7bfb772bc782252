"""Compilation in another process, which fills Inductor's cache on disk while this process trains.

The other process gets traced graphs. They contain neither the step nor the network, which may therefore be defined
anywhere, such as in a notebook. It returns nothing but the time: this process compiles the graph again and finds all
parts on disk, so that whatever happens there cannot change a result.

A thread of this process would share Python's lock with the run: eager steps took 2.5 times as long next to it.
"""

import contextlib
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import IO, Any, NamedTuple, NoReturn

from torch import Tensor, fx

from purecompose._support.device import read_settings, write_settings
from purecompose.transforms.compilation.backends import compile_graph
from purecompose.transforms.compilation.capture import fake_mode
from purecompose.transforms.compilation.inductor import ensure_cache
from purecompose.transforms.compilation.messages import messages


_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "import purecompose.algorithms; "  # graphs hold operators that methods define
    "from purecompose.transforms.compilation.background import serve; serve()"
)
_NICENESS = 5
"""Training has priority, but the compilation must also finish on a machine all of whose cores train."""


class BackgroundError(RuntimeError):
    """A graph could not be compiled in the other process."""


class _Request(NamedTuple):
    """A graph with everything that its compiled code depends on."""

    graph: bytes
    constants: dict[str, Tensor]
    """The tensors in the graph, whose values belong to the code."""
    mode: str | None
    settings: dict[str, Any]
    """torch's settings; see `read_settings`."""
    inductor: bytes
    """Inductor's configuration."""
    groups: dict[str, tuple[int, int]]
    """This process's rank, and the number of processes, in each group that the graph sends messages to."""


class _Job(NamedTuple):
    request: _Request
    seconds: Future[float]


class Background:
    """A queue of graphs that are compiled in another process, one after the other.

    The process is started when there is something to compile, and ends when nothing is left.
    """

    def __init__(self) -> None:
        """Start with an empty queue, and without a process."""
        self._reset()

    def _reset(self) -> None:
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._jobs: list[_Job] = []
        self._is_serving = self._is_stopped = False
        self._process: subprocess.Popen[bytes] | None = None

    def submit(self, graph: fx.GraphModule, mode: str | None) -> Future[float]:
        """Have a graph compiled as `compile_graph` does it with Inductor.

        Returns:
            A future of the seconds that it took, or of a `BackgroundError`.
        """
        if self._owner != os.getpid():  # a fork has a copy of this object, but neither its thread nor its process
            self._reset()
        ensure_cache()
        seconds: Future[float] = Future()
        try:
            config = importlib.import_module("torch._inductor.config")
            settings = mode, read_settings(), config.save_config()
            request = _Request(_to_bytes(graph), _constants(graph), *settings, _groups(graph))
        except Exception as error:
            seconds.set_exception(BackgroundError(f"the graph cannot be sent there: {_in_words(error)}"))
            return seconds
        with self._lock:
            self._jobs.append(_Job(request, seconds))
            if not self._is_serving:
                self._is_serving = True
                threading.Thread(target=self._serve, name="compilation", daemon=True).start()
        return seconds

    def stop(self) -> None:
        """End the process; what it has not compiled yet is dropped."""
        if self._owner != os.getpid():  # a fork has a copy of this object
            return
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                _kill(self._process)

    def _serve(self) -> None:
        while True:
            with self._lock:
                jobs, self._jobs = self._jobs, []
                self._is_serving = bool(jobs) and not self._is_stopped
            if not self._is_serving:
                return
            try:
                self._compile_elsewhere(jobs)
            except Exception as error:
                for job in jobs:
                    if not job.seconds.done():
                        job.seconds.set_exception(BackgroundError(_in_words(error)))

    def _compile_elsewhere(self, jobs: Sequence[_Job]) -> None:
        with tempfile.TemporaryFile() as errors:
            with self._lock:
                if self._is_stopped:
                    return
                process = self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, json.dumps(sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,  # Ctrl-C is for this process
                )
            try:
                assert process.stdin is not None and process.stdout is not None
                pickle.dump([job.request for job in jobs], process.stdin)
                process.stdin.flush()
                for job in jobs:
                    seconds, reason = pickle.load(process.stdout)
                    if reason is None:
                        job.seconds.set_result(seconds)
                    else:
                        job.seconds.set_exception(BackgroundError(reason))
            except (EOFError, OSError) as error:
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()[-1:]
                raise RuntimeError(": ".join([f"the process ended with status {process.wait()}", *said])) from error
            finally:
                _kill(process)
                with self._lock:
                    self._process = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that has a session of its own, together with the compiler that it may have started."""
    if process.poll() is None:
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):  # another thread has waited for it in between
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()
    process.wait()


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _to_bytes(graph: fx.GraphModule) -> bytes:
    pickling = importlib.import_module("torch.fx._graph_pickler")
    return pickling.GraphPickler.dumps(graph, pickling.Options(ops_filter=None))


def _constants(graph: fx.GraphModule) -> dict[str, Tensor]:
    names = {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}
    return {name: value for name in names if isinstance(value := getattr(graph, name, None), Tensor)}


def _groups(graph: fx.GraphModule) -> dict[str, tuple[int, int]]:
    names = {str(node.args[-1]) for node in messages(graph.graph)}
    if not names:
        return {}
    distributed = importlib.import_module("torch.distributed.distributed_c10d")
    groups = {name: distributed._resolve_process_group(name) for name in names}
    return {name: (group.rank(), group.size()) for name, group in groups.items()}


def _graph_of(request: _Request) -> fx.GraphModule:
    graph = importlib.import_module("torch.fx._graph_pickler").GraphPickler.loads(request.graph, fake_mode())
    for name, tensor in request.constants.items():
        setattr(graph, name, tensor)  # in the graph's bytes it has no values
    return graph


# In the other process


def serve() -> None:
    """Compile the graphs that arrive on standard input; all other output is discarded."""
    pipe, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    warnings.simplefilter("ignore")  # the other process shows them when it compiles
    requests: list[_Request] = pickle.load(pipe)
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    for request in requests:
        pickle.dump(_answer(request), answers)
        answers.flush()


def _answer(request: _Request) -> tuple[float, str | None]:
    """Return the seconds that the compilation took, and what went wrong, if anything."""
    start = time.perf_counter()
    try:
        write_settings(request.settings)
        config: Any = importlib.import_module("torch._inductor.config")
        config.load_config(request.inductor)
        config.compile_threads = 1
        _register(request.groups)
        compile_graph(_graph_of(request), "inductor", request.mode)
    except Exception as error:
        return 0.0, _in_words(error)
    return time.perf_counter() - start, None


_REGISTERED: dict[str, Any] = {}
"""Groups of processes by their names; torch's registry does not keep them."""


def _register(groups: Mapping[str, tuple[int, int]]) -> None:
    """Register groups of processes, of which Inductor asks for the sizes; they have no connections."""
    for name, (rank, size) in groups.items():
        if name not in _REGISTERED:
            distributed = importlib.import_module("torch.distributed.distributed_c10d")
            group = _REGISTERED[name] = distributed.ProcessGroup(rank, size)
            group._set_group_name(name)
            distributed._register_process_group(name, group)


def _end_with_parent(pipe: IO[bytes]) -> NoReturn:
    """Wait until the other process closes the pipe, as it does even if it is killed, and end this one."""
    pipe.read()
    if hasattr(os, "killpg"):
        os.killpg(os.getpgrp(), signal.SIGKILL)  # with the compiler, if it runs
    os._exit(1)
