"""Paired timing: two or more functions in alternating blocks of one process, so that drift hits all alike."""

import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable

import torch


RESULTS = pathlib.Path(__file__).parent / "results"


def paired(fns: dict[str, Callable[[], object]], *, calls: int, blocks: int) -> dict[str, list[float]]:
    """Seconds per call of each function, one number a block; the functions take turns block by block."""
    for fn in fns.values():  # both sides warm before anything counts
        for _ in range(max(3, calls // 4)):
            fn()
    seconds: dict[str, list[float]] = {name: [] for name in fns}
    for block in range(blocks):
        names = list(fns) if block % 2 else list(reversed(fns))
        for name in names:
            fn = fns[name]
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """The median of the block-by-block ratios, and their quartiles."""
    ratios = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return low, middle, high


def median_us(values: list[float]) -> float:
    """The median in microseconds."""
    return statistics.median(values) * 1e6


def save(question: str, rows: list[dict[str, object]]) -> None:
    """Writes results with versions and hardware, and prints them as a table."""
    head = list(rows[0])
    widths = [max(len(str(row[key])) for row in [dict(zip(head, head, strict=True)), *rows]) for key in head]
    for row in [dict(zip(head, head, strict=True)), *rows]:
        print("  ".join(str(row[key]).ljust(width) for key, width in zip(head, widths, strict=True)).rstrip())
    RESULTS.mkdir(exist_ok=True)
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    (RESULTS / f"{question}.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
