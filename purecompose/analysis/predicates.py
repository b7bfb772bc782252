"""Predicates on states for `bisect`: functions `State -> bool`, true where something has gone wrong.

Any function of a state is one. For a population, those here are true if they are for any member.
"""

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.checks import check_number
from purecompose.core.state import State


@dataclass(frozen=True)
class StatePredicate:
    """A function `State -> bool` that prints as the call that made it.

    Args:
        words: The call that made it, as text.
        fn: The function.
    """

    words: str
    """The call, such as "loss_above(5.0)"."""
    fn: Callable[[State], bool]

    def __call__(self, state: State) -> bool:
        return self.fn(state)

    def __repr__(self) -> str:
        return self.words


def loss_above(number: float) -> StatePredicate:
    """Return the predicate that the loss of the last batch is above a number, or NaN. It usually does not stay so.

    Args:
        number: The bound.

    Example:
        >>> loss_above(5.0)
        loss_above(5.0)
    """
    check_number(number, "loss_above")

    def is_above(state: State) -> bool:
        # The loss is NaN before the first batch.
        return state.timestamp.batch > 0 and state.loss is not None and not bool((state.loss <= number).all())

    return StatePredicate(f"loss_above({number})", is_above)


def not_finite() -> StatePredicate:
    """Return the predicate that a parameter, a buffer or the optimizer's memory has a NaN or an infinite number.

    Once it is true it usually stays so.

    Example:
        >>> not_finite()
        not_finite()
    """

    def is_bad(state: State) -> bool:
        found = tree.leaves((state.params, state.buffers, state.opt_state))
        return any(isinstance(leaf, Tensor) and not bool(leaf.isfinite().all()) for leaf in found)

    return StatePredicate("not_finite()", is_bad)


def weight_norm_above(number: float, params: str = "*") -> StatePredicate:
    """Return the predicate that the Euclidean norm of parameters is above a number, or NaN.

    Args:
        number: The number.
        params: Pattern (`fnmatch`) of the names of the parameters.

    Raises:
        ValueError: When called: no parameter has such a name.

    Example:
        >>> weight_norm_above(100.0, "0.*")
        weight_norm_above(100.0, '0.*')
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

    return StatePredicate(f"weight_norm_above({number}, {params!r})", is_above)
