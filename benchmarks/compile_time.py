"""How long does the first compiled step take, and how long in a second process with the cache on disk?

    python benchmarks/compile_time.py [--repeats 3]

A fresh process with an empty cache folder, then another one with the folder as the first has left it. "start" counts
from the start of the process, so with the import of torch; "call" from the first call of the compiled step. The
cache is Inductor's, where `TORCHINDUCTOR_CACHE_DIR` says.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from _subjects import METHODS, Subject, methods, mlp, new_state, resnet8
from _timing import Row, arguments, parse, save

import purecompose as pc
from purecompose import compose, loop_events


CASES = {
    "MLP 64-128-128-10": (mlp, False),
    f"MLP 64-128-128-10, {METHODS}": (mlp, True),
    "ResNet-8, 32x32": (resnet8, False),
}


def first_step(case: str, backend: str) -> dict[str, float]:
    """When the first step is called and done, in seconds since the epoch."""
    make, has_methods = CASES[case]
    subject: Subject = make()
    step = pc.compile(compose(loop_events, methods() if has_methods else []), backend=backend)
    state = step.init(new_state(subject))
    called = time.time()
    state = step(state, (subject.inputs, subject.targets))
    if state.loss is None or not torch.isfinite(state.loss):
        raise SystemExit(f"{case}: the first step's loss is {state.loss}")
    return {"called": called, "done": time.time()}


def in_process(case: str, backend: str, cache: str) -> tuple[float, float]:
    """Seconds to the first step's end, in a fresh process with this cache: from its start, from the call."""
    command = [sys.executable, __file__, "--case", case, "--backend", backend]
    started = time.time()
    child = subprocess.run(
        command, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}, check=True, stdout=subprocess.PIPE
    )
    times = json.loads(child.stdout.splitlines()[-1])
    return times["done"] - started, times["done"] - times["called"]


def measure(case: str, repeats: int, backend: str) -> list[Row]:
    """The first and the second process, medians over several pairs of them."""
    pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            run = functools.partial(in_process, case, backend, cache)
            pairs.append((run(), run()))
    rows: list[Row] = []
    for index, process in enumerate(("first", "second")):
        row: Row = {"step": case, "process": process}
        for column, what in enumerate(("start", "call")):
            row[f"from {what} s"] = round(statistics.median(pair[index][column] for pair in pairs), 2)
            shares = [pair[index][column] / pair[0][column] for pair in pairs]
            row[f"of first, from {what}"] = round(statistics.median(shares), 3)
        rows.append(row)
    return rows


def main() -> None:
    parser = arguments(__doc__, blocks=0)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of processes (default %(default)s)")
    parser.add_argument("--case", choices=list(CASES), help="only this step, in this process: times as JSON")
    args = parse(parser)
    if args.case:
        print(json.dumps(first_step(args.case, args.backend)))
        return
    cases = list(CASES)[: 1 if args.short else None]
    rows = [row for case in cases for row in measure(case, 1 if args.short else args.repeats, args.backend)]
    save("compile_time", rows, args.out)


if __name__ == "__main__":
    main()
