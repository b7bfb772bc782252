"""Ghost batch normalisation: the layer against numpy, running statistics against their recursion, the surgery."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from purecompose import compose, loop_events
from purecompose.algorithms import ghost_batchnorm
from purecompose.nn.layers import GhostBatchNorm
from tests.algorithms.surgery_checks import (
    check_keeps_all,
    check_leaves,
    hooked,
    make_batch,
    make_state,
    operated,
    patched,
    trained,
)


NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SEEDS = st.integers(0, 99)
DIMS = st.sampled_from([1, 2, 3])
CHANNELS = 2


def drawn(seed: int, num: int, dims: int) -> Tensor:
    """Return inputs (num, 2, 3, ...) in float64."""
    shape = num, CHANNELS, *[3] * dims
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1


def norm_of(dims: int, seed: int = 0, **options: Any) -> Any:
    """Return a layer in float64, with weights and statistics other than the initial ones."""
    norm = NORMS[dims](CHANNELS, dtype=torch.float64, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*norm.parameters(), *norm.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(CHANNELS, generator=generator) + 0.5)
    return norm


def parts_of(num: int, size: int) -> list[slice]:
    """Return the slices of the parts, by division with remainder: the first ones have one more."""
    count = math.ceil(num / size)
    ends = np.cumsum([num // count + (index < num % count) for index in range(count)]).tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def by_hand(inputs: Tensor, size: int, norm: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the running mean and the running variance, computed in numpy."""
    parts = parts_of(len(inputs), size)
    mean, variance = norm.running_mean.numpy().copy(), norm.running_var.numpy().copy()
    weight, bias = norm.weight.detach().numpy(), norm.bias.detach().numpy()
    step, rows = norm.momentum / len(parts), []
    for part in parts:
        values = np.moveaxis(inputs[part].numpy(), 1, -1)
        flat = values.reshape(-1, CHANNELS)
        mu, sigma = flat.mean(0), flat.var(0)
        rows.append(np.moveaxis((values - mu) / np.sqrt(sigma + norm.eps) * weight + bias, -1, 1))
        mean = (1 - step) * mean + step * mu
        variance = (1 - step) * variance + step * flat.var(0, ddof=1)
    return torch.tensor(np.concatenate(rows)), torch.tensor(mean), torch.tensor(variance)


# The layer


@given(SEEDS, DIMS, st.integers(1, 13), st.integers(1, 14))
def test_parts_are_normalised_separately_and_each_updates_the_statistics(seed, dims, num, size):
    inputs, norm = drawn(seed, num, dims), norm_of(dims, seed)
    expected, mean, variance = by_hand(inputs, size, norm)
    layer = GhostBatchNorm(copy.deepcopy(norm), size)
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(layer.batchnorm.running_mean, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.batchnorm.running_var, variance, rtol=1e-12, atol=1e-12)
    assert layer.batchnorm.num_batches_tracked == math.ceil(num / size)
    assert layer.batchnorm.momentum == norm.momentum
    single = GhostBatchNorm(copy.deepcopy(norm).float(), size)(inputs.float()).double()
    assert (single - expected).norm() <= 2e-6 * expected.norm()


@given(SEEDS, st.integers(2, 12), st.integers(1, 6), st.floats(0.01, 1))
def test_the_running_mean_is_the_closed_form(seed, num, size, momentum):
    inputs = drawn(seed, num, 2)
    layer = GhostBatchNorm(norm_of(2, seed, momentum=momentum), size)
    means = [inputs[part].mean((0, 2, 3)) for part in parts_of(num, size)]
    step, n = momentum / len(means), len(means)
    running: Any = layer.batchnorm.running_mean
    start = running.clone()
    layer(inputs)
    terms = [step * (1 - step) ** (n - 1 - index) * mean for index, mean in enumerate(means)]
    torch.testing.assert_close(running, (1 - step) ** n * start + sum(terms))


@given(SEEDS, DIMS, st.integers(1, 9), st.integers(0, 4))
def test_a_batch_of_at_most_that_size_is_one_part(seed, dims, num, more):
    inputs, norm = drawn(seed, num, dims), norm_of(dims, seed)
    layer = GhostBatchNorm(copy.deepcopy(norm), num + more)
    assert torch.equal(layer(inputs), norm(inputs))
    for mine, plain in zip(layer.batchnorm.buffers(), norm.buffers(), strict=True):
        assert torch.equal(mine, plain)


@given(SEEDS, DIMS, st.integers(1, 9), st.integers(1, 9))
def test_evaluation_is_that_of_the_plain_layer(seed, dims, num, size):
    inputs, norm = drawn(seed, num, dims), norm_of(dims, seed).eval()
    assert torch.equal(GhostBatchNorm(norm, size).eval()(inputs), norm(inputs))


def test_without_running_statistics_evaluation_uses_parts_too():
    norm = nn.BatchNorm2d(CHANNELS, track_running_stats=False, momentum=None, dtype=torch.float64)
    layer, inputs = GhostBatchNorm(norm, 2), drawn(0, 4, 2)
    expected = torch.cat([norm(inputs[:2]), norm(inputs[2:])])
    torch.testing.assert_close(layer(inputs), expected)
    torch.testing.assert_close(layer.eval()(inputs), expected)


def test_inputs_of_another_rank_and_parts_of_one_value_are_refused():
    with pytest.raises(ValueError, match="expected 4D input"):
        GhostBatchNorm(nn.BatchNorm2d(2), 2)(torch.zeros(6, 2, 3))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        GhostBatchNorm(nn.BatchNorm1d(2), 1)(torch.zeros(6, 2))


# The surgery


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, 2, 1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.BatchNorm1d(36, momentum=0.3),
        nn.Linear(36, 3),
    )


@pytest.mark.parametrize("size", [2, 3, 32])
def test_every_batch_normalisation_is_replaced_without_new_tensors(size):
    state = trained(make_state(make_net()))
    after, report = check_keeps_all(state, ghost_batchnorm(size))
    assert report.replaced == ("1", "4") and report.made == ()
    assert report.kept["1.batchnorm.running_mean"] == "1.running_mean"
    step, batch = compose(loop_events), make_batch(5)
    ghosts, plain = step(after, batch), step(state, batch)
    parts = math.ceil(6 / size)
    assert ghosts.buffers["1.batchnorm.num_batches_tracked"] == 2 + parts
    assert torch.equal(ghosts.params["5.weight"], plain.params["5.weight"]) == (parts == 1)


@given(SEEDS, st.integers(1, 6))
@settings(max_examples=10)
def test_a_step_does_what_the_formula_says(seed, size):
    state = make_state(nn.Sequential(norm_of(2, seed), nn.Flatten(), nn.Linear(18, 3, dtype=torch.float64)))
    after, _ = check_keeps_all(state, ghost_batchnorm(size))
    inputs = drawn(seed, 6, 2)
    outputs, mean, variance = by_hand(inputs, size, norm_of(2, seed))
    end = compose(loop_events)(after, (inputs, torch.arange(6) % 3))
    torch.testing.assert_close(end.buffers["0.batchnorm.running_mean"], mean)
    torch.testing.assert_close(end.buffers["0.batchnorm.running_var"], variance)
    scores = nn.functional.linear(outputs.flatten(1), state.params["2.weight"], state.params["2.bias"])
    loss = nn.functional.cross_entropy(scores, torch.arange(6) % 3)
    assert end.loss is not None
    torch.testing.assert_close(end.loss.detach(), loss, rtol=1e-9, atol=0)


def test_microbatches_are_divided_separately():
    step = compose(loop_events, [ghost_batchnorm(2)], microbatches=2)
    net = make_net()
    net[4] = nn.Identity()
    end = step(step.init(make_state(net)), make_batch())
    assert end.buffers["1.batchnorm.num_batches_tracked"] == 2 * math.ceil(3 / 2)


class WithActivation(nn.BatchNorm2d):
    """A subclass with its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Named(nn.BatchNorm2d):
    """A subclass that computes the same as its base class."""


def test_layers_that_are_not_replaced():
    net = nn.Sequential(WithActivation(2), nn.InstanceNorm2d(2), nn.GroupNorm(1, 2), nn.SyncBatchNorm(2))
    with pytest.warns(
        UserWarning, match="looked for BatchNorm1d or BatchNorm2d or BatchNorm3d to replace, and kept all 1"
    ):
        assert not operated(net, ghost_batchnorm())[1].replaced
    assert isinstance(operated(nn.BatchNorm3d(2), ghost_batchnorm())[0], GhostBatchNorm)
    module, _ = operated(nn.Sequential(Named(2), Named(2)), ghost_batchnorm(2), eval_mode=["0"])
    assert [part.training for part in (module[0], module[0].batchnorm, module[1].batchnorm)] == [False, False, True]


def test_layers_with_own_forwards_or_hooks_are_kept():
    net = nn.Sequential(WithActivation(2), hooked(nn.BatchNorm2d(2)), patched(nn.BatchNorm2d(2)))
    check_leaves(net, ghost_batchnorm(2), 3)


# The method


def test_means_over_all_batches_are_refused():
    with pytest.raises(ValueError, match="ghost_batchnorm: 1: expected .* momentum=None .*; give it one"):
        operated(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2, momentum=None)), ghost_batchnorm())
    with pytest.raises(ValueError, match="GhostBatchNorm: expected .* momentum=None"):
        GhostBatchNorm(nn.BatchNorm1d(2, momentum=None))


@pytest.mark.parametrize("norm", [nn.SyncBatchNorm(2), WithActivation(2), hooked(nn.BatchNorm2d(2)), nn.ReLU()])
def test_layers_of_other_kinds_are_refused(norm):
    with pytest.raises(TypeError, match="GhostBatchNorm: expected an nn.BatchNorm1d, 2d or 3d without"):
        GhostBatchNorm(norm, 2)
