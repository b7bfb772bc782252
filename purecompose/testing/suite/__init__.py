"""The laws, grouped by topic."""

from purecompose._support import publish
from purecompose.testing.law import Law
from purecompose.testing.suite.absence import (
    absent_when_unmatched as absent_when_unmatched,
    chosen_or_absent as chosen_or_absent,
    draws_keyed as draws_keyed,
    list_position_free as list_position_free,
    neutral_setting as neutral_setting,
)
from purecompose.testing.suite.agreement import (
    compiled_agrees as compiled_agrees,
    microbatches_agree as microbatches_agree,
    ranks_agree as ranks_agree,
    shards_agree as shards_agree,
    stays_finite as stays_finite,
    vmap_agrees as vmap_agrees,
)
from purecompose.testing.suite.contract import (
    gradients_taken as gradients_taken,
    init_once as init_once,
    own_slot as own_slot,
    structure_kept as structure_kept,
)
from purecompose.testing.suite.loss import (
    gradient_exact as gradient_exact,
    ignored_stay_ignored as ignored_stay_ignored,
    loss_differentiated as loss_differentiated,
    mixtures_taken as mixtures_taken,
)
from purecompose.testing.suite.purity import (
    deterministic as deterministic,
    global_state_kept as global_state_kept,
    input_untouched as input_untouched,
    match_pure as match_pure,
)
from purecompose.testing.suite.runs import (
    evaluation_blind as evaluation_blind,
    fit_repeats as fit_repeats,
    pairs_undone as pairs_undone,
    resume_exact as resume_exact,
)


publish(__name__)


LAWS: tuple[Law, ...] = (
    input_untouched,
    deterministic,
    global_state_kept,
    match_pure,
    structure_kept,
    own_slot,
    init_once,
    absent_when_unmatched,
    neutral_setting,
    chosen_or_absent,
    draws_keyed,
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
    resume_exact,
)
"""All laws, in the order in which reports list them."""
