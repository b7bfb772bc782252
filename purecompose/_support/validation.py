"""The checks of torch.distributions, which read numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution


@contextmanager
def unvalidated() -> Iterator[None]:
    """Return a scope in which distributions check their arguments only if they are made with `validate_args=True`.

    The check reads whether all values are valid, which tensors without numbers, or of several members, cannot tell.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
