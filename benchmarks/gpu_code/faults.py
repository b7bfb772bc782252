"""Faults put into GPU code on purpose, to show that a comparison of numbers finds each of them."""

import argparse
import re
from collections.abc import Callable, Sequence

import torch
from torch import fx

import purecompose as pc
from benchmarks.gpu_code.graphs import Graph
from benchmarks.gpu_code.interpreting import load
from benchmarks.gpu_code.numbers import largest
from benchmarks.gpu_code.pretend import pretend
from benchmarks.gpu_code.proving import TOLERANCE
from benchmarks.gpu_code.trials import trials
from benchmarks.gpu_code.writing import code_of
from purecompose.transforms.compilation.backends import Compiled


def main(args: Sequence[str]) -> int:
    """Put each fault into the code of trials, and print whether it is found; return 1 if one is not."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_code/run faults")
    parser.add_argument("trials", nargs="*", default=["method mixup vectors"], help="names, as `shipped --list` prints")
    pretend()
    are_found = True
    for name in parser.parse_args(args).trials:
        run = trials()[name]()
        for fault_name, fault in FAULTS.items():
            torch._dynamo.reset()
            found = largest(
                run.step,
                pc.compile(run.step, quiet=True),
                run.state,
                run.batches,
                with_fault(fault),
                is_half=run.is_half,
            )
            difference = max(found.values())
            is_found = not difference <= (1 if run.is_half else TOLERANCE)
            print(f"{name}, {fault_name}: {'found' if is_found else 'NOT FOUND'}, {difference:.1e}", flush=True)
            are_found = are_found and is_found
    return int(not are_found)


def with_fault(fault: Callable[[str], str]) -> Callable[[fx.GraphModule], Compiled]:
    """Return a function that compiles a graph to code with a fault, run on the CPU."""
    return lambda graph: load(fault(code_of(Graph("part", graph, True)).source))


def aliased_memory(source: str) -> str:
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

FAULTS = {"aliased memory": aliased_memory, "early write": early_write, "other draws": other_draws}
