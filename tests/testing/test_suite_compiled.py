"""compiled_agrees: its reports, differences that are not the algorithm's fault, and its choice of cases."""

from typing import Any

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import Algorithm, Event, State, algorithms as alg, between, every, on, random
from purecompose.core.algorithm import identity
from purecompose.errors import SpentStateError
from purecompose.testing import TASKS, Case, LawViolation, Subject, Task
from purecompose.testing.suite import compiled, compiled_agrees
from tests.sampling import one_in
from tests.testing.mutants import MUTANTS


MUTANT = {mutant.name: mutant for mutant in MUTANTS}


def at(events, fn, name="subject", **options):
    """Return an algorithm that applies `fn` at an event, or where a predicate holds."""
    match = on(events) if isinstance(events, Event) else events
    return Algorithm(name, match, lambda _, state: fn(state), **options)


def scaled(state: State, factor: Any) -> State:
    return state.replace(params={name: factor * param for name, param in state.params.items()})


# Lawful ways to choose and to change


def by_where(state):
    return scaled(state, torch.where(state.loss > 1, 0.9, 0.99))


def by_clock(state):
    return scaled(state, 1 - 0.1 * state.clock.elapsed)


def by_drawing(state):
    draws = random.normal(state.rng("subject"), (3,))
    index = {"index": random.randint(state.rng("subject"), (3,), 0, 1000)}
    return scaled(state, 1 + 0.01 * draws[0].to(state.loss)).replace(metrics={**state.metrics, **index})


def by_value(state):
    return scaled(state, 0.99 if state.params["0.weight"].sum().item() > 0 else 0.9)


LAWFUL = [
    at(Event.BATCH_END, by_where),
    at(Event.BATCH_END, by_clock),
    at(Event.BATCH_END, by_drawing),
    at(on(Event.BATCH_END) & every(2), by_clock),
    at(on(Event.BATCH_END) & between(0.0, 0.5), by_where),
    at(Event.BATCH_END, by_value, host=True),
    alg.mixup(0.2),
]


@pytest.mark.parametrize(
    ("seed", "num_slices"),
    [(0, 1), (1, 1), (2, 1), (3, 1), (0, 3), (1, 2)],
    ids=["donated in parts", "kept in parts", "donated", "kept", "donated in slices", "kept in slices"],
)
@pytest.mark.parametrize("algorithm", one_in(4, LAWFUL, repr))
def test_lawful_algorithms_agree(algorithm, seed, num_slices):
    assert compiled_agrees(algorithm, Case(seed=seed, num_batches=2, microbatches=num_slices)) is True


def test_neutral_settings_are_exempt_and_inactive_algorithms_are_not_judged():
    assert compiled_agrees.exempt(alg.mixup(0)) == "its settings are neutral: it never acts"
    assert compiled_agrees.exempt(at(Event.BATCH_START, lambda state: state, host=True)) is None
    assert compiled_agrees(identity(), Case()) is False
    late = at(on(Event.BATCH_START) & between(0.9, 1), lambda state: state)
    assert compiled_agrees(late, Case(batches_per_epoch=3, epochs=9)) is False


class Reading(nn.Module):
    """A network that cannot be traced."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.layer(inputs) * (2.0 if inputs.sum() > 0 else 1.0)


def test_a_network_that_cannot_be_traced_is_not_the_algorithms_fault():
    task = Task("reading", lambda seed: Reading(), TASKS["vectors"].batch)
    assert compiled_agrees(alg.label_smoothing(0.1), Case(task=task)) is False


def test_an_error_of_the_plain_step_is_not_a_violation():
    def fail(state):
        raise KeyError("a mistake of another kind")

    with pytest.raises(KeyError, match="another kind"):
        compiled_agrees(at(Event.BATCH_START, fail), Case())


# Violations


@pytest.mark.parametrize("seed", [0, 3], ids=["donated in parts", "kept"])
@pytest.mark.parametrize(
    "name", ["counts_in_closure", "counts_in_a_global", "warms_up_by_its_own_count", "branch_on_the_loss"]
)
def test_mistakes_that_other_laws_see_too_would_be_baked_in(name, seed):
    with pytest.raises(LawViolation):
        compiled_agrees(MUTANT[name].source, Case(seed=seed, num_batches=2))


def test_untraceable_code_is_reported_with_its_event_and_torchs_reason():
    with pytest.raises(LawViolation, match="raised only where the step is compiled: TraceError") as caught:
        compiled_agrees(at(Event.AFTER_TRAIN_BATCH, by_value), Case())
    assert caught.value.event is Event.AFTER_TRAIN_BATCH
    assert isinstance(caught.value.__cause__, pc.errors.TraceError)
    assert "test_suite_compiled.py" in caught.value.what


def test_a_small_difference_is_seen():
    calls = []

    def slightly(state):
        calls.append(state)
        return scaled(state, 1 - 1e-5 * len(calls))

    with pytest.raises(LawViolation) as caught:
        compiled_agrees(at(Event.BATCH_END, slightly), Case())
    assert (caught.value.event, caught.value.path) == (Event.BATCH_END, "params['0.weight']")
    values: Any = tuple(caught.value.values.values())
    first, second = values
    assert first != second and abs(first / second - 1) < 1e-3


def test_integers_agree_exactly():
    calls = []

    def report(state):
        calls.append(state)
        value = torch.full((), 1000 + len(calls), dtype=torch.int64)
        return state.replace(metrics={**state.metrics, "value": value})

    with pytest.raises(LawViolation) as caught:
        compiled_agrees(at(Event.BATCH_END, report), Case())
    assert caught.value.path == "metrics['value']"


def test_values_left_in_a_closure_by_an_earlier_run_are_removed():
    cached = MUTANT["weights_in_a_cache"]
    algorithm = cached()
    case = Case(task=TASKS["images"])
    case.step(algorithm)(case.state(), case.batch(0))  # fills the cache with plain tensors
    assert compiled_agrees(algorithm, case) is True
    with pytest.raises(LawViolation):
        compiled_agrees(cached.source, case)


# Choices on the edge


def test_a_choice_that_rounding_flips_ends_the_comparison(monkeypatch):
    """The compiled run gets rounded params; choosing between them and the exact ones is not a fault."""
    plain = compiled.compile_step

    def rounding(step, **options):
        inner = plain(step, **options)

        class Rounding:
            init = inner.init

            def __call__(self, state, batch):
                moved = {name: param * (1 + 1e-12) for name, param in state.params.items()}
                return inner(state.replace(params=moved), batch)

        return Rounding()

    monkeypatch.setattr(compiled, "compile_step", rounding)
    first = Case().state(dtype=torch.float64).params["0.weight"]

    def tipped(state):
        is_above = (state.params["0.weight"].to(first) > first).any()
        return scaled(state, torch.where(is_above, 0.9, 1.0).to(first))

    # At the very first step the params are where the choice flips.
    assert compiled_agrees(at(Event.BATCH_START, tipped), Case()) is False
    assert compiled_agrees(at(Event.BATCH_END, by_clock), Case()) is True


# Options of the compiled step


def options_of(monkeypatch, seed):
    """Return the options of the compiled step, and the step after the law has run."""
    made = []
    plain = compiled.compile_step

    def noted(step, **options):
        made.append((plain(step, **options), options))
        return made[-1][0]

    monkeypatch.setattr(compiled, "compile_step", noted)
    assert compiled_agrees(alg.mixup(0.2), Case(seed=seed, num_batches=2))
    return made[0]


@pytest.mark.slow
def test_the_seed_decides_on_donation(monkeypatch):
    assert [options_of(monkeypatch, seed)[1]["donate"] for seed in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_step_has_parts_and_variants_whose_graphs_are_reused(monkeypatch, seed):
    step, _ = options_of(monkeypatch, seed)
    variants = step.variants()
    assert len({variant.segment for variant in variants}) == 3
    assert sorted(variant.hits for variant in variants) == [1, 1, 3, 4]


@pytest.mark.parametrize("seed", [2, 3])
def test_without_parts_the_step_is_one_graph_as_most_steps_are(monkeypatch, seed):
    step, _ = options_of(monkeypatch, seed)
    assert [variant.hits for variant in step.variants()] == [4]


def test_donation_is_real_in_the_law(monkeypatch):
    step, _ = options_of(monkeypatch, 0)
    state = step.init(Case().state(dtype=torch.float64))
    once = step(state, Case().batch(0, torch.float64))
    twice = step(once, Case().batch(1, torch.float64))
    with pytest.raises(SpentStateError):
        _ = once.params
    assert twice.params["0.weight"].isfinite().all()


def test_a_narrowed_subject_is_rebuilt_with_its_narrowed_events():
    subject = Subject.of("mixup(0.2)")
    narrow = subject.only_at(Event.BEFORE_LOSS)
    made = narrow.made_anew()
    assert made.events == narrow.algorithm.events != subject.algorithm.events
    assert subject.made_anew().events == subject.algorithm.events
