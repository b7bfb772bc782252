"""Calls of a step within `torch.compile`, which run as calls of `compile(step, donate=False, fallback=True)`."""

from typing import Any

from purecompose._support.messages import warn
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.transforms.compilation.backends import BACKENDS, MODES
from purecompose.transforms.compilation.inductor import mode_options
from purecompose.transforms.compilation.step import compile


def call_in_torch_compile(step: Step, state: State, batch: Any, backend: Any) -> State:
    """Return the state after one batch.

    Args:
        step: A composed step; it is compiled once for each backend.
        state: The state.
        batch: The batch.
        backend: The backend of the `torch.compile` around the call, as `torch.compile` wraps it.
    """
    known = step._cache.within_torch_compile
    compiled = next((one for given, one in known if given is backend or given == backend), None)
    if compiled is None:
        compiled = compile(step, donate=False, fallback=True, quiet=True, **_options(backend))
        known.append((backend, compiled))
    return compiled(state, batch)


def _options(backend: Any) -> dict[str, Any]:
    """Return the arguments of `torch.compile` as arguments of `compile`."""
    name = getattr(backend, "compiler_name", None)
    if name is None:  # a stance of torch.compiler is set
        return {}
    options = {"backend": name if name in BACKENDS else backend, "dynamic": backend.dynamic is True}
    config = getattr(backend, "config", None)  # Inductor's, as mode and options have set it
    if config:
        options["mode"] = next((mode for mode in MODES[2:] if mode_options(mode, backend.dynamic) == config), None)
        if options["mode"] is None:
            warn("torch.compile(options=...) has no effect on a step: pc.compile(step) takes mode, but no options")
    return options
