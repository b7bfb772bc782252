"""Batch size warm-up: sizes against exact arithmetic, steps against steps on the kept examples, other methods."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional as F

import purecompose as pc
from purecompose import Algorithm, Event, compose, loop_events, on
from purecompose.algorithms._batch_sizes import batch_size_warmup, warmup_batch_size
from tests.algorithms import method_helpers as helpers


BATCH = helpers.make_batch(num=20)


def run(algorithms, num=10, state=None, batch=BATCH, **options):
    """Return the batches trained on and the states after INIT and each step of a run of ten batches."""
    seen = []
    step = compose(loop_events, [*algorithms, helpers.spy(seen, "batch_start")], **options)
    states = [step.init(helpers.make_state(duration="10ba") if state is None else state)]
    for _ in range(num):
        states.append(step(states[-1], batch))
    return seen, states


def sizes_of(seen):
    return [len(inputs) for inputs, _ in seen]


# The sizes


@given(
    total=st.integers(1, 300),
    batch_size=st.integers(1, 300),
    duration=st.sampled_from(["0", "0.1", "0.3", "0.5", "1"]),
    initial_share=st.sampled_from(["0", "0.1", "0.125", "0.2", "1"]),
    multiple=st.none() | st.integers(1, 40),
)
def test_sizes_are_those_of_exact_arithmetic_and_never_fall(total, batch_size, duration, initial_share, multiple):
    settings = {"duration": float(duration), "initial_share": float(initial_share), "multiple": multiple}
    d, s0, sizes = Fraction(duration), Fraction(initial_share), []
    quantum = multiple or -(-batch_size // 8)
    for number in range(total + 2):
        elapsed, expected = Fraction(number, total), batch_size
        if elapsed < d:
            share = s0 + (1 - s0) * elapsed / d
            expected = min(quantum * max(1, int(share * batch_size / quantum)), batch_size)
        sizes.append(warmup_batch_size(number / total, batch_size, **settings))
        assert sizes[-1] == expected
    assert sizes == sorted(sizes) and 1 <= sizes[0] and sizes[-1] == batch_size
    assert all(size == batch_size or size % quantum == 0 for size in sizes)
    assert multiple is not None or len(set(sizes)) <= 8


def test_a_size_begins_on_time_although_its_share_is_rounded_down():
    # The share is 0.125 + 0.875 (50 / 700) / 0.1 = 0.75 = 6 / 8, which is computed a little too small.
    assert warmup_batch_size(50 / 700, 256, duration=0.1) == 192


# In a run


def test_sizes_follow_the_ramp_and_are_reported():
    seen, states = run([batch_size_warmup(0.5, 0.2, 4)])
    # 20 (0.2 + 0.8 t / 0.5) = 4, 7.2, 10.4, 13.6, 16.8, in fours
    assert sizes_of(seen) == [4, 4, 8, 12, 16, 20, 20, 20, 20, 20]
    assert [state.metrics["batch_size_warmup/batch_size"].item() for state in states[1:6]] == [4, 4, 8, 12, 16]
    assert all("batch_size_warmup/batch_size" not in state.metrics for state in states[6:])


def test_a_step_is_a_step_on_the_first_examples():
    _, (start, after) = run([batch_size_warmup(0.5, 0.25)], 1)
    net = pc.to_module(start)
    loss = F.cross_entropy(net(BATCH[0][:3]), BATCH[1][:3])
    grads = torch.autograd.grad(loss, list(net.parameters()))
    expected = {n: p.detach() - helpers.LR * g for (n, p), g in zip(net.named_parameters(), grads, strict=True)}
    torch.testing.assert_close(after.params, expected)
    torch.testing.assert_close(after.loss, loss.detach())


def test_all_per_example_members_are_cut_and_the_others_are_kept():
    batch = {
        "x": BATCH[0],
        "y": BATCH[1],
        "names": [str(n) for n in range(20)],
        "weights": torch.ones(4),
        "set": "train",
    }
    state = helpers.make_state(duration="10ba", input_field="x", target_field="y")
    (first, *_), _ = run([batch_size_warmup(0.5, 0.2, 4)], 1, state, batch)
    assert torch.equal(first["x"], BATCH[0][:4]) and torch.equal(first["y"], BATCH[1][:4])
    assert (
        first["names"] == ["0", "1", "2", "3"]
        and first["set"] == "train"
        and first["weights"].data_ptr() == batch["weights"].data_ptr()
    )


def test_draws_of_examples_that_are_left_are_those_of_the_whole_batch():
    def draw(_, state):
        return state.replace(metrics={"draws": pc.random.uniform(state.example_rng("draw"), (state.num_examples,))})

    drawing = Algorithm("draw", on(Event.BEFORE_TRAIN_BATCH), draw)
    whole, part = run([drawing], 1)[1][-1], run([drawing, batch_size_warmup(0.5, 0.2, 4)], 1)[1][-1]
    assert torch.equal(part.metrics["draws"], whole.metrics["draws"][:4])


@pytest.mark.parametrize("place", [0, 1])
def test_it_comes_before_selective_backprop_and_mixing(place):
    others = [pc.algorithms.selective_backprop(0, 1.0, full_every=0, name="sb"), pc.algorithms.mixup(0.2)]
    methods = [*others[:place], batch_size_warmup(0.5, 0.4, 4), *others[place:]]
    plan = compose(loop_events, methods).plan(helpers.make_state(duration="10ba"))
    assert plan.order(Event.AFTER_DATALOADER) == ("batch_size_warmup", "sb", "mixup")
    seen, _ = run(methods, 1)
    assert sizes_of(seen) == [4]  # half of eight
