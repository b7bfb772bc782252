"""MixUp: the core against closed forms, the algorithm in a step, and shares that are drawn for each example."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from scipy import stats

from purecompose import losses, random, tree
from purecompose.algorithms._targets import mixup, mixup_batch
from purecompose.core.compose import compose
from purecompose.loop import loop_events
from purecompose.random import Rng
from purecompose.schedule import hparam, linear
from purecompose.surgery.weights import to_module
from tests.algorithms.method_helpers import LR, make_batch, make_state, spy


SHAPES = st.tuples(st.integers(2, 9), st.integers(1, 4)) | st.tuples(st.integers(2, 9), *[st.integers(1, 3)] * 3)
SEEDS = st.integers(0, 2**64 - 1)


def drawn_by(state, name="mixup", alpha=0.2, num=10):
    """Return the share and the order that a step from this state draws under the documented names."""
    rng = state.rng(name)
    share = random.beta(rng.named("mixing"), alpha, alpha)
    return min(share.item(), 1 - share.item()), random.permutation(rng.named("permutation"), num)


def dense(targets):
    return targets if targets.is_floating_point() else F.one_hot(targets, 4).float()


def imperative_step(state, batch, share, order, smoothing=0.0):
    """Take one manual step of gradient descent on the closed form."""
    inputs, targets = batch
    mixed = (1 - share) * inputs + share * inputs[order]
    soft = (1 - share) * dense(targets) + share * dense(targets)[order]
    soft = (1 - smoothing) * soft + smoothing / 4
    net = to_module(state)
    loss = -(soft * torch.log_softmax(net(mixed), dim=1)).sum(1).mean()
    grads = torch.autograd.grad(loss, list(net.parameters()))
    moved = {n: p - LR * g for (n, p), g in zip(net.named_parameters(), grads, strict=True)}
    return loss.detach(), {name: p.detach() for name, p in moved.items()}


# The functional core


@given(SEEDS, SHAPES, st.floats(0.05, 4))
def test_mixes_element_by_element_and_does_not_change_its_arguments(seed, shape, alpha):
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(seed % 2**32))
    targets = torch.arange(shape[0]) % 3
    before = inputs.clone(), targets.clone()
    mixed, mixture = mixup_batch(random.key(seed), inputs, targets, alpha=alpha)
    again, _ = mixup_batch(random.key(seed), inputs, targets, alpha=alpha)
    assert torch.equal(mixed, again)
    assert torch.equal(inputs, before[0]) and torch.equal(targets, before[1])

    share = mixture.weights[1]
    assert (share == share[0]).all() and 0 <= share[0] <= 0.5
    order = random.permutation(random.Rng(random.key(seed)).named("permutation"), shape[0])
    assert torch.equal(mixture.targets[0], targets) and torch.equal(mixture.targets[1], targets[order])
    partner = inputs[order]
    torch.testing.assert_close(mixed, (1 - share[0]) * inputs + share[0] * partner)
    assert (mixed >= torch.minimum(inputs, partner)).all() and (mixed <= torch.maximum(inputs, partner)).all()
    torch.testing.assert_close(mixed.mean(0), inputs.mean(0), atol=1e-5, rtol=1e-5)


@given(SEEDS, st.floats(0, 1))
def test_soft_targets_are_distributions_with_the_mean_of_the_labels(seed, mixing):
    targets = torch.tensor([0, 1, 1, 3, 2])
    _, mixture = mixup_batch(random.key(seed), torch.zeros(5, 2), targets, mixing=mixing)
    soft = mixture.soft(torch.zeros(5, 4))
    assert (soft >= 0).all()
    torch.testing.assert_close(soft.sum(1), torch.ones(5))
    torch.testing.assert_close(soft.mean(0), F.one_hot(targets, 4).float().mean(0))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_share_follows_the_smaller_part_of_a_beta_variable(alpha):
    keys = random.split(random.key(5), 600)
    _, mixture = torch.func.vmap(lambda key: mixup_batch(key, torch.zeros(2, 1), torch.arange(2), alpha=alpha))(keys)
    # P(min(z, 1 - z) <= x) = 2 P(z <= x) for x up to 1/2, by symmetry.
    result = stats.kstest(mixture.weights[1][:, 0].double().numpy(), lambda x: 2 * stats.beta.cdf(x, alpha, alpha))
    assert result.pvalue > 0.01


@pytest.mark.parametrize("alpha", [0, 0.0, torch.tensor(0.0)])
def test_alpha_of_zero_is_the_identity(alpha):
    inputs, targets = make_batch()
    mixed, mixture = mixup_batch(random.key(0), inputs, targets, alpha=alpha)
    assert torch.equal(mixed, inputs)
    assert torch.equal(mixture.soft(torch.zeros(10, 4)), F.one_hot(targets, 4).float())


def test_a_share_of_one_is_exactly_the_partner():
    inputs, targets = make_batch()
    order = torch.arange(10).flip(0)
    mixed, mixture = mixup_batch(None, inputs, targets, mixing=1.0, indices=order)
    assert torch.equal(mixed, inputs[order])
    assert torch.equal(mixture.soft(torch.zeros(10, 4)), F.one_hot(targets[order], 4).float())


def test_integers_become_floats_and_half_precision_is_kept():
    targets, order = torch.tensor([0, 1]), torch.tensor([1, 0])
    whole = torch.tensor([[0], [200]], dtype=torch.uint8)
    mixed, _ = mixup_batch(None, whole, targets, mixing=0.25, indices=order)
    assert mixed.dtype == torch.float32 and mixed.tolist() == [[50.0], [150.0]]
    half, _ = mixup_batch(None, whole.to(torch.bfloat16), targets, mixing=0.25, indices=order)
    assert half.dtype == torch.bfloat16 and half.tolist() == [[50.0], [150.0]]
    double, _ = mixup_batch(None, whole.double(), targets, mixing=torch.tensor(0.25), indices=order)
    assert double.dtype == torch.float64 and double.tolist() == [[50.0], [150.0]]


def test_half_precision_mixes_without_rounding_the_share():
    inputs = torch.tensor([[0.0], [129.0]], dtype=torch.bfloat16)
    share = torch.tensor(1 / 401)  # rounded to bfloat16 first, it would give 0.3203
    mixed, mixture = mixup_batch(None, inputs, torch.arange(2), mixing=share, indices=torch.tensor([1, 0]))
    assert mixed[0] == (share * 129).to(torch.bfloat16) and mixture.weights[1][0] == share


# In a step


@pytest.mark.parametrize("kind", ["index", "soft"])
@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_step_is_the_closed_form(kind, interpolate_loss):
    step = compose(loop_events, [mixup(0.4, interpolate_loss=interpolate_loss)])
    state, batch = step.init(make_state()), make_batch(kind)
    after = step(state, batch)
    loss, params = imperative_step(state, batch, *drawn_by(state, alpha=0.4))
    torch.testing.assert_close(after.loss, loss)
    torch.testing.assert_close(after.params, params)


def test_interpolated_losses_differ_from_soft_targets_for_nonlinear_losses():
    order, inputs = torch.tensor([1, 0]), torch.zeros(2, 1)
    targets = torch.tensor([[0.0], [2.0]])
    for interpolate_loss, expected in ((True, 0.75 * 0 + 0.25 * 4), (False, 0.5**2)):
        _, mixture = mixup_batch(None, inputs, targets, mixing=0.25, indices=order, interpolate_loss=interpolate_loss)
        outputs = torch.tensor([[0.0], [2.0]])
        assert losses.evaluate_loss(losses.mse, outputs, mixture).item() == pytest.approx(expected)


def test_members_of_dict_batches_are_named_by_keys():
    seen = []
    inputs, targets = make_batch()
    batch = {"x": inputs, "y": targets, "extra": torch.ones(10, 2)}
    state = make_state(input_field="x", target_field="y")
    step = compose(loop_events, [mixup(), spy(seen, "before_forward")])
    after = step(step.init(state), batch)
    _, params = imperative_step(state, (inputs, targets), *drawn_by(state))
    torch.testing.assert_close(after.params, params)
    assert torch.equal(seen[0]["extra"], batch["extra"]) and torch.equal(batch["x"], inputs)

    explicit = compose(loop_events, [mixup(input_field="x", target_field="y")])
    assert tree.equal(explicit(explicit.init(state), batch).params, after.params)
    swapped = compose(loop_events, [mixup(input_field="extra"), spy(seen, "before_forward")])
    swapped(swapped.init(state), {**batch, "extra": inputs})
    assert torch.equal(seen[-1]["x"], inputs) and not torch.equal(seen[-1]["extra"], inputs)


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_the_mixed_input_of_an_autoencoder_is_its_own_target(form):
    def as_batch(inputs):
        return {"tensor": inputs, "tuple": (inputs,), "dict": {"x": inputs}}[form]

    inputs, field = make_batch()[0], "x" if form == "dict" else 0
    state = make_state(torch.nn.Linear(6, 6), loss=F.mse_loss, input_field=field, target_field=field)
    step = compose(loop_events, [mixup()], microbatches=2)
    share, order = drawn_by(state)
    expected = compose(loop_events)(state, as_batch((1 - share) * inputs + share * inputs[order]))
    torch.testing.assert_close(step(step.init(state), as_batch(inputs)).params, expected.params)
    with pytest.raises(ValueError, match="interpolate_loss=True: expected a target besides the input"):
        compose(loop_events, [mixup(interpolate_loss=True)]).init(state)


def test_alpha_may_be_an_hparam_or_a_schedule():
    batch = make_batch()
    fixed = compose(loop_events, [mixup(0.4)])
    named = compose(loop_events, [mixup(hparam("alpha", 0.4))])
    expected = fixed(fixed.init(make_state()), batch)
    state = named.init(make_state())
    torch.testing.assert_close(named(state, batch).params, expected.params)

    off = named(state.replace(hparams={"alpha": torch.tensor(0.0)}), batch)
    torch.testing.assert_close(off.params, compose(loop_events)(make_state(), batch).params)
    moving = compose(loop_events, [mixup(0.4 * linear(1.0, 0.5))])
    torch.testing.assert_close(moving(moving.init(make_state()), batch).params, expected.params)


# Errors


def test_a_loss_inside_the_model_is_refused_at_init():
    state = make_state(loss=losses.model_loss)
    with pytest.raises(TypeError, match="my_mixup: .*ModelLoss"):
        compose(loop_events, [mixup(name="my_mixup")]).init(state)


def test_interpolating_needs_losses_per_example():
    state = make_state(loss=lambda outputs, targets: F.cross_entropy(outputs, targets))
    soft = compose(loop_events, [mixup()])
    expected = soft(soft.init(make_state()), make_batch())
    torch.testing.assert_close(soft(soft.init(state), make_batch()).loss, expected.loss)
    with pytest.raises(TypeError, match="reduction"):
        compose(loop_events, [mixup(interpolate_loss=True)]).init(state)


def test_a_step_names_the_member_that_does_not_fit():
    step = compose(loop_events, [mixup()])
    state = step.init(make_state(input_field=[0]))
    with pytest.raises(TypeError, match="mixup mixes one tensor") as caught:
        step(state, make_batch())
    assert any("mixup at" in note for note in caught.value.__notes__)
    with pytest.raises(KeyError, match="no member 'picture'"):
        wrong = compose(loop_events, [mixup(input_field="picture")])
        wrong(wrong.init(make_state()), {"x": torch.zeros(2, 2)})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_step_refuses_what_looks_like_token_ids(dtype):
    ids = torch.zeros(2, 3, dtype=dtype)
    net = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Flatten(), torch.nn.Linear(12, 4))
    step = compose(loop_events, [mixup(name="mine")])
    with pytest.raises(TypeError, match=r"mine: the inputs are int(32|64)\[2, 3\], as token ids.*embeddings inside"):
        step(step.init(make_state(net)), (ids, torch.tensor([0, 1])))


def test_complex_inputs_keep_both_parts():
    inputs = torch.randn(4, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    same, _ = mixup_batch(None, inputs, torch.arange(4), mixing=0.0, indices=torch.arange(4).flip(0))
    assert torch.equal(same, inputs)
    mixed, _ = mixup_batch(None, inputs, torch.arange(4), mixing=0.25, indices=torch.arange(4).flip(0))
    torch.testing.assert_close(mixed, 0.75 * inputs + 0.25 * inputs.flip(0))


# The core


def drawn(rng, alpha, num):
    """Return the shares and the order, drawn under the documented names."""
    z = random.beta(rng.named("mixing").per_example(torch.arange(num)), alpha, alpha, (num,))
    return torch.minimum(z, 1 - z), random.permutation(rng.named("permutation"), num)


@given(SEEDS, st.integers(2, 9), st.sampled_from([(), (3,), (2, 3, 1)]), st.floats(0.05, 4))
def test_each_row_has_its_own_share(seed, num, rest, alpha):
    inputs = torch.randn(num, *rest, generator=torch.Generator().manual_seed(seed % 2**32))
    targets = torch.arange(num) % 3
    mixed, mixture = mixup_batch(random.key(seed), inputs, targets, alpha=alpha, per_example=True)
    shares, order = drawn(Rng(random.key(seed)), alpha, num)
    assert torch.equal(mixture.weights[1], shares) and torch.equal(mixture.targets[1], targets[order])
    assert ((0 <= shares) & (shares <= 0.5)).all()
    for i, (share, partner) in enumerate(zip(shares.tolist(), order.tolist(), strict=True)):
        torch.testing.assert_close(mixed[i], (1 - share) * inputs[i] + share * inputs[partner])
    soft = mixture.soft(torch.zeros(num, 3))
    assert (soft >= 0).all()
    torch.testing.assert_close(soft.sum(1), torch.ones(num))


@given(SEEDS)
def test_a_longer_batch_begins_with_the_same_shares(seed):
    shares = [
        mixup_batch(random.key(seed), torch.zeros(num, 1), torch.arange(num), per_example=True)[1].weights[1]
        for num in (3, 7)
    ]
    assert torch.equal(shares[0], shares[1][:3])


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_follow_the_smaller_part_of_a_beta_variable(alpha):
    _, mixture = mixup_batch(random.key(5), torch.zeros(600, 1), torch.arange(600), alpha=alpha, per_example=True)
    result = stats.kstest(mixture.weights[1].double().numpy(), lambda x: 2 * stats.beta.cdf(x, alpha, alpha))
    assert result.pvalue > 0.01


@given(
    st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4),
    st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]),
)
def test_given_shares_are_taken(shares, dtype):
    inputs, order = torch.tensor([[0.0], [40.0], [80.0], [200.0]]).to(dtype), torch.tensor([1, 2, 3, 0])
    mixed, mixture = mixup_batch(None, inputs, torch.arange(4), mixing=torch.tensor(shares), indices=order)
    expected = [(1 - t) * a + t * b for t, a, b in zip(shares, [0, 40, 80, 200], [40, 80, 200, 0], strict=True)]
    rounded = torch.tensor(expected)[:, None].to(mixed.dtype)
    torch.testing.assert_close(mixed, rounded, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-4)
    assert mixed.dtype is (dtype if dtype.is_floating_point else torch.float32)
    assert torch.equal(mixture.weights[1], torch.tensor(shares))


@pytest.mark.parametrize("kind", ["index", "soft"])
@given(seed=SEEDS, interpolate_loss=st.booleans(), microbatches=st.sampled_from([1, 3, 10]))
def test_a_step_is_the_closed_form(kind, seed, interpolate_loss, microbatches):
    step = compose(
        loop_events, [mixup(0.4, interpolate_loss=interpolate_loss, per_example=True)], microbatches=microbatches
    )
    (inputs, targets), state = make_batch(kind), step.init(make_state().replace(key=random.key(seed)))
    shares, order = drawn(state.rng("mixup"), 0.4, 10)
    share = shares[:, None]
    soft = targets if kind == "soft" else F.one_hot(targets, 4).float()
    soft = (1 - share) * soft + share * soft[order]
    net = to_module(state)
    loss = -(soft * torch.log_softmax(net((1 - share) * inputs + share * inputs[order]), 1)).sum(1).mean()
    grads = torch.autograd.grad(loss, list(net.parameters()))
    after = step(state, (inputs, targets))
    torch.testing.assert_close(after.loss, loss.detach())
    for (name, param), grad in zip(net.named_parameters(), grads, strict=True):
        torch.testing.assert_close(after.params[name], (param - LR * grad).detach())
