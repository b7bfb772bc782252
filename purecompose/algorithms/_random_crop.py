"""Random crop: shifts each image by a few pixels, as a window of the padded image would."""

from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor

from purecompose import random
from purecompose._support.checks import shown
from purecompose.algorithms._parts.checks import Field, WrittenField
from purecompose.algorithms._parts.images import TakesTargets, check_images, map_targets, with_images_and_targets
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.random.keys import as_rng
from purecompose.schedule.declared import Within, checked
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


Padding: TypeAlias = Annotated[int, Within(0, hint="it is a number of pixels")]
Mode: TypeAlias = Literal["reflect", "zeros"]


@checked
def random_crop_batch(
    key: Tensor | random.Rng,
    images: Tensor,
    targets: Any = None,
    *,
    padding: Padding = 4,
    mode: Mode = "reflect",
    crop_targets: TakesTargets = "auto",
) -> tuple[Tensor, Any]:
    """Cut a window of the images' size out of each padded image.

    Args:
        key: A random key.
        images: (N, C, H, W), of any dtype.
        targets: Any object. Masks are tensors (N, H, W) or (N, C, H, W), of any dtype.
        padding, mode, crop_targets: See `random_crop`.

    Returns:
        Images and targets, of the same shapes and dtypes.

    Raises:
        TypeError, ValueError: `images` is not one tensor (N, C, H, W), has a side that reflection at the border cannot
            pad, or a mask has another size; or there is no key.

    Example:
        >>> from purecompose.random import key
        >>> random_crop_batch(key(3), torch.arange(1.0, 10.0).view(1, 1, 3, 3), padding=1, mode="zeros")[0]
        tensor([[[[5., 6., 0.],
                  [8., 9., 0.],
                  [0., 0., 0.]]]])
    """
    check_images("random_crop_batch", images)
    rng = as_rng(key, "random_crop_batch")
    if mode == "reflect" and padding >= min(images.shape[-2:]):
        raise ValueError(f"random_crop_batch: expected padding below the images' sides, got {padding}, {shown(images)}")
    if not padding or not images.numel():
        return images, targets
    places = [
        torch.arange(side, device=images.device)
        + random.randint(rng.named(axis), len(images), -padding, padding + 1).to(images.device).unsqueeze(1)
        for axis, side in zip(("row", "column"), images.shape[-2:], strict=True)
    ]
    crop = partial(_windows, size=(images.shape[-2], images.shape[-1]), places=places, mode=mode)
    return crop(images), map_targets(crop, targets, images, crop_targets)


@factory
def random_crop(
    padding: Padding = 4,
    mode: Mode = "reflect",
    *,
    crop_targets: TakesTargets = "auto",
    name: str = "random_crop",
    input_field: WrittenField = None,
    target_field: Field = None,
) -> Algorithm:
    """Shift each image by a few pixels: cut out a window of the padded image.

    Both shifts are drawn uniformly from -p, ..., p for each image, with p the padding.

    Events: AFTER_DATALOADER. Reads and replaces the batch's images, and targets that are masks.

    Args:
        padding: p in pixels; with 0 the algorithm never matches. 4 is common for images of 32 pixels, 2 in short runs.
        mode: What is beyond the border: "reflect" for the image reflected at it, the border's pixels not repeated, or
            "zeros".
        crop_targets: Treat the target as a mask (N, H, W) or (N, C, H, W), which is moved with its image. "auto" does
            so if it has more than two dimensions and the last two have the images' size. With `False` the target is not
            read.
        name: Name of the algorithm and of its draws.
        input_field: Field of the batch with the images, (N, C, H, W); defaults to the state's input field.
        target_field: Field of the batch with the targets; defaults to the state's target field.

    Raises:
        TypeError, ValueError: In the step: the inputs are not images, or have a side that is not above p.

    Example:
        >>> random_crop(2)
        random_crop(padding=2, mode='reflect', crop_targets='auto')
        >>> random_crop(0).match
        never

    References:
        Alex Krizhevsky: Convolutional Deep Belief Networks on CIFAR-10. 2010.
        Kaiming He et al.: Deep Residual Learning for Image Recognition. CVPR 2016. https://arxiv.org/abs/1512.03385
    """

    def cropped(rng: random.Rng, images: Tensor, targets: Any) -> tuple[Tensor, Any]:
        return random_crop_batch(rng, images, targets, padding=padding, mode=mode, crop_targets=crop_targets)

    def apply(event: Event, state: State) -> State:
        del event
        return with_images_and_targets(state, name, (input_field, target_field), cropped, crop_targets)

    return Algorithm(
        name, on(Event.AFTER_DATALOADER) if padding else NEVER, apply, traits=frozenset({Trait.AUGMENTS_EXAMPLES})
    )


def _windows(images: Tensor, size: tuple[int, int], places: list[Tensor], mode: Mode) -> Tensor:
    """Return the windows of images or masks, given each row's and column's place in the image, which may be outside."""
    if images.shape[-2:] != size:
        raise ValueError(f"random_crop: expected masks of the images' size {size}, got {shown(images)}")
    inside, is_inside = list[Tensor](), list[Tensor]()
    for place, side in zip(places, size, strict=True):
        inside.append(side - 1 - (side - 1 - place.abs()).abs() if mode == "reflect" else place.clamp(0, side - 1))
        is_inside.append((place >= 0) & (place < side))
    index = (inside[0].unsqueeze(2) * size[1] + inside[1].unsqueeze(1)).flatten(1)  # (N, H W)
    flat = images.reshape(len(images), -1, size[0] * size[1])
    windows = flat.gather(2, index.unsqueeze(1).expand_as(flat)).reshape(images.shape)
    if mode == "reflect":
        return windows
    seen = (is_inside[0].unsqueeze(2) & is_inside[1].unsqueeze(1)).unflatten(0, (len(images), *[1] * (images.ndim - 3)))
    return torch.where(seen, windows, windows.new_zeros(()))
