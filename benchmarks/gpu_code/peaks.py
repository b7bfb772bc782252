"""The peak of the memory that GPU code needs, from its allocations and deletions.

Inductor's own estimate keeps a buffer until the last node that must come after its readers, such as the update of a
parameter, which is longer than the code keeps it.
"""

import re
from collections.abc import Callable


_ASSIGNMENT = re.compile(r"(\w+) = (?:reinterpret_tensor\(|copy_if_misaligned\()?(\w+)(\[\d+\]|\(|\.|,|\)|$)")


def peak_of(source: str, size_of: Callable[[str], int]) -> int:
    """Return the largest number of bytes that are in memory at one time, beside parameters and batch.

    A backward pass begins with what the forward pass has saved for it.

    Args:
        source: The source that Inductor wrote.
        size_of: Function that returns the bytes of a buffer or an input, 0 for other names.
    """
    memory = _Memory(size_of)
    body = source[source.index("def call(") :].split("\n        return ")[0].splitlines()[1:]
    for line in body:
        for statement in line.partition("#")[0].split(";"):
            memory.execute(statement.strip())
    return memory.peak


class _Memory:
    """The memory that is allocated while code runs."""

    def __init__(self, size_of: Callable[[str], int]) -> None:
        self.size_of, self.now, self.peak = size_of, 0, 0
        self.names: dict[str, list[str]] = {}
        """For each name, all names of the same memory; the first one tells its size."""

    def execute(self, statement: str) -> None:
        if statement.startswith("del "):
            for name in statement.removeprefix("del ").split(", "):
                self.delete(name)
        elif statement.endswith(" = args"):
            for name in statement.removesuffix(" = args").split(","):
                if name.strip() and not name.strip().startswith(("arg", "primals")):
                    self.allocate(name.strip())
        elif match := _ASSIGNMENT.match(statement):
            name, value, rest = match.groups()
            if name == value:
                return
            if value in self.names and not rest.startswith("["):
                self.names[name] = self.names[value]
                self.names[name].append(name)
            else:
                self.allocate(name)

    def allocate(self, name: str) -> None:
        if self.size_of(name):
            self.names[name] = [name]
            self.now += self.size_of(name)
            self.peak = max(self.peak, self.now)

    def delete(self, name: str) -> None:
        names = self.names.pop(name, [])
        if len(names) == 1:
            self.now -= self.size_of(name)
        if name in names:
            names.remove(name)
