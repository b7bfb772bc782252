"""Keys: make, split and fold them, and name a draw.

A key is an int64 tensor of shape (2,), a seed and an offset, as in torch's own kernels, where it is uint64. It is the
start of a stream of blocks of four words: a draw reads the first of them, and `fold_in(key, data)` takes block `data`
as the new key. So use a key for draws or as the parent of other keys, not for both.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from hashlib import blake2s
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils import _pytree

from purecompose._support.specs import check_whole, shown
from purecompose.random.philox import WORD, folded


def key(seed: int, *, device: torch.device | str | None = None) -> Tensor:
    """Make a key from a seed.

    Args:
        seed: An integer in [0, 2**64). Seeds 0, 1, 2, ... give unrelated draws.
        device: Device of the key, and of every draw from it.

    Returns:
        int64 of shape (2,): the seed, as a signed number of 64 bits, and the offset 0.

    Raises:
        TypeError: The seed is not an integer.
        ValueError: The seed does not fit in 64 bits.

    Example:
        >>> key(7)
        tensor([7, 0])
    """
    number = check_whole(seed, "key: seed")
    if not 0 <= number < 2**64:
        raise ValueError(f"key: expected a seed in [0, 2**64), got {seed}; take it modulo 2**64 yourself")
    return torch.tensor([signed(number), 0], dtype=torch.int64, device=device)


@dataclass(frozen=True, slots=True, eq=False)  # comparison of tensors has no single truth value
class Rng:
    """A key and a name, which together determine a draw.

    Two draws from one `Rng` read the same words: give each its own name. Tensor fields are pytree leaves.

    Args:
        key: int64 of shape (2,).
        draw: A 32-bit salt that identifies the draw; a host number, or a 0-d int64 tensor.
        examples: None for draws about the whole batch; else the keys of the examples, int64 of shape (n, 2), or of a
            single one, (2,). `per_example` makes them.

    Example:
        >>> from purecompose.random import uniform
        >>> rng = Rng(fold_in(key(0), 3)).named("mixup")
        >>> whole = uniform(rng.per_example(torch.arange(4)), (4, 2))
        >>> torch.equal(uniform(rng.per_example(torch.arange(2, 4)), (2, 2)), whole[2:])
        True
    """

    key: Tensor
    draw: int | Tensor = 0
    examples: Tensor | None = None
    _leaf_names: tuple[str, ...] | None = field(default=None, init=False, repr=False)

    def named(self, name: str | int) -> "Rng":
        """Return another draw at the same place, whose salt is a stable hash of this draw's salt and the name.

        Siblings named by numbers in [0, 2**32) never share a salt; other names do with probability 2**-32.
        """
        return Rng(self.key, _mix(self.draw, _name_word(name)), self.examples)

    def per_example(self, indices: int | Tensor | None) -> "Rng":
        """Return an `Rng` for draws of shape (n, ...), row i for example `indices[i]`; None for the whole batch.

        The keys of the examples are `fold_in(key, index)`. A single index, an int or 0-d, is for draws of any shape
        about that example.
        """
        if indices is None:
            return replace(self, examples=None)
        is_index = isinstance(indices, int) and not isinstance(indices, bool)
        if not is_index and not (isinstance(indices, Tensor) and indices.dtype == torch.int64 and indices.dim() <= 1):
            raise TypeError(
                "Rng.per_example: expected the examples' global indices, int64 of shape (n,), "
                f"got {shown(indices)}; pass torch.arange(first, first + n)"
            )
        return replace(self, examples=folded(self.key, indices))

    def streams(self) -> Tensor:
        """Return the keys whose streams this draw reads: int64 of shape (2,), or (n, 2) for n examples."""
        keys = self.key if self.examples is None else self.examples
        if isinstance(self.draw, Tensor):
            return keys + (self.draw << 32)
        return keys + signed(self.draw << 32) if self.draw else keys


@overload
def split(key: Tensor, num: int = 2) -> Tensor: ...
@overload
def split(key: Rng, num: int = 2) -> list[Rng]: ...
def split(key: Tensor | Rng, num: int = 2) -> Tensor | list[Rng]:
    """Make `num` keys that are unrelated to each other and to the original key.

    Key i is `fold_in(key, i)`, so a split into more keys begins with the same ones.

    Args:
        key: int64 of shape (2,), or an `Rng`.
        num: Number of keys.

    Returns:
        int64 of shape (num, 2); for an `Rng`, a list of `num` of them.

    Raises:
        TypeError: `key` is not a key, or `num` is not an integer.
        ValueError: `num` is negative.

    Example:
        >>> first, second = split(key(0))
    """
    if check_whole(num, "split: num") < 0:
        raise ValueError(f"split: expected num >= 0, got {num}")
    if isinstance(key, Rng):
        branch = key.named("split")
        return [branch.named(index) for index in range(num)]
    root = as_rng(key, "split").key
    return folded(root, torch.arange(num, dtype=torch.int64, device=root.device))


@overload
def fold_in(key: Tensor, data: int | Tensor) -> Tensor: ...
@overload
def fold_in(key: Rng, data: int | str) -> Rng: ...
def fold_in(key: Tensor | Rng, data: int | str | Tensor) -> Tensor | Rng:
    """Make the key that belongs to `data`, as in `fold_in(key, epoch)`.

    Args:
        key: int64 of shape (2,), or an `Rng`, for which this is `named`.
        data: An integer in [-2**63, 2**64), read modulo 2**64, or a 0-d int64 tensor; for an `Rng`, a name.

    Returns:
        int64 of shape (2,); for an `Rng`, an `Rng`.

    Raises:
        TypeError: `key` is not a key, or `data` is not an integer.
        ValueError: `data` does not fit in 64 bits.

    Example:
        >>> torch.equal(fold_in(key(0), 3), fold_in(key(0), torch.tensor(3)))
        True
    """
    if isinstance(key, Rng):
        if isinstance(data, Tensor):
            raise TypeError(
                f"fold_in: expected a str or an int for an Rng, got {shown(data)}; fold it into the Rng's key"
            )
        return key.named(data)
    root = as_rng(key, "fold_in").key
    if isinstance(data, Tensor):
        if data.dtype != torch.int64 or data.dim() != 0:
            raise TypeError(f"fold_in: expected an int or a 0-d int64 tensor, got {shown(data)}")
        return folded(root, data)
    number = check_whole(data, "fold_in: data")
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"fold_in: expected an integer of 64 bits, got {number}")
    return folded(root, signed(number))


def salt(*names: str | int) -> int:
    """Return the 32-bit salt of a chain of names: `Rng(key).named(a).named(b).draw == salt(a, b)`.

    Args:
        *names: Names or numbers, from the outermost on.

    Example:
        >>> Rng(key(0)).named("mixup").named(1).draw == salt("mixup", 1)
        True
    """
    return reduce(_mix, map(_name_word, names), 0)


def as_rng(key: Tensor | Rng, what: str) -> Rng:
    """Check a key and return it as an `Rng`, for errors of the function `what`; a bare key is an unnamed draw."""
    rng = key if isinstance(key, Rng) else Rng(key)
    root = rng.key
    if not isinstance(root, Tensor) or root.dtype != torch.int64 or root.shape != (2,):
        raise TypeError(
            f"{what}: expected a key, an int64 tensor of shape (2,), got {shown(root)}; "
            "make one with key(seed), or use torch.func.vmap for many"
        )
    return rng


def signed(number: int) -> int:
    """Return a number modulo 2**64 as int64 holds it."""
    return (number + 2**63) % 2**64 - 2**63


def _mix(value: Any, word: int) -> Any:
    """Return one step of MurmurHash3 and its finalizer, for ints and int64 tensors; one-to-one in each argument."""
    hashed = ((value ^ word) * 5 + 0xE6546B64) & WORD
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & WORD
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & WORD
    return hashed ^ (hashed >> 16)


@lru_cache(maxsize=4096, typed=True)  # typed, because True is not a valid name but equals 1
def _hashed(name: str | int) -> int:
    if isinstance(name, str):
        return int.from_bytes(blake2s(name.encode(), digest_size=4).digest(), "little")
    number = check_whole(name, "name of a draw")
    if 0 <= number <= WORD:
        return _mix(0x9E3779B9, number)
    return _hashed(f"int {number}")


def _name_word(name: str | int) -> int:
    """Return a name as a word; small numbers are mapped one-to-one, so that siblings differ."""
    return _hashed(name)


# For torch.compile around a function that draws: it cannot trace a hash, and need not, because names are constants. The
# public function `torch.compiler.assume_constant_result` sets this mark too, but imports the compiler.
_name_word._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


_FIELDS = ("key", "draw", "examples")


def _flatten(rng: Rng) -> tuple[list[Any], Any]:
    names = rng._leaf_names or tuple(name for name in _FIELDS if not isinstance(getattr(rng, name), int | None))
    hosts = tuple(None if name in names else getattr(rng, name) for name in _FIELDS)
    return [getattr(rng, name) for name in names], (names, hosts)


def _flatten_with_keys(rng: Rng) -> tuple[list[Any], Any]:
    leaves, context = _flatten(rng)
    return [(_pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[0], leaves, strict=True)], context


def _unflatten(leaves: Any, context: Any) -> Rng:
    leaf_names, hosts = context
    rng = Rng(**(dict(zip(_FIELDS, hosts, strict=True)) | dict(zip(leaf_names, leaves, strict=True))))
    # A leaf remains a leaf whatever its value, because vmap fills trees with plain zeros to spread its `in_dims`.
    object.__setattr__(rng, "_leaf_names", leaf_names)
    return rng


_pytree.register_pytree_node(
    Rng, _flatten, _unflatten, flatten_with_keys_fn=_flatten_with_keys, serialized_type_name="purecompose.random.Rng"
)
