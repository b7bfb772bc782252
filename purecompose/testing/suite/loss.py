"""Laws of the loss: its gradient is that of the reported loss, ignored positions have no part, mixtures are allowed."""

import dataclasses

import torch
from torch import Tensor

from purecompose import tree
from purecompose._support.functorch import is_transforming
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.compose import Step
from purecompose.core.loop import forward, loop_events
from purecompose.core.operation import Node, walk
from purecompose.core.program import StateFn, events_in
from purecompose.core.scopes import Grad, Microbatches
from purecompose.core.state import State
from purecompose.losses.targets import Mixture
from purecompose.testing.case import COMPANY, Case
from purecompose.testing.faults import first_line, is_refusal
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.record import Watched, inserted
from purecompose.testing.subject import Subject
from purecompose.testing.suite.derivative import check_derivative
from purecompose.testing.suite.judging import compare_rounded, judged, judged_in_double
from purecompose.testing.tasks import Task
from purecompose.time.event import Event
from purecompose.time.predicates import NEVER, on


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
    is_about_option=True,
    idle="it did not act within the gradient, refuses float64, or has a kink at the point",
)
def loss_differentiated(subject: Subject, case: Case) -> bool:
    """Compare the gradients of a step with finite differences of its loss, along a random direction.

    Both are computed within a step, by `state.gradient`, with the same batch, draws and slots. The algorithm does not
    act at AFTER_BACKWARD, where it may edit gradients.
    """
    return judged_in_double(_judge_loss, subject, case)


def _judge_loss(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
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
    is_about_option=True,
    idle="it did not act where the outputs have the targets' positions",
)
def ignored_stay_ignored(subject: Subject, case: Case) -> bool:
    """Take a step twice, the second time with other outputs at the positions that the targets ignore."""
    return judged(_judge_ignored, subject, case)


def _judge_ignored(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    # Batches with several ignored positions, for methods that change only some of the targets.
    ends, was_moved, case = [], False, dataclasses.replace(case, batch_size=max(16, case.batch_size))
    for amount in (0.0, 1.0):
        moving = _Moving(case, dtype, amount)
        watched = Watched(subject.algorithm)
        step = case.step(watched.algorithm, program=moving.program, microbatches=1)
        ends.append(step.fold(step.init(case.state(dtype=dtype)), case.batch(0, dtype)))
        was_moved = moving.has_moved and watched.acted
    labels = ("with the outputs as they are", "with others at ignored positions")
    compare_rounded(ends[0], ends[1], labels, ["loss"])
    return was_moved


class _Moving:
    """A program that changes outputs at ignored positions, as long as the inputs are those of the batch."""

    def __init__(self, case: Case, dtype: torch.dtype, amount: float) -> None:
        self.given = case.state(dtype=dtype).replace(batch=case.batch(0, dtype))
        self.amount, self.has_moved = amount, False
        self.program = inserted(loop_events, self._after)

    def _after(self, node: Node) -> StateFn | None:
        return self._move if node is forward else None

    def _move(self, state: State) -> State:
        outputs, targets = state.outputs, self.given.targets
        if is_transforming() or not isinstance(outputs, Tensor) or not tree.equal(state.inputs, self.given.inputs):
            return state
        if outputs.shape[:1] + outputs.shape[2:] != targets.shape:
            return state
        self.has_moved = True
        pattern = torch.linspace(-1, 1, outputs.shape[1]).to(outputs)
        moves = pattern.reshape(-1, *[1] * (outputs.ndim - 2)) * (targets < 0).unsqueeze(1)
        return state.replace(outputs=outputs + self.amount * moves)


@define_law(
    "targets may be a Mixture, as they are beside MixUp and CutMix",
    "read targets by losses.Mixture.of(state.targets), which has targets and weights, and change them by its method "
    "map(fn), which keeps the weights; a method that cannot take mixed targets raises a TypeError that says so",
    exempt=never_acts,
    unsuited=lambda task: None if task.kind in ("vectors", "images") else "it is about single targets per example",
    is_about_option=True,
    idle="it refuses mixed targets, or never acted beside them",
    most_cases=6,
)
def mixtures_taken(subject: Subject, case: Case) -> bool:
    """Take steps together with a method that mixes targets, if the plain step with mixed targets works."""
    watched = Watched(subject.algorithm)
    for algorithms in ((), (watched.algorithm,)):
        step = case.step(*algorithms, program=inserted(loop_events, _sum_after))
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


def _sum_after(node: Node) -> StateFn | None:
    return _check_sum if node is forward else None


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
