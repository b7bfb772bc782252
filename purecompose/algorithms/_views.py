"""Mirrored and shifted images: random crops, mirroring in every second epoch, and averages over views at test time."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches, random
from purecompose._support.device import INTEGER_OF_SIZE
from purecompose._support.specs import shown
from purecompose.algorithms._parts import Field, WrittenField, chosen_fields
from purecompose.algorithms.images.batches import (
    TakesTargets,
    are_maps,
    check_images,
    map_targets,
    with_images_and_targets,
)
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.random.keys import as_rng
from purecompose.random.philox import folded
from purecompose.schedule.declared import Within, checked
from purecompose.surgery.weights import wide
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
        targets: Any object. Masks are tensors (N, H, W) or (N, C, H, W).
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
            so if it has more than two dimensions and the last two have the images' size.
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
        examples: The number of each example in the data, integers (N,); by default a hash of each image's content.
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
    two consecutive epochs contain each image in both forms.

    An example is recognised in each epoch by a hash of its image's content. If the loader augments images, give
    `field`: the hash would be another one in each epoch, and mirroring random as usual. Equal images are mirrored in
    the same epochs. The method acts before all others that augment or mix the batch.

    Events: INIT, where the key is drawn; AFTER_DATALOADER. Reads the batch's images and the clock; replaces the images,
    and targets that are mirrored. A step compiles once; data without epochs stay in epoch 0.

    Args:
        field: Field of the batch with the number of each example in the data, integers (N,), in place of the hash.
        mirror_targets: Mirror targets with their images: "auto" those with more than two dimensions of which the last
            two have the images' size; `True` all, along their last dimension. Coordinates, as of boxes, are not
            changed.
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


def _content(images: Tensor) -> Tensor:
    """Return a hash of each image's bits, int64 (N,): a sum of pixels with unlike factors modulo 2**64.

    Of large images it reads a grid of about a thousand pixels. Sums of integers have no rounding, so that the order of
    memory, the device and the batch do not matter.
    """
    every = max(1, images.shape[1:].numel() // 1024)
    images = images.detach()[..., :: math.isqrt(every), :: every // math.isqrt(every)]
    pixels = images.view(INTEGER_OF_SIZE[images.element_size()]).to(torch.int64)
    if images.element_size() == 8:  # float64 numbers of few digits have zeros in the low bits, which a product keeps
        pixels = pixels ^ (pixels >> 32 & 0xFFFFFFFF)
    places = torch.arange(images.shape[1:].numel(), device=images.device)
    factors = places * 0x9E3779B1 + 0x85EBCA6B
    factors = (factors ^ (factors >> 15)) * 0xC2B2AE35
    factors = (factors ^ (factors >> 29)) | 1
    return (pixels * factors.view(images.shape[1:])).sum((1, 2, 3))


@checked
def average_over_views(fn: Callable[[Tensor], Any], images: Tensor, *, mirror: bool = True, shift: Padding = 0) -> Any:
    """Return the weighted mean of a function's results for images, their mirror images and shifted copies.

    Args:
        fn: A function of images, such as a network; it is called once for each view.
        images: (N, C, H, W), of any dtype.
        mirror, shift: See `test_time_averaging`.

    Returns:
        What `fn` returns, with means in place of its tensors, in their dtypes.

    Raises:
        TypeError: `images` is not one tensor (N, C, H, W), or a result has tensors that are not floating.
        ValueError: The shift is not less than the images' sides; or there is a shift, and results that are maps.

    Example:
        >>> images = torch.tensor([[1.0, 2.0, 6.0]]).view(1, 1, 1, 3)
        >>> average_over_views(lambda views: views[..., 0].flatten(), images)
        tensor([3.5000])
    """
    check_images("average_over_views", images)
    result, total = fn(images), list[Tensor]()
    for view, is_mirrored, share in _views(images, mirror, shift):
        outputs = result if view is images else fn(view)
        found = [share * wide(_restored(one, images, is_mirrored, shift)) for one in batches.tensors(outputs)]
        total = [one + other for one, other in zip(total, found, strict=True)] if total else found
    means = [one.to(own.dtype) for one, own in zip(total, batches.tensors(result), strict=True)]
    return batches.with_tensors(result, means)


@factory
def test_time_averaging(
    mirror: bool = True, shift: Padding = 0, *, name: str = "test_time_averaging", input_field: WrittenField = None
) -> Algorithm:
    """Average outputs over copies of each image, in evaluation and prediction.

    With f the network's output, x an image, M its mirror image and S(dy, dx) a shift by so many pixels, the output is

        (f(x) + f(M x)) / 2                                           with `mirror`,
        g(x) / 2 + g(S(-s, -s) x) / 4 + g(S(s, s) x) / 4              with a shift of s pixels,

    where g is f, or with `mirror` the mean above. What a shift leaves empty is filled by reflection at the border.
    Outputs that are maps of the images' size, (..., H, W) with at least three dimensions, are mirrored back; all others
    are averaged as they are.

    Training is not changed. Averaged weights, as those of `ema`, serve for all copies.

    Events: EVAL_AFTER_FORWARD, PREDICT_AFTER_FORWARD, with `step=` as for all methods. Reads the batch; reads and
    replaces the outputs. AFTER events reverse the order: list it after methods that change outputs there.

    Args:
        mirror: Average over each image and its mirror image, left and right exchanged.
        shift: The shift s in pixels, at least 0 and less than the images' sides. Without a shift and without `mirror`
            the algorithm never matches.
        name: Name of the algorithm.
        input_field: Field of the batch with the images, (N, C, H, W); defaults to the state's input field.

    Raises:
        TypeError, ValueError: In an evaluation: the inputs are not images or not larger than the shift; the outputs are
            not floating, or are maps and there is a shift.

    Example:
        >>> test_time_averaging(shift=1)
        test_time_averaging(mirror=True, shift=1)
        >>> test_time_averaging(False).match
        never

    References:
        Keller Jordan: 94% on CIFAR-10 in 3.29 Seconds on a Single GPU. 2024. https://arxiv.org/abs/2404.00498
    """

    def apply(event: Event, state: State) -> State:
        del event
        field, _ = chosen_fields(state, input_field, None)
        images = batches.get(state.batch, field)
        check_images(name, images)

        def outputs_of(view: Tensor) -> Any:
            if view is images:
                return state.outputs
            own = state.replace(batch=batches.put(state.batch, field, view))
            return own.run_model(own.inputs, train=False)[0]

        return state.replace(outputs=average_over_views(outputs_of, images, mirror=mirror, shift=shift))

    events = on(Event.EVAL_AFTER_FORWARD, Event.PREDICT_AFTER_FORWARD)
    traits = frozenset({Trait.REPLACES_OUTPUTS})
    return Algorithm(name, events if mirror or shift else NEVER, apply, traits=traits)


vars(test_time_averaging)["__test__"] = False  # pytest would run it as a test where it is imported by name


def _views(images: Tensor, mirror: bool, shift: int) -> Iterator[tuple[Tensor, bool, float]]:
    """Yield views of images, the images first, with whether they are mirrored, and their weights."""
    for by, share in ((0, 0.5), (-shift, 0.25), (shift, 0.25)) if shift else ((0, 1.0),):
        view = _shifted(images, by) if by else images
        yield view, False, share / 2 if mirror else share
        if mirror:
            yield view.flip(-1), True, share / 2


def _shifted(images: Tensor, by: int) -> Tensor:
    """Return images moved down and to the right, reflected at their borders."""
    for dim in (-2, -1):
        last = images.shape[dim] - 1
        if abs(by) > last:
            raise ValueError(f"expected a shift of less than the images' sides, got {abs(by)} and {shown(images)}")
        places = torch.arange(last + 1, device=images.device) - by
        images = images.index_select(dim, last - (last - places.abs()).abs())
    return images


def _restored(outputs: Tensor, images: Tensor, is_mirrored: bool, shift: int) -> Tensor:
    """Return the outputs for a view, mirrored back if they are maps."""
    if not outputs.is_floating_point():
        raise TypeError(f"expected outputs that are floating, of which means can be taken, got {shown(outputs)}")
    if not are_maps(outputs, images):
        return outputs
    if shift:
        raise ValueError(
            f"outputs {tuple(outputs.shape)} are maps of the images {tuple(images.shape)}, of which a shift leaves out "
            "a border: leave out shift="
        )
    return outputs.flip(-1) if is_mirrored else outputs
