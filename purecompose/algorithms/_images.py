"""What methods on the batch's images share."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._checks import shown
from purecompose.algorithm import Algorithm, Trait
from purecompose.algorithms._checks import check_can_write, check_scalar, given_keys
from purecompose.event import Event
from purecompose.predicate import NEVER, on
from purecompose.schedule import Scalar
from purecompose.state import State


__all__ = ["check_images", "check_severity", "image_method"]


def check_severity(severity: Any, where: str) -> None:
    """Raises a `TypeError` or `ValueError` unless it is a scalar in [0, 10]; a tensor's value is not checked."""
    if not isinstance(severity, Tensor):
        check_scalar(severity, where, 0, 10, hint="0 changes nothing, 10 is the strongest")
    elif severity.ndim:
        raise ValueError(f"{where}: expected one number, 0-d, got shape {tuple(severity.shape)}")


def check_images(name: str, inputs: Any) -> None:
    """Raises a `TypeError` unless the inputs are one tensor (N, C, H, W)."""
    if not isinstance(inputs, Tensor) or inputs.ndim != 4:
        came = tree.describe(inputs) if isinstance(inputs, Tensor) else shown(inputs)
        raise TypeError(
            f"{name}: expected images, one tensor (N, C, H, W), came {came}; name them inside the "
            "batch by input_key, an index, a key or an accessor"
        )


def image_method(
    name: str,
    core: Callable[..., Tensor],
    scalars: Mapping[str, Scalar],
    config: Mapping[str, Any],
    *,
    is_neutral: bool,
    input_key: batches.Key | None,
) -> Algorithm:
    """A method that replaces a batch's images by what a core makes of them.

    Args:
        name: The algorithm's.
        core: `(rng, images, **scalars) -> images`.
        scalars: The settings that the state resolves in each step.
        config: The settings to print; those that are `None` are left out.
        is_neutral: Whether the settings change nothing.
        input_key: As in a factory.
    """
    keys = given_keys(writes=("input_key",), input_key=input_key)

    def apply(event: Event, state: State) -> State:
        key = keys.get("input_key", state.context.input_key)
        if event is Event.INIT:
            check_can_write(key, "input_key")
            return state
        images = batches.get(state.batch, key)
        check_images(name, images)
        values = {setting: state.scalar(scalar) for setting, scalar in scalars.items()}
        return state.replace(batch=batches.put(state.batch, key, core(state.rng(name), images, **values)))

    return Algorithm(
        name,
        NEVER if is_neutral else on(Event.INIT, Event.AFTER_DATALOADER),
        apply,
        traits=frozenset({Trait.AUGMENTS_EXAMPLES}),
        config={setting: value for setting, value in {**config, **keys}.items() if value is not None},
    )
