"""The published recipes for image classification: methods that go together, by name.

    mild      blurpool, channels last, EMA, progressive resizing, label smoothing
    medium    those, MixUp, and SAM in every 10th step
    hot       label smoothing, MixUp, SAM in every 5th step, ColOut, RandAugment, stochastic depth of single examples,
              progressive resizing

They are for ResNets on large images, and for short, middle and long runs: each costs more for a step than the one
before, and gains more where there are many. Images should have some 224 pixels a side: of those of 8 x 8, progressive
resizing leaves a handful. The methods' settings are the published ones, found with binary cross entropy summed over
classes, `losses.BinaryCrossEntropy(mean_over="examples")`; loss, optimizer, schedule and the length of the run are for
you to choose.

The published hot recipe has BlurPool, channels last and EMA as well:

    [*recipe("mild")[:3], *recipe("hot")]

References:
    MosaicML: Mosaic ResNet, for ResNet-50 on ImageNet. https://github.com/mosaicml/examples
"""

from collections.abc import Callable

from purecompose.algorithms import (
    blurpool,
    channels_last,
    colout,
    ema,
    label_smoothing,
    mixup,
    progressive_resizing,
    randaugment,
    sam,
    stochastic_depth,
)
from purecompose.core.algorithm import Algorithm


__all__ = ["RECIPES", "recipe"]


def _for_short_runs() -> list[Algorithm]:
    return [
        blurpool(),
        channels_last(),
        ema(half_life="100ba", every="20ba"),
        progressive_resizing(initial_scale=0.5, delay_fraction=0.4, finetune_fraction=0.2, size_increment=4),
    ]


def _mild() -> list[Algorithm]:
    return [*_for_short_runs(), label_smoothing(0.08)]


def _medium() -> list[Algorithm]:
    return [*_for_short_runs(), label_smoothing(0.1), mixup(0.2), sam(0.5, every=10)]


def _hot() -> list[Algorithm]:
    return [
        label_smoothing(0.13),
        mixup(0.25),
        sam(0.5, every=5),
        colout(p_row=0.05, p_col=0.05),
        randaugment(severity=9, depth=1),
        stochastic_depth("sample", 0.1),
        progressive_resizing(initial_scale=0.6, delay_fraction=0.2, finetune_fraction=0.2, size_increment=4),
    ]


RECIPES: dict[str, Callable[[], list[Algorithm]]] = {"mild": _mild, "medium": _medium, "hot": _hot}
"""Makes the methods of each recipe, by its name."""


def recipe(name: str) -> list[Algorithm]:
    """Return the methods of a published recipe, for `compose`.

    Args:
        name: "mild", "medium" or "hot".

    Raises:
        ValueError: There is no such recipe.

    Example:
        >>> [method.name for method in recipe("mild")]
        ['blurpool', 'channels_last', 'ema', 'progressive_resizing', 'label_smoothing']
    """
    if name not in RECIPES:
        raise ValueError(f"recipe: expected one of {', '.join(RECIPES)}, got {name!r}")
    return RECIPES[name]()
