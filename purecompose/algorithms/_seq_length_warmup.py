"""Sequence length warm-up: trains a language model on short sequences first, and gradually on longer ones."""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose.algorithms._parts import Elapsed, reported
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.schedule.declared import Within, checked
from purecompose.time import Time, TimeUnit
from purecompose.time.event import Event, snapped
from purecompose.time.predicates import NEVER, on


Duration: TypeAlias = Annotated[float, Within(0, 1, hint="it is the warm-up's share of the run")]
NumTokens: TypeAlias = Annotated[int, Within(1, hint="it is a number of tokens")]


@checked
def warmup_length(
    elapsed: Elapsed,
    *,
    duration: Duration = 0.3,
    min_seq_length: NumTokens = 8,
    max_seq_length: NumTokens = 1024,
    step_size: NumTokens = 64,
) -> int:
    """Return the length of sequences at a point of a run.

    Args:
        elapsed: The fraction of the run that is over, at least 0; above 1 if training continues.
        duration, min_seq_length, max_seq_length, step_size: See `seq_length_warmup`.

    Returns:
        The length, which never decreases as the run continues.

    Example:
        >>> [warmup_length(elapsed / 10, max_seq_length=32, step_size=8) for elapsed in range(5)]
        [8, 16, 24, 32, 32]
    """
    _check_lengths("warmup_length", min_seq_length, max_seq_length)
    num_steps = -(-(max_seq_length - min_seq_length) // step_size)
    # Snapped, so that a step is made exactly on time although, for example, 0.1 / 0.3 * 3 may round to less than 1.
    done = num_steps if elapsed >= duration else math.floor(snapped(num_steps * (elapsed / duration)))
    return min(min_seq_length + step_size * done, max_seq_length)


@checked
def set_batch_sequence_length(
    batch: Any, length: NumTokens, *, truncate: bool = True, preserve_end_of_sequence: bool = False
) -> Any:
    """Shorten the sequences of a batch.

    The current length L is read from the mapping's "input_ids" or "inputs_embeds", or else from the first tensor with
    at least two dims: token ids, integers (N, L), or embeddings, floats (N, L, D).

    Args:
        batch: A mapping, a tuple, a tensor, or any other batch.
        length: The new length, at least 1. If it is not less than L, nothing is done.
        truncate: Keep the first `length` positions of every tensor with the sequences' length: ids, masks and labels
            (N, L), dense labels (N, C, L), and attention masks (L, L), (N, L, L) or (N, ..., L, L) in both dims;
            floating (N, L, L) are taken for embeddings. If False, the tokens of all examples are concatenated and cut
            into rows of the new length; fewer than `length` tokens at the end are dropped.
        preserve_end_of_sequence: When truncating, move the entry at each row's last valid position (by
            "attention_mask") to the last position that is kept, in every tensor with a row for each example.

    Returns:
        A new batch of the same structure; the same object if `length` is not less than L.

    Raises:
        TypeError: No sequences in the batch, or an argument of the wrong type.
        ValueError: A length below 1; `preserve_end_of_sequence=True` and a batch without a mask (N, L); or
            `truncate=False` and members without a position for each token, which cannot be cut into the new rows.

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
    _check_ways("set_batch_sequence_length", truncate, preserve_end_of_sequence)
    sequences = _sequences(batch, "set_batch_sequence_length")
    return shortened(batch, sequences, length, truncate, preserve_end_of_sequence)


@factory
def seq_length_warmup(
    duration: Duration = 0.3,
    min_seq_length: NumTokens = 8,
    max_seq_length: NumTokens = 1024,
    step_size: NumTokens = 64,
    *,
    truncate: bool = True,
    preserve_end_of_sequence: bool = False,
    name: str = "seq_length_warmup",
) -> Algorithm:
    """Train on sequences that grow to their full length.

        n = ceil((max - min) / step),   L(t) = min(min + step floor(n t / d), max)

    with t the fraction of the run that is over and d the warm-up's share of it: L starts at `min_seq_length`, grows by
    `step_size`, and reaches `max_seq_length` exactly at the end of the warm-up. The run's length may be in any unit
    except seconds; if it is in epochs of unknown length, t changes only between epochs.

    Events: AFTER_DATALOADER, after methods such as `alibi` that run before `Trait.SHORTENS_SEQUENCES`. Reads and
    replaces: the batch. Reports in `metrics`, as numbers: `f"{name}/curr_seq_len"` and `f"{name}/curr_bs"`, the new
    length and number of examples of the batch.

    This is a host algorithm: a compiled step is compiled separately for each length.

    Time counts the batch as it was loaded; everything else sees the shortened batch: `state.num_examples`,
    microbatches, the loss, and draws for each example.

    The state's input must be token ids (N, L) or embeddings (N, L, D); if the input is the whole batch, as for
    `losses.model_loss`, they are found as described in `set_batch_sequence_length`.

    Args:
        duration: The warm-up's share of the run, in [0, 1]. With 0 the algorithm never matches.
        min_seq_length: The length at the start, tokens; at least 2 for a model that shifts its labels itself, whose
            loss of a single token is NaN.
        max_seq_length: The length from the end of the warm-up on, tokens; longer batches are cut to it until the end of
            the run.
        step_size: The number of tokens by which the length grows at a time.
        truncate: Cut sequences off if True, otherwise split them into more rows; see `set_batch_sequence_length`.
        preserve_end_of_sequence: Keep the token at the end of each row when cutting it off.
        name: Name of the algorithm and prefix of its metrics.

    Raises:
        TypeError, ValueError: A setting of the wrong type or out of range, or `preserve_end_of_sequence` with
            `truncate=False`. In the step: inputs that are not sequences, a run without a duration or with a duration in
            seconds, and the errors of `set_batch_sequence_length`.

    Example:
        >>> seq_length_warmup(0.5, 64, 512, 64)  # doctest: +ELLIPSIS
        seq_length_warmup(duration=0.5, min_seq_length=64, max_seq_length=512, step_size=64, truncate=True, ...)
        >>> seq_length_warmup(0).match
        never

    References:
        Conglong Li et al.: The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT
        Models. NeurIPS 2022. https://arxiv.org/abs/2108.06084
    """
    _check_lengths("seq_length_warmup", min_seq_length, max_seq_length)
    _check_ways("seq_length_warmup", truncate, preserve_end_of_sequence)
    length_at = partial(
        warmup_length,
        duration=duration,
        min_seq_length=min_seq_length,
        max_seq_length=max_seq_length,
        step_size=step_size,
    )
    ends = Time(duration, TimeUnit.DURATION)

    def apply(event: Event, state: State) -> State:
        del event
        sequences = sequences_of(state, name)
        # Call reached() in any case: it raises if the run's length is unknown.
        is_over, elapsed = state.timestamp.reached(ends), state.timestamp.elapsed()
        length = max_seq_length if is_over or elapsed is None else length_at(elapsed)
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
    )


def _check_lengths(where: str, min_seq_length: int, max_seq_length: int) -> None:
    if max_seq_length < min_seq_length:
        raise ValueError(
            f"{where}: expected min_seq_length <= max_seq_length, got {min_seq_length} and {max_seq_length}"
        )


def _check_ways(where: str, truncate: bool, preserve_end_of_sequence: bool) -> None:
    if preserve_end_of_sequence and not truncate:
        raise ValueError(
            f"{where}: preserve_end_of_sequence=True is for truncated sequences, but truncate=False keeps all "
            "tokens, so no end is lost: leave one of the two out"
        )


def sequences_of(state: State, where: str) -> Tensor:
    """Return the input of a state, (N, L) or (N, L, D), which determines the length of its batch's sequences."""
    inputs = state.inputs
    return _checked(inputs, where) if isinstance(inputs, Tensor) else _sequences(inputs, where)


def _sequences(batch: Any, where: str) -> Tensor:
    """Return the tensor that determines the length of a batch's sequences."""
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
        "select them with State.create(input_field=...), or call them input_ids in a mapping"
    )


def shortened(batch: Any, sequences: Tensor, length: int, truncate: bool, preserve: bool) -> Any:
    """Do what `set_batch_sequence_length` does, for a batch whose sequences have the length of a given tensor."""
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
        # Contiguous, so that tensors of one shape share one compiled variant, regardless of their original length.
        return shorter.contiguous() if dims else tensor

    return batches.map_tensors(cut, batch)


def _dims_of_length(tensor: Tensor, num: int, length: int) -> list[int]:
    """Return the dims of a tensor that are sequence positions; the first dim is the batch's, except in one (L, L)."""
    is_common = tensor.shape == (length, length) and num != length
    dims = [dim for dim in range(0 if is_common else 1, tensor.ndim) if tensor.shape[dim] == length]
    # Floats (N, L, L) are embeddings whose width happens to be L.
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
    # The sum of the mask would be the end only for padding on the right.
    return (torch.arange(length, device=mask.device) * (mask != 0)).amax(1)


def _with_ends(whole: Tensor, shorter: Tensor, dim: int, ends: Tensor) -> Tensor:
    """Return a shortened tensor in which the last kept position of each row has the entry of the row's end."""
    length = shorter.shape[dim]
    rows, tokens = whole.movedim(dim, 1), shorter.movedim(dim, 1)
    ends = ends.to(whole.device)
    last = rows[torch.arange(len(rows), device=ends.device), ends].unsqueeze(1)
    is_last = torch.arange(length, device=ends.device) == ends.clamp(max=length - 1).unsqueeze(1)
    is_last = is_last.reshape(len(rows), length, *[1] * (rows.ndim - 2))
    return torch.where(is_last, last, tokens).movedim(1, dim)


def _in_rows(batch: Any, num: int, current: int, length: int) -> Any:
    """Return the batch with all tokens concatenated and cut into rows of the new length."""
    for rows in _rows_of_others(batch, num):
        raise ValueError(
            f"truncate=False: the batch holds a {type(rows).__name__} with a member for each of {num} examples, but "
            "examples are split into new rows; leave it out of the batch, or use truncate=True"
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
    """Yield lists and arrays, other than tensors, with a member for each example, such as names."""
    members = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    for member in members:
        is_list = isinstance(member, (list, tuple)) and len(member) == num and not batches.tensors(member)
        is_array = not isinstance(member, Tensor) and tuple(getattr(member, "shape", ()))[:1] == (num,)
        if is_list or is_array:
            yield member
