"""The gradient noise scale: exact formulas, unbiased estimates, and no effect on training."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import Algorithm, State, compose, loop_events, losses, optim, tree
from purecompose.algorithms._around_updates import sam
from purecompose.algorithms._measurements import NoiseScale, critical_batch_size, estimate_noise, gradient_noise_scale
from purecompose.algorithms._optimizer_settings import gradient_clipping
from purecompose.algorithms._overflow import loss_scaling
from purecompose.algorithms._per_example_clipping import per_example_clipping
from purecompose.testing.tasks import make_task
from tests.algorithms import method_helpers as helpers


NAME = "gradient_noise_scale"
BATCH = helpers.make_batch()


def double(state: State) -> State:
    """Return the state in float64, including the initial optimizer state and loss."""
    return tree.map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, state)


def wide(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(member.double() if member.is_floating_point() else member for member in batch)


def measured(state: State, name: str = NAME) -> tuple[float, float, float]:
    """Return the critical batch size, |G|^2 and tr(Sigma), as reported."""
    size, squared_norm, trace = (
        float(state.metrics[f"{name}/{key}"]) for key in ("critical_batch_size", "squared_norm", "trace")
    )
    return size, squared_norm, trace


def stepped(batch: Any, *algorithms: Algorithm, decay: float = 0.95, state: State | None = None, **cut: Any) -> State:
    step = compose(loop_events, [gradient_noise_scale(decay), *algorithms], **cut)
    return step(step.init(double(helpers.make_state()) if state is None else state), batch)


def squared(net: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Return |g|^2 of the mean loss, computed only by torch."""
    net.zero_grad()
    nn.functional.cross_entropy(net(inputs), targets).backward()
    return sum(param.grad.square().sum().item() for param in net.parameters() if param.grad is not None)


# Formulas


def test_estimates_solve_the_two_equations():
    """|g_b|^2 = |G|^2 + tr(Sigma) / b holds for both sizes."""
    small, big = torch.tensor(7.0, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64)
    squared_norm, trace = estimate_noise(small, big, 4, 32)
    torch.testing.assert_close(squared_norm + trace / 4, small)
    torch.testing.assert_close(squared_norm + trace / 32, big)


def test_the_critical_batch_size_of_estimates_that_make_no_sense():
    squared_norm = torch.tensor([2.0, 0.0, -1.0, 2.0, math.nan])
    trace = torch.tensor([6.0, 6.0, 6.0, -6.0, 6.0])
    assert critical_batch_size(squared_norm, trace)[:4].tolist() == [3.0, math.inf, math.inf, 0.0]
    assert critical_batch_size(squared_norm, trace)[4].isnan()


@pytest.mark.parametrize("cut", [{"microbatches": 2}, {"microbatches": 3}, {"microbatch_size": 4}], ids=str)
def test_a_step_of_unequal_slices_is_the_papers_formula(cut):
    """For 10 = 5 + 5 or 4 + 3 + 3 examples, the small batch has size B / k and the mean norm weighted by examples."""
    net = pc.to_module(double(helpers.make_state()))
    inputs, targets = wide(BATCH)
    sizes = [5, 5] if cut.get("microbatches") == 2 else [4, 3, 3]
    parts = zip(inputs.split(sizes), targets.split(sizes), strict=True)
    small = sum(size / 10 * squared(net, *part) for size, part in zip(sizes, parts, strict=True))
    big, b = squared(net, inputs, targets), 10 / len(sizes)
    expected_norm = (10 * big - b * small) / (10 - b)
    expected_trace = (small - big) / (1 / b - 1 / 10)
    found, squared_norm, trace = measured(stepped((inputs, targets), **cut))
    assert squared_norm == pytest.approx(expected_norm, rel=1e-10)
    assert trace == pytest.approx(expected_trace, rel=1e-10)
    expected = expected_trace / expected_norm if expected_norm > 0 else math.inf
    assert found == pytest.approx(max(expected, 0.0), rel=1e-9)


@pytest.mark.parametrize("num", [4, 9, 10])
def test_a_step_without_slices_finds_the_same_as_two_slices(num):
    net = pc.to_module(double(helpers.make_state()))
    inputs, targets = batch = wide(helpers.make_batch(num=num))
    half = -(-num // 2)
    first, second = squared(net, inputs[:half], targets[:half]), squared(net, inputs[half:], targets[half:])
    small, big = (half * first + (num - half) * second) / num, squared(net, inputs, targets)
    _, *found = measured(stepped(batch))
    expected = (num * big - num / 2 * small) / (num / 2), (small - big) / (2 / num - 1 / num)
    assert found == pytest.approx(expected, rel=1e-9)
    assert measured(stepped(batch)) == pytest.approx(measured(stepped(batch, microbatches=2)), rel=1e-9)


def test_parts_weigh_as_their_terms_do():
    """A language model's loss is a mean over tokens; the reference uses torch, with w_i the parts' shares of tokens."""
    ids = torch.randint(7, (6, 5), generator=torch.Generator().manual_seed(3))
    labels = ids.roll(-1, 1)
    labels[0, 1:], labels[1, 2:] = -100, -100  # 1 + 2 + 5 tokens in the first part, 15 in the second
    net = make_task("tokens", tied=True).make_net(0).double()
    state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1))
    total, squares = 23, []
    for rows in (slice(0, 3), slice(3, 6), slice(0, 6)):
        net.zero_grad()
        nn.functional.cross_entropy(net(ids[rows]), labels[rows]).backward()
        squares.append(sum(p.grad.square().sum().item() for p in net.parameters() if p.grad is not None))
    weights = torch.tensor([8 / total, 15 / total], dtype=torch.float64)
    small = (weights * torch.tensor(squares[:2], dtype=torch.float64)).sum()
    sizes = 1 / (weights / 3).sum(), 1 / (weights.square() / 3).sum()
    expected = estimate_noise(small, torch.tensor(squares[2], dtype=torch.float64), *sizes)
    _, *found = measured(stepped((ids, labels), state=state, microbatches=2))
    assert found == pytest.approx([value.item() for value in expected], rel=1e-9)


@pytest.mark.parametrize("decay", [0, 0.5, 0.9])
def test_averages_have_no_bias_and_are_divided_last(decay):
    step = compose(loop_events, [gradient_noise_scale(decay), gradient_noise_scale(0, name="last")], microbatches=2)
    state, seen = step.init(double(helpers.make_state())), []
    for seed in range(5):
        inputs, targets = wide(BATCH)
        state = step(state, (inputs + 0.3 * seed, targets))
        seen.append(measured(state, "last")[1:])
        weights = [decay ** (seed - i) for i in range(seed + 1)]
        means = [
            sum(weight * one[i] for weight, one in zip(weights, seen, strict=True)) / sum(weights) for i in range(2)
        ]
        found, *averages = measured(state)
        assert averages == pytest.approx(means, rel=1e-9)
        assert found == pytest.approx(means[1] / means[0] if means[0] > 0 else math.inf)


# Statistics


def linear_state(dim: int) -> State:
    """Return a state whose loss is the mean of w x_i, so that example i's gradient is x_i for all weights."""
    net = nn.Linear(dim, 1, bias=False).double()
    return State.create(net, loss=lambda outputs, targets, reduction="mean": outputs.mean(), optimizer=optim.sgd(0.1))


@pytest.mark.parametrize("cut", [{"microbatches": 2}, {"microbatches": 4}, {"microbatch_size": 7}, {}], ids=str)
def test_the_mean_of_estimates_is_the_truth(cut):
    """For gradients with mean G and covariance diag(s^2), the mean over 400 steps is within 4 standard errors."""
    dim, num, steps = 5, 18, 400
    mean = torch.linspace(-0.4, 0.8, dim, dtype=torch.float64)
    deviation = torch.linspace(0.5, 1.5, dim, dtype=torch.float64)
    step = compose(loop_events, [gradient_noise_scale(0)], **cut)
    state, found = step.init(linear_state(dim)), []
    for index in range(steps):
        draws = pc.random.normal(pc.random.fold_in(pc.random.key(5), index), (num, dim), dtype=torch.float64)
        state = step(state, (mean + deviation * draws, torch.zeros(num)))
        found.append(measured(state)[1:])
    estimates = torch.tensor(found, dtype=torch.float64)
    truth = torch.stack([mean.square().sum(), deviation.square().sum()])
    error = estimates.std(0) / steps**0.5
    assert ((estimates.mean(0) - truth).abs() < 4 * error).all(), (estimates.mean(0), truth, error)
    assert (error < 0.1 * truth).all()  # makes the comparison meaningful


# Training and other methods


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "other",
    [sam(0.5), gradient_clipping("norm", 1e-3), per_example_clipping(1e-3), loss_scaling()],
    ids=lambda a: a.name,
)
def test_it_sees_gradients_before_others_change_them(other, is_first):
    both = [gradient_noise_scale(), other] if is_first else [other, gradient_noise_scale()]
    step = compose(loop_events, both, microbatches=2)
    found = step(step.init(double(helpers.make_state())), wide(BATCH))
    assert measured(found) == pytest.approx(measured(stepped(wide(BATCH), microbatches=2)), rel=1e-9)


def test_the_recomputed_half_has_the_same_draws():
    """With dropout, a step without slices still finds the same as two slices."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    state = helpers.make_state(net)
    whole, sliced = stepped(wide(BATCH), state=state), stepped(wide(BATCH), state=state, microbatches=2)
    assert measured(whole) == pytest.approx(measured(sliced), rel=1e-9)


@pytest.mark.parametrize("cut", [{}, {"microbatches": 2}], ids=str)
def test_a_step_that_is_not_finite_does_not_change_the_averages(cut):
    step = compose(loop_events, [gradient_noise_scale(0.5)], **cut)
    before = step(step.init(helpers.make_state()), BATCH)
    after = step(before, (BATCH[0] * torch.inf, BATCH[1]))
    assert tree.equal(after.slots, before.slots) and measured(after) == measured(before)


@pytest.mark.parametrize(("num", "cut"), [(3, {}), (1, {"microbatches": 2}), (4, {"microbatch_size": 8})], ids=str)
def test_without_two_batch_sizes_the_estimate_is_nan(num, cut):
    after = stepped(helpers.make_batch(num=num), state=helpers.make_state(), **cut)
    assert all(math.isnan(value) for value in measured(after))
    assert tree.equal(after.slots[NAME], NoiseScale(*[torch.zeros(())] * 3))


def test_one_slice_with_counted_terms_gives_no_estimate():
    """Both batch sizes are 21, computed in float32 as 20.999998 and 21."""
    inputs, targets = helpers.make_batch(num=42)
    targets = targets.index_fill(0, torch.arange(11, 42), -100)
    after = stepped((inputs, targets), state=helpers.make_state(), microbatches=2)
    assert all(math.isnan(value) for value in measured(after))


def test_a_slice_without_counted_terms_is_ignored():
    inputs, targets = wide(helpers.make_batch(num=9))
    targets = targets.index_fill(0, torch.arange(3, 6), -100)
    kept = [*range(3), *range(6, 9)]
    found = stepped((inputs, targets), microbatches=3)
    # Computed from the rest, without weight on the slice: two parts of three examples, each with share one half.
    expected = stepped((inputs[kept], targets[kept]), microbatches=2)
    assert measured(found) == pytest.approx(measured(expected), rel=1e-9)
