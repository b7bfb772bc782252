"""Calls of a step within `torch.compile`, which run as calls of `compile(step, donate=False, fallback=True)`."""

import importlib
from typing import Any

from purecompose._support.messages import warn
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.transforms.compilation.backends import BACKENDS, MODES
from purecompose.transforms.compilation.step import CompiledStep, compile


def call_in_torch_compile(step: Step, state: State, batch: Any, backend: Any) -> State:
    """Return the state after one batch.

    Args:
        step: The step, composed or compiled. A composed one is compiled once for each backend.
        state: The state.
        batch: The batch.
        backend: The backend of the `torch.compile` around the call, as `torch.compile` wraps it.
    """
    if isinstance(step, CompiledStep):
        return step(state, batch)
    for known, compiled in step._cache.in_torch_compile:
        if known is backend or known == backend:
            return compiled(state, batch)
    compiled = compile(step, donate=False, fallback=True, quiet=True, **_options(backend))
    step._cache.in_torch_compile.append((backend, compiled))
    return compiled(state, batch)


def _options(backend: Any) -> dict[str, Any]:
    """Return the arguments of `torch.compile` as arguments of `compile`."""
    name = getattr(backend, "compiler_name", None)
    if name is None:  # a stance of torch.compiler is set
        return {}
    options = {"backend": name if name in BACKENDS else backend, "dynamic": backend.dynamic is True}
    config = getattr(backend, "config", None)  # Inductor's, as mode and options have set it
    if config:
        modes = importlib.import_module("torch._inductor").list_mode_options
        options["mode"] = next((mode for mode in MODES[2:] if modes(mode, backend.dynamic) == config), None)
        if options["mode"] is None:
            warn("torch.compile(options=...) has no effect on a step: pc.compile(step) takes mode, but no options")
    return options
