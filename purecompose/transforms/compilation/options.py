"""The options of `compile`."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from purecompose._support.checks import check_flag, check_whole, shown
from purecompose.core.compose import Step
from purecompose.core.program import events_in
from purecompose.time.predicates import NEVER
from purecompose.transforms.compilation.backends import BACKENDS, MODES


@dataclass(frozen=True)
class Options:
    """Options for compiling a step; see `purecompose.compile`."""

    donate: bool
    backend: str | Callable[..., Any]
    mode: str | None
    fallback: bool
    eager_below: int
    dynamic: bool | Literal["all"]
    max_variants: int
    quiet: bool

    def checked(self, step: Step) -> "Options":
        """Return the options if they are valid for a step, or raise."""
        _check_backend(self.backend, self.mode)
        for name in ("donate", "fallback", "quiet"):
            check_flag(getattr(self, name), f"compile: {name}")
        if not isinstance(self.dynamic, bool) and self.dynamic != "all":
            raise TypeError(f"compile: dynamic: expected True, False or 'all', got {shown(self.dynamic)}")
        check_whole(self.max_variants, "compile: max_variants", 1)
        check_whole(self.eager_below, "compile: eager_below", 0)
        if self.mode == "reduce-overhead":
            self._check_replay(step)
        return self

    def _check_replay(self, step: Step) -> None:
        """Raise a `ValueError` for a step that a CUDA graph cannot repeat; see `replay.Replay`."""
        events = events_in(step.program)
        hosts = [
            one.name
            for one in step.algorithms
            if one.host and any(one.predicate.at(event) != NEVER for event in events)
        ]
        reasons = {
            "donate=False, with which new values are in other memory after each step": not self.donate,
            f"dynamic={self.dynamic!r}, since its sizes are fixed": self.dynamic,
            "microbatches, which are cut and averaged on the host": step.cut.may_slice,
            "several processes, whose messages are not recorded": step.ranks is not None,
            f"algorithms that run on the host between kernels ({', '.join(hosts)})": hosts,
        }
        found = next((reason for reason, is_given in reasons.items() if is_given), None)
        if found is not None:
            raise ValueError(
                "compile: mode='reduce-overhead' records a step as a CUDA graph, which repeats the same kernels at the "
                f"same addresses; it cannot be used with {found}. Leave the mode out"
            )

    def announce(self, text: str) -> None:
        """Write a text to standard error, unless the step is quiet."""
        if not self.quiet:
            sys.stderr.write(text)
            sys.stderr.flush()


def _check_backend(backend: Any, mode: Any) -> None:
    if mode not in MODES:
        raise ValueError(f"compile: mode={mode!r}: expected one of {', '.join(map(repr, MODES))}")
    if mode is not None and backend != "inductor":
        raise ValueError(f"compile: mode={mode!r} is an option of backend='inductor'; got backend={backend!r}")
    if not isinstance(backend, str) and not callable(backend):
        raise TypeError(f"compile: backend: expected a name or a function (graph, inputs) -> function, got {backend!r}")
    if isinstance(backend, str) and backend not in BACKENDS and backend not in torch.compiler.list_backends(()):
        known = ", ".join(dict.fromkeys([*BACKENDS, *torch.compiler.list_backends()]))
        raise ValueError(f"compile: backend={backend!r}: expected one of {known}")
