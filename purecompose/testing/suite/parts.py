"""Laws of parts: a batch in slices, or divided among processes, has the result of the whole, within rounding.

See `judging`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from purecompose import batch as batches, losses, tree
from purecompose._support import shards
from purecompose.core.algorithm import Trait
from purecompose.core.compose import Step
from purecompose.core.means import has_mean
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import Broken, NotJudged, define_law, never_acts
from purecompose.testing.outer import begun, closed, opened
from purecompose.testing.ranks import played
from purecompose.testing.record import Watched, compare
from purecompose.testing.simulated import simulated
from purecompose.testing.subject import Subject
from purecompose.testing.suite.judging import (
    attempted,
    compare_rounded,
    is_on_the_edge,
    judged,
    with_frozen_statistics,
)
from purecompose.time.event import Event
from purecompose.transforms.data_parallel import data_parallel
from purecompose.transforms.sharding.placing import shard
from purecompose.transforms.sharding.step import check_needs_no_parts, fully_sharded


@define_law(
    "a batch cut into microbatches gives the gradients, loss and new state that it gives whole, within rounding",
    "between BEFORE_FORWARD and AFTER_BACKWARD the batch is a slice: draw from state.example_rng(name), add to the "
    "loss only means over examples; statistics of the batch belong to AFTER_DATALOADER, clipping and counting to "
    "AFTER_TRAIN_BATCH",
    exempt=never_acts,
)
def microbatches_agree(subject: Subject, case: Case) -> bool:
    """Take one step with each batch, whole and in slices: the case's number of microbatches, at least two.

    This compares gradients, loss, params, opt_state, hparams, the algorithm's slot, and metrics that are single
    numbers. Metrics are left out if the weights of slices are not proportional to their examples (the loss ignores some
    positions), because a mean over all positions then has another weight. BatchNorm, which mixes the examples of a
    slice, uses its running statistics. The comparison ends if rounding alone changes a choice in the step itself.
    """
    return judged(_judge_microbatches, subject, case)


def _judge_microbatches(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    case = with_frozen_statistics(case)
    num = max(case.microbatches, 2)
    watched = Watched(subject.algorithm)
    whole = case.step(watched.algorithm, microbatches=1)
    sliced = case.step(subject.algorithm, microbatches=num)
    state = whole.init(case.state(dtype=dtype))
    labels = ("with 1 microbatch", f"with {num} microbatches")
    for batch in case.batches(dtype):
        expected = whole.fold(state, batch)
        found = attempted(f"raised only with {num} microbatches", lambda s=state, b=batch: sliced.fold(s, b))
        edge = functools.partial(is_on_the_edge, whole, state, batch, whole.finish(expected))
        if not _are_near(subject, expected, found, num, labels, edge):
            return watched.acted
        state = whole.finish(expected)
    return watched.acted


@define_law(
    "several processes that share each batch, as under data_parallel, all get the state that one process gets, within "
    "rounding",
    "between BEFORE_FORWARD and AFTER_BACKWARD a process sees its own part of the batch: remember sums, counts and "
    "flags there, to which each part adds, and leave outputs alone afterwards, when they are those of one part",
    exempt=never_acts,
)
def ranks_agree(subject: Subject, case: Case) -> bool:
    """Take one step with each batch in one process and in two or three, simulated one after the other.

    The processes are compared with each other, bit for bit, and the first of them with the single process, as in
    `microbatches_agree`.
    """
    return judged(_judge_ranks, subject, case)


def _judge_ranks(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    case = with_frozen_statistics(case)
    size = 2 + case.seed % 2
    watched = Watched(subject.algorithm)
    whole, play = case.step(watched.algorithm, microbatches=1), played(case.step(subject.algorithm), size)
    state = whole.init(case.state(dtype=dtype))
    for batch in case.batches(dtype):
        expected = whole.fold(state, batch)
        act = functools.partial(play, lambda step, s=state, b=batch: step.fold(s, b))
        found = attempted(f"raised only with {size} processes", act)
        edge = functools.partial(is_on_the_edge, whole, state, batch, whole.finish(expected))
        if not _do_ranks_agree(subject, expected, found, edge):
            return watched.acted
        state = whole.finish(expected)
    return watched.acted


@define_law(
    "several processes that divide the parameters, as under fully_sharded, or only the batch all get the states that "
    "one process gets, within rounding",
    "a process holds some rows of each parameter and gradient: compute with them as they are, DTensors, not with "
    "to_local(); take norms over several by tree.global_norm; remember tensors of their shapes in a mapping by the "
    "parameters' names",
    exempt=never_acts,
    most_cases=10,
)
def shards_agree(subject: Subject, case: Case) -> bool:
    """Train on each batch in one process and in two or four, with the events between steps.

    The processes are simulated by threads. By the case's seed, they divide the parameters, and gather them for a step
    or layer by layer, or only the batch. After each batch they are compared as in `ranks_agree`. BatchNorm uses the
    statistics of the whole batch, unless microbatches cut it, or the algorithm replaces layers, perhaps by some that
    use parts of the batch on purpose.

    Nothing is judged if `fully_sharded` refuses the algorithm, or the installed torch cannot simulate processes.
    """
    return judged(_judge_shards, subject, case)


def _judge_shards(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    # Companions come last: if surgery replaces parameters of which they remember something, that is not divided.
    case = dataclasses.replace(case, place=0)
    if case.microbatches > 1 or Trait.REPLACES_LAYERS in subject.algorithm.traits:
        case = with_frozen_statistics(case)
    watched = Watched(subject.algorithm)
    whole = case.step(watched.algorithm, microbatches=1)
    # In half precision rounding errors would add up from step to step.
    data = case.batches(dtype)[: 1 if case.task.is_half else None]
    steps = list(_steps(whole, begun(whole, case.state(dtype=dtype)), data))
    if not watched.acted and subject.algorithm.events != (Event.INIT,):
        return False
    size, gather = _DIVISIONS[case.seed % len(_DIVISIONS)]
    by = " by data_parallel" if gather is None else f" by fully_sharded, gather={gather!r}"
    train = functools.partial(_trained_apart, subject, case, dtype, gather, len(data))
    found = attempted(f"raised only with {size} processes{by}", lambda: simulated(size, train))
    for batch, (before, end, expected), *ends in zip(data, steps, *found, strict=True):
        edge = functools.partial(is_on_the_edge, whole, before, batch, whole.finish(end))
        if not _do_ranks_agree(subject, expected, ends, edge, by):
            break
    return watched.acted


def _steps(step: Step, state: State, data: Sequence[Any]) -> Iterator[tuple[State, State, State]]:
    """Train, and yield the states at the beginning and end of each step, and the latter after the events that follow.

    The last of these states has the gradients, batch and outputs of the step.
    """
    for batch in data:
        before = opened(step, state)
        end = step.fold(before, batch)
        state = closed(step, before, step.finish(end))
        yield before, end, state.replace(grads=end.grads, batch=end.batch, outputs=end.outputs)


_DIVISIONS: tuple[tuple[int, Any], ...] = ((2, "step"), (4, "layer"), (4, "step"), (2, "layer"), (4, None))
"""Numbers of processes, and how they gather parameters; `None` if they divide only the batch."""


def _trained_apart(
    subject: Subject, case: Case, dtype: torch.dtype, gather: Any, num_batches: int, mesh: Any
) -> list[State]:
    """Return the states at the end of each step in one of several processes, put together."""
    step = case.step(subject.made_anew())
    state = begun(step, case.state(dtype=dtype))
    if gather is None:
        step = data_parallel(step, mesh)
    else:
        step, state = _sharded(step, mesh, gather), shard(state, mesh)
    data = case.batches(dtype)[:num_batches]
    return [
        end.replace(**{name: tree.map(shards.whole, getattr(end, name)) for name in _SHARED})
        for _, _, end in _steps(step, state, data)
    ]


def _sharded(step: Step, mesh: Any, gather: Any) -> Step:
    if gather == "layer":
        try:
            check_needs_no_parts(step)
        except ValueError as refusal:
            raise NotJudged(str(refusal)) from refusal
    return fully_sharded(step, mesh, gather)


# What the laws share


_COMPARED = ("grads", "loss", "params", "opt_state", "slots", "hparams", "metrics")
_SHARED = (*_COMPARED, "buffers", "key")
"""What all processes have alike."""


def _do_ranks_agree(
    subject: Subject, expected: State, found: Sequence[State], edge: Callable[[], bool], by: str = ""
) -> bool:
    """Return `_are_near` for the state of one process and those of several, which must be equal bit for bit."""
    first, *others = [_without_own_metrics(one) for one in found]
    for rank, other in enumerate(others, 1):
        compare(first, other, ("in process 0", f"in process {rank}"), fields=_SHARED)
    labels = ("with 1 process", f"with {len(found)} processes{by}")
    return _are_near(subject, expected, found[0], len(found), labels, edge)


def _are_near(
    subject: Subject, expected: State, found: State, num: int, labels: tuple[str, str], edge: Callable[[], bool]
) -> bool:
    """Return whether states agree; False if rounding alone explains why they do not, and otherwise raise `Broken`.

    Args:
        subject: The algorithm.
        expected: The state at the end of the whole step.
        found: The state at the end of the step in parts.
        num: Number of parts.
        labels: Descriptions of the two.
        edge: Function that returns whether rounding alone changes a choice in the whole step.
    """
    measures = Trait.MEASURES_MICROBATCHES in subject.algorithm.traits
    own = "" if measures else subject.name
    with_metrics = not measures and _weighs_examples(expected, num)
    first, second = (_comparable(state, own, with_metrics) for state in (expected, found))
    try:
        compare_rounded(first, second, labels, _COMPARED)
    except Broken:
        if edge():
            return False
        raise
    return True


def _comparable(state: State, name: str, with_metrics: bool) -> State:
    """Return the state with everything that must agree whole and in slices, for one algorithm."""
    # Companions may count slices in their slots. Metrics that have no mean are those of the last slice.
    slots = {key: slot for key, slot in state.slots.items() if key == name}
    state = _without_own_metrics(state) if with_metrics else state.replace(metrics={})
    return state.replace(slots=slots)


def _without_own_metrics(state: State) -> State:
    return state.replace(metrics={key: metric for key, metric in state.metrics.items() if has_mean(metric)})


def _num_terms(state: State, outputs: Any, targets: Any) -> float:
    return float(state.call_loss(lambda loss: losses.num_terms(loss, outputs, targets), train=True)[0])


def _weighs_examples(whole: State, num: int) -> bool:
    """Return whether the weights of slices are proportional to their examples, at the end of the whole step."""
    loss_fn = whole.context.loss
    given = whole.batch if isinstance(loss_fn, losses.ModelLoss) else whole.targets
    try:
        parts = batches.split((whole.outputs, given), min(num, whole.num_examples))
        counts = [(_num_terms(whole, *part), batches.num_examples(part)) for part in parts]
    except (TypeError, ValueError):  # the loss was computed for other examples than those in the final batch
        return False
    terms, examples = (sum(count) for count in zip(*counts, strict=True))
    return all(own_terms * examples == own_examples * terms for own_terms, own_examples in counts)
