"""What a mutant is."""

from collections.abc import Callable
from dataclasses import dataclass

from purecompose.algorithm import Algorithm


__all__ = ["Mutant"]


@dataclass(frozen=True)
class Mutant:
    """An algorithm that is wrong on purpose, and the law that must find it out.

    Args:
        make: Makes the algorithm; its docstring says what is wrong and how it comes about.
        breaks: The law's name.
        task: The name of a task on which it can be seen.
    """

    make: Callable[[], Algorithm]
    breaks: str
    task: str = "vectors"

    @property
    def name(self) -> str:
        """The factory's name."""
        return self.make.__name__

    @property
    def source(self) -> str:
        """The text that makes it anew, for `Subject.of`."""
        return f"{self.make.__module__}:{self.make.__name__}"
