"""Adam's update by torch's fused kernel: one pass over each tensor, without temporary ones.

In a traced step the update of many tensors is one operation, `purecompose::adam`, where the formula is a dozen for each
tensor. It returns new tensors; if these replace donated buffers, the graph gets `purecompose::adam_` instead, which
writes into them (`transforms/compilation/rewriting.py`).
"""

# torch.optim itself is built on the fused kernels, but torch exports them under private names.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library, register_fake

from purecompose._support.functorch import is_fake
from purecompose.optim.lists import add, alike, copies, is_plain


_FULL_PRECISION = ({torch.float32}, {torch.float64})

_FEWEST_TRACED, _SMALLEST_TRACED = 32, 2**20
"""Least number and bytes of the parameters in a traced update, either of which suffices for the operation. Below both,
compiled code of the formula saves more in every step than the operation saves in the first one."""


def can_fuse(params: list[Tensor]) -> bool:
    """Return whether `adam` may be used: in eager code, for dtypes that the kernel does not widen, and in a traced step
    on a CPU, for many or large tensors. It has no rules for derivatives and `vmap`.
    """
    x = params[0]
    if not is_plain() or torch.compiler.is_compiling() or {x.dtype for x in params} not in _FULL_PRECISION:
        return False
    if is_fake(x):
        is_large = len(params) >= _FEWEST_TRACED or sum(param.nbytes for param in params) >= _SMALLEST_TRACED
        return x.device.type == "cpu" and is_large
    return x.device.type in ("cpu", "cuda")


def adam(
    params: list[Tensor],
    grads: list[Tensor],
    slots: dict[str, list[Tensor]],
    *,
    lr: float | Tensor,
    shrinkage: float | Tensor,
    betas: tuple[float, float],
    eps: float,
) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Return new parameters and new slots.

    Args:
        params: The parameters.
        grads: Their gradients.
        slots: The lists "step", "exp_avg", "exp_avg_sq", and with amsgrad "max_exp_avg_sq".
        lr: The learning rate.
        shrinkage: The part of a parameter that is subtracted from it first, by decoupled weight decay.
        betas: Decay rates of the two averages.
        eps: Added to the root.
    """
    memory = [tensor for slot, tensors in slots.items() if slot != "step" for tensor in tensors]
    lists = params, grads, slots["step"], memory
    if is_fake(params[0]):
        scalars = (x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float64) for x in (lr, shrinkage))
        new = torch.ops.purecompose.adam(*lists, *scalars, *betas, eps)
    else:
        new = _new(*lists, lr, shrinkage, *betas, eps)
    parts = [new[start : start + len(params)] for start in range(0, len(new), len(params))]
    return parts[0], dict(zip(slots, parts[1:], strict=True))


def _new(
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    memory: list[Tensor],
    lr: float | Tensor,
    shrinkage: float | Tensor,
    *constants: float,
) -> list[Tensor]:
    """Return new parameters, steps and memory (averages, squares, and largest squares if any) in one list."""
    is_shrunk = isinstance(shrinkage, Tensor) or shrinkage != 0.0
    params = alike(add(params, params, -shrinkage), params) if is_shrunk else copies(params, params)
    memory = copies(memory, params * (len(memory) // len(params)))
    steps = [step + 1 for step in steps]
    _update(params, grads, steps, memory, lr, *constants)
    return [*params, *steps, *memory]


def _new_traced(
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    memory: list[Tensor],
    lr: Tensor,
    shrinkage: Tensor,
    *constants: float,
) -> list[Tensor]:
    return _new(params, grads, steps, memory, lr.item(), shrinkage.item(), *constants)


def _write(
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    memory: list[Tensor],
    lr: Tensor,
    shrinkage: Tensor,
    *constants: float,
) -> None:
    """Write what `_new` returns into the old tensors; parameters and memory have to be laid out alike."""
    if (part := shrinkage.item()) != 0.0:
        torch._foreach_add_(params, params, alpha=-part)
    torch._foreach_add_(steps, 1)
    _update(params, grads, steps, memory, lr.item(), *constants)


def _update(
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    memory: list[Tensor],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Update parameters and memory in place; `steps` count this update."""
    count = len(params)
    torch._fused_adam_(
        params,
        alike(grads, params),
        memory[:count],
        memory[count : 2 * count],
        memory[2 * count :],
        steps,
        lr=lr,  # pyright: ignore[reportArgumentType]  # A 0-d tensor is accepted, too.
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=eps,
        amsgrad=len(memory) > 2 * count,
        maximize=False,
    )


def _fake(params: list[Tensor], grads: list[Tensor], steps: list[Tensor], memory: list[Tensor], *_: object):
    del grads
    layout = params * (len(memory) // len(params))
    return [torch.empty_like(tensor) for tensor in (*params, *steps, *layout)]


_ARGUMENTS = "Tensor lr, Tensor shrinkage, float beta1, float beta2, float eps"
_library = Library("purecompose", "FRAGMENT")
_library.define(f"adam(Tensor[] params, Tensor[] grads, Tensor[] steps, Tensor[] memory, {_ARGUMENTS}) -> Tensor[]")
_library.define(
    f"adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] steps, Tensor(c!)[] memory, {_ARGUMENTS}) -> ()"
)
_library.impl("adam", _new_traced, "CPU")
_library.impl("adam_", _write, "CPU")
register_fake("purecompose::adam", _fake, lib=_library)
register_fake("purecompose::adam_", lambda *_: None, lib=_library)
