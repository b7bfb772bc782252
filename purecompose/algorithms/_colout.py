"""ColOut: drops random rows and columns of the images, so that images are smaller and steps faster."""

from functools import partial
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches, random
from purecompose._support.checks import shown
from purecompose.algorithms._parts.checks import Field, WrittenField
from purecompose.algorithms._parts.images import TakesTargets, map_targets, with_images_and_targets
from purecompose.algorithms.images.levels import check_image_tensor, whole_part
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.losses.targets import Mixture
from purecompose.random.keys import as_rng
from purecompose.schedule.declared import Within, checked
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


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

    Events: AFTER_DATALOADER. Reads the batch's images and target; replaces the images,
    and the target if it has their size. The new sizes depend only on the settings, so a step compiles once. The network
    must accept images of the smaller size in training and of the full size in evaluation.

    Source: Cory Stephenson, MosaicML, 2021; there is no paper.

    Args:
        p_row: The share of rows to drop, in [0, 1]; at least one row is kept. If both shares are 0, the algorithm never
            matches.
        p_col: The share of columns to drop, as for rows.
        resize_target: Drop the same rows and columns of the target. "auto" does so if it has more than two dimensions
            and the last two have the images' size. With `False` the target is not read.
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

    def apply(event: Event, state: State) -> State:
        del event
        return with_images_and_targets(state, name, (input_field, target_field), shrunk, resize_target)

    return Algorithm(
        name,
        NEVER if p_row == 0 and p_col == 0 else on(Event.AFTER_DATALOADER),
        apply,
        traits=frozenset({Trait.AUGMENTS_EXAMPLES}),
    )


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
