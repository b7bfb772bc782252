"""`decoupled_sgdw` and `decoupled_adamw`: a decay that follows the schedule and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purecompose as pc
from purecompose import optim
from purecompose.optim.base import progress
from purecompose.schedule import Schedule, cosine, hparam, linear, scheduled


NAMES = ("decoupled_sgdw", "decoupled_adamw")
both = pytest.mark.parametrize("name", NAMES)
DOUBLE = torch.float64


def constant_value(timestamp: object) -> float:
    return 1.0


CURVE = scheduled(constant_value)


def at(curve: float, **hparams: float) -> Callable[[Any], Any]:
    """Return a reader of settings at a point where the schedules have the value `curve`."""

    def value(scalar: Any) -> Any:
        if isinstance(scalar, Schedule):
            return torch.tensor(curve, dtype=DOUBLE)
        if hasattr(scalar, "factors"):
            return torch.stack([torch.as_tensor(value(one), dtype=DOUBLE) for one in scalar.factors]).prod()
        return torch.tensor(hparams[scalar.name], dtype=DOUBLE) if hasattr(scalar, "name") else scalar

    return value


def zeros(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(param) for name, param in params.items()}


def after(optimizer: Any, params: dict[str, Tensor], curve: list[float], **hparams: float) -> dict[str, Tensor]:
    """Return the parameters after updates without gradient, one for each value of the schedule."""
    grads, opt_state = zeros(params), optimizer.init(params)
    for value in curve:
        params, opt_state = optimizer.update(grads, opt_state, params, at(value, **hparams))
    return params


CASES: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "plain": ("decoupled_sgdw", optim.sgd, {}),
    "momentum": ("decoupled_sgdw", optim.sgd, {"momentum": 0.9}),
    "dampening": ("decoupled_sgdw", optim.sgd, {"momentum": 0.9, "dampening": 0.5}),
    "nesterov": ("decoupled_sgdw", optim.sgd, {"momentum": 0.9, "nesterov": True}),
    "adamw": ("decoupled_adamw", optim.adam, {"betas": (0.9, 0.95), "eps": 1e-8}),
    "amsgrad": ("decoupled_adamw", optim.adam, {"betas": (0.9, 0.5), "eps": 1e-3, "amsgrad": True}),
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_weights_decay_by_the_schedule_and_then_move_as_without_decay(
    tensors, case: str, dtype: torch.dtype, watched: bool
):
    name, plain, settings = CASES[case]
    optimizer, moving = (
        getattr(optim, name)(0.05 * CURVE, weight_decay=1e-2, **settings),
        plain(0.05 * CURVE, **settings),
    )
    params = expected = tensors(0, dtype)
    opt_state, plain_state = optimizer.init(params), moving.init(params)
    with torch.set_grad_enabled(watched):
        for step in range(50):
            grads, curve = tensors(step + 1, dtype), (step % 11) / 10
            params, opt_state = optimizer.update(grads, opt_state, params, at(curve))
            smaller = {key: param * (1 - curve * 1e-2) for key, param in expected.items()}
            expected, plain_state = moving.update(grads, plain_state, smaller, at(curve))
    tolerance = 1e-12 if dtype is DOUBLE else 2e-6
    torch.testing.assert_close(params, expected, rtol=tolerance, atol=tolerance)
    assert pc.tree.equal(opt_state, plain_state)


@both
@pytest.mark.parametrize("watched", [False, True])
def test_without_gradient_only_the_decay_moves_and_halving_the_rate_halves_it(tensors, name: str, watched: bool):
    params = tensors()
    for curve, factor in ((1.0, 0.99), (0.5, 0.995), (0.0, 1.0)):
        optimizer = getattr(optim, name)(0.1 * CURVE, weight_decay=0.01)
        with torch.set_grad_enabled(watched):
            (moved, opt_state) = optimizer.update(zeros(params), optimizer.init(params), params, at(curve))
        # Up to one bit, because p - 0.01 p is rounded once more than 0.99 p.
        torch.testing.assert_close(moved, {key: factor * p for key, p in params.items()}, rtol=3e-16, atol=0)
        assert all(not leaf.any() for slot, leaves in opt_state.items() for leaf in leaves.values() if slot != "step")


@both
@pytest.mark.parametrize("start", [0.0, 1e-3, 0.1, 4.0])
def test_the_product_of_the_decays_is_that_of_the_schedule_alone(tensors, name: str, start: float):
    curve = [1.0, 0.75, 0.5, 0.25, 0.0]
    expected = torch.tensor([1 - 0.001 * value for value in curve], dtype=DOUBLE).prod()
    for lr, hparams in ((start * CURVE, {}), (hparam("lr", 7.0) * CURVE, {"lr": start})):
        moved = after(getattr(optim, name)(lr, weight_decay=0.001), tensors(), curve, **hparams)
        torch.testing.assert_close(moved, {key: expected * p for key, p in tensors().items()}, rtol=1e-14, atol=0)


def test_progress_is_the_factor_of_the_schedules():
    lr = 0.1 * cosine() * hparam("lr", 2.0) * linear()
    assert progress(lr, lambda schedule: {cosine(): 0.5, linear(): 0.25}[schedule]) == 0.125  # type: ignore[index]
    assert progress(hparam("lr", 3.0), at(0.5)) == progress(0.1, at(0.5)) == 1.0
    assert progress(cosine(), lambda schedule: 0.75) == 0.75


@both
def test_the_decay_has_a_gradient_to_itself_and_none_to_the_learning_rate(tensors, name: str):
    optimizer = getattr(optim, name)(hparam("lr", 0.1) * CURVE, weight_decay=hparam("wd", 0.01))
    params = tensors()

    def total(lr: Tensor, decay: Tensor) -> Tensor:
        def value(scalar: Any) -> Any:
            if hasattr(scalar, "factors"):
                return lr * 0.5
            return 0.5 if isinstance(scalar, Schedule) else {"lr": lr, "wd": decay}[scalar.name]

        moved, _ = optimizer.update(zeros(params), optimizer.init(params), params, value)
        return torch.stack([param.sum() for param in moved.values()]).sum()

    leaves = torch.tensor(0.1, dtype=DOUBLE), torch.tensor(0.01, dtype=DOUBLE)
    to_lr, to_decay = torch.func.grad(total, argnums=(0, 1))(*leaves)
    assert to_lr.item() == 0.0
    torch.testing.assert_close(to_decay, -0.5 * torch.stack([p.sum() for p in params.values()]).sum())


@both
def test_in_a_run_an_hparam_scales_the_learning_rate_and_not_the_decay(name: str):
    def trained(lr: float) -> pc.State:
        net = torch.nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            net.weight.fill_(1.0)
        optimizer = getattr(optim, name)(hparam("lr", 0.1) * linear(), weight_decay=0.01)
        state = pc.State.create(net, loss=pc.losses.mse, optimizer=optimizer, key=0, duration="4ba")
        step = pc.compose(pc.loop_events)
        state = step.init(state).replace(hparams={"lr": lr})
        for _ in range(4):
            state = step(state, (torch.zeros(2, 3), torch.zeros(2, 1)))  # the gradient is zero
        return state

    expected = (1 - 0.01) * (1 - 0.0075) * (1 - 0.005) * (1 - 0.0025)
    for lr in (1.0, 1e-4):
        weight = trained(lr).params["weight"]
        torch.testing.assert_close(weight, torch.full((1, 3), expected), rtol=1e-6, atol=0)
