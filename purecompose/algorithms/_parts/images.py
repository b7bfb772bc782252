"""Shared parts of methods on images: checks, new images and targets in a batch, one random operation for each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor

from purecompose import batch as batches, losses, random, tree
from purecompose._support.checks import shown
from purecompose._support.messages import warn
from purecompose.algorithms._parts.checks import check_can_write, chosen_fields
from purecompose.algorithms.images import Primitive, Scale, Strength, chosen_primitives
from purecompose.algorithms.images.assignment import treated
from purecompose.core.state import State
from purecompose.losses.targets import Mixture
from purecompose.schedule.declared import Within


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


def check_written(
    state: State,
    input_field: batches.Field | None,
    target_field: batches.Field | None = None,
    takes_targets: TakesTargets = False,
) -> None:
    """Raise a `TypeError` at INIT if images, or targets that are always changed with them, cannot be replaced."""
    fields = chosen_fields(state, input_field, target_field)
    check_can_write(fields[0], "input_field")
    if takes_targets is True:
        check_can_write(fields[1], "target_field")


def with_images(
    state: State, name: str, input_field: batches.Field | None, change: Callable[[random.Rng, Tensor], Tensor]
) -> State:
    """Return the state with changed images in its batch.

    Args:
        state: The state.
        name: Name of the algorithm and of its draws.
        input_field: The given field, or `None` for the state's own.
        change: A function `(rng, images) -> images`.
    """
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
        state: The state.
        name: Name of the algorithm and of its draws.
        fields: The given fields of input and target, `None` for the state's own.
        change: A function `(rng, images, targets) -> (images, targets)`. Targets are `None` if they are not read, and
            are returned as the same object if they do not change.
        takes_targets: Read the targets. With "auto" their field may be read-only as long as they do not change; with a
            model that computes its own loss, they are read only if their field is given.
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

    Args:
        rng: The source of the draws.
        stored: Levels (N, C, H, W), N at least 1, in the form that the scale stores.
        scale: The images' scale.
        primitives: The operations, drawn with equal probability.
        severity: The greatest strength, in [0, 10].
        num_groups: The number of consecutive groups of equal size whose operations are drawn independently.
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
