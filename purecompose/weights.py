"""The weights of a state: the live ones, which train, and averages of them, which methods keep in their slots."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from purecompose import model as models
from purecompose.state import State, check_single


__all__ = ["Averages", "averages_in", "to_module", "wide", "with_weights"]


class Averages(NamedTuple):
    """Averaged weights in a slot, beside the live ones."""

    params: dict[str, Tensor]
    """The averages of trainable parameters, by name; float32 for those in half precision."""
    buffers: dict[str, Tensor]
    """Those of floating buffers; others are the live ones."""
    num: Tensor
    """How many weights are in them, 0-d int64; of none, they count for nothing."""

    @classmethod
    def empty(cls, state: State) -> "Averages":
        """Averages of nothing, with the form of a state's weights."""
        trained = {name: torch.zeros_like(wide(state.params[name])) for name in state.context.trainable}
        floating = {
            name: torch.zeros_like(wide(buffer)) for name, buffer in state.buffers.items() if buffer.is_floating_point()
        }
        return cls(trained, floating, torch.zeros((), dtype=torch.int64, device=state.device))


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 where it is in half precision: small changes would be lost there."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def averages_in(state: State, name: str) -> Averages:
    """The averages that an algorithm of this name keeps.

    Raises:
        ValueError: It keeps none.
    """
    found = _all_averages(state)
    if name not in found:
        known = f"there are {', '.join(found)}" if found else "no algorithm of this state keeps any"
        raise ValueError(f"weights={name!r}: expected the name of an algorithm that averages weights; {known}")
    return found[name]


def with_weights(state: State, name: str) -> State:
    """The state with averaged weights in the place of the live ones; the live ones as long as nothing is averaged.

    Everything else stays, so this is for looking and exporting; training from it begins at the averages.

    Args:
        state: A state, or a population's.
        name: That of the algorithm which averages, such as "ema".

    Raises:
        ValueError: It keeps no averages.
    """
    averages = averages_in(state, name)

    def chosen(live: Mapping[str, Tensor], averaged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: _of(averages.num, averaged[key], own) if key in averaged else own for key, own in live.items()}

    params, buffers = chosen(state.params, averages.params), chosen(state.buffers, averages.buffers)
    return state.replace(params=params, buffers=buffers)


def to_module(state: State, *, weights: str | None = None) -> nn.Module:
    """A plain `nn.Module` with copies of the state's weights, in training mode; ties stay ties.

    Args:
        state: A single state.
        weights: The name of an algorithm whose averages are wanted, such as "ema"; by default the live weights.

    Raises:
        ValueError: The state is a population's, or there are no such averages.
    """
    check_single(state, "to_module(state)", "to_module(unstack_states(state)[0]) is the first one's")
    state = state if weights is None else with_weights(state, weights)
    return models.to_module(state.model, state.params, state.buffers)


def _of(num: Tensor, averaged: Tensor, live: Tensor) -> Tensor:
    # In a population there is a number for each member.
    is_there = (num > 0).view(*num.shape, *[1] * (live.ndim - num.ndim))
    return torch.where(is_there, averaged.to(live.dtype), live)


def _all_averages(state: State) -> dict[str, Averages]:
    found = {}
    for name, slot in state.slots.items():
        parts = (slot, *slot) if isinstance(slot, tuple) else ()
        averages = next((part for part in parts if isinstance(part, Averages)), None)
        if averages is not None:
            found[name] = averages
    return found
