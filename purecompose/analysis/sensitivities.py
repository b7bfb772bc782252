"""`sensitivity`: the gradient of a result with respect to named scalars, through a window of training steps.

A window is a state and the batches that follow. The objective at its end is a function of the scalars. Reverse mode
gives the derivative with respect to a scalar's value in each single step; forward mode gives only their sum, with
memory that does not grow with the window. Both are checked against central differences, for which the window is trained
twice more for each scalar. Draws are keyed, so all of these runs have the same draws.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from purecompose import batch as batches, losses
from purecompose._support.checks import check_number, shown
from purecompose._support.tables import table
from purecompose.analysis.replaying import RecordedRun, as_dtype, point, states_from
from purecompose.core.compose import Step
from purecompose.core.state import State, check_single
from purecompose.data.loaders import fixed_batches
from purecompose.run.evaluation import Evaluator
from purecompose.time import Time, TimeLike
from purecompose.time.event import Event
from purecompose.transforms.compilation import CompiledStep


Objective: TypeAlias = Callable[[State], Tensor] | Evaluator
"""A differentiable function of the state at the window's end, or an evaluator, for the mean loss on its data."""

_MODES = ("auto", "forward", "reverse")
_FEW = 3
"""Number of scalars up to which long windows use forward mode."""
_LONG = 50
"""Number of batches from which on the graph of reverse mode takes much memory."""
_AGREES = 1e-3


class Window(NamedTuple):
    """A part of a run: the step, the state at its start, and its batches."""

    step: Step
    """The step."""
    state: State
    """The state before the first of the batches."""
    batches: Sequence[Any]
    """The batches, in order."""


def window_of(run: RecordedRun, start: TimeLike | int, stop: TimeLike | int) -> Window:
    """Return a window of a recorded run, by a replay.

    Args:
        run: The run.
        start, stop: Where the window begins and ends: numbers of batches, or times such as "1234ba" or "0.5dur".

    Raises:
        ValueError: `stop` is not after `start`, or not in the recorded part of the run.
        MismatchError: See `replay`.

    Example::

        window = window_of(run, "100ba", "110ba")
        sensitivity(window, test_batch)
    """
    first, last = point(start, "window_of: start"), point(stop, "window_of: stop")
    run.before(last)  # raises if it is not recorded
    checkpoint, length = run.before(first)
    found = _Collector(first)
    with contextlib.closing(states_from(run, run.load(checkpoint), length, (found,))) as states:
        for state in states:
            if state.timestamp.reached(last):
                break
    if found.state is None:
        raise ValueError(f"window_of: start={start!r}, stop={stop!r}: there is no batch between them")
    return Window(run.step, found.state, found.batches)


class _Collector:
    """An observer that keeps the state at a time, and the batches from there on."""

    def __init__(self, first: Time) -> None:
        self._first = first
        self.state: State | None = None
        self.batches: list[Any] = []

    def __call__(self, event: Event, state: State) -> None:
        """See `Observer`."""

    def see_batch(self, state: State, batch: Any) -> None:
        """Keep a batch before its step; see `replay`."""
        if state.timestamp.reached(self._first):
            self.state = state.copy() if self.state is None else self.state
            self.batches.append(batch)


@dataclass(frozen=True)
class Derivative:
    """The derivative of the objective with respect to one named scalar."""

    name: str
    """Name of the scalar."""
    value: float
    """The scalar's value at the start of the window."""
    gradient: float | None
    """The derivative if the value changes in all steps of the window; if no gradient reaches it, `None` in reverse mode
    and 0 in forward mode."""
    by_batch: tuple[float, ...] | None
    """The derivative with respect to the value in each single step, in reverse mode; its sum is `gradient`."""
    difference: float
    """The same as `gradient`, by central differences."""

    @property
    def error(self) -> float:
        """The relative difference between `gradient` and `difference`; 1 if only the gradient is missing."""
        if self.gradient is None:
            return 1.0 if self.difference else 0.0
        largest = max(abs(self.gradient), abs(self.difference))
        return abs(self.gradient - self.difference) / largest if largest else 0.0

    @property
    def agrees(self) -> bool:
        """True if gradient and difference agree within 0.1 %."""
        return self.error <= _AGREES


@dataclass(frozen=True)
class Sensitivity:
    """The result of `sensitivity`; it prints as a table.

    Attributes:
        objective: The value of the objective at the window's end.
        num_batches: The number of batches of the window.
        derivatives: The derivative with respect to each scalar.
        mode: "forward" or "reverse".
    """

    objective: float
    num_batches: int
    derivatives: tuple[Derivative, ...]
    mode: str

    def __str__(self) -> str:
        rows = [
            [
                one.name,
                f"{one.value:.4g}",
                "none" if one.gradient is None else f"{one.gradient:+.4g}",
                f"{one.difference:+.4g}",
                f"{0.1 * one.value * one.difference:+.2g}",
                _remark(one),
            ]
            for one in self.derivatives
        ]
        head = ["scalar", "value", "derivative", "difference", "effect of +10 %", ""]
        steps = f"{self.num_batches} step{'s' * (self.num_batches > 1)}"
        return f"objective {self.objective:.6g} after {steps}, by {self.mode} mode in float64\n\n{table(head, rows)}"


def sensitivity(
    window: Window, of: Objective, to: Iterable[str] | None = None, *, mode: str = "auto", size: float = 1e-4
) -> Sensitivity:
    """Return how a result depends on named scalars, by the gradient through a window of training steps.

    Everything is computed in float64, in which differences are exact enough to check a gradient; results therefore
    differ from those of the run by rounding. No gradient flows through discrete choices or to the parameters of
    distributions (`mixup`'s `alpha`): the table then shows only the difference. Nor does it flow through the running
    statistics of batch normalisation, so with an `Evaluator` the two differ a little. See docs/gradients.md. Only steps
    are computed: events between them, such as EPOCH_END, are left out.

    Args:
        window: The step, the state at the start and the batches.
        of: Function of the state at the end that returns a 0-d tensor; or an `Evaluator`, for the mean loss on its
            data in evaluation mode.
        to: Names of hparams; by default all.
        mode: "reverse" for derivatives with respect to the value in each step, with memory that grows with the
            window; "forward" for their sum only, one pass for each scalar; "auto" for forward mode if the window has
            50 batches or more and there are at most three scalars.
        size: Half the step of the central differences, as a fraction of the scalar's magnitude (of 0.001, if that is
            larger), in (0, 0.1].

    Returns:
        The objective, and its derivative with respect to each scalar.

    Raises:
        TypeError, ValueError: An argument has the wrong type, there is no batch, the state lacks an hparam, or the
            objective is not a finite 0-d tensor.

    Example:
        >>> from purecompose import compose, hparam, loop_events, optim, random
        >>> inputs = random.normal(random.key(0), (32, 4))
        >>> batch = inputs, (inputs[:, 0] > 0).long()
        >>> net, optimizer = torch.nn.Linear(4, 2), optim.sgd(hparam("lr", 0.1))
        >>> state = State.create(net, loss=losses.cross_entropy, optimizer=optimizer, duration="5ba")
        >>> found = sensitivity(Window(compose(loop_events), state, [batch] * 5), of=Evaluator([batch]))
        >>> found.derivatives[0].gradient < 0, found.derivatives[0].agrees
        (True, True)
    """
    step, state, given = window
    names = _checked(step, state, given, of, to, mode)
    check_number(size, "sensitivity: size", 0, 0.1, above=True)
    composed = step.step if isinstance(step, CompiledStep) else step
    start = as_dtype(composed.init(state.copy()), torch.float64)
    start = start.replace(hparams={name: scalar.double() for name, scalar in start.hparams.items()})
    on_device = (batches.map_tensors(lambda tensor: tensor.to(state.device), batch) for batch in given)
    steps = [as_dtype(batch, torch.float64) for batch in on_device]
    objective = _mean_loss(of) if isinstance(of, Evaluator) else of

    def result(values: dict[str, Tensor]) -> Tensor:
        """Return the objective for the value of each scalar in each step, (steps,)."""
        current = start
        for i, batch in enumerate(steps):
            named = {name: value[i] for name, value in values.items()}
            current = composed(current.replace(hparams={**current.hparams, **named}), batch)
        return objective(current)

    values = {name: start.hparams[name].expand(len(steps)).clone() for name in names}
    with torch.no_grad():
        found = result(values)  # forward mode cannot be used in the first run of a schedule
    if not isinstance(found, Tensor) or found.ndim or not found.isfinite():
        raise ValueError(f"sensitivity: of: expected a finite 0-d tensor at the window's end, got {shown(found)}")
    if mode == "auto":
        mode = "forward" if len(steps) >= _LONG and len(names) <= _FEW else "reverse"
    gradients = _reverse(result, values) if mode == "reverse" else _forward(result, values)
    derivatives = []
    for name in names:
        gradient = gradients[name]
        total = None if gradient is None else gradient.sum().item()
        each = tuple(gradient.tolist()) if gradient is not None and gradient.ndim else None
        difference = _difference(result, values, name, size)
        derivatives.append(Derivative(name, state.hparams[name].item(), total, each, difference))
    return Sensitivity(found.item(), len(steps), tuple(derivatives), mode)


_Result: TypeAlias = Callable[[dict[str, Tensor]], Tensor]


def _reverse(result: _Result, values: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Return the gradient with respect to the values of each step."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        end = result(leaves)
        if not end.requires_grad:
            return dict.fromkeys(values)
        grads = torch.autograd.grad(end, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, grads, strict=True))


def _forward(result: _Result, values: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Return the derivative with respect to each scalar, changed in all steps alike."""

    def along(name: str) -> Tensor:
        def shifted(shift: Tensor) -> Tensor:
            return result({**values, name: values[name] + shift})

        shift = torch.zeros((), dtype=torch.float64, device=values[name].device)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*torch.jit.script")  # torch's own forward mode uses it
            return torch.func.jvp(shifted, (shift,), (torch.ones_like(shift),))[1]

    return {name: along(name) for name in values}


@torch.no_grad()
def _difference(result: _Result, values: dict[str, Tensor], name: str, size: float) -> float:
    value = values[name]
    half = size * max(abs(value[0].item()), 1e-3)
    higher, lower = (result({**values, name: value + shift}) for shift in (half, -half))
    return ((higher - lower) / (2 * half)).item()


def _mean_loss(evaluator: Evaluator) -> Callable[[State], Tensor]:
    """Return a function of a state that returns its mean loss on the evaluator's data, with a gradient."""

    def objective(state: State) -> Tensor:
        total, count = torch.zeros((), dtype=torch.float64, device=state.device), 0
        for number, batch in enumerate(fixed_batches(evaluator.data, state.key)):
            if number == evaluator.num_batches:
                break
            batch = batches.map_tensors(lambda tensor: tensor.to(state.device), batch)
            inside = state.replace(batch=as_dtype(batch, torch.float64))
            outputs = state.forward(inside.inputs)
            (loss, _), _ = inside.call_loss(
                lambda fn, outputs=outputs, targets=inside.targets: losses.evaluate_parts(fn, outputs, targets),
                train=False,
            )
            total, count = total + loss * inside.num_examples, count + inside.num_examples
        if not count:
            raise ValueError(f"sensitivity: the data of evaluator {evaluator.label!r} has no batch")
        return total / count

    return objective


def _checked(step: Any, state: Any, given: Any, of: Any, to: Iterable[str] | None, mode: str) -> tuple[str, ...]:
    """Return the names of the scalars."""
    if not isinstance(step, Step) or not isinstance(state, State):
        came = f"{type(step).__name__}, {type(state).__name__}"
        raise TypeError(f"sensitivity: expected Window(step, state, batches), got {came}")
    check_single(state, "sensitivity", "give it one member, unstack_states(state)[0]")
    if not isinstance(given, Sequence) or not given:
        raise ValueError(f"sensitivity: batches: expected a list of at least one batch, got {shown(given)}")
    if not callable(of) and not isinstance(of, Evaluator):
        raise TypeError(f"sensitivity: of: expected a function of a state, or an Evaluator, got {shown(of)}")
    if mode not in _MODES:
        raise ValueError(f"sensitivity: mode={mode!r}: expected one of {', '.join(map(repr, _MODES))}")
    if isinstance(to, str):
        raise TypeError(f"sensitivity: to={to!r}: expected a list of names, [{to!r}]")
    names = tuple(state.hparams) if to is None else tuple(to)
    unknown = [name for name in names if name not in state.hparams]
    if unknown or not names:
        raise ValueError(
            f"sensitivity: to={list(names)}: the state has the hparams {sorted(state.hparams)}; write a scalar by name "
            'where it is used, as in optim.sgd(hparam("lr", 0.1))'
        )
    return names


def _remark(derivative: Derivative) -> str:
    if derivative.agrees:
        return "agree" if derivative.difference else "no effect"
    if not derivative.gradient and derivative.difference:
        return "no gradient flows to it: the difference is across draws or choices"
    return f"differ by {derivative.error:.1%}"
