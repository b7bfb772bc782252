"""torch's settings of the process, on which the bits of a step and compiled code depend."""

from collections.abc import Callable, Mapping
from typing import Any

import torch


Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Functions to read and to set a setting."""


def read_settings() -> dict[str, Any]:
    """Return torch's own settings by name, as values that can be sent to another process."""
    return read(_SETTINGS)


def write_settings(settings: Mapping[str, Any]) -> None:
    """Set those of torch's settings that differ from the given ones; see `read_settings`."""
    write(_SETTINGS, settings)


def read(table: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the values of the settings in a table."""
    return {name: get() for name, (get, _) in table.items()}


def write(table: Mapping[str, Setting], values: Mapping[str, Any]) -> None:
    """Set those settings of a table that differ from the given values."""
    for name, value in values.items():
        get, put = table[name]
        if get() != value:
            put(value)


def _attribute(owner: Any, name: str) -> Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


_SETTINGS: dict[str, Setting] = {
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    # One value for two switches: 0 for off, 1 for warnings only, 2 for errors.
    "deterministic algorithms": (
        torch.get_deterministic_debug_mode,
        lambda mode: torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1),
    ),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "anomaly detection": (
        lambda: torch.is_anomaly_enabled() and ("with check_nan" if torch.is_anomaly_check_nan_enabled() else "on"),
        lambda mode: torch.set_anomaly_enabled(bool(mode), mode != "on"),
    ),
    "autocast": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda enabled: torch.set_autocast_enabled("cpu", enabled),
    ),
    "autocast dtype": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda dtype: torch.set_autocast_dtype("cpu", dtype),
    ),
    "default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "mkldnn": _attribute(torch.backends.mkldnn, "enabled"),
    "cudnn benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cudnn deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "cudnn allow_tf32": _attribute(torch.backends.cudnn, "allow_tf32"),
}
"""Functions to read and to set each of torch's settings, by name."""
