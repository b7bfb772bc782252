"""Flat graphs of training steps on fake tensors of a GPU: a step's, and those of the loop that people write."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode

import purecompose as pc
from benchmarks.gpu_code.pretend import CUDA, find
from purecompose import State, Step
from purecompose._support.device import arithmetic
from purecompose.transforms.compilation import building
from purecompose.transforms.compilation.backends import Compiled
from purecompose.transforms.compilation.boundary import FIELDS, Boundary
from purecompose.transforms.compilation.capture import Captured
from purecompose.transforms.signature import Signature


class Graph(NamedTuple):
    """A graph for Inductor; its placeholders carry fake tensors on `cuda:0`."""

    name: str
    module: fx.GraphModule
    is_ours: bool
    """True if our backend passes it to Inductor, False if `torch.compile` would."""
    is_backward: bool = False


@contextlib.contextmanager
def compiling_for_gpu(compile_: Callable[[fx.GraphModule], Compiled]) -> Iterator[None]:
    """Return a scope in which parts of compiled steps are traced as if on `cuda:0`, and compiled by a function."""
    capture, compile_graph = building.capture, building.compile_graph

    def captured(body: Any, boundary: Boundary, **kwargs: Any) -> Captured:
        found, device = capture(body, _on_device(boundary, CUDA), **kwargs), boundary.device
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


def graphs_by_hand(
    net: nn.Module,
    loss: Callable[..., Tensor],
    batch: tuple[Tensor, ...],
    optimizer: torch.optim.Optimizer,
    *,
    autocast: bool = False,
) -> list[Graph]:
    """Return the graphs of a loop whose forward with loss and whose `optimizer.step` are given to `torch.compile`.

    Args:
        net: The network, whose tensors stay as they are.
        loss: Function of outputs and targets.
        batch: Inputs and targets.
        optimizer: SGD or AdamW over the network's parameters.
        autocast: True to compute in bfloat16 under autocast.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    params = {name: _fake(p, mode).requires_grad_() for name, p in net.named_parameters()}
    buffers = {name: _fake(b, mode) for name, b in net.named_buffers()}
    net = copy.deepcopy(net).to("meta").train()

    def forward(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
            outputs = torch.func.functional_call(net, (dict(params), dict(buffers)), batch[:-1])
        return loss(outputs.float(), batch[-1])

    keep = _Kept(mode)
    run = keep.traced(forward, "forward", "backward")
    with mode:
        value = run(params, buffers, *(_fake(tensor, mode) for tensor in batch))
        torch.autograd.grad(value, list(params.values()), allow_unused=True)
        _trace_update(keep, list(params.values()), optimizer)
    return keep.graphs


class _Kept:
    """A collection of the graphs that `torch.compile` would pass to Inductor."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode, self.graphs = mode, []

    def traced(self, function: Callable[..., Any], name: str, backward: str = "") -> Callable[..., Any]:
        """Return the function with its graphs kept: traced, partitioned, and run on fake tensors."""

        def compiler(name: str, is_backward: bool = False, *, is_joint: bool = False) -> Any:
            def keep(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
                if is_joint:
                    find("torch._inductor.compile_fx._recursive_joint_graph_passes")(module)
                self.graphs.append(Graph(name, module, False, is_backward))
                return find("functorch.compile.make_boxed_func")(module)

            return keep

        return aot_function(
            function,
            fw_compiler=compiler(name),
            bw_compiler=compiler(backward, is_backward=True),
            inference_compiler=compiler(name, is_joint=True),
            partition_fn=find("torch._inductor.compile_fx.partition_fn"),
            decompositions=find("torch._inductor.decomposition.select_decomp_table")(),
            keep_inference_input_mutations=True,
        )


def _trace_update(keep: _Kept, params: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Trace the update in the form that `torch.compile(optimizer.step)` gives it: over lists of tensors, in place."""
    (group,) = optimizer.param_groups
    params = [param.detach() for param in params]
    grads = [torch.empty_like(param) for param in params]
    memory = [torch.empty_like(param) for param in params]
    rest: dict[str, Any] = {"foreach": True, "maximize": False, "weight_decay": group["weight_decay"]}

    def sgd(params: list[Tensor], grads: list[Tensor], memory: list[Tensor]) -> None:
        more = {"momentum": group["momentum"], "dampening": 0, "nesterov": group["nesterov"], "lr": group["lr"]}
        find("torch.optim.sgd.sgd")(params, grads, memory, has_sparse_grad=False, **rest, **more)

    def adamw(params: list[Tensor], grads: list[Tensor], *memory: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        more = {"beta1": beta1, "beta2": beta2, "lr": group["lr"], "eps": group["eps"], "amsgrad": False}
        find("torch.optim.adamw.adamw")(params, grads, *memory[:2], [], memory[2], capturable=True, **rest, **more)

    with torch.no_grad():
        if isinstance(optimizer, torch.optim.AdamW):
            steps = [torch.empty((), device=CUDA) for _ in params]
            keep.traced(adamw, "update")(params, grads, memory, [torch.empty_like(m) for m in memory], steps)
        elif isinstance(optimizer, torch.optim.SGD):
            keep.traced(sgd, "update")(params, grads, memory if group["momentum"] else [None] * len(params))
        else:
            raise TypeError(f"expected SGD or AdamW, got {type(optimizer).__name__}")


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)
