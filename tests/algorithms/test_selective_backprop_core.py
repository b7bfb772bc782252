"""The functional cores of selective backprop; the algorithm in a step is in test_selective_backprop."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

from purecompose import random
from purecompose.algorithms._selective_backprop import choose_by_loss, select_using_loss


def identity_losses(outputs, targets, reduction="mean"):
    """Return the outputs as the losses."""
    del targets
    return outputs if reduction == "none" else outputs.mean()


@given(st.integers(1, 12), st.floats(0.01, 1), st.integers(0, 2**32))
def test_choice_is_a_sample_without_replacement_and_repeats_itself(num, keep, seed):
    example_losses = torch.randn(num, generator=torch.Generator().manual_seed(seed))
    kept = example_losses.clone()
    chosen = choose_by_loss(random.key(seed), example_losses, keep=keep)
    num_kept = int(keep * num + 1e-14)  # rounding errors remove no example
    assert chosen.shape == (max(1, num_kept),) and chosen.dtype == torch.int64
    assert len(set(chosen.tolist())) == len(chosen) and set(chosen.tolist()) <= set(range(num))
    assert torch.equal(chosen, choose_by_loss(random.key(seed), example_losses, keep=keep))
    assert torch.equal(example_losses, kept)


def test_inclusion_rises_with_the_rank():
    keys = random.split(random.key(3), 6000)
    example_losses = torch.tensor([0.4, 0.1, 0.8, 0.3, 0.7, 0.2, 0.6, 0.5])
    chosen = torch.func.vmap(lambda key: choose_by_loss(key, example_losses))(keys)
    assert chosen.shape == (6000, 4)
    counts = torch.bincount(chosen.flatten(), minlength=8) / 6000
    by_rank = counts[example_losses.argsort()]
    assert (by_rank.diff() > 0).all()
    expected = torch.tensor([0.10, 0.26, 0.39, 0.49, 0.59, 0.68, 0.72, 0.77])
    # Rounded to two places, and a standard error of 0.0065 at most.
    torch.testing.assert_close(by_rank, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75])
def test_first_draw_follows_the_law_of_the_ranks(keep):
    keys = random.split(random.key(4), 6000)
    chosen = torch.func.vmap(lambda key: choose_by_loss(key, torch.arange(5.0), keep=keep))(keys)
    weights = torch.tensor([((rank + 0.5) / 5) ** (1 / keep - 1) for rank in range(5)])
    counts = torch.bincount(chosen[:, 0], minlength=5) / 6000
    torch.testing.assert_close(counts, weights / weights.sum(), atol=0.025, rtol=0)


def test_keeping_all_is_a_random_order():
    orders = {tuple(choose_by_loss(random.key(i), torch.arange(5.0), keep=1).tolist()) for i in range(20)}
    assert len(orders) > 10 and all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)


def test_only_the_order_of_the_losses_matters():
    example_losses = torch.tensor([3.0, -1.0, 0.5, 7.0, 2.0, 2.5])
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    chosen = choose_by_loss(random.key(1), example_losses)
    assert torch.equal(choose_by_loss(random.key(1), example_losses.exp()), chosen)
    shuffled = choose_by_loss(random.key(1), example_losses[order])
    assert torch.equal(order[shuffled], chosen)


def test_equal_losses_and_extreme_shares_still_give_a_sample():
    tied = choose_by_loss(random.key(0), torch.zeros(9), keep=0.5)
    assert len(set(tied.tolist())) == 4
    # (r + 1/2) / N to the power of 9999 is 0 in double precision for each rank but the last.
    assert choose_by_loss(random.key(0), torch.tensor([5.0, 1.0]), keep=1e-4).tolist() == [0]


def test_nan_ranks_lowest_and_infinity_highest():
    strange = torch.tensor([1.0, float("nan"), float("inf"), 2.0, float("-inf")])
    ranked = torch.tensor([3.0, 1.0, 5.0, 4.0, 2.0])
    for seed in range(20):
        # NaN and -inf tie at the bottom, in the batch's order.
        chosen = choose_by_loss(random.key(seed), strange, keep=0.6)
        assert torch.equal(chosen, choose_by_loss(random.key(seed), ranked, keep=0.6))


@pytest.mark.parametrize("keep", [0.5, 0.75, 1.0])
@pytest.mark.parametrize(
    ("shape", "scale"),
    [((12, 6), 1.0), ((12, 3, 9, 8), 0.5), ((12, 3, 9, 8), 0.75), ((12, 3, 7), 0.5), ((12, 2, 4, 5, 6), 0.5)],
)
def test_rows_come_in_pairs_at_full_size(shape, scale, keep):
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(12)
    seen = []

    def forward_fn(x):
        seen.append(x.shape)
        return x.flatten(1)[:, :1].squeeze(1)

    x, y = select_using_loss(random.key(0), inputs, targets, forward_fn, identity_losses, keep=keep, scale_factor=scale)
    assert x.shape == (int(keep * 12), *shape[1:]) and torch.equal(x, inputs[y])
    assert seen == [(*shape[:2], *[int(size * scale) for size in shape[2:]])]


def test_shrinking_is_linear_interpolation():
    inputs = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    seen = []
    for images in (inputs, (inputs * 40 + 128).clamp(0, 255).to(torch.uint8)):
        select_using_loss(
            random.key(0),
            images,
            torch.zeros(4),
            lambda x: seen.append(x) or x.float().flatten(1).mean(1),
            identity_losses,
            scale_factor=0.5,
        )
    # Half the size: each pixel is the mean of four.
    torch.testing.assert_close(seen[0], F.avg_pool2d(inputs, 2))
    assert seen[1].dtype == torch.uint8


def test_no_gradient_flows_through_the_choice():
    weight = torch.tensor(2.0, requires_grad=True)
    inputs = torch.arange(6.0, requires_grad=True)
    recorded = []

    def forward_fn(x):
        recorded.append(x * weight)
        return recorded[-1]

    x, _ = select_using_loss(random.key(0), inputs, torch.zeros(6), forward_fn, identity_losses)
    assert not recorded[0].requires_grad
    x.sum().backward()  # the rows themselves remain in the caller's graph
    assert weight.grad is None and inputs.grad is not None and inputs.grad.sum() == 3
