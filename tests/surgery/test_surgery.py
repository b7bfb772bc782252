"""Surgery: kept tensors are identical, new ones only depend on the key, and the old state is untouched."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from purecompose import State, compose, loop_events, losses, optim, surgery, to_module, tree
from purecompose.optim.wrapping import Guarded
from purecompose.surgery import Site


class Wrapped(nn.Module):
    """A module with an additional layer, inserted by a rule."""

    def __init__(self, inner: nn.Module, features: int) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Linear(features, features, bias=False)
        self.register_buffer("seen", torch.ones(features))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale(self.inner(inputs))


def wrap(module: nn.Linear, site: Site) -> nn.Module:
    del site
    return Wrapped(module, module.out_features)


RULES: dict[type[nn.Module], surgery.Rule] = {nn.Linear: wrap}
OPTIMIZERS = {
    "sgd": optim.sgd(0.1, momentum=0.9),
    "adam": optim.adam(0.01, amsgrad=True),
    "groups": optim.adamw(0.01, groups={"*.bias": {"weight_decay": 0.0}}),
}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def make_state(net: nn.Module | None = None, *, optimizer: Any = OPTIMIZERS["sgd"], **options: Any) -> State:
    settings: dict[str, Any] = {"loss": losses.cross_entropy, "duration": "8ba", **options}
    return State.create(net or make_net(), optimizer=optimizer, **settings)


def make_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)


def trained(state: State, num: int = 2) -> State:
    step = compose(loop_events)
    state = step.init(state)
    for seed in range(num):
        state = step(state, make_batch(seed))
    return state


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_kept_parameters_are_the_same_tensors_with_their_optimizer_state(optimizer: Any) -> None:
    before = trained(make_state(optimizer=optimizer))
    after, report = surgery.operate(before, RULES, name="wrap")
    assert report.replaced == ("0", "3") and report.dropped == ()
    assert report.made == ("0.scale.weight", "3.scale.weight", "0.seen", "3.seen")
    assert report.kept["0.inner.weight"] == "0.weight" and report.kept["1.weight"] == "1.weight"
    for new, old in report.kept.items():
        assert {**after.params, **after.buffers}[new] is {**before.params, **before.buffers}[old]
    for slot, values in after.opt_state.items():
        assert list(values) == [name for name in after.params if name in values]
        for name, value in values.items():
            if name in report.kept:
                assert value is before.opt_state[slot][report.kept[name]]
            else:
                fresh = optimizer.init({**after.params})[slot][name]
                assert torch.equal(value, fresh)
    assert "0.weight -> 0.inner.weight" in str(report) and "0.scale.weight" in str(report)
    assert compose(loop_events)(after, make_batch(5)).timestamp.batch == 3


class ClassWeighted(nn.Module):
    """Cross entropy with weights of the classes in a buffer, which grow."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weight = self.get_buffer("weight").mul_(2)
        return nn.functional.cross_entropy(outputs, targets, weight=weight)


def test_descriptions_of_settings_remain_those_of_their_first_values() -> None:
    before = trained(make_state(loss=ClassWeighted()))
    assert before.buffers["loss.weight"].tolist() == [4.0, 8.0, 12.0]
    after, _ = surgery.operate(before, RULES, name="wrap")
    assert before.context.settings.keys() == {"loss.weight"}
    assert after.context.settings == before.context.settings


def test_the_old_state_is_unchanged() -> None:
    before = trained(make_state())
    copied, model = before.copy(), before.model
    net = copy.deepcopy(before.model.module)
    surgery.operate(before, {nn.Linear: wrap, nn.ReLU: lambda module, site: nn.GELU()}, name="any")
    assert all(torch.equal(one, other) for one, other in zip(tree.leaves(before), tree.leaves(copied), strict=True))
    assert before.model is model and str(model.module) == str(net)


def test_new_weights_only_depend_on_the_key_and_the_place() -> None:
    state, torch_state = make_state(), torch.get_rng_state()
    first, _ = surgery.operate(state, RULES, name="wrap")
    again, _ = surgery.operate(state, RULES, name="wrap")
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert all(torch.equal(first.params[name], again.params[name]) for name in first.params)
    assert first.model == again.model

    def last(module: nn.Linear, site: Site) -> nn.Module | None:
        return wrap(module, site) if site.index == 1 else None

    alone, report = surgery.operate(state, {nn.Linear: last}, name="wrap")
    assert report.replaced == ("3",)
    assert torch.equal(alone.params["3.scale.weight"], first.params["3.scale.weight"])
    for other in (surgery.operate(make_state(key=1), RULES, name="wrap"), surgery.operate(state, RULES, name="other")):
        assert not torch.equal(other[0].params["3.scale.weight"], first.params["3.scale.weight"])


def test_a_surgery_that_is_already_done_changes_nothing() -> None:
    once, _ = surgery.operate(make_state(), RULES, name="wrap")
    twice, report = surgery.operate(once, {**RULES, Wrapped: None}, name="wrap")
    assert twice is once and report.replaced == ()


def test_nothing_to_replace_is_a_warning_that_names_the_classes() -> None:
    with pytest.warns(UserWarning, match="looked for Conv2d to replace, and found none in a network of Batch"):
        after, report = surgery.operate(state := make_state(), {nn.Conv2d: wrap}, name="wrap")
    assert after is state and not report.replaced
    with pytest.warns(UserWarning, match="looked for Linear"):
        surgery.operate(state, {nn.Linear: lambda module, site: None}, name="wrap")


def test_shared_modules_and_ties_are_kept() -> None:
    shared = nn.Linear(4, 4)
    net = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(4, 4))
    net[3].weight = shared.weight
    before = make_state(net)
    after, report = surgery.operate(before, RULES, name="wrap")
    assert report.replaced == ("0", "3")
    module: Any = to_module(after)
    assert module[0] is module[2] and module[0].inner.weight is module[3].inner.weight
    assert [name for name in after.params if name.endswith("inner.weight")] == ["0.inner.weight"]


def test_dropped_parameters_lose_their_optimizer_state() -> None:
    before = trained(make_state())
    after, report = surgery.operate(before, {nn.BatchNorm1d: lambda module, site: nn.LayerNorm(6)}, name="norm")
    assert report.made == ("1.weight", "1.bias") and set(report.dropped) == {
        "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"
    }  # fmt: skip
    assert after.params["1.weight"] is not before.params["1.weight"]
    assert not after.buffers and (after.opt_state["momentum"]["1.weight"] == 0).all()


def test_frozen_parameters_stay_frozen_under_their_new_names() -> None:
    net = make_net()
    net[0].weight.requires_grad_(False)
    after, _ = surgery.operate(make_state(net), RULES, name="wrap")
    assert after.context.frozen == {"0.inner.weight"}
    stepped = trained(after)
    assert torch.equal(stepped.params["0.inner.weight"], after.params["0.inner.weight"])


def test_flags_dtypes_and_the_whole_network() -> None:
    net = make_net().double()
    rules = {nn.BatchNorm1d: lambda module, site: nn.BatchNorm1d(6), nn.Linear: wrap}
    after, _ = surgery.operate(make_state(net, eval_mode=["1"]), rules, name="flags")
    flags = {name: module.training for name, module in after.model.module.named_children()}
    assert flags == {"0": True, "1": False, "2": True, "3": True}
    assert {param.dtype for param in after.params.values()} == {torch.float64}
    whole, report = surgery.operate(make_state(), {nn.Sequential: lambda module, site: nn.Linear(4, 3)}, name="whole")
    assert report.replaced == ("",) and list(whole.params) == ["weight", "bias"] and len(report.dropped) == 9
    assert trained(whole).timestamp.batch == 2


def test_each_module_is_visited_once_parents_first_with_its_place() -> None:
    seen: list[tuple[str, int, Any]] = []

    def look(module: nn.Module, site: Site) -> None:
        seen.append((site.name, site.index, type(site.parent).__name__))

    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net = nn.Sequential(block, block, nn.Linear(4, 3))
    with pytest.warns(UserWarning, match="^look changed nothing"):
        surgery.operate(make_state(net), {nn.Module: look}, name="look")
    assert seen == [
        ("", 0, "NoneType"), ("0", 1, "Sequential"), ("0.0", 2, "Sequential"), ("0.1", 3, "Sequential"),
        ("2", 4, "Sequential"),
    ]  # fmt: skip


def test_rules_that_cannot_be_followed_are_refused() -> None:
    def writes(module: nn.Linear, site: Site) -> None:
        with torch.no_grad():
            module.weight.zero_()

    state = make_state()
    with pytest.raises(RuntimeError, match="wrote into '0.weight'"):
        surgery.operate(state, {nn.Linear: writes}, name="any")
    inner = lambda module, site: wrap(module, site) if site.parent else None  # noqa: E731
    with pytest.raises(ValueError, match="two rules replace '0'"):
        surgery.operate(make_state(), {nn.Linear: wrap, nn.Module: inner}, name="any")
    number: Any = lambda module, site: 3  # noqa: E731
    with pytest.raises(TypeError, match=r"rule for '0' returned 3 \(int\), not a module"):
        surgery.operate(make_state(), {nn.Linear: number}, name="any")


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # of torch 2.11
def test_kept_weights_and_their_optimizer_state_are_not_copied() -> None:
    net = nn.Sequential(nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 2))
    state = make_state(net, optimizer=OPTIMIZERS["adam"])

    def last(module: nn.Linear, site: Site) -> nn.Module | None:
        return wrap(module, site) if site.index == 1 else None

    with torch.profiler.profile(profile_memory=True) as profile:
        surgery.operate(state, {nn.Linear: last}, name="wrap")
    sizes = [event.cpu_memory_usage for event in profile.events() or ()]
    assert 0 < max(sizes) < 500 * 500


class Steps(nn.Module):
    """A network that accesses its modules by a list, a tuple and a dict besides their names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.steps: list[Any] = [self.first, (nn.ReLU(), {"last": self.second})]

    def forward(self, inputs: Tensor) -> Tensor:
        first, (act, rest) = self.steps
        return rest["last"](act(first(inputs)))


def test_modules_in_lists_are_replaced_there_too() -> None:
    torch.manual_seed(0)
    net = Steps()
    changed, report = surgery.operate(make_state(net), RULES, name="wrap")
    assert report.replaced == ("first", "second")
    module, inputs = to_module(changed), torch.randn(5, 4)
    assert isinstance(module, Steps) and module.steps[0] is module.first and isinstance(module.first, Wrapped)
    by_name = module.second(module.first(inputs).relu())
    assert torch.equal(module(inputs), by_name) and torch.isfinite(by_name).all()
    assert net.steps[0] is net.first and isinstance(net.first, nn.Linear)


class Around(nn.Module):
    """A module, and one that a rule adds."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.extra = inner, nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.extra(self.inner(inputs))


def test_reused_modules_keep_their_flags() -> None:
    net = make_net()
    rules: surgery.Rules = {nn.Sequential: lambda module, site: Around(module) if site.name == "0" else None}
    state = make_state(nn.Sequential(net, nn.Identity()), eval_mode=["0.1"])
    changed, _ = surgery.operate(state, rules, name="around")
    module = changed.model.module
    assert not module.get_submodule("0.inner.1").training
    assert module.get_submodule("0").training and module.get_submodule("0.extra").training


def test_unfrozen_parameters_train_afterwards() -> None:
    net = make_net()
    net[0].weight.requires_grad_(False)
    state = make_state(net).replace(frozen=frozenset({"3.bias"}))
    changed, _ = surgery.operate(state, RULES, name="wrap")
    assert changed.context.frozen == frozenset({"3.inner.bias"})


def around_the_last(module: nn.Module, site: Site) -> nn.Module | None:
    return nn.Sequential(module) if site.index else None


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.sgd(0.1, momentum=0.9, groups={"?.weight": {"momentum": 0.0}}),
        Guarded(optim.sgd(0.1, momentum=0.9, groups={"?.weight": {"momentum": 0.0}})),
        optim.by_pattern({"?.weight": optim.sgd(0.1)}, optim.sgd(0.1, momentum=0.9)),
    ],
    ids=["plain", "inner", "by_pattern"],
)
def test_a_parameter_in_another_group_warns_and_gets_new_optimizer_state(optimizer: Any) -> None:
    state = trained(make_state(optimizer=optimizer))
    with pytest.warns(UserWarning, match=r"^wrap: '3.weight', now '3.0.weight': .*other settings than before"):
        after, _ = surgery.operate(state, {nn.Linear: around_the_last}, name="wrap")
    momentum = after.opt_state["momentum"]
    assert after.optimizer == optimizer and momentum["3.0.bias"] is state.opt_state["momentum"]["3.bias"]
    assert not momentum["3.0.weight"].any() and momentum["3.0.weight"].device.type == "cpu"
    assert compose(loop_events)(after, make_batch()).timestamp.batch == 3


# Rules that change their arguments


def without_bias(module: Any, site: Site) -> nn.Module:
    del site
    module.bias = None
    return nn.Sequential(module, nn.LayerNorm(3))


def doubled(module: Any, site: Site) -> nn.Module:
    del site
    value = module.weight.detach() * 2
    del module.weight
    module.weight = nn.Parameter(value)
    return nn.Sequential(module, nn.LayerNorm(3))


@pytest.mark.parametrize(("rule", "taken"), [(without_bias, "bias"), (doubled, "weight")])
def test_removed_modules_are_not_mistaken_for_new_ones(rule: surgery.Rule, taken: str) -> None:
    # Python may reuse the id of a removed object for the next one.
    torch.manual_seed(0)
    state = make_state(nn.Sequential(*(nn.Linear(3, 3) for _ in range(12))))
    after, report = surgery.operate(state, {nn.Linear: rule}, name="any")
    assert set(report.dropped) == {f"{index}.{taken}" for index in range(12)}
    assert all(new == old.replace(".", ".0.") for new, old in report.kept.items()) and len(report.kept) == 12
    for index in range(12):
        assert torch.equal(after.params[f"{index}.1.weight"], torch.ones(3))
        if taken == "weight":
            assert torch.equal(after.params[f"{index}.0.weight"], 2 * state.params[f"{index}.weight"])


def writes_data(module: Any) -> None:
    module.weight.data.mul_(5)


def writes_a_part(module: Any) -> None:
    module.weight.detach().view(-1)[:1].zero_()


def writes_several(module: Any) -> None:
    torch._foreach_zero_([module.weight.data, module.bias.data])  # pyright: ignore[reportPrivateImportUsage]


def writes_as_others_do(module: Any) -> None:
    nn.init.zeros_(module.weight)


def puts_others(module: Any) -> None:
    module.weight.data = module.weight.data * 5


def converts(module: nn.Module) -> None:
    module.double()


@pytest.mark.parametrize(
    "write", [writes_data, writes_a_part, writes_several, writes_as_others_do, puts_others, converts]
)
def test_no_rule_writes_into_the_callers_tensors(write: Callable[[nn.Module], Any]) -> None:
    state = make_state()
    copied = state.copy()

    def rule(module: nn.Module, site: Site) -> nn.Module:
        del site
        write(module)
        return nn.Sequential(module)

    with pytest.raises(RuntimeError, match="^any: a rule wrote into '0.weight'; give the new module a separate tensor"):
        surgery.operate(state, {nn.Linear: rule}, name="any")
    assert not tree.diff(state, copied)


def test_modules_that_are_not_kept_may_be_moved_elsewhere() -> None:
    def rule(module: nn.Linear, site: Site) -> nn.Module:
        del site
        module.weight.data = module.weight.data * 2
        new = nn.Linear(module.in_features, module.out_features)
        new.weight = nn.Parameter(module.weight.detach())
        return new

    state = make_state()
    after, report = surgery.operate(state, {nn.Linear: rule}, name="any")
    assert "0.weight" in report.dropped and torch.equal(after.params["0.weight"], 2 * state.params["0.weight"])


@pytest.mark.parametrize("others", [{}, {nn.ReLU: lambda module, site: nn.GELU()}], ids=["alone", "with others"])
def test_a_module_that_was_changed_and_returned_counts_as_replaced(others: Any) -> None:
    def less(module: nn.Dropout, site: Site) -> nn.Module:
        del site
        module.p = 0.125
        return module

    def headless(module: nn.Sequential, site: Site) -> nn.Module:
        module[1] = nn.Tanh()
        return module

    inner = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    state = make_state(nn.ModuleList([inner, nn.Dropout(0.5), nn.ReLU()]))
    after, report = surgery.operate(state, {nn.Dropout: less, nn.Sequential: headless, **others}, name="any")
    module: Any = after.model.module
    assert report.replaced == (("0", "1", "2") if others else ("0", "1"))
    assert module[1].p == 0.125 and isinstance(module[0][1], nn.Tanh)
    assert after.params["0.0.weight"] is state.params["0.0.weight"]
    before: Any = state.model.module
    assert before[1].p == 0.5 and isinstance(before[0][1], nn.ReLU)


class Borrowing(nn.Module):
    """A layer together with another layer's weight and a module from elsewhere in the network."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other, self.own = other, nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.own(inputs)


def test_tensors_from_elsewhere_in_the_network_keep_their_dtype_and_flags() -> None:
    state = make_state(nn.ModuleList([nn.BatchNorm1d(3), nn.Linear(3, 3).double()]), eval_mode=["0"])
    rules: surgery.Rules = {nn.Linear: lambda module, site: Borrowing(site.root.get_submodule("0"))}
    after, report = surgery.operate(state, rules, name="any")
    module: Any = after.model.module
    assert module[1].other is module[0] and not module[0].training and module[1].own.training
    assert module[0].weight.dtype is torch.float32 and after.params["0.weight"] is state.params["0.weight"]
    assert after.params["1.own.weight"].dtype is torch.float64 and report.dropped == ("1.weight", "1.bias")


def test_a_module_in_a_new_one_and_elsewhere_is_only_replaced_elsewhere() -> None:
    conv = nn.Linear(4, 4)
    state = make_state(nn.Sequential(conv, nn.Sequential(conv)))
    rules = {nn.Linear: wrap, nn.Sequential: lambda module, site: Around(module[0]) if site.name == "1" else None}
    module: Any = surgery.operate(state, rules, name="any")[0].model.module
    assert isinstance(module[0], Wrapped) and module[1].inner is module[0].inner


# The optimizer


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (optim.sgd(0.1, groups={"1.*": {"lr": 0.2}, "3.*": {"lr": 1.0}}), r"sgd: groups\['1.\*'\]"),
        (Guarded(optim.by_pattern({"1.*": optim.sgd(0.2)}, optim.adam(0.1))), r"by_pattern: '1.\*'"),
    ],
    ids=["groups", "by_pattern"],
)
def test_a_group_that_loses_its_parameters_is_an_error(optimizer: Any, named: str) -> None:
    norm: surgery.Rules = {nn.BatchNorm1d: lambda module, site: nn.Identity()}
    with pytest.raises(ValueError, match=rf"^norm: {named} matches no parameter.*before and after"):
        surgery.operate(make_state(optimizer=optimizer), norm, name="norm")


def test_a_slot_without_parameters_is_created_when_needed() -> None:
    optimizer = optim.sgd(0.1, momentum=0.9, groups={"?.weight": {"momentum": 0.0}, "?.bias": {"momentum": 0.0}})
    state = make_state(optimizer=optimizer)
    assert not state.opt_state
    with pytest.warns(UserWarning, match="other settings"):
        after, _ = surgery.operate(state, {nn.Linear: around_the_last}, name="any")
    assert {name: slot.device.type for name, slot in after.opt_state["momentum"].items()} == {
        "3.0.weight": "cpu", "3.0.bias": "cpu"
    }  # fmt: skip


class Named(nn.Module):
    """A network whose parameters have the names of an optimizer's slots."""

    def __init__(self, is_alone: bool) -> None:
        super().__init__()
        self.momentum = nn.Parameter(torch.ones(4))
        self.rest = nn.Identity() if is_alone else nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.rest(inputs * self.momentum)


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_parameter_may_have_the_name_of_a_slot(is_alone: bool) -> None:
    state = trained(make_state(Named(is_alone)))
    kind = nn.Identity if is_alone else nn.Linear
    after, _ = surgery.operate(state, {kind: lambda module, site: nn.Sequential(module)}, name="any")
    assert list(after.opt_state) == ["momentum"] and set(after.opt_state["momentum"]) == set(after.params)
    assert after.opt_state["momentum"]["momentum"] is state.opt_state["momentum"]["momentum"]
    assert compose(loop_events)(after, make_batch()).timestamp.batch == 3
