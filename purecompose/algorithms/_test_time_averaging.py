"""Test-time averaging: evaluates each image together with its mirror image and shifted copies."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches
from purecompose._support.checks import shown
from purecompose.algorithms._parts.checks import WrittenField, chosen_fields
from purecompose.algorithms._parts.images import are_maps, check_images
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.schedule.declared import Within, checked
from purecompose.surgery.weights import wide
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


Shift: TypeAlias = Annotated[int, Within(0, hint="it is a number of pixels")]


@checked
def average_over_views(fn: Callable[[Tensor], Any], images: Tensor, *, mirror: bool = True, shift: Shift = 0) -> Any:
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
    mirror: bool = True, shift: Shift = 0, *, name: str = "test_time_averaging", input_field: WrittenField = None
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
    replaces the outputs. List it after methods that change outputs at these events: AFTER events reverse the order.

    Args:
        mirror: Average over each image and its mirror image, left and right exchanged.
        shift: The shift s in pixels, at least 0 and less than the images' sides. Without a shift and without `mirror`
            the algorithm never matches.
        name: Name of the algorithm.
        input_field: Field of the batch with the images, (N, C, H, W); defaults to the state's input field.

    Raises:
        TypeError, ValueError: In an evaluation: the inputs are not images or not larger than the shift, the outputs are
            not floating, or they are maps and there is a shift.

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
