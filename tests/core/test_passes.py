"""Passes: properties over random lists of algorithms, the published examples, and the errors."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st

from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.passes import (
    DEFAULT_PASSES,
    compose_passes,
    order_by_constraints,
    set_filo_order,
    sort_fused_layernorm_last,
    sort_selective_backprop_first,
    sort_to_back,
    sort_to_front,
    warn_if_multiple_loss_interpolation,
)
from purecompose.errors import MixedLossWarning, OrderError
from purecompose.time.event import Event
from purecompose.time.predicates import ALWAYS


ORDERINGS = [set_filo_order, sort_selective_backprop_first, sort_fused_layernorm_last, order_by_constraints]
PINS = [sort_selective_backprop_first, sort_fused_layernorm_last]
FIRST, LAST = Trait.SELECTS_EXAMPLES, Trait.FUSES_LAYERNORM
OTHERS = [trait for trait in Trait if trait not in (FIRST, LAST)]
RENEW, COLLECT, CLIP = Trait.RENEWS_GRADIENTS, Trait.COLLECTS_GRADIENTS, Trait.CLIPS_GRADIENTS

EVENT = st.sampled_from(Event)

default_order = compose_passes(*DEFAULT_PASSES[:-1])


def make(name: str, *traits: Trait, before: Any = (), after: Any = ()) -> Algorithm:
    return Algorithm(name, ALWAYS, lambda event, state: state, frozenset(traits), before, after)


def names(algorithms: Sequence[Algorithm]) -> str:
    return " ".join(algorithm.name for algorithm in algorithms)


@st.composite
def unconstrained(draw: st.DrawFn, traits: Sequence[Trait] = tuple(Trait)) -> list[Algorithm]:
    """Draw lists of algorithms with any traits."""
    chosen = draw(st.lists(st.sets(st.sampled_from(traits), max_size=3), max_size=9))
    return [make(f"a{i}", *having) for i, having in enumerate(chosen)]


@st.composite
def constrained(draw: st.DrawFn) -> list[Algorithm]:
    """Draw lists with constraints between names that agree with a hidden ranking, so that some order satisfies them."""
    count = draw(st.integers(0, 8))
    ranking = draw(st.permutations(range(count)))
    made = []
    for i in range(count):
        later = [f"a{j}" for j in range(count) if ranking[j] > ranking[i]]
        earlier = [f"a{j}" for j in range(count) if ranking[j] < ranking[i]]
        before = draw(st.lists(st.sampled_from(later), max_size=2)) if later else []
        after = draw(st.lists(st.sampled_from(earlier), max_size=2)) if earlier else []
        made.append(make(f"a{i}", before=before, after=after))
    return made


def is_satisfied(ordered: Sequence[Algorithm]) -> bool:
    """Return whether every constraint is satisfied, checked pair by pair."""

    def means(references: tuple[str | Trait, ...], other: Algorithm) -> bool:
        return bool(({other.name} | set(other.traits)) & set(references))

    return not any(
        means(late.runs_before, early) or means(early.runs_after, late)
        for i, late in enumerate(ordered)
        for early in ordered[:i]
    )


# Properties of each pass


@given(unconstrained(), EVENT)
def test_orderings_are_permutations(algorithms: list[Algorithm], event: Event) -> None:
    given_order = list(algorithms)
    for one_pass in (*ORDERINGS, default_order):
        ordered = one_pass(algorithms, event)
        assert sorted(map(id, ordered)) == sorted(map(id, algorithms))
    assert algorithms == given_order


@given(unconstrained(), EVENT)
def test_pins_are_stable_and_idempotent(algorithms: list[Algorithm], event: Event) -> None:
    first = sort_selective_backprop_first(algorithms, event)
    pinned, rest = ([a for a in algorithms if FIRST in a.traits], [a for a in algorithms if FIRST not in a.traits])
    assert list(first) == pinned + rest
    last = sort_fused_layernorm_last(algorithms, event)
    pinned, rest = ([a for a in algorithms if LAST in a.traits], [a for a in algorithms if LAST not in a.traits])
    assert list(last) == rest + pinned
    for one_pass in PINS:
        once = one_pass(algorithms, event)
        assert list(one_pass(once, event)) == list(once)


@given(constrained(), EVENT)
def test_constraints_are_satisfied_once_and_for_all(algorithms: list[Algorithm], event: Event) -> None:
    ordered = order_by_constraints(algorithms, event)
    assert sorted(map(id, ordered)) == sorted(map(id, algorithms))
    assert is_satisfied(ordered)
    assert list(order_by_constraints(ordered, event)) == list(ordered)
    if is_satisfied(algorithms):
        assert list(ordered) == algorithms


@given(st.lists(st.integers() | st.text(max_size=2) | st.floats(allow_nan=False), max_size=12))
def test_sorts_by_type_are_stable_partitions(items: list[Any]) -> None:
    whole, rest = [i for i in items if isinstance(i, int)], [i for i in items if not isinstance(i, int)]
    assert sort_to_front(items, int) == whole + rest
    assert sort_to_back(items, int) == rest + whole
    assert sort_to_back(items, lambda item: isinstance(item, int)) == rest + whole


@given(unconstrained(), st.sampled_from([e for e in Event if "AFTER_" in e.name]))
def test_after_events_reverse_their_opening_event(algorithms: list[Algorithm], closing: Event) -> None:
    opening = Event[closing.name.replace("AFTER", "BEFORE")]
    forth, back = set_filo_order(algorithms, opening), set_filo_order(algorithms, closing)
    assert list(forth) == algorithms
    assert list(back) == algorithms[::-1]
    assert list(set_filo_order(back, closing)) == algorithms


# The default passes together


@given(st.lists(st.sampled_from([(), (RENEW,), (COLLECT,), (CLIP,)]), max_size=9))
def test_gradients_are_renewed_first_and_clipped_last(traits: list[tuple[Trait, ...]]) -> None:
    algorithms = [make(f"a{i}", *having) for i, having in enumerate(traits)]
    for event in (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH):
        reverse = algorithms[::-1]
        ranks = [[RENEW in a.traits, not a.traits, COLLECT in a.traits, CLIP in a.traits].index(True) for a in reverse]
        expected = [a for rank in range(4) for a, own in zip(reverse, ranks, strict=True) if own == rank]
        assert list(default_order(algorithms, event)) == expected


@given(constrained(), EVENT)
def test_constraints_hold_after_all_default_passes(algorithms: list[Algorithm], event: Event) -> None:
    assert is_satisfied(default_order(algorithms, event))


@given(unconstrained(OTHERS), st.data())
def test_a_constraint_by_trait_holds_for_every_list(algorithms: list[Algorithm], data: st.DataObject) -> None:
    sam = make("sam", before=Trait.CLIPS_GRADIENTS)
    algorithms.insert(data.draw(st.integers(0, len(algorithms))), sam)
    for event in (Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH):
        ordered = default_order(algorithms, event)
        clips = [i for i, a in enumerate(ordered) if Trait.CLIPS_GRADIENTS in a.traits]
        assert ordered.index(sam) < min(clips, default=len(ordered))


@given(constrained(), EVENT, st.data())
def test_pins_hold_among_constraints(algorithms: list[Algorithm], event: Event, data: st.DataObject) -> None:
    for pinned in (make("selective", FIRST), make("fused", LAST)):
        algorithms.insert(data.draw(st.integers(0, len(algorithms))), pinned)
    ordered = default_order(algorithms, event)
    assert (ordered[0].name, ordered[-1].name) == ("selective", "fused")
    assert is_satisfied(ordered)


def test_the_published_examples_of_sorting() -> None:
    items = [1, "a", "c", 2, 3.0]
    assert sort_to_front(items, int) == [1, 2, "a", "c", 3.0]
    assert sort_to_back(items, int) == ["a", "c", 3.0, 1, 2]
    assert sort_to_front(items, (str, float)) == ["a", "c", 3.0, 1, 2]
    assert sort_to_back(items, lambda item: item in (1, "c")) == ["a", 2, 3.0, 1, "c"]
    assert sort_to_front(iter("abc"), lambda letter: letter == "c") == ["c", "a", "b"]
    assert items == [1, "a", "c", 2, 3.0]


# Constraints


@pytest.mark.parametrize(
    ("algorithms", "expected"),
    [
        ([make("clip"), make("sam", before="clip")], "sam clip"),
        ([make("clip", after="sam"), make("sam")], "sam clip"),
        ([make("clip", Trait.CLIPS_GRADIENTS), make("sam", before=Trait.CLIPS_GRADIENTS)], "sam clip"),
        ([make("clip", after=Trait.SECOND_ORDER), make("sam", Trait.SECOND_ORDER)], "sam clip"),
        ([make("a", before="nobody"), make("b", after=["nobody", "none"])], "a b"),
        ([make("a", after="a"), make("b")], "a b"),
        ([make("c", after="b"), make("b", after="a"), make("a"), make("d")], "a b c d"),
    ],
    ids=repr,
)
def test_constraints_by_name_and_trait(algorithms: list[Algorithm], expected: str) -> None:
    assert names(order_by_constraints(algorithms, Event.BATCH_START)) == expected


def test_equal_algorithms_are_ordered_as_separate_ones() -> None:
    def keep(event: Event, state: Any) -> Any:
        del event
        return state

    late = [Algorithm("late", ALWAYS, keep, runs_after=("early",)) for _ in range(2)]
    early = make("early")
    ordered = order_by_constraints([*late, early], Event.BATCH_START)
    assert list(map(id, ordered)) == list(map(id, [early, *late]))


def test_a_contradiction_prints_only_its_cycle() -> None:
    algorithms = [
        make("outside", after="a"),
        make("a", before="b"),
        make("b", before="c"),
        make("c", before="a"),
        make("free"),
    ]
    with pytest.raises(OrderError, match="no order at Event.BATCH_START satisfies all constraints: ") as caught:
        order_by_constraints(algorithms, Event.BATCH_START)
    cycle = str(caught.value).split("constraints: ")[1].split(" before ")
    assert cycle[0] == cycle[-1]
    assert set(zip(cycle, cycle[1:], strict=False)) == {("a", "b"), ("b", "c"), ("c", "a")}


@given(constrained(), st.data())
def test_a_contradiction_added_to_any_list_is_found(algorithms: list[Algorithm], data: st.DataObject) -> None:
    assume(algorithms)
    victim = data.draw(st.sampled_from(algorithms))
    algorithms.append(make("paradox", before=victim.name, after=victim.name))
    with pytest.raises(OrderError, match=f"paradox before {victim.name}|{victim.name} before paradox"):
        order_by_constraints(algorithms, Event.INIT)


# Composition


@given(unconstrained(), EVENT, st.lists(st.sampled_from(ORDERINGS), max_size=5))
def test_composition_goes_from_left_to_right(algorithms: list[Algorithm], event: Event, passes: list[Any]) -> None:
    expected = functools.reduce(lambda current, one_pass: one_pass(current, event), passes, algorithms)
    assert list(compose_passes(*passes)(algorithms, event)) == list(expected)
    split = len(algorithms) % (len(passes) + 1)
    nested = compose_passes(compose_passes(*passes[:split]), compose_passes(*passes[split:]))
    assert list(nested(algorithms, event)) == list(expected)


def test_a_pass_may_drop_and_add() -> None:
    extra = make("extra")

    def drop_b(algorithms: Sequence[Algorithm], event: Event) -> list[Algorithm]:
        del event
        return [algorithm for algorithm in algorithms if algorithm.name != "b"]

    def add_extra(algorithms: Sequence[Algorithm], event: Event) -> list[Algorithm]:
        return [*algorithms, extra] if event is Event.BATCH_END else list(algorithms)

    both = compose_passes(drop_b, add_extra)
    algorithms = [make(name) for name in "abc"]
    assert names(both(algorithms, Event.BATCH_END)) == "a c extra"
    assert names(both(algorithms, Event.BATCH_START)) == "a c"


@pytest.mark.parametrize("result", [None, 3, "a", ["a"], (a for a in ()), {make("a")}])
def test_a_pass_that_does_not_return_a_list_of_algorithms_is_named(result: Any) -> None:
    def shuffled(algorithms: Sequence[Algorithm], event: Event) -> Any:
        del algorithms, event
        return result

    text = f"the pass shuffled must return a sequence of algorithms, got {type(result).__name__}"
    with pytest.raises(TypeError, match=text) as caught:
        compose_passes(set_filo_order, shuffled)([make("a")], Event.INIT)
    assert ("return statement missing" in str(caught.value)) == (result is None)


# The warning


def test_two_loss_editors_are_warned_about_once_and_left_in_place() -> None:
    algorithms = [make("a", Trait.EDITS_LOSS), make("b"), make("c", Trait.EDITS_LOSS), make("d", FIRST)]
    with pytest.warns(MixedLossWarning) as caught:
        result = compose_passes(warn_if_multiple_loss_interpolation)(algorithms, Event.AFTER_LOSS)
    assert list(result) == algorithms
    (warning,) = caught
    assert "a, c each replace the loss at Event.AFTER_LOSS" in str(warning.message)
    assert warning.filename == __file__


@given(unconstrained([trait for trait in Trait if trait is not Trait.EDITS_LOSS]), EVENT, st.booleans())
def test_fewer_than_two_loss_editors_cause_no_warning(algorithms: list[Algorithm], event: Event, one: bool) -> None:
    if one:
        algorithms.append(make("editor", Trait.EDITS_LOSS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(warn_if_multiple_loss_interpolation(algorithms, event)) == algorithms
