"""Microbatches by size against microbatches by number, which tests/core/test_loop.py compares with whole batches."""

import pytest
import torch

import purecompose as pc
from purecompose import Event, compose, loop_events, tree
from purecompose.batch import split
from purecompose.core.context import Cut
from purecompose.core.scopes import Grad, Microbatches
from tests.helpers import assert_same, changing, make_batch, make_mlp, make_state, noise, run_steps
from tests.sampling import one_in


def sizes_seen(seen: list[int]):
    def look(state):
        seen.append(state.num_examples)
        return state

    return changing("look", Event.BEFORE_FORWARD, look)


@pytest.mark.parametrize(
    ("size", "num", "expected"),
    [(4, 8, [4, 4]), (3, 8, [3, 3, 2]), (5, 8, [4, 4]), (8, 8, [8]), (100, 8, [8]), (1, 3, [1, 1, 1]), (4, 3, [3])],
)
def test_the_size_is_the_largest_number_of_examples_of_a_slice(size, num, expected):
    seen = []
    compose(loop_events, [sizes_seen(seen)], microbatch_size=size)(make_state(), make_batch(size=num))
    assert seen == expected


def test_short_batches_have_fewer_slices_and_the_same_results():
    batches = [make_batch(0, 12), make_batch(1, 7), make_batch(2, 3)]
    by_size = compose(loop_events, [noise()], microbatch_size=4)
    expected = found = make_state(make_mlp(dropout=0.3))
    for batch, k in zip(batches, [3, 2, 1], strict=True):
        expected = compose(loop_events, [noise()], microbatches=k)(expected, batch)
        found = by_size(found, batch)
        assert_same(expected, found)


def test_a_scope_may_have_its_own_size():
    plain = Grad(pc.loop.forward, pc.loop.loss)
    program = [Microbatches(plain, microbatch_size=3), pc.loop.update, pc.loop.advance]
    found = compose(program, microbatches=2)(make_state(), make_batch())
    assert_same(compose([Microbatches(plain, microbatches=3), *program[1:]])(make_state(), make_batch()), found)
    assert (
        Microbatches(plain, microbatch_size=3)
        == Microbatches(plain, microbatch_size=3)
        != Microbatches(plain, microbatches=3)
    )


@pytest.mark.parametrize("donate", one_in(2, [True, False]))
def test_compiled_steps_cut_each_batch_by_its_own_size(donate):
    step = compose(loop_events, [noise()], microbatch_size=4)
    fast = pc.compile(step, backend="eager", quiet=True, donate=donate)
    first = second = make_state(make_mlp(dropout=0.3))
    for batch in [make_batch(0, 8), make_batch(1, 12), make_batch(2, 3), make_batch(3, 8), make_batch(4, 6)]:
        first, second = step(first, batch), fast(second, batch)
        assert not list(tree.differences(first.loss, second.loss, tolerance=1e-5))
    assert not list(tree.differences(first, second.unleased(), tolerance=1e-5))


def test_the_slices_graph_is_built_once_for_a_size_of_batch():
    fast = pc.compile(compose(loop_events, microbatch_size=2), backend="eager", quiet=True)
    run_steps(fast, make_state(), [make_batch(seed, 8) for seed in range(3)])
    assert [variant.batch for variant in fast.variants()].count("2x4 2") == 1


@pytest.mark.slow
def test_compiled_steps_of_open_sizes():
    step = compose(loop_events, microbatch_size=4)
    fast = pc.compile(step, backend="eager", quiet=True, dynamic=True)
    first = second = make_state()
    for size in (8, 12, 6, 5, 16):
        first, second = step(first, make_batch(size, size)), fast(second, make_batch(size, size))
    assert not list(tree.differences(first, second.unleased(), tolerance=1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_populations_are_cut_by_a_members_own_batch(dynamic):
    step = compose(loop_events, [noise()], microbatch_size=3)
    states = [make_state(key=key) for key in (0, 1)]
    both = pc.population(step, 2)
    fast = pc.compile(both, backend="eager", quiet=True, dynamic=dynamic)
    assert both.microbatch_size == 3
    batches = [make_batch(0, 8), make_batch(1, 5)]
    alone = [run_steps(step, state, batches) for state in states]
    for together in (both, fast):
        for one, other in zip(
            alone, pc.unstack_states(run_steps(together, pc.stack_states(states), batches)), strict=True
        ):
            assert not list(tree.differences(one.params, other.params, tolerance=1e-5))


def test_attributes_of_a_step_give_number_or_size_and_can_be_replaced():
    step = compose(loop_events, microbatch_size=16)
    assert (step.microbatches, step.microbatch_size) == (None, 16)
    assert step.replace(program=loop_events[:-1]).microbatch_size == 16
    by_number = step.replace(microbatches=2)
    assert (by_number.microbatches, by_number.microbatch_size) == (2, None)
    assert by_number.replace(microbatch_size=4).microbatch_size == 4
    assert (compose(loop_events).microbatches, compose(loop_events).microbatch_size) == (1, None)


@pytest.mark.parametrize("size", [0, -2, True, "2", 1.0, 2.5, torch.tensor(2)])
def test_the_size_is_a_positive_int(size):
    with pytest.raises((TypeError, ValueError), match="compose: microbatch_size: expected an int >= 1, got .*; it is"):
        compose(loop_events, microbatch_size=size)
    with pytest.raises(
        (TypeError, ValueError), match="Microbatches: microbatch_size: expected an int >= 1, got .*; it is"
    ):
        Microbatches(pc.loop.forward, microbatch_size=size)


def test_number_and_size_exclude_each_other():
    with pytest.raises(ValueError, match="got both: microbatches=2, microbatch_size=4"):
        compose(loop_events, microbatches=2, microbatch_size=4)
    with pytest.raises(ValueError, match="got both: microbatches=2, microbatch_size=4"):
        Microbatches(pc.loop.forward, microbatches=2, microbatch_size=4)


@pytest.mark.parametrize("num", range(1, 20))
def test_slices_are_as_few_as_their_size_allows(num):
    for size in range(1, 22):
        k = Cut(microbatch_size=size).num_slices(num)
        assert (k - 1) * size < num <= k * size
        assert max(len(part) for part in split(torch.arange(num), k)) <= size
