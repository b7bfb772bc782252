"""Every mutant is detected by its law, at the place of the mistake; and every law has mutants that break it."""

import pytest

from purecompose import Event
from purecompose.core.algorithm import Algorithm
from purecompose.testing import LAWS, LawViolation, check
from purecompose.testing.case import Case
from tests.testing.mutants import MUTANTS
from tests.testing.mutants.mutant import mutant
from tests.testing.wrong_methods import WRONG


LAW = {law.name: law for law in LAWS}
WEIGHT, GRAD, INPUTS = "params['0.weight']", "grads['0.weight']", "batch[0]"
PLACES = {
    (Event.INIT, WEIGHT): "rescales_at_init makes_room_at_init hooks_at_init",
    (Event.INIT, "params['norm.inner.weight']"): "wraps_norms_again",
    (Event.INIT, "hparams['lr']"): "warms_up_at_init",
    (Event.INIT, "key"): "splits_the_key_at_init",
    (Event.INIT, "slots['steps']"): "shares_a_slot",
    (Event.INIT, "slots['average']['0.weight']"): "fixed_slot_name",
    (Event.INIT, "slots['counts_inits']"): "counts_inits",
    (Event.INIT, "slots['slot_by_position']"): "slot_by_position",
    (Event.INIT, "the process's random generator"): "seeds_python_in_apply",
    (Event.INIT, "slots['inference_slot']['0.weight']"): "inference_slot",
    (Event.EPOCH_START, "key"): "splits_the_key_each_epoch",
    (Event.AFTER_DATALOADER, ""): "torch_noise constant_key weights_in_a_cache inputs_in_a_global",
    (Event.AFTER_DATALOADER, INPUTS): "noise_into_batch numpy_mixing caches_statistics mixes_with_last_batch",
    (Event.AFTER_DATALOADER, WEIGHT): (
        "rounds_when_neutral permutes_when_neutral normalises_by_the_first_batch salts_by_hash seeds_by_process "
        "seeds_by_clock"
    ),
    (Event.AFTER_DATALOADER, "key"): "splits_key",
    (Event.AFTER_DATALOADER, "buffers['1.running_mean']"): "second_forward",
    (Event.AFTER_DATALOADER, "slots['remembers_batch_view']"): "remembers_batch_view",
    (Event.BATCH_START, "match"): "acts_once",
    (Event.BATCH_START, WEIGHT): "time_by_match reads_the_first_slot",
    (Event.BATCH_START, "context.frozen"): "freezes_by_context",
    (Event.BATCH_START, "hparams['lr']"): "halves_learning_rate",
    (Event.BATCH_START, "key"): "splits_the_key",
    (Event.BEFORE_TRAIN_BATCH, ""): "looks_up_by_batch",
    (Event.BEFORE_TRAIN_BATCH, "clock"): "looks_ahead",
    (Event.BEFORE_FORWARD, "first_example"): "renumbers_examples",
    (Event.BEFORE_FORWARD, GRAD): "noise_drawn_per_slice inputs_centred_by_slice",
    (Event.BEFORE_FORWARD, "the process's grad mode"): "switches_grad_off",
    (Event.AFTER_FORWARD, INPUTS): "keeps_noisy_inputs restores_in_double",
    (Event.AFTER_FORWARD, WEIGHT): "subtracts_weight_noise",
    (Event.AFTER_LOSS, ""): "branch_on_the_loss",
    (Event.AFTER_LOSS, "batch[1]"): "restores_by_argmax",
    (Event.AFTER_LOSS, "grads['position']"): "decay_times_examples",
    (Event.AFTER_BACKWARD, GRAD): "gradients_clipped_by_slice replaces_one_gradient",
    (Event.AFTER_BACKWARD, "slots['slices_counted_as_batches']"): "slices_counted_as_batches",
    (Event.AFTER_BACKWARD, "slots['mean_kept_as_a_mean'][0]"): "mean_kept_as_a_mean",
    (Event.AFTER_TRAIN_BATCH, ""): (
        "matches_by_loss reads_timestamp loss_read_as_number large_gradients_by_mask ignores_batch_number "
        "fades_by_a_number average_of_whole_tensors"
    ),
    (Event.AFTER_TRAIN_BATCH, "buffers['1.running_mean']"): "resets_statistics statistics_in_place",
    (Event.AFTER_TRAIN_BATCH, GRAD): (
        "flips_gradients_in_place warms_up_by_match gradients_of_its_own_losses norm_of_its_own_rows"
    ),
    (Event.AFTER_TRAIN_BATCH, "hparams['lr']"): "norm_detached",
    (Event.AFTER_TRAIN_BATCH, WEIGHT): (
        "replaces_entry stashes_on_tensor opens_the_seal decays_frozen averages_metrics value_or_default "
        "calls_counted_in_closure root_at_zero counts_in_a_global warms_up_by_its_own_count "
        "root_of_what_is_left divides_by_the_excess notes_the_rate_at_init"
    ),
    (Event.AFTER_TRAIN_BATCH, "slots['companion.bystander']['draws']"): "decays_all_slots",
    (Event.AFTER_TRAIN_BATCH, "slots['late_slot']"): "late_slot",
    (Event.AFTER_TRAIN_BATCH, "slots['sum_of_its_own_rows']"): "sum_of_its_own_rows",
    (Event.AFTER_TRAIN_BATCH, "slots['momentum_of_shape_one']"): "momentum_of_shape_one",
    (Event.AFTER_TRAIN_BATCH, "the process's default dtype"): "sets_default_dtype",
    (Event.BATCH_END, ""): "draws_as_network",
    (Event.BATCH_END, "buffers['1.num_batches_tracked']"): "drops_buffers averages_counters",
    (Event.BATCH_END, "hparams['lr']"): "misses_the_end decay_without_gradient decay_of_data",
    (Event.BATCH_END, "loss"): "overwrites_loss",
    (Event.BATCH_END, "match"): "counts_matches matches_by_kept_loss matches_by_key",
    (Event.BATCH_END, "metrics['host_match_writes/acts']"): "host_match_writes",
    (Event.BATCH_END, "metrics['companion.bystander/draw']"): "drops_metrics",
    (Event.BATCH_END, WEIGHT): (
        "decays_in_place clamps_through_data python_coin counts_in_closure module_global widens_params wraps_params "
        "flips_strides normalises_when_neutral counts_slots numbers_itself averages_in_closure anchors_in_closure "
        "remembers_losses_in_a_list number_or_default stops_after_an_hour stops_an_hour_after_init rate_by_the_hour "
        "stops_at_a_date stops_on_another_day trains_today_only imports_the_clock"
    ),
    (Event.BATCH_END, "slots['companion.bystander']['draws']"): "replaces_slots",
    (Event.BATCH_END, "slots['early_witness']['draws']"): "forgets_everything",
    (Event.BATCH_END, "the process's grad mode"): "leaves_grad_mode",
    (Event.BATCH_END, "the process's random generator"): "matches_by_global_draw",
    (Event.BATCH_END, "the process's torch generator"): "seeds_in_apply",
    (Event.EPOCH_END, "slots['slot_at_epoch_end']['0.weight']"): "slot_at_epoch_end",
    (Event.AFTER_LOAD, WEIGHT): "shrinks_weights_on_loading",
    (Event.EVAL_START, ""): "averages_in_place",
    (Event.EVAL_BATCH_START, INPUTS): "augments_test_data",
    (Event.EVAL_AFTER_FORWARD, "batch[1]"): "smooths_test_labels",
    (Event.EVAL_AFTER_FORWARD, "outputs"): "sharpens_outputs",
    (Event.PREDICT_BEFORE_FORWARD, INPUTS): "flips_when_predicting",
    # The mistake needs two events, so no single one is blamed.
    (None, "loss"): "densifies_when_neutral",
    (None, WEIGHT): "counts_evaluations told_by_identity decay_by_the_outputs",
}
"""Mutants by the place of detection: the event and the first leaf that differs, or "" without a leaf."""
FOUND = {name: place for place, names in PLACES.items() for name in names.split()}
LONG = "root_of_what_is_left averages_in_closure anchors_in_closure"
FIRST = list({wrong.breaks: wrong for wrong in reversed(MUTANTS) if wrong.name not in LONG}.values())
"""The first mutant of each law, without three that take seconds."""


@pytest.mark.filterwarnings("ignore:forward changed:UserWarning")  # a mutant registers hooks on purpose
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(wrong, id=f"{wrong.breaks}-{wrong.name}", marks=[] if wrong in FIRST else pytest.mark.slow)
        for wrong in MUTANTS
    ],
)
def test_a_mutant_is_detected_by_its_law_at_the_place_of_the_mistake(wrong):
    report = check(wrong.source, laws=[wrong.breaks], tasks=[wrong.task], neutral=wrong.source)
    outcome = report[wrong.breaks]
    violation = outcome.error
    assert isinstance(violation, LawViolation), outcome
    assert (violation.event, violation.path) == FOUND[wrong.name]
    # The author needs the algorithm's name, the case, the values or the reason why there are none, and the remedy.
    assert violation.values or violation.what
    event = violation.event.name if violation.event else ""
    for part in (wrong.name, event, violation.path, repr(violation.case), LAW[wrong.breaks].remedy):
        assert part in outcome.details


def test_every_law_has_mutants_and_every_mutant_describes_its_mistake():
    assert {wrong.breaks for wrong in [*MUTANTS, *WRONG]} == LAW.keys()
    assert len({wrong.name for wrong in MUTANTS}) == len(MUTANTS)
    assert all(wrong.make.__doc__ for wrong in MUTANTS)


START, END = Case().state(), Case(start=1).state()


def moved(state):
    return END if state is START else START


def test_a_change_of_the_state_is_an_algorithm_at_its_events():
    made = mutant("some_law", at=Event.BATCH_END, task="soft")(moved)
    assert (made.name, made.breaks, made.task) == ("moved", "some_law", "soft")
    assert [event for event in Event if made().predicate(event, None)] == [Event.BATCH_END]
    assert made().apply(Event.BATCH_END, START) is END


def test_a_change_may_take_the_event_as_an_argument():
    made = mutant("some_law", at=(Event.INIT, Event.BATCH_END))(
        lambda event, state: END if event is Event.INIT else state
    )
    assert made().apply(Event.INIT, START) is END and made().apply(Event.BATCH_END, START) is START
    assert {event for event in Event if made().predicate(event, None)} == {Event.INIT, Event.BATCH_END}


def test_a_function_without_arguments_makes_a_change_for_each_algorithm():
    def remembers():
        seen = []
        return lambda state: seen.append(state) or seen[0]

    made = mutant("some_law", at=Event.BATCH_END)(remembers)
    first, second = made(), made()
    assert first.apply(Event.BATCH_END, START) is first.apply(Event.BATCH_END, END) is START
    assert second.apply(Event.BATCH_END, END) is END


def test_without_an_event_the_function_makes_the_algorithm():
    own = Algorithm("own", lambda event, state: True, lambda event, state: state)
    assert mutant("some_law")(lambda: own)() is own
