"""The law of compiled steps: a flat graph that is traced once does the same as the step each time."""

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


_LABELS = ("as composed", "compiled")
_DRAWING = ("bystander", "noise")
"""Companions whose draws make graphs up to ten times as long; draws are the topic of other laws."""


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
    """Take the case's steps and two more as composed, and the same steps in traced graphs.

    The graphs run as they were traced (`compile(backend="eager")`), so that only the tracing is judged. The case's seed
    decides whether steps are donated, and whether those without microbatches are one graph, like most steps, or are cut
    into parts with variants, for which a companion acts in every third step. If the algorithm has a source text, it is
    created again for the compiled run, without state that earlier runs left in its closures.

    Integers must agree exactly. If rounding alone changes a discrete choice in the step itself, the comparison ends.
    Host algorithms run between the graphs.
    """
    return judged(_judge_compiled, subject, case)


def _judge_compiled(subject: Subject, case: Case, dtype: torch.dtype) -> bool:
    case = dataclasses.replace(case, others=tuple(name for name in case.others if name not in _DRAWING))
    # Microbatches divide a step as well: the parts before and after them are compiled separately.
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
    """Return an algorithm that cuts the step before and after AFTER_TRAIN_BATCH, with two variants of the last part.

    The cut needs something that may vary on both sides. Before it nothing ever does (the turn comes after 2**40
    batches), since the part with the network's gradient takes long to trace. Variants alternate in threes, because an
    algorithm that wrongly counts its calls, to act in every second step, would agree with variants in twos.
    """
    match = on(Event.AFTER_TRAIN_BATCH, Event.BATCH_END) & every(3) | on(Event.BATCH_START) & every(2**40)
    return Algorithm(f"{COMPANY}turns", match, lambda event, state: state)
