"""The laws, grouped by topic."""

from purecompose.testing.law import Law
from purecompose.testing.suite.absence import (
    absent_when_unmatched,
    draws_independent,
    draws_keyed,
    list_position_free,
    neutral_setting,
)
from purecompose.testing.suite.agreement import (
    compiled_agrees,
    microbatches_agree,
    ranks_agree,
    shards_agree,
    stays_finite,
    vmap_agrees,
)
from purecompose.testing.suite.contract import (
    buffers_kept,
    frozen_kept,
    gradients_taken,
    init_once,
    own_slot,
    structure_kept,
)
from purecompose.testing.suite.loss import gradient_exact, ignored_stay_ignored, loss_differentiated, mixtures_taken
from purecompose.testing.suite.purity import (
    deterministic,
    global_state_kept,
    input_untouched,
    match_pure,
    time_from_clock,
)
from purecompose.testing.suite.runs import evaluation_blind, fit_repeats, memory_bounded, pairs_undone, resume_exact


__all__ = [
    "LAWS",
    "input_untouched",
    "deterministic",
    "global_state_kept",
    "match_pure",
    "time_from_clock",
    "structure_kept",
    "own_slot",
    "buffers_kept",
    "frozen_kept",
    "init_once",
    "absent_when_unmatched",
    "neutral_setting",
    "draws_keyed",
    "draws_independent",
    "list_position_free",
    "pairs_undone",
    "evaluation_blind",
    "mixtures_taken",
    "loss_differentiated",
    "ignored_stay_ignored",
    "gradients_taken",
    "stays_finite",
    "microbatches_agree",
    "ranks_agree",
    "shards_agree",
    "vmap_agrees",
    "gradient_exact",
    "compiled_agrees",
    "fit_repeats",
    "memory_bounded",
    "resume_exact",
]

LAWS: tuple[Law, ...] = tuple(globals()[name] for name in __all__[1:])
"""All laws, in the order in which reports list them."""
