"""The commands of the harness; `bash benchmarks/gpu_code/run` starts them in an environment that has what they need."""

import argparse
import sys
from collections.abc import Iterator

from benchmarks.gpu_code import faults, shipped
from benchmarks.gpu_code.assembling import assembled
from benchmarks.gpu_code.cases import METHODS, NETWORKS
from benchmarks.gpu_code.pretend import pretend
from benchmarks.gpu_code.report import codes_of, rows_of, table


def main() -> int:
    """Run a command; return 1 if kernels were not assembled, numbers differ, or a fault is not found."""
    if sys.argv[1:2] == ["shipped"]:
        return shipped.main(sys.argv[2:])
    if sys.argv[1:2] == ["faults"]:
        return faults.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_code/run")
    parser.add_argument("command", choices=["report", "code", "assemble"], help="or: shipped, faults")
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


LINES = {"code": _code, "assemble": _assemble}

if __name__ == "__main__":
    sys.exit(main())
