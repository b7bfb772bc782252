"""Shared parts of methods on images: checks, handling of targets, the algorithm's skeleton, one random operation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor

from purecompose import batch as batches, losses, random, tree
from purecompose._support.checks import frozen, shown
from purecompose._support.messages import warn
from purecompose.algorithms._parts.checks import check_can_write, check_scalar, given_fields
from purecompose.algorithms.images import Primitive, Scale, Strength
from purecompose.algorithms.images.assignment import treated
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.state import State
from purecompose.losses.targets import Mixture
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


TakesTargets: TypeAlias = bool | Literal["auto"]
"""Choice of the targets that are changed with their images: all (True), none (False), or those that `are_maps`."""


def check_severity(severity: Any, where: str) -> None:
    """Raise a `TypeError` or `ValueError` unless it is a scalar in [0, 10]; a tensor's value is not checked."""
    if not isinstance(severity, Tensor):
        check_scalar(severity, where, 0, 10, hint="0 changes nothing, 10 is the strongest")
    elif severity.ndim:
        raise ValueError(f"{where}: expected one number, 0-d, got shape {tuple(severity.shape)}")


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


def check_takes_targets(value: Any, where: str) -> None:
    """Raise a `TypeError` or `ValueError` unless it is True, False or "auto"."""
    if not isinstance(value, bool) and value != "auto":
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{where}: expected True, False or 'auto', got {shown(value)}")


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
    event: Event,
    state: State,
    name: str,
    core: Callable[..., tuple[Tensor, Any]],
    fields: Mapping[str, batches.Field],
    takes_targets: TakesTargets = False,
) -> State:
    """Return the state with new images in its batch; at INIT check the fields and return the state unchanged.

    Args:
        event: INIT or the event at which images are replaced.
        state: The state.
        name: Name of the algorithm.
        core: A function `(rng, images, targets) -> (images, targets)`. Targets are `None` if they are not read, and are
            returned as the same object if they do not change.
        fields: The given fields; see `given_fields`.
        takes_targets: Read the targets. With "auto" their field may be read-only as long as they do not change; with a
            model that computes its own loss, they are read only if their field is given.
    """
    if takes_targets == "auto" and "target_field" not in fields and isinstance(state.context.loss, losses.ModelLoss):
        takes_targets = False
    own_input = fields.get("input_field", state.context.input_field)
    own_target = fields.get("target_field", state.context.target_field)
    if event is Event.INIT:
        check_can_write(own_input, "input_field")
        if takes_targets is True:
            check_can_write(own_target, "target_field")
        return state
    images = batches.get(state.batch, own_input)
    check_images(name, images)
    targets = None if takes_targets is False else batches.get(state.batch, own_target)
    images, changed = core(state.rng(name), images, targets)
    batch = batches.put(state.batch, own_input, images)
    return state.replace(batch=batch if changed is targets else batches.put(batch, own_target, changed))


def image_method(
    name: str,
    core: Callable[..., Any],
    settings: Mapping[str, Any],
    *,
    scalars: Sequence[str] = (),
    is_neutral: bool,
    takes_targets: TakesTargets | None = None,
    primitives: Sequence[Primitive] = (),
    **given: batches.Field | None,
) -> Algorithm:
    """Return a method that replaces a batch's images by the result of a core.

    Args:
        name: Name of the algorithm.
        core: A function `(rng, images, **settings) -> images`, or with `takes_targets` as in `with_images`, with
            settings.
        settings: All settings; those that are not `None` are shown in the algorithm's repr.
        scalars: Names of the settings that are resolved by the state in each step.
        is_neutral: True if the settings change nothing.
        takes_targets: As in `with_images`; `None` for a core of images only.
        primitives: Operations of a core of images only, which warns if some of them move pixels and the targets are
            maps.
        **given: `input_field` and, if targets are read, `target_field`, as in a factory.
    """
    writes = ("input_field", "target_field") if takes_targets is True else ("input_field",)
    fields = given_fields(writes=writes, **given)
    settings = {setting: frozen(value) for setting, value in settings.items()}
    moving = [primitive.name for primitive in primitives if primitive.moves]

    def apply(event: Event, state: State) -> State:
        if moving and event is not Event.INIT:
            _warn_of_maps(name, state, fields, moving)

        def with_settings(rng: random.Rng, images: Tensor, targets: Any) -> tuple[Tensor, Any]:
            own = {**settings, **{setting: state.scalar(settings[setting]) for setting in scalars}}
            if takes_targets is None:
                return core(rng, images, **own), targets
            return core(rng, images, targets, **own)

        return with_images(event, state, name, with_settings, fields, takes_targets or False)

    return Algorithm(
        name,
        NEVER if is_neutral else on(Event.INIT, Event.AFTER_DATALOADER),
        apply,
        traits=frozenset({Trait.AUGMENTS_EXAMPLES}),
        config={setting: value for setting, value in {**settings, **fields}.items() if value is not None},
    )


def _warn_of_maps(name: str, state: State, fields: Mapping[str, batches.Field], moving: Sequence[str]) -> None:
    """Warn if targets are maps of images whose pixels are moved by these operations."""
    if isinstance(state.context.loss, losses.ModelLoss):  # what it reads as targets is not known
        return
    images = batches.get(state.batch, fields.get("input_field", state.context.input_field))
    targets = batches.get(state.batch, state.context.target_field)
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
