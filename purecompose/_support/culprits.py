"""The origin of an error in the user's terms: the line of their code, and the layer that was running."""

import linecache
import pathlib
import traceback

import torch


__all__ = ["layer_of", "line_of"]

_OURS = str(pathlib.Path(__file__).parents[1])
_ALGORITHMS = str(pathlib.Path(_OURS, "algorithms"))
_TORCH = str(pathlib.Path(torch.__file__).parent)


def line_of(error: BaseException) -> str:
    """Return the innermost line of an algorithm, a loss or a network: outside of torch and the rest of the library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(_ALGORITHMS) or not f.filename.startswith((_TORCH, _OURS))]
    own = [f for f in own if "contextlib" not in f.filename]
    frame = own[-1] if own else frames[-1]
    text = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno} ({text})"


def layer_of(error: BaseException) -> str:
    """Return the innermost module that was running, as ", in the layer 'name' (Type)", or nothing."""
    found = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    running = [layer for layer in found if isinstance(layer, torch.nn.Module)]
    if not running:
        return ""
    # The outermost module is the network, in which a layer has its name.
    name = next((name for name, child in running[0].named_modules() if child is running[-1]), "")
    kind = type(running[-1]).__name__
    return f", in the layer {name!r} ({kind})" if name else f", in the layer {kind}"
