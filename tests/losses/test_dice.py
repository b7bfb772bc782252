"""The Dice loss and metric against sums over sets, and divided into batches."""

import pytest
import torch

import purecompose as pc
from purecompose import compose, loop_events, losses, metrics, optim
from tests.helpers import assert_close


OUTPUTS = torch.randn(6, 3, 4, 5, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(0, 3, (6, 4, 5), generator=torch.Generator().manual_seed(1))


def test_the_loss_is_the_formula_for_each_example_and_class():
    targets = TARGETS.clone()
    targets[0, :2] = -100
    probabilities, expected = OUTPUTS.softmax(1), []
    for example, labels in zip(probabilities, targets, strict=True):
        coefficients = []
        for number in range(3):
            p, t = example[number][labels != -100], (labels == number)[labels != -100].float()
            coefficients.append((2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1))
        expected.append(1 - sum(coefficients) / 3)
    each = torch.stack(expected)
    torch.testing.assert_close(losses.dice(OUTPUTS, targets, reduction="none"), each)
    torch.testing.assert_close(losses.dice(OUTPUTS, targets), each.mean())
    torch.testing.assert_close(
        losses.dice(OUTPUTS, losses.one_hot(targets.where(targets >= 0, -1), OUTPUTS)), each.mean()
    )


def test_a_perfect_prediction_has_loss_0_and_smooth_is_checked():
    sure = 100.0 * losses.one_hot(TARGETS, OUTPUTS)
    assert losses.dice(sure, TARGETS) == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ValueError, match="smooth"):
        losses.Dice(smooth=0.0)


def test_microbatches_equal_the_batch():
    net = torch.nn.Conv2d(3, 3, 3, padding=1).double()
    state = pc.State.create(net, loss=losses.dice, optimizer=optim.sgd(0.1), key=0)
    batch, step = (OUTPUTS.double(), TARGETS), compose(loop_events)
    assert_close(step.replace(microbatches=4)(state, batch).params, step(state, batch).params)


def test_the_metric_counts_sets_over_all_batches():
    metric, predicted = metrics.dice(4), OUTPUTS.argmax(1)
    outputs = torch.cat([OUTPUTS, torch.full((6, 1, 4, 5), -9.0)], 1)  # the last class never occurs
    acc = metric.init()
    for part in (slice(0, 1), slice(1, 6)):
        acc = metric.update(acc, outputs[part], TARGETS[part])
    sets = [(predicted == number, TARGETS == number) for number in range(3)]
    expected = [2 * (found & wanted).sum() / (found.sum() + wanted.sum()) for found, wanted in sets]
    torch.testing.assert_close(metric.compute(acc), torch.stack(expected).mean())
    with pytest.raises(ValueError, match="expected 4 classes"):
        metric.update(acc, OUTPUTS, TARGETS)
