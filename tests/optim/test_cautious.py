"""Cautious weight decay: of decoupled decay, only elements that do not move away from zero."""

from typing import Any

import pytest
import torch
from torch import Tensor

import purecompose as pc
from purecompose import compose, loop_events, optim
from tests.algorithms import method_helpers as helpers


RULES: dict[str, Any] = {
    "adamw": lambda **more: optim.adamw(0.05, **more),
    "amsgrad": lambda **more: optim.adamw(0.05, amsgrad=True, **more),
    "scheduled beta": lambda **more: optim.adamw(0.05, betas=(0.9 * pc.schedule.linear(), 0.99), **more),
    "decoupled_adamw": lambda **more: optim.decoupled_adamw(0.05, **more),
    "decoupled_sgdw": lambda **more: optim.decoupled_sgdw(0.05, momentum=0.9, **more),
    "lion": lambda **more: optim.lion(0.05, **more),
    "muon": lambda **more: optim.muon(0.05, ns_precision="full", **more),
}
each_rule = pytest.mark.parametrize("name", RULES)


def tensors(num: int, dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{"w": torch.randn(6, 4, generator=draw, dtype=dtype)} for _ in range(num)]


def value(scalar: Any) -> Any:
    return scalar if isinstance(scalar, float) else 0.5


@each_rule
def test_it_is_the_formula(name: str) -> None:
    """p <- p - lr u - shrinkage [u p >= 0] p, with u from the same rule without decay."""
    plain, cautious = RULES[name](weight_decay=0.0), RULES[name](weight_decay=0.3, cautious_decay=True)
    params, *grads = tensors(4)
    params["w"][0] = 0.0
    opt_state = cautious.init(params)
    share = 0.3 * (1.0 if name.startswith("decoupled") else 0.05)
    for grad in grads:
        moved, expected_state = plain.update(grad, opt_state, params, value)
        old, u = params["w"], params["w"] - moved["w"]
        expected = torch.where(u * old >= 0, moved["w"] - share * old, moved["w"])
        assert 0 < (u * old < 0).sum() < old.numel()
        params, opt_state = cautious.update(grad, opt_state, params, value)
        torch.testing.assert_close(params["w"], expected, rtol=1e-12, atol=1e-14)
        assert not pc.tree.diff(opt_state, expected_state)


def test_it_is_adamw_written_out() -> None:
    params, *grads = tensors(3)
    optimizer = optim.adamw(0.1, betas=(0.9, 0.99), weight_decay=0.2, cautious_decay=True)
    p, m, v, opt_state = params["w"], 0.0, 0.0, optimizer.init(params)
    for t, grad in enumerate(grads, start=1):
        g = grad["w"]
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        u = m / (1 - 0.9**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
        p = p - 0.1 * (u + 0.2 * (u * p >= 0) * p)
        params, opt_state = optimizer.update(grad, opt_state, params)
        torch.testing.assert_close(params["w"], p, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["adamw", "decoupled_sgdw", "lion", "muon"])
def test_without_decay_and_by_default_it_changes_nothing(name: str) -> None:
    params, grad = tensors(2, torch.float32)
    for settings in ({"weight_decay": 0.0, "cautious_decay": True}, {"weight_decay": 0.3, "cautious_decay": False}):
        first, second = RULES[name](**settings), RULES[name](weight_decay=settings["weight_decay"])
        moved = [one.update(grad, one.init(params), params)[0] for one in (first, second)]
        assert torch.equal(moved[0]["w"], moved[1]["w"])


def test_groups_and_the_printed_form_have_it_where_decay_is_decoupled() -> None:
    optimizer = optim.adamw(0.1, cautious_decay=True, groups={"*.bias": {"cautious_decay": False}})
    assert repr(optimizer) == "adamw(lr=0.1, cautious_decay=True, groups={'*.bias': {'cautious_decay': False}})"
    assert repr(optim.adam(0.1)) == "adam(lr=0.1)"
    with pytest.raises(TypeError, match="no option 'cautious_decay'"):
        optim.sgd(0.1, groups={"*": {"cautious_decay": True}})


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_compiled_step_decays_alike(name: str) -> None:
    rule = optim.by_pattern({"*weight": RULES[name](weight_decay=0.3, cautious_decay=True)}, optim.sgd(0.1))
    states = []
    for transform in (lambda step: step, lambda step: pc.compile(step, backend="eager", quiet=True)):
        step = transform(compose(loop_events))
        torch.manual_seed(0)
        start = helpers.make_state(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)))
        state = step.init(start.replace(optimizer=rule, opt_state=rule.init(start.params)))
        for _ in range(3):
            state = step(state, helpers.make_batch())
        states.append(state.params)
    for key, found in states[1].items():
        torch.testing.assert_close(found, states[0][key], rtol=1e-5, atol=1e-6)
