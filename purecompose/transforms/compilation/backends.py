"""Backends, which compile a flat graph, and the options of `compile`.

Inductor's inner entry takes a graph of aten operations and returns a function of a list of tensors. It is private to
torch, but has had this signature for years and is much faster to call: a call with 600 arguments costs 18 us, against
240 us with the public `standalone_compile` and 450 us with `torch.compile`, which checks guards. If the inner entry
changes, `torch.compile` of the same graph is used instead.
"""

import contextlib
import copy
import functools
import hashlib
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, _guards, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, can_auto_functionalize
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._pytree import tree_leaves

from purecompose._support.device import keep_freed_memory, return_freed_memory
from purecompose._support.specs import check_flag, check_whole, shown
from purecompose.combinations import unsupported
from purecompose.core.compose import Step
from purecompose.core.program import events_in
from purecompose.errors import TraceError
from purecompose.time.predicates import NEVER
from purecompose.transforms.compilation import gpu
from purecompose.transforms.compilation.capture import FALLBACK_ADVICE
from purecompose.transforms.compilation.gpu import (
    Compiled,
    draw_in_kernels,
    fusing_near,
    fusing_within_lists,
    recompute_signs,
    storing_by_bytes,
)
from purecompose.transforms.compilation.inductor import inductor_for
from purecompose.transforms.compilation.rewriting import (
    DECOMPOSITIONS,
    accumulate_rows,
    open_draws,
    replace_draws,
    with_channels_last,
)
from purecompose.transforms.compilation.updates import UPDATES, look_up_rows, update_in_place, write_early


BACKENDS = ("inductor", "eager")
_COMBINING = {"combo_kernels": True, "combo_kernel_peak_memory_pct_threshold": 0.0}
MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def compile_graph(graph: fx.GraphModule, backend: str | Callable[..., Any], mode: str | None) -> Compiled:
    """Compile a graph with fake tensors in its placeholders, pure except for `copy_` into placeholders."""
    look_up_rows(graph)
    is_empty = all(node.op in ("placeholder", "output") for node in graph.graph.nodes)
    if backend == "eager" or is_empty or not _placeholders(graph):
        update_in_place(graph)
        write_early(graph)
        return torch.no_grad()(lambda args: graph(*args))  # a constant in the graph may require a gradient
    if backend != "inductor":
        return _by_torch_compile(graph, backend, None)
    try:
        with _explained():
            compiled = _by_inductor(graph, mode)
    except (ImportError, AttributeError, TypeError) as error:
        warnings.warn(
            f"Inductor's inner entry is not as it was in this torch ({torch.__version__}: {error}); steps go through "
            "torch.compile instead, which is right but slower to call",
            stacklevel=2,
        )
        return _by_torch_compile(graph, backend, "max-autotune-no-cudagraphs" if "autotune" in str(mode) else None)
    return_freed_memory()  # of the compiler
    keep_freed_memory()  # of steps
    return compiled


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Return a scope that replaces Inductor's own errors; those of a changed interface pass unchanged."""
    try:
        yield
    except Exception as error:
        # Inductor wraps errors that were raised while it lowers a graph.
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, (ImportError, AttributeError, TypeError, OSError)):
            raise inner from error
        cause = f"{type(error).__name__}: {error}"
        if "InvalidCxxCompiler" in cause:
            raise RuntimeError(
                "compile: backend='inductor' needs a C++ compiler, and found none that works: install g++ or clang++, "
                "or let CXX name one; or take backend='eager', which runs traced graphs uncompiled"
            ) from error
        raise TraceError(
            f"a step was traced, and Inductor failed to compile it ({cause.splitlines()[0]}). Run it with "
            f"compile(step, backend='eager'), which leaves Inductor out{FALLBACK_ADVICE}"
        ) from error


def _by_inductor(graph: fx.GraphModule, mode: str | None) -> Compiled:
    device = _placeholders(graph)[0].meta["val"].device
    inductor, is_gpu = inductor_for(device), device.type == "cuda"
    config = inductor.package.config
    decompositions = {**inductor.decomposition.select_decomp_table(), **DECOMPOSITIONS}
    options = dict(inductor.package.list_mode_options(mode)) if mode not in (None, "default") else {}
    options["triton.cudagraphs"] = False  # CUDA graphs are captured around the whole call, by `Replay`
    is_fixed = all(type(size) is int for node in _placeholders(graph) for size in node.meta["val"].shape)
    if is_gpu and is_fixed and all(hasattr(config, name) for name in _COMBINING):
        options |= _COMBINING  # kernels that need not wait for each other are one, unless that takes more memory
    # The look-up key has compared sizes already.
    options |= {name: False for name in ("size_asserts", "alignment_asserts") if hasattr(config, name)}
    mode_of_fakes = _placeholders(graph)[0].meta["val"].fake_mode
    # Without a tracing context nothing would be kept on disk.
    context = _guards.tracing(_guards.TracingContext(mode_of_fakes))
    with contextlib.ExitStack() as stack:
        for scope in (config.patch(options), _tagged_cache(), context, mode_of_fakes):
            stack.enter_context(scope)
        if is_gpu:
            stack.enter_context(storing_by_bytes(inductor.ir, inductor.virtualized.V))
            stack.enter_context(fusing_within_lists(inductor.scheduler))
            stack.enter_context(fusing_near(inductor.scheduler))
        graph = _functional(graph, decompositions | open_draws(graph))
        replace_draws(graph, decompositions)
        accumulate_rows(graph)
        if is_gpu:
            draw_in_kernels(graph, inductor)
            if is_fixed:  # it compares sizes
                recompute_signs(graph)
        update_in_place(graph)
        # Inductor keeps its copies at the end, and most of the order of operations that it does not compile.
        write_early(graph, UPDATES)
        if inductor.graph.GraphLowering.decide_layout_opt(graph, is_inference=False):
            graph = with_channels_last(graph)
        # The code after the graph reads each result by its traced strides. Inductor keeps the strides of the results
        # listed here; it chooses the layout of others, such as channels last for convolutions.
        (output,) = graph.graph.find_nodes(op="output")
        output.meta["user_visible_output_idxs"] = [
            i for i, one in enumerate(output.args[0]) if isinstance(one, fx.Node)
        ]
        compiled = inductor.compile_fx.compile_fx_inner(graph, [node.meta["val"] for node in _placeholders(graph)])
    return getattr(compiled, "current_callable", None) or compiled


def _tagged_cache() -> contextlib.AbstractContextManager[None]:
    """Return a scope in which the keys of Inductor's cache also stand for what is done here beside the graph."""
    config = importlib.import_module("torch.compiler.config")
    return config.patch(cache_key_tag=f"{config.cache_key_tag} {_tag()}")


@functools.cache
def _tag() -> str:
    modules = (sys.modules[__name__], gpu)
    return hashlib.sha256("".join(map(inspect.getsource, modules)).encode()).hexdigest()


def _by_torch_compile(graph: fx.GraphModule, backend: Any, mode: str | None) -> Compiled:
    graph, late = _returning(graph, [node for node in _copies(graph) if _is_lost(node)])
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


def _copies(graph: fx.GraphModule) -> list[Any]:
    """Return the nodes that copy into placeholders."""
    copies: list[Any] = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return [node for node in copies if node.args[0].op == "placeholder"]


def _is_lost(node: Any) -> bool:
    """Return whether a copy is into a 0-d float64 input.

    `torch.compile` treats such a tensor on the host as a number, and drops what is written into it.
    """
    target = node.args[0].meta["val"]
    return target.dim() == 0 and target.dtype == torch.float64


def _returning(graph: fx.GraphModule, copies: list[Any]) -> tuple[fx.GraphModule, list[int]]:
    """Return a graph that returns the values of some copies, after its results, instead of copying them.

    Also returns the places of the inputs they are copied into.
    """
    if not copies:
        return graph, []
    changed = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    nodes = {node.name: node for node in changed.graph.nodes}
    places = {node.name: place for place, node in enumerate(_placeholders(graph))}
    (output,) = changed.graph.find_nodes(op="output")
    output.args = ([*output.args[0], *(nodes[node.args[1].name] for node in copies)],)
    for node in copies:
        changed.graph.erase_node(nodes[node.name])
    changed.recompile()
    return changed, [places[node.args[0].name] for node in copies]


def _functional(graph: fx.GraphModule, decompositions: Any) -> fx.GraphModule:
    """Return the graph in operations that Inductor supports; only copies into placeholders, at its end, are in place.

    The graph is decomposed first: batch norm writes into its running statistics without declaring it in its schema, but
    the operations it is decomposed into declare their writes.
    """
    fakes = [node.meta["val"] for node in _placeholders(graph)]
    options: dict[str, Any] = {
        "decomposition_table": decompositions,
        "tracing_mode": "symbolic",
        "_allow_non_fake_inputs": True,
    }
    graph, targets = _returning(graph, _copies(graph))
    decomposed = make_fx(_AsTraced(graph).run, **options)(*fakes)
    functional = make_fx(torch.func.functionalize(decomposed), **options)(*fakes)
    (output,) = functional.graph.find_nodes(op="output")
    results = output.args[0]
    end = len(results) - len(targets)
    inputs = _placeholders(functional)
    with functional.graph.inserting_before(output):
        for target, value in zip(targets, results[end:], strict=True):
            functional.graph.call_function(torch.ops.aten.copy_.default, (inputs[target], value))
    output.args = (results[:end],)
    return functional


class _AsTraced(fx.Interpreter):
    """An interpreter whose results have the dtypes and strides that were traced, which later operations rely on.

    A decomposition may return another dtype than the kernel (the gradient of a softmax from bfloat16 to float32, torch
    2.14), or other strides (`cat` of one tensor that is not empty, torch 2.13). Custom operators that write into
    arguments run on copies, which are copied back: `functionalize` rejects them.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not can_auto_functionalize(target) or any(result.alias_info for result in target._schema.returns):
            return super().call_function(target, args, kwargs)
        parameters = target._schema.arguments
        names = [p.name for p in parameters]
        given = {p.name: p.default_value for p in parameters} | dict(zip(names, args, strict=False)) | kwargs
        olds = [given[p.name] for p in parameters if p.alias_info is not None and p.alias_info.is_write]
        results: Any = auto_functionalized(target, **given)
        for old, new in zip(tree_leaves(olds), tree_leaves(results[-len(olds) :]), strict=True):
            if new is not None:  # an optional argument
                old.copy_(new)
        own = results[: -len(olds)]
        return own if len(own) > 1 else own[0]

    def run_node(self, n: fx.Node) -> Any:
        result, traced = super().run_node(n), n.meta.get("val")
        if not isinstance(result, Tensor) or not isinstance(traced, Tensor):
            return result
        result = result.to(traced.dtype)
        with disable_proxy_modes_tracing():  # a comparison of open sizes is not an operation of the graph
            is_same = result.stride() == traced.stride()
        if not is_same:
            return result.new_empty_strided(traced.shape, traced.stride()).copy_(result)
        return result


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return graph.graph.find_nodes(op="placeholder")


@dataclass(frozen=True)
class Options:
    """Options for compiling a step; see `purecompose.compile`."""

    donate: bool
    backend: str | Callable[..., Any]
    mode: str | None
    fallback: bool
    eager_below: int
    dynamic: bool | Literal["all"]
    max_variants: int
    quiet: bool

    def checked(self, step: Step) -> "Options":
        """Return the options if they are valid for a step, or raise."""
        _check_backend(self.backend, self.mode)
        for name in ("donate", "fallback", "quiet"):
            check_flag(getattr(self, name), f"compile: {name}")
        if not isinstance(self.dynamic, bool) and self.dynamic != "all":
            raise TypeError(f"compile: dynamic: expected True, False or 'all', got {shown(self.dynamic)}")
        check_whole(self.max_variants, "compile: max_variants", 1)
        check_whole(self.eager_below, "compile: eager_below", 0)
        if self.mode == "reduce-overhead":
            self._check_replay(step)
        return self

    def _check_replay(self, step: Step) -> None:
        """Raise an `UnsupportedError` for a step that a CUDA graph cannot repeat; see `gpu.Replay`."""
        events = events_in(step.program)
        hosts = [
            one.name
            for one in step.algorithms
            if one.host and any(one.predicate.at(event) != NEVER for event in events)
        ]
        given = {
            "donate=False": not self.donate,
            "dynamic": self.dynamic,
            "microbatches": step.cut.may_slice,
            "several processes": step.ranks is not None,
            "host algorithms": hosts,
        }
        if other := next((feature for feature, is_given in given.items() if is_given), None):
            raise unsupported(
                'compile(mode="reduce-overhead")', other, ", ".join(hosts) if other == "host algorithms" else ""
            )

    def announce(self, text: str) -> None:
        """Write a text to standard error, unless the step is quiet."""
        if not self.quiet:
            sys.stderr.write(text)
            sys.stderr.flush()


def _check_backend(backend: Any, mode: Any) -> None:
    if mode not in MODES:
        raise ValueError(f"compile: mode={mode!r}: expected one of {', '.join(map(repr, MODES))}")
    if mode is not None and backend != "inductor":
        raise ValueError(f"compile: mode={mode!r} is an option of backend='inductor'; got backend={backend!r}")
    if not isinstance(backend, str) and not callable(backend):
        raise TypeError(f"compile: backend: expected a name or a function (graph, inputs) -> function, got {backend!r}")
    if isinstance(backend, str) and backend not in BACKENDS and backend not in torch.compiler.list_backends(()):
        known = ", ".join(dict.fromkeys([*BACKENDS, *torch.compiler.list_backends()]))
        raise ValueError(f"compile: backend={backend!r}: expected one of {known}")
