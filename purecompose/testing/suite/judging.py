"""Judgement of laws about other ways to compute a step: within rounding, and with the algorithm as the cause.

These laws work in double precision, where rounding is far below any mistake. An algorithm that does not accept float64
is tried in float32 with a wide tolerance, and a task in half precision with a wider one, since autocast does not affect
float64. If the network or the companions break a law without the algorithm, nothing is judged.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from purecompose import batch as batches, tree
from purecompose._support.device import AUTOCAST
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import Step
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.faults import is_refusal
from purecompose.testing.law import Broken, NotJudged
from purecompose.testing.record import LASTING, compare
from purecompose.testing.subject import Subject
from purecompose.time.event import Event
from purecompose.time.predicates import on


Judge: TypeAlias = Callable[[Subject, Case, torch.dtype], bool]
"""A function that judges a law with weights in a dtype: float64, or float32 if the algorithm or task requires it."""


def judged(judge: Judge, subject: Subject, case: Case) -> bool:
    """Return the judgement at the best precision; False if the case breaks the law without the algorithm, too."""
    return _unless_idle_breaks(functools.partial(_at_best_precision, judge), subject, case)


def judged_in_double(judge: Judge, subject: Subject, case: Case) -> bool:
    """Return the judgement in float64; False if the algorithm refuses that, or the case breaks the law without it.

    In half precision nothing is judged, because autocast does not affect float64.
    """
    if case.task.is_half:
        return False
    try:
        return _unless_idle_breaks(lambda s, c: judge(s, c, torch.float64), subject, case)
    except (Broken, NotJudged):
        raise
    except Exception as error:
        if is_refusal(error):
            return False
        raise


def _unless_idle_breaks(judge: Callable[[Subject, Case], bool], subject: Subject, case: Case) -> bool:
    try:
        return judge(subject, case)
    except Broken:
        try:
            judge(Subject(_idle(subject.name)), case)
        except Exception:
            return False
        raise


def _idle(name: str) -> Algorithm:
    """Return an algorithm that acts, so that there is something to judge, but does nothing."""
    return Algorithm(name, on(Event.BATCH_START), lambda event, state: state)


def _at_best_precision(judge: Judge, subject: Subject, case: Case) -> bool:
    if case.task.is_half:  # autocast does not affect float64, so methods for half precision would do nothing
        return judge(subject, case, torch.float32)
    try:
        return judge(subject, case, torch.float64)
    except (Broken, NotJudged):
        raise
    except Exception:  # an error that is not due to float64 is raised again in float32
        return judge(subject, case, torch.float32)


def attempted(doing: str, act: Callable[[], Any]) -> Any:
    """Return the result of `act`; an error that the plain step does not raise breaks the law."""
    try:
        return act()
    except NotJudged:
        raise
    except Exception as error:
        message = " ".join(str(error).split())
        raise Broken(f"{doing}: {type(error).__name__}: {message}", event=getattr(error, "event", None)) from error


# Rounding in double precision is far below any mistake. The floors are for numbers that cancel, whose rounding errors
# are not relative to their size.
_DOUBLE, _SINGLE = tree.Tolerance(1e-6, 1e-13), tree.Tolerance(1e-3, 1e-6)
# Twice the largest difference of 36 plain steps in bfloat16, whole or in slices, alone or under vmap.
_HALF = tree.Tolerance(0.1, 2e-3)


def rounding(dtype: torch.dtype) -> tree.Tolerance:
    """Return the rounding tolerance for a leaf's dtype; slots may be float32 in any state."""
    return _DOUBLE if dtype in (torch.float64, torch.complex128) else _SINGLE


def compare_rounded(first: State, second: State, labels: tuple[str, str], fields: Sequence[str]) -> None:
    """Raise `Broken` for the first leaf in which two states differ by more than rounding; integers agree exactly."""
    is_half = first.context.precision in AUTOCAST
    compare(first, second, labels, fields=fields, tolerance=(lambda dtype: _HALF) if is_half else rounding)


_NUM_SHAKES = {False: 4, True: 16}
"""Number of perturbations of a step; True is for half precision, where ratios of differences vary by a tenth."""


# With one repetition, a method that acts in every second call would agree by chance.
_NUM_REPEATS = 3


def is_on_the_edge(step: Step, state: State, batch: Any, expected: State) -> bool:
    """Return whether the step has another result if params and inputs change by less than rounding.

    Then a discrete choice in it has changed. A step that has another result anyway, because it counts its calls, is not
    such a case.
    """
    if any(_differs(step(state, batch), expected) for _ in range(_NUM_REPEATS)):
        return False
    is_half = state.context.precision in AUTOCAST
    for seed in range(_NUM_SHAKES[is_half]):
        generator = torch.Generator().manual_seed(seed)
        params = {name: _shaken(param, generator, is_half) for name, param in state.params.items()}
        shaken = batches.map_tensors(lambda tensor, g=generator: _shaken(tensor, g, is_half), batch)
        if _differs(step(state.replace(params=params), shaken), expected):
            return True
    return False


def _differs(first: State, second: State) -> bool:
    try:
        compare_rounded(first, second, ("as it is", "moved"), LASTING)
    except Broken:
        return True
    return False


def _shaken(tensor: Tensor, generator: torch.Generator, is_half: bool) -> Tensor:
    """Return the tensor with each element changed by less than rounding.

    In half precision the relative change is at most its rounding error, otherwise a thousandth of the share that
    comparisons tolerate.
    """
    if not tensor.is_floating_point():
        return tensor
    moves = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
    share = 2**-8 if is_half else 1e-3 * rounding(tensor.dtype).share
    return tensor * (1 + share * moves).to(tensor)


def with_frozen_statistics(case: Case) -> Case:
    """Return the case with BatchNorm in evaluation mode, also in training."""
    kind = nn.modules.batchnorm._BatchNorm
    names = [name for name, module in case.task.make_net(0).named_modules() if isinstance(module, kind)]
    options = {**case.task.options, "eval_mode": (*case.task.options.get("eval_mode", ()), *names)}
    return dataclasses.replace(case, task=dataclasses.replace(case.task, options=options))
