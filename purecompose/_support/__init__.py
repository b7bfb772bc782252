"""Shared helpers: argument checks, tables, files, devices, warnings; and the library's version."""

from collections.abc import Callable
from typing import Any


__version__ = "0.1.0"
"""The version of the library, MAJOR.MINOR.PATCH."""

INSTALLED: dict[str, Callable[..., Any]] = {}
"""Functions of higher layers that lower ones call. The public names, which are above all layers, install them: how a
step is called within "torch.compile"."""
