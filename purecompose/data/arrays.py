"""Data sets in memory, in an order that is a pure function of (key, epoch).

    order(key, epoch) = permutation of 0 .. n-1 drawn at (key, "data order", epoch)
    batch i of the epoch = the examples order[i * batch_size : (i + 1) * batch_size]

So there is no loader state: the key, the epoch and the number of the batch suffice to resume, and two runs with the
same key see the same batches on every device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.specs import check_whole, shown, suggests_keywords
from purecompose.data.position import epoch_order
from purecompose.random import Rng, key as make_key, permutation, salt
from purecompose.random.keys import as_rng


_SPLIT = salt("data split")


@dataclass(frozen=True, eq=False)
class Arrays:
    """Inputs and targets in memory, and how they are split into batches. Created by `arrays`.

    Iterating over it yields `(inputs, targets)` batches in the stored order, as evaluation expects;
    `epoch` yields them in keyed order for training. `len` counts batches per epoch. With `names` batches are dicts;
    without targets each batch is one tensor, or a dict of one.

    Attributes:
        inputs: Shape `(num_examples, *rest)`, any dtype.
        targets: Shape `(num_examples, *rest)`, any dtype, on the same device; or `None`.
        batch_size: Examples per batch; the last batch of an epoch may be smaller.
        shuffle: True if `epoch` permutes; otherwise every epoch has the stored order.
        drop_last: True if a smaller last batch is left out, in `epoch` and in plain iteration.
        names: The names of inputs and targets in batches that are dicts; `None` for others.

    Raises:
        TypeError, ValueError: As for `arrays`.
    """

    inputs: Tensor
    targets: Tensor | None
    batch_size: int
    shuffle: bool = True
    drop_last: bool = False
    names: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        members = f"inputs={tree.describe(self.inputs)}"
        if self.targets is not None:
            members += f", targets={tree.describe(self.targets)}"
        rest = ("batch_size", "shuffle", "drop_last", "names")
        return f"Arrays({members}, {', '.join(f'{name}={getattr(self, name)!r}' for name in rest)})"

    def __post_init__(self) -> None:
        _check_members("arrays", *self._members)
        _check_names(self.names, len(self._members))
        check_whole(self.batch_size, "arrays: batch_size", 1)
        if self.drop_last and self.batch_size > self.num_examples:
            raise ValueError(
                f"arrays: drop_last=True leaves no batch at all: batch_size={self.batch_size} (int) is more "
                f"than the {self.num_examples} examples"
            )

    @property
    def num_examples(self) -> int:
        """Number of examples in the set, including those that `drop_last` leaves out of an epoch."""
        return self.inputs.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the tensors, and so of the batches."""
        return self.inputs.device

    def __len__(self) -> int:
        full, rest = divmod(self.num_examples, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    def __iter__(self) -> Iterator[Any]:
        """Return the batches in the stored order, as views of the data."""
        return self._stored(0)

    def epoch(self, key: Tensor, epoch: int, start: int = 0) -> Iterator[Any]:
        """Return the batches of one epoch, in the order that belongs to `(key, epoch)`.

        Args:
            key: The run's key, int64 of shape (2,), such as `state.key`. Not read when `shuffle` is off.
            epoch: Number of the epoch in the run, from 0.
            start: Number of the first batch to return, 0 to `len(self)`; earlier batches cost nothing.

        Returns:
            An iterator over batches in the form of plain iteration. Shuffled batches are copies.

        Raises:
            TypeError: `key` is not a key, or `epoch` or `start` is not an int.
            ValueError: `epoch` is negative, or `start` is outside 0 to `len(self)`.

        Example:
            >>> from purecompose.random import key
            >>> data = arrays(torch.arange(6.0), torch.arange(6), batch_size=4)
            >>> whole = [targets for _, targets in data.epoch(key(0), epoch=3)]
            >>> resumed = [targets for _, targets in data.epoch(key(0), epoch=3, start=1)]
            >>> len(whole), torch.equal(whole[1], resumed[0]), sorted(torch.cat(whole).tolist())
            (2, True, [0, 1, 2, 3, 4, 5])
        """
        check_whole(epoch, "Arrays.epoch: epoch", 0)
        check_whole(start, "Arrays.epoch: start", 0, len(self))
        if not self.shuffle:
            return self._stored(start)
        parts = self.order(key, epoch).split(self.batch_size)[start : len(self)]
        return (self._batch(*(member.index_select(0, chosen) for member in self._members)) for chosen in parts)

    def order(self, key: Tensor, epoch: int) -> Tensor:
        """Return the keyed order of one epoch: int64 of shape `(num_examples,)`, on the data's device."""
        return epoch_order(as_rng(key, "Arrays.epoch: key").key.to(self.device), epoch, self.num_examples)

    def to(self, device: torch.device | str) -> "Arrays":
        """Return the same set with its tensors on `device`."""
        targets = None if self.targets is None else self.targets.to(device)
        return replace(self, inputs=self.inputs.to(device), targets=targets)

    @property
    def _members(self) -> tuple[Tensor, ...]:
        return (self.inputs,) if self.targets is None else (self.inputs, self.targets)

    def _stored(self, start: int) -> Iterator[Any]:
        parts = (member.split(self.batch_size)[start : len(self)] for member in self._members)
        return map(self._batch, *parts)

    def _batch(self, *members: Tensor) -> Any:
        if self.names is not None:
            return dict(zip(self.names, members, strict=True))
        return members[0] if len(members) == 1 else members


def described(values: Any) -> str:
    """Return the repr of a named tuple, with dtypes and shapes in place of the numbers in its tensors."""
    shown = (tree.describe(value) if isinstance(value, Tensor) else repr(value) for value in values)
    members = (f"{name}={text}" for name, text in zip(values._fields, shown, strict=True))
    return f"{type(values).__name__}({', '.join(members)})"


class Split(NamedTuple):
    """Two disjoint parts of one data set."""

    train_inputs: Tensor
    """Shape `(num_examples - count, *rest)`."""
    train_targets: Tensor
    """Shape `(num_examples - count, *rest)`."""
    test_inputs: Tensor
    """Shape `(count, *rest)`."""
    test_targets: Tensor
    """Shape `(count, *rest)`."""

    def __repr__(self) -> str:
        return described(self)


@suggests_keywords
def arrays(
    inputs: Tensor,
    targets: Tensor | None = None,
    batch_size: int | None = None,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    names: tuple[str, ...] | None = None,
) -> Arrays:
    """Make an in-memory data set that yields batches of `batch_size` examples.

    Args:
        inputs: Shape `(num_examples, *rest)`.
        targets: Shape `(num_examples, *rest)`; `None` for data without targets, whose batches are only the inputs: the
            state needs `target_field=None`, or 0 if the input is the target.
        batch_size: Examples per batch, at least 1. Required.
        shuffle: Permute the order of each epoch by key; plain iteration never shuffles.
        drop_last: Leave out a last batch that is smaller than the others.
        names: Two names, for batches that are dicts, such as `("input_ids", "labels")`; the tokens of a language
            model's batch are counted by these names. One name if there are no targets. The state needs the same names
            as its `input_field` and `target_field`.

    Raises:
        TypeError: An argument has the wrong type, or the batch size is missing.
        ValueError: There are no examples, inputs and targets differ in number or device, the batch size is below 1, or
            `drop_last` leaves no batch.

    Example:
        >>> data = arrays(torch.zeros(10, 3), torch.zeros(10, dtype=torch.int64), batch_size=4)
        >>> len(data), [tuple(inputs.shape) for inputs, _ in data]
        (3, [(4, 3), (4, 3), (2, 3)])
        >>> [tuple(inputs.shape) for inputs in arrays(torch.zeros(10, 3), batch_size=8)]
        [(8, 3), (2, 3)]
    """
    if batch_size is None:
        raise TypeError("arrays: batch_size is missing; write arrays(inputs, targets, batch_size)")
    return Arrays(inputs, targets, batch_size, shuffle=shuffle, drop_last=drop_last, names=names)


def split(inputs: Tensor, targets: Tensor, size: int | float, *, seed: int) -> Split:
    """Split a test part off a data set, the same part for the same seed on every device.

    Args:
        inputs: Shape `(num_examples, *rest)`.
        targets: Shape `(num_examples, *rest)`.
        size: Size of the test part: a count (int), or a fraction of the examples (float in (0, 1), rounded).
        seed: Seed of the permutation that selects it.

    Returns:
        A `Split`; both parts are in permuted order.

    Raises:
        TypeError: Something other than tensors, or a size that is neither int nor float.
        ValueError: The data are unpaired or empty, or the size leaves one of the two parts empty.

    Example:
        >>> parts = split(torch.arange(10.0), torch.arange(10), 0.2, seed=0)
        >>> len(parts.train_targets), len(parts.test_targets)
        (8, 2)
    """
    _check_members("split", inputs, targets)
    num_examples = inputs.shape[0]
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise TypeError(f"split: expected size to be an int or a float, got {shown(size)}")
    count = round(size * num_examples) if isinstance(size, float) and 0.0 < size < 1.0 else size
    if not isinstance(count, int) or not 0 < count < num_examples:
        raise ValueError(
            f"split: expected size to be a count from 1 to {num_examples - 1} or a fraction in (0, 1) that "
            f"leaves neither part of the {num_examples} examples empty, got {shown(size)}"
        )
    order = permutation(Rng(make_key(seed).to(inputs.device), _SPLIT), num_examples)
    held, kept = order[:count], order[count:]
    return Split(inputs[kept], targets[kept], inputs[held], targets[held])


def _check_names(names: Any, num: int) -> None:
    if names is None:
        return
    if not isinstance(names, tuple) or len(names) != num or not all(isinstance(name, str) for name in names):
        wanted = "two names, such as ('input_ids', 'labels')" if num > 1 else "one name, such as ('image',)"
        raise TypeError(f"arrays: names: expected {wanted}, got {shown(names)}")
    if len(set(names)) < num:
        raise ValueError(f"arrays: names: expected different names for inputs and targets, got {names[0]!r} twice")


def _check_members(where: str, inputs: Any, *other: Any) -> None:
    """Raise unless the inputs, and the targets if there are any, are tensors of the same number of examples."""
    for name, value in zip(("inputs", "targets"), (inputs, *other), strict=False):
        if not isinstance(value, Tensor):
            raise TypeError(f"{where}: expected {name} to be a tensor, got {type(value).__name__}; use torch.as_tensor")
        if value.ndim == 0:
            raise ValueError(f"{where}: expected {name} with examples along the first axis, got a 0-d tensor")
    if len(inputs) == 0:
        raise ValueError(f"{where}: expected at least one example, got inputs of shape {tuple(inputs.shape)}")
    for targets in other:
        if len(inputs) != len(targets):
            raise ValueError(
                f"{where}: {len(inputs)} inputs do not pair with {len(targets)} targets; "
                f"their shapes are {tuple(inputs.shape)} and {tuple(targets.shape)}"
            )
        if inputs.device != targets.device:
            raise ValueError(
                f"{where}: inputs are on {inputs.device} and targets on {targets.device}; move one of them"
            )
