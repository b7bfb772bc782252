"""Warnings that report the caller's line, outside the library's frames."""

import pathlib
import sys
import warnings

from purecompose._support.urls import with_urls


__all__ = ["warn"]

_OURS = str(pathlib.Path(__file__).parents[1])


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the innermost line outside of the library, and with URLs in place of the paths of local copies."""
    level, frame = 1, sys._getframe(0)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(with_urls(text), category, stacklevel=level)
