"""The GPU code that Inductor writes for a graph, with the figures of its kernels and checks of what it must not do."""

import math
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import _guards

from benchmarks.gpu_code.graphs import Graph
from benchmarks.gpu_code.peaks import peak_of
from benchmarks.gpu_code.pretend import find
from purecompose.transforms.compilation import backends


class Node(NamedTuple):
    """One launch of a kernel or call of a library."""

    name: str
    """Name of the kernel, or of the library's function."""
    num_bytes: int
    """Bytes read and written, each tensor once."""
    flops: int
    """Operations of matrix products and convolutions in it."""
    dtype: torch.dtype
    """Dtype of its first result, or of the first argument of a library call."""


class Code(NamedTuple):
    """The code of one graph."""

    source: str
    kernels: tuple[str, ...]
    """The names of the Triton kernels, in the order of their launches."""
    library_calls: tuple[str, ...]
    """The calls of cuBLAS and cuDNN."""
    fallbacks: tuple[str, ...]
    """The calls of torch's own kernels, such as attention."""
    nodes: tuple[Node, ...]
    peak: int
    """The peak of the memory beside parameters and batch, in bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes read and written by all kernels and calls."""
        return sum(node.num_bytes for node in self.nodes)

    @property
    def num_launches(self) -> int:
        """Number of kernels and calls."""
        return len(self.kernels) + len(self.library_calls) + len(self.fallbacks)


def code_of(graph: Graph) -> Code:
    """Return Inductor's code for a graph."""
    found: list[Code] = []

    def write(lowering: Any) -> Any:
        written, _ = lowering.codegen()
        found.append(_described(getattr(written, "value", written), lowering))
        raise _Written

    owner, config = find("torch._inductor.graph.GraphLowering"), find("torch._inductor.config")
    compile_to_module = owner.compile_to_module
    owner.compile_to_module = write
    try:
        with config.patch({"fx_graph_cache": False, "force_disable_caches": True}):
            _compile(graph)
    except _Written:
        pass
    finally:
        owner.compile_to_module = compile_to_module
    return found[0]


class _Written(BaseException):
    """Raised when the code is written, before it is compiled."""


def _compile(graph: Graph) -> None:
    if graph.is_ours:
        backends._by_inductor(graph.module, None)
        return
    fakes = [node.meta["val"] for node in graph.module.graph.find_nodes(op="placeholder")]
    mode = next(fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode"))
    with _guards.tracing(_guards.TracingContext(mode)), mode:
        find("torch._inductor.compile_fx.compile_fx_inner")(graph.module, fakes, is_backward=graph.is_backward)


def _described(source: str, lowering: Any) -> Code:
    from_call = source[source.index("def call(") :]
    calls = re.findall(r"^ +(?:\w+ = )?(extern_kernels\.\w+|torch\.ops\.[\w.]+|(\w+)\.run)\(", from_call, re.M)
    scheduler, local = lowering.scheduler, {*lowering.removed_buffers, *lowering.inplaced_to_remove}
    return Code(
        source,
        tuple(kernel for _, kernel in calls if kernel),
        tuple(name for name, _ in calls if name.startswith("extern_kernels.")),
        tuple(name for name, _ in calls if name.startswith("torch.ops.")),
        tuple(_node(node, local) for node in scheduler.nodes),
        peak_of(source, lambda name: _size(name, lowering)),
    )


def _size(name: str, lowering: Any) -> int:
    """Return the bytes of a buffer or an input, 0 for other names and for several results together."""
    buffer = lowering.try_get_buffer(name)
    layout: Any = buffer.maybe_get_layout() if buffer is not None else None
    if layout is None or not hasattr(layout, "size"):
        return 0
    return math.prod(map(int, layout.size)) * layout.dtype.itemsize


def _node(node: Any, local: Collection[str]) -> Node:
    # Inductor also counts buffers that stay in registers, and those that must only be read before this node writes.
    weak = find("torch._inductor.dependencies.WeakDep")
    real = {dep.name for dep in node.read_writes.reads | node.read_writes.writes if not isinstance(dep, weak)}
    accesses = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    num_bytes = sum(size for name, size in accesses.items() if name in real and name not in local)
    operation = node.get_nodes()[0].node
    if not node.is_extern():
        origins = (getattr(part.node, "origin_node", None) for part in node.get_nodes())
        name = " ".join(dict.fromkeys(origin.name for origin in origins if origin is not None))
        return Node(name or node.get_name(), num_bytes, 0, operation.get_dtype())
    name = getattr(operation, "python_kernel_name", None) or type(operation).__name__
    found = (value.maybe_get_dtype() for value in (*operation.inputs, operation) if hasattr(value, "maybe_get_dtype"))
    dtype = next((dtype for dtype in found if dtype is not None), torch.float32)
    return Node(name, num_bytes, int(node.estimate_flops() or 0), dtype)
