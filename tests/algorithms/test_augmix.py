"""AugMix: the core against a manual loop, its bounds, the factory."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from purecompose import State, compose, loop_events, losses, optim, random
from purecompose.algorithms import augmix
from purecompose.algorithms._image_operations import _chains
from purecompose.algorithms.images import SETS, Primitive, Scale
from purecompose.algorithms.images.batches import one_operation_each
from purecompose.functional import augmix_batch
from purecompose.schedule import linear
from tests.algorithms.method_helpers import make_images


SEEDS = st.integers(0, 2**64 - 1)
KEEP = Primitive("keep", lambda levels, amount: levels, lambda strength: strength.share)
COUNT = Primitive("count", lambda levels, amount: levels + 1, lambda strength: strength.share)
"""Add one level, so that the result counts the operations."""


@given(SEEDS, st.integers(1, 2), st.integers(1, 3), st.floats(0.2, 3))
def test_it_is_the_mixture_of_the_chains(seed: int, depth: int, width: int, alpha: float) -> None:
    """The reference computes in float64, image by image and chain by chain, from the documented draws."""
    batch, rng = make_images(5), random.Rng(random.key(seed))
    chains = batch.repeat(width, 1, 1, 1)
    for step in range(depth):
        chains = one_operation_each(rng.named(step), chains, Scale.of(batch), SETS["all"], 3.0, num_groups=width)
    gammas = random.gamma(rng.named("weights"), alpha, (5, width), dtype=torch.float64)
    shares = random.beta(rng.named("share"), alpha, alpha, (5,)).double()
    expected = torch.empty(batch.shape, dtype=torch.float64)
    for i in range(5):
        weights = gammas[i] / gammas[i].sum()
        mixture = sum(weights[w] * chains[w * 5 + i].double() for w in range(width))
        expected[i] = (1 - shares[i]) * batch[i] + shares[i] * mixture
    got = augmix_batch(rng, batch, depth=depth, width=width, alpha=alpha)
    assert (got - expected).abs().max() <= 0.5 + 1e-3
    floats = augmix_batch(rng, batch.double() / 255, depth=1, width=1, augmentation_set=(KEEP,))
    assert torch.equal(floats, batch.double() / 255)


@given(SEEDS, st.integers(1, 4))
def test_where_operations_keep_a_pixel_so_does_the_mixture(seed: int, width: int) -> None:
    batch = make_images(dtype=torch.float32) * 2.3 - 0.7
    assert torch.equal(augmix_batch(random.key(seed), batch, width=width, augmentation_set=(KEEP,)), batch)
    assert torch.equal(augmix_batch(random.key(seed), batch, severity=0, width=width), batch)


@given(SEEDS, st.integers(1, 3), st.sampled_from([torch.float16, torch.float32, torch.float64]))
def test_floats_stay_in_their_range_and_between_the_image_and_the_end_of_its_chain(
    seed: int, depth: int, dtype: torch.dtype
) -> None:
    batch, rng = make_images(dtype=dtype), random.Rng(random.key(seed))
    scale = Scale.of(batch, (0.0, 1.0))
    chain = scale.stored(batch)
    for step in range(depth):
        chain = one_operation_each(rng.named(step), chain, scale, SETS["original"], 7.0)
    end = chain / 255
    settings = {"severity": 7, "width": 1, "augmentation_set": "original", "value_range": (0, 1)}
    changed = augmix_batch(rng, batch, depth=depth, **settings)
    assert changed.dtype == dtype and changed.min() >= 0 and changed.max() <= 1
    slack = 2 * torch.finfo(dtype).eps + 1e-6
    assert (changed >= torch.minimum(batch.to(end), end) - slack).all()
    assert (changed <= torch.maximum(batch.to(end), end) + slack).all()


def test_with_no_share_of_the_chains_it_is_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purecompose.random.beta", lambda rng, a, b, shape: torch.zeros(shape))
    for dtype in (torch.uint8, torch.float32):
        assert torch.equal(augmix_batch(random.key(0), make_images(dtype=dtype), severity=10), make_images(dtype=dtype))


@given(SEEDS, st.integers(1, 4))
def test_random_depths_are_one_two_or_three_and_spread_evenly(seed: int, width: int) -> None:
    batch = torch.zeros(7, 1, 2, 2, dtype=torch.uint8)
    chains = _chains(random.Rng(random.key(seed)), batch, Scale.of(batch), (COUNT,), 3.0, -1, width)
    for depths in torch.stack(chains)[:, :, 0, 0, 0]:
        counts = depths.bincount(minlength=4)
        assert counts[0] == 0 and counts[1:].sum() == 7
        assert counts[1:].max() - counts[1:].min() <= 1


def test_each_chain_may_have_any_depth() -> None:
    batch = torch.zeros(900, 1, 1, 1, dtype=torch.uint8)
    first, second = (
        chain.flatten().long()
        for chain in _chains(random.Rng(random.key(0)), batch, Scale.of(batch), (COUNT,), 3.0, -1, 2)
    )
    for chain in (first, second):
        assert (chain.bincount(minlength=4)[1:] - 300).abs().max() < 60
    # The chains of one image are independent: all nine pairs of depths are equally frequent.
    pairs = ((first - 1) * 3 + second - 1).bincount(minlength=9)
    assert (pairs - 100).abs().max() < 40


def test_the_chains_of_one_image_draw_operations_apart() -> None:
    marks = tuple(
        Primitive(str(mark), lambda levels, amount, mark=mark: torch.full_like(levels, mark), lambda s: s.share)
        for mark in range(4)
    )
    image = torch.zeros(1, 1, 1, 1, dtype=torch.uint8)
    scale, num_equal = Scale.of(image), 0
    for seed in range(400):
        one, two = _chains(random.Rng(random.key(seed)), image, scale, marks, 3.0, 1, 2)
        num_equal += int(one.item() == two.item())
    assert 70 < num_equal < 130


def test_a_step_trains_on_the_images_of_the_core_with_its_key() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), key=5, duration="9ba")
    batch = make_images(dtype=torch.float32), torch.arange(12) % 3
    changed = augmix_batch(state.rng("augmix"), batch[0], severity=5, width=2)
    step = compose(loop_events, [augmix(5, width=2)])
    by_method, by_hand = step(step.init(state), batch), compose(loop_events)(state, (changed, batch[1]))
    assert all(torch.equal(by_method.params[name], by_hand.params[name]) for name in state.params)
    rising = compose(loop_events, [augmix(10 * linear(0.0, 1.0))])  # the severity is still 0 there
    plain, first = compose(loop_events)(state, batch), rising(rising.init(state), batch)
    assert all(torch.equal(first.params[name], plain.params[name]) for name in first.params)
