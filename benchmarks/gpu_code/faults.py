"""Faults put into GPU code on purpose, to show that a comparison of numbers finds each of them."""

import re
from collections.abc import Callable

from torch import fx

from benchmarks.gpu_code.graphs import Graph
from benchmarks.gpu_code.interpreting import load
from benchmarks.gpu_code.writing import code_of
from purecompose.transforms.compilation.backends import Compiled


def with_fault(fault: Callable[[str], str]) -> Callable[[fx.GraphModule], Compiled]:
    """Return a function that compiles a graph to code with a fault, run on the CPU."""
    return lambda graph: load(fault(code_of(Graph("part", graph, True)).source))


def shared_memory(source: str) -> str:
    """Let a buffer be in the memory of another one that is still to be read."""
    start = source.index("def call(")
    allocations = list(re.finditer(r"(\w+) = empty_strided_cuda\((.*)\)", source[start:]))
    for i, second in enumerate(allocations):
        for first in allocations[:i]:
            rest = source[start + second.end() :]
            is_read = re.search(rf"(?:run|mm)\(.*\b{first[1]}\b", rest)
            if first[2] == second[2] and is_read and f"del {first[1]}\n" not in source[start : start + second.start()]:
                at = start + second.start()
                return source[:at] + f"{second[1]} = {first[1]}" + source[start + second.end() :]
    raise ValueError("no two buffers of one form are in memory together")


def early_write(source: str) -> str:
    """Let a donated parameter have another value when it is read for the last time before its update."""
    start, end = (
        source.index("def call("),
        source.index(".run(", source.index("triton_for_fused", source.index("def call("))),
    )
    updated = set(re.findall(r"arg\d+_1", source[end : source.index("\n", end)]))
    for line in reversed(source[start:end].splitlines()):
        read = updated & set(re.findall(r"arg\d+_1", line)) if "extern_kernels.mm(" in line else set()
        for name in sorted(read):
            indent = line[: len(line) - len(line.lstrip())]
            return source.replace(line, f"{indent}{name}.mul_(2)\n{line}\n{indent}{name}.div_(2)")
    raise ValueError("no product reads a parameter")


def other_draws(source: str) -> str:
    """Let a multiplier of Philox, the generator of draws, be another number."""
    if PHILOX not in source:
        raise ValueError("the code draws nothing")
    return source.replace(PHILOX, str(int(PHILOX) + 2))


PHILOX = "3528531795"
"""A multiplier of Philox 4x32."""

FAULTS = {"shared memory": shared_memory, "early write": early_write, "other draws": other_draws}
