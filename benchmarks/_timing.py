"""Paired timing: two or more functions in alternating blocks of one process, so that drift hits all alike.

Also what every script has in common: its arguments, the quartiles of a ratio, the table and the JSON file.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib import metadata

import torch


RESULTS = pathlib.Path(__file__).parent / "results"

Row = dict[str, object]


def arguments(text: str | None, *, blocks: int, calls: int = 50) -> argparse.ArgumentParser:
    """What every script takes; `text` is its docstring, of which the first line is printed.

    Args:
        text: The script's docstring.
        blocks: How many blocks each side has, where the command line does not say.
        calls: How many steps make a block.
    """
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=blocks, help="blocks of steps a side (default %(default)s)")
    parser.add_argument("--calls", type=int, default=calls, help="steps a block (default %(default)s)")
    parser.add_argument("--backend", default="inductor", help="what compiles; eager only traces (default %(default)s)")
    parser.add_argument("--short", action="store_true", help="a few steps, to see that it runs: no figures to quote")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the JSON (default: results/, with --short none)")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; `--short` means three blocks of two steps, written nowhere unless `--out` says where."""
    args = parser.parse_args()
    if args.short:
        args.blocks, args.calls = 3, 2
    elif args.out is None:
        args.out = RESULTS
    return args


def paired(
    fns: Mapping[str, Callable[[], object]], *, calls: int, blocks: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds per call of each function, one number a block; the functions take turns block by block.

    `clock=time.process_time` leaves out the time of other processes; for functions that only compute, on one thread.
    """
    for fn in fns.values():  # both sides warm before anything counts
        for _ in range(max(3, calls // 4)):
            fn()

    def block(name: str) -> float:
        fn, start = fns[name], clock()
        for _ in range(calls):
            fn()
        return (clock() - start) / calls

    return in_turn(list(fns), block, blocks)


def in_turn(names: list[str], block: Callable[[str], float], blocks: int) -> dict[str, list[float]]:
    """`block(name)` for each name and block; every second round goes backwards."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(blocks):
        for name in names if number % 2 else reversed(names):
            found[name].append(block(name))
    return found


def ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """The median of the block-by-block ratios between their quartiles: (low, median, high)."""
    return quartiles([a / b for a, b in zip(seconds[name], seconds[base], strict=True)])


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile), as by `statistics.quantiles`, but of two values not beyond them.

    Values may be infinite.
    """
    ordered, num = sorted(values), len(values)

    def cut(quarter: int) -> float:
        place = min(max(quarter * (num + 1) // 4, 1), num - 1)
        share = min(max(quarter * (num + 1) / 4 - place, 0), 1)
        below, above = ordered[place - 1 : place + 1]
        return below + share * (above - below) if share and below < above else below  # 0 * inf would be NaN

    return cut(1), cut(2), cut(3)


def against(seconds: Mapping[str, list[float]], name: str, base: str) -> Row:
    """Two columns: the ratio of medians block by block, and its quartiles."""
    low, middle, high = ratio(seconds, name, base)
    return {f"of {base}": round(middle, 3), "quartiles": f"{low:.3f} {high:.3f}"}


def median_us(values: list[float]) -> float:
    """The median in microseconds."""
    return statistics.median(values) * 1e6


def facts(*packages: str) -> Row:
    """Versions and hardware: of Python, torch and these packages, of the processor and the card."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def table(rows: list[Row]) -> str:
    """The rows as lines of text; the columns are those of the first row, in its order."""
    head = list(rows[0])
    lines = [head, *[[str(row.get(key, "")) for key in head] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def save(question: str, rows: list[Row], folder: pathlib.Path | None = RESULTS, *packages: str) -> None:
    """Prints the rows, and writes them with versions and hardware to `<folder>/<question>.json`.

    Args:
        question: The script's name.
        rows: The results, all with the keys of the first.
        folder: Where to; `None` only prints.
        packages: Whose versions belong to the result.
    """
    print(table(rows))
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{question}.json").write_text(json.dumps({**facts(*packages), "rows": rows}, indent=1) + "\n")


def _processor() -> str:
    """The processor's name, as far as the system tells."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
