"""Gyro dropout: masks and periods of the core, the surgery, and the algorithm in a step."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import purecompose as pc
from purecompose import random, tree
from purecompose.algorithms._dropout import GyroDropout, gyro_dropout, gyro_dropout_mask, gyro_dropout_period
from purecompose.algorithms._selective_backprop import selective_backprop
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import compose
from purecompose.loop import loop_events
from purecompose.time.predicates import on
from tests.algorithms.method_helpers import LR, make_batch, make_state


PLACE = "gyro_dropout_place"


class Probe(nn.Module):
    """A network that returns its inputs after dropout; the weight only exists for the optimizer."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.dropout(x) + 0 * self.weight


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Dropout(0.9), nn.Linear(8, 4))


def started(net, *algorithms, microbatches=1, **options):
    step = compose(loop_events, algorithms, microbatches=microbatches)
    return step, step.init(make_state(net, **options))


def watched_masks(algorithm, num_batches, num=8, width=64, *, microbatches=1):
    """Return the outputs of a `Probe` for inputs of ones in each batch of a run of `num_batches`."""
    seen = []
    spy = Algorithm("spy", on("after_forward"), lambda event, s: seen.append(s.outputs.detach()) or s)
    options = {"duration": f"{num_batches}ba", "batches_per_epoch": None, "loss": pc.losses.mse}
    step, state = started(Probe(), algorithm, spy, microbatches=microbatches, **options)
    for _ in range(num_batches):
        state = step(state, (torch.ones(num, width), torch.zeros(num, width)))
    return [torch.cat(seen[i : i + microbatches]) for i in range(0, len(seen), microbatches)]


def rows(masks):
    return {tuple(row) for row in masks.tolist()}


# Surgery


def test_replaces_only_dropout_and_does_not_change_the_callers_network():
    class Mine(nn.Dropout):
        pass

    class Learned(nn.Dropout):
        def __init__(self):
            super().__init__()
            self.rate = nn.Parameter(torch.zeros(()))

    shared = nn.Dropout(0.3)
    net = nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Linear(6, 6), shared),
            "b": shared,
            "mine": Mine(),
            "learned": Learned(),
            "other": nn.Dropout2d(),
            "silent": nn.Dropout(),
        }
    )
    before = copy.deepcopy(net)
    state = make_state(net, eval_mode=["silent"])
    step = compose(loop_events, [gyro_dropout(0.4, 4, 2)])
    after = step.init(state)
    found = dict(after.model.module.named_modules())
    replaced = [name for name, module in found.items() if isinstance(module, GyroDropout)]
    assert replaced == ["a.1", "mine", "silent"]
    module = after.model.module
    assert isinstance(module, nn.ModuleDict) and module["b"] is found["a.1"]  # shared modules stay shared
    assert found["mine"].p == 0.4 and found["mine"].training and not found["silent"].training
    assert after.model.skeleton(False).module.training is False
    assert repr(net) == repr(before) and [m.training for m in net.modules()] == [m.training for m in before.modules()]
    # Weights, optimizer and frozen names are the previous ones, with the same tensors; the layers share one buffer.
    assert all(after.params[name] is param for name, param in state.params.items())
    assert tree.equal(after.opt_state, state.opt_state) and after.context.frozen == state.context.frozen
    assert list(after.buffers) == [f"a.1.{PLACE}"] and state.buffers == {}


@pytest.mark.parametrize("net", [nn.Linear(6, 4), nn.Sequential(nn.Linear(6, 4), nn.Dropout1d())])
def test_a_network_without_dropout_layers_is_warned_about(net):
    step = compose(loop_events, [gyro_dropout()])
    with pytest.warns(UserWarning, match=r"changed nothing: it looked for Dropout .* network of .*Linear"):
        state = step.init(make_state(net))
    plain = compose(loop_events)
    assert tree.equal(step(state, make_batch()).params, plain(make_state(net), make_batch()).params)


# Numbers


def test_a_step_equals_a_manual_one():
    batch = make_batch(num=10)
    step, state = started(make_net(), gyro_dropout(0.25, 8, 4))
    weights = {name: param.clone().requires_grad_() for name, param in state.params.items()}
    hidden = F.linear(batch[0], weights["0.weight"], weights["0.bias"])
    for path, activation in (("1", torch.tanh), ("3", nn.Identity())):
        rng = random.Rng(state.key, draw=random.salt("gyro_dropout", path))
        mask = gyro_dropout_mask(rng, (10, 8), p=0.25, sigma=8, tau=4)
        hidden = activation(hidden * mask / 0.75)
    loss = F.cross_entropy(F.linear(hidden, weights["4.weight"], weights["4.bias"]), batch[1])
    grads = torch.autograd.grad(loss, list(weights.values()))
    after = step(state, batch)
    torch.testing.assert_close(after.loss, loss.detach())
    for (name, weight), grad in zip(weights.items(), grads, strict=True):
        torch.testing.assert_close(after.params[name], (weight - LR * grad).detach())


@settings(max_examples=10)
@given(st.integers(1, 24), st.integers(1, 6), st.data())
def test_a_run_changes_its_choice_only_at_the_ends_of_periods(total, sigma, data):
    tau = data.draw(st.integers(1, sigma))
    length = gyro_dropout_period(total, sigma, tau)
    seen = watched_masks(gyro_dropout(0.5, sigma, tau), total)
    choices = [rows(masks) for masks in seen]
    assert len(set().union(*choices)) <= sigma and all(len(choice) == tau for choice in choices)
    for batch in range(total):
        assert torch.equal(seen[batch], seen[batch - batch % length])
        assert set(seen[batch].unique().tolist()) <= {0.0, 2.0}
    if 2 * tau < sigma:  # one of these periods has a different choice from the first
        assert total < 10 * length or len(set().union(*choices)) > tau


def test_rows_of_one_example_stay_together_in_microbatches():
    class Tokens(nn.Module):
        """Each example is three rows in dropout."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Sequential(nn.Linear(2, 8), nn.Dropout(), nn.Linear(8, 4))

        def forward(self, x):
            return self.inner(x.reshape(-1, 2)).reshape(-1, 3, 4).mean(1)

    ends = []
    for microbatches in (1, 2, 5):
        step, state = started(Tokens(), gyro_dropout(0.5, 8, 4), microbatches=microbatches)
        ends.append(step(state, make_batch()).params)
    torch.testing.assert_close(ends[0], ends[1])
    torch.testing.assert_close(ends[0], ends[2])


def test_selection_sees_the_same_masks_for_any_number_of_microbatches():
    # Its ranking pass runs before BATCH_START, on the previous step's buffer.
    ends = []
    for microbatches in (1, 2):
        methods = [gyro_dropout(0.5, 4, 2), selective_backprop(0.0, 1.0, full_every=0)]
        step, state = started(make_net(), *methods, microbatches=microbatches)
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            state = step(state, (torch.randn(10, 6, generator=generator), torch.arange(10) % 4))
        ends.append(state.params)
    torch.testing.assert_close(ends[0], ends[1])


# Resuming, populations, compilation, activation checkpointing


def test_activation_checkpointing_computes_the_same_masks_again():
    class Net(nn.Module):
        def __init__(self, call):
            super().__init__()
            self.inner, self.call = make_net(), call

        def forward(self, x):
            return self.call(self.inner, x)

    ends = []
    for call in (lambda inner, x: inner(x), pc.nn.layers.checkpoint):
        step, state = started(Net(call), gyro_dropout(0.5, 8, 4), microbatches=2)
        ends.append(step(state, make_batch()).params)
    torch.testing.assert_close(ends[0], ends[1])


# Errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"duration": None}, "duration=None"),
        ({"duration": "3ep", "batches_per_epoch": None}, "duration=3ep, batches_per_epoch=None"),
        ({"duration": "100sp"}, "duration=100sp"),
    ],
)
def test_a_run_of_unknown_length_is_refused_at_init(options, words):
    with pytest.raises(ValueError, match=f"gyro_dropout: expected a run whose length .*{words}.*'500ba'"):
        started(make_net(), gyro_dropout(), **options)


# The core


WIDE = 64  # two random masks of this size are equal with probability 2**-64
banks = st.integers(1, 12).flatmap(lambda sigma: st.tuples(st.just(sigma), st.integers(1, sigma)))


def distinct(masks):
    return {tuple(row) for row in masks.flatten(1).tolist()}


@given(st.integers(1, 40), banks)
def test_rows_come_in_consecutive_groups_of_nearly_equal_size(num, bank):
    sigma, tau = bank
    rows = gyro_dropout_mask(random.key(1), (num, WIDE), sigma=sigma, tau=tau).tolist()
    starts = [i for i in range(num) if i == 0 or rows[i] != rows[i - 1]]
    sizes = [end - start for start, end in zip(starts, [*starts[1:], num], strict=True)]
    assert len(sizes) == min(num, tau) == len({tuple(row) for row in rows})
    assert max(sizes) - min(sizes) <= 1


def test_the_repeat_length_is_not_the_number_of_masks():
    # The original's test has 16 of each.
    mask = gyro_dropout_mask(random.key(0), (12, WIDE), tau=3)
    for group in mask.split(4):
        assert (group == group[0]).all()
    assert len(distinct(mask)) == 3


@given(banks, st.lists(st.integers(0, 10**6), min_size=1, max_size=12, unique=True), st.integers(0, 2**32))
def test_a_run_has_sigma_masks_and_a_period_tau_of_them(bank, periods, seed):
    sigma, tau = bank
    # The whole bank, by choosing sigma of sigma masks.
    whole = distinct(gyro_dropout_mask(random.key(seed), (sigma, WIDE), sigma=sigma, tau=sigma))
    assert len(whole) == sigma
    seen = set()
    for period in periods:
        masks = gyro_dropout_mask(random.key(seed), (24, WIDE), sigma=sigma, tau=tau, period=period)
        assert len(distinct(masks)) == tau
        seen |= distinct(masks)
    assert seen <= whole


def test_every_mask_is_chosen_equally_often():
    # 6000 periods, 2 of 5 each: 2400 times each, with a standard deviation of 38.
    periods = torch.arange(6000)
    fn = torch.func.vmap(lambda period: gyro_dropout_mask(random.key(3), (2, 20), sigma=5, tau=2, period=period))
    rows, counts = fn(periods).flatten(0, 1).unique(dim=0, return_counts=True)
    assert len(rows) == 5 and counts.sum() == 12000
    assert ((counts - 2400).abs() < 5 * 38).all()


@given(st.sampled_from([0.1, 0.5, 0.8]), st.integers(0, 2**32))
def test_the_kept_fraction_and_the_mean_are_right(p, seed):
    masks = gyro_dropout_mask(random.key(seed), (256, 400), p=p, tau=256)
    num = masks.numel()
    deviation = math.sqrt(p * (1 - p) / num)
    assert abs(masks.double().mean().item() - (1 - p)) < 6 * deviation
    # The mean over the masks, divided by 1 - p, is 1: each element's error is p / (1 - p) / 256 squared.
    assert (masks.double().mean(0) / (1 - p) - 1).abs().max() < 6 * math.sqrt(p / (1 - p) / 256)


def test_a_mask_does_not_depend_on_sizes_and_counts():
    """Mask j only depends on the key, on j and on the element."""
    long = distinct(gyro_dropout_mask(random.key(2), (8, WIDE), sigma=8, tau=8))
    short = distinct(gyro_dropout_mask(random.key(2), (8, 32), sigma=8, tau=8))
    assert {row[:32] for row in long} == short
    larger = distinct(gyro_dropout_mask(random.key(2), (16, WIDE), sigma=16, tau=16))
    assert long < larger
    assert long.isdisjoint(distinct(gyro_dropout_mask(random.key(3), (8, WIDE), sigma=8, tau=8)))


def test_an_rngs_name_matters_but_not_its_examples():
    rng = random.Rng(random.key(0)).named("layer")
    mask = gyro_dropout_mask(rng, (8, WIDE))
    assert torch.equal(gyro_dropout_mask(rng.per_example(torch.arange(8)), (8, WIDE)), mask)
    assert distinct(mask).isdisjoint(distinct(gyro_dropout_mask(rng.named("other"), (8, WIDE))))


@pytest.mark.parametrize("shape", [(6,), (6, 10), (6, 5, 7), (6, 3, 4, 5), (6, 0)])
def test_every_rank_has_a_decision_for_each_element(shape):
    mask = gyro_dropout_mask(random.key(0), shape, sigma=6, tau=2)
    assert mask.shape == shape and mask.dtype == torch.bool
    assert torch.equal(mask[:3], mask[:1].expand_as(mask[:3]))


def test_groups_determine_the_mask_of_a_row():
    groups = torch.tensor([2, 0, 2, 1, 0])
    mask = gyro_dropout_mask(random.key(0), (5, WIDE), tau=3, groups=groups)
    plain = gyro_dropout_mask(random.key(0), (3, WIDE), tau=3)
    assert torch.equal(mask, plain[groups])


# The period's length


@pytest.mark.parametrize(
    ("total", "sigma", "tau", "expected"),
    [
        (196 * 100, 256, 16, 1216),  # int(76.56) * 16
        (19600.0, 256, 16, 1216),
        (2560, 256, 16, 160),
        (256, 256, 16, 16),
        (255, 256, 16, 15),  # below sigma the product is only rounded
        (100, 256, 16, 6),
        (10, 256, 16, 1),
        (0.5, 256, 16, 1),
        (12, 1, 1, 12),
        (12, 4, 4, 12),
    ],
)
def test_period_length(total, sigma, tau, expected):
    assert gyro_dropout_period(total, sigma, tau) == expected


@given(st.integers(1, 10**6), banks)
def test_choices_of_a_run_use_the_bank_about_once(total, bank):
    sigma, tau = bank
    length = gyro_dropout_period(total, sigma, tau)
    assert 1 <= length <= max(1, total * tau / sigma) and length <= gyro_dropout_period(total + 1, sigma, tau)
    if total >= sigma:
        assert length == total // sigma * tau
        assert 1 <= total / length * tau / sigma < 2  # how often a mask is chosen, on average


# Errors


def test_bad_keys_and_lengths_are_refused():
    with pytest.raises(TypeError, match="expected a key"):
        gyro_dropout_mask(torch.zeros(2), (4, 3))
    with pytest.raises(ValueError, match="total_batches"):
        gyro_dropout_period(0)
    with pytest.raises(ValueError, match="tau <= sigma"):
        gyro_dropout_period(100, 2, 3)
