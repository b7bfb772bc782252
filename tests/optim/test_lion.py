"""`lion` against the paper's equations in float64."""

from typing import Any

import pytest
import torch

from purecompose import optim
from purecompose.schedule import hparam


def by_hand(param: torch.Tensor, grads: list[torch.Tensor], lr: float, betas: Any, decay: float) -> torch.Tensor:
    """Return the result of the paper's algorithm 2: the decay is added to the sign, and the average is updated last."""
    average = torch.zeros_like(param)
    for grad in grads:
        blend = betas[0] * average + (1 - betas[0]) * grad
        param = param - lr * (torch.where(blend > 0, 1.0, torch.where(blend < 0, -1.0, 0.0)) + decay * param)
        average = betas[1] * average + (1 - betas[1]) * grad
    return param


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("betas", "decay"), [((0.9, 0.99), 0.0), ((0.0, 0.5), 0.1), ((0.95, 0.98), 1.0)])
def test_fifty_steps_are_the_papers_equations(tensors, watched: bool, dtype: torch.dtype, betas: Any, decay: float):
    optimizer, params = optim.lion(0.01, betas=betas, weight_decay=decay), tensors(0, dtype)
    grads = [tensors(step + 1, dtype) for step in range(50)]
    moved, opt_state = params, optimizer.init(params)
    with torch.set_grad_enabled(watched):
        for step_grads in grads:
            moved, opt_state = optimizer.update(step_grads, opt_state, moved)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-6
    for name, param in params.items():
        expected = by_hand(param.double(), [step[name].double() for step in grads], 0.01, betas, decay)
        torch.testing.assert_close(moved[name].double(), expected, rtol=tolerance, atol=tolerance)


def test_groups_and_hparams_equal_numbers(tensors):
    moving = optim.lion(hparam("lr", 0.01), betas=(hparam("b1", 0.8), 0.9), weight_decay=hparam("wd", 0.1))
    grouped = optim.lion(1.0, groups={"*": {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}})
    params, opt_state = tensors(0), moving.init(tensors(0))
    for step in range(5):
        ours = moving.update(tensors(step + 1), opt_state, params)
        theirs = grouped.update(tensors(step + 1), opt_state, params)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        params, opt_state = ours


def test_every_element_moves_by_the_learning_rate_and_none_without_a_gradient(tensors):
    params, grads = tensors(0), tensors(1)
    grads["body.bias"][0] = 0.0
    moved, _ = optim.lion(0.25).update(grads, optim.lion().init(params), params)
    expected = {name: param - 0.25 * grads[name].sign() for name, param in params.items()}
    assert all(torch.equal(moved[name], expected[name]) for name in params)
    assert moved["body.bias"][0] == params["body.bias"][0]


def test_only_the_sign_passes_no_gradient(tensors):
    # With p of shape (3, 4): d sum(p') / d lr = -sum(sign) - wd sum(p), d / d b1 = 0.
    params = {"w": tensors(0)["body.weight"]}
    grads, opt_state = {"w": tensors(1)["body.weight"]}, {"exp_avg": {"w": tensors(2)["body.weight"]}}
    optimizer = optim.lion(hparam("lr", 0.1), betas=(hparam("b1", 0.9), 0.99), weight_decay=0.5)

    def total(lr: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return optimizer.update(grads, opt_state, params, lambda s: {"lr": lr, "b1": beta}[s.name])[0]["w"].sum()  # type: ignore[union-attr]

    to_lr, to_beta = torch.func.grad(total, argnums=(0, 1))(torch.tensor(0.1).double(), torch.tensor(0.9).double())
    sign = (0.9 * opt_state["exp_avg"]["w"] + 0.1 * grads["w"]).sign()
    torch.testing.assert_close(to_lr, -sign.sum() - 0.5 * params["w"].sum())
    assert to_beta.item() == 0.0
