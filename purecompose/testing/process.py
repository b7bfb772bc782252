"""The settings of the process, which are not in a state, and functions in several processes, new or simulated.

A call in new processes has its own, so that nothing that an earlier one has left is there. The fork server of
`multiprocessing` imports torch once, and never runs an operation of it: a new process takes a few hundredths of a
second. Where there is none (Windows), each process imports torch again.
"""

import contextlib
import datetime
import functools
import itertools
import multiprocessing
import os
import pickle
import random as python_random
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from purecompose._support.device import Setting, read, read_settings, write, write_settings
from purecompose.core.compose import Step
from purecompose.core.ranks import Ranks
from purecompose.transforms.data_parallel import shared_program


T = TypeVar("T")


# Settings and clocks of this process


def process_settings() -> dict[str, Any]:
    """Return the settings of the process by name. Generators are represented by a hash of their state."""
    python_state, numpy_state, torch_state = _generators()
    return {
        "torch generator": hash(torch_state.numpy().tobytes()),
        "random generator": hash(python_state),
        "NumPy generator": None if numpy_state is None else hash((numpy_state[1].tobytes(), numpy_state[2])),
        **read_settings(),
        **read(_SURROUNDINGS),
    }


@contextlib.contextmanager
def process_restored() -> Iterator[None]:
    """Restore the settings of the process at the end of a `with` block."""
    settings, surroundings = read_settings(), read(_SURROUNDINGS)
    python_state, numpy_state, torch_state = _generators()
    try:
        yield
    finally:
        python_random.setstate(python_state)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        write_settings(settings)
        write(_SURROUNDINGS, surroundings)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, and restore them afterwards."""
    numpy = sys.modules.get("numpy")
    with process_restored():
        # torch.manual_seed would also seed the accelerators' generators, which are not restored.
        torch.default_generator.manual_seed(seed)
        python_random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        yield


@contextlib.contextmanager
def ignoring_missing_terms() -> Iterator[None]:
    """Return a scope without the warning that an evaluation lacks terms of the loss, which laws do not judge."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss of evaluator", UserWarning)
        yield


@contextlib.contextmanager
def elsewhere(seed: int, *, pace: int = 0) -> Iterator[None]:
    """Imitate another process at another time: with other global seeds, clocks, process number and rank.

    A seed of 0 is the present time; each reading moves all clocks on by `pace` seconds.
    """
    readings = itertools.count(100_003 * seed, pace)
    other = {id(clock): _shifted(clock, readings.__next__) for clock in _CLOCKS}
    other[id(os.getpid)] = functools.partial(int, os.getpid() + seed)
    # Also under the names by which modules of users have imported them.
    places = [(vars(module), name) for module in _modules() for name in vars(module)]
    patched = [(names, name, names[name]) for names, name in places if id(names[name]) in other]
    with seeded(seed), as_rank(seed, seed + 1):
        try:
            for names, name, original in patched:
                names[name] = other[id(original)]
            yield
        finally:
            for names, name, original in patched:
                names[name] = original


def _modules() -> list[Any]:
    """Return the modules of the clocks, and those of users, which may have imported one."""
    known = {*sys.stdlib_module_names, "torch", "purecompose"}
    others = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] not in known]
    return [os, time, datetime, *(one for one in others if "site-packages" not in (getattr(one, "__file__", "") or ""))]


_NOW = time.time
_READ_AT = (time.localtime, time.gmtime, time.ctime)
"""Functions of a time, by default the present one."""
_CLOCKS = (time.time, time.monotonic, time.perf_counter, time.time_ns, time.monotonic_ns, time.perf_counter_ns)
_CLOCKS += (*_READ_AT, datetime.datetime)


class _LikeBase(type):
    """Metaclass of a class whose instances are those of its base."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__mro__[1])


def _shifted(clock: Any, shift: Callable[[], int]) -> Any:
    """Return a clock that is ahead by a number of seconds."""
    if clock in _READ_AT:
        return lambda at=None: clock(_NOW() + shift() if at is None else at)
    if clock is datetime.datetime:  # whose `today` reads `time.time`

        def ahead(name: str) -> Any:
            return staticmethod(lambda *zone, **tz: getattr(clock, name)(*zone, **tz) + datetime.timedelta(0, shift()))

        return _LikeBase("datetime", (clock,), {name: ahead(name) for name in ("now", "utcnow")})
    unit = 10**9 if isinstance(clock(), int) else 1
    return lambda: clock() + shift() * unit


def _generators() -> tuple[Any, Any, torch.Tensor]:
    numpy = sys.modules.get("numpy")
    return python_random.getstate(), None if numpy is None else numpy.random.get_state(), torch.get_rng_state()


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _hooks() -> list[dict[int, Any]]:
    """Return the hooks that are called for every module, by kind."""
    places = vars(torch.nn.modules.module).items()
    return [found for name, found in places if name.startswith("_global_") and name.endswith("_hooks")]


def _set_hooks(hooks: tuple[dict[int, Any], ...]) -> None:
    for found, wanted in zip(_hooks(), hooks, strict=True):
        found.clear()
        found.update(wanted)


def _set_filters(filters: list[Any]) -> None:
    with warnings.catch_warnings():  # leaving it invalidates Python's cache of the filters
        pass
    warnings.filters[:] = filters  # pyright: ignore[reportIndexIssue]


def _numpy_errors() -> dict[str, str] | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else dict(numpy.geterr())


def _set_numpy_errors(errors: dict[str, str] | None) -> None:
    if errors is not None:
        sys.modules["numpy"].seterr(**errors)


_SURROUNDINGS: dict[str, Setting] = {
    "environment": (lambda: dict(os.environ), _set_environment),
    "module hooks": (lambda: tuple(map(dict, _hooks())), _set_hooks),
    "warnings filters": (lambda: list(warnings.filters), _set_filters),
    "NumPy error handling": (_numpy_errors, _set_numpy_errors),
}
"""Functions to read and to set settings of the process that cannot be sent to another one, by name."""


# New processes


_LIMIT = 120.0
"""Seconds for one call, which may have to start the fork server."""
_PRELOADED = ["purecompose.testing", "torch._dynamo", "torch.distributed.tensor"]
"""Modules that the fork server imports; the last two are those that torch imports when it needs them."""


class Unportable(Exception):
    """A call cannot be sent to another process."""


class RemoteError(Exception):
    """A function failed in another process; the text is its error message."""


def in_new_processes(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the results of a function for each tuple of arguments, each in a new process, at the same time.

    The processes have torch's settings of this one; what they print is discarded.
    """
    requests = [_pickled((function, arguments)) for arguments in calls]
    running: list[tuple[Any, Connection]] = []
    try:
        with _main_module_hidden():
            running.extend(_started(request) for request in requests)
        deadline = time.monotonic() + _LIMIT
        return [_result(process, connection, deadline) for process, connection in running]
    finally:
        for process, connection in running:
            connection.close()
            process.kill()
            process.join()


def in_process_group(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Return the results of a function of a mesh, in each of several processes of one gloo group on the CPU.

    The function is one of a module; the errors are those of `in_new_processes`.
    """
    with tempfile.TemporaryDirectory() as folder:
        calls = [(f"file://{folder}/store", rank, size, function, arguments) for rank in range(size)]
        return in_new_processes(_call_in_group, calls)


def _call_in_group(store: str, rank: int, size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of this machine may have no address
    with as_rank(rank, size):
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        try:
            return function(init_device_mesh("cpu", (size,)), *arguments)
        finally:
            dist.destroy_process_group()


def _pickled(value: Any) -> bytes:
    try:
        pickled = pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Unportable(str(error)) from error
    if b"__main__" in pickled:  # another process has another main module
        raise Unportable("it refers to the main module, which other processes do not run: define it in a module")
    return pickled


def _started(request: bytes) -> tuple[Any, Connection]:
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, request, read_settings()))
    process.start()
    theirs.close()
    return process, ours


def _result(process: Any, connection: Connection, deadline: float) -> Any:
    if not connection.poll(max(0.0, deadline - time.monotonic())):
        raise RemoteError(f"no end after {_LIMIT:g} seconds")
    try:
        error, found = pickle.loads(connection.recv_bytes())
    except EOFError:
        process.join()
        raise RemoteError(f"the process ended with status {process.exitcode}") from None
    if error is not None:
        raise error(found)
    return found


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Let new processes not run the main module again, as scripts without a guard would start others there.

    String hashes differ from those of this process, even if PYTHONHASHSEED is set here.
    """
    main, seed = sys.modules["__main__"], os.environ.get("PYTHONHASHSEED")
    sys.modules["__main__"], os.environ["PYTHONHASHSEED"] = types.ModuleType("__main__"), "random"
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        os.environ.pop("PYTHONHASHSEED")
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed


def _serve(connection: Connection, request: bytes, settings: dict[str, Any]) -> None:
    """Answer a request, in the new process."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    warnings.simplefilter("ignore")  # the other process shows them
    kind: type[Exception] = Unportable
    try:
        write_settings(settings)
        function, arguments = pickle.loads(request)
        kind = RemoteError
        answer = None, function(*arguments)
    except Exception as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        answer = kind, f"{type(error).__name__}: {error}{notes}"
    connection.send_bytes(pickle.dumps(answer))


# Simulated processes


@contextlib.contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Set the environment variables with which launchers pass a process its rank, and restore them afterwards."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def played(step: Step, size: int) -> Callable[[Callable[[Step], T]], list[T]]:
    """Simulate the processes of `data_parallel(step)` one after the other.

    A process that needs a number from the others is abandoned, and starts again when all have reached that point, which
    its pure function does each time.

    Returns:
        A function that takes a function of each process's step, and returns the results, process by process. It raises
        a `RuntimeError` if they send messages of different forms, or different numbers of them.
    """
    parts = [_Part("", rank, size) for rank in range(size)]

    def play(act: Callable[[Step], T]) -> list[T]:
        answers: list[list[Tensor]] = []
        while True:
            ends, questions = [], []
            for rank, part in enumerate(parts):
                part.begin(answers)
                # A new step each time, since the first run of a step sends more messages.
                cast = step.replace(program=shared_program(step.program, part, is_checked=True))
                try:
                    with as_rank(rank, size):
                        ends.append(act(cast))
                except _Unanswered as question:
                    questions.append(question)
            if not questions:
                return ends
            answers.append(_answer(questions, size))

    return play


@dataclass(frozen=True)
class _Part(Ranks):
    """A process that knows the answers to its first messages."""

    answers: list[list[Tensor]] = field(default_factory=list, compare=False)
    """The answers that have not been used yet."""

    def begin(self, answers: Sequence[list[Tensor]]) -> None:
        self.answers[:] = answers

    def exchange(self, tensors: Sequence[Tensor], how: Literal["sum", "min", "max"]) -> list[Tensor]:
        if not self.answers:
            raise _Unanswered(list(tensors), how)
        return self.answers.pop(0)

    def gather(self, own: Tensor) -> Tensor:
        rows = torch.stack([own if rank == self.rank else torch.zeros_like(own) for rank in range(self.size)])
        return self.exchange([rows], "sum")[0].flatten(0, 1)


class _Unanswered(BaseException):
    """A message whose answer is not known yet; a BaseException, so that no handler treats it as an error."""

    def __init__(self, tensors: list[Tensor], how: str) -> None:
        super().__init__()
        self.tensors, self.how = tensors, how


def _answer(questions: list[_Unanswered], size: int) -> list[Tensor]:
    forms = {(one.how, tuple((tensor.shape, tensor.dtype) for tensor in one.tensors)) for one in questions}
    if len(questions) < size or len(forms) > 1:
        raise RuntimeError("processes wait for each other: they send different messages, or not as many")
    together = [torch.stack(one) for one in zip(*[question.tensors for question in questions], strict=True)]
    how = questions[0].how
    return [one.sum(0, dtype=one.dtype) if how == "sum" else getattr(one, f"a{how}")(0) for one in together]
