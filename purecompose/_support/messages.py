"""Messages to users: safe to print, with the line and the layer of their own code that they are about."""

import inspect
import linecache
import random
import re
import sys
import traceback
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch


_OURS = str(Path(__file__).parents[1])
_ALGORITHMS = str(Path(_OURS, "algorithms"))
_TORCH = str(Path(inspect.getfile(torch)).parent)


# Control characters, except tabs and ends of lines; marks of the direction of writing; halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: object) -> str:
    """Return a text with escapes of Python for what would control a terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def say(*values: object, file: Any = None, **settings: Any) -> None:
    """Print, escaped for standard output and standard error; files get the values as they are."""
    is_shown = file in (None, sys.stdout, sys.stderr)
    print(*(map(escaped, values) if is_shown else values), file=file, **settings)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the innermost line outside of the library and torch."""
    level, frame = 1, sys._getframe(0)
    # torch's decorators, such as no_grad, stand between the library's functions.
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
        level, frame = level + 1, frame.f_back
    warnings.warn(escaped(text), category, stacklevel=level)


def line_of(error: BaseException) -> str:
    """Return the innermost line of an algorithm, a loss or a network: outside of torch and the rest of the library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename)]
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


def calling_frames(frame: FrameType | None = None) -> tuple[FrameType | None, FrameType | None]:
    """Return the innermost running frame as in `line_of`, and the frame of the function of torch that it called."""
    frame, inner = frame or sys._getframe(1), None
    while frame is not None and not _is_own(frame.f_code.co_filename):
        is_public = frame.f_code.co_filename.startswith(_TORCH) and not _is_machinery(frame)
        frame, inner = frame.f_back, frame if is_public else inner
    return frame, inner


def _is_own(file: str) -> bool:
    return file.startswith(_ALGORITHMS) or not (
        file.startswith((_TORCH, _OURS)) or "contextlib" in file or file == random.__file__
    )


def _is_machinery(frame: FrameType) -> bool:
    """Return whether a frame of torch only passes a call on."""
    package, _, module = frame.f_globals.get("__name__", "").partition(".")
    return package == "torch" and module.startswith(("_", "fx", "overrides", "utils", "nn.modules.module"))
