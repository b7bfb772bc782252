"""Gradient clipping against torch's own and formulas; its bounds, and gradients that it does not change."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, compose, hparam, loop_events, tree
from purecompose.algorithms._optimizer_settings import clip_adaptively, clip_by_norm, clip_by_value, gradient_clipping
from tests.algorithms import method_helpers as helpers


BATCH = helpers.make_batch()
TYPES = ("norm", "value", "adaptive")
SHAPES = {"matrix": (4, 3), "kernel": (3, 2, 5, 5), "sequence": (2, 3, 4), "bias": (7,), "number": ()}


def random_tensors(seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def clipped(kind: str, grads, params, threshold):
    if kind == "adaptive":
        return clip_adaptively(grads, params, threshold)
    return (clip_by_norm if kind == "norm" else clip_by_value)(grads, threshold)


def units(tensor: Tensor) -> Tensor:
    """Return one row for each unit."""
    return tensor.flatten(1) if tensor.ndim > 1 else tensor.reshape(1, -1)


def in_one(tensors) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def assert_close(found, expected, rtol=1e-9, atol=1e-12) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=atol)


thresholds = st.sampled_from([1e-3, 0.1, 1.0, 10.0, 1e3])
seeds = st.integers(0, 1000)


# The common norm


@given(seed=seeds, threshold=thresholds, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_norm_and_value_are_torchs(seed, threshold, dtype):
    grads = random_tensors(seed, dtype=dtype)
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads.values()]
    for fn, torchs in (
        (clip_by_norm, torch.nn.utils.clip_grad_norm_),
        (clip_by_value, torch.nn.utils.clip_grad_value_),
    ):
        for param, grad in zip(params, grads.values(), strict=True):
            param.grad = grad.clone()
        torchs(params, threshold)
        expected = {name: param.grad for name, param in zip(grads, params, strict=True)}
        assert_close(fn(grads, threshold), expected, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0)


# Element by element


@pytest.mark.parametrize(
    ("dtype", "threshold"),
    [(torch.float16, 1e5), (torch.bfloat16, 1e39), (torch.float32, 1e300), (torch.float64, 1e300)],
)
@pytest.mark.parametrize("make", [float, lambda number: torch.tensor(number, dtype=torch.float64)])
def test_a_threshold_beyond_the_dtype_is_the_largest_number_in_it(dtype, threshold, make):
    most = min(torch.finfo(dtype).max, threshold)
    grad = torch.tensor([1.0, -2.0, most, torch.inf, -torch.inf], dtype=dtype)
    found = clip_by_value({"w": grad, "number": grad[3]}, make(threshold))
    assert found["w"].dtype is found["number"].dtype is dtype and found["number"] == most
    assert torch.equal(found["w"], torch.tensor([1.0, -2.0, most, most, -most], dtype=dtype))
    assert torch.equal(clip_by_value({"w": grad}, make(torch.inf))["w"], grad)


@pytest.mark.parametrize("threshold", [1e5, hparam("bound", 1e5)])
def test_a_large_threshold_works_in_half_precision(threshold):
    step = compose(loop_events, [gradient_clipping("value", threshold)])
    net, (inputs, targets) = nn.Linear(6, 4).half(), BATCH
    state = step.init(State.create(net, loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1)))
    plain = compose(loop_events, [])
    assert tree.equal(step(state, (inputs.half(), targets)).params, plain(state, (inputs.half(), targets)).params)


# Against the weights


@given(seed=seeds, threshold=st.sampled_from([1e-3, 0.01, 0.16, 1.0, 3.0]))
def test_adaptive_bounds_every_unit_by_its_weights_and_keeps_its_direction(seed, threshold):
    grads, params = random_tensors(seed), random_tensors(seed + 1)
    found = clip_adaptively(grads, params, threshold)
    for name, grad in grads.items():
        for own, old, weight in zip(units(found[name]), units(grad), units(params[name]), strict=True):
            bound, length = threshold * max(weight.norm().item(), 1e-3), old.norm().item()
            assert own.norm().item() <= bound * (1 + 1e-12)
            torch.testing.assert_close(own, old * min(1.0, bound / length), rtol=1e-12, atol=0)


def test_adaptive_by_known_numbers():
    grads = {"w": torch.tensor([[7.0, 24.0], [5.0, 12.0]])}
    found = clip_adaptively(grads, {"w": torch.tensor([[3.0, 4.0], [9.0, 40.0]])}, 0.5)["w"]
    torch.testing.assert_close(found, torch.tensor([[0.7, 2.4], [5.0, 12.0]]))


@pytest.mark.parametrize("shape", [(1, 2, 2), (1, 2, 2, 1), (1, 1, 2, 2)])
def test_adaptive_in_three_and_four_dimensions_by_known_numbers(shape):
    """For weights (3, 8, 2, 2) of norm 9 and a gradient of norm 6, a third of 9 is half of 6."""
    weight, grad = torch.tensor([3.0, 8.0, 2.0, 2.0]).view(shape), torch.tensor([1.0, 1.0, 3.0, 5.0]).view(shape)
    found = clip_adaptively({"w": grad}, {"w": weight}, 1 / 3)["w"]
    torch.testing.assert_close(found, grad / 2)


def test_adaptive_of_a_vector_or_a_number_takes_the_whole():
    params = {"bias": torch.tensor([3.0, 4.0]), "number": torch.tensor(-2.0)}
    grads = {"bias": torch.tensor([60.0, 80.0]), "number": torch.tensor(-8.0)}
    expected = {"bias": torch.tensor([3.0, 4.0]), "number": torch.tensor(-2.0)}
    assert_close(clip_adaptively(grads, params, 1.0), expected, rtol=1e-6)


def test_zero_weights_have_a_floor_and_are_not_frozen_forever():
    zeros, grads = {"bias": torch.zeros(4)}, {"bias": torch.tensor([0.0, 3.0, 0.0, 4.0])}
    found = clip_adaptively(grads, zeros, 0.01)["bias"]
    torch.testing.assert_close(found, torch.tensor([0.0, 0.6e-5, 0.0, 0.8e-5]))
    assert not clip_adaptively(grads, zeros, 0.01, floor=0.0)["bias"].any()


@pytest.mark.parametrize("kind", TYPES)
def test_zeros_are_never_nan(kind):
    zeros, weights = {"a": torch.zeros(3, 2), "b": torch.zeros(())}, {"a": torch.ones(3, 2), "b": torch.ones(())}
    for params in (zeros, weights):
        assert tree.equal(clipped(kind, zeros, params, 0.5), zeros)
        assert in_one(clipped(kind, weights, params, 0.5)).isfinite().all()


# All of them


@pytest.mark.parametrize("kind", TYPES)
def test_a_threshold_in_a_tensor_is_the_same(kind):
    grads, params = random_tensors(0), random_tensors(1)
    threshold = torch.tensor(0.125, dtype=torch.float64)
    assert tree.equal(clipped(kind, grads, params, threshold), clipped(kind, grads, params, 0.125))


def test_nan_stays_nan_and_where_it_spreads():
    grads = {"w": torch.tensor([[torch.nan, 9.0], [8.0, 6.0]]), "b": torch.tensor([5.0])}
    params = {"w": torch.ones(2, 2), "b": torch.ones(1)}
    assert in_one(clip_by_norm(grads, 1.0)).isnan().all()
    torch.testing.assert_close(
        clip_by_value(grads, 1.0)["w"], torch.tensor([[torch.nan, 1.0], [1.0, 1.0]]), equal_nan=True
    )
    unit, other = clip_adaptively(grads, params, 0.1)["w"]
    assert unit[0].isnan() and other.isfinite().all()


def test_infinite_elements_become_nan_and_the_others_zero():
    grads = {"w": torch.tensor([[torch.inf, 9.0], [8.0, 6.0]]), "b": torch.tensor([5.0])}
    params = {"w": torch.ones(2, 2), "b": torch.ones(1)}
    expected = torch.tensor([torch.nan, 0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(in_one(clip_by_norm(grads, 1.0)), expected, equal_nan=True)
    unit, other = clip_adaptively(grads, params, 0.1)["w"]
    torch.testing.assert_close(unit, expected[:2], equal_nan=True)
    assert other.isfinite().all() and other.all()
    assert clip_by_value(grads, 1.0)["w"][0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", TYPES)
def test_half_precision_keeps_its_dtype_and_norms_have_float32s_range(kind, dtype):
    grads = {"w": torch.full((100, 1), 6e4, dtype=dtype), "b": torch.full((64,), 6e4, dtype=dtype)}
    params = {"w": torch.full((100, 1), 2.0, dtype=dtype), "b": torch.full((64,), 2.0, dtype=dtype)}
    found = clipped(kind, grads, params, 0.5)
    expected = {"norm": (0.5 / math.sqrt(164),) * 2, "value": (0.5, 0.5), "adaptive": (1.0, 1.0)}[kind]
    for grad, number in zip(found.values(), expected, strict=True):
        assert grad.dtype is dtype
        torch.testing.assert_close(grad.double(), torch.full_like(grad, number).double(), rtol=1e-2, atol=0)


# In a step


def raw_gradients(net: nn.Module | None = None) -> tuple[dict[str, Tensor], State]:
    """Return the gradients, computed only by torch, and their state."""
    state = helpers.make_state(net)
    module = pc.to_module(state)
    nn.functional.cross_entropy(module(BATCH[0]), BATCH[1]).backward()
    return {name: param.grad for name, param in module.named_parameters() if param.grad is not None}, state


def after_step(state: State, *algorithms, **options) -> State:
    step = compose(loop_events, algorithms, **options)
    return step(step.init(state), BATCH)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("kind", TYPES)
def test_the_optimizer_is_given_clipped_gradients_of_the_whole_batch(kind, microbatches):
    grads, state = raw_gradients()
    after = after_step(state, gradient_clipping(kind, 0.02), microbatches=microbatches)
    expected = clipped(kind, grads, state.params, 0.02)
    assert not tree.equal(expected, grads)
    for name, param in state.params.items():
        torch.testing.assert_close(after.params[name], param - helpers.LR * expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", TYPES)
def test_excluded_parameters_are_neither_clipped_nor_counted(kind):
    grads, state = raw_gradients()
    after = after_step(state, gradient_clipping(kind, 0.02, exclude=("2.*",)))
    inner = clipped(kind, {name: grads[name] for name in ("0.weight", "0.bias")}, state.params, 0.02)
    for name, param in state.params.items():
        expected = param - helpers.LR * {**grads, **inner}[name]
        torch.testing.assert_close(after.params[name], expected, rtol=1e-5, atol=1e-6)


def test_a_pattern_that_fits_nothing_is_an_error_that_shows_names():
    method = gradient_clipping("norm", 1.0, exclude=("head.*",))
    with pytest.raises(ValueError, match=r"exclude: 'head\.\*' matches no parameter; the names are 0\.weight, 0\.bias"):
        after_step(helpers.make_state(), method)
