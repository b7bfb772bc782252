"""The law of compiled steps: a flat graph that is traced once does what the step does each time."""

import dataclasses

import torch

from purecompose.core.algorithm import Algorithm
from purecompose.testing.case import COMPANY, Case
from purecompose.testing.law import Broken, define_law, never_acts
from purecompose.testing.record import LASTING, Watched
from purecompose.testing.subject import Subject
from purecompose.testing.suite.judging import attempted, compare_rounded, is_on_the_edge, judged
from purecompose.time.event import Event
from purecompose.time.predicates import every, on
from purecompose.transforms.compilation import compile as compile_step


__all__ = ["compiled_agrees"]

_LABELS = ("as composed", "compiled")
_DRAWING = ("bystander", "noise")
"""Companions that make graphs up to ten times as long by their draws, at which other laws look."""


@define_law(
    "a compiled step does what the step does, with the same draws, within rounding",
    "apply runs once, on tensors without numbers, and its graph serves all steps: choose with torch.where, not if; no "
    "float(), .item(), .numpy() or x[mask]; what changes from step to step comes from the state: time from "
    "state.clock, memory from state.slots[name], settings from hparams; keep no tensor in a closure, a cache or a "
    "global, not even from one event to the next, and do not ask with `is`; or declare host=True",
    exempt=never_acts,
    most_cases=12,
)
def compiled_agrees(subject: Subject, case: Case) -> bool:
    """Take the case's steps and two more as composed, and the same in traced graphs.

    The graphs run as they were traced (`compile(backend="eager")`), so that nothing is judged but the tracing. The
    case's seed decides whether steps are donated, and whether those without microbatches are one graph, as most steps
    are, or cut into parts with variants, for which a companion acts in every third step. The algorithm is made again
    for the compiled run, if it has a source text: what earlier runs left in its closures is not there.

    Integers agree exactly. Where only rounding tips a choice in the step itself, the comparison ends. Host algorithms
    run between the graphs.
    """
    return judged(_judge_compiled, subject, case)


def _judge_compiled(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    case = dataclasses.replace(case, others=tuple(name for name in case.others if name not in _DRAWING))
    # Slices divide a step as well: what is before and after them is compiled apart.
    is_divided = case.microbatches == 1 and case.seed % 4 < 2
    watched, turns = Watched(subject.algorithm), [_turns()] if is_divided else []
    composed = case.step(watched.algorithm, *turns)
    compiled = compile_step(
        case.step(subject.made_anew(), *turns), donate=case.seed % 2 == 0, backend="eager", quiet=True
    )
    state, twin = (step.init(case.state(dtype=dtype)) for step in (composed, compiled))
    for index in range(case.num_batches + 2):
        if state.timestamp.is_finished():
            break
        batch, had_acted = case.batch(index, dtype), watched.acted
        expected = composed(state, batch)
        found = attempted("raised only where the step is compiled", lambda s=twin, b=batch: compiled(s, b))
        try:
            compare_rounded(expected, found, _LABELS, LASTING)
        except Broken:
            if is_on_the_edge(composed, state, batch, expected):
                return had_acted
            raise
        state, twin = expected, found
    return watched.acted


def _turns() -> Algorithm:
    """Cut the step before and after AFTER_TRAIN_BATCH, and make two variants of what follows.

    The cut needs something that may vary on both sides. Before it nothing does in fact (the turn comes after 2**40
    batches), since the part with the network's gradient is the one that takes time to trace. Variants by turns of two
    would be right for an algorithm that counts its calls to act by turns of two.
    """
    match = on(Event.AFTER_TRAIN_BATCH, Event.BATCH_END) & every(3) | on(Event.BATCH_START) & every(2**40)
    return Algorithm(f"{COMPANY}turns", match, lambda event, state: state)
