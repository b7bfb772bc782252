"""The laws about leaks: averaged weights and restored changes keep them; and their reports."""

import dataclasses

import pytest
from hypothesis import given, settings

from purecompose import algorithms as alg, random
from purecompose.core.algorithm import Algorithm, identity
from purecompose.core.state import State
from purecompose.testing.case import Case
from purecompose.testing.law import LawViolation
from purecompose.testing.strategies import cases
from purecompose.testing.suite.evaluation import evaluation_blind, pairs_undone
from purecompose.testing.tasks import TASKS
from purecompose.time.event import Event
from purecompose.time.predicates import on
from tests.testing.mutants.evaluation import counts_evaluations, restores_by_argmax


CASE = Case(seed=3, batch_size=6, num_batches=2, microbatches=2, others=("noise", "shrink"), place=1)
SPANNED = (Event.EVAL_START, Event.PREDICT_START)


def ema() -> Algorithm:
    """Return an algorithm that averages the weights and evaluates with the averages."""

    def apply(event: Event, state: State) -> State:
        if event in SPANNED:
            return state.replace(params=state.slots["ema"])
        averages = state.params if event is Event.INIT else state.slots["ema"]
        averages = {name: (average + state.params[name]) / 2 for name, average in averages.items()}
        return state.replace(slots={**state.slots, "ema": averages})

    return Algorithm("ema", on(Event.INIT, Event.BATCH_END, *SPANNED), apply)


def weight_noise(closing: Event = Event.AFTER_FORWARD) -> Algorithm:
    """Return an algorithm that perturbs the weights for the forward pass and restores the kept ones."""

    def apply(event: Event, state: State) -> State:
        if event is Event.BEFORE_FORWARD:
            draw = random.normal(state.rng("weight_noise"), ())
            params = {name: param + draw for name, param in state.params.items()}
            return state.replace(params=params, slots={**state.slots, "weight_noise": state.params})
        slots = dict(state.slots)
        return state.replace(params=slots.pop("weight_noise"), slots=slots)

    return Algorithm("weight_noise", on(Event.BEFORE_FORWARD, closing), apply)


@pytest.mark.parametrize("algorithm", [ema(), weight_noise()], ids=repr)
@settings(max_examples=4)
@given(case=cases())
def test_lawful_algorithms_keep_the_laws(algorithm: Algorithm, case: Case) -> None:
    evaluation_blind(algorithm, case)
    has_pair = pairs_undone.exempt(algorithm) is None
    assert pairs_undone(algorithm, case) == has_pair


def test_a_leak_into_training_names_the_runs() -> None:
    with pytest.raises(LawViolation) as caught:
        evaluation_blind(counts_evaluations(), CASE)
    assert caught.value.path.startswith("params") and list(caught.value.values) == [
        "without evaluation in between",
        "with it",
    ]


def test_replaced_targets_are_reported_with_their_event() -> None:
    with pytest.raises(LawViolation, match="float32.* and .*int64") as caught:
        pairs_undone(restores_by_argmax(), dataclasses.replace(CASE, task=TASKS["soft"]))
    assert caught.value.event is Event.AFTER_LOSS and caught.value.path == "batch[1]"


def test_index_targets_that_argmax_restores_are_restored() -> None:
    assert pairs_undone(restores_by_argmax(), CASE)


@pytest.mark.parametrize("algorithm", [alg.mixup(), alg.selective_backprop(), ema(), weight_noise(Event.BATCH_END)])
def test_algorithms_without_a_pair_are_exempt(algorithm: Algorithm) -> None:
    assert "pair" in (pairs_undone.exempt(algorithm) or "")
    assert "never" in (pairs_undone.exempt(identity()) or "")


def test_weights_that_the_optimizer_updates_need_not_be_restored_by_a_pair() -> None:
    def apply(event: Event, state: State) -> State:
        factor = 2.0 if event is Event.BATCH_START else 0.5
        return state.replace(params={name: param * factor for name, param in state.params.items()})

    assert not pairs_undone(Algorithm("scaled", on(Event.BATCH_START, Event.BATCH_END), apply), CASE)


def test_a_change_made_only_at_the_closing_event_may_remain() -> None:
    def apply(event: Event, state: State) -> State:
        return state.replace(inputs=2 * state.inputs) if event is Event.AFTER_FORWARD else state

    late = Algorithm("late", on(Event.BEFORE_FORWARD, Event.AFTER_FORWARD), apply)
    assert not pairs_undone(late, CASE)


def test_an_algorithm_that_does_not_act_is_not_judged() -> None:
    sleeping = alg.selective_backprop(start=0.9, end=1.0, full_every=0)
    case = dataclasses.replace(CASE, num_batches=0)
    assert not evaluation_blind(sleeping, case) and not pairs_undone(alg.label_smoothing(), case)
