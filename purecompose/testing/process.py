"""What belongs to the process and not to a state: generators, modes and defaults."""

import contextlib
import random as python_random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


__all__ = ["process_restored", "process_settings", "seeded"]


def process_settings() -> dict[str, Any]:
    """What belongs to the process, by name. Generators count by a hash of their state."""
    python_state, numpy_state, torch_state = _generators()
    return {
        "torch generator": hash(torch_state.numpy().tobytes()),
        "random generator": hash(python_state),
        "NumPy generator": None if numpy_state is None else hash((numpy_state[1].tobytes(), numpy_state[2])),
        **{name: read() for name, (read, _) in _SETTINGS.items()},
    }


@contextlib.contextmanager
def process_restored() -> Iterator[None]:
    """Sets back at the end what an algorithm has changed in the process."""
    before, (python_state, numpy_state, torch_state) = {n: r() for n, (r, _) in _SETTINGS.items()}, _generators()
    try:
        yield
    finally:
        python_random.setstate(python_state)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        for name, (read, write) in _SETTINGS.items():
            if read() != before[name]:
                write(before[name])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Other seeds in the global generators, which are set back afterwards."""
    numpy = sys.modules.get("numpy")
    with process_restored():
        # torch.manual_seed would seed the accelerators' generators as well, which no one would set back.
        torch.default_generator.manual_seed(seed)
        python_random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        yield


def _generators() -> tuple[Any, Any, torch.Tensor]:
    numpy = sys.modules.get("numpy")
    return python_random.getstate(), None if numpy is None else numpy.random.get_state(), torch.get_rng_state()


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda enabled: torch.set_autocast_enabled("cpu", enabled),
    ),
}
"""How to read each setting, and how to set it."""
