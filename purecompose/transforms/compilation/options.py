"""The options of `compile`."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from purecompose._support.checks import check_flag, check_whole, shown
from purecompose.combinations import unsupported
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
        """Raise an `UnsupportedError` for a step that a CUDA graph cannot repeat; see `replay.Replay`."""
        events = events_in(step.program)
        hosts = [
            one.name
            for one in step.algorithms
            if one.host and any(one.predicate.at(event) != NEVER for event in events)
        ]
        given = {
            "donate=False": not self.donate,
            "dynamic": self.dynamic,
            "microbatches": step.cut.may_slice,
            "several processes": step.ranks is not None,
            "host algorithms": hosts,
        }
        if other := next((feature for feature, is_given in given.items() if is_given), None):
            raise unsupported(
                'compile(mode="reduce-overhead")', other, ", ".join(hosts) if other == "host algorithms" else ""
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
