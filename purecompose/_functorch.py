"""Whether a transform of `torch.func` is at work; torch has no public way to ask."""

from torch._C._functorch import (  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
    peek_interpreter_stack,
)


__all__ = ["is_transforming"]


def is_transforming() -> bool:
    """Whether `grad`, `vmap` or another transform is active around the caller."""
    return peek_interpreter_stack() is not None
