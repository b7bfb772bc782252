"""Functions in several processes: in new ones, or simulated by this one for laws about `data_parallel`.

Each call has new processes of its own, so that nothing that an earlier one has left is there. The fork server of
`multiprocessing` imports torch once, and never runs an operation of it: a new process takes a few hundredths of a
second. Where there is none (Windows), each process imports torch again.
"""

import contextlib
import multiprocessing
import os
import pickle
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

from purecompose._support.device import read_settings, write_settings
from purecompose.core.compose import Step
from purecompose.core.ranks import Ranks
from purecompose.testing.process import as_rank
from purecompose.transforms.data_parallel import shared_program


T = TypeVar("T")


_LIMIT = 120.0
"""Seconds for one call, which may have to start the fork server."""
_PRELOADED = ["purecompose.testing", "torch._dynamo", "torch.distributed.tensor"]
"""Modules that the fork server imports; the last two are those that torch imports when it needs them."""


class Unportable(Exception):
    """A call cannot be sent to another process."""


class RemoteError(Exception):
    """A function failed in another process; the text is its error message."""


def in_new_processes(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call a function once for each tuple of arguments, each in a new process, at the same time.

    The processes have torch's settings of this one; what they print is discarded.

    Returns:
        The results, in order.

    Raises:
        Unportable: The arguments cannot be pickled, refer to the main module, or cannot be read there.
        RemoteError: A call failed, or did not end within minutes.
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
    """Call a function of a mesh and further arguments in several processes of one gloo group.

    Args:
        function: A function of a module, of a `torch.distributed.DeviceMesh` of one dimension, on the CPU.
        size: Number of processes.
        arguments: Further arguments, the same in each process.

    Returns:
        The results, process by process. The errors are those of `in_new_processes`.
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


def played(step: Step, size: int) -> Callable[[Callable[[Step], T]], list[T]]:
    """Simulate the processes of `data_parallel(step)` one after the other.

    A process that needs a number from the others is abandoned, and starts again when all have reached that point. This
    works because its function is pure, and does the same each time.

    Args:
        step: A step from `compose`.
        size: Number of processes.

    Returns:
        A function that takes a function of each process's step, and returns the results, process by process. It raises
        a `RuntimeError` if they send messages of different forms, or different numbers of them.

    Example:
        >>> from purecompose import compose, loop_events
        >>> play = played(compose(loop_events), 2)
        >>> play(lambda step: step.ranks.reduced([torch.tensor(1.0 + step.ranks.rank)], "sum"))
        [[tensor(3.)], [tensor(3.)]]
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
