"""Whether transforms of `torch.func` or tracing are at work, and a scope outside of them; torch has no public ways."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C._functorch import (  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
    peek_interpreter_stack,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


__all__ = ["is_fake", "is_transforming", "plainly"]


def is_transforming() -> bool:
    """Whether `grad`, `vmap` or another transform is active around the caller."""
    return peek_interpreter_stack() is not None


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a form and no numbers, as while a step is traced."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def plainly() -> Iterator[None]:
    """A scope in which tensors are made as if no transform, mode or `inference_mode` were around the caller."""
    with torch.inference_mode(False), torch._C._DisableFuncTorch(), _disable_current_modes(), torch.no_grad():
        yield
