"""An optimizer that skips a step whose gradients are not finite."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.functorch import is_watched
from purecompose._support.shards import is_shard, local, sum_of_shards
from purecompose.optim.base import Optimizer, Value, can_move
from purecompose.optim.lists import is_plain, largest
from purecompose.schedule import number


@dataclass(frozen=True)
class Guarded:
    """Optimizer that updates as the inner one does, or not at all if any element of a gradient is inf or NaN.

    Both outcomes are computed and one is chosen on the device, so that nothing waits for the device, and the choice
    can be traced and mapped.

    Args:
        inner: The optimizer.

    Example:
        >>> from purecompose.optim import sgd
        >>> optimizer, params = Guarded(sgd(0.5, momentum=0.9)), {"w": torch.ones(2)}
        >>> grads = {"w": torch.tensor([1.0, torch.inf])}
        >>> params, opt_state = optimizer.update(grads, optimizer.init(params), params)
        >>> params["w"].tolist(), opt_state["momentum"]["w"].tolist()
        ([1.0, 1.0], [0.0, 0.0])
    """

    inner: Optimizer

    def init(self, params: Mapping[str, Tensor]) -> Any:
        """Return the inner optimizer's state."""
        return self.inner.init(params)

    def update(
        self, grads: Mapping[str, Tensor], opt_state: Any, params: Mapping[str, Tensor], value: Value = number
    ) -> tuple[dict[str, Tensor], Any]:
        """Return the inner optimizer's update if all of `grads` is finite, else the old values; see
        `Optimizer.update`.
        """
        moved, new_opt_state = self.inner.update(grads, opt_state, params, value)
        stayed = {name: params[name] for name in moved}
        return chosen(all_finite(grads.values()), (moved, new_opt_state), (stayed, opt_state))

    def can_move(self, param: Tensor) -> bool:
        """Return whether the inner optimizer moves parameters of this form."""
        return can_move(self.inner, param)


def guarded(optimizer: Any) -> Guarded:
    """Return the optimizer with a guard around it; one that has a guard is returned unchanged."""
    return optimizer if isinstance(optimizer, Guarded) else Guarded(optimizer)


def check_guarded(optimizer: Any, where: str) -> None:
    """Raise a `RuntimeError` if an optimizer has lost the guard that a method put around it."""
    if not isinstance(optimizer, Guarded):
        raise RuntimeError(
            f"{where}: expected the optimizer that INIT has wrapped, which skips steps that are not finite, got "
            f"{optimizer!r}: replace it before step.init, or wrap the new one in optim.guarded.Guarded(...)"
        )


def chosen(is_good: Tensor, new: Any, old: Any) -> Any:
    """Return one of two trees, as a whole, chosen on the device.

    Args:
        is_good: 0-d, bool.
        new: A tree of tensors.
        old: A tree of the same structure, shapes and dtypes.

    Returns:
        `new` if `is_good` is true, else `old`, bit for bit; non-finite elements of the other have no effect.

    Example:
        >>> chosen(torch.tensor(False), {"w": torch.tensor([torch.nan])}, {"w": torch.tensor([1.0])})
        {'w': tensor([1.])}
    """
    return tree.map(lambda a, b: a if a is b else torch.where(is_good, a, b), new, old)


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether no element is inf or NaN: 0-d, bool, on the tensors' device; the same on all processes that share
    the tensors' rows.

    Example:
        >>> all_finite([torch.ones(2), torch.tensor([0.0, torch.nan])])
        tensor(False)
    """
    found = [tensor.detach() for tensor in tensors if tensor.numel()]
    if shards := [tensor for tensor in found if is_shard(tensor)]:
        own = all_finite(map(local, found)).to(found[0].device)
        return sum_of_shards((~own).float(), shards) == 0
    if not found:
        return torch.ones((), dtype=torch.bool)
    if is_plain() and not is_watched():
        # One call computes the largest magnitudes. Not used in a traced graph, whose kernels are fused anyway.
        return largest(found).isfinite().all()
    return torch.stack([tensor.isfinite().all() for tensor in found]).all()
