"""Alternating flip: mirrors each image in every second epoch, beginning with a random half of the images."""

import math
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, random
from purecompose._support.checks import shown
from purecompose.algorithms._parts.checks import Field, WrittenField
from purecompose.algorithms._parts.images import TakesTargets, check_images, map_targets, with_images_and_targets
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.random.keys import as_rng
from purecompose.random.philox import folded
from purecompose.schedule.declared import checked
from purecompose.time.event import Event
from purecompose.time.predicates import on


@checked
def alternating_flip_batch(
    key: Tensor | random.Rng,
    inputs: Tensor,
    targets: Any = None,
    *,
    epoch: int | Tensor,
    examples: Tensor | None = None,
    mirror_targets: TakesTargets = "auto",
) -> Any:
    """Mirror the images whose turn it is in an epoch.

    Args:
        key: A random key, the same in all epochs: it decides which half of the examples is mirrored in epoch 0.
        inputs: Images (N, C, H, W), of any dtype.
        targets: A tensor, a `Mixture` or a tree of tensors.
        epoch: The number of epochs finished, an int or 0-d int64.
        examples: The number of each example in the data, integers (N,); by default a hash of each image's content, for
            which images must come as they are in the data.
        mirror_targets: See `alternating_flip`.

    Returns:
        The images, and the targets if given: the same object if none is mirrored.

    Raises:
        TypeError: `inputs` is not such a tensor, `examples` are not integers, or there is no key.
        ValueError: `examples` has another shape than (N,), or `mirror_targets=True` and a target has fewer than three
            dimensions.

    Example:
        >>> from purecompose.random import key
        >>> images = torch.tensor([[0, 1], [2, 3], [4, 5]]).view(3, 1, 1, 2)
        >>> alternating_flip_batch(key(0), images, epoch=0).flatten(1).tolist()
        [[1, 0], [2, 3], [5, 4]]
        >>> alternating_flip_batch(key(0), images, epoch=1).flatten(1).tolist()
        [[0, 1], [3, 2], [4, 5]]
    """
    check_images("alternating_flip_batch", inputs)
    rng, numbers = as_rng(key, "alternating_flip_batch"), _content(inputs) if examples is None else examples
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise TypeError(f"alternating_flip: expected the examples' numbers, integers (N,), got {shown(numbers)}")
    if numbers.shape != inputs.shape[:1]:
        raise ValueError(f"alternating_flip: expected {len(inputs)} examples' numbers, got {shown(numbers)}")
    # One bit of the key that belongs to each example.
    begins = folded(rng.streams(), numbers.to(rng.key.device, torch.int64))[:, 0] < 0
    is_mirrored = (begins ^ (torch.as_tensor(epoch, device=begins.device) % 2 == 1)).to(inputs.device)

    def mirrored(rows: Tensor) -> Tensor:
        if rows.ndim < 3:
            raise ValueError(f"mirror_targets=True: expected masks (N, H, W) or (N, C, H, W), got {shown(rows)}")
        return torch.where(is_mirrored.view(-1, *[1] * (rows.ndim - 1)), rows.flip(-1), rows)

    images = mirrored(inputs)
    return images if targets is None else (images, map_targets(mirrored, targets, inputs, mirror_targets))


@factory
def alternating_flip(
    field: Field = None,
    *,
    mirror_targets: TakesTargets = "auto",
    name: str = "alternating_flip",
    input_field: WrittenField = None,
    target_field: Field = None,
) -> Algorithm:
    """Mirror each image, left and right exchanged, in every second epoch.

        mirrored(i, e) = d_i xor (e odd),   P(d_i) = 1/2

    with e the number of epochs finished and d_i a random bit of example i, which follows from a key in the slot. So any
    two consecutive epochs contain each image in both forms, whereas random mirroring repeats the form of half of the
    images.

    An example is recognised in each epoch by a hash of its image's content, of large images of a grid of about a
    thousand pixels. It needs images that come from the data without random changes: the method acts before all others
    that augment or mix the batch, but if the loader augments, the hash is another one in each epoch, and mirroring is
    random as usual. In this case give `field`. Equal images are mirrored in the same epochs.

    Events: INIT, where the key is drawn; AFTER_DATALOADER. Reads the batch's images, the examples' numbers if `field`
    is given, and the targets unless `mirror_targets=False`; replaces the images, and targets that are mirrored. The
    epoch is read from the clock, so a step compiles once; data without epochs stay in epoch 0.

    Args:
        field: Field of the batch with the number of each example in the data, integers (N,), in place of the hash.
        mirror_targets: Mirror targets with their images: "auto" those with more than two dimensions of which the last
            two have the images' size, such as masks; `True` all, along their last dimension. With `False` the target is
            not read. Coordinates, as of boxes and key points, are not changed.
        name: Name of the algorithm, of its slot and of the draw at INIT.
        input_field: Field of the batch with the images, (N, C, H, W); defaults to the state's input field.
        target_field: Field of the batch with the targets; defaults to the state's target field.

    Raises:
        TypeError, ValueError: In the step: inputs that are not images, numbers that are not integers (N,), or with
            `mirror_targets=True` a target with fewer than three dimensions.

    Example:
        >>> alternating_flip()
        alternating_flip(mirror_targets='auto')

    References:
        Keller Jordan: 94% on CIFAR-10 in 3.29 Seconds on a Single GPU. 2024. https://arxiv.org/abs/2404.00498
    """

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            high, low = random.bits(state.rng(name), 2)
            key = torch.stack([high << 32 | low, torch.zeros_like(low)])
            return state.replace(slots={**state.slots, name: key})
        assert state.clock is not None
        epoch, examples = state.clock.epoch, None if field is None else batches.get(state.batch, field)

        def change(_: random.Rng, images: Tensor, targets: Any) -> tuple[Tensor, Any]:
            settings = {"epoch": epoch, "examples": examples, "mirror_targets": mirror_targets}
            changed = alternating_flip_batch(state.slots[name], images, targets, **settings)
            return (changed, None) if targets is None else changed

        return with_images_and_targets(state, name, (input_field, target_field), change, mirror_targets)

    # Without AUGMENTS_EXAMPLES, so that two of them, on two fields, can both come before what has it.
    before = (Trait.AUGMENTS_EXAMPLES, Trait.MIXES_EXAMPLES)
    return Algorithm(name, on(Event.INIT, Event.AFTER_DATALOADER), apply, runs_before=before)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the size of a pixel, by its number of bytes."""


def _content(images: Tensor) -> Tensor:
    """Return a hash of each image's bits, int64 (N,): a sum of pixels with unlike factors modulo 2**64.

    Of large images it reads a grid of about a thousand pixels, so that it takes little of a step's time.

    Sums of integers have no rounding, so that the order of memory, the device and the batch do not matter. Folding the
    hash into a key mixes its bits.
    """
    every = max(1, images.shape[1:].numel() // 1024)
    images = images.detach()[..., :: math.isqrt(every), :: every // math.isqrt(every)]
    pixels = images.view(_INTEGERS[images.element_size()]).to(torch.int64)
    places = torch.arange(images.shape[1:].numel(), device=images.device)
    factors = places * 0x9E3779B1 + 0x85EBCA6B
    factors = (factors ^ (factors >> 15)) * 0xC2B2AE35
    factors = (factors ^ (factors >> 29)) | 1
    return (pixels * factors.view(images.shape[1:])).sum((1, 2, 3))
