import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

from purecompose import losses
from purecompose.algorithms._targets import label_smoothing, smooth_labels
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import compose
from purecompose.loop import loop_events
from purecompose.losses.targets import Mixture
from purecompose.schedule import hparam
from purecompose.surgery.weights import to_module
from purecompose.time.predicates import NEVER, on
from tests.algorithms.method_helpers import LR, make_batch, make_state, one_step


SMOOTHINGS = [0.0, 0.1, 0.5, 0.9, 1.0]


def spy(seen, *events):
    """Return an algorithm that records the targets and whether there is a slot."""
    return Algorithm("spy", on(*events), lambda event, state: seen.append((event, state.targets)) or state)


def hand_loss(state, batch, smoothing):
    """Return (1 - a) CE(y) + a mean_c(-log p_c), averaged over the counted examples."""
    inputs, targets = batch
    logp = torch.log_softmax(to_module(state)(inputs), dim=1)
    kept = targets >= 0
    plain = -logp[torch.arange(len(targets)), targets.clamp(min=0)]
    return ((1 - smoothing) * plain - smoothing * logp.mean(1))[kept].mean()


# The functional core


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("num_classes", [2, 10])
@pytest.mark.parametrize("rest", [(), (5, 5)])
def test_values_from_indices_and_from_one_hot(smoothing, num_classes, rest):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, num_classes, *rest, generator=generator)
    indices = torch.randint(0, num_classes, (6, *rest), generator=generator)
    hot = torch.movedim(F.one_hot(indices, num_classes), -1, 1)
    kept = indices.clone(), hot.clone()
    smoothed = smooth_labels(logits, indices, smoothing)
    assert torch.equal(smoothed, smooth_labels(logits, hot, smoothing))
    assert torch.equal(smoothed, smooth_labels(logits, hot.float(), smoothing))
    assert torch.equal(indices, kept[0]) and torch.equal(hot, kept[1])

    assert smoothed.dtype == torch.float32 and smoothed.shape == logits.shape
    torch.testing.assert_close(smoothed, (1 - smoothing) * hot.float() + smoothing / num_classes)
    torch.testing.assert_close(smoothed.sum(1), torch.ones(6, *rest))
    torch.testing.assert_close(smoothed.min(), torch.tensor(smoothing / num_classes))
    torch.testing.assert_close(smoothed.max(), torch.tensor(1 - smoothing + smoothing / num_classes))
    if smoothing == 0:
        assert torch.equal(smoothed, hot.float())
    if smoothing < 1:
        assert torch.equal(smoothed.argmax(1), indices)


@given(st.floats(0, 1), st.floats(0.01, 0.99))
def test_is_affine_in_the_target(smoothing, share):
    logits = torch.zeros(3, 4)
    a, b = torch.softmax(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), -1)
    mixed = smooth_labels(logits, share * a + (1 - share) * b, smoothing)
    parts = share * smooth_labels(logits, a, smoothing) + (1 - share) * smooth_labels(logits, b, smoothing)
    torch.testing.assert_close(mixed, parts)


def test_ignored_positions_stay_zero():
    logits = torch.zeros(4, 3, 2)
    indices = torch.tensor([[0, -100], [-1, 2], [1, 1], [-100, -100]])
    smoothed = smooth_labels(logits, indices, 0.3)
    assert (smoothed.movedim(1, -1)[indices < 0] == 0).all()
    torch.testing.assert_close(smoothed.sum(1), (indices >= 0).float())
    assert torch.equal(smooth_labels(logits, smooth_labels(logits, indices, 0.0), 0.3), smoothed)
    other = smooth_labels(logits, indices, 0.3, ignore_index=1)
    assert (other[2] == 0).all() and torch.equal(other[:2], smoothed[:2])


def test_dtype_is_float32_or_wider():
    targets = torch.tensor([0, 1])
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert smooth_labels(torch.zeros(2, 3, dtype=dtype), targets).dtype == expected
    half = torch.eye(3, dtype=torch.bfloat16)
    assert smooth_labels(torch.zeros(3, 3), half).dtype == torch.float32
    assert smooth_labels(torch.zeros(3, 3), half.double()).dtype == torch.float64


# In a step


@pytest.mark.parametrize("smoothing", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("ignored", [0, 3])
def test_step_is_the_closed_form(smoothing, ignored):
    state, (inputs, targets) = make_state(), make_batch()
    targets[:ignored] = -100
    net = to_module(state)
    after = one_step([label_smoothing(smoothing)], state, (inputs, targets))
    torch.testing.assert_close(after.loss, hand_loss(state, (inputs, targets), smoothing).detach())
    logp = torch.log_softmax(net(inputs), 1)[targets >= 0]
    soft = (1 - smoothing) * F.one_hot(targets[targets >= 0], 4) + smoothing / 4
    grads = torch.autograd.grad(-(soft * logp).sum(1).mean(), list(net.parameters()))
    for (name, param), grad in zip(net.named_parameters(), grads, strict=True):
        torch.testing.assert_close(after.params[name], (param - LR * grad).detach())


def test_the_index_to_ignore_is_the_losss():
    state = make_state(loss=losses.CrossEntropy(ignore_index=3))
    inputs, targets = make_batch()
    assert (targets == 3).any()
    after = one_step([label_smoothing(0.2)], state, (inputs, targets))
    masked = torch.where(targets == 3, -100, targets)
    torch.testing.assert_close(after.loss, hand_loss(state, (inputs, masked), 0.2).detach())


@pytest.mark.parametrize(
    "loss",
    [
        losses.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        lambda outputs, targets: F.mse_loss(outputs, targets),
    ],
)
def test_an_example_without_a_label_is_not_an_ignored_one(loss):
    """In a loss of several labels a row of zeros is a target, and is smoothed as the others."""
    state, (inputs, _) = make_state(loss=loss), make_batch()
    labels = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]).repeat(len(inputs) // 2, 1)
    after = one_step([label_smoothing(0.2)], state, (inputs, labels))
    torch.testing.assert_close(after.loss, loss(to_module(state)(inputs), 0.8 * labels + 0.2 / 4).detach())


@pytest.mark.parametrize("form", ["indices", "dense", "interpolated"])
def test_a_smoothed_mixture_is_the_sum_of_smoothed_terms(form):
    seen = []
    inputs, targets = make_batch()
    targets[:3] = -100  # some examples count, and their partners do not
    given = F.one_hot(targets.clamp(min=0), 4) * (targets >= 0).unsqueeze(1) if form == "dense" else targets
    mixture = Mixture.of(given).mixed_with(torch.arange(10).roll(2), 0.3, form == "interpolated")
    one_step([label_smoothing(0.2), spy(seen, "before_loss")], make_state(), (inputs, mixture), passes=())
    outputs = torch.zeros(10, 4)
    terms = [smooth_labels(outputs, term, 0.2) for term in mixture.targets]
    expected = sum(weight.unsqueeze(1) * term for weight, term in zip(mixture.weights, terms, strict=True))
    torch.testing.assert_close(seen[0][1].soft(outputs), expected)


def test_an_hparam_of_zero_is_a_point_with_a_slope():
    step = compose(loop_events, [label_smoothing(hparam("smoothing", 0.0))])
    # A learned strength may pass through 0, which must not make the method absent; only the number 0 is neutral.
    assert label_smoothing(hparam("smoothing", 0.0)).match != NEVER
    assert label_smoothing(0 * hparam("smoothing", 0.1)).match != NEVER
    state, batch = step.init(make_state()), make_batch()
    plain = compose(loop_events)(make_state(), batch)
    torch.testing.assert_close(step(state, batch).params, plain.params)

    def loss_of(smoothing):
        loss = step(state.replace(hparams={"smoothing": smoothing}), batch).loss
        assert loss is not None
        return loss

    slope = (hand_loss(state, batch, 1.0) - hand_loss(state, batch, 0.0)).detach()
    assert slope.abs() > 0.01
    torch.testing.assert_close(torch.func.grad(loss_of)(torch.tensor(0.0)), slope)


# Errors


def test_a_loss_inside_the_model_is_refused_at_init():
    with pytest.raises(TypeError, match="label_smoothing: .*ModelLoss"):
        compose(loop_events, [label_smoothing()]).init(make_state(loss=losses.model_loss))


def read_second(batch):
    return batch[1]


def test_read_only_keys_are_refused():
    with pytest.raises(TypeError, match="target_field=.*is read-only.*getter, setter"):
        label_smoothing(0.1, target_field=read_second)
    step = compose(loop_events, [label_smoothing(0.1)])
    with pytest.raises(TypeError, match="can only be read; give a pair"):
        step(step.init(make_state(target_field=read_second)), make_batch())


@pytest.mark.parametrize("loss", [losses.mse, nn.HuberLoss(), functools.partial(F.l1_loss, reduction="mean")])
def test_losses_of_values_are_refused_by_name(loss):
    with pytest.raises(TypeError, match=r"label_smoothing: expected a loss of classes.* got .*(Mean|Huber|l1)"):
        compose(loop_events, [label_smoothing(0.1)]).init(make_state(loss=loss))
