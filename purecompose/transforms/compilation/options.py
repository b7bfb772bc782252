"""The options of `compile`."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from purecompose._support.checks import check_flag, check_whole, shown
from purecompose.core.compose import Step
from purecompose.core.program import events_in
from purecompose.time import Time, Timestamp
from purecompose.time.predicates import NEVER
from purecompose.time.units import named_point
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
    tiered: bool | str | Time
    quiet: bool

    def checked(self, step: Step) -> "Options":
        """Return the options if they are valid for a step, or raise; a text in `tiered` becomes a time."""
        _check_backend(self.backend, self.mode)
        for name in ("donate", "fallback", "quiet"):
            check_flag(getattr(self, name), f"compile: {name}")
        if not isinstance(self.dynamic, bool) and self.dynamic != "all":
            raise TypeError(f"compile: dynamic: expected True, False or 'all', got {shown(self.dynamic)}")
        check_whole(self.max_variants, "compile: max_variants", 1)
        check_whole(self.eager_below, "compile: eager_below", 0)
        if self.mode == "reduce-overhead":
            self._check_replay(step)
        return replace(self, tiered=_checked_tiers(self.tiered, step, self.backend))

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

    @property
    def words(self) -> str:
        """The options on which the bits of a run depend, such as "inductor from 500ba"."""
        if isinstance(self.tiered, Time):
            return f"{self.backend} from {self.tiered}"
        return f"{self.backend} when ready" if self.tiered else str(self.backend)

    @property
    def is_tiered(self) -> bool:
        """True if steps run as composed at first."""
        return self.tiered is not False  # a time of 0 is false

    def is_due(self, now: Timestamp) -> bool:
        """Return whether a fixed time is given and has been reached."""
        return isinstance(self.tiered, Time) and now.reached(self.tiered)

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


def _checked_tiers(tiered: Any, step: Step, backend: Any) -> bool | Time:
    """Return `tiered` with the time of the swap, if one is given."""
    if tiered is False:
        return False
    if tiered is not True and not (isinstance(tiered, str) and tiered.startswith("at ")):
        raise TypeError(f"compile: tiered: expected True, False or a fixed time such as 'at 500ba', got {tiered!r}")
    if backend not in BACKENDS:
        raise ValueError(
            f"compile: tiered={tiered!r}: only Inductor, backend='inductor', can compile in the background, since it "
            f"keeps its results on disk; got backend={backend!r}"
        )
    if tiered is not True:
        return named_point(tiered.removeprefix("at "), "compile: tiered")
    if step.ranks is not None:
        raise ValueError(
            "compile: tiered=True: processes that share their batches would begin to run compiled at different ones, "
            "and their weights would drift apart; give a fixed time, such as tiered='at 500ba'"
        )
    return True
