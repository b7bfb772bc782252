"""Laws of every optimizer, parameter groups, and the checks of settings."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.lr_scheduler import StepLR
from torch.utils import _pytree as pytree

from purecompose import optim, schedule
from purecompose.functional import to_channels_last
from purecompose.optim import base
from purecompose.optim.base import cells
from purecompose.schedule import Hparam, collect, cosine, hparam, linear, scheduled


LR = hparam("lr", 0.1)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": optim.sgd,
    "momentum": lambda lr: optim.sgd(lr, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda lr: optim.sgd(lr, momentum=0.9, nesterov=True),
    "dampening": lambda lr: optim.sgd(lr, momentum=0.9, dampening=0.5),
    "adam": lambda lr: optim.adam(lr, weight_decay=0.1, eps=1e-4),
    "amsgrad": lambda lr: optim.adam(lr, amsgrad=True, eps=1e-4),
    "adamw": lambda lr: optim.adamw(lr, eps=1e-4, groups={"*.bias": {"weight_decay": 0.0}}),
    "decoupled_sgdw": lambda lr: optim.decoupled_sgdw(lr, momentum=0.9, dampening=0.5, weight_decay=0.01),
    "decoupled_adamw": lambda lr: optim.decoupled_adamw(lr, eps=1e-4, weight_decay=0.01),
    "rmsprop": lambda lr: optim.rmsprop(lr, eps=1e-4, weight_decay=0.1),
    "centered": lambda lr: optim.rmsprop(lr, eps=1e-2, momentum=0.9, centered=True),
    "adagrad": lambda lr: optim.adagrad(lr, eps=1e-4, weight_decay=0.1, lr_decay=0.1),
    "sparse_adam": lambda lr: optim.sparse_adam(lr, eps=1e-4),
    "lion": lambda lr: optim.lion(lr, weight_decay=0.1),
    "adafactor": lambda lr: optim.adafactor(lr, weight_decay=0.1),
    "muon": lambda lr: optim.by_pattern(
        {"*": optim.muon(lr, ns_precision="full", adjust_lr="match_rms_adamw", filters=True)}, optim.adam(lr, eps=1e-4)
    ),
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def reading(lr: float | Tensor) -> Callable[[Any], Any]:
    """Return a `value` that only knows the hparam "lr"; plain numbers are never looked up."""
    return lambda scalar: {"lr": lr}[scalar.name]


def stack(trees: list[Any]) -> Any:
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def run(optimizer: Any, params: Any, grads: list[Any], value: Callable[[Any], Any]) -> tuple[Any, Any]:
    opt_state = optimizer.init(params)
    for step_grads in grads:
        params, opt_state = optimizer.update(step_grads, opt_state, params, value)
    return params, opt_state


@every_optimizer
def test_portions_of_parameters_move_as_all_at_once(kind: str, tensors, monkeypatch):
    optimizer, params, grads = OPTIMIZERS[kind](0.1), tensors(0), [tensors(1), tensors(2)]
    with torch.no_grad():
        at_once = run(optimizer, params, grads, reading(0.1))
        monkeypatch.setattr(base, "_PORTION", 8 * 7)  # the first weight exceeds it
        in_portions = run(optimizer, params, grads, reading(0.1))
    for one, other in zip(pytree.tree_leaves(at_once), pytree.tree_leaves(in_portions), strict=True):
        assert torch.equal(one, other)
    assert [list(tree) for tree in in_portions] == [list(tree) for tree in at_once]


@every_optimizer
def test_filters_keep_their_layout_in_memory(kind: str):
    filters = {"first.weight": torch.ones(4, 1, 3, 3), "weight": torch.ones(4, 2, 3, 3), "0.bias": torch.ones(4)}
    params = to_channels_last(filters)
    with torch.no_grad():  # as in a step, where the values of schedules are tensors
        moved, _ = run(OPTIMIZERS[kind](LR), params, [filters, filters], reading(torch.tensor(0.1)))
    assert [param.stride() for param in moved.values()] == [(9, 1, 3, 1), (18, 1, 6, 2), (1,)]


@every_optimizer
def test_gradients_are_dropped_portion_by_portion(kind: str, tensors, monkeypatch):
    monkeypatch.setattr(base, "_PORTION", 1)
    optimizer, params, grads = OPTIMIZERS[kind](0.1), tensors(0), tensors(1)
    opt_state = optimizer.init(params)
    marks = [weakref.ref(grad) for grad in grads.values()]
    alive: list[int] = []
    portions = base._portions

    def counted(*args: Any) -> Any:
        for portion in portions(*args):
            alive.append(sum(mark() is not None for mark in marks))
            yield portion

    monkeypatch.setattr(base, "_portions", counted)
    given = [grads]
    del grads
    with torch.no_grad():
        optimizer.update(given.pop(), opt_state, params)
    assert alive == [4, 3, 2, 1]


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("tensor_lr", [False, True])
@every_optimizer
def test_arguments_stay_bit_for_bit_and_nothing_is_shared(tensors, kind: str, tensor_lr: bool, watched: bool):
    optimizer, value = OPTIMIZERS[kind](LR), reading(torch.tensor(0.1) if tensor_lr else 0.1)
    params, grads = tensors(0), tensors(1)
    with torch.set_grad_enabled(watched):
        opt_state = run(optimizer, params, [tensors(2)], value)[1]
        before = pytree.tree_map(torch.clone, (grads, opt_state, params))
        result = optimizer.update(grads, opt_state, params, value)
    given_leaves = pytree.tree_leaves((grads, opt_state, params))
    assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(before), given_leaves, strict=True))
    storages = [leaf.untyped_storage().data_ptr() for leaf in (*given_leaves, *pytree.tree_leaves(result))]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)], ids=str)
@every_optimizer
def test_structure_shapes_and_dtypes_last(tensors, kind: str, lr: float | Tensor, dtype: torch.dtype):
    optimizer, params = OPTIMIZERS[kind](LR), tensors(0, dtype)
    opt_state = optimizer.init(params)
    for watched in (False, True):
        with torch.set_grad_enabled(watched):
            new = run(optimizer, params, [tensors(1, dtype), tensors(2, torch.float32)], reading(lr))
        old_leaves, old_spec = pytree.tree_flatten((params, opt_state))
        new_leaves, new_spec = pytree.tree_flatten(new)
        assert new_spec == old_spec
        assert [(x.shape, x.dtype) for x in new_leaves] == [(x.shape, x.dtype) for x in old_leaves]
        assert all(bool(torch.isfinite(x).all()) for x in new_leaves)
        assert all(list(slot) == [name for name in params if name in slot] for slot in new[1].values())


@every_optimizer
def test_parameters_without_gradient_keep_their_tensors_and_state(tensors, kind: str):
    optimizer, params = OPTIMIZERS[kind](LR), tensors(0)
    opt_state = run(optimizer, params, [tensors(1)], reading(0.1))[1]
    grads = {"head.bias": tensors(2)["head.bias"]}
    new_params, new_state = optimizer.update(grads, opt_state, params, reading(0.1))
    whole_params, whole_state = optimizer.update(tensors(2), opt_state, params, reading(0.1))
    assert list(new_params) == list(params)
    for name in params:
        if name == "head.bias":
            torch.testing.assert_close(new_params[name], whole_params[name])
        else:
            assert new_params[name] is params[name]
        for slot, leaves in new_state.items():
            expected = whole_state if name == "head.bias" else opt_state
            assert name not in leaves or torch.equal(leaves[name], expected[slot][name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@every_optimizer
def test_vmap_equals_the_loop_over_members(tensors, kind: str, dtype: torch.dtype):
    optimizer, lrs = OPTIMIZERS[kind](LR), torch.tensor([0.1, 0.01, 0.5], dtype=torch.float64)
    members = [(tensors(i, dtype), [tensors(10 + i, dtype), tensors(20 + i, dtype)]) for i in range(3)]

    def member(params: Any, grads: Any, lr: Tensor) -> Any:
        return run(optimizer, params, grads, reading(lr))

    with torch.no_grad():
        params, grads = stack(members)
        mapped = vmap(member)(params, grads, lrs)
        looped = [member(*args, lr) for args, lr in zip(members, lrs, strict=True)]
    tolerance = 1e-12 if dtype is torch.float64 else 5e-2
    torch.testing.assert_close(mapped, stack(looped), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("engine", ["autograd", "functorch"])
@every_optimizer
def test_gradient_through_three_updates_equals_finite_differences(tensors, kind: str, engine: str):
    optimizer, params = OPTIMIZERS[kind](LR), tensors(0)

    def final_loss(lr: Tensor) -> Tensor:
        # The loss is sum(p^4) / 4, so that its gradient p^3 carries the learning rate from step to step.
        moved, opt_state = params, optimizer.init(params)
        for _ in range(3):
            grads = {name: param**3 for name, param in moved.items()}
            moved, opt_state = optimizer.update(grads, opt_state, moved, reading(lr))
        return torch.stack([(param**4).sum() / 4 for param in moved.values()]).sum()

    lr = torch.tensor(0.05, dtype=torch.float64)
    if engine == "autograd":
        (slope,) = torch.autograd.grad(final_loss(leaf := lr.clone().requires_grad_()), leaf)
    else:
        slope = grad(final_loss)(lr)
    with torch.no_grad():
        difference = (final_loss(lr + 1e-6) - final_loss(lr - 1e-6)) / 2e-6
    torch.testing.assert_close(slope, difference, rtol=1e-6, atol=1e-8)


@every_optimizer
def test_gradients_flow_to_grads_and_params(tensors, kind: str):
    optimizer, params, grads = OPTIMIZERS[kind](LR), tensors(0), tensors(1)
    opt_state = run(optimizer, params, [tensors(2)], reading(0.1))[1]

    def moved(param: Tensor, gradient: Tensor) -> Tensor:
        new_params, _ = optimizer.update(
            {**grads, "head.weight": gradient}, opt_state, {**params, "head.weight": param}, reading(0.1)
        )
        return new_params["head.weight"]

    leaves = (params["head.weight"].requires_grad_(), grads["head.weight"].requires_grad_())
    assert torch.autograd.gradcheck(moved, leaves)


@every_optimizer
def test_traces_to_a_graph_that_holds_for_other_values(tensors, kind: str):
    optimizer, params = OPTIMIZERS[kind](LR), tensors(0)
    opt_state = run(optimizer, params, [tensors(1)], reading(0.1))[1]

    def update(grads: Any, opt_state: Any, params: Any, lr: Tensor) -> Any:
        return optimizer.update(grads, opt_state, params, reading(lr))

    with torch.no_grad():
        graph = make_fx(update)(tensors(2), opt_state, params, torch.tensor(0.1))
        other = (tensors(3), run(optimizer, tensors(4), [tensors(5)], reading(0.3))[1], tensors(4), torch.tensor(0.2))
        torch.testing.assert_close(graph(*other), update(*other), rtol=0, atol=0)


@every_optimizer
def test_equal_settings_are_equal_values(kind: str):
    one, two = OPTIMIZERS[kind](0.1 * cosine()), OPTIMIZERS[kind](0.1 * cosine())
    assert one == two and hash(one) == hash(two) and one is not two
    assert one != OPTIMIZERS[kind](0.2 * cosine())
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.lr = 0.2


def test_integers_and_group_mappings_make_equal_optimizers():
    groups = {"*.bias": {"lr": 1, "momentum": 0}}
    as_tuples = (("*.bias", (("momentum", 0.0), ("lr", 1.0))),)
    one, two = optim.sgd(1, momentum=0.5, groups=groups), optim.sgd(1.0, momentum=0.5, groups=as_tuples)
    assert one == two and hash(one) == hash(two)
    assert dataclasses.replace(one, lr=2.0).groups == one.groups


def test_hparams_are_found_in_settings_and_groups():
    optimizer = optim.adamw(LR * linear(), groups={"*.bias": {"weight_decay": hparam("wd", 0.1)}})
    assert {found.name for found in collect(optimizer, Hparam)} == {"lr", "wd"}


@given(
    names=st.lists(st.sampled_from(["a.weight", "a.bias", "b.weight", "b.bias", "norm"]), unique=True),
    patterns=st.lists(st.sampled_from(["*", "a.*", "*.bias", "norm", "nothing"]), unique=True),
)
def test_cells_partition_the_names_by_the_first_match(names: list[str], patterns: list[str]):
    rates = {pattern: float(i + 1) for i, pattern in enumerate(patterns)}
    optimizer = optim.sgd(0.0, groups={pattern: {"lr": rate} for pattern, rate in rates.items()})
    found = {name: cell.rule for cell in cells(optimizer, tuple(names)) for name in cell.names}
    assert sorted(found) == sorted(names)
    matches = {"*": names, "a.*": ["a.weight", "a.bias"], "*.bias": ["a.bias", "b.bias"], "norm": ["norm"]}
    for name in names:
        expected = next((rates[p] for p in patterns if name in matches.get(p, [])), 0.0)
        assert found[name] == optim.sgd(expected)


def test_a_group_that_matches_nothing_is_named_at_init(tensors):
    with pytest.raises(ValueError, match=r"sgd: groups\['bias'\] matches no parameter; the names are body.weight"):
        optim.sgd(0.1, groups={"*.bias": {}, "bias": {"lr": 0.0}}).init(tensors())


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ({"*": {"learning_rate": 1.0}}, TypeError, r"groups\['\*'\]: no option 'learning_rate'; the options are lr, "),
        ({"*": {"groups": ()}}, TypeError, "no option 'groups'"),
        ({"*": {"decay": "by rate"}}, TypeError, "no option 'decay'"),
        ({"*": {"lr": -1.0}}, ValueError, r"groups\['\*'\]: sgd: lr: expected a finite number >= 0, got -1.0"),
        ({3: {"lr": 1.0}}, TypeError, r"expected a pattern of parameter names, such as '\*.bias', got 3 \(int\)"),
        ({"*": 0.1}, TypeError, r"groups\['\*'\]: expected a mapping"),
        (0.1, TypeError, r"groups: expected a mapping, such as .* got 0.1 \(float\)"),
    ],
)
def test_wrong_groups_are_refused_at_construction(groups: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        optim.sgd(0.1, groups=groups)


@pytest.mark.parametrize(
    ("lr", "error", "message"),
    [
        (
            "0.1",
            TypeError,
            r"sgd: lr: expected a number, an hparam, a schedule or a product of them, got '0.1' \(str\)",
        ),
        (torch.tensor(0.1), TypeError, r"settings contain no tensors: use hparam"),
        (abs, TypeError, r"got <built-in function abs> .*with schedule.scheduled\(fn\)$"),
        (cosine, TypeError, r"got cosine \(function\); call it: cosine\(...\) is a schedule$"),
        (StepLR, TypeError, r"write schedule.from_torch\(torch.optim.lr_scheduler.StepLR, ...\)"),
        (StepLR(torch.optim.SGD([torch.zeros(1)], 0.1), 2), TypeError, r"schedule.from_torch\(.*StepLR, ...\)"),
    ],
)
def test_wrong_scalars_are_refused_at_construction(lr: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        optim.sgd(lr)


@pytest.mark.parametrize(
    "name", ["sgd", "decoupled_sgdw", "adam", "adamw", "decoupled_adamw", "rmsprop", "lion", "adafactor", "muon"]
)
def test_an_unknown_setting_is_answered_by_the_right_one(name: str):
    with pytest.raises(TypeError, match=rf"{name}\(\) got .*'learning_rate'; write lr=0\.\d+$"):
        getattr(optim, name)(learning_rate=0.1)
    with pytest.raises(TypeError, match=rf"{name}\(\) got .*'weight_deca'; did you mean 'weight_decay'"):
        getattr(optim, name)(0.1, weight_deca=0.1)


def test_an_unknown_parameter_and_a_state_of_other_settings_are_named(tensors):
    optimizer, params = optim.by_pattern({"*.weight": optim.muon()}, optim.adam()), tensors()
    with pytest.raises(KeyError, match="adam: 'tail' is missing among the parameters or in opt_state"):
        optimizer.update({"tail": torch.ones(2)}, optimizer.init(params), params)
    with pytest.raises(KeyError, match="muon: 'momentum' is missing among the parameters or in opt_state"):
        optimizer.update(tensors(1), {}, params)


def test_schedules_need_a_value_outside_a_step(tensors):
    params = tensors()
    optimizer = optim.sgd(0.1 * cosine())
    with pytest.raises(TypeError, match="has a value only at a point of a run"):
        optimizer.update(tensors(1), {}, params)
    new_params, _ = optimizer.update(tensors(1), {}, params, lambda scalar: 0.25)
    torch.testing.assert_close(new_params["head.bias"], params["head.bias"] - 0.25 * tensors(1)["head.bias"])


AS_TORCH: list[tuple[Any, Any, dict[str, Any]]] = [
    (optim.sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (optim.adam, torch.optim.Adam, {"weight_decay": 0.1}),
    (optim.adam, torch.optim.Adam, {"amsgrad": True}),
    (optim.adamw, torch.optim.AdamW, {}),
    (optim.rmsprop, torch.optim.RMSprop, {"momentum": 0.9, "weight_decay": 0.1}),
    (optim.rmsprop, torch.optim.RMSprop, {"centered": True, "eps": 0.1}),
    (optim.adagrad, torch.optim.Adagrad, {"initial_accumulator_value": 0.5, "weight_decay": 0.1}),
]


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize(("ours", "theirs", "options"), AS_TORCH)
def test_complex_parameters_move_as_in_torch(assert_like_torch, ours, theirs, options, differentiated: bool):
    with torch.set_grad_enabled(differentiated):
        assert_like_torch(ours(**options), theirs, options, dtype=torch.complex128, tolerance=1e-11)


@pytest.mark.parametrize("ours", [optim.adam, optim.lion])
def test_complex_parameters_move_as_pairs_of_numbers_beside_real_ones(ours, tensors):
    real, start = tensors(0), tensors(0, torch.complex64)
    params, grads = (
        {**real, "z": start["body.weight"].T},
        {**tensors(1), "z": tensors(1, torch.complex64)["body.weight"].T},
    )
    pairs = {**real, "z": torch.view_as_real(params["z"])}
    optimizer = ours(0.1)
    moved, opt_state = optimizer.update({**grads, "z": grads["z"].conj()}, optimizer.init(params), params)
    expected, _ = optimizer.update(
        {**grads, "z": torch.view_as_real(grads["z"].conj().resolve_conj())}, optimizer.init(pairs), pairs
    )
    assert torch.equal(torch.view_as_real(moved.pop("z")), expected.pop("z")) and opt_state["exp_avg"]["z"].is_complex()
    torch.testing.assert_close(moved, expected)


def test_adafactor_refuses_complex_parameters():
    with pytest.raises(TypeError, match="adafactor: expected real parameters, got 'w' of torch.complex64"):
        optim.adafactor().init({"w": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.parametrize(
    "text",
    [
        "sgd(lr=0.1)",
        "sgd(lr=0.1, momentum=0.9, nesterov=True)",
        "adam(lr=0.01)",
        "adamw(lr=0.01, weight_decay=0.1)",
        "adamw(weight_decay=0.0)",
        "decoupled_adamw(betas=(0.9, 0.999))",
        "decoupled_sgdw(lr=2.0, momentum=0.9, nesterov=True, weight_decay=0.001)",
        "rmsprop(alpha=0.9, centered=True)",
        "lion(lr=0.001, weight_decay=1.0)",
        "muon(lr=0.02, adjust_lr='match_rms_adamw', groups={'a.*': {'nesterov': False}})",
        "adafactor(eps=(1e-30, 0.001))",
        "by_pattern({'blocks.*': muon(lr=0.02), '*.bias': sgd(lr=0.1)}, adamw(lr=0.0003))",
        "from_torch(torch.optim.NAdam, betas=(hparam('b', 0.8), 0.9), lr=0.1, groups={'*.bias': {'lr': 0.2}})",
        "sgd(lr=0.1, groups={'*.bias': {'weight_decay': 0.0}})",
        "sgd(lr=0.1 * cosine(alpha_f=0.0, warmup='2ep', t_max='1.0dur') * hparam('lr', 1.0))",
        "adam(lr=linear(alpha_i=1.0, alpha_f=0.5, warmup='0ba', t_max='9ba'), betas=(0.8, 0.9))",
    ],
)
def test_the_repr_rebuilds_an_equal_object(text: str) -> None:
    names = {**vars(schedule), **vars(optim), "hparam": hparam, "torch": torch}
    optimizer = eval(text, names)
    assert repr(optimizer) == text
    assert eval(repr(optimizer), names) == optimizer


def test_a_user_defined_schedule_prints_by_its_name() -> None:
    def halved(timestamp: object) -> float:
        return 0.5

    assert repr(scheduled(halved)).startswith("scheduled(") and "halved" in repr(scheduled(halved))
