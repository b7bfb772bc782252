"""CutMix: pastes a box of a partner's image into each image, and mixes their targets by the box's area."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from purecompose import random
from purecompose._support.specs import shown
from purecompose.algorithms._parts import WrittenField, needed_rng
from purecompose.algorithms._targets import draw_share, mixing, mixture_for
from purecompose.algorithms.images.batches import are_maps, check_images
from purecompose.algorithms.images.samples import whole_part
from purecompose.core.algorithm import Algorithm, factory
from purecompose.losses.targets import Mixture
from purecompose.random.keys import as_rng
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within, checked


ALPHA = Within(0, hint="0 switches cutmix off, 1 draws the box's area uniformly")


@checked
def cutmix_batch(
    key: Tensor | random.Rng | None,
    inputs: Tensor,
    targets: Tensor | Mixture,
    *,
    alpha: Annotated[float | Tensor, ALPHA] = 1.0,
    bbox: Sequence[int] | Tensor | None = None,
    indices: Tensor | None = None,
    uniform_sampling: bool = False,
    interpolate_loss: bool = False,
) -> tuple[Tensor, Tensor | Mixture]:
    """Paste a box of a partner's image into each image of a batch.

    Args:
        key: A random key; may be `None` if `bbox` and `indices` are both given.
        inputs: (N, C, H, W), of any dtype, which is kept.
        targets: (N, ...), indices or dense, or a `Mixture`. Maps are class indices (N, h, w), dense targets
            (N, C, h, w), and numbers (N, h, w) whose size has the images' proportions.
        alpha: Both parameters of the Beta distribution from which the box's share of the area is drawn, at least 0; 0
            does not mix. The value of a (0-d) tensor is not checked.
        bbox: The box itself, used instead of draws: integers (top, left, bottom, right), or a tensor of them, of which
            bottom and right are exclusive. It is clipped to the image.
        indices: (N,), int64, the partner of each example, used instead of a random order.
        uniform_sampling, interpolate_loss: See `cutmix`.

    Returns:
        The images, and the targets: a `Mixture` whose second half of terms are the partners' targets, weighted by the
        share of the image that was pasted. Maps are returned as they were given, a tensor or a `Mixture`, with the
        partner's box pasted in. The box is scaled to maps of another size: the positions inside are those whose centre
        is inside the images' box.

    Example:
        >>> from purecompose.random import key
        >>> images, targets = torch.tensor([0, 1]).reshape(2, 1, 1, 1).expand(2, 1, 2, 2), torch.tensor([0, 1])
        >>> mixed, mixture = cutmix_batch(None, images, targets, bbox=(0, 1, 1, 2), indices=torch.tensor([1, 0]))
        >>> mixed.flatten(1).tolist()
        [[0, 1, 0, 0], [1, 0, 1, 1]]
        >>> mixture.soft(torch.zeros(2, 2)).tolist()
        [[0.75, 0.25], [0.25, 0.75]]
        >>> cutmix_batch(key(0), images, targets)[0].shape
        torch.Size([2, 1, 2, 2])
    """
    check_images("cutmix_batch", inputs)
    num, _, height, width = inputs.shape
    if bbox is None or indices is None:
        rng = needed_rng(key, "cutmix_batch", "when bbox or indices are left out")
        if bbox is None:
            bbox = cutmix_box(rng, height, width, alpha=alpha, uniform_sampling=uniform_sampling)
        if indices is None:
            indices = random.permutation(rng.named("permutation"), num)
    box = _checked_box(bbox, inputs)
    partners = indices.to(inputs.device)
    inside, area = _inside(box, inputs, height, width)
    # Build the mixture first: it rejects partners of the wrong shape with a message about shapes.
    mixture = mixture_for(inputs, targets, "cutmix_batch")
    own = mixture.targets[0]
    if _are_maps(own, inputs):
        in_maps = inside if are_maps(own, inputs) else _inside(box, inputs, *own.shape[-2:])[0]
        mixture = _pasted_maps(mixture, partners, in_maps, interpolate_loss)
    else:
        share = area.to(mixture.weights[0].dtype) / max(height * width, 1)
        mixture = mixture.mixed_with(partners, share, interpolate_loss)
    pasted = torch.where(inside.unsqueeze(1), inputs.index_select(0, partners), inputs)
    is_plain = isinstance(targets, Tensor) and len(mixture.targets) == 1
    return pasted, mixture.targets[0] if is_plain else mixture


@checked
def cutmix_box(
    key: Tensor | random.Rng,
    height: int,
    width: int,
    *,
    alpha: Annotated[float | Tensor, ALPHA] = 1.0,
    uniform_sampling: bool = False,
) -> Tensor:
    """Return the box that `cutmix_batch` draws with this key.

    Args:
        key: A random key.
        height, width: The image's size.
        alpha, uniform_sampling: As in `cutmix_batch`.

    Returns:
        (4,), int64: top, left, bottom, right, inside the image. An empty box has no height or no width.

    Example:
        >>> from purecompose.random import key
        >>> top, left, bottom, right = cutmix_box(key(0), 32, 32).tolist()
        >>> 0 <= top <= bottom <= 32 and 0 <= left <= right <= 32
        True
    """
    rng = as_rng(key, "cutmix_box")
    share = draw_share(rng.named("area"), alpha, None)
    ratio: Any = torch.sqrt(share) if isinstance(share, Tensor) else math.sqrt(share)
    starts, stops = [], []
    for name, size in (("row", height), ("column", width)):
        side: Any = (size * ratio).to(torch.int64) if isinstance(ratio, Tensor) else whole_part(ratio, size)
        low, high = (-((side + 1) // 2), size + side // 2) if uniform_sampling else (0, size)
        centre = random.randint(rng.named(name), (), low, high)
        starts.append((centre - side // 2).clamp(0, size))
        stops.append((centre + side // 2).clamp(0, size))
    return torch.stack([*starts, *stops])


@factory
def cutmix(
    alpha: Annotated[Scalar, ALPHA] = 1.0,
    *,
    interpolate_loss: bool = False,
    uniform_sampling: bool = False,
    name: str = "cutmix",
    input_field: WrittenField = None,
    target_field: WrittenField = None,
) -> Algorithm:
    """Train on images with a box of another image pasted in.

        z ~ Beta(alpha, alpha),   c = int(D sqrt(z)) along each side D,   a random centre u
        box = [u - c // 2, u + c // 2) along each side, clipped to the image
        X' = X[pi] inside the box, X outside
        y' = (1 - t) y + t y[pi],   t = area of the box / area of the image

    with one random permutation pi and one box per batch; t is the share of the *partner*, measured on the clipped box.
    The targets are kept in a `Mixture` of two terms until the loss stage resolves them: as soft targets or, with
    `interpolate_loss`, as (1 - t) loss(y) + t loss(y[pi]).

    Targets that are maps, as in segmentation, are pasted like the images, and nothing is mixed; see `cutmix_batch`.
    Mixing happens before the batch is split.

    Events: AFTER_DATALOADER (and INIT, to check the loss). Reads and replaces: the batch's input and target.

    Args:
        alpha: Both parameters of the Beta distribution from which the box's share of the area is drawn, at least 0.
            With the number 0 the algorithm never matches. An `hparam` or a schedule may be given; no gradient flows to
            it.
        interpolate_loss: Mix the losses of the two targets instead of the targets, which is correct also for losses
            that are not linear in their targets. The loss must support the reduction "none".
        uniform_sampling: Make every pixel equally likely to be replaced; by default pixels in the middle are replaced
            more often, as in the paper.
        name: Name of the algorithm and of its draws.
        input_field: Field of the batch with the images, (N, C, H, W); defaults to the state's input field.
        target_field: Field of the batch with the target; defaults to the state's target field.

    Raises:
        TypeError, ValueError: At INIT: there is no target, the model computes the loss itself, or `interpolate_loss`
            is set and the loss has no reduction. In the step: the inputs are not images, or `interpolate_loss` is set
            and the targets are maps.

    Example:
        >>> cutmix(1.0)
        cutmix(alpha=1.0, interpolate_loss=False, uniform_sampling=False)
        >>> cutmix(0).match
        never

    References:
        Sangdoo Yun et al.: CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features. ICCV
        2019. https://arxiv.org/abs/1905.04899
    """

    mix = partial(cutmix_batch, uniform_sampling=uniform_sampling, interpolate_loss=interpolate_loss)
    return mixing(name, alpha, (input_field, target_field), check_images, mix, by_loss=interpolate_loss)


def _checked_box(bbox: Sequence[int] | Tensor, images: Tensor) -> Tensor:
    """Return the checked box, (4,), int64, on the images' device."""
    try:
        box = bbox if isinstance(bbox, Tensor) else torch.tensor(bbox)
    except (TypeError, ValueError, RuntimeError):  # not of numbers, such as a string
        box = torch.empty(0)
    if box.shape != (4,) or box.dtype.is_floating_point or box.dtype == torch.bool:
        raise ValueError(f"cutmix_batch: bbox: expected integers (top, left, bottom, right), got {shown(bbox)}")
    return box.to(images.device, torch.int64)


def _are_maps(targets: Tensor, images: Tensor) -> bool:
    """Return whether targets are maps, of the images' size or another; several soft targets (N, n, C) are not."""
    if targets.ndim != 3 or not targets.is_floating_point():
        return targets.ndim > 2
    (height, width), (own_height, own_width) = images.shape[-2:], targets.shape[-2:]
    return own_height * width == height * own_width


def _inside(box: Tensor, images: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return which positions of maps of this size have their centre in the images' box, and their number."""
    rows = _between(box[0::2], images.shape[-2], height)
    columns = _between(box[1::2], images.shape[-1], width)
    return (rows.unsqueeze(-1) & columns).unsqueeze(0), rows.sum() * columns.sum()


def _between(bounds: Tensor, size: int, num: int) -> Tensor:
    """Return which of `num` positions spread over `size` pixels are in [bounds[0], bounds[1]), (num,)."""
    place = torch.arange(num, device=bounds.device)
    if num != size:
        place = (2 * place + 1) * size // (2 * num)  # the pixel in which the position's centre is
    return (place >= bounds[0]) & (place < bounds[1])


def _pasted_maps(mixture: Mixture, partners: Tensor, inside: Tensor, interpolate_loss: bool) -> Mixture:
    if interpolate_loss:
        raise ValueError(
            f"cutmix: interpolate_loss=True: expected one target per image, got shape "
            f"{tuple(mixture.targets[0].shape)}, one target per pixel: these are pasted like the images, so there are "
            "no two losses to mix"
        )
    return mixture.pasted(partners, inside)
