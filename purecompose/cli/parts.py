"""The parts of a run that follow from its settings without the data, the check of settings, and the run's processes.

Settings are checked before the data are loaded, which may take long. The processes of a run that `torchrun` starts
print one output, write one folder and report one error.
"""

import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from purecompose import schedule
from purecompose._support import specs
from purecompose._support.device import PRECISIONS
from purecompose._support.messages import is_remote, naming_urls
from purecompose._support.specs import check_number, check_whole
from purecompose.cli.options import ALGORITHMS, UsageError, imported, is_own, option_of, reported_as
from purecompose.cli.settings import LOSSES, OPTIMIZERS, SCHEDULES, Settings, with_arguments
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.ranks import Ranks
from purecompose.core.state import State
from purecompose.nn import models
from purecompose.random import key
from purecompose.run.saving.remote import Mirror, sent_from
from purecompose.time import Time, TimeUnit
from purecompose.time.timestamp import checked_interval
from purecompose.transforms.data_parallel import data_parallel
from purecompose.transforms.fully_sharded import fully_sharded, shard


_TEXT_MODELS = ("gpt",)
_MOST_THREADS = 1024

_IMAGE_DEFAULTS = {
    "model": "cnn",
    "algorithms": "mixup,label_smoothing,selective_backprop",
    "schedule": 'cosine(warmup="0.1dur")',
}
# On two cores, accuracy reaches about 99 % on the digits in 5 s, and on MNIST in half a minute. A second thread gains
# nothing on the digits, and on a busy machine it made training 100 times slower.
_FOR_SMALL_SETS = {"duration": "40ep", "batch_size": 64, "optimizer": "adam(lr=5e-3)", "threads": 1, **_IMAGE_DEFAULTS}
_FOR_LARGE_SETS = {"duration": "2ep", "batch_size": 128, "optimizer": "adam(lr=4e-3)", "threads": 2, **_IMAGE_DEFAULTS}
_LARGE = 10_000
# An epoch of tiny Shakespeare, 980 batches, takes two minutes on two cores. Larger batches learn less from the same
# number of characters: after an epoch the loss was 2.13 with a batch size of 8, and 2.50 with 32.
_FOR_TEXT = {
    "duration": "3ep",
    "batch_size": 8,
    "optimizer": "adamw(lr=3e-3, weight_decay=0.1)",
    "threads": 2,
    "model": "gpt(width=128, depth=4, num_heads=4)",
    "algorithms": "none",
    "schedule": 'cosine(warmup="0.05dur")',
}


def is_text_file(data: str) -> bool:
    return not is_own(data) and data.lower().endswith(".txt")


def defaults_for(is_text: bool, num_examples: int) -> Mapping[str, Any]:
    return _FOR_TEXT if is_text else _FOR_LARGE_SETS if num_examples >= _LARGE else _FOR_SMALL_SETS


def with_defaults(found: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings: those that were chosen, and defaults for the others."""
    settings = {**dataclasses.asdict(Settings()), **found}
    return settings | {name: value for name, value in defaults.items() if settings[name] is None}


def check(found: Mapping[str, Any], option: str = "--set") -> None:
    """Check settings before the data are loaded, with the defaults for this kind of data if the kind is known.

    `option` names the option that gave the arguments under "within", for messages.
    """
    data = found.get("data", Settings.data)
    settings = with_defaults(found, {} if is_own(data) else defaults_for(is_text_file(data), num_examples=0))
    unknown = [name for name in found.get("within", {}) if settings.get(name, settings["algorithms"]) is None]
    settings["within"] = {name: one for name, one in found.get("within", {}).items() if name not in unknown}
    complete = Settings(**with_arguments(settings, ALGORITHMS, option))
    for name, part_of in _CHECKED.items():
        if getattr(complete, name) is not None:
            with reported_as(option_of(name)):
                part_of(complete)


def algorithms_of(settings: Settings) -> list[Algorithm]:
    return [specs.build(call, ALGORITHMS, "algorithm") for call in specs.parse(settings.algorithms or "")]


def schedule_of(settings: Settings) -> Any:
    return specs.build(specs.parse_one(settings.schedule or ""), SCHEDULES, "schedule")


def optimizer_of(settings: Settings) -> Any:
    """Return the optimizer, with its schedule."""
    call = specs.parse_one(settings.optimizer or "")
    if call.name == "muon":
        raise ValueError(
            "muon moves only matrices; choose them in Python: "
            'optim.by_pattern({"blocks.*": optim.muon(0.02)}, optim.adamw(3e-4))'
        )
    plain = specs.build(call, OPTIMIZERS, "optimizer")
    curve = schedule.constant() if settings.schedule is None else schedule_of(settings)
    if call.name == "recipe":
        if curve != schedule.constant():
            raise ValueError(f"{call}: its optimizer has a schedule; leave out --schedule")
        return plain
    return dataclasses.replace(plain, lr=plain.lr * curve)


def network_of(text: str, is_text: bool | None) -> tuple[specs.Call, Any]:
    """Return the call that makes a network, and the user's object that it names, if any.

    `is_text` is `None` if the kind of data is not known.
    """
    call = specs.parse_one(text)
    if is_own(call.name):
        return call, imported(call.name)
    specs.check_name(call.name, models.MODELS, "model")
    if call.args:
        raise ValueError(f"{call}: expected options by name, as in {models.describe(call.name)}")
    models.check_options(call.name, call.kwargs)  # otherwise they could collide with other arguments of build
    if is_text and call.name not in _TEXT_MODELS:
        raise ValueError(f"{call.name} is a network for images; for text there is {', '.join(_TEXT_MODELS)}")
    if is_text is False and call.name in _TEXT_MODELS:
        raise ValueError(f"{call.name} is a network for text, but the data are images")
    return call, None


def duration_of(settings: Settings, is_text: bool | None) -> Time:
    """Return the length of the run; for images it cannot be in tokens."""
    text = settings.duration or ""
    duration = Time.of(text)
    units = [TimeUnit.EPOCH, TimeUnit.BATCH, TimeUnit.UPDATE, TimeUnit.SAMPLE]
    units += [] if is_text is False else [TimeUnit.TOKEN]
    if duration.unit not in units or duration.value <= 0:
        *names, last = ("batches" if unit is TimeUnit.BATCH else f"{unit.name.lower()}s" for unit in units)
        raise ValueError(f"{text}: expected a number of {', '.join(names)} or {last}: 20ep, 500ba or 10000sp")
    return duration


def microbatches_of(settings: Settings) -> int | None:
    """Return the number of slices of a batch, `None` for auto."""
    return _number_unless("auto", settings.microbatches, "slices")


def kept_of(settings: Settings) -> Any:
    """Return the number of checkpoints to keep, or "log"."""
    return _number_unless("log", settings.keep, "checkpoints") or "log"


def _number_unless(word: str, text: str, things: str) -> int | None:
    if text != word and not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"{text}: expected a number of {things}, at least 1, or {word}")
    return None if text == word else int(text)


def device_of(name: str) -> torch.device:
    """Return a device that can be used here."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = ", ".join(["cpu", *(one for one in ("cuda", "mps") if getattr(torch, one).is_available())])
        reason = str(error).splitlines()[0].partition("Expected one of")[0]  # what follows are all devices of torch
        raise ValueError(f"{name!r} cannot be used here; there is {known}{reason and f': {reason}'}") from error
    return torch.device(name)


def _check_device(settings: Settings) -> None:
    if not settings.device.startswith("cuda") or not torch.cuda.is_available():
        device_of(settings.device)  # a GPU is tried when each process knows which one is its own


def _check_loss(settings: Settings) -> None:
    try:
        specs.check_name(settings.loss, LOSSES, "loss")
    except specs.SpecError as error:
        raise ValueError(f"{error}; others need a program: pc.train(..., loss=...)") from error


def _check_patience(settings: Settings) -> None:
    checked_interval(settings.patience, "patience")
    if settings.seeds > 1:
        raise ValueError("the networks of a population would stop at different times; leave out --seeds")


def _is_whole(name: str, high: float = float("inf")) -> Callable[[Settings], int]:
    return lambda settings: check_whole(getattr(settings, name), name, 1, high)


def _is_interval(name: str, *, seconds: bool = False) -> Callable[[Settings], Time]:
    return lambda settings: checked_interval(getattr(settings, name), name, seconds=seconds)


_CHECKED: Mapping[str, Callable[[Settings], Any]] = {
    "model": lambda settings: network_of(settings.model or "", is_text_file(settings.data) or None),
    "algorithms": algorithms_of,
    "loss": _check_loss,
    "schedule": schedule_of,
    "optimizer": optimizer_of,
    "duration": lambda settings: duration_of(settings, None if is_own(settings.data) else is_text_file(settings.data)),
    "scale_schedule": lambda settings: check_number(settings.scale_schedule, "ratio", 0, above=True),
    "batch_size": _is_whole("batch_size"),
    "microbatches": microbatches_of,
    "seeds": _is_whole("seeds"),
    "seed": lambda settings: (key(settings.seed), key(settings.seed + settings.seeds - 1)),
    "precision": lambda settings: specs.check_name(settings.precision, dict.fromkeys(PRECISIONS), "precision"),
    "device": _check_device,
    "threads": _is_whole("threads", _MOST_THREADS),
    "eval_every": _is_interval("eval_every"),
    "validation": lambda settings: check_number(settings.validation, "share of the training data", 0, 1, below=True),
    "patience": _check_patience,
    "checkpoint_every": _is_interval("checkpoint_every", seconds=True),
    "keep": kept_of,
    "keep_best": _is_whole("keep_best"),
}
"""What to check of each setting; the functions raise a `ValueError` or a `TypeError`."""


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
        set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # public from torch 2.14 on
        set_timeout(_TO_ANSWER)
        try:
            with contextlib.nullcontext() if self.is_first else _silenced():
                yield
            dist.destroy_process_group()  # after an error it is still needed, to find out who reports it
        finally:
            time.sleep(_TO_RELEASE.total_seconds())

    @contextlib.contextmanager
    def folder(self, out: str | None, *, is_divided: bool) -> Iterator[Path | None]:
        """Return a scope with the folder of a run, a local copy if `out` is a URL; raise if processes cannot share it.

        Processes that divide the state need a shared folder, and there must be several.
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

A thread of gloo that releases the tensors of a message while the interpreter is finalized aborts the process, and
destroying the group does not wait for it while a step refers to the group.
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
    """Return a scope with a prefix for the message about an error; `None` if another process reports the error.

    What ends all processes is reported by the first one; any other error by the process that fails first.
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
    store, is_reported = dist.distributed_c10d._get_default_store(), False
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
