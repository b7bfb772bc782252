"""A table of the code of steps, ours and by hand: kernels, calls, bytes, peaks, and predicted times."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu_code import by_hand
from benchmarks.gpu_code.cases import build, ours
from benchmarks.gpu_code.devices import DEVICES
from benchmarks.gpu_code.graphs import Graph, graphs_of
from benchmarks.gpu_code.rules import host_work
from benchmarks.gpu_code.timing import times
from benchmarks.gpu_code.writing import Code, code_of


Row = dict[str, Any]
MIB = 2**20


def row_of(network: str, methods: str, side: str, codes: Sequence[Code]) -> Row:
    """Return the figures of a step whose graphs run one after the other."""
    row: Row = {
        "network": network,
        "methods": methods,
        "side": side,
        "kernels": sum(len(code.kernels) for code in codes),
        "calls": sum(len(code.library_calls) + len(code.fallbacks) for code in codes),
        "MiB": round(sum(code.num_bytes for code in codes) / MIB, 1),
        "peak MiB": round(max(code.peak for code in codes) / MIB, 1),
    }
    for name, device in DEVICES.items():
        found = times(codes, device)
        row[f"{name} ms"] = f"{found.without_graphs * 1e3:.3f} / {found.with_graphs * 1e3:.3f}"
    return row


def table(rows: Iterable[Row]) -> str:
    """Return the rows, which have the same keys, as a table in Markdown."""
    rows = list(rows)
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *[[str(row[key]) for key in head] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_of(network: str, methods: str) -> list[Row]:
    """Return the row of our step, and that of the loop by hand if it is written for these methods."""
    rows = [row_of(network, methods, "ours", codes_of(network, methods))]
    if methods in by_hand.METHODS:
        codes = _codes(by_hand.graphs_by_hand(build(network), methods))
        rows.append(row_of(network, methods, "by hand", codes))
    return rows


def codes_of(network: str, methods: str) -> list[Code]:
    """Return the code of our step."""
    case = build(network)
    return _codes(graphs_of(*ours(case, methods), case.batch))


def _codes(graphs: Iterable[Graph]) -> list[Code]:
    """Return the code of each graph, written once for one that is called several times."""
    codes: dict[int, Code] = {}
    graphs = list(graphs)
    for graph in graphs:
        if id(graph.module) not in codes:
            codes[id(graph.module)] = code_of(graph)
            for one in host_work(codes[id(graph.module)], graph.module):
                print(f"{graph.name}: {one}", file=sys.stderr)
    found = [codes[id(graph.module)] for graph in graphs]
    return [code._replace(peak=code.peak + graph.held) for code, graph in zip(found, graphs, strict=True)]
