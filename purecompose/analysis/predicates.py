"""Predicates on states for `bisect`: functions `State -> bool`, true where something has gone wrong.

Any function of a state is one. For a population, those here are true if they are for any member.
"""

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.checks import check_number
from purecompose.core.state import State
from purecompose.losses.metrics import accuracy
from purecompose.run.evaluation import evaluate
from purecompose.surgery.weights import to_module


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


def dead_unit(module: str, inputs: Any) -> StatePredicate:
    """Return the predicate that a unit of a module has equal outputs for all examples, as a ReLU that is always 0.

    Args:
        module: Name of the module, such as "0.relu". Its units are in dimension 1 of its outputs, (N, C, ...).
        inputs: The examples: one argument of the network, a list of arguments, or a mapping of keyword arguments.

    Raises:
        ValueError: When called: the network has no such module, or the state is a population's.

    Example::

        bisect(run, dead_unit("1", inputs), stays=True)
    """

    def is_dead(state: State) -> bool:
        net = to_module(state).eval()
        if module not in dict(net.named_modules()):
            known = ", ".join(name for name, _ in net.named_modules() if name)
            raise ValueError(f"dead_unit: the network has no module {module!r}; there are {known}")
        found: list[Any] = []
        net.get_submodule(module).register_forward_hook(lambda _, __, outputs: found.append(outputs))
        given = batches.map_tensors(lambda tensor: tensor.to(state.device), inputs)
        with torch.no_grad():
            if isinstance(given, Mapping):
                net(**given)
            else:
                net(*(given if isinstance(given, list) else [given]))
        units = found[-1].transpose(0, 1).flatten(1)
        return bool((units == units[:, :1]).all(1).any())

    return StatePredicate(f"dead_unit({module!r}, ...)", is_dead)


def accuracy_below(share: float, batch: Any, metric: Any = accuracy) -> StatePredicate:
    """Return the predicate that the accuracy on a batch is below a threshold.

    Args:
        share: The threshold, in [0, 1].
        batch: A batch with inputs and targets, with the same structure as the training batches.
        metric: Another metric than the accuracy of class indices; larger values are better.

    Example::

        bisect(run, accuracy_below(0.5, (inputs, targets)), stays=False)
    """
    check_number(share, "accuracy_below: share", 0, 1)

    def is_below(state: State) -> bool:
        given = batches.map_tensors(lambda tensor: tensor.to(state.device), batch)
        return not bool((torch.as_tensor(evaluate(state, [given], {"value": metric})["value"]) >= share).all())

    return StatePredicate(f"accuracy_below({share}, ...)", is_below)
