"""The graphs of the loops that people write, with forward, update and methods each given to `torch.compile`."""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from benchmarks.gpu_code.cases import Case, optimizer_by_hand
from benchmarks.gpu_code.graphs import Graph
from benchmarks.gpu_code.pretend import CUDA, find
from purecompose.transforms.compilation.rewriting import foreach_lerp


_torch: Any = torch  # type checkers do not know its private names

METHODS = ("plain", "label_smoothing", "mixup+label_smoothing", "ema", "sam")


def graphs_by_hand(case: Case, methods: str) -> list[Graph]:
    """Return the graphs of one step, in the order in which the loop calls them.

    Forward and loss are one function, whose backward pass recomputes what the partitioner chooses. MixUp draws before
    this function, outside of compiled code. EMA updates all averages in one call; SAM moves all parameters in one call,
    and back in another. The tensors of the case stay as they are.

    Args:
        case: The network with its batch.
        methods: One of `METHODS`.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    net = copy.deepcopy(case.net).to("meta").train()
    params = {name: _fake(p, mode).requires_grad_() for name, p in case.net.named_parameters()}
    buffers = {name: _fake(b, mode) for name, b in case.net.named_buffers()}
    first = {id(p): name for name, p in case.net.named_parameters()}
    tied = {name: first[id(p)] for name, p in case.net.named_parameters(remove_duplicate=False)}
    batch = [_fake(tensor, mode) for tensor in case.batch]
    smoothing = 0.1 if "label_smoothing" in methods else 0.0

    def forward(
        params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, *draws: Tensor
    ) -> Tensor:
        order, share = draws or (None, None)
        if share is not None:
            inputs = (1 - share) * inputs + share * inputs[order]
        with contextlib.ExitStack() as stack:
            if case.precision == "bf16":
                stack.enter_context(torch.autocast("cuda", torch.bfloat16))
            tensors = {**buffers, **{name: params[own] for name, own in tied.items()}}
            outputs = torch.func.functional_call(net, tensors, (inputs,)).float()
        loss = F.cross_entropy(outputs, targets, label_smoothing=smoothing)
        if share is None:
            return loss
        return (1 - share) * loss + share * F.cross_entropy(outputs, targets[order], label_smoothing=smoothing)

    kept, tensors = _Kept(), [param.detach() for param in params.values()]
    with mode, find("torch._inductor.virtualized.V").set_fake_mode(mode):
        if "mixup" in methods:
            size = len(batch[0])
            batch += [torch.empty(size, dtype=torch.int64, device=CUDA), torch.empty((), device=CUDA)]
        value = kept.traced(forward, "forward", "backward")(params, buffers, *batch)
        torch.autograd.grad(value, list(params.values()), allow_unused=True)
        with torch.no_grad():
            if methods == "sam":
                _trace_sam(kept, tensors)
            _trace_update(kept, tensors, optimizer_by_hand(case))
            if methods == "ema":
                averages = _empty(tensors)
                kept.traced(_ema, "ema")(averages, tensors)
    return kept.graphs


# Its tensor of the weight cannot be made here; on a GPU, torch.compile folds it to a number.
_HOSTLESS = {torch.ops.aten._foreach_lerp.Scalar: foreach_lerp}


class _Kept:
    """A collection of the graphs that `torch.compile` would pass to Inductor."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []

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
            decompositions={**find("torch._inductor.decomposition.select_decomp_table")(), **_HOSTLESS},
            keep_inference_input_mutations=True,
        )


def _ema(averages: list[Tensor], params: list[Tensor]) -> None:
    _torch._foreach_lerp_(averages, params, 0.001)


def _trace_sam(kept: _Kept, params: list[Tensor]) -> None:
    """Trace the way up and back, and add the second forward and backward pass."""
    passes = list(kept.graphs)

    def up(params: list[Tensor], grads: list[Tensor]) -> Sequence[Tensor]:
        norm = torch.linalg.vector_norm(torch.stack(_torch._foreach_norm(grads)))
        moves = _torch._foreach_mul(grads, 0.05 / (norm + 1e-12))
        _torch._foreach_add_(params, moves)
        return moves

    moves = kept.traced(up, "up")(params, _empty(params))
    held = sum(move.numel() * move.element_size() for move in moves)
    kept.graphs += [graph._replace(held=held) for graph in passes]
    kept.traced(lambda params, moves: _torch._foreach_sub_(params, moves), "back")(params, list(moves))


def _trace_update(kept: _Kept, params: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Trace the update in the form that `torch.compile(optimizer.step)` gives it: over lists of tensors, in place."""
    (group,) = optimizer.param_groups
    rest: dict[str, Any] = {"foreach": True, "maximize": False, "weight_decay": group["weight_decay"]}

    def sgd(params: list[Tensor], grads: list[Tensor], memory: list[Any]) -> None:
        more = {"momentum": group["momentum"], "dampening": 0, "nesterov": group["nesterov"], "lr": group["lr"]}
        find("torch.optim.sgd.sgd")(params, grads, memory, has_sparse_grad=False, **rest, **more)

    def adamw(params: list[Tensor], grads: list[Tensor], *memory: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        more = {"beta1": beta1, "beta2": beta2, "lr": group["lr"], "eps": group["eps"], "amsgrad": False}
        find("torch.optim.adamw.adamw")(params, grads, *memory[:2], [], memory[2], capturable=True, **rest, **more)

    if isinstance(optimizer, torch.optim.AdamW):
        steps = [torch.empty((), device=CUDA) for _ in params]
        kept.traced(adamw, "update")(params, _empty(params), _empty(params), _empty(params), steps)
    else:
        kept.traced(sgd, "update")(params, _empty(params), _empty(params))


def _empty(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)
