"""The commands of the harness; `bash benchmarks/gpu_code/run` starts them in an environment that has what they need."""

import argparse

from benchmarks.gpu_code.cases import METHODS, NETWORKS
from benchmarks.gpu_code.pretend import pretend
from benchmarks.gpu_code.report import rows_of, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_code/run")
    parser.add_argument("command", choices=["report"])
    parser.add_argument("networks", nargs="+", choices=list(NETWORKS), metavar="network", help=", ".join(NETWORKS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["plain"], help=", ".join(METHODS))
    args = parser.parse_args()
    pretend()
    print(table([row for network in args.networks for methods in args.methods for row in rows_of(network, methods)]))


if __name__ == "__main__":
    main()
