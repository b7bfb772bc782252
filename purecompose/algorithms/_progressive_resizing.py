"""Progressive resizing: trains on small images first, and gradually on larger ones up to their full size."""

from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose import random
from purecompose._support.specs import shown
from purecompose.algorithms._parts import Elapsed, Field, WrittenField, needed_rng, reported
from purecompose.algorithms.images.batches import TakesTargets, check_images, map_targets, with_images_and_targets
from purecompose.algorithms.images.samples import whole_part
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.losses.targets import Mixture
from purecompose.schedule.declared import Within, checked
from purecompose.time.event import Event, snapped
from purecompose.time.predicates import NEVER, before, on


_LEAST_SCALE = 1e-9  # used for scale 0, which resize_batch rejects; gives the smallest size

Mode = Literal["resize", "crop"]
Scale: TypeAlias = Annotated[float, Within(0, 1, hint="it is the scale of both sides at first")]
Share: TypeAlias = Annotated[float, Within(0, 1, hint="it is a share of the run")]


@checked
def progressive_scale(
    elapsed: Elapsed, *, initial_scale: Scale = 0.5, finetune_fraction: Share = 0.2, delay_fraction: Share = 0.5
) -> float:
    """Return the scale of images at a point of a run.

    Args:
        elapsed: The fraction of the run that is over, at least 0; above 1 if training continues.
        initial_scale, finetune_fraction, delay_fraction: See `progressive_resizing`.

    Returns:
        A number in [initial_scale, 1].

    Example:
        >>> [round(progressive_scale(elapsed), 2) for elapsed in (0, 0.5, 0.6, 0.65, 0.8, 1)]
        [0.5, 0.5, 0.67, 0.75, 1.0, 1.0]
    """
    _check_shares("progressive_scale", finetune_fraction, delay_fraction)
    if elapsed >= 1 - finetune_fraction:
        return 1.0
    if elapsed <= delay_fraction:
        return float(initial_scale)
    # delay_fraction < elapsed < 1 - finetune_fraction here, so the divisor is positive.
    gone = (elapsed - delay_fraction) / (1 - finetune_fraction - delay_fraction)
    return min(1.0, initial_scale + (1 - initial_scale) * gone)


@checked
def resize_batch(
    key: Tensor | random.Rng | None,
    inputs: Tensor,
    targets: Any,
    scale_factor: Annotated[float, Within(0, above=True, hint="it is the scale of both sides")],
    *,
    mode: Mode = "resize",
    resize_targets: TakesTargets = "auto",
    size_increment: Annotated[int | None, Within(1)] = None,
) -> tuple[Tensor, Any]:
    """Make the images of a batch smaller.

    Args:
        key: A random key; may be `None` with mode "resize", which draws nothing.
        inputs: Images (N, C, H, W).
        targets: Any object. Masks are tensors (N, H, W) or (N, C, H, W) of any dtype, or a `Mixture` of such tensors.
        scale_factor: The scale of both sides, a number above 0. Factors of at least 1 change nothing.
        mode: "resize" shrinks the whole image (bilinear, antialiased; masks by nearest pixels); "crop" cuts out a
            window, drawn uniformly among all windows inside the image, the same for the whole batch.
        resize_targets: Treat targets as masks, which are resized by the same factors or cropped to the same window.
            "auto" does so for targets with more than two dimensions, the last two of the images' size; `True` for all
            targets, also those with another height and width.
        size_increment: Each side becomes the multiple of it that is nearest to side * scale_factor, at least one
            increment and at most the side. By default, and if the side is shorter than one increment, it becomes
            side * scale_factor rounded down, at least 1.

    Returns:
        Inputs and targets, of the same dtypes; the same objects if the size does not change.

    Raises:
        TypeError: Inputs that are not one real tensor (N, C, H, W), masks that are not tensors, no key for a crop, or a
            setting of the wrong type.
        ValueError: A setting out of range, or masks without height and width.

    Example:
        >>> inputs, masks = torch.rand(8, 3, 32, 32), torch.zeros(8, 32, 32, dtype=torch.int64)
        >>> small, small_masks = resize_batch(None, inputs, masks, 0.7, size_increment=4)
        >>> small.shape, small_masks.shape
        (torch.Size([8, 3, 24, 24]), torch.Size([8, 24, 24]))
    """
    check_images("resize_batch", inputs)
    if inputs.is_complex():
        raise TypeError(f"resize_batch: expected real images, got {inputs.dtype}; resize real and imaginary parts")
    old = (inputs.shape[-2], inputs.shape[-1])
    new = tuple(_new_side(side, scale_factor, size_increment) for side in old)
    if resize_targets is True:
        _check_masks(targets)
    if new == old:
        return inputs, targets

    if mode == "crop":
        corner = _drawn_corner(key, old, new)

        def on_masks(masks: Tensor) -> Tensor:
            return _window(masks, old, new, corner)

        changed = _window(inputs, old, new, corner)
    else:

        def on_masks(masks: Tensor) -> Tensor:
            return _nearest(masks, _same_share(masks, old, new))

        changed = _bilinear(inputs, new)
    return changed, map_targets(on_masks, targets, inputs, resize_targets)


@factory
def progressive_resizing(
    mode: Mode = "resize",
    initial_scale: Scale = 0.5,
    finetune_fraction: Share = 0.2,
    delay_fraction: Share = 0.5,
    size_increment: Annotated[int, Within(1, hint="sides are multiples of it, in pixels")] = 4,
    *,
    resize_targets: TakesTargets = "auto",
    name: str = "progressive_resizing",
    input_field: WrittenField = None,
    target_field: Field = None,
) -> Algorithm:
    """Train on images that grow to their full size.

        u = clip((t - d) / (1 - f - d), 0, 1),   s = s0 + (1 - s0) u

    with t the fraction of the run that is over, d the delay, f the share of the run at full size and s0 the initial
    scale. Each side becomes the multiple of `size_increment` that is nearest to s times the side, so that few sizes
    occur.

    Events: AFTER_DATALOADER, before the last part f of the run. Reads and replaces: the batch's images, and with
    `resize_targets` its targets. Reports in `metrics`, as numbers: `f"{name}/height"` and `f"{name}/width"`, the new
    size in pixels, and `f"{name}/scale_factor"`, s before rounding to a size.

    This is a host algorithm: a compiled step is compiled separately for each size. The network must accept images of
    every size.

    Args:
        mode: "resize" shrinks images; "crop" cuts out a window at a random position, one for the batch.
        initial_scale: The scale of both sides at first, in [0, 1]; with 1 the algorithm never matches.
        finetune_fraction: The share of the run at its end with images of full size, in [0, 1]; with 1 the algorithm
            never matches.
        delay_fraction: The share of the run at its start with the initial scale, in [0, 1]. The two fractions add up
            to at most 1.
        size_increment: Sides become multiples of this number of pixels, unless they are shorter than it.
        resize_targets: Treat the target as a mask (N, H, W) or (N, C, H, W), which is changed like its image. "auto"
            does so if it has more than two dimensions and the last two have the images' size.
        name: Name of the algorithm, of its draws and of its metrics.
        input_field: Field of the batch with the images; defaults to the state's input field.
        target_field: Field of the batch with the targets; defaults to the state's target field.

    Raises:
        TypeError, ValueError: In the step: inputs that are not images, masks that are not tensors, or a run without a
            duration or with a duration in seconds.

    Example:
        >>> progressive_resizing("crop", size_increment=8).predicate
        on(AFTER_DATALOADER) & before('0.8dur')
        >>> progressive_resizing(initial_scale=1).match
        never

    References:
        Jeremy Howard et al.: fast.ai's training for DAWNBench, 2018.
        https://www.fast.ai/posts/2018-08-10-fastai-diu-imagenet.html
    """
    _check_shares("progressive_resizing", finetune_fraction, delay_fraction)
    scale_at = partial(
        progressive_scale,
        initial_scale=initial_scale,
        finetune_fraction=finetune_fraction,
        delay_fraction=delay_fraction,
    )
    resize = partial(resize_batch, mode=mode, size_increment=size_increment, resize_targets=resize_targets)

    def apply(event: Event, state: State) -> State:
        del event
        elapsed = state.timestamp.elapsed()
        assert elapsed is not None, "the predicate requires a duration"
        scale, facts = max(scale_at(elapsed), _LEAST_SCALE), dict[str, float]()

        def resized(rng: random.Rng, images: Tensor, targets: Any) -> tuple[Tensor, Any]:
            images, targets = resize(rng, images, targets, scale)
            facts.update(height=images.shape[-2], width=images.shape[-1], scale_factor=scale)
            return images, targets

        state = with_images_and_targets(state, name, (input_field, target_field), resized, resize_targets)
        return reported(state, name, facts)

    is_neutral = initial_scale == 1 or finetune_fraction == 1
    return Algorithm(
        name,
        NEVER if is_neutral else on(Event.AFTER_DATALOADER) & before(1 - finetune_fraction),
        apply,
        host=True,
        traits=frozenset({Trait.AUGMENTS_EXAMPLES}),
    )


def _check_shares(where: str, finetune_fraction: float, delay_fraction: float) -> None:
    if snapped(delay_fraction + finetune_fraction) > 1:
        raise ValueError(
            f"{where}: expected delay_fraction + finetune_fraction <= 1, got {delay_fraction} + {finetune_fraction}; "
            "images grow during the rest of the run"
        )


def _new_side(side: int, scale: float, increment: int | None) -> int:
    if scale >= 1:
        return side
    if increment is None or increment > side:
        return max(1, whole_part(scale, side))
    return min(max(1, round(side * scale / increment)) * increment, side)


def _same_share(masks: Tensor, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Return the new height and width of masks, scaled like the images' from old to new, rounded."""
    sides = zip(masks.shape[-2:], old, new, strict=True)
    return tuple(max(1, (2 * side * small + full) // (2 * full)) for side, full, small in sides)


def _check_masks(targets: Any) -> None:
    for mask in targets.targets if isinstance(targets, Mixture) else [targets]:
        if not isinstance(mask, Tensor):
            raise TypeError(
                "resize_targets=True: expected masks, a tensor (N, H, W) or (N, C, H, W), got "
                f"{type(mask).__name__}; select them with target_field="
            )
        if mask.ndim < 3:
            raise ValueError(
                f"resize_targets=True: expected masks (N, H, W) or (N, C, H, W), got {shown(mask)}, which has no "
                "height and width; leave resize_targets out for targets of whole images"
            )


def _drawn_corner(key: Tensor | random.Rng | None, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the window's first row and column, 0-d int64."""
    rng = needed_rng(key, "resize_batch", "for mode='crop', which draws the window's position")
    top, left = (
        random.randint(rng.named(role), (), 0, full - small + 1)
        for role, full, small in zip(("top", "left"), old, new, strict=True)
    )
    return top, left


def _window(images: Tensor, old: tuple[int, ...], new: tuple[int, ...], corner: tuple[Tensor, Tensor]) -> Tensor:
    """Return the part of images or masks, which may have another resolution, that corresponds to the window."""
    sizes = _same_share(images, old, new)
    for dim, full, size, start in zip((-2, -1), old, sizes, corner, strict=True):
        side = images.shape[dim]
        first = torch.div(start * side, full, rounding_mode="floor").clamp(max=side - size)
        # Not a slice: its start would have to be copied from the device.
        images = images.index_select(dim, (first + torch.arange(size, device=first.device)).to(images.device))
    return images


def _nearest(images: Tensor, size: tuple[int, ...]) -> Tensor:
    """Resize images of any dtype by nearest pixels: each new pixel is the old one that contains its centre."""
    for dim, small in zip((-2, -1), size, strict=True):
        middles = torch.arange(small, device=images.device) * 2 + 1
        index = torch.div(middles * images.shape[dim], 2 * small, rounding_mode="floor")
        images = images.index_select(dim, index)
    return images


def _bilinear(images: Tensor, size: tuple[int, ...]) -> Tensor:
    if size[1] == 1 < size[0]:
        # On the CPU, torch 2.13 fills all rows of a result of width 1 with the first row.
        return _bilinear(images.mT, size[::-1]).mT
    # torch has no antialiasing for half precision, and rounds bytes differently on each device.
    is_wide = images.dtype in (torch.float64, torch.int32, torch.int64)
    wide = images.double() if is_wide else images.float()
    smaller = F.interpolate(wide, size, mode="bilinear", align_corners=False, antialias=True)
    return (smaller if images.is_floating_point() else smaller.round()).to(images.dtype)
