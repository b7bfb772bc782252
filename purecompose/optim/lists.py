"""Arithmetic on lists of tensors, in which the optimizers' rules are written, and rules that move only some rows.

Each function on lists uses torch's `_foreach` kernels, with one launch on a GPU for all tensors, or a plain loop under
autograd and function transforms, for which these have no rules. Tensors of a pair have the same shape, except where a
0-d partner is mentioned. Results have the dtypes of the xs, also with a 0-d partner of a wider dtype, such as a
schedule's value.

Rules for rows, as of optimizers for sparse gradients, leave a row of a parameter, and what is remembered of it, as it
is where the gradient of the whole row is zero. So they are functions of dense gradients.

In a traced step the update of a large table is one operation, `purecompose::rows`. Where its gradient is that of an
embedding, the graph gets `purecompose::rows_at` instead, which is given the looked-up rows, or `purecompose::rows_at_`,
which writes these rows of donated buffers only (`transforms/compilation/updates.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.library import Library, register_fake

from purecompose._support.internals import is_fake, is_transforming


# torch.optim itself is built on the `_foreach` functions, but torch exports them under private names.
# pyright: reportPrivateImportUsage=false


Slots: TypeAlias = dict[str, list[Tensor]]
"""What rules remember of parameters, by slot."""
Moved: TypeAlias = tuple[list[Tensor], Slots]
"""New parameters, and what is remembered of them."""


def is_plain() -> bool:
    """Return whether the current operations are neither differentiated nor mapped."""
    return not torch.is_grad_enabled() and not is_transforming()


def copies(xs: list[Tensor], layout: list[Tensor]) -> list[Tensor]:
    """Return copies, dense in memory, and laid out as the tensors of `layout` if these are dense."""
    return [torch.empty_like(y).copy_(x) for x, y in zip(xs, layout, strict=True)]


def alike(xs: list[Tensor], layout: list[Tensor]) -> list[Tensor]:
    """Return the tensors, with copies of those that are not laid out in memory as the ones of `layout`."""
    return [x if x.stride() == y.stride() else torch.empty_like(y).copy_(x) for x, y in zip(xs, layout, strict=True)]


def add(xs: list[Tensor], ys: list[Tensor], scale: float | Tensor) -> list[Tensor]:
    """Return x + scale * y; `scale` is a number or a 0-d tensor."""
    if isinstance(scale, Tensor):
        if not xs or not is_plain():
            return _kept([x + y * scale for x, y in zip(xs, ys, strict=True)], xs)
        sums = torch._foreach_mul(ys, scale)
        torch._foreach_add_(sums, xs)
        return _kept(sums, xs)
    if not xs or not is_plain():
        return [torch.add(x, y, alpha=scale) for x, y in zip(xs, ys, strict=True)]
    return list(torch._foreach_add(xs, ys, alpha=scale))


def increment(xs: list[Tensor]) -> list[Tensor]:
    """Return x + 1, for the counts of many parameters in one kernel on a GPU."""
    return list(torch._foreach_add(xs, 1)) if is_plain() else [x + 1 for x in xs]


def _each(kernel: Any, plain: Callable[..., Tensor], xs: list[Tensor], *others: list[Tensor]) -> list[Tensor]:
    """Return a function of each row of tensors, in one of the two forms."""
    if xs and is_plain():
        return list(kernel(xs, *others))
    return [plain(*row) for row in zip(xs, *others, strict=True)]


def multiply(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    """Return x * y; y may be 0-d, of any dtype."""
    return _kept(_each(torch._foreach_mul, torch.mul, xs, ys), xs)


def divide(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    """Return x / y; y may be 0-d, of any dtype."""
    return _kept(_each(torch._foreach_div, torch.div, xs, ys), xs)


def lerp(xs: list[Tensor], ys: list[Tensor], weight: float | Tensor) -> list[Tensor]:
    """Return x + weight * (y - x); `weight` is a number or a 0-d tensor."""
    if isinstance(weight, Tensor):
        # torch.lerp requires a tensor weight of the same dtype, which rules out half-precision parameters.
        return add(xs, add(ys, xs, -1.0), weight)
    if not is_plain():
        return [torch.lerp(x, y, weight) for x, y in zip(xs, ys, strict=True)]
    return list(torch._foreach_lerp(xs, ys, weight))


def maximum(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    """Return the larger of x and y, element by element."""
    return _each(torch._foreach_maximum, torch.maximum, xs, ys)


def clamp_min(xs: list[Tensor], floor: float) -> list[Tensor]:
    """Return x, or the floor where the floor is larger."""
    if not is_plain():
        return [x.clamp(min=floor) for x in xs]
    return list(torch._foreach_clamp_min(xs, floor))


def sign(xs: list[Tensor]) -> list[Tensor]:
    """Return -1, 0 or 1 for each element, with derivative 0."""
    return _each(torch._foreach_sign, torch.sign, xs)


def mean_squares(xs: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the mean of x^2 of each tensor, as a vector of `dtype`; NaN for a tensor without elements."""
    if not is_plain():
        return torch.stack([x.to(dtype).square().mean() for x in xs])
    norms = torch.stack(list(torch._foreach_norm(xs, 2, dtype=dtype)))
    return torch.stack([square / x.numel() for x, square in zip(xs, norms.square().unbind(), strict=True)])


def largest(xs: list[Tensor]) -> Tensor:
    """Return the largest magnitude in each tensor, as a vector."""
    return torch.stack(list(torch._foreach_norm(xs, math.inf)))


def root_plus(xs: list[Tensor], ys: list[Tensor] | float) -> list[Tensor]:
    """Return sqrt(x) + y, where y is 0-d, or one number for all; the derivative of the root is taken as 0 at x = 0."""
    if not is_plain():
        zeros = [x == 0 for x in xs]
        roots = [torch.where(zero, 0, torch.where(zero, 1, x).sqrt()) for x, zero in zip(xs, zeros, strict=True)]
        sums = [root + y for root, y in zip(roots, ys if isinstance(ys, list) else [ys] * len(xs), strict=True)]
        return _kept(sums, xs)
    roots = torch._foreach_sqrt(xs)
    torch._foreach_add_(roots, ys)
    return list(roots)


def subtract_ratio(xs: list[Tensor], numerators: list[Tensor], denominators: list[Tensor]) -> list[Tensor]:
    """Return x - numerator / denominator."""
    if not is_plain():
        return [x - a / b for x, a, b in zip(xs, numerators, denominators, strict=True)]
    return list(torch._foreach_addcdiv(xs, numerators, denominators, value=-1))


def unbound(x: Tensor) -> list[Tensor]:
    """Return the elements of a vector as 0-d views of it."""
    return list(x.unbind())


def _kept(results: Sequence[Tensor], xs: list[Tensor]) -> list[Tensor]:
    """Return the results in the dtypes of the xs; only the dtypes of 0-d ones may differ."""
    return [new if new.dtype is x.dtype else new.to(x.dtype) for new, x in zip(results, xs, strict=True)]


RowRule = Callable[[Tensor, list[Tensor], Sequence[Any]], list[Tensor]]
"""From gradients, memory and scalars to what is added to the parameter and to each memory."""


def _sgd(grad: Tensor, memory: list[Tensor], scalars: Sequence[Any]) -> list[Tensor]:
    del memory
    return [grad * -scalars[0]]


def _adagrad(grad: Tensor, memory: list[Tensor], scalars: Sequence[Any]) -> list[Tensor]:
    (total,), (rate, eps), square = memory, scalars, grad * grad
    return [-rate * (grad / _root_plus(total + square, eps)), square]


def _sparse_adam(grad: Tensor, memory: list[Tensor], scalars: Sequence[Any]) -> list[Tensor]:
    rate, beta1, beta2, eps = scalars
    changes = [(x - old) * (1 - beta) for x, old, beta in zip((grad, grad * grad), memory, (beta1, beta2), strict=True)]
    average, square = (old + change for old, change in zip(memory, changes, strict=True))
    return [-rate * (average / _root_plus(square, eps)), *changes]


RULES: dict[str, RowRule] = {"sgd": _sgd, "adagrad": _adagrad, "sparse_adam": _sparse_adam}
"""The rules by name. All but the last change nothing where a gradient is zero, by their formulas."""


def moved(
    rule: str, params: list[Tensor], grads: list[Tensor], memory: Sequence[list[Tensor]], scalars: Sequence[Any]
) -> list[list[Tensor]]:
    """Return the new tensors of each list, `[params, *memory]`, after a rule has moved the rows with a gradient."""
    rows = []
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        own = [param, *(tensors[i] for tensors in memory)]
        numbers = [scalar[i] if isinstance(scalar, list) else scalar for scalar in scalars]
        if is_traced(param) or (rule == _WHOLE and _is_traced_on_cpu(param)):
            of_step = [x for x in numbers if isinstance(x, Tensor)]
            constants = [math.nan if isinstance(x, Tensor) else x for x in numbers]
            rows.append(torch.ops.purecompose.rows(own, grad, of_step, constants, rule))
        else:
            rows.append(_moved(rule, own, grad, numbers))
    return [list(column) for column in zip(*rows, strict=True)]


Lists = list[list[Tensor]]
"""`[params, *memory]`, with one tensor for each parameter in each list."""


def tables_apart(
    rule: str, lists: Lists, grads: list[Tensor], scalars: Sequence[Any], rest: Callable[[Lists, list[Tensor]], Lists]
) -> Lists:
    """Return new lists: large tables of a traced step are moved by a rule, and other parameters by `rest`."""
    are_tables = [is_traced(param) for param in lists[0]]
    if not any(are_tables):
        return rest(lists, grads)

    def chosen(items: Any, is_table: bool) -> Any:
        if not isinstance(items, list):
            return items
        return [item for item, own in zip(items, are_tables, strict=True) if own is is_table]

    (params, *memory), left = ([chosen(items, is_table) for items in lists] for is_table in (True, False))
    own = [chosen(scalar, True) for scalar in scalars]
    found = iter(zip(*moved(rule, params, chosen(grads, True), memory, own), strict=True))
    others = iter(zip(*rest(left, chosen(grads, False)), strict=True)) if not all(are_tables) else iter(())
    return [list(column) for column in zip(*(next(found if own else others) for own in are_tables), strict=True)]


_WHOLE = "sparse_adam"
"""The rule whose update is one operation in every traced step on a CPU."""
_SMALLEST = 2**20
"""Least number of bytes of a table whose traced update is one operation."""


def is_traced(param: Tensor) -> bool:
    """Return whether this is a large table in a traced step on a CPU."""
    is_table = param.ndim == 2 and param.dtype in (torch.float32, torch.float64)
    return is_table and _is_traced_on_cpu(param) and param.nbytes >= _SMALLEST


def _is_traced_on_cpu(param: Tensor) -> bool:
    is_known = param.device.type == "cpu" and is_fake(param) and type(param.numel()) is int
    return is_known and is_plain() and not torch.compiler.is_compiling()


def _moved(rule: str, tensors: list[Tensor], grad: Tensor, scalars: Sequence[Any]) -> list[Tensor]:
    """Return the new parameter and memory."""
    is_named = grad != 0
    if grad.ndim > 1:
        is_named = is_named.flatten(1).any(1)
    if is_plain() and not is_fake(grad) and grad.ndim > 1 and grad.device.type == "cpu":
        (places,) = is_named.nonzero(as_tuple=True)
        copies = [tensor.clone() for tensor in tensors]
        _write(rule, copies, places, grad.index_select(0, places), scalars)
        return copies
    changes = RULES[rule](grad, tensors[1:], scalars)
    is_named = is_named.view(-1, *[1] * (grad.ndim - 1)) if grad.ndim else is_named
    return [
        torch.where(is_named, old + change, old).to(old.dtype) for old, change in zip(tensors, changes, strict=True)
    ]


def _root_plus(x: Tensor, y: Any) -> Tensor:
    return root_plus([x], y)[0]


def _write(rule: str, tensors: list[Tensor], places: Tensor, grad: Tensor, scalars: Sequence[Any]) -> None:
    """Write the new rows at places, all different, into parameter and memory; `grad` has their gradients."""
    old = [tensor.index_select(0, places) for tensor in tensors]
    for tensor, before, change in zip(tensors, old, RULES[rule](grad, old[1:], scalars), strict=True):
        tensor.index_copy_(0, places, before + change)


# The operations of a traced step


def _numbers(of_step: list[Tensor], constants: list[float]) -> list[Any]:
    """Return a rule's scalars: constants, and in place of NaN the tensors, whose values differ from step to step."""
    left = iter(of_step)
    return [next(left) if math.isnan(constant) else constant for constant in constants]


def _rows(
    tensors: list[Tensor], grad: Tensor, of_step: list[Tensor], constants: list[float], rule: str
) -> list[Tensor]:
    if rule == _WHOLE:
        return _moved(rule, tensors, grad, _numbers(of_step, constants))
    return formula(tensors, grad, of_step, constants, rule)


def formula(
    tensors: list[Tensor], grad: Tensor, of_step: list[Tensor], constants: list[float], rule: str
) -> list[Tensor]:
    """Return what `purecompose::rows` does in operations of torch, for gradients that no embedding has.

    `sparse_adam` remains one operation: which rows it moves is known when it runs, and Inductor cannot compile its
    formula for a CPU (torch 2.13, "KeyError" while loops are fused).
    """
    if rule == _WHOLE:
        return NotImplemented
    scalars = _numbers(of_step, constants)
    if rule == "sgd" and not of_step:  # as in eager code, bit for bit
        return [torch.add(tensors[0], grad, alpha=-scalars[0])]
    changes = RULES[rule](grad, tensors[1:], scalars)
    return [old + change for old, change in zip(tensors, changes, strict=True)]


def _rows_at_(
    tensors: list[Tensor],
    places: list[Tensor],
    grads: list[Tensor],
    of_step: list[Tensor],
    constants: list[float],
    rule: str,
) -> None:
    param = tensors[0]
    numbers = [x.item() if isinstance(x, Tensor) else x for x in _numbers(of_step, constants)]
    index = torch.cat([one.reshape(-1).long() for one in places])
    rows = torch.cat([one.reshape(-1, param.shape[1]) for one in grads]).to(param.dtype)
    if rule == "sgd" and _repeats(index) <= _MOST_ROUNDED:  # linear, so that few rows need not be summed first
        indices, size = index[None], (len(param), param.shape[1])
        param.add_(torch.sparse_coo_tensor(indices, rows, size, check_invariants=False), alpha=-numbers[0])
        return
    ordered, order = index.sort(stable=True)
    chosen, counts = ordered.unique_consecutive(return_counts=True)
    sums = torch.embedding_bag(rows, order, counts.cumsum(0) - counts)[0]
    is_named = (sums != 0).any(1)
    if not is_named.all():
        chosen, sums = chosen[is_named], sums[is_named]
    _write(rule, tensors, chosen, sums, numbers)


_MOST_ROUNDED = 8
"""Most rows that are added one by one to a row of a table, which rounds each sum to the precision of that row."""


def _repeats(index: Tensor) -> int:
    """Return a bound of how often a number occurs, which is that of the numbers that are congruent to it."""
    return int((index % (4 * len(index) + 1)).bincount().max()) if len(index) else 0


def _rows_at(tensors: list[Tensor], *given: Any) -> list[Tensor]:
    copies = [tensor.clone() for tensor in tensors]
    _rows_at_(copies, *given)
    return copies


def _fake(tensors: list[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


_SCALARS = "Tensor[] of_step, float[] constants, str rule"
_library = Library("purecompose", "FRAGMENT")
_library.define(f"rows(Tensor[] tensors, Tensor grad, {_SCALARS}) -> Tensor[]")
_library.define(f"rows_at(Tensor[] tensors, Tensor[] places, Tensor[] grads, {_SCALARS}) -> Tensor[]")
_library.define(f"rows_at_(Tensor(a!)[] tensors, Tensor[] places, Tensor[] grads, {_SCALARS}) -> ()")
_library.impl("rows", _rows, "CPU")
_library.impl("rows_at", _rows_at, "CPU")
_library.impl("rows_at_", _rows_at_, "CPU")
register_fake("purecompose::rows", _fake, lib=_library)
register_fake("purecompose::rows_at", _fake, lib=_library)
register_fake("purecompose::rows_at_", lambda *_: None, lib=_library)
