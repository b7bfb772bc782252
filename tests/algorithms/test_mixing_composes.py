"""MixUp, CutMix and label smoothing together are the closed form, in every order, in float64."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose import losses, random
from purecompose.algorithms._cutmix import cutmix, cutmix_box
from purecompose.algorithms._targets import label_smoothing, mixup
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import compose
from purecompose.core.passes import DEFAULT_PASSES
from purecompose.core.state import State
from purecompose.loop import loop_events
from purecompose.surgery.weights import to_module
from tests.algorithms.method_helpers import LR, make_state
from tests.sampling import one_in


NUM, CLASSES, SIZE, SMOOTHING = 6, 3, 5, 0.1
NAMES = ("mixup", "cutmix", "label_smoothing")
ORDERS = [order for length in (2, 3) for order in itertools.permutations(NAMES, length)]

Linear = Callable[[Tensor], Tensor]


def make_algorithms(order: Sequence[str], *, per_example: bool = False, **settings: Any) -> list[Algorithm]:
    """Return the methods in this order at AFTER_DATALOADER when there are no passes."""
    made = {
        "mixup": mixup(0.7, per_example=per_example, **settings),
        "cutmix": cutmix(**settings),
        "label_smoothing": label_smoothing(SMOOTHING),
    }
    return [made[name] for name in order]


def image_state(key: int = 7, net: nn.Module | None = None, **settings: Any) -> State:
    state = make_state(net or nn.Sequential(nn.Flatten(), nn.Linear(2 * SIZE * SIZE, CLASSES)).double(), **settings)
    return state.replace(key=random.key(key))


def make_batch(kind: str = "index") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(NUM, 2, SIZE, SIZE, generator=generator, dtype=torch.float64)
    rest = (SIZE, SIZE) if kind == "maps" else ()
    targets = torch.randint(0, CLASSES, (NUM, *rest), generator=generator)
    if kind == "soft":
        return images, torch.randn(NUM, CLASSES, generator=generator, dtype=torch.float64).softmax(1)
    return images, targets


def dense(targets: Tensor) -> Tensor:
    return targets if targets.is_floating_point() else F.one_hot(targets, CLASSES).movedim(-1, 1).double()


def mixings(state: State, per_example: bool) -> dict[str, tuple[Linear, Linear]]:
    """Return each method's draws as matrices (N, N) of the examples' weights in images and in targets."""
    one = torch.eye(NUM, dtype=torch.float64)
    rng = state.rng("mixup")
    place = rng.named("mixing").per_example(torch.arange(NUM)) if per_example else rng.named("mixing")
    share = random.beta(place, 0.7, 0.7, (NUM,) if per_example else ()).double()
    share = torch.minimum(share, 1 - share).expand(NUM)
    order = random.permutation(rng.named("permutation"), NUM)
    matrix = (1 - share)[:, None] * one + share[:, None] * one[order]

    rng = state.rng("cutmix")
    top, left, bottom, right = cutmix_box(rng, SIZE, SIZE).tolist()
    partners = random.permutation(rng.named("permutation"), NUM).tolist()
    by_pixel = one[..., None, None].repeat(1, 1, SIZE, SIZE)
    by_pixel[:, :, top:bottom, left:right] = one[partners, :, None, None]
    by_area = by_pixel.mean((2, 3))

    def in_maps(values: Tensor) -> Tensor:
        return torch.einsum("ijhw,jchw->ichw", by_pixel, values)

    def mixed(values: Tensor) -> Tensor:
        return torch.einsum("ij,j...->i...", matrix, values)

    def by_share(values: Tensor) -> Tensor:
        return in_maps(values) if values.ndim == 4 else by_area @ values

    return {"mixup": (mixed, mixed), "cutmix": (in_maps, by_share)}


def closed_form(state: State, order: Sequence[str], batch: Any, per_example: bool = False) -> tuple[Tensor, Any]:
    """Return the loss and the parameters after one manual step of gradient descent."""
    images, soft = batch[0], dense(batch[1])
    drawn = mixings(state, per_example)
    for name in order:
        if name in drawn:
            in_images, in_targets = drawn[name]
            images, soft = in_images(images), in_targets(soft)
    if "label_smoothing" in order:
        soft = (1 - SMOOTHING) * soft + SMOOTHING / CLASSES
    net = to_module(state)
    loss = -(soft * torch.log_softmax(net(images), dim=1)).sum(1).mean()
    grads = torch.autograd.grad(loss, list(net.parameters()))
    moved = {n: (p - LR * g).detach() for (n, p), g in zip(net.named_parameters(), grads, strict=True)}
    return loss.detach(), moved


def assert_is(after: State, expected: tuple[Tensor, Any]) -> None:
    # Weights are drawn in float32, and for index targets one minus a weight is rounded to float32.
    torch.testing.assert_close((after.loss, after.params), expected, rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("order", one_in(4, ORDERS, " ".join))
@pytest.mark.parametrize("kind", ["index", "soft"])
@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_every_order_is_the_closed_form(order, kind, interpolate_loss):
    batch = make_batch(kind)
    for per_example in (False, True):
        algorithms = make_algorithms(order, interpolate_loss=interpolate_loss, per_example=per_example)
        step = compose(loop_events, algorithms, passes=())
        state = step.init(image_state())
        assert_is(step(state, batch), closed_form(state, order, batch, per_example))
        # The usual passes reverse the order after an event: the last one mixes first.
        step = compose(loop_events, algorithms, passes=DEFAULT_PASSES)
        assert_is(step(state, batch), closed_form(state, order[::-1], batch, per_example))


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
@pytest.mark.parametrize("per_example", [False, True])
def test_every_order_is_the_closed_form_for_maps_of_classes_too(order, per_example):
    state, batch = image_state(net=nn.Conv2d(2, CLASSES, 3, padding=1).double()), make_batch("maps")
    step = compose(loop_events, make_algorithms(order, per_example=per_example), passes=())
    state = step.init(state)
    assert_is(step(state, batch), closed_form(state, order, batch, per_example))


@pytest.mark.parametrize("order", [("mixup", "cutmix"), ("cutmix", "mixup")], ids=" ".join)
def test_if_one_of_two_methods_mixes_losses_both_do(order):
    """The loss is quadratic in its targets, so that mean and mean square of the targets mix linearly."""
    images, targets = make_batch("soft")
    for by_mixup, by_cutmix in ((True, False), (False, True)):
        made = {"mixup": mixup(0.7, interpolate_loss=by_mixup), "cutmix": cutmix(interpolate_loss=by_cutmix)}
        step = compose(loop_events, [made[name] for name in order], passes=())
        state = step.init(image_state(loss=losses.mse))
        after = step(state, (images, targets))
        inputs, first, second = images, targets, targets**2
        for name in order:
            in_images, in_targets = mixings(state, False)[name]
            inputs, first, second = in_images(inputs), in_targets(first), in_targets(second)
        outputs = to_module(state)(inputs)
        expected = (outputs**2 - 2 * outputs * first + second).mean().detach()
        torch.testing.assert_close(after.loss, expected, rtol=1e-6, atol=1e-7)
        # Mixed targets have a different loss.
        assert not torch.isclose(expected, (outputs - first).square().mean(), rtol=1e-3)


class SeveralOutputs(nn.Module):
    """A network that returns class scores twice, beside other numbers."""

    def __init__(self, classify: nn.Module) -> None:
        super().__init__()
        self.classify = classify

    def forward(self, images: Tensor) -> dict[str, Any]:
        scores = self.classify(images)
        return {"features": images.mean(1), "heads": (2 * scores, scores), "norm": scores.norm()}


def of_several(outputs: dict[str, Any], targets: Tensor, reduction: str = "mean") -> Tensor:
    return losses.cross_entropy(outputs["heads"][1], targets, reduction)


@pytest.mark.parametrize("order", ORDERS[-2:])
@pytest.mark.parametrize("kind", ["index", "soft"])
@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_a_network_may_have_several_outputs(order, kind, interpolate_loss):
    net, ends = nn.Sequential(nn.Flatten(), nn.Linear(2 * SIZE * SIZE, CLASSES)).double(), []
    for state in (image_state(net=net), image_state(net=SeveralOutputs(net), loss=of_several)):
        step = compose(loop_events, make_algorithms(order, interpolate_loss=interpolate_loss), passes=())
        ends.append(step(step.init(state), make_batch(kind)))
    torch.testing.assert_close(ends[0].loss, ends[1].loss)
    torch.testing.assert_close(list(ends[0].params.values()), list(ends[1].params.values()))
