"""Channels last: only strides change."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import purecompose as pc
from purecompose import State, compose, loop_events, losses, optim, tree
from purecompose.algorithms import channels_last, no_op_model, squeeze_excite
from purecompose.functional import to_channels_last
from tests.helpers import assert_close, assert_same


def make_state(optimizer: Any = None, net: nn.Module | None = None) -> State:
    torch.manual_seed(0)
    net = net or nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 6, 3, groups=6),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2),
    )  # fmt: skip
    optimizer = optimizer or pc.optim.sgd(0.1, momentum=0.9)
    return State.create(net, loss=pc.losses.cross_entropy, optimizer=optimizer, duration="8ba")


def make_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(2, (4,), generator=generator)


def images(state: State) -> list[torch.Tensor]:
    lasting = (state.params, state.buffers, state.opt_state)
    return [leaf for leaf in tree.leaves(lasting) if isinstance(leaf, torch.Tensor) and leaf.ndim == 4]


@given(st.lists(st.integers(1, 5), max_size=6))
def test_images_have_other_strides_and_the_same_values(shape):
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    moved = to_channels_last({"a": [tensor]})["a"][0]
    assert torch.equal(moved, tensor)
    if len(shape) != 4:
        assert moved is tensor
    elif min(shape[2:]) > 1:
        n, c, h, w = shape
        assert tensor.stride() == (c * h * w, h * w, w, 1) and moved.stride() == (c * h * w, 1, w * c, c)
    assert to_channels_last(moved) is moved


@pytest.mark.parametrize("optimizer", [pc.optim.sgd(0.1, momentum=0.9), pc.optim.adam(0.01)], ids=["sgd", "adam"])
def test_values_are_kept_and_the_format_lasts_through_steps(optimizer: Any):
    before = make_state(optimizer)
    copied, step = before.copy(), compose(loop_events, [channels_last()])
    after = step.init(before)
    assert_same(before, copied)
    for field in ("params", "buffers", "opt_state"):
        assert_same(getattr(after, field), getattr(before, field))
    assert images(after) and all(t.is_contiguous(memory_format=torch.channels_last) for t in images(after))
    assert after.params["0.weight"].stride() == (27, 1, 9, 3) and after.params["1.weight"] is before.params["1.weight"]
    plain = compose(loop_events)
    for seed in range(3):
        before, after = plain(before, make_batch(seed)), step(after, make_batch(seed))
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in images(after))
    assert_close(before.params, after.params)
    torch.testing.assert_close(before.forward(make_batch()[0]), after.forward(make_batch()[0]))


def test_it_comes_after_methods_that_change_the_model():
    methods = [channels_last(), no_op_model(), squeeze_excite(2, 4)]
    ordered = compose(loop_events, methods).order(methods, pc.Event.INIT)
    assert [algorithm.name for algorithm in ordered] == ["no_op_model", "squeeze_excite", "channels_last"]


def test_networks_without_images_are_warned_about_and_other_ranks_kept():
    net = nn.Sequential(nn.Conv3d(1, 2, 2), nn.Flatten(), nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="channels_last has no effect: it looked for tensors of four dimensions"):
        state = compose(loop_events, [channels_last()]).init(make_state(net=net))
    assert state.params["0.weight"].is_contiguous()


def test_a_single_example_is_traced_through_group_norm():
    torch.manual_seed(0)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(1, 4), nn.Conv2d(4, 4, 1), *head)
    state = State.create(net, loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1), duration="4ba")
    batch = torch.randn(2, 2, 6, 6), torch.tensor([0, 1])
    step = compose(loop_events, [channels_last()], microbatches=2)
    state = step.init(state)
    assert_close(pc.compile(step, backend="eager", quiet=True)(state, batch).params, step(state, batch).params)


def test_group_norms_behind_frozen_layers_and_of_images_have_gradients() -> None:
    """Torch's own backward pass crashes the process in this case."""
    frozen = [nn.Conv2d(2, 4, 3).requires_grad_(False), nn.GroupNorm(1, 4)]
    for first in (frozen, [nn.GroupNorm(1, 2), nn.Conv2d(2, 4, 3)]):
        net = nn.Sequential(*first, nn.Flatten(), nn.Linear(64, 3))
        step = compose(loop_events, [channels_last()])
        state = step.init(State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1)))
        images = torch.randn(3, 2, 6, 6).to(memory_format=torch.channels_last)
        after = step(state, (images, torch.tensor([0, 1, 2])))
        plain = compose(loop_events)(state, (images.contiguous(), torch.tensor([0, 1, 2])))
        torch.testing.assert_close(after.params, plain.params)
