"""Whether a transform of `torch.func` is at work, and a scope outside of all of them; torch has no public ways."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C._functorch import (  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
    peek_interpreter_stack,
)
from torch.utils._python_dispatch import _disable_current_modes


__all__ = ["is_transforming", "plainly"]


def is_transforming() -> bool:
    """Whether `grad`, `vmap` or another transform is active around the caller."""
    return peek_interpreter_stack() is not None


@contextmanager
def plainly() -> Iterator[None]:
    """A scope in which tensors are made as if no transform, mode or `inference_mode` were around the caller."""
    with torch.inference_mode(False), torch._C._DisableFuncTorch(), _disable_current_modes(), torch.no_grad():
        yield
