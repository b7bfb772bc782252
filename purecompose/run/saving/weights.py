"""Export of weights: safetensors files with qualified names, and ONNX."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.warnings import warn
from purecompose.core.state import State
from purecompose.run.saving.description import architecture, listed, other_modules, other_settings
from purecompose.run.saving.errors import CheckpointWarning, DamagedError, MismatchError
from purecompose.run.saving.folder import written
from purecompose.run.saving.leaves import stored
from purecompose.run.saving.tensors import library, save_tensors
from purecompose.surgery.weights import to_module


__all__ = ["export_onnx", "load_weights", "save_weights"]

_PICKLED = (b"PK", b"\x80\x02")
"""First bytes of files of torch.save, in its current and its older format."""

_MODEL = "purecompose.nn.model"
"""Key in a file's metadata for the description of the network's modules, as JSON."""


def save_weights(state: State, path: Path | str) -> Path:
    """Write parameters and buffers to a safetensors file, with the names of the `nn.Module`.

    Other programs can read it, for example with `module.load_state_dict(safetensors.torch.load_file(path),
    strict=False)`; not strict, because a tied tensor is stored once, under its first name. The file's metadata describe
    the network's modules, which `load_weights` compares. The file appears when it is complete.

    Args:
        state: The state; a population's tensors have a member dimension.
        path: The file, usually `*.safetensors`.

    Returns:
        The path.

    Raises:
        OSError: The file cannot be written.
        ImportError: Safetensors is not installed.

    Example:
        >>> import tempfile, torch
        >>> from purecompose import losses, optim
        >>> state = State.create(torch.nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> save_weights(state, tempfile.mkdtemp() + "/net.safetensors").name
        'net.safetensors'
    """
    tensors = {name: stored(tensor).clone() for name, tensor in (*state.params.items(), *state.buffers.items())}
    with written(Path(path)) as file:
        save_tensors(tensors, file, {"format": "pt", _MODEL: json.dumps(architecture(state.model))})
    return Path(path)


def load_weights(path: Path | str, like: State, *, strict: bool = True) -> State:
    """Return the state with parameters and buffers from a safetensors file.

    Everything else (optimizer, slots, time) is kept. A file from `save_weights` describes the network of the weights.
    With other modules, the same weights define another function even if names and shapes agree: standardized
    convolutions have the weights of plain ones. Files from other programs have no such description, so only names,
    shapes and dtypes are compared.

    Args:
        path: The file, from `save_weights` or another program.
        like: The state.
        strict: True to raise if modules, names, shapes or dtypes differ; False to load everything that fits, and warn.

    Raises:
        TypeError: The arguments are not path and state.
        FileNotFoundError: There is no such file.
        DamagedError: The file is not a safetensors file.
        MismatchError: Modules, names, shapes or dtypes differ; the message lists them.

    Warns:
        CheckpointWarning: Modules have other settings; without `strict`, something does not fit.

    Example::

        state = load_weights("net.safetensors", like=state)
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"load_weights(path, like): expected a path first, got {type(path).__name__}")
    if not isinstance(like, State):
        raise TypeError(f"load_weights(path, like): expected a State, got {type(like).__name__}")
    file = Path(path)
    found, model = _read(file)
    wanted, now = {**like.params, **like.buffers}, architecture(like.model)
    reported = [] if model is None else other_settings(model, now, "the file")
    misfits = [] if model is None else other_modules(model, now, "the file")
    misfits += _misfits(wanted, found)
    if misfits and strict:
        hint = "give the state the same modules and surgery, or load with strict=False to take over what fits"
        raise MismatchError(listed(f"{file} does not fit this state", [*misfits, *reported], hint), misfits)
    if misfits or reported:
        warn(listed(f"{file} is loaded with differences", [*misfits, *reported]), CheckpointWarning)
    fitting = {name: tensor for name, tensor in found.items() if name in wanted and _fits(wanted[name], tensor)}

    def filled(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _like(fitting.get(name, tensor), tensor) for name, tensor in ours.items()}

    return like.replace(params=filled(like.params), buffers=filled(like.buffers))


def _read(file: Path) -> tuple[dict[str, Tensor], list[str] | None]:
    """Return the tensors of a file, and the description of their network if it has one."""
    package = library()
    if not file.exists():
        raise FileNotFoundError(f"there is no file {file}")
    if not file.is_file():  # a pipe would wait for its writer
        raise DamagedError(f"{file} cannot be read as safetensors: not a regular file")
    with file.open("rb") as opened:
        if opened.read(2) in _PICKLED:
            raise DamagedError(
                f"{file} was written by torch.save, not safetensors; loading such files can execute code. Load "
                "it into the network before State.create, net.load_state_dict(torch.load(path, weights_only=True)), or "
                "convert it by safetensors.torch.save_file"
            )
    try:
        found: dict[str, Tensor] = package.torch.load_file(file)
        with package.safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
        model = json.loads(metadata[_MODEL]) if _MODEL in metadata else None
    except (package.SafetensorError, ValueError, RuntimeError) as error:
        raise DamagedError(f"{file} cannot be read as safetensors: {error}") from error
    is_lines = isinstance(model, list) and all(isinstance(line, str) for line in model)
    if model is not None and not is_lines:
        raise DamagedError(f"{file}: the entry {_MODEL} of its metadata does not describe a model")
    return found, model


def export_onnx(state: State, inputs: Any, path: Path | str, **options: Any) -> Path:
    """Write the network, in evaluation mode, to an ONNX file, with torch's own exporter.

    Args:
        state: A single state.
        inputs: An example of the network's inputs, as in a batch: one argument, a list of arguments, or a mapping of
            keyword arguments.
        path: The file, usually `*.onnx`.
        options: Further arguments of `torch.onnx.export`, such as `dynamic_shapes`.

    Returns:
        The path.

    Raises:
        ImportError: Onnx or onnxscript is not installed.
        ValueError: The state is a population's.

    Example::

        export_onnx(state, inputs[:1], "net.onnx")
    """
    try:
        import onnx  # noqa: F401  # pyright: ignore[reportMissingImports]
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "export_onnx needs onnx and onnxscript; install them with `pip install 'purecompose[onnx]'`"
        ) from error
    module = to_module(state).eval()
    args = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, list) else (inputs,)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else None
    with written(Path(path)) as file, torch.no_grad():
        program = torch.onnx.export(module, args, kwargs=kwargs, dynamo=True, verbose=False, **options)
        assert program is not None
        program.save(str(file), external_data=False)
    return Path(path)


def _misfits(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    lines = [f"{name}: {tree.describe(t)} here, not in the file" for name, t in wanted.items() if name not in found]
    lines += [f"{name}: in the file, not here" for name in found if name not in wanted]
    both = [name for name in wanted if name in found and not _fits(wanted[name], found[name])]
    return lines + [f"{n}: {tree.describe(found[n])} in the file, {tree.describe(wanted[n])} here" for n in both]


def _fits(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and ours.dtype == theirs.dtype


def _like(value: Tensor, ours: Tensor) -> Tensor:
    """Return the value on the device of `ours`, with its order of dimensions in memory."""
    return ours if value is ours else torch.empty_like(ours).copy_(value)
