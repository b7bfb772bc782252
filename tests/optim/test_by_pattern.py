"""`by_pattern`: each parameter is updated by its own optimizer, and together they are one optimizer."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import compose, loop_events, optim, schedule
from purecompose.nn import models
from purecompose.schedule import Hparam, collect, cosine, hparam


Params = dict[str, Tensor]


def of(params: Params, *names: str) -> Params:
    return {name: params[name] for name in names}


def run(optimizer: Any, params: Params, grads: list[Params]) -> tuple[Params, Any]:
    opt_state = optimizer.init(params)
    for step_grads in grads:
        params, opt_state = optimizer.update(step_grads, opt_state, params)
    return params, opt_state


def test_each_optimizer_does_what_it_does_alone(tensors):
    optimizer = optim.by_pattern({"*.bias": optim.adam(0.1), "head.*": optim.sgd(0.1, momentum=0.9)}, optim.rmsprop())
    grads = [tensors(step + 1) for step in range(5)]
    params, opt_state = run(optimizer, tensors(0), grads)
    alone = {
        ("body.bias", "head.bias"): optim.adam(0.1),
        ("head.weight",): optim.sgd(0.1, momentum=0.9),
        ("body.weight",): optim.rmsprop(),
    }
    found: dict[str, Params] = {}
    for names, own in alone.items():
        expected, own_state = run(own, of(tensors(0), *names), [of(step, *names) for step in grads])
        assert pc.tree.equal(of(params, *names), expected)
        for slot, leaves in own_state.items():
            found.setdefault(slot, {}).update(leaves)
    assert list(params) == list(tensors(0)) and opt_state.keys() == found.keys()
    assert all(
        pc.tree.equal(dict(sorted(opt_state[slot].items())), dict(sorted(found[slot].items()))) for slot in found
    )


def test_two_optimizers_share_a_slot_in_the_order_of_the_parameters(tensors):
    optimizer = optim.by_pattern({"*.bias": optim.adam()}, optim.adamw(amsgrad=True))
    opt_state = optimizer.init(tensors())
    assert list(opt_state["step"]) == list(opt_state["exp_avg"]) == list(tensors())
    assert list(opt_state["max_exp_avg_sq"]) == ["body.weight", "head.weight"]


def test_parameters_that_an_optimizer_does_not_update_get_the_next_one(tensors):
    optimizer = optim.by_pattern({"body.*": optim.muon(), "*.bias": optim.adam(), "*": optim.muon()}, optim.sgd(0.1))
    opt_state = optimizer.init({**tensors(), "scale": torch.ones(3)})
    assert list(opt_state["momentum"]) == ["body.weight", "head.weight"]
    assert list(opt_state["exp_avg"]) == ["body.bias", "head.bias"]  # and sgd, which has no state, has the scale


def test_patterns_nest_and_inner_groups_match_their_own_parameters(tensors):
    inner = optim.by_pattern({"*.bias": optim.sgd(0.25)}, optim.sgd(0.5, groups={"body.*": {"lr": 0.125}}))
    params, _ = run(optim.by_pattern({"head.*": optim.sgd(1.0)}, inner), tensors(0), [tensors(1)])
    rates = {"body.weight": 0.125, "body.bias": 0.25, "head.weight": 1.0, "head.bias": 1.0}
    expected = {name: param - rates[name] * tensors(1)[name] for name, param in tensors(0).items()}
    torch.testing.assert_close(params, expected)


def test_updates_of_some_parameters_leave_the_others(tensors):
    optimizer = optim.by_pattern({"*.weight": optim.muon(0.1)}, optim.adam(0.1))
    params, opt_state = run(optimizer, tensors(0), [tensors(1)])
    moved, new_state = optimizer.update(of(tensors(2), "head.bias"), opt_state, params)
    assert [name for name in params if moved[name] is not params[name]] == ["head.bias"]
    for slot, leaves in new_state.items():
        assert [name for name in leaves if leaves[name] is not opt_state[slot][name]] in ([], ["head.bias"])


def test_equal_settings_are_equal_values_and_hparams_are_found():
    one, two = (
        optim.by_pattern(
            {"*.bias": optim.sgd(hparam("lr", 0.1))}, optim.adam(0.1 * cosine(), betas=(hparam("b", 0.5), 0))
        )
        for _ in range(2)
    )
    assert one == two and hash(one) == hash(two)
    assert optim.by_pattern((("*.bias", optim.sgd(0.1)),), optim.adam()) == optim.by_pattern(
        {"*.bias": optim.sgd(0.1)}, optim.adam()
    )
    assert one != optim.by_pattern({"*.weight": optim.sgd(hparam("lr", 0.1))}, one.rest)
    assert {found.name for found in collect(one, Hparam)} == {"lr", "b"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.rest = two.rest  # type: ignore[misc]


@pytest.mark.parametrize(
    ("groups", "rest", "message"),
    [
        (3, optim.adam(), r"by_pattern: expected patterns with optimizers, such as .* got 3 \(int\)"),
        (optim.muon(), optim.adam(), "by_pattern: expected patterns with optimizers"),
        ({"*": 0.1}, optim.adam(), r"by_pattern: '\*': expected a pure optimizer with init and update, .* got 0.1"),
        ({"*": {"lr": 0.1}}, optim.adam(), "expected a pure optimizer with init and update"),
        ({3: optim.muon()}, optim.adam(), "expected a pattern of parameter names"),
        ({}, optim.adam, "by_pattern: rest: expected a pure optimizer"),
        ({}, torch.optim.Adam, "by_pattern: rest: expected a pure optimizer"),
    ],
)
def test_wrong_parts_are_refused_at_construction(groups: Any, rest: Any, message: str):
    with pytest.raises(TypeError, match=message):
        optim.by_pattern(groups, rest)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"bias": optim.sgd(0.1)}, r"by_pattern: 'bias' matches no parameter; the names are body.weight, .*\*.bias"),
        ({"*.bias": optim.muon()}, r"by_pattern: '\*.bias': muon\(\) gets no parameter: .* a form that this optimizer"),
        ({"*": optim.sgd(0.1), "*.bias": optim.adam()}, r"'\*.bias': adam\(\) gets no parameter"),
    ],
)
def test_patterns_that_match_nothing_are_reported_at_init(tensors, groups: Any, message: str):
    with pytest.raises(ValueError, match=message):
        optim.by_pattern(groups, optim.adam()).init(tensors())


@dataclasses.dataclass(frozen=True)
class CountsSteps:
    """Your own optimizer, whose state has another form."""

    def init(self, params: Params) -> Any:
        return torch.zeros(())

    def update(self, grads: Params, opt_state: Any, params: Params, value: Any = None) -> Any:
        return dict(params), opt_state + 1


def test_a_state_of_another_form_is_refused(tensors):
    with pytest.raises(TypeError, match=r"expected a state of the form .* from CountsSteps\(\)"):
        optim.by_pattern({"*.bias": CountsSteps()}, optim.adam()).init(tensors())  # type: ignore[dict-item]


# In runs.


def make_state(optimizer: Any, **options: Any) -> pc.State:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 2)
    return pc.State.create(net, loss=pc.losses.cross_entropy, optimizer=optimizer, key=0, duration="8ba", **options)


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(num)]


def test_surgery_keeps_the_state_of_each_part():
    squeeze = pc.algorithms.factorize(latent_features=2, min_features=4)
    optimizer = optim.by_pattern({"*": optim.muon(0.02)}, optim.adam(0.01))
    step = pc.compose(pc.loop_events)
    state = step.init(make_state(optimizer))
    for batch in batches(2):
        state = step(state, batch)
    smaller = pc.compose(pc.loop_events, [squeeze]).init(state)
    assert set(smaller.opt_state["momentum"]) == {name for name, param in smaller.params.items() if param.ndim == 2}
    assert torch.equal(smaller.opt_state["exp_avg"]["1.weight"], state.opt_state["exp_avg"]["1.weight"])
    assert smaller.opt_state["exp_avg"].keys() | smaller.opt_state["momentum"].keys() == set(smaller.params)


def test_no_op_model_leaves_the_rest():
    with_patterns = make_state(optim.by_pattern({"*": optim.muon()}, optim.adam(0.01)))
    state = pc.compose(pc.loop_events, [pc.algorithms.no_op_model()]).init(with_patterns)
    assert state.optimizer == optim.adam(0.01)


# Learning rates by layers


BATCH = torch.randint(0, 7, (2, 8), generator=torch.Generator().manual_seed(0))


def test_every_parameter_trains_at_its_layers_rate():
    net = models.gpt(7, 8, width=8, depth=3)
    groups = optim.layerwise(net, 1.0, 0.5)
    state = pc.State.create(net, loss=lambda out, target, reduction="mean": out.sum(), optimizer=optim.sgd(1.0), key=0)
    slow = state.replace(optimizer=optim.sgd(1.0, groups=groups))
    plain, after = (compose(loop_events)(one, (BATCH, BATCH)) for one in (state, slow))
    for name, start in state.params.items():
        block = next((int(part) for part in name.split(".") if part.isdigit()), None)
        moved, full = after.params[name] - start, plain.params[name] - start
        is_first = name in groups
        factor = 0.5**4 if is_first else 1.0 if block is None else 0.5 ** (3 - block)
        torch.testing.assert_close(moved, factor * full, rtol=1e-4, atol=1e-5)
    assert {groups[name]["lr"] for name in groups} == {0.0625, 0.125, 0.25, 0.5}


def test_blocks_may_be_named_and_rates_scheduled():
    net = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    lr = 0.1 * schedule.cosine()
    groups = optim.layerwise(net, lr, 0.5, blocks="1")
    assert list(groups) == ["0.weight", "0.bias", "1.a.*", "1.b.*"]
    assert groups["1.b.*"]["lr"] == lr * 0.5
    with pytest.raises(ValueError, match="has no nn.ModuleList"):
        optim.layerwise(nn.Linear(2, 2), 0.1, 0.5)
    with pytest.raises(ValueError, match="got one without children"):
        optim.layerwise(net, 0.1, 0.5, blocks="0")
