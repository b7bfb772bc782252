"""Laws of the loss: its gradients, by finite differences; what it ignores; targets that are mixtures."""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from purecompose import random, tree
from purecompose._support.internals import is_transforming
from purecompose.core import loop
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.compose import Step
from purecompose.core.loop import forward, loop_events
from purecompose.core.operation import walk
from purecompose.core.program import events_in
from purecompose.core.scopes import Grad, Microbatches
from purecompose.core.state import State
from purecompose.losses.targets import Mixture
from purecompose.testing.attempt import first_line, is_refusal
from purecompose.testing.case import COMPANY, Case, Subject
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.record import Watched, inserted
from purecompose.testing.suite.agreement import (
    at_best_precision,
    attempted,
    compare_rounded,
    in_double,
    with_frozen_statistics,
)
from purecompose.testing.tasks import Task
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


Point = dict[str, dict[str, Tensor]]
"""Leaves by field and name: {"hparams": ..., "params": ...}."""

# The quotient's error is about EPS**2 times a third derivative, plus 1e-16 / EPS from rounding.
_EPS, _RELATIVE, _ABSOLUTE = 1e-5, 1e-5, 1e-8
# Not powers of two, with which the error of rounding to float32 may be proportional at each.
_SIZES = (_EPS, 0.59 * _EPS, 0.37 * _EPS, 0.23 * _EPS)


def check_derivative(
    loss: Callable[[Point], Tensor],
    point: Point,
    grads: Point,
    *,
    seed: int,
    what: str,
    by: str,
    value: Tensor | None = None,
) -> bool:
    """Compare a gradient with finite differences of a 0-d float64 function along a direction; False if they vary."""
    direction = _direction(point, seed)
    found = _slopes(loss, point, grads, direction)
    if _is_close(*found):
        return True
    value, gap = loss(point) if value is None else value, abs(found[0] - found[1])
    if not value.isfinite() or not _is_smooth(
        lambda size: loss(_moved(point, direction, size)).detach().item(), value.detach().item(), gap
    ):
        return False
    halves = [_slopes(loss, point, grads, half)[1] for half in _halves(direction)]
    if abs(sum(halves) - found[1]) > 0.1 * gap:  # no derivative exists, since the slopes along directions do not add up
        return False
    for part in _parts(direction):
        by_leaf = _slopes(loss, point, grads, part)
        if not _is_close(*by_leaf):
            path, found = as_path(next(iter(tree.leaves_with_paths(part)))), by_leaf
            break
    else:
        path = "params"  # no single leaf is wrong, only the sum of small errors
    raise Broken(tree.Difference(path, what, *found), (by, "by finite differences"))


def _direction(point: Point, seed: int) -> Point:
    """Return a direction of 1 along each hparam, with a random direction of norm 1 in the params."""
    # Keyed draws, since this may be called within a step, where generators raise.
    rng = random.Rng(random.key(seed))
    drawn = {
        name: random.normal(rng.named(name), param, dtype=torch.float64).to(param)
        for name, param in point["params"].items()
    }
    norm = tree.global_norm(drawn)
    along = {name: torch.ones_like(value) for name, value in point.get("hparams", {}).items()}
    return {"hparams": along, "params": {name: value / norm for name, value in drawn.items()}}


def _slopes(loss: Callable[[Point], Tensor], point: Point, grads: Point, direction: Point) -> tuple[float, float]:
    """Return the derivative along a direction, by the gradient and by the central difference."""
    pairs = ((grads[field][name], value) for field in direction for name, value in direction[field].items())
    by_grad = sum((grad * value).sum().detach().item() for grad, value in pairs)
    ahead, behind = (loss(_moved(point, direction, size)).detach().item() for size in (_EPS, -_EPS))
    return by_grad, (ahead - behind) / (2 * _EPS)


def _is_close(first: float, second: float) -> bool:
    return abs(first - second) <= _RELATIVE * max(abs(first), abs(second)) + _ABSOLUTE


def _is_smooth(loss_at: Callable[[float], float], value: float, gap: float) -> bool:
    """Return whether difference quotients are accurate enough to attribute a gap to the gradient.

    With a jump or kink near the point, a large third derivative, or rounding to float32 inside the function, the
    quotient changes with the step size. At a kink in the point itself, the one-sided quotients differ by an amount that
    does not shrink with it.
    """
    quotients, jumps = [], []
    for size in _SIZES:
        ahead, behind = loss_at(size), loss_at(-size)
        quotients.append((ahead - behind) / (2 * size))
        jumps.append(abs(ahead - 2 * value + behind) / size)
    if any(not abs(quotient - quotients[0]) <= 0.1 * gap for quotient in quotients):
        return False
    return not (jumps[0] > 0.1 * gap and jumps[1] > 0.8 * jumps[0])


def _halves(direction: Point) -> tuple[Point, Point]:
    """Return the direction in two parts, of every other element each."""

    def half(value: Tensor, start: int) -> Tensor:
        taken = torch.arange(value.numel(), device=value.device).reshape(value.shape) % 2 == start
        return torch.where(taken, value, 0)

    even, odd = (
        {field: {name: half(v, start) for name, v in leaves.items()} for field, leaves in direction.items()}
        for start in (0, 1)
    )
    return even, odd


def _moved(point: Point, direction: Point, size: float) -> Point:
    return {
        field: {
            name: value + size * direction[field][name] if name in direction[field] else value
            for name, value in point[field].items()
        }
        for field in point
    }


def _parts(direction: Point) -> Iterator[Point]:
    """Yield the direction restricted to one leaf at a time."""
    for field, leaves in direction.items():
        for name, value in leaves.items():
            yield {field: {name: value}, **{other: {} for other in direction if other != field}}


def as_path(path: str) -> str:
    """Return a key path in the form of state fields, `params['0.weight']` for `['params']['0.weight']`."""
    return "".join(path[2:].split("']", 1))


_WITHIN = frozenset(event for node in walk(loop_events) if isinstance(node, Grad) for event in events_in(node.body))


def _not_within(algorithm: Algorithm) -> str | None:
    if all(algorithm.predicate.at(event) == NEVER for event in _WITHIN):
        return never_acts(algorithm) or "it does not act within the gradient"
    if Trait.STOPS_GRADIENTS in algorithm.traits:
        return "it stops gradients on purpose (Trait.STOPS_GRADIENTS)"
    if Trait.SCALES_LOSS in algorithm.traits:
        return "it scales the loss until AFTER_BACKWARD, where this law does not let it act"
    return None


@define_law(
    "the step's gradient is that of the loss that it reports",
    "compute what is added to the loss with its graph: no torch.no_grad(), .detach() or .data on the way from params "
    "to the loss; what is only to be recorded belongs in metrics; a method that stops gradients on purpose (targets "
    "from its own outputs, straight-through estimates) declares Trait.STOPS_GRADIENTS",
    exempt=_not_within,
    unsuited=lambda task: "differences are lost in the rounding of half precision" if task.is_half else None,
    idle="it did not act within the gradient, refuses float64, or has a kink at the point",
)
@in_double
def loss_differentiated(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    """Compare the gradients of a step with finite differences of its loss, along a random direction.

    Both are computed within a step, by `state.gradient`, with the same batch, draws and slots. The algorithm does not
    act at AFTER_BACKWARD, where it may edit gradients.
    """
    judgements: list[bool] = []

    def look(state: State) -> State:
        if state.grads is not None and not is_transforming():
            params = {name: state.params[name] for name in state.context.trainable}
            grads = {name: state.grads.get(name, torch.zeros_like(param)) for name, param in params.items()}
            judgements.append(
                check_derivative(
                    lambda moved: state.gradient({**state.params, **moved["params"]})[1],
                    {"params": params},
                    {"params": grads},
                    seed=case.seed,
                    what="the derivative of the loss that the step reports",
                    by="by state.grads",
                )
            )
        return state

    watched = Watched(dataclasses.replace(subject.algorithm, match=subject.algorithm.predicate & ~on(_AFTER)))
    program = inserted(loop_events, lambda node: look if isinstance(node, Microbatches) else None)
    step = case.step(watched.algorithm, program=program, microbatches=min(case.microbatches, 2))
    step.fold(step.init(case.state(dtype=dtype)), case.batch(0, dtype))
    return any(judgements) and any(event in _WITHIN for event, _ in watched.applications)


_AFTER = Event.AFTER_BACKWARD


def _nothing_ignored(task: Task) -> str | None:
    state = task.make_state(0)
    targets = state.replace(batch=task.make_batch(0, 4)).targets
    is_index = isinstance(targets, Tensor) and not targets.is_floating_point()
    return None if is_index and bool((targets < 0).any()) else "its targets have no positions to ignore"


@define_law(
    "positions that the targets ignore have no part in the loss",
    "keep -100 where it is (torch.where(targets < 0, targets, new)); take means over positions with targets >= 0 only",
    exempt=never_acts,
    unsuited=_nothing_ignored,
    idle="it did not act where the outputs have the targets' positions",
)
@at_best_precision
def ignored_stay_ignored(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    """Take a step twice, the second time with other outputs at the positions that the targets ignore."""
    # Batches with several ignored positions, for methods that change only some of the targets.
    case, watched = dataclasses.replace(case, batch_size=max(16, case.batch_size)), Watched(subject.algorithm)
    given, has_moved = case.state(dtype=dtype).replace(batch=case.batch(0, dtype)), False

    def taken(amount: float) -> State:
        def move(state: State) -> State:
            """Change outputs at ignored positions, as long as the inputs are those of the batch."""
            nonlocal has_moved
            outputs, targets = state.outputs, given.targets
            if is_transforming() or not isinstance(outputs, Tensor) or not tree.equal(state.inputs, given.inputs):
                return state
            if outputs.shape[:1] + outputs.shape[2:] != targets.shape:
                return state
            has_moved = True
            pattern = torch.linspace(-1, 1, outputs.shape[1]).to(outputs)
            moves = pattern.reshape(-1, *[1] * (outputs.ndim - 2)) * (targets < 0).unsqueeze(1)
            return state.replace(outputs=outputs + amount * moves)

        program = inserted(loop_events, lambda node: move if node is forward else None)
        step = case.step(watched.algorithm, program=program, microbatches=1)
        return step.fold(step.init(case.state(dtype=dtype)), case.batch(0, dtype))

    labels = ("with the outputs as they are", "with others at ignored positions")
    compare_rounded(taken(0.0), taken(1.0), labels, ["loss"])
    return has_moved and watched.acted


@define_law(
    "targets may be a Mixture, as they are when MixUp or CutMix is also active",
    "read targets by losses.Mixture.of(state.targets), which has targets and weights, and change them by its method "
    "map(fn), which keeps the weights; a method that cannot take mixed targets raises a TypeError that says so",
    exempt=never_acts,
    unsuited=lambda task: None if task.kind in ("vectors", "images") else "it is about single targets per example",
    idle="it refuses mixed targets, or never acted beside them",
    most_cases=6,
)
def mixtures_taken(subject: Subject, case: Case) -> bool:
    """Take steps together with a method that mixes targets, if the plain step with mixed targets works."""
    watched = Watched(subject.algorithm)
    for algorithms in ((), (watched.algorithm,)):
        program = inserted(loop_events, lambda node: _check_sum if node is forward else None)
        step = case.step(*algorithms, program=program)
        try:
            _take_steps(step.replace(algorithms=[*step.algorithms, _mixer()]), case)  # the last acts first
        except Broken:
            raise
        except Exception as error:
            if not algorithms or is_refusal(error):
                return False
            _take_steps(step, case)  # an error that it raises without mixed targets too is not about them
            raise Broken(
                f"beside a method that mixes targets it raises {first_line(error)}", event=getattr(error, "event", None)
            ) from error
    return watched.acted


def _check_sum(state: State) -> State:
    """Raise `Broken` if the weights of mixed targets do not sum to 1, as after a map over all its tensors."""
    if isinstance(state.targets, Mixture) and not is_transforming():
        total = torch.stack(state.targets.weights).sum(0)
        if not torch.allclose(total, torch.ones_like(total), atol=1e-3):
            raise Broken(f"the weights of mixed targets do not sum to 1: {total.tolist()}")
    return state


def _take_steps(step: Step, case: Case) -> None:
    state = step.init(case.state())
    for batch in case.batches():
        state = step(state, batch)


def _mixer() -> Algorithm:
    """Return an algorithm that mixes each target with its neighbour's."""

    def apply(event: Event, state: State) -> State:
        del event
        order = torch.arange(state.num_examples, device=state.device).roll(1)
        share = torch.full((), 0.7, device=state.device)
        return state.replace(targets=Mixture.of(state.targets).mixed_with(order, share, False))

    return Algorithm(f"{COMPANY}mixer", on(Event.AFTER_DATALOADER), apply)


@define_law(
    "the gradient through whole steps is finite and equals finite differences",
    "leave the graph whole: no .detach(), .data, .item() or torch.no_grad() on the way from params and hparams to "
    "what lasts; under a root or a norm, keep away from 0 (torch.where before it, or a small constant in it); what "
    "the step's own gradient must not see, compute before the gradient, at AFTER_DATALOADER",
    exempt=lambda algorithm: (
        never_acts(algorithm)
        or ("a host algorithm reads values, through which no gradient flows" if algorithm.host else None)
        or (
            "it stops gradients on purpose (Trait.STOPS_GRADIENTS)"
            if Trait.STOPS_GRADIENTS in algorithm.traits
            else None
        )
    ),
    unsuited=lambda task: "differences are lost in the rounding of half precision" if task.is_half else None,
    idle="it never acted, refuses float64, or has a jump or kink at the point",
)
@in_double
def gradient_exact(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    """Differentiate the loss after two steps by "lr", the method's own hparams and the initial params.

    The derivatives are taken along a random direction.

    Nothing is judged if the loss has a jump or a kink within the difference, or is not finite; nor if the algorithm
    does not accept float64, the only dtype in which differences are precise enough. BatchNorm's running statistics
    carry no gradient from step to step, so a fault that only they cause does not count.
    """
    try:
        return _judge_derivative(subject, case, dtype)
    except Broken:
        if not case.task.has_buffers:
            raise
        return _judge_derivative(subject, with_frozen_statistics(case), dtype)


def _judge_derivative(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    if case.lr == 0:
        # With a learning rate of 0, zeros remain zeros, at which a guard (torch.where) has a different derivative.
        case = dataclasses.replace(case, lr=_SMALL_LR)
    # Two slices are enough, and the gradient of each takes time.
    watched = Watched(subject.algorithm)
    step = case.step(watched.algorithm, microbatches=min(case.microbatches, 2))
    start = step.init(case.state(dtype=dtype))
    data = [case.batch(i, dtype) for i in range(2)]

    def loss(point: Point) -> Tensor:
        state = start.replace(hparams={**start.hparams, **point["hparams"]}, params={**start.params, **point["params"]})
        for batch in data:
            state = step(state, batch)
        # In training mode, which does not read running statistics, because torch has no gradient for them.
        end = loop.loss(loop.forward(state.replace(batch=data[0]))).loss
        assert end is not None
        return end

    point = _point(start, {"lr", *(hparam.name for hparam in subject.algorithm.hparams)})
    value = loss(point)
    if not watched.acted or not value.isfinite():
        return False
    grads = attempted("raised only where a gradient is taken through the step", lambda: torch.func.grad(loss)(point))
    for path, leaf in tree.leaves_with_paths(grads).items():
        if not leaf.isfinite().all():
            bad = leaf[~leaf.isfinite()][0].item()
            raise Broken(tree.Difference(as_path(path), f"the gradient is not finite: {bad}"))
    return check_derivative(
        loss,
        point,
        grads,
        seed=case.seed,
        what="the derivative of the loss after 2 steps",
        by="by torch.func.grad",
        value=value,
    )


_SMALL_LR = 0.01


def _point(state: State, names: set[str]) -> Point:
    """Return the inputs of the derivative: the floating params, and these hparams."""
    hparams = {key: value.to(torch.float64) for key, value in state.hparams.items() if key in names}
    return {"hparams": hparams, "params": {key: p for key, p in state.params.items() if p.is_floating_point()}}
