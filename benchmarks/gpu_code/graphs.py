"""The flat graphs of training steps, on fake tensors of a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

import purecompose as pc
from benchmarks.gpu_code.pretend import CUDA
from purecompose import State, Step
from purecompose._support.device import arithmetic
from purecompose.transforms.compilation import building
from purecompose.transforms.compilation.backends import Compiled
from purecompose.transforms.compilation.capture import Captured
from purecompose.transforms.signature import FIELDS, Boundary, Signature


class Graph(NamedTuple):
    """A graph for Inductor; its placeholders carry fake tensors on `cuda:0`."""

    name: str
    module: fx.GraphModule
    is_ours: bool
    """True if our backend passes it to Inductor, False if `torch.compile` would."""
    is_backward: bool = False
    held: int = 0
    """Bytes that the loop keeps for later while the graph runs, beside parameters, optimizer and averages."""


@contextlib.contextmanager
def compiling_for_gpu(compile_: Callable[[fx.GraphModule], Compiled]) -> Iterator[None]:
    """Return a scope in which parts of compiled steps are traced as if on `cuda:0`, and compiled by a function."""
    capture, compile_graph = building.capture, building.compile_graph

    def captured(body: Any, boundary: Boundary, *args: Any, **kwargs: Any) -> Captured:
        found, device = capture(body, _on_device(boundary, CUDA), *args, **kwargs), boundary.device
        reads = {name: on_device(signature, device) for name, signature in found.reads.items()}
        writes = {name: (on_device(signature, device), where) for name, (signature, where) in found.writes.items()}
        return found._replace(reads=reads, writes=writes)

    def compiled(graph: fx.GraphModule, backend: Any, mode: Any) -> Compiled:
        del backend, mode
        is_empty = all(node.op in ("placeholder", "output") for node in graph.graph.nodes)
        return compile_graph(graph, "eager", None) if is_empty else compile_(graph)

    building.capture, building.compile_graph = captured, compiled
    try:
        yield
    finally:
        building.capture, building.compile_graph = capture, compile_graph


def graphs_of(step: Step, state: State, batch: Any) -> list[Graph]:
    """Return the graphs of a compiled step for Inductor, as if state and batch were on `cuda:0`.

    The step's own planning makes them, up to the first host algorithm; nothing is compiled or run. A graph that is
    called for each of several slices of the batch is there once.
    """
    prepared = step.prepare(state, batch)
    start = prepared.start()
    signatures = {name: on_device(Signature.of(getattr(start, name))[0], CUDA) for name in FIELDS}
    found: list[Graph] = []

    def keep(graph: fx.GraphModule) -> Compiled:
        found.append(Graph(f"part {len(found)}", graph, True))
        return lambda args: []

    with compiling_for_gpu(keep), arithmetic(state.context.precision, CUDA):
        pc.compile(step, quiet=True)._graphs.plan(
            Boundary.start(start.static, signatures, is_donated=True), prepared.bits
        )
    return found


def on_device(signature: Signature, device: torch.device) -> Signature:
    """Return the signature of the same value on a device."""
    return signature.with_specs(spec._replace(device=device) for spec in signature.specs)


def _on_device(boundary: Boundary, device: torch.device) -> Boundary:
    signatures = {name: on_device(signature, device) for name, signature in boundary.signatures.items()}
    donated = boundary.donated and {name: on_device(one, device) for name, one in boundary.donated.items()}
    return replace(boundary, signatures=signatures, donated=donated)
