import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

from purecompose import losses, random, tree
from purecompose.algorithms._mixup import mixup
from purecompose.algorithms._selective_backprop import choose_by_loss, select_using_loss, selective_backprop
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import compose
from purecompose.core.loop import loop_events
from purecompose.core.passes import DEFAULT_PASSES
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
