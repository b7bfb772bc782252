"""`decoupled_sgdw` and `decoupled_adamw`: a decay that follows the schedule and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import purecompose as pc
from purecompose import optim
from purecompose.optim.decay import progress
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


def sgdw_by_hand(params: Tensor, grads: list[Tensor], rates: list[float], start: float, **s: Any) -> Tensor:
    """Return one tensor after the page's equations, in float64."""
    buffer = None
    for grad, rate in zip(grads, rates, strict=True):
        direction = grad
        if s["momentum"]:
            fresh = buffer is None
            buffer = grad if fresh else s["momentum"] * buffer + (1 - s["dampening"]) * grad  # type: ignore[operator]
            direction = grad + s["momentum"] * buffer if s["nesterov"] else buffer
        share = rate / start if start else 1.0
        params = params * (1 - share * s["weight_decay"]) - rate * direction
    return params


def adamw_by_hand(params: Tensor, grads: list[Tensor], rates: list[float], start: float, **s: Any) -> Tensor:
    (beta1, beta2), mean, square, peak = s["betas"], 0.0, 0.0, torch.zeros_like(params)
    for t, (grad, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        params = params * (1 - (rate / start if start else 1.0) * s["weight_decay"])
        mean = beta1 * mean + (1 - beta1) * grad
        square = beta2 * square + (1 - beta2) * grad**2
        peak = torch.maximum(peak, square)
        root = (peak if s["amsgrad"] else square).sqrt() / (1 - beta2**t) ** 0.5 + s["eps"]
        params = params - rate / (1 - beta1**t) * mean / root
    return params


BY_HAND = {
    "plain": ("decoupled_sgdw", {"momentum": 0.0, "dampening": 0.0, "nesterov": False}),
    "momentum": ("decoupled_sgdw", {"momentum": 0.9, "dampening": 0.0, "nesterov": False}),
    "dampening": ("decoupled_sgdw", {"momentum": 0.9, "dampening": 0.5, "nesterov": False}),
    "nesterov": ("decoupled_sgdw", {"momentum": 0.9, "dampening": 0.0, "nesterov": True}),
    "adamw": ("decoupled_adamw", {"betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False}),
    "amsgrad": ("decoupled_adamw", {"betas": (0.9, 0.5), "eps": 1e-3, "amsgrad": True}),
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", BY_HAND)
def test_fifty_steps_are_the_pages_equations(tensors, case: str, dtype: torch.dtype, watched: bool):
    name, settings = BY_HAND[case]
    settings = {**settings, "weight_decay": 1e-2}
    optimizer = getattr(optim, name)(0.05 * CURVE, **settings)
    curve = [(step % 11) / 10 for step in range(50)]
    params, grads = tensors(0, dtype), [tensors(step + 1, dtype) for step in range(50)]
    moved, opt_state = params, optimizer.init(params)
    with torch.set_grad_enabled(watched):
        for step_grads, value in zip(grads, curve, strict=True):
            moved, opt_state = optimizer.update(step_grads, opt_state, moved, at(value))
    tolerance = 1e-12 if dtype is DOUBLE else 2e-6
    by_hand = sgdw_by_hand if name == "decoupled_sgdw" else adamw_by_hand
    rates = [0.05 * value for value in curve]
    for key, param in params.items():
        history = [step_grads[key].to(DOUBLE) for step_grads in grads]
        expected = by_hand(param.to(DOUBLE), history, rates, 0.05, **settings)
        torch.testing.assert_close(moved[key].to(DOUBLE), expected, rtol=tolerance, atol=tolerance)


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


def _first(optimizer: Any, params: Any, grads: Any) -> Any:
    return optimizer.update(grads, optimizer.init(params), params)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_sgdw_without_decay_is_sgd_bit_for_bit(tensors, momentum: float, nesterov: bool, dampening: float):
    if nesterov and (not momentum or dampening):
        pytest.skip("no such SGD")
    options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "dampening": dampening}
    _same_trajectories(tensors, optim.decoupled_sgdw(0.1, **options), optim.sgd(0.1, **options))


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_without_decay_is_adam_bit_for_bit(tensors, amsgrad: bool):
    options: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-6, "amsgrad": amsgrad, "weight_decay": 0.0}
    _same_trajectories(tensors, optim.decoupled_adamw(0.1, **options), optim.adam(0.1, **options))


def _same_trajectories(tensors, one: Any, two: Any) -> None:
    ours, theirs = (tensors(0), one.init(tensors(0))), (tensors(0), two.init(tensors(0)))
    for step in range(10):
        ours = one.update(tensors(step + 1), ours[1], ours[0])
        theirs = two.update(tensors(step + 1), theirs[1], theirs[0])
        assert pc.tree.equal(ours, theirs)


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
