"""What the scripts about searches have in common: runs in processes of their own, kept records, the command line.

A run is one side with one seed and settings; it has a process of its own, which begins without compiled code on disk.
Its record is one line of `results/quality/<name>.jsonl`, and is not computed again.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch
from _task import RECORDS, TUNING_SEEDS, Settings, commit, data_file, in_process
from _timing import RESULTS, Row, facts, quartiles, save

import purecompose as pc


Record = Mapping[str, Any]


class Side(NamedTuple):
    """One way to search."""

    run: Callable[[int, Settings], dict[str, Any]]
    """Search with a seed and settings, and return the results."""
    settings: Settings


@dataclass(frozen=True)
class Search:
    """Sides that search for the same."""

    name: str
    sides: Mapping[str, Side]
    rows: Callable[[Sequence[Record]], list[Row]]
    """Return the table of records."""
    reported: Sequence[str]
    """The results to print after a run."""
    short: Settings
    """What `--short` changes in the settings of all sides."""
    cases: Sequence[tuple[Settings, int]] = (({}, 5),)
    """Settings of a task, and with how many seeds all sides are run on it."""
    tuning: Mapping[str, Sequence[Settings]] = field(default_factory=dict)


def seconds() -> float:
    """Return the processor time of this process and of the compilers that it has started."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@functools.cache
def images(is_short: bool) -> tuple[pc.data.ImageData, pc.data.Split]:
    """Return MNIST, or with `is_short` the digits, and its training images with some held out."""
    found = pc.data.load("digits" if is_short else data_file("mnist.npz"))
    return found, pc.data.split(found.train_inputs, found.train_targets, 300 if is_short else 5000, seed=0)


def run(search: Search, text: str | None) -> None:
    """The command line of a search: run what has no record yet, and save the table.

    Args:
        search: The search.
        text: The script's docstring.
    """
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--side", action="append", choices=list(search.sides), help="only this side; repeatable")
    parser.add_argument("--seeds", type=int, default=5, help="at most so many (default %(default)s)")
    parser.add_argument("--tune", action="store_true", help="the settings to choose from, with another seed")
    parser.add_argument("--backend", default="inductor", help="what compiles with --short (default %(default)s)")
    parser.add_argument("--short", action="store_true", help="a few batches of small images, to see that it runs")
    parser.add_argument("--records", type=pathlib.Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the JSON (default: results/, or none)")
    parser.add_argument("--one", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sides = args.side or list(search.sides)
    if args.one is not None:
        print(json.dumps(record(search, **json.loads(args.one))), flush=True)
        return
    if args.short:
        changed = {**search.short, "short": True, "backend": args.backend}
        found = [record(search, side, 0, {**search.sides[side].settings, **changed}) for side in sides]
    elif args.tune:
        wanted = [(side, TUNING_SEEDS, settings) for side in sides for settings in search.tuning.get(side, [])]
        recorded(search, wanted, args.records / f"{search.name}_tuning.jsonl")
        return
    else:
        found = recorded(search, to_report(search, sides, args.seeds), args.records / f"{search.name}.jsonl")
    is_kept = not args.short and args.side is None
    save(f"quality_{search.name}", search.rows(found), args.out or (RESULTS if is_kept else None))


Run = tuple[str, int, Settings]


def to_report(search: Search, sides: Sequence[str], most_seeds: int) -> list[Run]:
    """Return side, seed and settings of the runs to report; every second seed goes backwards through the sides."""
    return [
        (side, seed, case)
        for case, num_seeds in search.cases
        for seed in range(min(num_seeds, most_seeds))
        for side in (sides if seed % 2 == 0 else reversed(sides))
    ]


def recorded(search: Search, wanted: Sequence[Run], path: pathlib.Path) -> list[Record]:
    """Return the records of runs, and run those that have none; the settings change those of the side."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # so that each run waits for its compilers, and counts their time
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found: list[Record] = []
    for side, seed, changed in wanted:
        one = {"side": side, "seed": seed, "settings": {**search.sides[side].settings, **changed}}
        made = next((record for record in kept if {name: record[name] for name in one} == one), None)
        if made is None:
            made = in_process(**one)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(made) + "\n")
            print(side, seed, changed, {name: made[name] for name in search.reported}, flush=True)
        found.append(made)
    return found


def record(search: Search, side: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Return the record of a run in this process."""
    torch.set_num_threads(1)
    result = search.sides[side].run(seed, settings)
    return {"side": side, "seed": seed, "settings": settings, **result, **facts(), "commit": commit()}


def mean(values: Sequence[float], digits: int) -> str:
    """Return the mean, with the least and the greatest value in brackets."""
    shown = [f"{one:.{digits}f}" for one in (fmean(values), min(values), max(values))]
    return shown[0] if len(values) < 2 else f"{shown[0]} ({shown[1]} to {shown[2]})"


def ratio(values: Mapping[int, float], base: Mapping[int, float]) -> str:
    """Return the median of the ratios of paired seeds, with quartiles, or of how many seeds there is a finite one."""
    ratios = [values[seed] / base[seed] for seed in values if seed in base]
    if (num := sum(map(math.isfinite, ratios))) < len(ratios):
        return f"reached by {num} of {len(ratios)}"
    if len(ratios) < 2:
        return "".join(f"{one:.2f}" for one in ratios)
    low, middle, high = quartiles(ratios)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
