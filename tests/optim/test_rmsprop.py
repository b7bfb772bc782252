"""`rmsprop` against torch.optim.RMSprop, and cases in which torch gives NaN."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from purecompose import optim
from purecompose.schedule import hparam


OPTIONS = st.fixed_dictionaries(
    {
        "alpha": st.sampled_from([0.99, 0.5, 0.0]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.5]),
        "momentum": st.sampled_from([0.0, 0.9]),
    }
)


@pytest.mark.parametrize("watched", [False, True])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(options=OPTIONS, double=st.booleans())
def test_equals_torch(assert_like_torch, watched: bool, options: dict[str, Any], double: bool):
    dtype = torch.float64 if double else torch.float32
    with torch.set_grad_enabled(watched):
        assert_like_torch(optim.rmsprop(0.01, **options), torch.optim.RMSprop, {"lr": 0.01, **options}, dtype=dtype)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_centered_equals_torch(assert_like_torch, watched: bool, momentum: float):
    options = {"lr": 0.01, "alpha": 0.9, "momentum": momentum, "centered": True}
    with torch.set_grad_enabled(watched):
        # The mean of squares minus the squared mean loses digits, differently on both sides.
        assert_like_torch(optim.rmsprop(**options), torch.optim.RMSprop, options, tolerance=1e-9)
        options = {**options, "eps": 0.1}
        assert_like_torch(optim.rmsprop(**options), torch.optim.RMSprop, options, dtype=torch.float32)


def test_defaults_and_groups_equal_torch(assert_like_torch):
    groups = {
        "body.bias": {"weight_decay": 0.1, "momentum": 0.5},
        "head.weight": {"lr": 0.1, "alpha": 0.8},
        "head.bias": {"eps": 0.1, "centered": True},
    }
    assert_like_torch(optim.rmsprop(groups=groups), torch.optim.RMSprop, {}, groups, tolerance=1e-11)


def test_hparams_equal_numbers(assert_like_torch):
    ours = optim.rmsprop(
        hparam("lr", 0.01), alpha=hparam("a", 0.9), weight_decay=hparam("wd", 0.1), momentum=hparam("m", 0.5)
    )
    options = {"lr": 0.01, "alpha": 0.9, "weight_decay": 0.1, "momentum": 0.5}
    assert_like_torch(ours, torch.optim.RMSprop, options)


def test_keeps_only_the_state_that_its_settings_need(tensors):
    params = tensors()
    assert list(optim.rmsprop().init(params)) == ["square_avg"]
    assert list(optim.rmsprop(momentum=0.9).init(params)) == ["square_avg", "momentum"]
    assert list(optim.rmsprop(centered=True).init(params)) == ["square_avg", "grad_avg"]
    partly = optim.rmsprop(groups={"*.bias": {"centered": True}}).init(params)
    assert list(partly["grad_avg"]) == ["body.bias", "head.bias"]


def test_a_variance_that_is_rounded_below_zero_counts_as_zero():
    # The mean is exactly 1 and the mean of squares one bit less, as can result from rounding.
    optimizer, params = optim.rmsprop(0.1, centered=True, eps=0.5), {"w": torch.zeros(1)}
    almost_one = torch.tensor([1.0 - 2.0**-24])
    opt_state = {"square_avg": {"w": almost_one}, "grad_avg": {"w": torch.ones(1)}}
    for watched in (False, True):
        with torch.set_grad_enabled(watched):
            moved, _ = optimizer.update({"w": torch.ones(1)}, opt_state, params)
        torch.testing.assert_close(moved["w"], torch.tensor([-0.2]))
