"""Cutout: covers square patches of the images."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from purecompose import random
from purecompose._support.checks import check_number, frozen, is_number, shown
from purecompose._support.device import constants
from purecompose.algorithms._parts.checks import WrittenField, needed_rng
from purecompose.algorithms._parts.images import check_written, with_images
from purecompose.algorithms.images.levels import check_image_tensor, whole_part
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.schedule.declared import Within, checked
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


def _checked_fill(fill: Any, where: str) -> Any:
    if not isinstance(fill, tuple | list):
        check_number(fill, where, hint="or one number for each channel")
    elif not fill or not all(is_number(value) for value in fill):
        raise TypeError(f"{where}: expected a number, or one for each channel, got {shown(fill)}")
    return frozen(fill)


_LENGTH_HINT = "it is a share of the shorter side, not a number of pixels; 0.5 is common, 0.25 milder"
Length: TypeAlias = Annotated[float, Within(0, 1, above=True, hint=_LENGTH_HINT)]
NumHoles: TypeAlias = Annotated[int, Within(0)]
Fill: TypeAlias = Annotated[float | Sequence[float], _checked_fill]


@checked
def cutout_batch(
    key: Tensor | random.Rng | None,
    images: Tensor,
    *,
    num_holes: NumHoles = 1,
    length: Length = 0.5,
    uniform_sampling: bool = False,
    per_example: bool = False,
    fill: Fill = 0.0,
    centers: Tensor | None = None,
) -> Tensor:
    """Cover square patches of images.

    The gradient with respect to the images is 1 outside the holes and 0 inside.

    Args:
        key: A random key; may be `None` if `centers` is given.
        images: (N, C, H, W), or one image (C, H, W), of any dtype (uint16 from torch 2.13 on).
        num_holes: The number of holes, which may overlap; 0 is the identity.
        length: The side of a hole as a share of the image's shorter side, in (0, 1]. A side below two pixels covers
            nothing.
        uniform_sampling: Cover each pixel with the same probability; by default pixels near the border are covered
            less often.
        per_example: Draw separate holes for each image instead of one set for the batch.
        fill: The value of the holes, a number or one for each channel; 0 is the mean of normalised images.
        centers: The centers (row, column), used instead of draws: integers, inside the image or not, (num_holes, 2),
            or (N, num_holes, 2) for separate holes in each image. `num_holes`, `uniform_sampling` and `per_example`
            are then ignored.

    Returns:
        The images with holes, of the shape and dtype of `images`.

    Raises:
        TypeError: `images` is not a tensor, there is no key although something must be drawn, or a setting has the
            wrong type.
        ValueError: A setting is out of range, the dtype cannot represent `fill`, or shapes do not match.

    Example:
        >>> image = torch.arange(1, 17).view(1, 4, 4)
        >>> cutout_batch(None, image, length=0.5, centers=torch.tensor([[1, 3]]))
        tensor([[[ 1,  2,  0,  0],
                 [ 5,  6,  0,  0],
                 [ 9, 10, 11, 12],
                 [13, 14, 15, 16]]])
    """
    check_image_tensor(images, "cutout_batch: images")
    _check_fill_fits(fill, images)
    height, width = images.shape[-2:]
    half = whole_part(length, min(height, width)) // 2
    num_sets = images.shape[0] if per_example and images.ndim == 4 else 1
    if centers is not None:
        _check_centers(centers, images)
    if half == 0 or not images.numel():
        return images
    if centers is None:
        if num_holes == 0:
            return images
        rng = needed_rng(key, "cutout_batch", "when centers are left out")
        centers = _drawn(rng, (num_sets, num_holes), half, (height, width), uniform_sampling)
    is_hole = _holes(centers.to(images.device, torch.int64), half, height, width)
    return _filled(images, is_hole if images.ndim == 4 else is_hole.squeeze(0), fill)


@factory
def cutout(
    num_holes: NumHoles = 1,
    length: Length = 0.5,
    *,
    uniform_sampling: bool = False,
    per_example: bool = False,
    fill: Fill = 0.0,
    name: str = "cutout",
    input_field: WrittenField = None,
) -> Algorithm:
    """Cover square patches of the images.

    With H rows and W columns, a = floor(length min(H, W)) and h = a // 2, each of `num_holes` holes has a random center
    (y, x) and covers

        rows y - h, ..., y + h - 1   and   columns x - h, ..., x + h - 1,

    clipped to the image, in all channels: a square with sides of 2 h pixels. Centers are drawn uniformly inside the
    image, so holes are cut off at its borders, and pixels there are covered less often. With `uniform_sampling` they
    are drawn from all positions where the hole touches the image, and every pixel is covered equally often.

    Events: AFTER_DATALOADER (and INIT, to check the key). Reads and replaces: the batch's images, the whole
    batch in one call.

    Args:
        num_holes: The number of holes; with 0 the algorithm never matches.
        length: The side of a hole as a share of the images' shorter side, in (0, 1].
        uniform_sampling: Cover each pixel with the same probability; by default pixels near the border are covered
            less often.
        per_example: Draw separate holes for each image instead of one set for the batch.
        fill: The value of the holes, a number or one for each channel; 0 is the mean of normalised images.
        name: Name of the algorithm and of its draws.
        input_field: Field of the batch with the images, (N, C, H, W); defaults to the state's input field.

    Raises:
        TypeError, ValueError: A setting has the wrong type or is out of range, or a field is read-only. In the step:
            the inputs are not images, or `fill` does not fit their dtype or channels.

    Example:
        >>> cutout(length=0.25)
        cutout(num_holes=1, length=0.25, uniform_sampling=False, per_example=False, fill=0.0)
        >>> cutout(0).match
        never

    References:
        Terrance DeVries, Graham W. Taylor: Improved Regularization of Convolutional Neural Networks with Cutout. 2017.
        https://arxiv.org/abs/1708.04552
    """
    covered = partial(
        cutout_batch,
        num_holes=num_holes,
        length=length,
        uniform_sampling=uniform_sampling,
        per_example=per_example,
        fill=fill,
    )

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            check_written(state, input_field)
            return state
        return with_images(state, name, input_field, covered)

    return Algorithm(
        name,
        NEVER if num_holes == 0 else on(Event.INIT, Event.AFTER_DATALOADER),
        apply,
        traits=frozenset({Trait.AUGMENTS_EXAMPLES}),
    )


def _drawn(rng: random.Rng, shape: tuple[int, int], half: int, sides: tuple[int, int], is_uniform: bool) -> Tensor:
    """Return random centers, int64 (*shape, 2)."""
    # Uniform draws range over all positions where a hole reaches into the image: 2 * half of them cover each pixel.
    beyond = half - 1 if is_uniform else 0
    return torch.stack(
        [
            random.randint(rng.named(axis), shape, -beyond, side + beyond + is_uniform)
            for axis, side in zip(("row", "column"), sides, strict=True)
        ],
        -1,
    )


def _holes(centers: Tensor, half: int, height: int, width: int) -> Tensor:
    """Return whether each pixel is covered, bool (1 or N, 1, H, W), by comparing positions instead of indexing."""
    middles = centers if centers.ndim == 3 else centers.unsqueeze(0)
    rows, columns = middles.unbind(-1)
    in_rows, in_columns = _in_reach(rows, half, height), _in_reach(columns, half, width)
    return (in_rows.unsqueeze(-1) & in_columns.unsqueeze(-2)).any(1, keepdim=True)


def _in_reach(middles: Tensor, half: int, size: int) -> Tensor:
    places = torch.arange(size, device=middles.device)
    middles = middles.unsqueeze(-1)
    return (places >= middles - half) & (places < middles + half)


def _filled(images: Tensor, is_hole: Tensor, fill: Fill) -> Tensor:
    if isinstance(fill, Sequence):
        return torch.where(is_hole, constants(fill, images.dtype, images.device).view(-1, 1, 1), images)
    return torch.where(is_hole, images.new_full((), fill), images)


def _check_fill_fits(fill: Fill, images: Tensor) -> None:
    values = fill if isinstance(fill, Sequence) else (fill,)
    channels = images.shape[-3]
    if len(values) not in (1, channels):
        raise ValueError(
            f"cutout_batch: fill: expected one number, or one for each of {channels} channels, got {shown(fill)}"
        )
    if images.is_floating_point() or images.is_complex():
        return
    low, high = (0, 1) if images.dtype == torch.bool else (torch.iinfo(images.dtype).min, torch.iinfo(images.dtype).max)
    if not all(low <= value <= high and value == int(value) for value in values):
        raise ValueError(
            f"cutout_batch: fill: expected whole numbers from {low} to {high}, the range of {images.dtype}, got "
            f"{shown(fill)}"
        )


def _check_centers(centers: Any, images: Tensor) -> None:
    if not isinstance(centers, Tensor) or centers.is_floating_point() or centers.dtype == torch.bool:
        raise TypeError(f"cutout_batch: centers: expected a tensor of whole numbers, got {shown(centers)}")
    sets = (1, images.shape[0] if images.ndim == 4 else 1)
    is_fit = centers.ndim == 2 or (centers.ndim == 3 and centers.shape[0] in sets)
    if not is_fit or centers.shape[-1] != 2:
        raise ValueError(
            f"cutout_batch: centers: expected (num_holes, 2), or (N, num_holes, 2), for images of shape "
            f"{tuple(images.shape)}, got shape {tuple(centers.shape)}"
        )
