"""Predicates on states for `bisect`: functions `State -> bool`, true where something has gone wrong.

Any function of a state is one. The name of those here is the call that made them. For a population, they are true if
they are for any member.
"""

import fnmatch
from collections.abc import Callable

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support import publish
from purecompose._support.specs import check_number
from purecompose.core.state import State


publish(__name__)


def loss_above(number: float) -> Callable[[State], bool]:
    """Return the predicate that the loss of the last batch is above a number, or NaN. It usually does not stay so.

    Args:
        number: The bound.

    Example:
        >>> loss_above(5.0).__name__
        'loss_above(5.0)'
    """
    check_number(number, "loss_above")

    def is_above(state: State) -> bool:
        # The loss is NaN before the first batch.
        return state.timestamp.batch > 0 and state.loss is not None and not bool((state.loss <= number).all())

    is_above.__name__ = f"loss_above({number})"
    return is_above


def not_finite() -> Callable[[State], bool]:
    """Return the predicate that a parameter, a buffer or the optimizer's memory has a NaN or an infinite number.

    Once it is true it usually stays so.

    Example:
        >>> not_finite().__name__
        'not_finite()'
    """

    def is_bad(state: State) -> bool:
        found = tree.leaves((state.params, state.buffers, state.opt_state))
        return any(isinstance(leaf, Tensor) and not bool(leaf.isfinite().all()) for leaf in found)

    is_bad.__name__ = "not_finite()"
    return is_bad


def weight_norm_above(number: float, params: str = "*") -> Callable[[State], bool]:
    """Return the predicate that the Euclidean norm of parameters is above a number, or NaN.

    Args:
        number: The number.
        params: Pattern (`fnmatch`) of the names of the parameters.

    Raises:
        ValueError: When called: no parameter has such a name.

    Example:
        >>> weight_norm_above(100.0, "0.*").__name__
        "weight_norm_above(100.0, '0.*')"
    """
    check_number(number, "weight_norm_above")

    def is_above(state: State) -> bool:
        chosen = [param.detach() for name, param in state.params.items() if fnmatch.fnmatchcase(name, params)]
        if not chosen:
            raise ValueError(
                f"weight_norm_above: no parameter has a name like {params!r}; there are {', '.join(state.params)}"
            )
        members = state.key.shape[:-1]  # those of a population come first
        squares = [param.double().square().reshape(*members, -1).sum(-1) for param in chosen]
        return not bool((torch.stack(squares).sum(0).sqrt() <= number).all())

    is_above.__name__ = f"weight_norm_above({number}, {params!r})"
    return is_above
