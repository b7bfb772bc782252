"""Recipes by name: methods that work well together, with the settings that they were found with.

Three recipes were tuned as a whole to reach a quality soon, each on one network and data set (docs/quality.md):

    mnist-fast    for small images of one channel and convolutional networks
    cifar10-fast  for small images of three channels and the network airbench
    text-fast     for a GPT of at least four blocks on characters

Three are the published ones for ResNets on images of about 224 pixels a side, `mild`, `medium` and `hot`, for short,
medium and long runs. Their settings were found with binary cross entropy summed over classes; optimizer, schedule and
the length of the run are for you to choose. The published hot recipe also has BlurPool, channels last and EMA:

    [*recipe("mild").methods[:3], *recipe("hot").methods]

References:
    MosaicML: Mosaic ResNet, for ResNet-50 on ImageNet. https://github.com/mosaicml/examples
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from purecompose import losses, optim, schedule
from purecompose.algorithms import (
    alternating_flip,
    blurpool,
    channels_last,
    colout,
    ema,
    initialize,
    label_smoothing,
    mixup,
    patch_whitening,
    pool_first,
    progressive_resizing,
    randaugment,
    random_crop,
    sam,
    stochastic_depth,
    test_time_averaging,
    value_embeddings,
)
from purecompose.core.algorithm import Algorithm


@dataclass(frozen=True)
class Recipe:
    """What a recipe consists of.

    Attributes:
        methods: The algorithms, for `compose`.
        loss: The loss, for `State.create`.
        optimizer: The optimizer with its schedule; `None` if it is for you to choose, as all settings below.
        duration: The length of the run.
        batch_size: Examples per batch.
        microbatches: Slices of a batch, for `compose`.
        precision: The precision of the forward pass.
    """

    methods: tuple[Algorithm, ...]
    loss: Any
    optimizer: Any = None
    duration: str | None = None
    batch_size: int | None = None
    microbatches: int = 1
    precision: str | None = None


_PUBLISHED_LOSS = losses.BinaryCrossEntropy(mean_over="examples")


def _for_short_runs() -> tuple[Algorithm, ...]:
    return (
        blurpool(),
        channels_last(),
        ema(half_life="100ba", every="20ba"),
        progressive_resizing(initial_scale=0.5, delay_fraction=0.4, finetune_fraction=0.2, size_increment=4),
    )


def _hot() -> Recipe:
    methods = (
        label_smoothing(0.13),
        mixup(0.25),
        sam(0.5, every=5),
        colout(p_row=0.05, p_col=0.05),
        randaugment(severity=9, depth=1),
        stochastic_depth("sample", 0.1),
        progressive_resizing(initial_scale=0.6, delay_fraction=0.2, finetune_fraction=0.2, size_increment=4),
    )
    return Recipe(methods, _PUBLISHED_LOSS)


def _mnist_fast() -> Recipe:
    curve = schedule.linear(alpha_f=0.3, warmup="0.02dur")
    filters = optim.muon(0.2 * curve, momentum=0.8, weight_decay=0.0, ns_steps=3, ns_precision="full", filters="only")
    rest = optim.adamw(0.04 * curve, betas=(0.9, 0.99), weight_decay=0.0)
    return Recipe(
        (
            channels_last(),
            pool_first(),
            patch_whitening(eps=5e-3),
            initialize("dirac"),
            label_smoothing(0.2),
            ema("10ba", start=0.4),
        ),
        losses.cross_entropy,
        optim.by_pattern({"*": filters}, rest),
        duration="211ba",
        batch_size=128,
        precision="bf16",
    )


def _cifar10_fast() -> Recipe:
    curve = schedule.linear(warmup="0dur")
    filters = optim.muon(0.4 * curve, momentum=0.7, weight_decay=0.1, filters="only")
    biases, head = (optim.sgd(lr * curve, momentum=0.85, nesterov=True) for lr in (20.0, 0.5))
    return Recipe(
        (
            patch_whitening(),
            initialize("dirac"),
            channels_last(),
            alternating_flip(),
            random_crop(1),
            progressive_resizing("resize", initial_scale=0.5, delay_fraction=0.3, finetune_fraction=0.2),
            label_smoothing(0.1),
            test_time_averaging(),
        ),
        losses.cross_entropy,
        optim.by_pattern({"*": filters, "*bias": biases}, head),
        duration="218ba",
        batch_size=512,
        microbatches=2,
        precision="bf16",
    )


def _text_fast() -> Recipe:
    curve = schedule.linear(alpha_f=0.3, warmup="0.02dur")
    matrices = optim.muon(0.045 * curve, momentum=0.9, weight_decay=0.0)
    rest = optim.adamw(0.03 * curve, betas=(0.8, 0.98), weight_decay=0.0)
    return Recipe(
        (ema("20ba", start=0.5), value_embeddings((0, 1, 2, 3))),
        losses.cross_entropy,
        optim.by_pattern({"*blocks.*": matrices}, rest),
        duration="270ba",
        batch_size=24,
        precision="bf16",
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "mild": lambda: Recipe((*_for_short_runs(), label_smoothing(0.08)), _PUBLISHED_LOSS),
    "medium": lambda: Recipe(
        (*_for_short_runs(), label_smoothing(0.1), mixup(0.2), sam(0.5, every=10)), _PUBLISHED_LOSS
    ),
    "hot": _hot,
    "mnist-fast": _mnist_fast,
    "cifar10-fast": _cifar10_fast,
    "text-fast": _text_fast,
}
"""Map from the name of each recipe to a function that returns it."""


def recipe(name: str) -> Recipe:
    """Return a recipe by its name.

    Args:
        name: "mild", "medium", "hot", "mnist-fast", "cifar10-fast" or "text-fast".

    Raises:
        ValueError: No recipe has this name.

    Example:
        >>> [method.name for method in recipe("mild").methods]
        ['blurpool', 'channels_last', 'ema', 'progressive_resizing', 'label_smoothing']
    """
    if name not in RECIPES:
        raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {name!r}")
    return RECIPES[name]()
