"""The check, in a step's first run, that the loss of a batch is the mean of the losses of its slices.

Microbatches and several processes compute the mean over slices. A loss that is a sum, or that compares examples with
each other, differs from it. The outputs of the slices are put together and given to the loss, without another pass of
the network. Where the examples are not the rows of a batch's tensors, the outputs may be arranged in several ways: the
loss is a mean if it is one in any of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import batch as batches, losses
from purecompose._support.checks import shown
from purecompose._support.functorch import has_values, is_any, unwrapped
from purecompose._support.warnings import warn
from purecompose.core.coupling import targets_of_loss
from purecompose.core.means import averaged, denominators, num_terms, part_of
from purecompose.core.sealed import SealedOutputs
from purecompose.core.state import State
from purecompose.random.keys import fold_in


__all__ = ["check_halves", "check_slices"]


def check_slices(whole: State, slices: Sequence[State]) -> None:
    """Raise if the loss of a batch is not the mean of the losses of its slices.

    Losses that models compute themselves, that draw random numbers or that change buffers are not compared, and neither
    are those of outputs that do not have a row for each example.

    Args:
        whole: A state with the whole batch.
        slices: States with a slice of the batch and its outputs each.

    Warns:
        UserWarning: The outputs of batches without rows cannot be put together.
    """
    if len(slices) < 2 or not all(map(_is_compared, slices)):
        return
    sizes = [one.num_examples for one in slices]
    columns = zip(*[batches.tensors(one.outputs) for one in slices], strict=False)
    ways = [list(_joined(column, sizes, whole)) for column in columns]
    _check(
        whole, ((whole.replace(outputs=batches.with_tensors(slices[0].outputs, way)), slices) for way in product(*ways))
    )


def check_halves(state: State) -> None:
    """Raise and warn as `check_slices` does, for the halves of a batch that has run in one piece."""
    layout, num = state.context.layout, state.num_examples
    if num < 2 or not layout.can_cut(state.batch) or not _is_compared(state):
        return
    parts = layout.split(state.batch, 2)
    size = layout.num_examples(parts[0])
    first = 0 if state.first_example is None else state.first_example
    ways = [list(_halved(leaf, size, parts[0], state)) for leaf in batches.tensors(state.outputs)]

    whole = denominators(state)

    def halves(way: Sequence[Sequence[Tensor]]) -> list[State]:
        return [
            state.replace(
                batch=part,
                outputs=batches.with_tensors(state.outputs, leaves),
                first_example=first + start,
                denominators=part_of(whole, layout.num_examples(part), num),
            )
            for part, leaves, start in zip(parts, zip(*way, strict=True), (0, size), strict=True)
        ]

    _check(state, ((state, halves(way)) for way in product(*ways)))


def _is_compared(state: State) -> bool:
    loss_fn = state.context.loss
    is_mean = not isinstance(loss_fn, losses.ModelLoss) and not losses.couples_examples(loss_fn)
    return is_mean and not isinstance(state.outputs, SealedOutputs) and has_values(state.key)


def _joined(column: Sequence[Tensor], sizes: Sequence[int], whole: State) -> Iterator[Tensor]:
    """Yield an output of all slices put together, in each way that its shapes permit."""
    layout, given = whole.context.layout, list(zip(column, sizes, strict=True))
    if layout.splitter is not None:
        with suppress(RuntimeError):  # not the same shape, but for the rows
            yield torch.cat(list(column))
        return
    dims = dict.fromkeys((0,) if layout.has_rows(whole.batch) else (layout.dim, 0))
    for dim in dims:
        if all(leaf.ndim > dim and leaf.shape[dim] == size for leaf, size in given):
            yield torch.cat(list(column), dim)
    if layout.dim and all(_is_flattened(leaf, size) for leaf, size in given):
        with suppress(RuntimeError):  # not as many positions
            yield torch.cat([leaf.unflatten(0, (-1, size)) for leaf, size in given], 1).flatten(0, 1)
            yield torch.cat(list(column))


def _halved(leaf: Tensor, size: int, part: Any, whole: State) -> Iterator[Sequence[Tensor]]:
    """Yield the two halves of an output, in each way that its shape permits.

    Args:
        leaf: The output.
        size: Number of examples in the first half.
        part: The first half of the batch.
        whole: The state with the whole batch.
    """
    layout, num = whole.context.layout, whole.num_examples
    cuts = {(num, size)}
    if layout.splitter is not None:  # outputs of nodes of graphs: as many as a tensor of the batch has rows
        inside = zip(batches.tensors(whole.batch), batches.tensors(part), strict=False)
        cuts |= {(ours.shape[0], theirs.shape[0]) for ours, theirs in inside if ours.ndim and theirs.ndim}
    for total, start in cuts:
        if leaf.shape[:1] == (total,):
            yield leaf.tensor_split([start])
    if layout.dim and leaf.ndim > layout.dim and leaf.shape[layout.dim] == num:
        yield leaf.tensor_split([size], layout.dim)
    if layout.dim and _is_flattened(leaf, num):
        yield [half.flatten(0, 1) for half in leaf.unflatten(0, (-1, num)).tensor_split([size], 1)]
        yield leaf.tensor_split([leaf.shape[0] // num * size])


def _is_flattened(leaf: Tensor, size: int) -> bool:
    """Return whether the first dimension may be that of positions and of examples, flattened."""
    return leaf.ndim > 0 and leaf.shape[0] > size and leaf.shape[0] % size == 0


def _check(state: State, ways: Iterable[tuple[State, Sequence[State]]]) -> None:
    """Raise unless the loss of the whole is the mean over its parts in one of several ways to arrange the outputs."""
    has_rows, found = state.context.layout.has_rows(state.batch), []
    for whole, parts in ways:
        try:
            compared = _compared(whole, parts)
        except Exception:
            if has_rows:
                raise
            continue  # a way in which the outputs do not fit the targets
        if compared is None or not compared.is_apart or not _is_apart_in_double(whole, parts):
            return
        found.append((compared, len(parts)))
    loss_fn, layout = state.context.loss, state.context.layout
    if found:
        (total, mean, _, when), num = found[0]
        raise ValueError(
            f"the loss {shown(loss_fn)} is {total:.6g} for {state.num_examples} examples together, but {mean:.6g} as "
            f"the mean over {num} slices{when}, as which microbatches and several processes compute it. If it is a sum "
            "over examples, make it a mean (reduction='mean'); if it is a mean over some positions, let it report "
            "their number in a method num_terms(outputs, targets); if it compares examples with each other, as "
            "contrastive losses do, write losses.over_batch(loss); if it adds means with different denominators, give "
            "it a method denominators(targets), or write losses.over_batch(loss)"
        )
    if not has_rows:
        warn(
            f"it is not known whether the loss {shown(loss_fn)} is a mean over examples, as which microbatches and "
            f"several processes compute it: with {layout.describe(state.batch)}, the outputs of slices cannot be put "
            "together. Let the network return a row for each example, or for each row of the batch's tensors"
        )


class _Compared(NamedTuple):
    """The loss of a whole batch beside the mean over its parts; of a population, those of one member."""

    total: float
    mean: float
    is_apart: bool
    """True if they differ by more than rounding."""
    when: str = ""
    """The settings of the loss, if they are not those of the step."""


def _compared(whole: State, parts: Sequence[State]) -> _Compared | None:
    """Return the two losses; `None` if the loss draws random numbers, changes buffers or is not finite."""
    found = _compared_now(whole, parts)
    if found is None or found.is_apart or not whole.context.loss_scalars:
        return found
    # The weight of a term often grows from 0, which hides the term in the first step.
    later = _compared_now(_without_zeros(whole), [_without_zeros(part) for part in parts])
    return later and later._replace(when=" (with 1 in place of schedules and named scalars that are 0 now)")


def _without_zeros(state: State) -> State:
    assert state.clock is not None
    hparams = {name: torch.where(value == 0, 1.0, value) for name, value in state.hparams.items()}
    return state.replace(clock=state.clock.without_zeros(), hparams=hparams)


def _compared_now(whole: State, parts: Sequence[State]) -> _Compared | None:
    total, again = _loss_of(whole), _loss_of(whole.replace(key=fold_in(whole.key, 1)))
    if total is None or again is None or is_any(~total.isfinite() | (total != again)):
        return None
    mean, weights, largest = None, 0, total.abs()
    for part in parts:
        value, weight = _loss_of(part), num_terms(part)
        if value is None:
            return None
        weights, largest = weights + weight, largest.maximum(torch.where(value.isfinite(), value.abs(), 0))
        mean = averaged(mean, value, weight, weights)
    assert mean is not None
    difference = (total - mean).abs()
    # The mean over a slice in which nothing counts is NaN; `averaged` leaves it out if the loss reports its terms.
    is_apart = ~mean.isfinite() | (difference > max(_TOLERANCE, 8 * torch.finfo(total.dtype).eps) * largest + 1e-6)
    member = int(unwrapped(difference).flatten().argmax())
    of_total, of_mean = (unwrapped(value).flatten()[member].item() for value in (total, mean))
    return _Compared(of_total, of_mean, is_any(is_apart))


def _is_apart_in_double(whole: State, parts: Sequence[State]) -> bool:
    """Return whether two losses also differ in double precision, if the loss accepts it, and not only by rounding."""
    try:
        compared = _compared(_in_double(whole), [_in_double(part) for part in parts])
    except Exception:  # for example, because its own parameters are in single precision
        return True
    return compared is None or compared.is_apart


def _in_double(state: State) -> State:
    """Return the state with outputs in double precision."""

    def doubled(tensor: Tensor) -> Tensor:
        return tensor.to(torch.promote_types(tensor.dtype, torch.float64)) if tensor.is_floating_point() else tensor

    return state.replace(outputs=batches.map_tensors(doubled, state.outputs))


def _loss_of(state: State) -> Tensor | None:
    """Return the loss of a state's outputs; `None` if it is not 0-d or has changed buffers."""
    outputs, targets = state.outputs, targets_of_loss(state)
    loss, buffers = state.call_loss(lambda fn: losses.evaluate_loss(fn, outputs, targets), train=True)
    names = state.context.loss_buffer_names
    is_changed = any(is_any(buffers[name] != state.buffers[name]) for name in names)
    return None if is_changed or loss.ndim else loss.detach()


_TOLERANCE = 1e-3
"""Relative difference that is taken for rounding, in float32."""
