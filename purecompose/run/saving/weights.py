"""Export of weights, safetensors files with qualified names, and of networks: ONNX and programs of torch.export."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from purecompose import tree
from purecompose._support.device import is_shard
from purecompose._support.files import misfit
from purecompose._support.messages import required, warn
from purecompose._support.objects import in_words
from purecompose.core.state import State
from purecompose.errors import CheckpointWarning, DamagedError, MismatchError
from purecompose.run.saving.comparison import KEPT, architecture, listed, other_modules, other_settings, other_tensors
from purecompose.run.saving.files import library, save_tensors
from purecompose.run.saving.folder import written
from purecompose.surgery.weights import to_module


_PICKLED = (b"PK", b"\x80\x02")
"""First bytes of files of torch.save, in its current and its older format."""

_MODEL, _SETTINGS = "purecompose.nn.model", "purecompose.settings"
"""Keys in a file's metadata for descriptions of the network's modules and of its settings, as JSON."""


def save_weights(state: State, path: Path | str) -> Path:
    """Write the network's `state_dict()` to a safetensors file.

    Other programs can read it, for example with `module.load_state_dict(safetensors.torch.load_file(path))`. As in
    torch, tied tensors are written under all their names, and buffers that are not persistent are left out. The file's
    metadata describe these and the network's modules, which `load_weights` compares. The file appears when it is
    complete.

    Args:
        state: The state; a population's tensors have a member dimension. Parameters of its loss are not written.
        path: The file, usually `*.safetensors`.

    Returns:
        The path.

    Raises:
        ValueError: The parameters are divided among processes.
        OSError: The file cannot be written.
        ImportError: Safetensors is not installed.

    Example:
        >>> import tempfile, torch
        >>> from purecompose import losses, optim
        >>> state = State.create(torch.nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> save_weights(state, tempfile.mkdtemp() + "/net.safetensors").name
        'net.safetensors'
    """
    if any(map(is_shard, state.params.values())):
        raise ValueError("save_weights: each process holds some rows of this state: give it pc.whole(state)")
    module = state.model.skeleton(train=True).filled_copy(state.params, state.buffers, is_shared=True)
    tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    described = {_MODEL: architecture(state.model), _SETTINGS: _settings(state)}
    tensors = {name: torch.empty(t.shape, dtype=t.dtype).copy_(t) for name, t in tensors.items()}  # of separate memory
    with written(Path(path)) as file:
        save_tensors(tensors, file, {"format": "pt", **{key: json.dumps(value) for key, value in described.items()}})
    return Path(path)


def _settings(state: State) -> dict[str, str]:
    """Return descriptions of the tensors of a network that are not in its `state_dict()`."""
    return {name: words for name, words in state.context.settings.items() if name in state.model.settings}


def load_weights(path: Path | str, like: State, *, strict: bool = True) -> State:
    """Return the state with the network's `state_dict()` from a safetensors file.

    Everything else (optimizer, slots, time) is kept, and so are tensors of the network that are not in its
    `state_dict()`. Of a tied tensor one name is enough. A file from `save_weights` describes the modules of the
    network, which are compared: standardized convolutions have weights of the shapes of plain ones. Of files from other
    programs only names, shapes and dtypes are compared. Of dtypes, those are accepted whose values the network's have:
    bfloat16 in the file of a float32 network, not the reverse.

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
        CheckpointWarning: Modules have other settings, or tensors that are not in `state_dict()` other values; without
            `strict`, something does not fit.

    Example::

        state = load_weights("net.safetensors", like=state)
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"load_weights(path, like): expected a path first, got {type(path).__name__}")
    if not isinstance(like, State):
        raise TypeError(f"load_weights(path, like): expected a State, got {type(like).__name__}")
    file = Path(path)
    found, model, settings = _read(file)
    now, here = architecture(like.model), _settings(like)
    module = like.model.skeleton(train=True).filled_copy(like.params, like.buffers)
    wanted = module.state_dict(keep_vars=True)
    # Files of other programs may contain tables, as they were once persistent.
    tables = {name: in_words(found.pop(name)) for name in here if name in found and name not in wanted}
    tensors = other_tensors({**(settings or {}), **tables}, here, "the file")
    reported = [*other_settings(model or now, now, "the file"), *tensors]
    misfits = [*other_modules(model or now, now, "the file"), *_loaded(module, wanted, found)]
    if misfits and strict:
        hint = "give the state the same modules, surgery and dtypes, or load with strict=False to take over what fits"
        raise MismatchError(listed(f"{file} does not fit this state", [*misfits, *reported], hint), misfits)
    if misfits or reported:
        hint = KEPT * bool(tensors)
        warn(listed(f"{file} is loaded with differences", [*misfits, *reported], hint), CheckpointWarning)
    params = {name: param.detach() for name, param in module.named_parameters()}
    return like.replace(params={**like.params, **params}, buffers={**like.buffers, **dict(module.named_buffers())})


def _loaded(module: nn.Module, wanted: Mapping[str, Any], found: Mapping[str, Tensor]) -> list[str]:
    """Load tensors into a module, as its `load_state_dict` does, and return a line for each that does not fit."""
    both = {name: one for name, one in wanted.items() if isinstance(one, Tensor) and name in found}
    unlike = []
    for name, ours in both.items():
        theirs = found[name]
        is_exact = torch.promote_types(theirs.dtype, ours.dtype) == ours.dtype
        if theirs.shape != ours.shape or not is_exact or theirs.is_floating_point() != ours.is_floating_point():
            unlike.append(name)
    absent, unknown = module.load_state_dict({n: t for n, t in found.items() if n not in unlike}, strict=False)
    last = {id(one): name for name, one in both.items() if name not in unlike}  # of a tied tensor, what is loaded
    held = {n: last.get(id(one), n) for n, one in wanted.items() if isinstance(one, Tensor) and n not in unlike}
    return [
        *[f"{n}: {tree.describe(wanted[n])} here, not in the file" for n in absent if held.get(n) == n],
        *[f"{name}: in the file, not here" for name in unknown],
        *[f"{n}: {tree.describe(found[n])} in the file, {tree.describe(wanted[n])} here" for n in unlike],
        *[
            f"{name}: another value than {other} in the file, tied here"
            for name, other in held.items()
            if name in found and name != other and in_words(found[name]) != in_words(found[other])
        ],
    ]


def _read(file: Path) -> tuple[dict[str, Tensor], list[str] | None, dict[str, str] | None]:
    """Return the tensors of a file, and the descriptions of their network's modules and settings if it has them."""
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
        model, settings = (json.loads(metadata.get(key, "null")) for key in (_MODEL, _SETTINGS))
    except (package.SafetensorError, ValueError, RuntimeError) as error:
        raise DamagedError(f"{file} cannot be read as safetensors: {error}") from error
    for key, value, form in ((_MODEL, model, [str]), (_SETTINGS, settings, {"*": str})):
        if misfit(value, (form, None), key) is not None:
            raise DamagedError(f"{file}: the entry {key} of its metadata does not describe a model")
    return found, model, settings


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
    for package in ("onnx", "onnxscript"):
        required("export_onnx", "'purecompose[onnx]'", package)
    module, args, kwargs = _for_export(state, inputs)
    with written(Path(path)) as file, torch.no_grad():
        program = torch.onnx.export(module, args, kwargs=kwargs, dynamo=True, verbose=False, **options)
        assert program is not None
        program.save(str(file), external_data=False)
    return Path(path)


def export_program(state: State, inputs: Any, path: Path | str, **options: Any) -> Path:
    """Write the network, in evaluation mode, as a program of `torch.export`, which `torch.export.load` reads.

    The file holds the computation and the weights; reading it needs torch and none of the network's code.

    Args:
        state: A single state.
        inputs: An example of the network's inputs, as for `export_onnx`.
        path: The file, usually `*.pt2`.
        options: Further arguments of `torch.export.export`, such as `dynamic_shapes`; without it, all sizes are
            those of the example.

    Returns:
        The path.

    Raises:
        ValueError: The state is a population's.

    Example:
        >>> import tempfile
        >>> from purecompose import losses, optim
        >>> state = State.create(nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1), duration="1ep")
        >>> path = export_program(state, torch.ones(3, 2), tempfile.mkdtemp() + "/net.pt2")
        >>> torch.export.load(path).module()(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """
    module, args, kwargs = _for_export(state, inputs)
    with written(Path(path)) as file, torch.no_grad(), file.open("wb") as opened:
        torch.export.save(torch.export.export(module, args, kwargs, **options), opened)
    return Path(path)


def _for_export(state: State, inputs: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any] | None]:
    """Return the network in evaluation mode, with the arguments of an example of its inputs."""
    args = () if isinstance(inputs, Mapping) else tuple(inputs) if isinstance(inputs, list) else (inputs,)
    return to_module(state).eval(), args, dict(inputs) if isinstance(inputs, Mapping) else None
