"""Backends: compile a flat graph; the only module that calls Inductor.

Inductor's inner entry takes a graph of aten operations and gives a function of a list of tensors. It is private to
torch but has had this signature for years, and it is where the speed is: what torch's public ways add around it costs
240 us a call for 600 arguments (`standalone_compile`) or 450 (`torch.compile`, with guards), where this costs 18.
Should it change, `torch.compile` of the same graph takes its place.
"""

import contextlib
import copy
import functools
import importlib
import os
import pathlib
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch import Tensor, _guards, fx
from torch.fx.experimental.proxy_tensor import make_fx


__all__ = ["BACKENDS", "Compiled", "MODES", "compile_graph", "ensure_cache"]

Compiled: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]
"""A compiled graph. It may empty the list that it is given."""

BACKENDS = ("inductor", "eager")
MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def compile_graph(graph: fx.GraphModule, backend: str | Callable[..., Any], mode: str | None) -> Compiled:
    """Compile a graph whose placeholders carry fake tensors (`meta["val"]`).

    Args:
        graph: Pure but for `copy_` into placeholders.
        backend: `"inductor"`, `"eager"` (the graph as Python, for looking at what was traced), or anything that
            `torch.compile(backend=...)` takes.
        mode: As in `torch.compile`.

    Raises:
        RuntimeError: Inductor finds no C++ compiler.
    """
    is_empty = all(node.op in ("placeholder", "output") for node in graph.graph.nodes)
    if backend == "eager" or is_empty or not _placeholders(graph):
        return torch.no_grad()(lambda args: graph(*args))  # a constant in it may ask for a gradient
    if backend != "inductor":
        return _by_torch_compile(graph, backend, None)
    ensure_cache()
    try:
        with _compiler_wanted():
            return _by_inductor(graph, mode)
    except (ImportError, AttributeError, TypeError) as error:
        warnings.warn(
            f"Inductor's inner entry is not as it was in this torch ({torch.__version__}: {error}); steps go through "
            "torch.compile instead, which is right but slower to call",
            stacklevel=2,
        )
        return _by_torch_compile(graph, backend, mode)


@contextlib.contextmanager
def _compiler_wanted() -> Iterator[None]:
    """Replace torch's error for a missing C++ compiler."""
    try:
        yield
    except Exception as error:
        if "InvalidCxxCompiler" not in f"{type(error).__name__}: {error}":
            raise
        raise RuntimeError(
            "compile: backend='inductor' needs a C++ compiler, and found none that works: install g++ or clang++, or "
            "let CXX name one; or take backend='eager', which runs traced graphs uncompiled"
        ) from error


_INDUCTOR = tuple(f"torch._inductor{name}" for name in ("", ".compile_fx", ".decomposition", ".lowering", ".graph"))


@functools.cache
def _imports() -> Future[list[Any]]:
    """Inductor's modules, imported when first asked for: it takes seconds, and eager runs never need it.

    In a thread of its own, which no Ctrl-C reaches: its kernels write themselves into a table as they are imported, and
    an import that was broken off and begun again would leave the table without some of them.
    """
    pool = ThreadPoolExecutor(1)
    future = pool.submit(lambda: [importlib.import_module(name) for name in _INDUCTOR])
    pool.shutdown(wait=False)
    return future


def _by_inductor(graph: fx.GraphModule, mode: str | None) -> Compiled:
    inductor, inner, decomposition, *_ = _imports().result()
    decompositions = decomposition.select_decomp_table()
    options = dict(inductor.list_mode_options(mode)) if mode not in (None, "default") else {}
    options["triton.cudagraphs"] = False  # graphs are captured in a room of their own, around the whole call
    # Our key has compared sizes already.
    options |= {name: False for name in ("size_asserts", "alignment_asserts") if hasattr(inductor.config, name)}
    mode_of_fakes = _placeholders(graph)[0].meta["val"].fake_mode
    # Without a tracing context nothing would be kept on disk.
    context = _guards.tracing(_guards.TracingContext(mode_of_fakes))
    with inductor.config.patch(options), context, mode_of_fakes:
        graph = _functional(graph, decompositions)
        # What comes next reads each result by the strides that were traced. Inductor keeps those of results that it
        # is given; others it lays out as suits it, convolutions with the channels last.
        (output,) = graph.graph.find_nodes(op="output")
        output.meta["user_visible_output_idxs"] = [
            i for i, one in enumerate(output.args[0]) if isinstance(one, fx.Node)
        ]
        compiled = inner.compile_fx_inner(graph, [node.meta["val"] for node in _placeholders(graph)])
    return getattr(compiled, "current_callable", None) or compiled


def _by_torch_compile(graph: fx.GraphModule, backend: Any, mode: str | None) -> Compiled:
    graph, late = _without_lost_copies(graph)
    fn: Any = torch.compile(graph, backend=backend, mode=mode, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def call(args: list[Tensor]) -> Sequence[Tensor]:
        targets = [args[place] for place in late]
        results = fn(*args)
        end = len(results) - len(late)
        for target, value in zip(targets, results[end:], strict=True):
            target.copy_(value)
        return results[:end]

    return call if late else torch.no_grad()(lambda args: fn(*args))


def _without_lost_copies(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[int]]:
    """Return a graph that gives out, at its end, what it copied into 0-d float64 inputs, and the places of those
    inputs.

    `torch.compile` takes such a tensor of the host for a number, and drops what is written into it.
    """
    copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    lost = [node for node in copies if (to := node.args[0].meta["val"]).dim() == 0 and to.dtype == torch.float64]
    if not lost:
        return graph, []
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    nodes = {node.name: node for node in copied.graph.nodes}
    places = [node.name for node in _placeholders(graph)]
    (output,) = copied.graph.find_nodes(op="output")
    values = [nodes[node.args[1].name] for node in lost]
    output.args = ([*output.args[0], *values],)
    for node in lost:
        copied.graph.erase_node(nodes[node.name])
    copied.recompile()
    return copied, [places.index(node.args[0].name) for node in lost]


def _functional(graph: fx.GraphModule, decompositions: Any) -> fx.GraphModule:
    """Return the graph without in-place operations on its way, in the operations that Inductor knows.

    Decomposed first: batch norm writes into its running statistics without saying so, and only its parts do say.
    """
    fakes = [node.meta["val"] for node in _placeholders(graph)]
    options: dict[str, Any] = {
        "decomposition_table": decompositions,
        "tracing_mode": "symbolic",
        "_allow_non_fake_inputs": True,
    }
    decomposed = make_fx(graph, **options)(*fakes)
    return make_fx(torch.func.functionalize(decomposed), **options)(*fakes)


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return graph.graph.find_nodes(op="placeholder")


def ensure_cache() -> None:
    """Point Inductor's cache on disk to a folder of this user only, unless the environment names one.

    What is found there is run. The usual place is a fixed name under the shared temporary folder, where another user
    could have put something first. Entries are keyed by the graph and the versions of torch and compiler, and not by
    what Inductor is given about the results: that has a number in the folder's name.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base) / "purecompose" / f"torch-{torch.__version__}-2"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        warnings.warn(f"no cache folder at {folder} ({error}): compiled steps go to the temporary one", stacklevel=2)
        return
    is_ours = not hasattr(os, "getuid") or facts.st_uid == os.getuid()
    if not is_ours or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{folder} can be written to by others, and what lies there would be run: chmod 700 it, or set "
            "TORCHINDUCTOR_CACHE_DIR to a folder of your own"
        )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
