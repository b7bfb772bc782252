"""Shared parts of methods on images: new images and targets in a batch, and random operations, one for each image."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches, losses, random, tree
from purecompose._support.messages import warn
from purecompose._support.specs import shown
from purecompose.algorithms._parts import chosen_fields
from purecompose.algorithms.images import Primitive, Scale, Strength, chosen_primitives
from purecompose.algorithms.images.samples import can_read, is_traced
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.state import State
from purecompose.losses.targets import Mixture
from purecompose.schedule.declared import Within
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


SEVERITY = Within(0, 10, hint="0 changes nothing, 10 is the strongest")

TakesTargets: TypeAlias = bool | Literal["auto"]
"""Choice of the targets that are changed with their images: all (True), none (False), or those that `are_maps`."""


def check_images(name: str, inputs: Any) -> None:
    """Raise a `TypeError` unless the inputs are one tensor (N, C, H, W)."""
    if not isinstance(inputs, Tensor) or inputs.ndim != 4:
        came = tree.describe(inputs) if isinstance(inputs, Tensor) else shown(inputs)
        field = "an index, a name or an accessor"
        if isinstance(inputs, Mapping):
            came, field = f"a {type(inputs).__name__} of {', '.join(map(repr, inputs))}", "such as 'pixel_values'"
        raise TypeError(
            f"{name}: expected images, one tensor (N, C, H, W), got {came}; select them with the method's "
            f"input_field, {field}"
        )


def image_method(name: str, change: Callable[[State], State], *, is_neutral: bool) -> Algorithm:
    """Return a method that changes each image of a loaded batch by itself; if it is neutral it never matches."""

    def apply(event: Event, state: State) -> State:
        del event
        return change(state)

    match = NEVER if is_neutral else on(Event.AFTER_DATALOADER)
    return Algorithm(name, match, apply, traits=frozenset({Trait.AUGMENTS_EXAMPLES}))


def are_maps(targets: Tensor, images: Tensor) -> bool:
    """Return whether targets have their images' size, as in segmentation: (..., H, W) with at least three dims."""
    return targets.ndim > 2 and targets.shape[-2:] == images.shape[-2:]


def map_targets(fn: Callable[[Tensor], Tensor], targets: Any, images: Tensor, takes: TakesTargets) -> Any:
    """Return targets (or the terms of a `Mixture`) after `fn`; the same object if none changes with the images."""
    terms = targets.targets if isinstance(targets, Mixture) else batches.tensors(targets)
    chosen = [takes is True or (takes == "auto" and are_maps(term, images)) for term in terms]
    if not any(chosen):
        return targets

    def mapped(target: Tensor) -> Tensor:
        return fn(target) if takes is True or are_maps(target, images) else target

    return targets.map(mapped) if isinstance(targets, Mixture) else batches.map_tensors(mapped, targets)


def with_images(
    state: State, name: str, input_field: batches.Field | None, change: Callable[[random.Rng, Tensor], Tensor]
) -> State:
    """Return the state with its batch's images changed by a function `(rng, images) -> images`."""
    return with_images_and_targets(
        state, name, (input_field, None), lambda rng, images, _: (change(rng, images), None), False
    )


def with_images_and_targets(
    state: State,
    name: str,
    fields: tuple[batches.Field | None, batches.Field | None],
    change: Callable[[random.Rng, Tensor, Any], tuple[Tensor, Any]],
    takes_targets: TakesTargets,
) -> State:
    """Return the state with changed images, and possibly targets, in its batch.

    Args:
        fields: The given fields of input and target, `None` for the state's own.
        change: A function `(rng, images, targets) -> (images, targets)`. Targets are `None` if they are not read, and
            are returned as the same object if they do not change.
        takes_targets: Read the targets. With "auto" their field may be read-only as long as they do not change; a
            model's own loss reads them only if their field is given.
    """
    if takes_targets == "auto" and fields[1] is None and isinstance(state.context.loss, losses.ModelLoss):
        takes_targets = False
    input_field, target_field = chosen_fields(state, *fields)
    images = batches.get(state.batch, input_field)
    check_images(name, images)
    targets = None if takes_targets is False else batches.get(state.batch, target_field)
    images, changed = change(state.rng(name), images, targets)
    batch = batches.put(state.batch, input_field, images)
    return state.replace(batch=batch if changed is targets else batches.put(batch, target_field, changed))


def warn_of_maps(
    name: str, state: State, input_field: batches.Field | None, augmentation_set: str | Sequence[str | Primitive]
) -> None:
    """Warn if targets are maps of images whose pixels are moved by some of these operations."""
    moving = [one.name for one in chosen_primitives(augmentation_set, name) if one.moves]
    if not moving or isinstance(state.context.loss, losses.ModelLoss):  # what it reads as targets is not known
        return
    fields = chosen_fields(state, input_field, None)
    images, targets = (batches.get(state.batch, field) for field in fields)
    terms = targets.targets if isinstance(targets, Mixture) else batches.tensors(targets)
    if isinstance(images, Tensor) and any(are_maps(term, images) for term in terms if term is not images):
        warn(
            f"{name}: the targets have the images' height and width, but are not moved with them by "
            f"{', '.join(moving)}; take operations that keep positions, such as augmentation_set=('color', 'contrast')"
        )


# Random assignment of k treatments to images, with equal probabilities and nearly equal frequencies: images and
# treatments are put in random orders, and the image at position p gets the treatment at position p mod k. So for each
# image every treatment has probability 1 / k, as in an independent draw, and in a batch of n images each treatment
# occurs at least floor(n / k) and at most ceil(n / k) times. This bound is the reason for the scheme: with ceil(n / k)
# positions for each treatment, all shapes are known before the draw, and images need not be treated k times to keep one
# result.


def one_operation_each(
    rng: random.Rng,
    stored: Tensor,
    scale: Scale,
    primitives: Sequence[Primitive],
    severity: float | Tensor,
    *,
    num_groups: int = 1,
) -> Tensor:
    """Apply to each image one operation, drawn for this image, with a separately drawn strength.

    The levels (N, C, H, W), N at least 1, are in the form that the scale stores. Operations are drawn independently in
    `num_groups` consecutive groups of equal size.
    """
    if isinstance(severity, Tensor) and severity.ndim:
        raise ValueError(f"severity: expected one number, 0-d, got shape {tuple(severity.shape)}")
    num, _, height, width = stored.shape
    shares = random.uniform(rng.named("share"), num).to(stored.device)
    coins = random.bernoulli(rng.named("coin"), 0.5, num).to(stored.device)

    def treatment(primitive: Primitive) -> Callable[[Tensor, Tensor], Tensor]:
        def applied(some: Tensor, index: Tensor) -> Tensor:
            strength = Strength(severity, shares.index_select(0, index), coins.index_select(0, index), height, width)
            levels = scale.opened(some)
            return scale.settled(primitive(levels, strength).to(levels.dtype))

        return applied

    treatments = [treatment(primitive) for primitive in primitives]
    return treated(rng.named("choice"), stored, treatments, num_groups=num_groups)


def assigned(rng: random.Rng, num: int, num_treatments: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return the images of each treatment, and the positions of their results.

    Returns:
        For each treatment the indices of its images, int64; and for each image its position in the concatenation of
        these lists, (num,). All lists have the same length: the last image of a list may belong to another one, and its
        result is then not used.
    """
    order = random.permutation(rng.named("order"), num)
    treatments = random.permutation(rng.named("treatments"), num_treatments)
    capacity = -(-num // num_treatments)
    rounds = num_treatments * torch.arange(capacity, device=order.device)
    places = (treatments.argsort().unsqueeze(1) + rounds).clamp(max=num - 1)
    lists = [order.index_select(0, row).to(device) for row in places.unbind()]
    place = order.argsort()
    owner = treatments.index_select(0, place % num_treatments)
    return lists, (owner * capacity + place // num_treatments).to(device)


def treated(
    rng: random.Rng, images: Tensor, treatments: Sequence[Callable[[Tensor, Tensor], Tensor]], *, num_groups: int = 1
) -> Tensor:
    """Apply one of the treatments, `(images (n, ...), their indices (n,)) -> images (n, ...)`, to each of N >= 1
    images.

    They are assigned independently in `num_groups` consecutive groups of equal size.
    """
    num_lists, size = len(treatments) * num_groups, len(images) // num_groups
    lists: list[Any] = [None] * num_lists
    places = []
    for group in range(num_groups):
        own, found_at = assigned(rng.named(group), size, len(treatments), images.device)
        capacity = len(own[0])
        for treatment, chosen in enumerate(own):
            lists[treatment * num_groups + group] = chosen + group * size
        places.append(found_at // capacity * (capacity * num_groups) + group * capacity + found_at % capacity)
    homes = _homes(torch.cat(places), len(lists) * len(lists[0])).split(len(lists[0]))
    num, together = len(images), None
    for number, treatment in enumerate(treatments):
        own = slice(number * num_groups, (number + 1) * num_groups)
        chosen, home = torch.cat(lists[own]), torch.cat(homes[own])
        if can_read(home):
            chosen = home = chosen[home < num]
        if not len(chosen):
            continue
        changed = treatment(images.index_select(0, chosen), chosen)
        if together is None:
            # If indices cannot be read, unused results are not filtered out, but written into one extra row.
            together = changed.new_empty((num + (not can_read(home)), *changed.shape[1:]))
        # Write each result immediately, so that a compiled step computes it in place, as eager mode does here.
        put = Tensor.index_put if is_traced(home) else Tensor.index_put_
        together = put(together, (home,), changed)
    assert together is not None
    return together if len(together) == num else together[:num].clone()  # a copy, so that the extra row is freed


def _homes(places: Tensor, length: int) -> Tensor:
    """Return, for each position in the lists, the image whose result it provides, or the number of images for none.

    The result has shape (length,). Each image's result comes from one position, also if the image is in several lists.
    """
    num = len(places)
    return places.new_full((length,), num).scatter(0, places, torch.arange(num, device=places.device))
