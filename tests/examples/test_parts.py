"""What the programs of the gallery are made of, against definitions."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import purecompose as pc
from examples import batch_by_noise, distillation, graphs, lora, maml, pcgrad, ppo, segmentation, simclr, translation
from purecompose import Event, State, losses, optim, tree
from purecompose.algorithms._measurements import NoiseScale
from tests.examples.plain_loops import run
from tests.helpers import assert_close


def test_views_are_images_shifted_one_by_one():
    images = torch.arange(3 * 64.0).view(3, 1, 8, 8)
    shifts = pc.random.randint(pc.random.key(0), (3, 2, 2), 0, 3)
    for views, image, both in zip(simclr.shifted(images, shifts), images, shifts.tolist(), strict=True):
        padded = F.pad(image, (1, 1, 1, 1))
        assert torch.equal(views, torch.stack([padded[:, row : row + 8, column : column + 8] for row, column in both]))


def test_adaptation_is_one_gradient_step_on_each_task():
    torch.manual_seed(0)
    net = maml.Adapted().double()
    (x, y, places), values = maml.sine_waves(pc.random.Rng(pc.random.key(0)), torch.float64, number=3)
    outer = []
    for task in range(3):
        params = dict(net.net.named_parameters())
        inner = F.mse_loss(net.net(x[task]), y[task])
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        adapted = {name: param - net.lr * grad for (name, param), grad in zip(params.items(), grads, strict=True)}
        outer.append(F.mse_loss(functional_call(net.net, adapted, places[task]), values[task]))
    expected = torch.autograd.grad(torch.stack(outer).mean(), list(net.parameters()))
    found = torch.autograd.grad(F.mse_loss(net(x, y, places), values), list(net.parameters()))
    torch.testing.assert_close(found, expected)


def test_adapters_alone_are_trained_and_remembered():
    pytest.importorskip("transformers", reason="transformers is not installed")
    _, state, _ = lora.make()
    assert all(name.endswith((".down", ".up")) for name in state.context.trainable)
    assert {*state.opt_state["exp_avg"]} == {*state.context.trainable}


def test_parts_of_a_batch_of_graphs_are_graphs_of_their_own():
    batch = graphs.graphs(0, torch.float64)
    torch.manual_seed(0)
    net = graphs.GraphNetwork().double()
    cut = torch.cat([net(graphs.part(batch, start, start + 16)) for start in range(0, 64, 16)])
    torch.testing.assert_close(cut, net(batch))


def test_words_are_reversed_behind_a_start_mark_and_before_an_end_mark():
    batch = translation.words(0)
    rows = zip(*(batch[name].tolist() for name in ("word", "given", "labels")), strict=True)
    for word, given, labels in rows:
        letters = [letter for letter in word if letter != translation.PADDING]
        padding = [translation.PADDING] * (translation.LONGEST - len(letters))
        assert labels == [*reversed(letters), translation.END, *padding]
        assert given == [translation.START, *reversed(letters), *padding]


def test_masks_are_flipped_with_their_images():
    images, masks = segmentation.scenes(0, torch.float64)
    is_flipped = torch.arange(16) % 3 == 0
    for found, given in zip(segmentation.flipped(images, masks, is_flipped), (images, masks), strict=True):
        assert torch.equal(found[is_flipped], given[is_flipped].flip(-1))
        assert torch.equal(found[~is_flipped], given[~is_flipped])


def test_advantages_are_discounted_sums_of_the_errors_of_the_values():
    """The definition of GAE: sum over l of (0.99 * 0.95)^l of the error at t + l, up to the end of the episode."""
    _, state, _ = ppo.make(torch.float64)
    carts = ppo.Carts(torch.float64)
    places, _, _, scaled, returns = carts(state)
    values = torch.cat([ppo.split(state.forward(places))[1], ppo.split(state.forward(carts.places))[1]]).view(65, 16)
    # A cart that falls begins again near the middle, which no cart reaches from the edge in one step of 0.02 s.
    following = torch.cat([places.view(64, 16, 4)[1:], carts.places[None]])
    ends = (following - places.view(64, 16, 4))[..., 2].abs() > 0.1
    assert ends.any()
    is_followed = (~ends).double()
    errors = 1 + is_followed * 0.99 * values[1:] - values[:-1]
    for t in range(64):
        weights = torch.cat([torch.ones(1, 16), (is_followed[t:-1] * 0.99 * 0.95).cumprod(0)])
        torch.testing.assert_close(returns.view(64, 16)[t], values[t] + (weights * errors[t:]).sum(0))
    torch.testing.assert_close(torch.stack([scaled.mean() + 1, scaled.std()]), torch.ones(2, dtype=torch.float64))


def test_the_teacher_stands_still():
    step, start, batches = distillation.make()
    end = pc.fit(step, start, batches, duration="3ba")
    teacher = {name for name in start.params if name.startswith("teacher.")}
    assert tree.equal(end.buffers, start.buffers)
    assert all(torch.equal(end.params[name], start.params[name]) for name in teacher)
    assert teacher.isdisjoint(end.opt_state["exp_avg"])
    assert {*end.metrics} == {"loss/soft", "loss/hard"}


def test_gradients_of_tasks_agree_with_and_without_conflict():
    step, start, batches = pcgrad.make(torch.float64)
    states = list(pc.training(step, start, batches, duration="20ba"))
    assert {state.metrics["conflict"].item() for state in states} == {0.0, 1.0}
    assert_close(states[-1].params, run("pcgrad", 20), rtol=1e-9, atol=1e-9)


def test_tokens_double_when_the_noise_asks_for_it_first_by_longer_sequences_then_by_more():
    apply: Any = batch_by_noise.by_noise().apply
    state = State.create(nn.Linear(4, 4), loss=losses.cross_entropy, optimizer=optim.sgd(0.1))
    state = apply(Event.INIT, state)
    ids = torch.arange(32 * 64).view(32, 64)
    seen = []
    for rows in (7.0, 9.0, 17.0, 100.0, 100.0, 100.0, 100.0):  # critical batch sizes; at first 8 rows are used
        measured = NoiseScale(torch.tensor(1.0), torch.tensor(rows), torch.tensor(1.0))
        state = state.replace(batch=(ids, ids), slots={**state.slots, "gradient_noise_scale": measured})
        state = apply(Event.AFTER_DATALOADER, state)
        inputs, targets = state.batch
        assert torch.equal(inputs, ids[: len(inputs), : inputs.shape[1]]) and torch.equal(inputs, targets)
        weight = state.slots["gradient_noise_scale"].weight
        seen.append((*inputs.shape, weight.item()))
    assert seen == [(8, 8, 1), (8, 16, 0), (8, 32, 0), (8, 64, 0), (16, 64, 0), (32, 64, 0), (32, 64, 1)]
