"""Weights for others: safetensors by qualified names, and ONNX."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purecompose import tree
from purecompose.saving.errors import DamagedError, MismatchError
from purecompose.saving.folder import library, written
from purecompose.saving.leaves import stored
from purecompose.state import State
from purecompose.weights import to_module


__all__ = ["export_onnx", "load_weights", "save_weights"]


def save_weights(state: State, path: Path | str) -> Path:
    """Writes parameters and buffers to a safetensors file, by the names that the `nn.Module` gives them.

    Other programs read it, and `module.load_state_dict(safetensors.torch.load_file(path), strict=False)` does: a tied
    tensor is there once, under its first name. The file appears when it is whole.

    Args:
        state: The state; a population's tensors have a member dimension.
        path: The file, usually `*.safetensors`.

    Returns:
        The path.

    Raises:
        OSError: The file cannot be written.
        ImportError: safetensors is not installed.
    """
    tensors = {name: stored(tensor).clone() for name, tensor in (*state.params.items(), *state.buffers.items())}
    save_file = library().torch.save_file
    with written(Path(path)) as file:
        save_file(tensors, file, {"format": "pt"})
    return Path(path)


def load_weights(path: Path | str, like: State, *, strict: bool = True) -> State:
    """The state with parameters and buffers from a safetensors file; all else (optimizer, slots, time) is as it was.

    Args:
        path: The file, from `save_weights` or another program.
        like: The state.
        strict: Raise where names or shapes differ; otherwise take over what fits.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedError: It is no safetensors file.
        MismatchError: Names, shapes or dtypes differ; the message says which.
    """
    package, file = library(), Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    try:
        found: dict[str, Tensor] = package.torch.load_file(file)
    except (package.SafetensorError, ValueError, RuntimeError) as error:
        raise DamagedError(f"{file} cannot be read as safetensors: {error}") from error
    wanted = {**like.params, **like.buffers}
    misfits = _misfits(wanted, found)
    if misfits and strict:
        lines = "".join(f"\n  {line}" for line in misfits[:12])
        raise MismatchError(f"{file} does not fit this state:{lines}", misfits)
    fitting = {name: tensor for name, tensor in found.items() if name in wanted and _fits(wanted[name], tensor)}

    def filled(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _like(fitting.get(name, tensor), tensor) for name, tensor in ours.items()}

    return like.replace(params=filled(like.params), buffers=filled(like.buffers))


def export_onnx(state: State, inputs: Any, path: Path | str, **options: Any) -> Path:
    """Writes the network, in evaluation mode, as an ONNX file, by torch's own exporter.

    Args:
        state: A single state.
        inputs: An example of the network's inputs, as a batch has them: one argument, a list of arguments, or a
            mapping of keyword arguments.
        path: The file, usually `*.onnx`.
        options: More arguments of `torch.onnx.export`, such as `dynamic_shapes`.

    Returns:
        The path.

    Raises:
        ImportError: onnx or onnxscript is not installed.
        ValueError: The state is a population's.
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
    """The value on our device, in our order of dimensions in memory."""
    return ours if value is ours else torch.empty_like(ours).copy_(value)
