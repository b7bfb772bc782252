"""What the tasks of this folder have in common: runs in processes of their own, kept records, tuning.

A task trains one network to a target by several sides, such as "baseline", a loop in plain PyTorch, and "recipe". A run
is one side with one seed in one precision; it has a process of its own, which begins without compiled code on disk. The
record of a complete run is one line of `results/quality/<task>.jsonl`, with all settings, and runs that have a record
are not repeated. Runs for tuning use other seeds and are recorded in `<task>_tuning.jsonl`.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


sys.path.append(str(pathlib.Path(__file__).parents[1]))

from _curve import Curve, Point
from _timing import RESULTS, facts


RECORDS = RESULTS / "quality"
TUNING_SEEDS = 1000
"""Seeds of tuning begin here, so that no reported run has been chosen by its own result."""

Settings = Mapping[str, Any]


class Side(NamedTuple):
    """One way to train."""

    train: Callable[[int, Curve, Settings], int]
    """Train with a seed and settings, and draw the curve. Returns the network's number of parameters."""
    settings: Settings
    """The settings of the runs to report, but for the precision."""


@dataclass(frozen=True)
class Task:
    """A data set, a network, a target, and the sides that train to it."""

    name: str
    title: str
    metric: str
    target: float
    shown: tuple[float, float]
    """The range of the metric in pictures."""
    sides: Mapping[str, Side]
    tuning: Mapping[str, Sequence[Settings]]
    """For each side, the settings to try; what they leave out is as in the runs to report."""
    is_lower_better: bool = False
    num_seeds: int = 5
    num_tuning_seeds: int = 1
    precisions: tuple[str, ...] = ("bf16", "fp32")
    """The fastest first."""

    def reached(self, points: Sequence[Point]) -> Point | None:
        """Return the first point at which the target is reached."""
        sign = -1 if self.is_lower_better else 1
        return next((point for point in points if sign * point.value >= sign * self.target), None)

    def settings(self, side: str, precision: str, **other: Any) -> Settings:
        """Return the settings of a side's runs in this precision; `other` settings override its own."""
        return {"precision": precision, **self.sides[side].settings, **other}


def run(task: Task, text: str | None, name: str | None = None) -> None:
    """The command line of a task: train what has no record yet.

    Args:
        task: The task.
        text: The script's docstring.
        name: The first argument of the command line, by which a script with several tasks chose this one.
    """
    own = [] if name is None else [name]
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--side", action="append", choices=list(task.sides), help="only this side; repeatable")
    parser.add_argument("--precision", action="append", choices=("fp32", "bf16"), help="only this one; repeatable")
    parser.add_argument("--seeds", type=int, default=task.num_seeds, help="number of seeds (default %(default)s)")
    parser.add_argument("--tune", action="store_true", help="train with the settings to choose from, with other seeds")
    parser.add_argument("--set", default="{}", metavar="JSON", help="settings of one run, which is only printed")
    parser.add_argument("--short", action="store_true", help="a few batches, to see that it runs: recorded nowhere")
    parser.add_argument("--records", type=pathlib.Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--one", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args(sys.argv[1 + len(own) :])
    if args.one is not None:
        print(json.dumps(_in_this_process(task, **json.loads(args.one))), flush=True)
        return
    sides, precisions = args.side or list(task.sides), args.precision or task.precisions
    if args.short or args.set != "{}":
        settings = {**json.loads(args.set), **({"short": True} if args.short else {})}
        for side in sides:
            _tell(task, in_process(side, TUNING_SEEDS, task.settings(side, precisions[0], **settings), *own))
        return
    wanted = _to_tune(task, sides, precisions) if args.tune else _to_report(task, sides, precisions, args.seeds)
    path = args.records / (f"{task.name}_tuning.jsonl" if args.tune else f"{task.name}.jsonl")
    done = [(r["side"], r["seed"], r["settings"]) for r in records(path)]
    for one in wanted:
        if one not in done:
            record = in_process(*one, *own)
            args.records.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            _tell(task, record)


def data_file(name: str) -> pathlib.Path:
    """Return the path of a data file, in the folder that the environment variable PURECOMPOSE_DATA names."""
    folder = os.environ.get("PURECOMPOSE_DATA")
    if folder is None:
        raise SystemExit(f"set PURECOMPOSE_DATA to the folder that contains {name}")
    return pathlib.Path(folder, name)


def records(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the records of a file, with their points; none if there is no file."""
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{**record, "points": [Point(*point) for point in record["points"]]} for record in found]


Run = tuple[str, int, Settings]


def _to_report(task: Task, sides: Sequence[str], precisions: Sequence[str], num_seeds: int) -> Iterator[Run]:
    """Yield side, seed and settings of the runs to report; the sides take turns, so that drift affects all alike."""
    for seed in range(num_seeds):
        for precision in precisions:
            for side in sides if seed % 2 else reversed(sides):
                yield side, seed, task.settings(side, precision)


def _to_tune(task: Task, sides: Sequence[str], precisions: Sequence[str]) -> Iterator[Run]:
    for side in sides:
        for settings in task.tuning[side]:
            for seed in range(TUNING_SEEDS, TUNING_SEEDS + task.num_tuning_seeds):
                yield side, seed, task.settings(side, precisions[0], **settings)


def in_process(side: str, seed: int, settings: Settings, *own: str) -> dict[str, Any]:
    """Return the record of a run in a new process, with an empty cache of compiled code.

    `own` are the first arguments of the script's command line, before its options.
    """
    one = json.dumps({"side": side, "seed": seed, "settings": settings})
    command = [sys.executable, str(pathlib.Path(sys.argv[0]).resolve()), *own, "--one", one]
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _in_this_process(task: Task, side: str, seed: int, settings: Settings) -> dict[str, Any]:
    torch.set_num_threads(1)
    curve = Curve()
    num_params = task.sides[side].train(seed, curve, settings)
    return {
        "side": side,
        "seed": seed,
        "settings": settings,
        "num_params": num_params,
        **facts(),
        "commit": commit(),
        "points": [[point.batch, *(round(value, 5) for value in point[1:])] for point in curve.points],
    }


def commit() -> str:
    """Return the commit of the checkout, with a mark if files other than results have been changed."""

    def git(*args: str) -> str:
        call = ["git", "-C", str(RESULTS.parent), *args]
        return subprocess.run(call, capture_output=True, text=True).stdout.strip()

    is_changed = bool(git("status", "--porcelain", "--", ":/", ":(exclude,top)benchmarks/results"))
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + "-dirty" * is_changed


def _tell(task: Task, record: dict[str, Any]) -> None:
    points = [Point(*point) for point in record["points"]]
    own = task.sides[record["side"]].settings
    other = {name: value for name, value in record["settings"].items() if name not in own or value != own[name]}
    reached, last = task.reached(points), points[-1]
    when = (
        "target not reached" if reached is None else f"{task.target:g} after {reached.batch} batches, {_time(reached)}"
    )
    end = f"at the end {task.metric} {last.value:.4f} after {last.batch} batches, {_time(last)}"
    print(f"{record['side']} {other} seed {record['seed']}: {when}; {end}", flush=True)


def _time(point: Point) -> str:
    return f"{point.seconds - point.compiling:.1f} s and {point.compiling:.1f} s of compilation"
