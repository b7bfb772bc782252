"""Metrics of methods that act on the host."""

from collections.abc import Mapping

import torch

from purecompose.core.state import State


def reported(state: State, name: str, numbers: Mapping[str, float]) -> State:
    """Add host numbers to the state's metrics as `f"{name}/{key}"`, 0-d float32, on the state's device."""
    # torch.full, because a copy from the host would wait for a GPU.
    made = {
        f"{name}/{key}": torch.full((), value, dtype=torch.float32, device=state.device)
        for key, value in numbers.items()
    }
    return state.replace(metrics={**state.metrics, **made})
