"""What an optimizer is: its protocol, the checks of one, and its memory after the parameters have changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from purecompose import tree
from purecompose._support.objects import check_hidden
from purecompose._support.specs import shown
from purecompose.schedule import Scalar, number


# The optimizer's state: slot -> parameter name -> tensor.
OptState: TypeAlias = dict[str, dict[str, Tensor]]
"""The memory of an optimizer: a dict for each quantity, by the names of the parameters."""
# Reads a setting: plain numbers stay floats; schedules and hparams are returned as 0-d tensors.
Value: TypeAlias = Callable[[Scalar], float | Tensor]
"""How an optimizer reads the value of a scalar in a step."""


class Optimizer(Protocol):
    """The pair of pure functions that the step calls; hashable, and equal by value: a frozen dataclass.

    Its settings are fields, so that schedules and hparams among them are found; `update` reads these by `value`.

    An optimizer that evaluates the loss several times in a step, such as `lbfgs`, has an attribute `evaluates`, which
    is true. Its `update` has two more keywords: `loss`, the loss at `params`, and `gradient`, a function from all
    parameters to their gradients and the loss.
    """

    def init(self, params: Mapping[str, Tensor]) -> Any:
        """Return the state before the first update: a pytree of tensors with fixed structure, shapes and dtypes.

        Args:
            params: All parameters by name. Frozen ones are on the meta device; what is stored under their names, in
                mappings from parameter names, is dropped.
        """
        ...

    def update(
        self, grads: Mapping[str, Tensor], opt_state: Any, params: Mapping[str, Tensor], value: Value = number
    ) -> tuple[dict[str, Tensor], Any]:
        """Return new parameters and a new state; the arguments are not modified.

        Args:
            grads: Gradients by parameter name. A parameter without one keeps its tensor and its state.
            opt_state: The state returned by `init` or the last `update`; frozen parameters may be missing in it.
            params: All parameters by name; the result has their order.
            value: Function from a scalar setting to its current value, a number or a 0-d tensor.
        """
        ...


def check_optimizer(optimizer: Any, where: str) -> None:
    """Raise a `TypeError` if this is not an optimizer."""
    has_both = all(callable(getattr(optimizer, name, None)) for name in ("init", "update"))
    if isinstance(optimizer, type) or not has_both:
        raise TypeError(
            f"{where}: expected a pure optimizer with init and update, such as optim.sgd(0.1) or "
            f"optim.from_torch(torch.optim.NAdam), got {shown(optimizer)}"
        )
    check_hidden(optimizer.update, f"{where}: {optimizer!r}")
    try:
        hash(optimizer)
    except TypeError as error:
        raise TypeError(
            f"{where}: {optimizer!r}: expected a hashable one, since compiled steps are looked up by it ({error}); "
            "make its class a frozen dataclass (@dataclasses.dataclass(frozen=True)) with tuples in place of lists"
        ) from None


def checked_init(optimizer: Any, params: Mapping[str, Tensor], frozen: Collection[str] = ()) -> Any:
    """Return the optimizer's state before the first update, without memory for frozen parameters."""
    opt_state = carried(optimizer, None, params, {}, frozen) if frozen else optimizer.init(params)
    if all(isinstance(leaf, Tensor) for leaf in tree.leaves(opt_state)):
        return opt_state
    for path, leaf in tree.leaves_with_paths(opt_state).items():  # the paths take longer than all else
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"optimizer: {optimizer!r}.init gave opt_state{path} = {shown(leaf)}: expected a pytree of tensors; "
                "write torch.zeros(()) for a number"
            )
    return opt_state


def carried(
    optimizer: Any, opt_state: Any, params: Mapping[str, Tensor], kept: Mapping[str, str], frozen: Collection[str] = ()
) -> Any:
    """Return an optimizer's state with the old memory of parameters that were kept, and fresh memory of the others.

    A frozen parameter has memory only if it had some before. Memory that is not stored by parameter name is kept as it
    is, or fresh if there was none.

    Args:
        kept: The old names of parameters that were kept, by their new names.
        frozen: The new names of parameters that do not train.
    """
    names, allocated = set(params), set(params).difference(kept, frozen)

    def is_by_name(memory: Any) -> bool:
        # Only the innermost such mapping: the name of a slot may also be the name of a parameter.
        is_named = isinstance(memory, Mapping) and bool(memory) and memory.keys() <= names
        return is_named and not any(map(is_by_name, memory.values()))

    def joined(new: Any, old: Any) -> Any:
        if is_by_name(new):
            had = {name: old[kept[name]] for name in new if old and name in kept and kept[name] in old}
            return {name: had.get(name, value) for name, value in new.items() if name in had or name not in frozen}
        if isinstance(new, Mapping):
            return {key: joined(value, old[key] if old and key in old else None) for key, value in new.items()}
        if isinstance(new, tuple | list):
            members = [joined(mine, theirs) for mine, theirs in zip(new, old or [None] * len(new), strict=True)]
            return type(new)(*members) if hasattr(new, "_fields") else type(new)(members)
        return new if old is None else old

    def result() -> Any:
        # Parameters without fresh memory are on the meta device, where theirs need not be allocated.
        given = {name: param if name in allocated else param.detach().to("meta") for name, param in params.items()}
        return joined(optimizer.init(given), opt_state)

    memory = result()
    if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree.leaves(memory)):
        return memory
    # A kept parameter may need memory that it did not have, for example in another group.
    allocated = names
    return result()
