"""Warnings that report the caller's line, outside the frames of the library and of torch."""

import pathlib
import sys
import warnings

import torch

from purecompose._support.terminal import escaped
from purecompose._support.urls import with_urls


# torch's decorators, such as no_grad, stand between the library's functions.
_INNER = (str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(torch.__file__).parent))


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the innermost line outside of the library and torch, and with URLs for the paths of local copies."""
    level, frame = 1, sys._getframe(0)
    while frame is not None and frame.f_code.co_filename.startswith(_INNER):
        level, frame = level + 1, frame.f_back
    warnings.warn(escaped(with_urls(text)), category, stacklevel=level)
