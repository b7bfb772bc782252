"""Do the tests notice mistakes in the library's own code, and which tests notice what no other does?

    python benchmarks/mutation.py purecompose/core/repeated.py --tests tests/core [--num 20] [--workers 2]

Each mutant changes one place of a module in a copy of the repository: a comparison, a boolean or arithmetic operator, a
number, a negated condition, or a statement that is left out. The tests run on each. Printed are the mutants that
survive, how many the tests catch, and for each test function how many it catches and how many of them no other does.
No timing.
"""

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import copy
import multiprocessing
import os
import pathlib
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
from _timing import Row, save


ROOT = pathlib.Path(__file__).parents[1]
# Each run is a fork of a process that has imported torch, which takes longer than many tests.
PROCESSES = multiprocessing.get_context("forkserver")
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
}


class Mutant(NamedTuple):
    """One changed place of a module."""

    file: str
    line: int
    change: str
    source: str
    """The module's whole text."""


def mutants(file: pathlib.Path) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    tree = ast.parse(file.read_text())
    nodes: list[Any] = list(ast.walk(tree))
    for number, node in enumerate(nodes):
        for kind in _changes(node):
            changed = copy.deepcopy(tree)
            place: Any = next(one for i, one in enumerate(ast.walk(changed)) if i == number)
            before = ast.unparse(node).partition("\n")[0]
            _apply(place, kind)
            after = "pass" if kind == "drop" else ast.unparse(place).partition("\n")[0]
            if after != before:
                name = file.resolve().relative_to(ROOT).as_posix()
                yield Mutant(name, node.lineno, f"{before[:50]} -> {after[:50]}", ast.unparse(changed))


def _changes(node: Any) -> list[str]:
    if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp):
        operator = node.ops[0] if isinstance(node, ast.Compare) else node.op
        return ["operator"] if type(operator) in SWAPS else []
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        return ["number"]
    if isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp):
        return ["negate"]
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.Raise) and node.col_offset and not is_docstring:
        return ["drop"]
    return []


def _apply(node: Any, kind: str) -> None:
    if kind == "operator" and isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif kind == "operator":
        node.op = SWAPS[type(node.op)]()
    elif kind == "number":
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif kind == "negate":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    else:  # a statement becomes an expression without effect
        place = ast.copy_location(ast.Pass(), node)
        node.__class__, node.__dict__ = ast.Pass, place.__dict__


def failing(mutant: Mutant, tests: list[str], timeout: float) -> set[str] | None:
    """Return the test functions that fail on a mutant; `None` if they do not end or cannot be collected."""
    with tempfile.TemporaryDirectory() as folder:
        copied = pathlib.Path(folder) / "repository"
        ignored = shutil.ignore_patterns(".git", "__pycache__", ".venv*", "results")
        shutil.copytree(ROOT, copied, ignore=ignored)
        (copied / mutant.file).write_text(mutant.source)
        receiver, sender = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=_run_tests, args=(copied, tests, sender))
        process.start()
        sender.close()
        try:
            return receiver.recv() if receiver.poll(timeout) else None
        except EOFError:  # the process died
            return None
        finally:
            process.kill()
            process.join()


def _run_tests(repository: pathlib.Path, tests: list[str], results: Connection) -> None:
    os.chdir(repository)
    os.environ.update(PYTHONPATH=str(repository), CI="1")
    sys.path[:0] = [str(repository)]
    failed = _Failed()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        status = pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[failed])
    results.send(failed.functions if failed.functions or status == 0 else None)


class _Failed:
    """A pytest plugin that collects the test functions that fail."""

    def __init__(self) -> None:
        self.functions: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.functions.add(report.nodeid.partition("[")[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("modules", nargs="+", type=pathlib.Path)
    parser.add_argument("--tests", nargs="+", default=["tests/core"])
    parser.add_argument("--num", type=int, default=20, help="mutants in all, drawn at random (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run (default %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the JSON")
    args = parser.parse_args()
    PROCESSES.set_forkserver_preload(["torch"])
    every = [mutant for file in args.modules for mutant in mutants(file)]
    chosen = random.Random(args.seed).sample(every, min(args.num, len(every)))
    for file in args.modules:  # an unchanged module: its tests pass, or the figures would mean nothing
        whole = Mutant(file.resolve().relative_to(ROOT).as_posix(), 0, "", file.read_text())
        if failing(whole, args.tests, args.timeout) != set():
            raise SystemExit(f"the tests fail, or do not end in {args.timeout:g} s, on {file} as it is")
    with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
        results = list(pool.map(lambda mutant: failing(mutant, args.tests, args.timeout), chosen))
    rows: list[Row] = []
    catches: collections.Counter[str] = collections.Counter()
    only: collections.Counter[str] = collections.Counter()
    for mutant, found in zip(chosen, results, strict=True):
        catches.update(found or ())
        only.update(found if found and len(found) == 1 else ())
        caught = "no end or no import" if found is None else f"{len(found)} tests" if found else "SURVIVES"
        rows.append({"module": mutant.file, "line": mutant.line, "change": mutant.change, "caught by": caught})
    survivors = sum(row["caught by"] == "SURVIVES" for row in rows)
    save("mutation", rows, args.out)
    print(f"{len(rows) - survivors} of {len(rows)} caught; {len(every)} mutants in all")
    for function, number in sorted(catches.items()):
        print(f"{function}: {number}, of which {only[function]} by no other")


if __name__ == "__main__":
    main()
