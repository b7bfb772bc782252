"""Focal losses against torchvision's formula, and sums over classes in plain PyTorch."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import purecompose as pc
from purecompose import algorithms as alg, compose, loop_events, losses
from purecompose.losses import BinaryFocal, Focal, Mixture
from tests.helpers import make_batch, make_mlp


def torchvisions(inputs: Tensor, targets: Tensor, alpha: float, gamma: float) -> Tensor:
    """Return the formula of `torchvision.ops.sigmoid_focal_loss`."""
    p = inputs.sigmoid()
    p_t = p * targets + (1 - p) * (1 - targets)
    loss = F.binary_cross_entropy_with_logits(inputs, targets, reduction="none") * (1 - p_t) ** gamma
    return loss * (alpha * targets + (1 - alpha) * (1 - targets)) if alpha >= 0 else loss


@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (0.9, 0.5), (None, 2.0), (None, 0.0)])
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 3, 4)])
def test_the_binary_loss_is_that_of_torchvision(alpha, gamma, shape):
    outputs = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    targets = torch.rand(shape, dtype=torch.float64).round()
    expected = torchvisions(outputs, targets, -1 if alpha is None else alpha, gamma)
    found = BinaryFocal(gamma, alpha)(outputs, targets, "none")
    torch.testing.assert_close(found, expected)
    pair = [torch.autograd.grad(loss.mean(), outputs)[0] for loss in (found, expected)]
    torch.testing.assert_close(*pair)
    torch.testing.assert_close(BinaryFocal(gamma, alpha)(outputs, targets), expected.mean())


def test_the_binary_loss_is_torchvisions_own():
    ops = pytest.importorskip("torchvision.ops")
    outputs, targets = torch.randn(8, 3), torch.rand(8, 3).round()
    torch.testing.assert_close(losses.binary_focal(outputs, targets, "none"), ops.sigmoid_focal_loss(outputs, targets))
    indices = torch.tensor([0, 2, 1, 0, 2, -1, 1, 0])  # no class at all in the sixth
    dense = F.one_hot(indices.clamp(min=0), 3) * (indices >= 0)[:, None]
    expected = ops.sigmoid_focal_loss(outputs, dense.float(), reduction="mean")
    torch.testing.assert_close(losses.binary_focal(outputs, indices), expected)


@pytest.mark.parametrize("alpha", [None, [0.2, 1.0, 3.0]])
@pytest.mark.parametrize("rest", [(), (5,)])
def test_the_loss_of_classes_damps_the_probable_ones(alpha, rest):
    outputs, targets = torch.randn(7, 3, *rest, dtype=torch.float64), torch.randint(3, (7, *rest))
    targets[2] = -100
    rows, indices = outputs.movedim(1, -1).reshape(-1, 3).softmax(1), targets.flatten().tolist()
    weights = alpha or [1.0] * 3
    expected = [-weights[c] * (1 - row[c]) ** 2 * math.log(row[c]) for row, c in zip(rows, indices) if c >= 0]  # noqa: B905
    mean = torch.stack(expected).mean()
    torch.testing.assert_close(Focal(alpha=alpha)(outputs, targets), mean)
    torch.testing.assert_close(Focal(alpha=alpha)(outputs, losses.one_hot(targets, outputs)), mean)
    plain = F.cross_entropy(outputs, targets)
    torch.testing.assert_close(Focal(0.0)(outputs, targets), plain)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_binary_targets_may_be_integers_or_bools(dtype):
    outputs, targets = torch.randn(4, 3), torch.rand(4, 3).round()
    torch.testing.assert_close(BinaryFocal()(outputs, targets.to(dtype)), BinaryFocal()(outputs, targets))


def test_gradients_stay_finite_where_a_class_is_certain():
    for loss in (Focal(0.5), BinaryFocal(0.5)):
        outputs = torch.tensor([[300.0, 0.0], [-300.0, 300.0]], requires_grad=True)
        targets = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        (grad,) = torch.autograd.grad(loss(outputs, targets), outputs)
        assert grad.isfinite().all()


@pytest.mark.parametrize("loss", [Focal(alpha=[1.0, 2.0, 0.5]), losses.binary_focal], ids=["classes", "binary"])
def test_mixed_targets_interpolate_and_slices_add_up(loss):
    outputs, indices = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    order, share = torch.tensor([1, 2, 3, 4, 5, 0]), 0.3
    expected = (1 - share) * loss(outputs, indices) + share * loss(outputs, indices[order])
    for interpolate in (False, True):
        mixture = Mixture.of(indices).mixed_with(order, share, interpolate)
        torch.testing.assert_close(losses.evaluate_loss(loss, outputs, mixture), expected)
    start = pc.State.create(make_mlp(dtype=torch.float64), loss=loss, optimizer=pc.optim.sgd(0.1), duration="4ba")
    batch, methods = make_batch(1, 12, dtype=torch.float64), [alg.mixup(0.2), alg.label_smoothing(0.1)]
    batch[1][3] = -100 if isinstance(loss, Focal) else 1
    steps: list[Any] = [compose(loop_events, methods, microbatches=k) for k in (1, 5)]
    steps.append(pc.compile(steps[0], backend="eager", donate=False, quiet=True))
    ends = [step(step.init(start), batch) for step in steps]
    for end in ends[1:]:
        torch.testing.assert_close(end.params, ends[0].params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Focal(-1.0), "gamma"),
        (lambda: Focal(alpha=[1.0, -2.0]), r"alpha\[1\]"),
        (lambda: BinaryFocal(alpha=2.0), "alpha"),
        (lambda: losses.focal(torch.zeros(2, 1), torch.zeros(2).long()), "at least 2 classes"),
        (lambda: Focal(alpha=[1.0])(torch.zeros(2, 3), torch.zeros(2).long()), "one for each of the 3 classes"),
        (lambda: losses.focal(torch.zeros(2, 3), torch.zeros(2).long(), "max"), "reduction"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
