"""Draws of a flat graph for a GPU: one operation, `purecompose::draw`, computed in the kernel that uses the numbers.

Dropout compares the bits with a threshold. The comparison is part of the draw, so that a byte for each element is kept
for the backward pass, not four. On a CPU, GCC 12 compiles this code to other bits: there `rewriting.py` draws.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.library import Library, register_fake

from purecompose.random.philox import KEY_STEPS, MULTIPLIERS, PRECISION, ROUNDS, WORD
from purecompose.transforms.compilation.inductor import Inductor


_WORD = torch.uint64
_philox, _below = torch.ops.purecompose.philox.default, torch.ops.aten.lt.Scalar


def draw_in_kernels(module: fx.GraphModule, inductor: Inductor) -> None:
    """Replace draws by `purecompose::draw`.

    Args:
        module: A functional graph whose nodes carry fake tensors (`meta["val"]`).
        inductor: Inductor, which learns to compile the operation.
    """
    for node in module.graph.find_nodes(op="call_function", target=_philox):
        key, shape, dtype = node.args
        if node.meta["val"].device.type == "cpu":
            continue
        _register(inductor)
        compared = [user for user in node.users if user.target is _below]
        thresholds = {user.args[1] for user in compared}
        is_compared = dtype == torch.int32 and len(compared) == len(node.users) and len(thresholds) == 1
        last = compared[0] if is_compared else node
        with module.graph.inserting_before(node):
            drawn = module.graph.call_function(_draw, (key, shape, dtype, thresholds.pop() if is_compared else None))
        drawn.meta["val"] = last.meta["val"]
        for old in (*compared, node) if is_compared else (node,):
            old.replace_all_uses_with(drawn)
            module.graph.erase_node(old)
    module.recompile()


def _fake(key: Tensor, shape: Sequence[int], dtype: torch.dtype, below: int | None) -> Tensor:
    return torch.empty(shape, dtype=dtype if below is None else torch.bool, device=key.device)


_library = Library("purecompose", "FRAGMENT")
_library.define("draw(Tensor key, SymInt[] shape, ScalarType dtype, int? below) -> Tensor")
register_fake("purecompose::draw", _fake, lib=_library)
_draw = torch.ops.purecompose.draw.default


def _register(inductor: Inductor) -> None:
    """Tell Inductor how to compile `purecompose::draw`: each element computes its block of the key's stream."""
    if _draw in inductor.lowering.lowerings:
        return
    indexing, ops = inductor.functions, inductor.virtualized.ops

    def lower(key: Any, shape: Sequence[Any], dtype: torch.dtype, below: int | None) -> Any:
        load, lead = key.make_loader(), len(key.get_size()) - 1
        words_each = 2 if dtype in (torch.int64, torch.float64) else 1
        per_block = 4 // words_each

        def element(index: Sequence[Any]) -> Any:
            place = 0
            for i, size in zip(index[lead:], shape[lead:], strict=True):
                place = place * size + i
            block = ops.index_expr(indexing.FloorDiv(place, per_block), torch.int64)
            start, seed = load([*index[:lead], 1]), load([*index[:lead], 0])
            lanes = _lanes(ops, *(ops.to_dtype(number, _WORD) for number in (seed, ops.add(start, block))))
            which = ops.index_expr(indexing.ModularIndexing(place, 1, per_block), torch.int64)
            return _number(ops, _chosen(ops, lanes, which, words_each), dtype, below)

        pointwise = inductor.ir.Pointwise.create(
            device=key.get_device(), dtype=dtype if below is None else torch.bool, inner_fn=element, ranges=list(shape)
        )
        pointwise.realize()  # otherwise each use would draw again
        return pointwise

    inductor.lowering.register_lowering(_draw, type_promotion_kind=None)(lower)


def _lanes(ops: Any, seed: Any, position: Any) -> list[Any]:
    """Return the four words of `random.philox`, in Inductor's operations; all are uint64, whose products may wrap."""

    def split(value: Any) -> list[Any]:
        return [
            ops.bitwise_right_shift(value, ops.constant(32, _WORD)),
            ops.bitwise_and(value, ops.constant(WORD, _WORD)),
        ]

    (c1, c0), c2, c3 = split(position), *(ops.constant(0, _WORD) for _ in range(2))
    k1, k0 = split(seed)
    for round in range(ROUNDS):
        if round:
            k0, k1 = (
                split(ops.add(key, ops.constant(step, _WORD)))[1] for key, step in zip((k0, k1), KEY_STEPS, strict=True)
            )
        (high0, low0), (high1, low1) = (
            split(ops.mul(lane, ops.constant(multiplier, _WORD)))
            for lane, multiplier in zip((c0, c2), MULTIPLIERS, strict=True)
        )
        c0, c1 = ops.bitwise_xor(ops.bitwise_xor(high1, c1), k0), low1
        c2, c3 = ops.bitwise_xor(ops.bitwise_xor(high0, c3), k1), low0
    return [c0, c1, c2, c3]


def _chosen(ops: Any, lanes: Sequence[Any], which: Any, words_each: int) -> Any:
    """Return the word, or the two words as one number, that is at a place of a block, as int64."""

    def number(i: int) -> Any:
        return ops.constant(i, torch.int64)

    lanes = [ops.to_dtype(lane, torch.int64) for lane in lanes]
    if words_each == 2:
        is_first = ops.eq(which, number(0))
        w0, w1 = (ops.where(is_first, lanes[i], lanes[i + 2]) for i in range(2))
        return ops.bitwise_or(ops.bitwise_left_shift(w0, number(32)), w1)
    early, late = (ops.where(ops.eq(which, number(i)), lanes[i], lanes[i + 1]) for i in (0, 2))
    return ops.where(ops.lt(which, number(2)), early, late)


def _number(ops: Any, bits: Any, dtype: torch.dtype, below: int | None) -> Any:
    if dtype in PRECISION:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        precision = PRECISION[dtype]
        whole = ops.to_dtype(ops.bitwise_and(bits, ops.constant((1 << precision) - 1, torch.int64)), wide)
        return ops.to_dtype(ops.mul(whole, ops.constant(2.0**-precision, wide)), dtype)
    number = ops.to_dtype(bits, dtype)
    return number if below is None else ops.lt(number, ops.constant(below, dtype))
