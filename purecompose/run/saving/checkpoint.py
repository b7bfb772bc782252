"""`save` and `load`, and resuming a run: states in folders, read back with the same bits."""

import contextlib
import functools
import json
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from purecompose._support.device import local, place_of, span_of
from purecompose._support.messages import is_remote, warn
from purecompose._support.objects import in_words
from purecompose._support.specs import shown, suggests_keywords
from purecompose.core.compose import Step
from purecompose.core.context import Static
from purecompose.core.state import State
from purecompose.errors import CheckpointError, CheckpointWarning, DamagedError
from purecompose.run.saving import folder as disk
from purecompose.run.saving.comparison import (
    BASE,
    TIME,
    check_fits,
    describe,
    environment,
    param_leaf,
    template,
    unwritten,
    without,
)
from purecompose.run.saving.files import Index, SavedTensors, is_whole, time_from_plain, time_to_plain
from purecompose.run.saving.folder import Writers, in_all, writers_of
from purecompose.run.saving.leaves import (
    EXTRA,
    POSITION,
    Spec,
    filled,
    is_extra,
    leaves_of,
    pack,
    restore,
    restored_tensor,
    spec_of,
    stored,
    unpack,
)
from purecompose.run.saving.remote import fetched
from purecompose.run.saving.selection import Checkpoints, best_in
from purecompose.time.event import Event


Parts: TypeAlias = Literal["all", "trainable"]
"""The parts of a state that a checkpoint holds: all, or all but the frozen parameters."""


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint before it is written; nothing in it changes."""

    index: Index
    tensors: dict[str, Tensor]
    """What this process writes."""
    arrived: torch.cuda.Event | None
    """Event at which the copies from a GPU are complete."""
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of divided tensors, the first row that this process has, and the row after the last."""

    def write(self, target: Path, writers: Writers | None = None) -> None:
        """Write the snapshot, atomically; may be called in another thread, unless processes write it together."""
        if writers is not None and writers.is_joint:
            self.complete(target, writers, lambda: self.write_part(target, writers))
        elif writers is None or writers.is_first:
            disk.write(target, self._index, self._stored())

    def write_part(self, target: Path, writers: Writers) -> None:
        """Write what this process holds, as `folder.write_part`."""
        disk.write_part(target, self._stored, self.rows, writers)

    def complete(self, target: Path, writers: Writers, part: Callable[[], None], *, is_alone: bool = False) -> None:
        """Complete what all processes have written, as `folder.complete`."""
        disk.complete(target, self._index, part, writers, is_alone=is_alone)

    def _stored(self) -> dict[str, Tensor]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return {name: stored(tensor) for name, tensor in self.tensors.items()}

    def _index(self, files: dict[str, Any]) -> Index:
        description = {**self.index.description, "settings": unwritten(self.index, self.tensors)}
        return replace(self.index, description=description, files=files)


def snapshot(
    state: State,
    step: Step | None = None,
    *,
    parts: Parts = "all",
    metrics: Mapping[str, Any] | None = None,
    memory: Mapping[str, Any] | None = None,
    outside: Mapping[str, Any] | None = None,
    writers: Writers | None = None,
) -> Snapshot:
    """Return the content of a state's checkpoint, on the host or being copied there.

    Of several `writers` each takes only what it writes. On the CPU only `outside`, what is kept outside of the state,
    is copied: tensors of a state never change.
    """
    if parts not in get_args(Parts):
        raise ValueError(f"save: parts={parts!r}: expected {' or '.join(map(repr, get_args(Parts)))}")
    tensors, values = leaves_of(state)
    description = describe(state, step)
    rows = {name: span_of(place) for name, tensor in tensors.items() if (place := place_of(tensor)) is not None}
    if parts == "trainable" and rows:
        raise ValueError("save: parts='trainable': each process holds some rows of this state: save pc.whole(state)")
    if parts == "trainable" and description["frozen"]:
        description[BASE] = {param_leaf(name): in_words(state.params[name]) for name in description["frozen"]}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in description[BASE]}
    packed: dict[str, Any] = {}
    for name, value in (outside or {}).items():
        packed[name], found = pack(value, name)
        tensors = {**tensors, **found}
    specs = {name: str(spec_of(tensor)) for name, tensor in tensors.items()}
    index = Index(
        time=time_to_plain(state.timestamp),
        description=description,
        environment=environment(state, step),
        tensors=specs,
        values=values,
        files={},
        metrics=dict(metrics or {}),
        memory={**(memory or {}), **packed},
    )
    if writers is not None and writers.number != 0:  # the first process writes what is not divided
        tensors = {} if writers.number is None else {name: tensors[name] for name in rows}
    return Snapshot(index, *_fetched({name: local(tensor) for name, tensor in tensors.items()}), rows)


@suggests_keywords
def save(state: State, path: Path | str, *, step: Step | None = None, parts: Parts = "all") -> Path:
    """Write a state to a folder: `index.json`, which is human-readable, and `state.safetensors`.

    The folder appears when everything is on the disk, and replaces an existing checkpoint. Tied tensors are written
    twice, since states need no ties.

    Args:
        state: The state, between steps; may be a population's.
        path: The folder.
        step: The step that trains it. The index then includes algorithms and settings, and `load` compares them.
        parts: "all", or "trainable" to leave out the frozen parameters, as for adapters in a large network. `load`
            takes these from its template, and compares checksums.

    Returns:
        The folder.

    Raises:
        ValueError: `parts` has another value, or `path` is a URL: see `mirror`.
        OSError: The disk is full, or the folder cannot be written to, also by another of the processes that write
            together; an existing checkpoint is left unchanged.
        TypeError: The state contains something that is neither a tensor nor a plain value; the message names the place.
        CheckpointError: The state is from inside a step.
        ImportError: Safetensors is not installed.

    Example:
        >>> import tempfile, torch
        >>> from purecompose import losses, optim
        >>> state = State.create(torch.nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> folder = tempfile.mkdtemp() + "/saved"
        >>> save(state, folder).name
        'saved'
    """
    if not isinstance(state, State):
        raise TypeError(f"save(state, path): expected a State first, got {shown(state)}")
    if is_remote(path):
        raise ValueError(
            f"save: {path} is in remote storage: save to a local folder in `with purecompose.saving.mirror(url)`"
        )
    writers = writers_of(state)
    taken = snapshot(state, step, parts=parts, writers=writers)
    in_all(writers, lambda: taken.write(Path(path), writers), f"{path} was not written")
    return Path(path)


@suggests_keywords
def load(
    path: Path | str,
    like: State | None = None,
    *,
    step: Step | None = None,
    strict: bool = True,
    ignore: Collection[str] = (),
) -> State:
    """Return the state in a folder, as written by `save`, after verifying the checksums of the files.

    Loading executes no code: the files contain only numbers and JSON.

    Args:
        path: The folder; or its URL, such as `s3://bucket/run/checkpoints/ep0003-ba00000120`, see `mirror`.
        like: A state of the same model, optimizer and algorithms, such as the one that the run started from,
            `step.init(state)`. It defines the structure and the device; its values are not read, except for frozen
            parameters that the checkpoint leaves out, and for buffers that are not in the network's `state_dict()` and
            those of the loss, of which only what training has written is loaded.
        step: The step that will continue with the state, to compare settings. Its algorithms act at BEFORE_LOAD, on
            the template `like`, and at AFTER_LOAD, on the loaded state.
        strict: True to raise if something does not fit. Otherwise everything that fits is loaded, the rest keeps its
            value in `like`, and a warning lists the differences.
        ignore: Patterns (`fnmatch`) of what keeps its value in `like`, without a warning: paths such as
            "params.head.weight", "opt_state.exp_avg.head.weight", "buffers.*", "slots.ema.*", "hparams.lr",
            "timestamp", and settings such as "optimizer" and "microbatches".

    Returns:
        The state, with the saved timestamp.

    Raises:
        FileNotFoundError: There is no such folder.
        DamagedError: The checkpoint is incomplete, or not a checkpoint.
        MismatchError: The model has modules of other types, the optimizer or algorithms have other memory, or frozen
            parameters that the checkpoint leaves out are other ones here; also without `strict`: an algorithm that
            changed the model is missing.
        CheckpointError: A later version of the library wrote it, or it is a folder of checkpoints.
        ValueError: A pattern of `ignore` matches nothing.

    Warns:
        CheckpointWarning: Settings differ (a learning rate, class weights, an algorithm without memory, the version of
            torch): the state is the saved one with these settings, but will not continue as it would have.

    Example:
        >>> import tempfile, torch
        >>> from purecompose import losses, optim, tree
        >>> state = State.create(torch.nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> folder = tempfile.mkdtemp() + "/saved"
        >>> tree.equal(load(save(state, folder), like=state), state)
        True
    """
    if not isinstance(like, State):
        raise TypeError(
            f"load(path, like): expected a State for `like`, got {type(like).__name__}: give the state that the run "
            "started from, like=step.init(State.create(net, ...))"
        )
    given = like if step is None else step.fire(Event.BEFORE_LOAD, like)
    found = read(path, given, step=step, strict=strict, ignore=ignore)
    return found if step is None else step.fire(Event.AFTER_LOAD, found)


def read(path: Path | str, like: State, **settings: Any) -> State:
    """Load a state like `load`, but without the events around it."""
    with fetched(path) as local:
        try:
            return restored(local, disk.read_index(local), like, **settings)
        except DamagedError as error:
            if (older := _whole_before(local)) is None:
                raise
            raise DamagedError(f"{error}; the next older whole one is {older}") from error


def _whole_before(path: Path) -> Path | None:
    """Return the newest complete checkpoint next to a damaged one; not of a later batch, if its index can be read."""
    found, _ = disk.all_in(path.parent)
    own = next((one.index.batch for one in found if one.path == path), None)
    for one in found:
        if one.path != path and (own is None or one.index.batch <= own):
            if is_whole(one.path, one.index):
                return one.path
    return None


def restored(
    path: Path,
    index: Index,
    like: State,
    step: Step | None = None,
    *,
    strict: bool = True,
    ignore: Collection[str] = (),
) -> State:
    """Return the state of a checkpoint whose index has been read; for the arguments see `load`."""
    check_fits(path, index, like, step, strict=strict, ignore=ignore)
    try:
        return assembled(index, SavedTensors(path, index), like, ignore)
    except DamagedError as error:
        if str(path) in str(error):
            raise
        raise DamagedError(f"{path} cannot be used: {error}") from error


def restore_extra(extra: Any, path: Path, outside: Mapping[str, Any]) -> None:
    """Restore what a run keeps outside the state; warn if only the run or only the checkpoint has it."""
    if (extra is not None) != (EXTRA in outside):
        text = "is not in it, and continues as it is"
        if extra is None:
            text = "is in it, and not restored: give fit the same argument"
        warn(f"{path}: Checkpoints(extra=...) {text}", CheckpointWarning)
    elif extra is not None:
        restore(extra, outside[EXTRA])


def outside_of(path: Path, index: Index) -> dict[str, Any]:
    """Return what a run keeps outside the state, by its name, `EXTRA` and `POSITION`, as far as it is there."""
    tensors = SavedTensors(path, index)
    own = {key: Spec.of_text(text) for key, text in index.tensors.items() if is_extra(key)}
    try:
        found = {key: restored_tensor(tensors[key], own[key]) for key in own}
        names = (name for name in (EXTRA, POSITION) if name in index.memory)
        return {name: unpack(index.memory[name], found) for name in names}
    except (KeyError, TypeError, ValueError) as error:  # forged, since the checksums fit
        raise DamagedError(f"{path}: its index does not describe what the run keeps outside the state") from error


def assembled(index: Index, tensors: Mapping[str, Tensor], like: State, ignore: Collection[str] = ()) -> State:
    """Return the state that an index and its tensors describe, in a template that they fit."""
    if tensors.keys() != index.tensors.keys():
        raise DamagedError("the tensors in the file are not those of the index")
    index, left_out = without(index, like, ignore)
    specs = {name: Spec.of_text(text) for name, text in index.tensors.items()}
    like, now = template(index, like), like.timestamp if TIME in left_out else time_from_plain(index.time)
    return filled(like, Static(like.context, now), tensors, specs, index.values)


def _fetched(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], torch.cuda.Event | None]:
    """Return the tensors on the host, or being copied there, and the event at which the copies are complete."""
    if not any(tensor.is_cuda for tensor in tensors.values()):
        return dict(tensors), None
    found = {name: _pinned(tensor) if tensor.is_cuda else tensor for name, tensor in tensors.items()}
    arrived = torch.cuda.Event()
    arrived.record()
    return found, arrived


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class Resumed:
    """A checkpoint from which a run continues."""

    state: State
    index: Index
    path: Path
    outside: Mapping[str, Any]
    """What the run keeps outside the state; see `outside_of`."""


def resumed_from(path: Path, like: State, step: Step, ignore: Collection[str] = ()) -> Resumed:
    """Return the checkpoint in a folder, to resume a run; BEFORE_LOAD fires on the template, as in `load`."""
    like = step.fire(Event.BEFORE_LOAD, like)

    def resumed() -> Resumed:
        state, index = read(path, like, step=step, ignore=ignore), disk.read_index(path)
        return Resumed(state, index, path, outside_of(path, index))

    return in_all(writers_of(like, step), resumed, f"{path} cannot be used")


def resumed_from_newest(folder: Path | str, like: State, step: Step, ignore: Collection[str] = ()) -> Resumed | None:
    """Return the newest complete checkpoint in a folder, to resume a run; `None` if there is none.

    Damaged ones are renamed to `*.damaged-*`, because the run will write these batches again. All processes that share
    the state must call, and continue from the newest that is complete for all of them.
    """
    writers = writers_of(like, step)
    found, damaged = _looked_for(Path(folder), writers)
    like = step.fire(Event.BEFORE_LOAD, like) if found else like

    def resumed_at(path: Path) -> Resumed | None:
        try:
            index = disk.read_index(path)
            return Resumed(restored(path, index, like, step, ignore=ignore), index, path, outside_of(path, index))
        except DamagedError as error:
            damaged[path] = str(error)
            return None

    for path in found:
        resumed = in_all(writers, functools.partial(resumed_at, path), f"{path} cannot be used")
        if writers is not None and not writers.is_good_for_all(resumed is not None):
            damaged.setdefault(path, f"{path} is damaged for another process")
            continue
        if resumed is None:
            continue
        if damaged and (writers is None or writers.is_first):
            warn(f"{'; '.join(damaged.values())}; put aside, and continuing from {path}", CheckpointWarning)
            for other in damaged:
                disk.put_aside(other)
        return resumed
    if damaged:
        raise DamagedError(f"no whole checkpoint is left in {folder}: {'; '.join(damaged.values())}")
    return None


def best_before(resumed: Resumed, like: State, step: Step, settings: Checkpoints) -> tuple[float, State] | None:
    """Return the best state up to a checkpoint, from those next to it, with its rating by the metric of `settings`."""
    found = [one for one in disk.all_in(resumed.path.parent)[0] if one.index.batch <= resumed.index.batch]
    rated = best_in(found, settings)
    if not rated:
        return None
    (rating, best), like = rated[0], step.fire(Event.BEFORE_LOAD, like)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # the one that the run continues from has led to the same
        state = in_all(
            writers_of(like, step), lambda: restored(best.path, best.index, like, step), f"{best.path} cannot be used"
        )
    return rating, state


def _looked_for(folder: Path, writers: Writers | None) -> tuple[list[Path], dict[Path, str]]:
    """Return the checkpoints in a folder, the newest first, and what is wrong with the others.

    Of several processes the first one looks, and tells the others.
    """

    def looked() -> tuple[list[str], dict[str, str], str | None]:
        if writers is not None and not writers.is_first:
            return [], {}, None
        with contextlib.suppress(OSError):  # a read-only folder is sufficient
            disk.clear(folder)
        found, damaged = disk.all_in(folder)
        newer = next((error for error in damaged.values() if not isinstance(error, DamagedError)), None)
        reasons = {path.name: str(error) for path, error in damaged.items()}
        return [one.path.name for one in found], reasons, None if newer is None else str(newer)

    found = in_all(writers, looked, f"{folder} cannot be read")
    names, reasons, newer = found if writers is None else json.loads(writers.word_of_first(json.dumps(found)))
    if newer is not None:
        raise CheckpointError(newer)  # not damaged, but this version cannot read it
    # By names, since each host has a local copy of its own of a folder in remote storage.
    return [folder / name for name in names], {folder / name: reason for name, reason in reasons.items()}
