"""The commands of the harness; `bash benchmarks/gpu_code/run` starts them in an environment that has what they need."""

import argparse
import sys
from collections.abc import Iterator

from benchmarks.gpu_code import shipped
from benchmarks.gpu_code.assembling import assembled
from benchmarks.gpu_code.cases import METHODS, NETWORKS, build
from benchmarks.gpu_code.faults import FAULTS, with_fault
from benchmarks.gpu_code.numbers import differences
from benchmarks.gpu_code.pretend import pretend
from benchmarks.gpu_code.report import codes_of, rows_of, table


TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}
"""Largest differences after three steps, by precision: sums are in another order than in eager steps."""


def main() -> int:
    """Run a command; return 1 if kernels were not assembled or numbers differ."""
    if sys.argv[1:2] == ["shipped"]:
        return shipped.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_code/run")
    parser.add_argument("command", choices=["report", "code", "assemble", "numbers", "faults"])
    parser.add_argument("networks", nargs="+", choices=list(NETWORKS), metavar="network", help=", ".join(NETWORKS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["plain"], help=", ".join(METHODS))
    args = parser.parse_args()
    pretend()
    pairs = [(network, methods) for network in args.networks for methods in args.methods]
    if args.command == "report":
        print(table([row for network, methods in pairs for row in rows_of(network, methods)]))
        return 0
    are_right = True
    for network, methods in pairs:
        for line, is_right in LINES[args.command](network, methods):
            print(line, flush=True)
            are_right = are_right and is_right
    return not are_right


def _code(network: str, methods: str) -> Iterator[tuple[str, bool]]:
    """Yield the source of the step's code."""
    for code in codes_of(network, methods):
        yield code.source, True


def _assemble(network: str, methods: str) -> Iterator[tuple[str, bool]]:
    """Yield a line for each kernel that fails, and one for all."""
    kernels = assembled(codes_of(network, methods))
    failed = [kernel for kernel in kernels if kernel.error]
    yield from ((f"{kernel.kernel} for sm_{kernel.target}: {kernel.error}", False) for kernel in failed)
    targets = " and ".join(f"sm_{target}" for target in sorted({kernel.target for kernel in kernels}))
    yield f"{network} {methods}: {len(kernels) - len(failed)} of {len(kernels)} assembled, for {targets}", True


def _numbers(network: str, methods: str) -> Iterator[tuple[str, bool]]:
    """Yield a line with the differences from the eager step."""
    case = build(network)
    found = differences(case, methods)
    words = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
    is_right = max(found.values()) <= TOLERANCES[case.precision]
    yield f"{network} {methods}: {'equal' if is_right else 'DIFFERENT'} after 3 steps: {words}", is_right


def _faults(network: str, methods: str) -> Iterator[tuple[str, bool]]:
    """Yield a line for each kind of fault, which is right if the comparison finds it."""
    case = build(network)
    for name, fault in FAULTS.items():
        largest = max(differences(case, methods, compile_=with_fault(fault)).values())
        is_found = not largest <= TOLERANCES[case.precision]
        yield f"{network} {methods}, {name}: {'found' if is_found else 'NOT FOUND'}, difference {largest:.1e}", is_found


LINES = {"faults": _faults, "code": _code, "assemble": _assemble, "numbers": _numbers}

if __name__ == "__main__":
    sys.exit(main())
