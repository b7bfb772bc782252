"""CutOut and ColOut, which leave out parts of images: squares, or rows and columns."""

from functools import partial
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches, random
from purecompose._support.specs import shown
from purecompose.algorithms._parts import Field, WrittenField
from purecompose.algorithms.images.batches import (
    TakesTargets,
    image_method,
    map_targets,
    with_images,
    with_images_and_targets,
)
from purecompose.algorithms.images.samples import check_image_tensor, whole_part
from purecompose.core.algorithm import Algorithm, factory
from purecompose.core.state import State
from purecompose.losses.targets import Mixture
from purecompose.random.keys import as_rng
from purecompose.schedule.declared import Within, checked


_LENGTH_HINT = "it is a share of the shorter side, not a number of pixels; 0.5 is common, 0.25 milder"
Length: TypeAlias = Annotated[float, Within(0, 1, above=True, hint=_LENGTH_HINT)]
NumHoles: TypeAlias = Annotated[int, Within(0)]


@checked
def cutout_batch(
    key: Tensor | random.Rng,
    images: Tensor,
    *,
    num_holes: NumHoles = 1,
    length: Length = 0.5,
    uniform_sampling: bool = False,
    per_example: bool = False,
) -> Tensor:
    """Cover square patches of images.

    The gradient with respect to the images is 1 outside the holes and 0 inside.

    Args:
        key: A random key.
        images: (N, C, H, W), or one image (C, H, W), of any dtype (uint16 from torch 2.13 on).
        num_holes, length, uniform_sampling, per_example: See `cutout`. A side below two pixels covers nothing.

    Returns:
        The images with holes, of the shape and dtype of `images`.

    Example:
        >>> from purecompose.random import key
        >>> cutout_batch(key(0), torch.arange(1, 17).view(1, 4, 4), length=0.5)
        tensor([[[ 0,  0,  3,  4],
                 [ 0,  0,  7,  8],
                 [ 9, 10, 11, 12],
                 [13, 14, 15, 16]]])
    """
    check_image_tensor(images, "cutout_batch: images")
    rng = as_rng(key, "cutout_batch")
    height, width = images.shape[-2:]
    half = whole_part(length, min(height, width)) // 2
    if half == 0 or num_holes == 0 or not images.numel():
        return images
    num_sets = images.shape[0] if per_example and images.ndim == 4 else 1
    rows, columns = _drawn(rng, (num_sets, num_holes), half, (height, width), uniform_sampling)
    # (1 or N, 1, H, W), by comparing positions instead of indexing.
    in_rows, in_columns = _in_reach(rows, half, height), _in_reach(columns, half, width)
    is_hole = (in_rows.unsqueeze(-1) & in_columns.unsqueeze(-2)).any(1, keepdim=True).to(images.device)
    return torch.where(is_hole if images.ndim == 4 else is_hole.squeeze(0), images.new_zeros(()), images)


@factory
def cutout(
    num_holes: NumHoles = 1,
    length: Length = 0.5,
    *,
    uniform_sampling: bool = False,
    per_example: bool = False,
    name: str = "cutout",
    input_field: WrittenField = None,
) -> Algorithm:
    """Cover square patches of the images.

    With H rows and W columns, a = floor(length min(H, W)) and h = a // 2, each of `num_holes` holes has a random center
    (y, x) and covers

        rows y - h, ..., y + h - 1   and   columns x - h, ..., x + h - 1,

    clipped to the image, in all channels. Centers are drawn uniformly inside the image. With `uniform_sampling` they
    are drawn from all positions where the hole touches the image, and every pixel is covered equally often.

    Events: AFTER_DATALOADER. Reads and replaces: the batch's images.

    Args:
        num_holes: The number of holes; with 0 the algorithm never matches.
        length: The side of a hole as a share of the images' shorter side, in (0, 1].
        uniform_sampling: Cover each pixel with the same probability, instead of less often near the border.
        per_example: Draw separate holes for each image instead of one set for the batch.
        name: Name of the algorithm and of its draws.
        input_field: Field of the batch with the images, (N, C, H, W); defaults to the state's input field.

    Example:
        >>> cutout(length=0.25)
        cutout(num_holes=1, length=0.25, uniform_sampling=False, per_example=False)
        >>> cutout(0).match
        never

    References:
        Terrance DeVries, Graham W. Taylor: Improved Regularization of Convolutional Neural Networks with Cutout. 2017.
        https://arxiv.org/abs/1708.04552
    """
    settings = {"num_holes": num_holes, "length": length}
    covered = partial(cutout_batch, **settings, uniform_sampling=uniform_sampling, per_example=per_example)

    return image_method(name, lambda state: with_images(state, name, input_field, covered), is_neutral=num_holes == 0)


def _drawn(
    rng: random.Rng, shape: tuple[int, int], half: int, sides: tuple[int, int], is_uniform: bool
) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of random centers, int64 of this shape."""
    # Uniform draws range over all positions where a hole reaches into the image: 2 * half of them cover each pixel.
    beyond = half - 1 if is_uniform else 0
    rows, columns = (
        random.randint(rng.named(axis), shape, -beyond, side + beyond + is_uniform)
        for axis, side in zip(("row", "column"), sides, strict=True)
    )
    return rows, columns


def _in_reach(middles: Tensor, half: int, size: int) -> Tensor:
    """Return which positions holes with these middles cover, with one more dim."""
    places, middles = torch.arange(size, device=middles.device), middles.unsqueeze(-1)
    return (places >= middles - half) & (places < middles + half)


Share: TypeAlias = Annotated[float, Within(0, 1, hint="it is the share of rows or columns to drop; 0.15 is common")]


@checked
def colout_batch(
    key: Tensor | random.Rng,
    inputs: Tensor,
    targets: Any = None,
    *,
    p_row: Share = 0.15,
    p_col: Share = 0.15,
    resize_target: TakesTargets = "auto",
) -> Any:
    """Drop random rows and columns of images.

    Args:
        key: A random key.
        inputs: (N, C, H, W), or one image (C, H, W), of any dtype.
        targets: A tensor, a `Mixture`, whose terms are treated alike, or a tree of tensors.
        p_row, p_col, resize_target: See `colout`. The mask (H, W) of a single image needs `resize_target=True`.

    Returns:
        The images, (..., H', W'), and the targets if given: the same objects if they are not resized.

    Raises:
        TypeError: `inputs` is not a tensor, there is no key, a setting has the wrong type, or `resize_target=True` and
            a target is not a tensor.
        ValueError: A share is outside [0, 1], shapes do not match, or `resize_target=True` without targets.

    Example:
        >>> from purecompose.random import key
        >>> places = torch.arange(16).view(1, 4, 4)
        >>> colout_batch(key(0), places, p_row=0.5, p_col=0.25)
        tensor([[[ 0,  1,  3],
                 [12, 13, 15]]])
    """
    if targets is None and resize_target is True:
        raise ValueError("colout_batch: resize_target=True, but there are no targets; pass them, or leave it out")
    shrunk, resized = _shrunk(key, inputs, targets, p_row=p_row, p_col=p_col, resize_target=resize_target)
    return shrunk if targets is None else (shrunk, resized)


@factory
def colout(
    p_row: Share = 0.15,
    p_col: Share = 0.15,
    *,
    resize_target: TakesTargets = "auto",
    name: str = "colout",
    input_field: WrittenField = None,
    target_field: Field = None,
) -> Algorithm:
    """Drop random rows and columns of the images.

    Out of H rows

        H' = max(1, floor((1 - p_row) H))

    are kept in their order, drawn uniformly without replacement; W' out of W columns are kept in the same way, with
    `p_col`. A target of the images' size, such as a segmentation mask, loses the same rows and columns.

    Events: AFTER_DATALOADER. Reads the batch's images and target; replaces the images, and the target if it has their
    size. A step compiles once. The network must accept images of the smaller size in training and of the full size in
    evaluation.

    Source: Cory Stephenson, MosaicML, 2021; there is no paper.

    Args:
        p_row: The share of rows to drop, in [0, 1]; at least one row is kept. If both shares are 0, the algorithm never
            matches.
        p_col: The share of columns to drop, as for rows.
        resize_target: Drop the same rows and columns of the target. "auto" does so if it has more than two dimensions
            and the last two have the images' size.
        name: Name of the algorithm and of its draws.
        input_field: Field of the batch with the images, (N, C, H, W); defaults to the state's input field.
        target_field: Field of the batch with the target; defaults to the state's target field.

    Raises:
        TypeError, ValueError: In the step: inputs that are not images, or with `resize_target=True` a target of another
            size.

    Example:
        >>> colout(0.15, 0.15)
        colout(p_row=0.15, p_col=0.15, resize_target='auto')
        >>> colout(0, 0).match
        never
    """
    shrunk = partial(_shrunk, p_row=p_row, p_col=p_col, resize_target=resize_target)

    def change(state: State) -> State:
        return with_images_and_targets(state, name, (input_field, target_field), shrunk, resize_target)

    return image_method(name, change, is_neutral=p_row == 0 and p_col == 0)


def _shrunk(
    key: Tensor | random.Rng, inputs: Tensor, targets: Any, *, p_row: float, p_col: float, resize_target: TakesTargets
) -> tuple[Tensor, Any]:
    """Do what `colout_batch` does, and always return targets."""
    check_image_tensor(inputs, "colout_batch: inputs")
    rng, shape = as_rng(key, "colout_batch"), inputs.shape
    rows = _kept(rng.named("rows"), shape[-2], p_row, inputs.device)
    columns = _kept(rng.named("columns"), shape[-1], p_col, inputs.device)

    def shrunk(images: Tensor) -> Tensor:
        images = images if rows is None else images.index_select(-2, rows)
        return images if columns is None else images.index_select(-1, columns)

    def resized(target: Tensor) -> Tensor:
        if target.ndim < 2 or target.shape[-2:] != shape[-2:]:
            raise ValueError(
                "colout: expected a target with the height and width of the images, whose shape is "
                f"{tuple(shape)}, got shape {tuple(target.shape)}; resize_target='auto' leaves such targets unchanged"
            )
        return shrunk(target)

    if resize_target is True and not isinstance(targets, Mixture) and not batches.tensors(targets):
        raise TypeError(f"colout_batch: resize_target=True: expected a tensor as target, got {shown(targets)}")
    return shrunk(inputs), map_targets(resized, targets, inputs, resize_target)


def _kept(rng: random.Rng, size: int, p: float, device: torch.device) -> Tensor | None:
    """Return the indices to keep, ascending, or `None` to keep all."""
    count = max(1, whole_part(1 - p, size))
    if count >= size:
        return None
    lower, upper = random.bits(rng, (size, 2)).unbind(-1)
    order = torch.sort((upper << 32) | lower, stable=True).indices
    return order[:count].sort().values.to(device)
