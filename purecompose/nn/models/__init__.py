"""The networks of the tests, the examples and the command line, in one place: plain `nn.Module`s.

Those for images take (batch, channels, height, width), the MLP any shape, and return logits (batch, num_classes); the
GPT takes tokens (batch, length) and returns logits (batch, length, vocabulary). The convolutional ones end in an
average over all positions; no activation works in place, so that any layer can be replaced by surgery.

A module draws its initial weights from torch's global generator; `build` draws them from a seed, and restores
that generator.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from purecompose._support import publish, specs
from purecompose._support.device import building
from purecompose._support.specs import check_whole
from purecompose.nn.models.convolutional import (
    Bottleneck as Bottleneck,
    Dropout,
    ResidualBlock as ResidualBlock,
    Widths,
    airbench as airbench,
    cnn as cnn,
    mlp as mlp,
    resnet as resnet,
    resnet8 as resnet8,
    resnet18 as resnet18,
    resnet20 as resnet20,
    resnet50 as resnet50,
)
from purecompose.nn.models.transformer import (
    GPT as GPT,
    TransformerBlock as TransformerBlock,
    VisionTransformer as VisionTransformer,
    gpt as gpt,
    vit as vit,
)


publish(__name__)


def build(name: str, *, in_shape: Sequence[int], num_classes: int, seed: int, **options: Any) -> nn.Module:
    """Build a network of `MODELS` on the CPU, with weights drawn only from `seed`.

    torch's global generators are left unchanged.

    Args:
        name: A name in `MODELS`.
        in_shape: Shape of one example, such as `(1, 8, 8)`; for the gpt `(max_length,)`.
        num_classes: Length of the logits; for the gpt the size of the vocabulary.
        seed: Seed of the initial weights: the same seed gives the same weights, bit for bit.
        options: Options passed to the network, as `describe` shows them.

    Raises:
        ValueError: The name is unknown, or the network does not accept the shape or the value of an option.
        TypeError: The network does not have an option.

    Example:
        >>> net = build("mlp", in_shape=(1, 8, 8), num_classes=10, seed=0, hidden=32)
        >>> sum(p.numel() for p in net.parameters())
        2410
    """
    specs.check_name(name, MODELS, "model")
    check_options(name, options)
    shape = tuple(check_whole(size, f"models.build: in_shape[{i}]", 1) for i, size in enumerate(in_shape))
    with building(seed):
        return MODELS[name](shape, num_classes, **options)


def describe(name: str) -> str:
    """Return the text of a network of `MODELS` as a call, with its options and their defaults.

    Args:
        name: A name in `MODELS`.

    Example:
        >>> describe("mlp")
        'mlp(hidden=(256, 128), dropout=0.0)'
    """
    return f"{name}({', '.join(f'{option}={default!r}' for option, default in _options(name).items())})"


def _options(name: str) -> Mapping[str, Any]:
    """Return the options of a network, with their defaults."""
    parameters = inspect.signature(MODELS[name]).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


def check_options(name: str, given: Iterable[str]) -> None:
    """Raise `TypeError` if a network of `MODELS` lacks one of the given options; the message lists those it has.

    Args:
        name: A name in `MODELS`.
        given: Names of options.

    Raises:
        TypeError: The network has no such option; close ones are listed.

    Example:
        >>> check_options("resnet8", ["widht"])
        Traceback (most recent call last):
        TypeError: resnet8 has no option 'widht'; did you mean 'width'? its options are resnet8(width=16)
    """
    known = _options(name)
    for option in given:
        if option not in known:
            hint = specs.did_you_mean(option, known)
            raise TypeError(f"{name} has no option {option!r};{hint} its options are {describe(name)}")


def _build_mlp(
    in_shape: tuple[int, ...], num_classes: int, *, hidden: Widths = (256, 128), dropout: Dropout = 0.0
) -> nn.Module:
    return mlp(math.prod(in_shape), hidden, num_classes, dropout=dropout)


def _build_images(
    make_fn: Callable[..., nn.Module], min_size: Callable[[nn.Module], int] = lambda net: 4
) -> Callable[..., nn.Module]:
    """Return the builder of a network for images."""

    @functools.wraps(make_fn)  # its signature shows the options
    def builder(in_shape: tuple[int, ...], num_classes: int, **options: Any) -> nn.Module:
        net = make_fn(in_shape[0] if in_shape else 1, num_classes, **options)
        least = min_size(net)
        if len(in_shape) != 3 or min(in_shape[1:]) < least:
            raise ValueError(
                f"{make_fn.__name__}: expected in_shape (channels, height, width) with images of at least "
                f"{least}x{least}, got {in_shape}; the mlp takes any shape"
            )
        return net

    return builder


def _least_after_poolings(net: nn.Module) -> int:
    """Return the fewest pixels of a side of which one is left after a convolution of 2x2 and all poolings of 2x2."""
    return 1 + 2 ** sum(isinstance(module, nn.MaxPool2d) for module in net.modules())


@functools.wraps(gpt)
def _build_gpt(in_shape: tuple[int, ...], num_classes: int, **options: Any) -> nn.Module:
    if len(in_shape) != 1:
        raise ValueError(f"gpt: expected in_shape (length,) of sequences of tokens, got {in_shape}; it takes no images")
    return gpt(num_classes, in_shape[0], **options)


MODELS: MappingProxyType[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "mlp": _build_mlp,
        "cnn": _build_images(cnn),
        "airbench": _build_images(airbench, _least_after_poolings),
        "resnet8": _build_images(resnet8),
        "resnet20": _build_images(resnet20),
        "resnet18": _build_images(resnet18),
        "resnet50": _build_images(resnet50),
        "vit": vit,
        "gpt": _build_gpt,
    }
)
"""Name -> builder `(in_shape, num_classes, **options) -> nn.Module`, in the order shown to users."""
