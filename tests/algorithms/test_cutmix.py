"""The algorithm in a step; the core is in test_cutmix_core.py, other methods beside it in test_mixing_composes.py."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

from purecompose import losses, random, tree
from purecompose.algorithms._cutmix import cutmix, cutmix_batch
from purecompose.core.compose import compose
from purecompose.core.loop import loop_events
from purecompose.core.state import State
from purecompose.losses.targets import Mixture
from purecompose.surgery.weights import to_module
from tests.algorithms.method_helpers import LR, make_state, one_step


def image_state(net: nn.Module | None = None, **settings: Any) -> State:
    return make_state(net or nn.Sequential(nn.Flatten(), nn.Linear(2 * 6 * 6, 4)), **settings)


def image_batch(kind="index", num=8):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(num, 2, 6, 6, generator=generator)
    if kind == "soft":
        return images, torch.randn(num, 4, generator=generator).softmax(1)
    return images, torch.randint(0, 4, (num, 6, 6) if kind == "maps" else (num,), generator=generator)


def by_hand(state, batch, **settings):
    """Take one step on the images of `cutmix_batch` with the documented key, with soft targets made here."""
    images, targets = batch
    mixed, mixture = cutmix_batch(state.rng("cutmix"), images, targets, **settings)
    assert isinstance(mixture, Mixture)
    hot = [target if target.is_floating_point() else F.one_hot(target, 4).float() for target in mixture.targets]
    soft = sum(weight[:, None] * target for weight, target in zip(mixture.weights, hot, strict=True))
    net = to_module(state)
    loss = -(soft * torch.log_softmax(net(mixed), 1)).sum(1).mean()
    grads = torch.autograd.grad(loss, list(net.parameters()))
    moved = {n: (p - LR * g).detach() for (n, p), g in zip(net.named_parameters(), grads, strict=True)}
    return loss.detach(), moved


@pytest.mark.parametrize("kind", ["index", "soft"])
@given(
    alpha=st.floats(0.1, 3),
    interpolate_loss=st.booleans(),
    uniform_sampling=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_step_is_the_core_and_its_soft_targets(kind, alpha, interpolate_loss, uniform_sampling, seed):
    settings = {"uniform_sampling": uniform_sampling}
    state, batch = image_state().replace(key=random.key(seed)), image_batch(kind)
    after = one_step(cutmix(alpha, interpolate_loss=interpolate_loss, **settings), state, batch)
    loss, params = by_hand(state, batch, alpha=alpha, **settings)
    torch.testing.assert_close(after.loss, loss)
    torch.testing.assert_close(after.params, params)


def test_maps_are_trained_on_as_they_are_pasted():
    state, (images, masks) = image_state(nn.Conv2d(2, 4, 3, padding=1)), image_batch("maps")
    after = one_step(cutmix(), state, (images, masks))
    mixed, pasted = cutmix_batch(state.rng("cutmix"), images, masks)
    assert isinstance(pasted, torch.Tensor) and not torch.equal(pasted, masks)
    plain = compose(loop_events)(state, (mixed, pasted))
    assert tree.equal((after.params, after.loss), (plain.params, plain.loss))


def test_maps_have_no_losses_to_mix():
    step = compose(loop_events, [cutmix(interpolate_loss=True)])
    state = step.init(image_state(nn.Conv2d(2, 4, 3, padding=1)))
    with pytest.raises(ValueError, match="interpolate_loss=True: expected one target per image") as caught:
        step(state, image_batch("maps"))
    assert any("cutmix at" in note for note in caught.value.__notes__)


# Errors


def test_losses_without_support_for_mixtures_are_refused_at_init():
    with pytest.raises(TypeError, match="mine: .*ModelLoss"):
        compose(loop_events, [cutmix(name="mine")]).init(image_state(loss=losses.model_loss))
    state = image_state(loss=lambda outputs, targets: F.cross_entropy(outputs, targets))
    compose(loop_events, [cutmix()]).init(state)
    with pytest.raises(TypeError, match="reduction"):
        compose(loop_events, [cutmix(interpolate_loss=True)]).init(state)


def test_a_step_refuses_inputs_that_are_not_images():
    step = compose(loop_events, [cutmix(name="mine")])
    with pytest.raises(TypeError, match=r"mine: expected images, one tensor \(N, C, H, W\), got float32\[8, 72\]"):
        step(step.init(image_state()), (torch.zeros(8, 72), torch.zeros(8, dtype=torch.long)))
