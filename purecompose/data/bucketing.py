"""Batches of sequences of similar length, padded to one of a few lengths.

    bucket of a sequence   = the first bound that is at least its length
    batches of an epoch    = each bucket in the keyed order of the epoch, cut into batches, all in a keyed order

The number of batches depends on neither key nor epoch, so that an epoch has a length, and a run resumes at any batch. A
compiled step sees as many forms of batches as there are bounds, and last batches of buckets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from purecompose._support.specs import check_number, check_whole, shown, suggests_keywords
from purecompose.random import Rng, fold_in, permutation, salt


_BATCHES = salt("data buckets")


@dataclass(frozen=True, eq=False)
class Buckets:
    """How samples of different lengths are put into batches and padded. Created by `buckets`.

    Attributes:
        lengths: The length of each sample, int64 of shape `(num_examples,)`, on the CPU.
        bounds: The greatest length in each bucket, in rising order.
        sizes: The number of samples in a batch of each bucket.
        pad: The number that fills up sequences, or one for each member that is padded.
        pad_to_bound: True to pad to the bound of the bucket, False to pad to the longest sequence of the batch.
    """

    lengths: Tensor
    bounds: tuple[int, ...]
    sizes: tuple[int, ...]
    pad: float | Mapping[Any, float]
    pad_to_bound: bool

    def __repr__(self) -> str:
        return f"Buckets({len(self.lengths)} samples, bounds={self.bounds}, sizes={self.sizes})"

    def batches(self, order: Tensor, *, drop_last: bool, key: Tensor | None = None, epoch: int = 0) -> list[Tensor]:
        """Return the indices of each batch of an epoch.

        Args:
            order: The order of all samples, int64 of shape `(num_examples,)`.
            drop_last: Leave out batches that are smaller than the others of their bucket.
            key: The run's key, for the order of the batches; by default they have that of the buckets.
            epoch: The number of the epoch.
        """
        number = torch.bucketize(self.lengths, torch.tensor(self.bounds))[order]
        found: list[Tensor] = []
        for bucket, size in enumerate(self.sizes):
            parts = order[number == bucket].split(size)
            found += [part for part in parts if len(part) == size or (len(part) and not drop_last)]
        if key is None:
            return found
        places = permutation(Rng(fold_in(key, epoch), _BATCHES), len(found))
        return [found[place] for place in places.tolist()]

    def num_batches(self, *, drop_last: bool) -> int:
        """Return the number of batches in an epoch."""
        return len(self.batches(torch.arange(len(self.lengths)), drop_last=drop_last))

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch of samples, whose sequences are padded along their first dimension, all to one length."""
        first = samples[0]
        is_numbers = isinstance(first, list) and isinstance([*first, 0][0], int | float)
        is_single = is_numbers or not isinstance(first, Mapping | tuple | list)
        names = [*first] if isinstance(first, Mapping) else range(1 if is_single else len(first))
        columns: dict[Any, Any] = {
            name: samples if is_single else [sample[name] for sample in samples] for name in names
        }
        pads = self.pad
        if not isinstance(pads, Mapping):
            firsts = {name: column[0] for name, column in columns.items() if not isinstance(column[0], str)}
            pads = {name: pads for name, one in firsts.items() if torch.as_tensor(one).ndim}
        if unknown := [name for name in pads if name not in columns]:
            raise ValueError(f"data.buckets: pad={self.pad!r}: samples have no {unknown[0]!r}, but {[*columns]}")
        rows = {name: _tensors(columns[name]) for name in pads}
        longest = max((len(one) for column in rows.values() for one in column), default=0)
        bounds = (bound for bound in self.bounds if bound >= longest)
        length = next(bounds, longest) if self.pad_to_bound else longest
        for name, column in rows.items():
            ends = [[0, 0] * (one.ndim - 1) + [0, length - len(one)] for one in column]
            pairs = zip(column, ends, strict=True)
            columns[name] = torch.stack([F.pad(one, end, value=pads[name]) for one, end in pairs])
        batch = {name: one if isinstance(one, Tensor) else default_collate(one) for name, one in columns.items()}
        return batch if isinstance(first, Mapping) else batch[0] if is_single else tuple(batch.values())


@suggests_keywords
def buckets(
    lengths: Sequence[int] | Tensor,
    *,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    bounds: int | Sequence[int] = 8,
    multiple_of: int = 1,
    pad: float | Mapping[Any, float] = 0,
    pad_to: str = "bound",
) -> Buckets:
    """Put samples of similar length into batches, given to `data.loader` in place of the batch size.

    Each batch has samples of one bucket, padded along their first dimension. The order within and among buckets is that
    of (key, epoch); with `shuffle=False`, and in plain iteration, the shortest come first.

    Args:
        lengths: The length of each sample: that of the longest of its sequences that are padded.
        batch_size: Samples per batch; the last batch of each bucket may be smaller.
        max_tokens: Largest number of elements per batch, padding included, in place of `batch_size`: batches of short
            samples have more of them.
        bounds: The greatest length in each bucket, in rising order, the last one at least the greatest length; or the
            number of buckets, which then have about as many samples each.
        multiple_of: Round bounds up to a multiple of this number.
        pad: The number that fills up each sequence of a sample; or one for each member (a name or an index) that is
            padded, such as `{"input_ids": 0, "labels": -100}`, while others are stacked as they are.
        pad_to: "bound" to pad to the bound of the bucket, so that few sizes occur; "longest" to pad to the longest
            sequence of the batch, for steps that are not compiled, or compiled with `dynamic="all"`.

    Raises:
        TypeError: A setting of the wrong type.
        ValueError: Lengths or bounds are negative, empty or not in order; a length is above the last bound or
            `max_tokens`; both or none of `batch_size` and `max_tokens` are given.

    Example:
        >>> from purecompose.data import loader
        >>> texts = [torch.ones(length) for length in (2, 7, 3, 8, 2)]
        >>> data = loader(texts, buckets([len(text) for text in texts], batch_size=2, bounds=[4, 8]))
        >>> [tuple(batch.shape) for batch in data]
        [(2, 4), (1, 4), (2, 8)]
    """
    given = torch.as_tensor(lengths)
    if given.ndim != 1 or not len(given) or given.is_floating_point() or int(given.min()) < 0:
        raise ValueError(f"data.buckets: lengths: expected one whole number >= 0 for each sample, got {shown(lengths)}")
    if (batch_size is None) == (max_tokens is None):
        raise ValueError(f"data.buckets: expected either batch_size or max_tokens, got {batch_size=}, {max_tokens=}")
    check_whole(multiple_of, "data.buckets: multiple_of", 1)
    for number in pad.values() if isinstance(pad, Mapping) else [pad]:
        check_number(number, "data.buckets: pad")
    if pad_to not in ("bound", "longest"):
        raise ValueError(f"data.buckets: pad_to={pad_to!r}: expected 'bound' or 'longest'")
    given, most = given.long().cpu(), int(given.max())
    limits = [-(-bound // multiple_of) * multiple_of for bound in _bounds(bounds, given)]
    limits = sorted({max(limit, 1) for limit in limits})
    if most > limits[-1]:
        raise ValueError(f"data.buckets: bounds={bounds!r}: the longest sample has {most}, more than the last bound")
    if max_tokens is None:
        sizes = [check_whole(batch_size, "data.buckets: batch_size", 1)] * len(limits)
    else:
        check_whole(max_tokens, "data.buckets: max_tokens", limits[-1], hint="the greatest length, padded")
        sizes = [max_tokens // limit for limit in limits]
    return Buckets(given, tuple(limits), tuple(sizes), pad, pad_to == "bound")


def _tensors(column: list[Any]) -> list[Tensor]:
    """Return sequences as tensors; an empty list, which has no dtype of its own, has that of the others."""
    found = [torch.as_tensor(one) for one in column]
    dtype = next((one.dtype for one in found if len(one)), None)
    return [
        one.to(dtype) if isinstance(given, list) and not given else one
        for given, one in zip(column, found, strict=True)
    ]


def _bounds(bounds: int | Sequence[int], lengths: Tensor) -> list[int]:
    if isinstance(bounds, int):
        number = check_whole(bounds, "data.buckets: bounds", 1)
        ranked = lengths.sort().values.tolist()
        return [ranked[-(-len(ranked) * (i + 1) // number) - 1] for i in range(number)]
    found = [check_whole(bound, f"data.buckets: bounds[{i}]", 1) for i, bound in enumerate(bounds)]
    if not found or found != sorted({*found}):
        raise ValueError(f"data.buckets: bounds={bounds!r}: expected lengths in rising order")
    return found
