"""Selective backprop: the choice of examples and the algorithm in a step."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

from purecompose import losses, random, tree
from purecompose.algorithms._selective_backprop import choose_by_loss, select_using_loss, selective_backprop
from purecompose.algorithms._targets import mixup
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import compose
from purecompose.core.passes import DEFAULT_PASSES
from purecompose.loop import loop_events
from purecompose.losses.targets import Mixture
from purecompose.surgery.weights import to_module
from purecompose.time.event import Event
from purecompose.time.predicates import on
from tests.algorithms.method_helpers import LR, make_batch, make_state, one_step, spy


def always(**settings: Any) -> Algorithm:
    return selective_backprop(**{"start": 0.0, "end": 1.0, "full_every": 0, **settings})


def selected(algorithm, state, batch):
    """Return the batch that training sees."""
    seen = []
    one_step([algorithm, spy(seen, "before_forward")], state, batch)
    return seen[0]


def row_numbers(rows, table):
    """Return the index of each row in the table, by comparing all pairs."""
    return [next(i for i, own in enumerate(table) if torch.equal(own, row)) for row in rows]


# In a step


@given(st.integers(0, 8), st.integers(9, 16), st.integers(0, 5), st.integers(1, 7))
def test_it_acts_in_its_window_except_in_some_batches_of_an_epoch(start, end, full_every, epoch_length):
    start, end = start / 16, end / 16
    match = selective_backprop(start, end, full_every=full_every).match
    timestamp = make_state(duration="3ep", batches_per_epoch=epoch_length).timestamp
    total = 3 * epoch_length
    for batch in range(total):
        is_whole = full_every > 0 and (batch % epoch_length + 1) % full_every == 0
        expected, moment = start <= batch / total < end and not is_whole, _Moment(timestamp)
        assert match(Event.AFTER_DATALOADER, moment) is expected  # pyright: ignore[reportArgumentType]
        timestamp = timestamp.advance()


@dataclasses.dataclass
class _Moment:
    timestamp: Any


def test_acts_in_the_right_batches_of_a_run():
    seen = []
    step = compose(loop_events, [selective_backprop(0.5, 0.9, 0.5), spy(seen, "before_forward")])
    state = step.init(make_state())
    for _ in range(20):
        state = step(state, make_batch())
    sizes = [len(inputs) for inputs, _ in seen]
    # Fractions .5 to .9 of 20 batches; the second epoch starts at 10; each second batch is whole.
    assert [i for i, size in enumerate(sizes) if size == 5] == [10, 12, 14, 16]
    assert set(sizes) == {5, 10}
    assert state.timestamp.sample == 200  # the whole batches are counted


def test_trains_on_what_the_function_selects():
    state, (inputs, targets) = make_state(), make_batch()
    x, y = select_using_loss(state.rng("selective_backprop"), inputs, targets, to_module(state), losses.cross_entropy)
    assert tree.equal(selected(always(), state, (inputs, targets)), (x, y))
    net = to_module(state)
    loss = F.cross_entropy(net(x), y)
    grads = torch.autograd.grad(loss, list(net.parameters()))
    after = one_step([always()], state, (inputs, targets))
    torch.testing.assert_close(after.loss, loss.detach())
    for (name, param), grad in zip(net.named_parameters(), grads, strict=True):
        torch.testing.assert_close(after.params[name], (param - LR * grad).detach())


def test_the_same_rows_of_every_member_are_selected():
    inputs, targets = make_batch()
    mixture = Mixture.of(targets).mixed_with(torch.arange(10).flip(0), 0.25)
    batch = {"x": inputs, "y": mixture, "more": {"id": torch.arange(10), "note": "kept", "scale": torch.tensor(2.0)}}
    state = make_state(input_field="x", target_field="y")
    chosen = selected(always(), state, batch)
    ids = chosen["more"]["id"]
    assert len(ids) == 5 and chosen["more"]["note"] == "kept" and chosen["more"]["scale"] == 2
    assert torch.equal(chosen["x"], inputs[ids])
    assert torch.equal(chosen["y"].targets[1], targets.flip(0)[ids]) and len(chosen["y"].weights[0]) == 5
    explicit = selected(always(input_field="x", target_field="y"), state, batch)
    assert tree.equal(explicit, chosen)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_comes_first_wherever_it_is_listed(place):
    algorithms = [mixup(1.0), mixup(0.4, name="second")]
    algorithms.insert(place, always())
    step = compose(loop_events, algorithms, passes=DEFAULT_PASSES)
    assert step.order(algorithms, Event.AFTER_DATALOADER)[0].name == "selective_backprop"
    seen = []
    step = compose(loop_events, [*algorithms, spy(seen, "before_forward")], passes=DEFAULT_PASSES)
    state, (inputs, targets) = step.init(make_state()), make_batch()
    step(state, (inputs, targets))
    x, y = select_using_loss(state.rng("selective_backprop"), inputs, targets, to_module(state), losses.cross_entropy)
    # The raw rows were chosen: the first terms of the mixture are their targets.
    assert torch.equal(seen[0][1].targets[0], y) and seen[0][0].shape == x.shape


def test_batchnorm_statistics_only_see_the_chosen_rows():
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    state, batch = make_state(net), make_batch()
    x, _ = selected(always(), state, batch)
    expected = to_module(state)
    expected(x)
    after = one_step([always()], state, batch)
    torch.testing.assert_close(after.buffers, dict(expected.named_buffers()))
    assert after.buffers["1.num_batches_tracked"] == 1


def test_ranking_pass_draws_dropout_by_its_own_name():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4))
    state, batch = make_state(net), make_batch()
    first, again = selected(always(), state, batch), selected(always(), state, batch)
    assert tree.equal(first, again)
    inputs, targets = batch
    outputs, _ = state.run_model(inputs, train=True, rng_name="selective_backprop.forward")
    example_losses = F.cross_entropy(outputs, targets, reduction="none")
    chosen = choose_by_loss(state.rng("selective_backprop"), example_losses)
    assert tree.equal(first, (inputs[chosen], targets[chosen]))
    # The forward pass for training draws the same numbers as without selection.
    outputs = []
    watch = Algorithm("spy", on("after_forward"), lambda event, s: outputs.append(s.outputs) or s)
    one_step([always(), watch], state, batch)
    one_step([watch], state, first)
    assert torch.equal(outputs[0], outputs[1])


def test_a_step_with_a_scale_factor_ranks_small_images_and_trains_on_large_ones():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    state = make_state(net)
    inputs = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(8) % 4
    x, y = selected(always(scale_factor=0.5), state, (inputs, targets))
    small = F.avg_pool2d(inputs, 2)
    example_losses = F.cross_entropy(to_module(state)(small), targets, reduction="none")
    expected = choose_by_loss(state.rng("selective_backprop"), example_losses)
    assert torch.equal(x, inputs[expected]) and torch.equal(y, targets[expected])


@pytest.mark.parametrize("is_dense", [False, True])
def test_with_a_scale_factor_the_outputs_of_a_segmentation_are_enlarged_to_the_targets(is_dense):
    net, generator = nn.Conv2d(3, 4, 3, padding=1), torch.Generator().manual_seed(0)
    state = make_state(net, loss=losses.mse if is_dense else losses.cross_entropy)
    inputs = torch.randn(8, 3, 12, 12, generator=generator)
    masks = torch.randint(4, (8, 12, 12), generator=generator)
    targets = torch.randn(8, 4, 12, 12, generator=generator) if is_dense else masks
    x, _ = selected(always(scale_factor=0.5), state, (inputs, targets))
    large = F.interpolate(to_module(state)(F.avg_pool2d(inputs, 2)), scale_factor=2, mode="bilinear")
    own = (large - targets).square() if is_dense else F.cross_entropy(large, targets, reduction="none")
    expected = choose_by_loss(state.rng("selective_backprop"), own.flatten(1).mean(1))
    assert torch.equal(x, inputs[expected])


# Errors


@pytest.mark.parametrize("loss", [losses.model_loss, nn.CrossEntropyLoss(), lambda outputs, targets: outputs.mean()])
def test_a_loss_without_losses_per_example_is_refused_at_init(loss):
    state = make_state(loss=loss)
    with pytest.raises(TypeError, match="losses per example"):
        compose(loop_events, [selective_backprop()]).init(state)
    with pytest.raises(TypeError, match="losses per example"):
        select_using_loss(random.key(0), *make_batch(), lambda x: x, loss)


def test_inputs_that_are_not_images_are_refused_in_the_first_batch():
    # The selection itself would start halfway through the run.
    step = compose(loop_events, [selective_backprop(scale_factor=0.5)])
    with pytest.raises(ValueError, match=r"shape \(10, 6\); use scale_factor=1"):
        step(step.init(make_state()), make_batch())
    with pytest.raises(ValueError, match=r"the input is a list; use scale_factor=1"):
        step(step.init(make_state(input_field=[0])), make_batch())


@pytest.mark.parametrize("keys", [{"input_field": "image"}, {"target_field": 2}, {"target_field": "label"}])
def test_keys_that_the_batch_lacks_are_refused_in_the_first_batch(keys):
    # The selection itself would start halfway through the run.
    step = compose(loop_events, [selective_backprop(**keys)])
    with pytest.raises(KeyError, match=f"no member {next(iter(keys.values()))!r}"):
        step(step.init(make_state()), make_batch())


def test_the_same_entries_of_per_example_lists_are_selected():
    inputs, targets = make_batch()
    names = [f"example {i}" for i in range(10)]
    batch = {"x": inputs, "y": targets, "name": names, "meta": {"id": tuple(range(10)), "set": "train"}}
    picked = selected(always(), make_state(input_field="x", target_field="y"), batch)
    rows = row_numbers(picked["x"], inputs)
    assert len(rows) == 5 and picked["name"] == [names[i] for i in rows]
    assert picked["meta"] == {"id": tuple(rows), "set": "train"}
    assert batch["name"] is names and len(names) == 10


def test_a_run_without_a_duration_is_refused_in_the_first_step():
    step = compose(loop_events, [selective_backprop()])
    state = step.init(make_state(duration=None))
    with pytest.raises(RuntimeError, match="selective_backprop: .*duration"):
        step(state, make_batch())


# The core


def identity_losses(outputs, targets, reduction="mean"):
    """Return the outputs as the losses."""
    del targets
    return outputs if reduction == "none" else outputs.mean()


@given(st.integers(1, 12), st.floats(0.01, 1), st.integers(0, 2**32))
def test_choice_is_a_sample_without_replacement_and_repeats_itself(num, keep, seed):
    example_losses = torch.randn(num, generator=torch.Generator().manual_seed(seed))
    kept = example_losses.clone()
    chosen = choose_by_loss(random.key(seed), example_losses, keep=keep)
    num_kept = int(keep * num + 1e-14)  # rounding errors remove no example
    assert chosen.shape == (max(1, num_kept),) and chosen.dtype == torch.int64
    assert len(set(chosen.tolist())) == len(chosen) and set(chosen.tolist()) <= set(range(num))
    assert torch.equal(chosen, choose_by_loss(random.key(seed), example_losses, keep=keep))
    assert torch.equal(example_losses, kept)


def test_inclusion_rises_with_the_rank():
    keys = random.split(random.key(3), 6000)
    example_losses = torch.tensor([0.4, 0.1, 0.8, 0.3, 0.7, 0.2, 0.6, 0.5])
    chosen = torch.func.vmap(lambda key: choose_by_loss(key, example_losses))(keys)
    assert chosen.shape == (6000, 4)
    counts = torch.bincount(chosen.flatten(), minlength=8) / 6000
    by_rank = counts[example_losses.argsort()]
    assert (by_rank.diff() > 0).all()
    expected = torch.tensor([0.10, 0.26, 0.39, 0.49, 0.59, 0.68, 0.72, 0.77])
    # Rounded to two places, and a standard error of 0.0065 at most.
    torch.testing.assert_close(by_rank, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75])
def test_first_draw_follows_the_law_of_the_ranks(keep):
    keys = random.split(random.key(4), 6000)
    chosen = torch.func.vmap(lambda key: choose_by_loss(key, torch.arange(5.0), keep=keep))(keys)
    weights = torch.tensor([((rank + 0.5) / 5) ** (1 / keep - 1) for rank in range(5)])
    counts = torch.bincount(chosen[:, 0], minlength=5) / 6000
    torch.testing.assert_close(counts, weights / weights.sum(), atol=0.025, rtol=0)


def test_keeping_all_is_a_random_order():
    orders = {tuple(choose_by_loss(random.key(i), torch.arange(5.0), keep=1).tolist()) for i in range(20)}
    assert len(orders) > 10 and all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)


def test_only_the_order_of_the_losses_matters():
    example_losses = torch.tensor([3.0, -1.0, 0.5, 7.0, 2.0, 2.5])
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    chosen = choose_by_loss(random.key(1), example_losses)
    assert torch.equal(choose_by_loss(random.key(1), example_losses.exp()), chosen)
    shuffled = choose_by_loss(random.key(1), example_losses[order])
    assert torch.equal(order[shuffled], chosen)


def test_equal_losses_and_extreme_shares_still_give_a_sample():
    tied = choose_by_loss(random.key(0), torch.zeros(9), keep=0.5)
    assert len(set(tied.tolist())) == 4
    # (r + 1/2) / N to the power of 9999 is 0 in double precision for each rank but the last.
    assert choose_by_loss(random.key(0), torch.tensor([5.0, 1.0]), keep=1e-4).tolist() == [0]


def test_nan_ranks_lowest_and_infinity_highest():
    strange = torch.tensor([1.0, float("nan"), float("inf"), 2.0, float("-inf")])
    ranked = torch.tensor([3.0, 1.0, 5.0, 4.0, 2.0])
    for seed in range(20):
        # NaN and -inf tie at the bottom, in the batch's order.
        chosen = choose_by_loss(random.key(seed), strange, keep=0.6)
        assert torch.equal(chosen, choose_by_loss(random.key(seed), ranked, keep=0.6))


@pytest.mark.parametrize("keep", [0.5, 0.75, 1.0])
@pytest.mark.parametrize(
    ("shape", "scale"),
    [((12, 6), 1.0), ((12, 3, 9, 8), 0.5), ((12, 3, 9, 8), 0.75), ((12, 3, 7), 0.5), ((12, 2, 4, 5, 6), 0.5)],
)
def test_rows_come_in_pairs_at_full_size(shape, scale, keep):
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(12)
    seen = []

    def forward_fn(x):
        seen.append(x.shape)
        return x.flatten(1)[:, :1].squeeze(1)

    x, y = select_using_loss(random.key(0), inputs, targets, forward_fn, identity_losses, keep=keep, scale_factor=scale)
    assert x.shape == (int(keep * 12), *shape[1:]) and torch.equal(x, inputs[y])
    assert seen == [(*shape[:2], *[int(size * scale) for size in shape[2:]])]


def test_shrinking_is_linear_interpolation():
    inputs = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    seen = []
    for images in (inputs, (inputs * 40 + 128).clamp(0, 255).to(torch.uint8)):
        select_using_loss(
            random.key(0),
            images,
            torch.zeros(4),
            lambda x: seen.append(x) or x.float().flatten(1).mean(1),
            identity_losses,
            scale_factor=0.5,
        )
    # Half the size: each pixel is the mean of four.
    torch.testing.assert_close(seen[0], F.avg_pool2d(inputs, 2))
    assert seen[1].dtype == torch.uint8


def test_no_gradient_flows_through_the_choice():
    weight = torch.tensor(2.0, requires_grad=True)
    inputs = torch.arange(6.0, requires_grad=True)
    recorded = []

    def forward_fn(x):
        recorded.append(x * weight)
        return recorded[-1]

    x, _ = select_using_loss(random.key(0), inputs, torch.zeros(6), forward_fn, identity_losses)
    assert not recorded[0].requires_grad
    x.sum().backward()  # the rows themselves remain in the caller's graph
    assert weight.grad is None and inputs.grad is not None and inputs.grad.sum() == 3
