"""The laws, grouped by topic."""

from purecompose.testing.law import Law
from purecompose.testing.suite.absence import (
    absent_when_unmatched,
    draws_independent,
    list_position_free,
    neutral_setting,
)
from purecompose.testing.suite.compiled import compiled_agrees
from purecompose.testing.suite.contract import buffers_kept, frozen_kept, init_once, own_slot, structure_kept
from purecompose.testing.suite.draws import draws_keyed
from purecompose.testing.suite.evaluation import evaluation_blind, pairs_undone
from purecompose.testing.suite.fitting import fit_repeats, memory_bounded
from purecompose.testing.suite.gradients import gradients_taken
from purecompose.testing.suite.loss import ignored_stay_ignored, loss_differentiated, mixtures_taken
from purecompose.testing.suite.matching import match_pure, time_from_clock
from purecompose.testing.suite.numbers import gradient_exact, stays_finite, vmap_agrees
from purecompose.testing.suite.parts import microbatches_agree, ranks_agree, shards_agree
from purecompose.testing.suite.purity import deterministic, global_state_kept, input_untouched
from purecompose.testing.suite.resume import resume_exact


__all__ = [
    "LAWS",
    "absent_when_unmatched",
    "buffers_kept",
    "compiled_agrees",
    "deterministic",
    "draws_independent",
    "draws_keyed",
    "evaluation_blind",
    "fit_repeats",
    "frozen_kept",
    "global_state_kept",
    "gradient_exact",
    "gradients_taken",
    "ignored_stay_ignored",
    "init_once",
    "input_untouched",
    "list_position_free",
    "loss_differentiated",
    "match_pure",
    "memory_bounded",
    "microbatches_agree",
    "mixtures_taken",
    "neutral_setting",
    "own_slot",
    "pairs_undone",
    "ranks_agree",
    "resume_exact",
    "shards_agree",
    "stays_finite",
    "structure_kept",
    "time_from_clock",
    "vmap_agrees",
]

LAWS: tuple[Law, ...] = (
    input_untouched,
    deterministic,
    global_state_kept,
    match_pure,
    time_from_clock,
    structure_kept,
    own_slot,
    buffers_kept,
    frozen_kept,
    init_once,
    absent_when_unmatched,
    neutral_setting,
    draws_keyed,
    draws_independent,
    list_position_free,
    pairs_undone,
    evaluation_blind,
    mixtures_taken,
    loss_differentiated,
    ignored_stay_ignored,
    gradients_taken,
    stays_finite,
    microbatches_agree,
    ranks_agree,
    shards_agree,
    vmap_agrees,
    gradient_exact,
    compiled_agrees,
    fit_repeats,
    memory_bounded,
    resume_exact,
)
"""All laws, in the order in which reports list them."""
