"""Several processes of one run, as `torchrun` starts them: one output, one folder, one message about an error."""

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from purecompose._support.messages import is_remote, naming_urls
from purecompose.cli.options import UsageError
from purecompose.core.compose import Step
from purecompose.core.ranks import Ranks
from purecompose.core.state import State
from purecompose.run.saving.remote import Mirror, sent_from
from purecompose.transforms.data_parallel import data_parallel
from purecompose.transforms.fully_sharded import fully_sharded, shard


@dataclass(frozen=True)
class Processes:
    """The processes of a run, and this one's place among them, and among those of its host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        """True for the process that prints, and that writes the folder."""
        return self.rank == 0

    @contextlib.contextmanager
    def joined(self, device: str) -> Iterator[None]:
        """Return a scope in which the processes can send messages, and only the first one prints."""
        if self.size == 1:
            yield
            return
        is_cuda = torch.device(device).type == "cuda"
        if is_cuda:
            torch.cuda.set_device(self.local_rank)
        backend = "nccl" if is_cuda else "gloo"
        dist.init_process_group(backend, store=_new_store(), rank=self.rank, world_size=self.size, timeout=_TO_MEET)
        dist.distributed_c10d._set_pg_timeout(_TO_ANSWER)
        try:
            with contextlib.nullcontext() if self.is_first else _silenced():
                yield
            dist.destroy_process_group()  # after an error it is still needed, to find out who reports it
        finally:
            time.sleep(_TO_RELEASE.total_seconds())

    @contextlib.contextmanager
    def folder(self, out: str | None, *, is_divided: bool) -> Iterator[Path | None]:
        """Return a scope with the folder of a run, which is a local copy if `out` is a URL.

        Raises:
            UsageError: The storage cannot be read; or processes divide the state, and need a folder that they share; or
                there is only one.
        """
        if is_divided and self.size == 1:
            raise UsageError("--shard: there is only one process; start several by torchrun")
        if out is None or not is_remote(out):
            yield None if out is None else Path(out)
            return
        if is_divided:
            raise UsageError(f"--out {out}: with --shard, give a folder that all processes share")
        try:
            copy = Mirror(out, sends=self.is_first)
        except (OSError, ValueError) as error:
            raise UsageError(f"--out: {error}") from error
        with sent_from(copy) as local, naming_urls():
            yield local

    def device(self, name: str) -> str:
        """Return the device of this process: of several GPUs in a host, each has its own."""
        return f"cuda:{self.local_rank}" if self.size > 1 and name == "cuda" else name

    def divided(self, step: Step, state: State, sharding: str | None) -> tuple[Step, State]:
        """Return a step that divides batches among the processes, and with `sharding` also its state."""
        if self.size == 1:
            return step, state
        if sharding is None:
            return data_parallel(step), state
        mesh: Any = dist.device_mesh.init_device_mesh(state.device.type, (self.size,))
        gather: Any = sharding
        return fully_sharded(step, mesh, gather), shard(state, mesh)

    def of_first(self, word: str, device: torch.device) -> str:
        """Return the word that the first process gives; all must ask."""
        return word if self.size == 1 else Ranks.of(dist.group.WORLD).word_of_first(word, device)


_TO_MEET, _TO_ANSWER = timedelta(minutes=2), timedelta(minutes=10)
"""How long processes wait for each other at the start, and in a step."""

_TO_RELEASE = timedelta(seconds=0.1)
"""How long a process stays after its last message.

The threads of gloo release the tensors of a message after it has arrived. One that does so while the interpreter is
finalized aborts the process, and destroying the group does not wait for it while a step refers to the group.
"""

_TO_ASK = timedelta(seconds=10)
"""How long the host of the store stays after an error, for the others to find out who reports it."""


def processes_here() -> Processes:
    """Return the processes of this run, by the variables that `torchrun` sets."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size in ("", "1"):
        return Processes()
    given = {name: os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")}
    if not (size.isdecimal() and given["RANK"].isdecimal() and given["LOCAL_RANK"].isdecimal()):
        raise UsageError(
            f"WORLD_SIZE={size}, but {', '.join('='.join(pair) for pair in given.items())}: start the processes by "
            "torchrun --nproc-per-node 2 -m purecompose train ..., or unset WORLD_SIZE"
        )
    return Processes(int(given["RANK"]), int(size), int(given["LOCAL_RANK"]))


@contextlib.contextmanager
def reporting(error: BaseException) -> Iterator[str | None]:
    """Return a scope with the words before the message about an error; `None` if another process prints it.

    Of several processes, the first one reports what ends all of them, and the one that fails first reports an error.
    """
    try:
        found = processes_here()
    except UsageError:  # each process reports that it has no place
        found = Processes()
    if found.size == 1:
        yield ""
        return
    if isinstance(error, (UsageError, KeyboardInterrupt, SystemExit)) or not dist.is_initialized():
        yield "" if found.is_first else None
        return
    store, is_reported = _store(), False
    with contextlib.suppress(RuntimeError):  # if the host of the store was killed, everybody reports
        is_reported = store.compare_set("purecompose/failed", "", str(found.rank)) != str(found.rank).encode()
        store.add("purecompose/asked", 1)
    yield None if is_reported else f"process {found.rank} of {found.size}: "
    if dist.get_backend() == "gloo":  # those that wait for this process notice when its connections are closed
        dist.destroy_process_group()
    # The host of the store stays until the others have asked it who reports; those that were killed never do.
    deadline = time.monotonic() + _TO_ASK.total_seconds()
    with contextlib.suppress(RuntimeError):
        while found.is_first and time.monotonic() < deadline and store.add("purecompose/asked", 0) < found.size:
            time.sleep(0.05)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield


def _new_store() -> Any:
    """Return the store in which the processes find each other, without what earlier ones have left in it.

    torchrun may keep its store when it starts processes again; on several hosts it makes a new one each time.
    """
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=_TO_MEET)))
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ["MASTER_PORT"]
        raise UsageError(f"port {port} is in use by another program: give torchrun another --master-port") from error
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_host else "0"
    return dist.distributed_c10d.PrefixStore(f"purecompose/attempt {attempt}", store)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
