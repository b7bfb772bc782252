"""The order of an epoch, a pure function of (key, epoch, number of examples), and the epoch's seeds."""

from hashlib import blake2s
from struct import Struct

from torch import Tensor

from purecompose.random import Rng, fold_in, permutation, salt


_ORDER = salt("data order")


def epoch_order(key: Tensor, epoch: int, num_examples: int) -> Tensor:
    """Return the permutation of 0 .. num_examples-1 that belongs to an epoch, the same for all data sets of that size.

    Args:
        key: The run's key, int64 of shape (2,).
        epoch: Number of the epoch in the run, from 0.
        num_examples: Number of examples to order.

    Returns:
        int64 of shape `(num_examples,)`, on the key's device.
    """
    return permutation(Rng(fold_in(key, epoch), _ORDER), num_examples)


def epoch_seed(key: Tensor, epoch: int) -> int:
    """Return a 64-bit seed for code that draws an epoch's order in its own way, such as a sampler."""
    return int(fold_in(fold_in(key, _ORDER), epoch)[0]) % 2**64


def seed_words(key: tuple[int, int], draw: int, number: int, epoch: int) -> tuple[int, ...]:
    """Return eight 32-bit words for a numbered item of an epoch, to seed generators that do not use keys.

    They are computed by a hash on the host, which takes 2 microseconds; a draw on tensors takes a hundred.

    Args:
        key: The two numbers of the run's key, seed and offset.
        draw: A salt that identifies the purpose of the words.
        number: The item's number, such as the index of an example, in [0, 2**64).
        epoch: Number of the epoch in the run, from 0.
    """
    return _WORDS.unpack(blake2s(_PLACE.pack(*key, draw, number, epoch), digest_size=_WORDS.size).digest())


_PLACE, _WORDS = Struct("<qqIQQ"), Struct("<8I")
