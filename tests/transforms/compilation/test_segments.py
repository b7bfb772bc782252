"""Segments: a step is cut where the schedule varies on both sides, so that numbers of variants add up."""

import pytest

import purecompose as pc
from purecompose import Algorithm, Event, algorithms as alg, compose, every, loop_events
from purecompose.transforms.compilation.parts import Segments
from tests.helpers import changing, decay, make_batches, make_state, noise
from tests.transforms.compilation.compile_helpers import assert_runs_agree, average, compiled, made, scaling, sharpness


def sam() -> Algorithm:
    return sharpness(when=every(5))


def ema() -> Algorithm:
    return average(when=every(20))


def num_segments(*algorithms: Algorithm) -> int:
    return Segments(compose(loop_events, algorithms)).num


def variants_by_segment(*algorithms: Algorithm, donate: bool = True, num: int = 41) -> list[int]:
    """Return the number of variants of each segment after a run."""
    step, fast = made(algorithms, donate=donate)
    state = step.init(make_state(duration=f"{num}ba", batches_per_epoch=num))
    assert_runs_agree(step, fast, state, make_batches(num))
    segments = [variant.segment for variant in fast.variants()]
    return [segments.count(segment) for segment in range(max(segments) + 1)]


@pytest.mark.parametrize(
    "algorithm",
    [sam(), ema(), alg.selective_backprop(0.2, 0.9), scaling("s", Event.AFTER_FORWARD, 2, 3)],
    ids=lambda algorithm: algorithm.name,
)
def test_a_step_is_not_cut_where_only_one_side_varies(algorithm: Algorithm) -> None:
    assert num_segments(algorithm, noise(), decay()) == 1


def test_two_methods_that_vary_between_the_same_events_share_a_segment() -> None:
    ends = [scaling(name, Event.BATCH_END, 0.9, period) for name, period in (("a", 2), ("b", 3))]
    assert num_segments(*ends) == 1
    assert num_segments(*ends, scaling("c", Event.AFTER_DATALOADER, 2, 2)) == 2


@pytest.mark.parametrize("donate", [True, False])
def test_numbers_of_variants_on_two_sides_add_up(donate: bool) -> None:
    assert variants_by_segment(sam(), ema(), donate=donate) == [2, 2]


def test_variants_of_one_side_are_those_of_its_schedule() -> None:
    assert variants_by_segment(sam()) == [2]
    assert variants_by_segment(
        scaling("a", Event.BATCH_END, 0.9, 2), scaling("b", Event.BATCH_END, 0.9, 3), num=13
    ) == [4]


def test_an_empty_segment_before_makes_no_variants() -> None:
    early, middle = scaling("early", Event.AFTER_DATALOADER, 1.1, 2), sam()
    # Prologue and gradient have 2, SAM 1 (a schedule without it has nothing to compile there), the end 2.
    assert variants_by_segment(early, middle, ema()) == [2, 1, 2]


def test_a_host_algorithm_before_makes_no_variants() -> None:
    host = changing("host", Event.AFTER_DATALOADER, lambda s: s, host=True, when=every(2))
    assert variants_by_segment(host, num=5) == [1]


def test_variants_with_selective_backprop_add_up_too() -> None:
    chosen = alg.selective_backprop(0.2, 0.9, keep=0.5, full_every=2)
    assert num_segments(chosen, ema()) == 2
    assert variants_by_segment(chosen, ema()) == [2, 2]


@pytest.mark.parametrize("microbatches, donate", [pytest.param(1, False, marks=pytest.mark.slow), (2, True)])
def test_a_second_gradient_crosses_the_boundary(microbatches: int, donate: bool) -> None:
    methods = [
        scaling("in", Event.BEFORE_FORWARD, 1.5, 2),
        sharpness(when=every(3)),
        scaling("out", Event.BATCH_END, 0.9, 2),
    ]
    step = compose(loop_events, [noise(), *methods], microbatches=microbatches)
    assert Segments(step).num == 3
    assert_runs_agree(step, compiled(step, donate=donate), make_state(), make_batches(7))


def test_each_update_may_be_a_segment_of_its_own() -> None:
    program = (
        Event.AFTER_DATALOADER,
        pc.loop.Grad(pc.loop.forward, pc.loop.loss),
        Event.AFTER_TRAIN_BATCH,
        pc.loop.update(wrt="0.*"),
        Event.BATCH_START,
        pc.loop.update(wrt="3.*"),
        pc.loop.advance,
        Event.BATCH_END,
    )
    methods = [
        scaling("a", Event.AFTER_DATALOADER, 1.1, 2),
        changing("b", Event.AFTER_TRAIN_BATCH, lambda s: s.replace(metrics={"b": s.loss}), when=every(3)),
        scaling("d", Event.BATCH_END, 0.9, 2),
    ]
    step = compose(program, methods)
    assert Segments(step).num == 3
    assert_runs_agree(step, compiled(step), make_state(), make_batches(7))
