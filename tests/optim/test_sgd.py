"""`sgd` against torch.optim.SGD, and its settings."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from purecompose import optim
from purecompose.schedule import hparam, linear


OPTIONS = st.fixed_dictionaries(
    {
        "momentum": st.sampled_from([0.0, 0.5, 0.9]),
        "dampening": st.sampled_from([0.0, 0.3, 1.0]),
        "weight_decay": st.sampled_from([0.0, 1e-2, 0.5]),
        "nesterov": st.booleans(),
    }
).filter(lambda options: not options["nesterov"] or (options["momentum"] and not options["dampening"]))


@pytest.mark.parametrize("watched", [False, True])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=OPTIONS, double=st.booleans())
def test_equals_torch(assert_like_torch, watched: bool, options: dict[str, Any], double: bool):
    dtype = torch.float64 if double else torch.float32
    with torch.set_grad_enabled(watched):
        assert_like_torch(optim.sgd(0.01, **options), torch.optim.SGD, {"lr": 0.01, **options}, dtype=dtype)


def test_groups_equal_torch(assert_like_torch):
    groups = {"body.bias": {"weight_decay": 0.0, "momentum": 0.0}, "head.weight": {"lr": 0.1, "dampening": 0.4}}
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
    assert_like_torch(optim.sgd(**options, groups=groups), torch.optim.SGD, options, groups)


def test_hparams_equal_numbers(assert_like_torch):
    ours = optim.sgd(
        hparam("lr", 0.01), momentum=hparam("m", 0.9), dampening=hparam("d", 0.2), weight_decay=hparam("wd", 0.1)
    )
    options = {"lr": 0.01, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}
    assert_like_torch(ours, torch.optim.SGD, options)


def test_keeps_only_the_state_that_its_settings_need(tensors):
    params = tensors()
    assert optim.sgd(0.1).init(params) == {}
    assert list(optim.sgd(0.1, momentum=0.9).init(params)) == ["momentum"]
    assert set(optim.sgd(0.1, momentum=0.9, dampening=0.1).init(params)) == {"step", "momentum"}
    partly = optim.sgd(0.1, momentum=0.9, groups={"*.bias": {"momentum": 0.0}}).init(params)
    assert list(partly["momentum"]) == ["body.weight", "head.weight"]


def test_a_scheduled_momentum_keeps_its_buffer_when_its_value_is_zero(tensors):
    params = tensors()
    optimizer = optim.sgd(0.1, momentum=0.9 * linear())
    new_params, opt_state = optimizer.update(
        tensors(1), optimizer.init(params), params, lambda scalar: torch.tensor(0.0)
    )
    torch.testing.assert_close(opt_state["momentum"], tensors(1))
    assert list(new_params) == list(params)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov_needs_momentum_and_no_dampening(options: dict[str, Any]):
    with pytest.raises(ValueError, match="nesterov=True needs momentum > 0 and dampening=0"):
        optim.sgd(0.1, nesterov=True, **options)
