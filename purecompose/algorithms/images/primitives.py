"""The augmentation primitives of RandAugment and AugMix: an operation, and its amount.

The amount depends on the severity S in [0, 10], and on a uniform number u in [0, 1) and a fair coin, which are drawn
for each image. With s = u S and I(x) = floor(s x / 10):

    autocontrast, equalize      in full
    posterize                   8 - I(4) bits
    solarize                    from level 256 - I(256) on
    rotate                      I(30) degrees, in either direction
    shear_x, shear_y            slope 0.3 s / 10, in either direction
    translate_x, translate_y    I(a third of the side) pixels, in either direction
    color, contrast, sharpness  factor 1 + u max(S - 1, 0) or 1 - 0.09 u S
    brightness                  factor 1 + 0.75 u max(S - 1, 0) or 1 - 0.09 u S
    *_original                  factor 0.1 + 1.8 s / 10

A severity of 0 leaves every image unchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from purecompose._support.checks import frozen
from purecompose.algorithms.images import geometry, tones


@dataclass(frozen=True)
class Strength:
    """Values that determine an operation's amount for each image.

    Attributes:
        severity: The severity S, a number or a 0-d tensor.
        share: The uniform numbers u, (N,).
        is_up: The coins, bool (N,).
        height: The height of the images in pixels.
        width: The width of the images in pixels.
    """

    severity: float | Tensor
    share: Tensor
    is_up: Tensor
    height: int
    width: int

    @property
    def fraction(self) -> Tensor:
        """The fraction s / 10, (N,)."""
        return self.share * self.severity / 10

    def either_way(self, amount: Tensor) -> Tensor:
        """Return the amount, or its negative where the coin is False."""
        return torch.where(self.is_up, amount, -amount)

    def factor(self, above: float = 1.0) -> Tensor:
        """Return a factor of at least 1 where the coin is True, else at most 1."""
        over = self.severity - 1
        over = over.clamp(min=0) if isinstance(over, Tensor) else max(over, 0.0)
        return torch.where(self.is_up, 1 + above * self.share * over, 1 - 0.09 * self.share * self.severity)

    def original_factor(self) -> Tensor:
        """Return a factor from 0.1 up, or 1 where s is 0."""
        return torch.where(self.fraction > 0, 0.1 + 1.8 * self.fraction, 1)


@dataclass(frozen=True)
class Primitive:
    """An operation and its amount.

    Attributes:
        name: The name in the sets.
        operation: A function `(levels, amount) -> levels`.
        amount: A function from a `Strength` to the amounts (N,).
    """

    name: str
    operation: Callable[[Tensor, Tensor], Tensor]
    amount: Callable[[Strength], Tensor]

    def __call__(self, levels: Tensor, strength: Strength) -> Tensor:
        """Return the levels after the operation."""
        return self.operation(levels, self.amount(strength))

    @property
    def moves(self) -> bool:
        """Whether the operation is one of those that move pixels; False for other people's functions."""
        return self.operation in _MOVING


_MOVING = (geometry.rotate, geometry.shear_x, geometry.shear_y, geometry.translate_x, geometry.translate_y)
_ALL = (
    Primitive("autocontrast", tones.autocontrast, lambda s: s.fraction),
    Primitive("equalize", tones.equalize, lambda s: s.fraction),
    Primitive("posterize", tones.posterize, lambda s: 8 - (s.fraction * 4).floor()),
    Primitive("rotate", geometry.rotate, lambda s: s.either_way((s.fraction * 30).floor())),
    Primitive("solarize", tones.solarize, lambda s: 256 - (s.fraction * 256).floor()),
    Primitive("shear_x", geometry.shear_x, lambda s: s.either_way(s.fraction * 0.3)),
    Primitive("shear_y", geometry.shear_y, lambda s: s.either_way(s.fraction * 0.3)),
    Primitive("translate_x", geometry.translate_x, lambda s: s.either_way((s.fraction * (s.width / 3)).floor())),
    Primitive("translate_y", geometry.translate_y, lambda s: s.either_way((s.fraction * (s.height / 3)).floor())),
    Primitive("color", tones.saturation, lambda s: s.factor()),
    Primitive("contrast", tones.contrast, lambda s: s.factor()),
    Primitive("brightness", tones.brightness, lambda s: s.factor(0.75)),
    Primitive("sharpness", tones.sharpness, lambda s: s.factor()),
)
_ORIGINAL = tuple(
    Primitive(f"{primitive.name}_original", primitive.operation, Strength.original_factor) for primitive in _ALL[9:]
)

PRIMITIVES = {primitive.name: primitive for primitive in (*_ALL, *_ORIGINAL)}
"""Map from names to primitives."""

SETS = {"all": _ALL, "safe": _ALL[:9], "original": (*_ALL[:9], *_ORIGINAL)}
"""Map from names to sets; `safe` excludes operations that the corruptions of ImageNet-C and CIFAR-10-C are made of."""


def chosen_primitives(given: Any, where: str) -> tuple[Primitive, ...]:
    """Return the primitives of a set's name, or of a sequence of primitives and their names."""
    if isinstance(given, str):
        if given in PRIMITIVES:
            raise ValueError(f"{where}={given!r}: expected a set of operations, got one: write ({given!r},)")
        if given not in SETS:
            raise ValueError(f"{where}={given!r}: expected {', '.join(map(repr, SETS))}, or names of operations")
        return SETS[given]
    if not isinstance(given, Sequence):
        raise TypeError(f"{where}: expected a set's name or a sequence of operations' names, got {given!r:.80}")
    found = []
    for member in given:
        if not isinstance(member, Primitive | str):
            raise TypeError(f"{where}: expected names of operations, got {member!r:.80} ({type(member).__name__})")
        if not isinstance(member, Primitive) and member not in PRIMITIVES:
            raise ValueError(f"{where}: no operation is called {member!r}; there are {', '.join(PRIMITIVES)}")
        found.append(member if isinstance(member, Primitive) else PRIMITIVES[member])
    if not found:
        raise ValueError(f"{where}: expected one operation or more, got none")
    return tuple(found)


def check_augmentation_set(given: Any, where: str) -> Any:
    """Require a set's name, or a sequence of primitives and their names, and return it with a tuple."""
    chosen_primitives(given, where)
    return frozen(given)


AugmentationSet: TypeAlias = Annotated[str | Sequence[str | Primitive], check_augmentation_set]
