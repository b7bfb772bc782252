"""Random operations on images: RandAugment applies a few in turn, AugMix mixes chains of them."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from purecompose import random
from purecompose.algorithms._parts import WrittenField
from purecompose.algorithms.images import Primitive, Scale, ValueRange, check_value_range, chosen_primitives, on_levels
from purecompose.algorithms.images.batches import (
    SEVERITY,
    assigned,
    image_method,
    one_operation_each,
    warn_of_maps,
    with_images,
)
from purecompose.algorithms.images.primitives import AugmentationSet
from purecompose.algorithms.images.samples import can_read
from purecompose.core.algorithm import Algorithm, factory
from purecompose.core.state import State
from purecompose.losses.targets import per_row
from purecompose.random.keys import as_rng
from purecompose.schedule import Scalar
from purecompose.schedule.declared import Within, checked


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

    Events: AFTER_DATALOADER. Reads and replaces: the batch's images, on the device where they are.

    Args:
        severity: The greatest strength of the operations, in [0, 10]. An `hparam` or a schedule may be given. With the
            number 0 the algorithm never matches.
        depth: The number of operations applied to each image; with 0 the algorithm never matches.
        augmentation_set: "all", "safe" or "original", or names of operations.
        value_range: The values of black and white; see `randaugment_batch`.
        name: Name of the algorithm and of its draws.
        input_field: Field of the batch with the images, (N, C, H, W); defaults to the state's input field.

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

    def change(state: State) -> State:
        warn_of_maps(name, state, input_field, augmentation_set)
        return with_images(state, name, input_field, partial(changed, severity=state.scalar(severity)))

    return image_method(name, change, is_neutral=depth == 0 or severity == 0)


_MAX_DEPTH = 3
_PIECE = 2**18  # number of values mixed at a time in eager mode, so that their floats fit into the cache
ALPHA = Within(0, above=True, hint="1 draws shares uniformly")

Depth: TypeAlias = Annotated[int, Within(-1, hint="-1 draws 1, 2 or 3 for each chain")]
Width: TypeAlias = Annotated[int, Within(1)]


@checked
def augmix_batch(
    key: Tensor | random.Rng,
    images: Tensor,
    *,
    severity: Annotated[float | Tensor, SEVERITY] = 3.0,
    depth: Depth = -1,
    width: Width = 3,
    alpha: Annotated[float | Tensor, ALPHA] = 1.0,
    augmentation_set: AugmentationSet = "all",
    value_range: Annotated[ValueRange, check_value_range] = None,
) -> Tensor:
    """Blend each image with a mixture of changed ones.

    Args:
        key: A random key.
        images: (N, C, H, W), or one image (C, H, W); uint8 or floating.
        severity, depth, width, alpha: See `augmix`; values of (0-d) tensors are not checked.
        augmentation_set, value_range: See `randaugment_batch`.

    Returns:
        Images of the shape and dtype of `images`.

    Example:
        >>> from purecompose.random import key
        >>> images = torch.rand(8, 3, 32, 32)
        >>> augmix_batch(key(0), images, value_range=(0.0, 1.0)).shape
        torch.Size([8, 3, 32, 32])
    """
    primitives = chosen_primitives(augmentation_set, "augmix_batch: augmentation_set")
    rng = as_rng(key, "augmix_batch")

    def augmented(stored: Tensor, scale: Scale) -> Tensor:
        num = len(stored)
        chains = _chains(rng, stored, scale, primitives, severity, depth, width)
        # In float64: for a small alpha most gammas underflow in float32, and their weights would be equal.
        gammas = random.gamma(rng.named("weights"), alpha, (num, width), dtype=torch.float64).to(stored.device)
        share = random.beta(rng.named("share"), alpha, alpha, (num, 1)).to(stored.device)
        weights = share * gammas / gammas.sum(1, keepdim=True)
        # Mix a few images at a time: for the whole batch, the floats of each step would not fit into the cache.
        size = max(1, _PIECE // stored[0].numel()) if can_read(stored) else num
        pieces = zip(stored.split(size), weights.split(size), *(chain.split(size) for chain in chains), strict=True)
        return torch.cat([_mixed(scale, *piece) for piece in pieces])

    return on_levels(images, augmented, value_range, "augmix_batch")


@factory
def augmix(
    severity: Annotated[Scalar, SEVERITY] = 3.0,
    *,
    depth: Depth = -1,
    width: Width = 3,
    alpha: Annotated[Scalar, ALPHA] = 1.0,
    augmentation_set: AugmentationSet = "all",
    value_range: Annotated[ValueRange, check_value_range] = None,
    name: str = "augmix",
    input_field: WrittenField = None,
) -> Algorithm:
    """Blend every image with a mixture of changed ones.

    For each image, with W = `width` chains:

        w ~ Dirichlet(alpha, ..., alpha),   m ~ Beta(alpha, alpha)
        a_i = the image after d_i operations, one after the other,   d_i = depth, or uniform in {1, 2, 3}
        X' = (1 - m) X + m (w_1 a_1 + ... + w_W a_W)

    See `purecompose.algorithms.images.primitives` for the operations. The paper's consistency loss is not implemented.

    Events: AFTER_DATALOADER. Reads and replaces: the batch's images, on the device where they are.

    Args:
        severity: The greatest strength of the operations, in [0, 10]. An `hparam` or a schedule may be given. With the
            number 0 the algorithm never matches.
        depth: The number of operations in a chain; -1 draws 1, 2 or 3 for each chain, 0 leaves images unchanged.
        width: The number of chains that are mixed.
        alpha: The parameter of the Dirichlet and Beta distributions, above 0; an `hparam` or a schedule may be given.
        augmentation_set: "all", "safe" or "original", or names of operations.
        value_range: The values of black and white; see `randaugment_batch`.
        name: Name of the algorithm and of its draws.
        input_field: Field of the batch with the images, (N, C, H, W); defaults to the state's input field.

    Example:
        >>> augmix(3)
        augmix(severity=3, depth=-1, width=3, alpha=1.0, augmentation_set='all')
        >>> augmix(0).match
        never

    References:
        Dan Hendrycks et al.: AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty. ICLR 2020.
        https://arxiv.org/abs/1912.02781
    """
    shape = {"depth": depth, "width": width}
    changed = partial(augmix_batch, **shape, augmentation_set=augmentation_set, value_range=value_range)

    def change(state: State) -> State:
        warn_of_maps(name, state, input_field, augmentation_set)
        now = {"severity": state.scalar(severity), "alpha": state.scalar(alpha)}
        return with_images(state, name, input_field, partial(changed, **now))

    return image_method(name, change, is_neutral=severity == 0)


def _chains(
    rng: random.Rng,
    stored: Tensor,
    scale: Scale,
    primitives: Sequence[Primitive],
    severity: float | Tensor,
    depth: int,
    width: int,
) -> list[Tensor]:
    """Return the result of each chain, a tensor like `stored`."""
    num = len(stored)
    # The chains are concatenated along the batch. Operations and depths are drawn separately for each chain, so that an
    # image's chains are independent.
    chains = stored.repeat(width, *[1] * (stored.ndim - 1))
    if depth >= 0:
        for step in range(depth):
            chains = one_operation_each(rng.named(step), chains, scale, primitives, severity, num_groups=width)
        return list(chains.split(num))
    drawn = [assigned(rng.named("depth").named(chain), num, _MAX_DEPTH, stored.device) for chain in range(width)]
    starts = torch.stack([torch.cat(lists) + chain * num for chain, (lists, _) in enumerate(drawn)])
    # (width, images, ...): in each chain, images with one operation come first, then those with two, then three.
    going, ended = chains.index_select(0, starts.flatten()).unflatten(0, starts.shape), []
    capacity = starts.shape[1] // _MAX_DEPTH
    for step in range(_MAX_DEPTH):
        flat = one_operation_each(rng.named(step), going.flatten(0, 1), scale, primitives, severity, num_groups=width)
        going = flat.unflatten(0, going.shape[:2])
        ended.append(going[:, :capacity])
        going = going[:, capacity:]
    ends = torch.cat(ended, 1)
    return [ends[chain].index_select(0, places) for chain, (_, places) in enumerate(drawn)]


def _mixed(scale: Scale, stored: Tensor, weights: Tensor, *chains: Tensor) -> Tensor:
    """Return a mixture of the images and the results of their chains, weighted by (N, width)."""
    levels = mixed = scale.opened(stored)
    # Add weighted differences from the image, not weighted images: a pixel that no operation has changed then stays
    # exactly the same, even if the weights do not add up to 1 after rounding.
    for chain, weight in zip(chains, weights.to(levels.dtype).unbind(1), strict=True):
        mixed = torch.addcmul(mixed, per_row(weight, levels), scale.opened(chain) - levels)
    return scale.settled(mixed.clamp(0, 255))
