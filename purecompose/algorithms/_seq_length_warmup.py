"""Sequence length warm-up: trains a language model on short sequences first, and on longer and longer ones."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.checks import check_flag, check_number, check_whole
from purecompose.algorithms._parts.reports import reported
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.time import Time, TimeUnit
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on
from purecompose.time.units import snapped


__all__ = ["seq_length_warmup", "sequences_of", "set_batch_sequence_length", "shortened", "warmup_length"]


def warmup_length(
    elapsed: float,
    *,
    duration: float = 0.3,
    min_seq_length: int = 8,
    max_seq_length: int = 1024,
    step_size: int = 64,
) -> int:
    """Return the length of sequences at a point of a run; see `seq_length_warmup` for the settings.

    Args:
        elapsed: The fraction of the run that is over, at least 0; above 1 where training continues.
        duration: The warm-up's share of the run; 0 for none.
        min_seq_length: The length at the start, tokens.
        max_seq_length: The length at the end of the warm-up and after it.
        step_size: By how much the length grows at a time.

    Returns:
        The length, which never falls as the run continues.

    Raises:
        TypeError, ValueError: A setting of the wrong kind or out of range.

    Example:
        >>> [warmup_length(elapsed / 10, max_seq_length=32, step_size=8) for elapsed in range(5)]
        [8, 16, 24, 32, 32]
    """
    check_number(elapsed, "warmup_length: elapsed", 0, hint="it is the share of the run that is over")
    _check_ramp("warmup_length", duration, min_seq_length, max_seq_length, step_size)
    num_steps = -(-(max_seq_length - min_seq_length) // step_size)
    # Snapped, so that the third of three steps is made at the warm-up's end, though 0.1 / 0.3 * 3 may be less than 1.
    done = num_steps if elapsed >= duration else math.floor(snapped(num_steps * (elapsed / duration)))
    return min(min_seq_length + step_size * done, max_seq_length)


def set_batch_sequence_length(
    batch: Any, length: int, *, truncate: bool = True, preserve_end_of_sequence: bool = False
) -> Any:
    """Shorten the sequences of a batch.

    A mapping's "input_ids" or "inputs_embeds", or else the first tensor with two dims or more, says how long the
    sequences are now: token ids, integers (N, L), or embeddings, floats (N, L, D).

    Args:
        batch: A mapping, a tuple, a tensor, or any other batch.
        length: The new length, at least 1. Not less than the present one, nothing is done.
        truncate: Keep the first `length` positions of whatever has the sequences' length: ids, masks and labels (N, L),
            dense labels (N, C, L), and attention masks (L, L), (N, L, L) or (N, ..., L, L) in both dims, of which
            floating (N, L, L) are taken for embeddings. All else stays. If False, all tokens are written one after the
            other, example by example, and cut into rows of the new length: more examples than before, where a row may
            begin in one example and end in the next. Fewer than `length` tokens at the end are dropped.
        preserve_end_of_sequence: When truncating, what stood at a row's last valid position (the last one that
            "attention_mask" has) comes to the last position that is kept, in every tensor with a row for each example.
            Rows that are shorter stay as they are.

    Returns:
        A new batch of the same form; the very same object where the length is not below the present one.

    Raises:
        TypeError: No sequences in the batch, or an argument of the wrong kind.
        ValueError: A length below 1; to preserve, a batch without a mask (N, L); not to truncate, members of another
            form than the sequences', which cannot follow them into new rows.

    Example:
        >>> ids = torch.arange(12).reshape(2, 6)
        >>> set_batch_sequence_length({"input_ids": ids, "labels": ids}, 4)["labels"].tolist()
        [[0, 1, 2, 3], [6, 7, 8, 9]]
        >>> set_batch_sequence_length({"input_ids": ids}, 4, truncate=False)["input_ids"].tolist()
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        >>> kept = {"input_ids": ids, "attention_mask": torch.ones(2, 6)}
        >>> set_batch_sequence_length(kept, 4, preserve_end_of_sequence=True)["input_ids"].tolist()
        [[0, 1, 2, 5], [6, 7, 8, 11]]
    """
    check_whole(length, "set_batch_sequence_length: length", 1, hint="it is a number of tokens")
    _check_ways("set_batch_sequence_length", truncate, preserve_end_of_sequence)
    sequences = _sequences(batch, "set_batch_sequence_length")
    return shortened(batch, sequences, length, truncate, preserve_end_of_sequence)


@factory
def seq_length_warmup(
    duration: float = 0.3,
    min_seq_length: int = 8,
    max_seq_length: int = 1024,
    step_size: int = 64,
    *,
    truncate: bool = True,
    preserve_end_of_sequence: bool = False,
    name: str = "seq_length_warmup",
) -> Algorithm:
    """Train on sequences that grow to their full length.

        n = ceil((max - min) / step),   L(t) = min(min + step floor(n t / d), max)

    with t the fraction of the run that is over and d the warm-up's share of it: L starts at `min_seq_length`, grows by
    `step_size`, and is `max_seq_length` from the warm-up's end on, not before. The run's length may be in any unit but
    seconds; in epochs of unknown length, t moves at their ends only.

    Events: AFTER_DATALOADER, after what writes sequences into rows (`Trait.SHORTENS_SEQUENCES`), such as `alibi`. Reads
    and replaces: the batch. Reports in `metrics` what the batch became, as numbers: `f"{name}/curr_seq_len"` and
    `f"{name}/curr_bs"`, its length and its number of examples.

    A host algorithm: lengths depend on time, and of a compiled step each length is a variant; see `step_size`.

    Time counts what the loader gave: `timestamp.sample` and `timestamp.token` count the batch before it is shortened.
    So a run over so many samples or tokens goes over the same data with and without the method. All else sees the batch
    that is trained on: `state.num_examples`, microbatches (cut from the rows that are there now, so that
    `microbatch_size` holds when `truncate=False` makes more of them), the loss, and draws for each example.

    Labels stay beside their tokens, position by position. A model that shifts labels itself (labels equal to ids) has
    no target for the last position, nor for the first token of a row; rows that were cut out of long ones have more
    such ends. Labels shifted in advance (labels[t] = ids[t + 1]) lose nothing at a cut. `preserve_end_of_sequence`
    moves the end token together with its own label, which is right where labels equal ids; with labels shifted in
    advance the end token becomes an input, and no target.

    The state's input must be token ids (N, L) or embeddings (N, L, D); with the whole batch as input, as for
    `losses.model_loss`, they are found as `set_batch_sequence_length` finds them.

    Args:
        duration: The warm-up's share of the run, in [0, 1]; 0 never matches: no warm-up, and no limit.
        min_seq_length: The length at the start, tokens.
        max_seq_length: The length from the end of the warm-up on. Longer batches stay cut to it; shorter ones are
            whole as soon as the ramp has come to their length.
        step_size: By how much the length grows at a time, tokens. Every length is compiled for itself in a compiled
            step, of which `compile` allows 32 by default.
        truncate: Cut sequences off, or else write them into more rows; see `set_batch_sequence_length`.
        preserve_end_of_sequence: Keep the token at each row's end when cutting it off.
        name: Names its metrics.

    Raises:
        TypeError, ValueError: A setting of the wrong kind or out of range, or `preserve_end_of_sequence` where nothing
            is cut off. In the step: inputs that are not sequences, a run without a duration or with one in seconds, and
            as `set_batch_sequence_length`.

    Example:
        >>> seq_length_warmup(0.5, 64, 512, 64)  # doctest: +ELLIPSIS
        seq_length_warmup(duration=0.5, min_seq_length=64, max_seq_length=512, step_size=64, truncate=True, ...)
        >>> seq_length_warmup(0).match
        never

    References:
        Conglong Li, Minjia Zhang, Yuxiong He: The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup
        for Training GPT Models. NeurIPS 2022, first as Curriculum Learning: A Regularization Method for Efficient and
        Stable Billion-Scale GPT Model Pre-Training, 2021. https://arxiv.org/abs/2108.06084
    """
    _check_ramp("seq_length_warmup", duration, min_seq_length, max_seq_length, step_size)
    _check_ways("seq_length_warmup", truncate, preserve_end_of_sequence)
    ramp = {
        "duration": duration,
        "min_seq_length": min_seq_length,
        "max_seq_length": max_seq_length,
        "step_size": step_size,
    }
    ends = Time(duration, TimeUnit.DURATION)

    def apply(event: Event, state: State) -> State:
        del event
        sequences = sequences_of(state, name)
        # Asked also for what it raises in a run of unknown length.
        length = max_seq_length if state.timestamp.reached(ends) else warmup_length(_elapsed(state), **ramp)
        batch = shortened(state.batch, sequences, length, truncate, preserve_end_of_sequence)
        num, current = sequences.shape[:2]
        if batch is not state.batch and not truncate:
            num = num * current // length
        return reported(state.replace(batch=batch), name, {"curr_seq_len": min(length, current), "curr_bs": num})

    return Algorithm(
        name,
        NEVER if duration == 0 else on(Event.AFTER_DATALOADER),
        apply,
        traits=frozenset({Trait.SHORTENS_SEQUENCES}),
        host=True,
        config={**ramp, "truncate": truncate, "preserve_end_of_sequence": preserve_end_of_sequence},
    )


def _check_ramp(where: str, duration: float, min_seq_length: int, max_seq_length: int, step_size: int) -> None:
    check_number(duration, f"{where}: duration", 0, 1, hint="it is the warm-up's share of the run")
    lengths = {"min_seq_length": min_seq_length, "max_seq_length": max_seq_length, "step_size": step_size}
    for role, value in lengths.items():
        check_whole(value, f"{where}: {role}", 1, hint="it is a number of tokens")
    if max_seq_length < min_seq_length:
        raise ValueError(
            f"{where}: expected min_seq_length <= max_seq_length, got {min_seq_length} and {max_seq_length}"
        )


def _check_ways(where: str, truncate: bool, preserve_end_of_sequence: bool) -> None:
    check_flag(truncate, f"{where}: truncate")
    check_flag(preserve_end_of_sequence, f"{where}: preserve_end_of_sequence")
    if preserve_end_of_sequence and not truncate:
        raise ValueError(
            f"{where}: preserve_end_of_sequence=True is for sequences that are cut off; truncate=False keeps all "
            "tokens, so that no end is lost: leave one of the two out"
        )


def _elapsed(state: State) -> float:
    elapsed = state.timestamp.elapsed()
    assert elapsed is not None, "a run without a duration has been refused"
    return elapsed


def sequences_of(state: State, where: str) -> Tensor:
    """Return the input of a state, (N, L) or (N, L, D), which says how long its batch's sequences are.

    Args:
        state: A state with a batch.
        where: Opens messages.

    Raises:
        TypeError: Inputs that are not sequences.
    """
    inputs = state.inputs
    return _checked(inputs, where) if isinstance(inputs, Tensor) else _sequences(inputs, where)


def _sequences(batch: Any, where: str) -> Tensor:
    """Return the tensors that give the lengths of a batch's sequences."""
    for name in ("input_ids", "inputs_embeds") if isinstance(batch, Mapping) else ():
        if isinstance(batch.get(name), Tensor):
            return _checked(batch[name], where)
    found = (tensor for tensor in batches.tensors(batch) if tensor.ndim > 1)
    return _checked(next(found, None), where)


def _checked(tensor: Any, where: str) -> Tensor:
    is_tensor = isinstance(tensor, Tensor)
    if is_tensor and tensor.ndim == (3 if tensor.is_floating_point() else 2) and tensor.dtype != torch.bool:
        return tensor
    came = tree.describe(tensor) if is_tensor else "no tensor with two dims or more"
    raise TypeError(
        f"{where}: expected sequences, token ids as integers (N, L) or embeddings as floats (N, L, D), got {came}; "
        "name them inside the batch by State.create(input_field=...), or call them input_ids in a mapping"
    )


def shortened(batch: Any, sequences: Tensor, length: int, truncate: bool, preserve: bool) -> Any:
    """`set_batch_sequence_length`, with what says how long the batch's sequences are."""
    num, current = sequences.shape[:2]
    if length >= current:
        return batch
    if not truncate:
        return _in_rows(batch, num, current, length)
    ends = _last_positions(batch, num, current) if preserve else None

    def cut(tensor: Tensor) -> Tensor:
        dims = _dims_of_length(tensor, num, current)
        shorter = tensor
        for dim in dims:
            shorter = shorter.narrow(dim, 0, length)
        if ends is not None and len(dims) == 1 and tensor.shape[0] == num:
            shorter = _with_ends(tensor, shorter, dims[0], ends)
        # In memory of its own: what has one shape is one variant, whatever it was cut from.
        return shorter.contiguous() if dims else tensor

    return batches.map_tensors(cut, batch)


def _dims_of_length(tensor: Tensor, num: int, length: int) -> list[int]:
    """Return the dims along which a tensor goes with the sequence; the first dim is the examples', but in a common (L,
    L).
    """
    is_common = tensor.shape == (length, length) and num != length
    dims = [dim for dim in range(0 if is_common else 1, tensor.ndim) if tensor.shape[dim] == length]
    # Floats (N, L, L) are embeddings that are as wide as the sequence is long.
    return dims[:1] if tensor.is_floating_point() and tensor.ndim == 3 else dims


def _last_positions(batch: Any, num: int, length: int) -> Tensor:
    """Return each row's last valid position, (N,) int64; 0 where nothing is valid."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.shape != (num, length):
        came = tree.describe(mask) if isinstance(mask, Tensor) else f"{type(mask).__name__} in {type(batch).__name__}"
        raise ValueError(
            f"preserve_end_of_sequence=True: expected an attention_mask ({num}, {length}), which says where rows end, "
            f"got {came}; put one into the batch, a mapping, or leave preserve_end_of_sequence=False"
        )
    # Not the mask's sum, which is the end only where padding stands on the right.
    return (torch.arange(length, device=mask.device) * (mask != 0)).amax(1)


def _with_ends(whole: Tensor, shorter: Tensor, dim: int, ends: Tensor) -> Tensor:
    """Return a shortened tensor with what stood at each row's end at the last position of the row that is kept."""
    length = shorter.shape[dim]
    rows, tokens = whole.movedim(dim, 1), shorter.movedim(dim, 1)
    ends = ends.to(whole.device)
    last = rows[torch.arange(len(rows), device=ends.device), ends].unsqueeze(1)
    is_last = torch.arange(length, device=ends.device) == ends.clamp(max=length - 1).unsqueeze(1)
    is_last = is_last.reshape(len(rows), length, *[1] * (rows.ndim - 2))
    return torch.where(is_last, last, tokens).movedim(1, dim)


def _in_rows(batch: Any, num: int, current: int, length: int) -> Any:
    """Return the batch's tokens one after the other, in rows of the new length."""
    for rows in _rows_of_others(batch, num):
        raise ValueError(
            f"truncate=False: the batch holds a {type(rows).__name__} with a member for each of {num} examples, and "
            "examples are cut into other ones; leave it out of the batch, or use truncate=True"
        )

    def written(tensor: Tensor) -> Tensor:
        dims = _dims_of_length(tensor, num, current)
        if not tensor.ndim:
            return tensor
        if len(dims) != 1 or tensor.shape[0] != num:
            raise ValueError(
                f"truncate=False: expected all tensors to have a position for each of {num}x{current} tokens, got "
                f"{tree.describe(tensor)}; leave it out of the batch, or use truncate=True"
            )
        tokens = tensor.movedim(dims[0], 1).flatten(0, 1)
        kept = tokens[: len(tokens) // length * length].unflatten(0, (-1, length))
        return kept.movedim(1, dims[0]).contiguous()

    return batches.map_tensors(written, batch)


def _rows_of_others(batch: Any, num: int) -> Iterable[Any]:
    """List and arrays with a member for each example, such as names."""
    members = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    for member in members:
        is_list = isinstance(member, (list, tuple)) and len(member) == num and not batches.tensors(member)
        is_array = not isinstance(member, Tensor) and tuple(getattr(member, "shape", ()))[:1] == (num,)
        if is_list or is_array:
            yield member
