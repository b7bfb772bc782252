"""RandAugment: changes every image by a few random operations."""

from functools import partial
from typing import Annotated

from torch import Tensor

from purecompose import random
from purecompose.algorithms._parts.checks import WrittenField
from purecompose.algorithms._parts.images import SEVERITY, one_operation_each, warn_of_maps, with_images
from purecompose.algorithms.images import Scale, ValueRange, check_value_range, chosen_primitives, on_levels
from purecompose.algorithms.images.primitives import AugmentationSet
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.random.keys import as_rng
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within, checked
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


@checked
def randaugment_batch(
    key: Tensor | random.Rng,
    images: Tensor,
    *,
    severity: Annotated[float | Tensor, SEVERITY] = 9.0,
    depth: Annotated[int, Within(0)] = 2,
    augmentation_set: AugmentationSet = "all",
    value_range: Annotated[ValueRange, check_value_range] = None,
) -> Tensor:
    """Change each image by `depth` random operations.

    Args:
        key: A random key.
        images: (N, C, H, W), or one image (C, H, W); uint8 or floating.
        severity: The greatest strength of the operations, in [0, 10]; the value of a (0-d) tensor is not checked. 0 is
            the identity.
        depth: The number of operations applied to each image, one after the other; 0 is the identity.
        augmentation_set: "all", "safe" or "original" (see `algorithms.images.SETS`), or names of operations.
        value_range: The values of black and white in floating images, numbers or one for each channel; by default the
            least and greatest value of each channel in the batch. The range of bytes is always 0 to 255.

    Returns:
        Images of the shape and dtype of `images`.

    Raises:
        TypeError: Images that are not a tensor of uint8 or floats, no key, or a setting of the wrong type.
        ValueError: A setting out of range, an unknown operation, or images with another number of dimensions.

    Example:
        >>> import torch
        >>> from purecompose.random import key
        >>> images = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
        >>> randaugment_batch(key(0), images).shape
        torch.Size([8, 3, 32, 32])
    """
    primitives = chosen_primitives(augmentation_set, "randaugment_batch: augmentation_set")
    rng = as_rng(key, "randaugment_batch")

    def augmented(stored: Tensor, scale: Scale) -> Tensor:
        for step in range(depth):
            stored = one_operation_each(rng.named(step), stored, scale, primitives, severity)
        return stored

    return on_levels(images, augmented, value_range, "randaugment_batch")


@factory
def randaugment(
    severity: Annotated[Scalar, SEVERITY] = 9.0,
    depth: Annotated[int, Within(0)] = 2,
    augmentation_set: AugmentationSet = "all",
    *,
    value_range: Annotated[ValueRange, check_value_range] = None,
    name: str = "randaugment",
    input_field: WrittenField = None,
) -> Algorithm:
    """Change every image by a few random operations.

    One operation, drawn uniformly from the set, is applied to each image, `depth` times in a row. Its strength is a
    uniform draw up to `severity`; see `purecompose.algorithms.images.primitives` for the operations and strengths.

    Events: AFTER_DATALOADER. Reads and replaces: the batch's images, the whole
    batch in one call, on the device where they are.

    Args:
        severity: The greatest strength of the operations, in [0, 10]. An `hparam` or a schedule may be given. With the
            number 0 the algorithm never matches.
        depth: The number of operations applied to each image; with 0 the algorithm never matches.
        augmentation_set: "all", "safe" or "original", or names of operations.
        value_range: The values of black and white; see `randaugment_batch`.
        name: Name of the algorithm and of its draws.
        input_field: Field of the batch with the images, (N, C, H, W); defaults to the state's input field.

    Raises:
        TypeError, ValueError: In the step: inputs that are not images.

    Example:
        >>> randaugment(9, 2)
        randaugment(severity=9, depth=2, augmentation_set='all')
        >>> randaugment(depth=0).match
        never

    References:
        Ekin D. Cubuk et al.: RandAugment: Practical Automated Data Augmentation with a Reduced Search Space. CVPR
        Workshops 2020. https://arxiv.org/abs/1909.13719
    """
    changed = partial(randaugment_batch, depth=depth, augmentation_set=augmentation_set, value_range=value_range)

    def apply(event: Event, state: State) -> State:
        del event
        warn_of_maps(name, state, input_field, augmentation_set)
        return with_images(state, name, input_field, partial(changed, severity=state.scalar(severity)))

    return Algorithm(
        name,
        NEVER if depth == 0 or severity == 0 else on(Event.AFTER_DATALOADER),
        apply,
        traits=frozenset({Trait.AUGMENTS_EXAMPLES}),
    )
