"""Networks split into skeleton and tensors and rebuilt: ties, buffers, modes, and networks that cannot be split."""

import collections
import copy
import functools
import threading
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import purecompose as pc
from purecompose._support.objects import fingerprint
from purecompose.nn.model import Model, Parts, from_module, to_module


class Net(nn.Module):
    """Linear, batch norm, linear; subclasses change what `forward` does to the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.norm(self.first(x))))


class Tied(nn.Module):
    """A weight with two names, a module with two names, a buffer with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
        self.out.weight = self.embed.weight
        self.again = self.embed
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("same_scale", self.get_buffer("scale"))

    def forward(self, x: Tensor) -> Tensor:
        return (self.embed(x) + self.out(x) + self.again(x)) * self.scale * self.same_scale


def make(factory: Any = Net, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return factory()


def take_apart(net: nn.Module, *, warns: bool = False) -> Parts:
    with warnings.catch_warnings():
        if warns:
            warnings.simplefilter("ignore")
        return from_module(net)


def run(parts: Parts, x: Tensor, train: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    skeleton = parts.model.skeleton(train)
    buffers = {name: buffer.clone() for name, buffer in parts.buffers.items()}
    with skeleton.bound(parts.params, buffers) as module:
        return module(x), skeleton.current_buffers()


def on_meta(model: Model) -> bool:
    """Return whether both skeletons contain only meta twins."""
    modules = [model.skeleton(train).module for train in (True, False)]
    return all(t.is_meta for module in modules for t in (*module.parameters(), *module.buffers()))


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 20).reshape(5, 4)


# Taking apart and running


@pytest.mark.parametrize("train", [True, False])
def test_a_bound_skeleton_computes_the_same_as_the_module(train):
    net = make()
    parts = from_module(net)
    reference = copy.deepcopy(net).train(train)
    outputs, buffers = run(parts, inputs(), train)
    assert torch.equal(outputs, reference(inputs()))
    assert all(torch.equal(buffers[name], value) for name, value in reference.named_buffers())
    assert on_meta(parts.model)


def test_tensors_are_copies_by_qualified_name_and_the_module_is_unchanged():
    net = make()
    before = copy.deepcopy(net.state_dict())
    parts = from_module(net)
    assert list(parts.params) == [name for name, _ in net.named_parameters()]
    assert list(parts.buffers) == [name for name, _ in net.named_buffers()]
    for tensor in (*parts.params.values(), *parts.buffers.values()):
        assert not tensor.requires_grad
        tensor.zero_()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert {t.device.type for t in net.parameters()} == {"cpu"}


def test_ties_are_kept():
    net = make(Tied)
    parts = from_module(net)
    assert list(parts.params) == ["embed.weight"] and list(parts.buffers) == ["scale"]
    outputs, _ = run(parts, inputs())
    assert torch.equal(outputs, net(inputs()))

    leaf = parts.params["embed.weight"].clone().requires_grad_()
    with parts.model.skeleton(True).bound({"embed.weight": leaf}, parts.buffers) as module:
        (gradient,) = torch.autograd.grad(module(inputs()).square().sum(), leaf)
    (expected,) = torch.autograd.grad(net(inputs()).square().sum(), list(net.parameters()))
    assert torch.equal(gradient, expected)

    exported: Any = to_module(parts.model, {"embed.weight": torch.ones(3, 4)}, parts.buffers)
    assert exported.embed.weight is exported.out.weight is exported.again.weight
    assert exported.scale is exported.same_scale and exported.again is exported.embed
    assert torch.equal(exported.out.weight, torch.ones(3, 4))


class TiedByData(nn.Module):
    """A weight under two names, two buffers on one memory, and columns of one matrix, which do not overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight.data = self.first.weight.data
        self.cos: Tensor
        self.sin: Tensor
        table = torch.arange(8.0).reshape(4, 2)
        self.register_buffer("cos", table[:, 0])
        self.register_buffer("sin", table[:, 1])
        self.register_buffer("again", table[:, 1])

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x + self.cos))) * self.sin


def test_ties_by_memory_are_ties():
    net = make(TiedByData)
    parts = from_module(net)
    assert list(parts.params) == ["first.weight", "first.bias", "second.bias"]
    assert list(parts.buffers) == ["cos", "sin"]
    state = pc.State.create(net, loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1, momentum=0.9))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    step, targets = pc.compose(pc.loop_events), torch.ones(5, 4)
    for _ in range(3):
        state = step(state, (inputs(), targets))
        optimizer.zero_grad()
        F.mse_loss(net(inputs()), targets).backward()
        optimizer.step()
    for name, value in state.params.items():
        torch.testing.assert_close(value, net.get_parameter(name).detach())


def test_buffers_that_share_memory_in_part_are_named():
    net = nn.Module()
    table = torch.arange(8.0)
    net.register_buffer("all", table)
    net.register_buffer("some", table[:3])
    with pytest.warns(UserWarning, match="'all' and 'some' share memory.*will not change the other"):
        from_module(net)


def test_a_parametrization_that_is_removed_from_a_module_stays_in_the_state():
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 3)), nn.ReLU(), parametrizations.orthogonal(nn.Linear(3, 3))
    )
    parts, expected = from_module(net), net(inputs())
    exported: Any = to_module(parts.model, parts.params, parts.buffers)
    for place in (0, 2):
        parametrize.remove_parametrizations(exported[place], "weight")
    torch.testing.assert_close(exported(inputs()), expected)
    assert sorted(name for name, _ in exported.named_parameters()) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    again: Any = to_module(parts.model, parts.params, parts.buffers)
    for whole in (net, again):
        torch.testing.assert_close(whole(inputs()), expected)
        assert parametrize.is_parametrized(whole[0]) and type(whole[0]).__name__ == "ParametrizedLinear"
    torch.testing.assert_close(copy.deepcopy(again)(inputs()), expected)


def test_to_module_gives_an_independent_module_with_its_own_leaves():
    net = make()
    net.first.weight.requires_grad_(False)
    net.norm.eval()
    parts = from_module(net)
    exported: Any = to_module(parts.model, parts.params, parts.buffers)
    assert [m.training for m in exported.modules()] == [m.training for m in net.modules()]
    assert [p.requires_grad for p in exported.parameters()] == [p.requires_grad for p in net.parameters()]
    assert all(type(p) is nn.Parameter and p.is_leaf for p in exported.parameters())
    assert torch.equal(exported(inputs()), net(inputs()))
    with torch.no_grad():
        exported.second.weight.zero_()
    assert parts.params["second.weight"].any() and on_meta(parts.model)
    with pytest.raises(KeyError, match="second.bias"):
        to_module(parts.model, {k: v for k, v in parts.params.items() if k != "second.bias"}, parts.buffers)


def test_a_missing_tensor_is_named_before_anything_is_computed():
    parts = from_module(make())
    incomplete = {name: value for name, value in parts.params.items() if name != "norm.weight"}
    with pytest.raises(KeyError, match="norm.weight"):
        with parts.model.skeleton(True).bound(incomplete, parts.buffers):
            pass
    assert on_meta(parts.model)
    run(parts, inputs())  # the skeleton is not left locked or half bound


def test_an_uncovered_meta_tensor_is_an_error():
    module = nn.Linear(2, 1, device="meta")
    with pytest.raises(ValueError, match="bias.*meta.*no parameter or buffer covers"):
        Model(module, {id(module.weight): "weight"}, ("weight",))


def test_strides_are_kept():
    parts = from_module(make(lambda: nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last))
    weight = parts.params["weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    for module in (parts.model.module, to_module(parts.model, parts.params, {})):
        assert module.get_parameter("weight").stride() == weight.stride()


# Modes and frozen parameters


def flags(module: nn.Module) -> list[bool]:
    return [child.training for child in module.modules()]


def test_eval_flags_of_single_modules_are_kept_for_training():
    net = make()
    net.norm.eval()
    model = from_module(net).model
    assert flags(model.skeleton(True).module) == [True, True, False, True]
    assert not any(flags(model.skeleton(False).module))


def test_a_network_wholly_in_eval_mode_trains_in_training_mode():
    model = from_module(make().eval()).model
    assert all(flags(model.skeleton(True).module)) and not any(flags(model.skeleton(False).module))


def test_parameters_without_gradient_are_frozen():
    net = make(Tied)
    assert from_module(net).frozen == frozenset()
    net.embed.weight.requires_grad_(False)
    assert from_module(net).frozen == {"embed.weight"}


# Changes of the module by forward


class InPlace(Net):
    """A network that counts in a buffer in place, and rebinds another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("running", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.running = 0.5 * self.running + x.mean(0)
        return super().forward(x)


def test_buffers_written_in_place_or_rebound_come_back():
    net = make(InPlace)
    parts = from_module(net)
    outputs, buffers = run(parts, inputs())
    assert torch.equal(outputs, net(inputs()))
    for name, value in net.named_buffers():  # the network itself as the independent reference
        assert torch.equal(buffers[name], value), name
    assert parts.buffers["count"] == 0 and not parts.buffers["running"].any()
    assert on_meta(parts.model)


class Caching(Net):
    """A network that writes to every kind of container that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.seen, self.table, self.kinds = None, [], {"a": 1}, {1}
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        offset = 0 if self.cache is None else 100  # shows whether anything was kept
        offset += 100 * (self.last is not None) + 100 * len(self.seen)
        self.last, self.cache, self.table["b"] = x, x, 2
        self.seen.append(x)
        self.kinds.add(2)
        self.fresh = x
        self.register_buffer("made", x)
        del self.table["a"]
        return super().forward(x) + offset


def test_other_attributes_that_forward_writes_are_restored_and_named_once():
    parts = from_module(make(Caching))
    with pytest.warns(UserWarning, match="neither a parameter nor a buffer") as caught:
        first, _ = run(parts, inputs())
    said = str(caught[0].message)
    assert len(caught) == 1
    assert all(name in said for name in ("last", "seen", "table", "kinds", "fresh", "cache", "made"))
    again, _ = run(parts, inputs())  # a second warning would be an error
    run(parts, inputs(), train=False)
    assert torch.equal(first, again)
    module = parts.model.module
    kept = (module.last, module.seen, module.table, module.kinds, module.cache)
    assert kept == (None, [], {"a": 1}, {1}, None)
    assert not hasattr(module, "fresh") and not hasattr(module, "made")


@pytest.mark.parametrize("name", ["cache", "made"])
def test_a_buffer_that_forward_registers_is_removed(name):
    class Registering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if name == "cache":
                self.register_buffer("cache", None)

        def forward(self, x: Tensor) -> Tensor:
            kept = getattr(self, name, None)
            self.register_buffer(name, x)
            return x if kept is None else x + 100

    parts = from_module(Registering())
    with pytest.warns(UserWarning, match=f"forward changed {name},"):
        run(parts, inputs())
    assert torch.equal(run(parts, inputs())[0], inputs())


def test_the_skeleton_survives_a_warning_that_is_an_error_and_a_forward_that_fails():
    parts = from_module(make(Caching))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="forward changed"):
            run(parts, inputs())
    with pytest.raises(RuntimeError, match="shape"):
        run(parts, torch.ones(5, 7))
    assert parts.model.module.seen == [] and on_meta(parts.model)
    results = []
    thread = threading.Thread(target=lambda: results.append(run(parts, inputs())[0]))
    thread.start()
    thread.join(10)
    assert len(results) == 1, "the skeleton stayed locked"


class Masked(nn.Module):
    """Tensors in a list, in a dictionary, and as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.masks = [torch.tensor([1.0, 0, 1, 0]), torch.ones(4)]
        self.tables = {"shift": torch.full((4,), 3.0), "words": ["plain"]}
        self.plain = torch.full((4,), 5.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.masks[0] + self.tables["shift"] * self.masks[1] + self.plain


def test_tensors_that_are_neither_parameter_nor_buffer_become_buffers_with_a_warning():
    net = Masked()
    with pytest.warns(UserWarning, match="neither parameter nor buffer") as caught:
        parts = from_module(net)
    expected = ["masks.0", "masks.1", "tables.shift", "plain"]
    assert [str(w.message).split()[0] for w in caught] == expected
    assert list(parts.buffers) == expected and list(parts.params) == ["weight"]
    assert torch.equal(run(parts, inputs())[0], net(inputs()))
    doubled = parts._replace(buffers={name: 2 * value for name, value in parts.buffers.items()})
    expected_outputs = inputs() * 2 * net.masks[0] + 6 * 2 + 10
    assert torch.equal(run(doubled, inputs())[0], expected_outputs), "a skeleton kept a weight of its own"
    assert torch.equal(to_module(parts.model, parts.params, doubled.buffers)(inputs()), expected_outputs)


class Emptying(Masked):
    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        self.masks.clear()
        return outputs


def test_a_buffer_that_forward_removes_is_an_error_and_is_restored():
    parts = take_apart(Emptying(), warns=True)
    with pytest.warns(UserWarning, match="forward changed masks"):
        with pytest.raises(RuntimeError, match="removed the buffer 'masks.0'"):
            run(parts, inputs())
    module: Any = parts.model.module
    assert [mask.is_meta for mask in module.masks] == [True, True]


# Sharing


def test_two_sets_of_weights_share_a_skeleton_without_disturbing_each_other():
    parts = from_module(make())
    other = parts._replace(params={name: value + 1 for name, value in parts.params.items()})
    alone = run(parts, inputs())[0], run(other, inputs())[0]
    skeleton = parts.model.skeleton(True)
    buffers = {name: value.clone() for name, value in parts.buffers.items()}
    with skeleton.bound(parts.params, buffers) as module:
        assert torch.equal(run(other, inputs())[0], alone[1])  # bound inside another binding
        buffers.update({name: value.clone() for name, value in parts.buffers.items()})
        assert torch.equal(module(inputs()), alone[0])
    assert not torch.equal(*alone) and on_meta(parts.model)


def test_threads_take_turns():
    parts = from_module(make())
    variants = [
        parts._replace(params={name: value + shift for name, value in parts.params.items()}) for shift in range(4)
    ]
    expected = [run(variant, inputs())[0] for variant in variants]
    wrong = []

    def work(index: int) -> None:
        for _ in range(50):
            if not torch.equal(run(variants[index], inputs())[0], expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and on_meta(parts.model)


def test_bindings_last_to_the_end_of_a_held_scope():
    parts = from_module(make())
    skeleton = parts.model.skeleton(True)
    with skeleton.held(), skeleton.held():
        with skeleton.bound(parts.params, parts.buffers):
            pass
        first: Any = skeleton.module.get_submodule("first")
        assert first.weight is parts.params["first.weight"]
    assert on_meta(parts.model)


# Kinds of modules


def test_parametrizations_work():
    net = make(lambda: parametrizations.weight_norm(nn.Linear(4, 3)))
    parts = from_module(net)
    weights = {f"parametrizations.weight.original{i}" for i in (0, 1)}
    assert set(parts.params) == {"bias", *weights}
    assert torch.equal(run(parts, inputs())[0], net(inputs()))
    assert torch.equal(to_module(parts.model, parts.params, parts.buffers)(inputs()), net(inputs()))
    assert parts.model == from_module(make(lambda: parametrizations.weight_norm(nn.Linear(4, 3)), 1)).model


@pytest.mark.parametrize("train", [True, False])
def test_recurrent_networks_work(train):
    net = make(lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True))
    parts = from_module(net)
    expected = net(inputs())[0]
    for _ in range(2):
        assert torch.equal(run(parts, inputs(), train)[0][0], expected)
    assert torch.equal(to_module(parts.model, parts.params, parts.buffers)(inputs())[0], expected)
    leaves = {name: value.clone().requires_grad_() for name, value in parts.params.items()}
    with parts.model.skeleton(train).bound(leaves, {}) as module:
        found = torch.autograd.grad(module(inputs())[0].sum(), list(leaves.values()))
    expected_grads = torch.autograd.grad(net(inputs())[0].sum(), list(net.parameters()))
    assert all(map(torch.equal, found, expected_grads))


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prior = torch.distributions.Normal(torch.zeros(3), torch.ones(3))


class Uncopyable(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.lock = threading.Lock()


def old_spectral_norm() -> nn.Module:
    return spectral_norm(nn.Linear(4, 3))


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still around
        return weight_norm(nn.Linear(4, 3))


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Linear(1, 1))


def with_traced_part() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced: Any = torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3))
    return nn.Sequential(nn.Linear(4, 3), traced)


def with_compiled_forward() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3))
    net[0].forward = torch.compile(net[0].forward, backend="eager")
    return net


def pruned() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3))
    prune.l1_unstructured(net[0], "weight", 0.5)
    return net


def with_hooked_weight(name: str) -> nn.Module:
    net = nn.Linear(4, 3)
    getattr(net.weight, name)(lambda tensor: None)
    return net


class Doubled(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def with_subclass() -> nn.Module:
    net = nn.Linear(4, 3)
    net.weight = nn.Parameter(net.weight.detach().as_subclass(Doubled))
    return net


def with_buffer(tensor: Tensor) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3))
    net[0].register_buffer("adjacency", tensor)
    return net


class Viewing(nn.Module):
    """Two parameters, of which one is the first rows of the other."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.ones(4, 4))
        self.part = nn.Parameter(self.whole.detach()[:2] if not options else self.whole.detach(), **options)


@pytest.mark.parametrize(
    "factory, error, said",
    [
        (with_traced_part, TypeError, "'1' is a TopLevelTracedModule, scripted or traced"),
        (lambda: torch.compile(make(), backend="eager"), TypeError, r"the network was compiled.*_orig_mod.*pc.compile"),
        (with_compiled_forward, TypeError, "'0' was compiled by torch.compile"),
        (lambda: nn.DataParallel(make()), TypeError, "the network is a DataParallel: .*net.module.*data_parallel"),
        (pruned, ValueError, r"0.weight is computed from other tensors.*prune.remove"),
        (lambda: with_hooked_weight("register_hook"), ValueError, "weight has hooks.*AFTER_TRAIN_BATCH"),
        (lambda: with_hooked_weight("register_post_accumulate_grad_hook"), ValueError, "weight has hooks"),
        (lambda: with_buffer(torch.eye(2).to_sparse()), TypeError, r"0\.adjacency is sparse .*coo.*indices and values"),
        (lambda: with_buffer(torch.eye(2).to_sparse_csr()), TypeError, r"0\.adjacency is sparse .*csr"),
        (with_subclass, TypeError, "weight is a Doubled, a subclass of Tensor with its own operations"),
        (Viewing, ValueError, "'whole' and 'part' share memory.*compute the other tensor from it"),
        (lambda: Viewing(requires_grad=False), ValueError, "'whole' and 'part' share memory.*requires_grad"),
        (lambda: nn.LazyLinear(3), ValueError, "weight has no shape yet.*run the module once"),
        (lambda: nn.Linear(2, 1, device="meta"), ValueError, "weight is on the meta device.*to_empty"),
        (old_weight_norm, ValueError, "weight is computed from other tensors.*parametrizations"),
        (old_spectral_norm, ValueError, "weight is computed from other tensors.*parametrizations"),
        (scripted, TypeError, "the network is a RecursiveScriptModule, scripted or traced.*before torch.jit.script"),
        (lambda: torch.ones(3), TypeError, "expected an nn.Module, got a torch.float32 tensor"),
        (lambda: nn.Linear, TypeError, r"expected an nn.Module, .*; call it: Linear\(\.\.\.\)"),
        (
            lambda: nn.Sequential(Hidden()),
            ValueError,
            r"Sequential holds 2 tensors in.*float32\[3\], in 0\.prior\. Keep them in lists",
        ),
        (Uncopyable, TypeError, "Uncopyable cannot be deep-copied: .*lock"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm:FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_networks_that_cannot_be_taken_apart_are_a_clear_error(factory, error, said):
    with pytest.raises(error, match=said):
        from_module(factory())


# Equality


def with_hook() -> nn.Module:
    net = nn.Linear(4, 3)
    net.register_forward_hook(_hook)
    return net


def _hook(module: nn.Module, args: object, outputs: Tensor) -> Tensor:
    return outputs


SAME = [Net, Tied, with_hook, lambda: nn.LSTM(4, 3), lambda: nn.MultiheadAttention(4, 2)]


@pytest.mark.parametrize("factory", SAME, ids=["net", "tied", "hook", "lstm", "attention"])
def test_two_networks_of_one_architecture_are_equal(factory):
    first, second = (from_module(make(factory, seed)).model for seed in (0, 1))
    assert first == second and hash(first) == hash(second)
    x = torch.ones(1, 5, 4)
    if factory is Net:
        run(from_module(make(factory)), x[0])
    assert first == second


def untied() -> Any:
    net = make(Tied)
    net.out = nn.Linear(4, 3, bias=False)
    return net


def frozen() -> nn.Module:
    return nn.Linear(4, 3).requires_grad_(False)


def in_part_eval() -> Any:
    net = make()
    net.norm.eval()
    return net


@pytest.mark.parametrize(
    "first, second",
    [
        (Net, InPlace),
        (Tied, untied),
        (lambda: nn.Linear(4, 3), lambda: nn.Linear(4, 2)),
        (lambda: nn.Linear(4, 3), lambda: nn.Linear(4, 3, dtype=torch.float64)),
        (lambda: nn.Linear(4, 3), frozen),
        (lambda: nn.Linear(4, 3), with_hook),
        (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2)),
        (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.GELU())),
        (Net, in_part_eval),
    ],
)
def test_other_architectures_and_settings_are_unequal(first, second):
    assert from_module(make(first)).model != from_module(make(second)).model


def test_a_model_is_immutable_is_its_own_copy_and_prints_briefly():
    model = from_module(make()).model
    assert copy.deepcopy(model) is model
    assert repr(model) == "Model(Net, 6 parameters)"
    assert model != "Model"


def test_fingerprints_of_objects_that_are_not_modules():
    def function() -> None: ...

    class Setting:
        def __init__(self, value: object) -> None:
            self.value = value

    cyclic: list[object] = [1]
    cyclic.append(cyclic)
    for thing in ([1, {"a": (2.0, None)}], Setting({1, 2}), function, cyclic, torch.ones(2), range(3)):
        assert fingerprint(thing) == fingerprint(thing)
        hash(fingerprint(thing))
    assert fingerprint(Setting([1])) == fingerprint(Setting([1])) != fingerprint(Setting([2]))
    meta = torch.zeros(2, device="meta")
    assert fingerprint(meta) == fingerprint(torch.ones(2, device="meta")) != fingerprint(torch.ones(2))
    assert len({fingerprint(value) for value in (1, 1.0, True, "1", (1,), [1])}) == 6


class _Named(dict[str, Any]):
    """A configuration that keeps a setting in an attribute."""

    def __init__(self, items: dict[str, Any], name: object) -> None:
        super().__init__(items)
        self.name = name


@pytest.mark.parametrize(
    "first, second",
    [
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros(2), torch.zeros(3)),
        (torch.ones(2).to_sparse(), torch.ones(2)),
        (np.zeros(2), np.ones(2)),
        (np.zeros(2), np.zeros(2, dtype=np.float32)),
        (np.zeros((1, 2)), np.zeros((2, 1))),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        ({1: 0}, {"1": 0}),
        ({1: 0}, {True: 0}),
        (_Named({}, 1), _Named({}, 2)),
        (
            functools.partial(F.cross_entropy, weight=torch.tensor([1.0, 2])),
            functools.partial(F.cross_entropy, weight=torch.tensor([1.0, 3])),
        ),
    ],
)
def test_fingerprints_distinguish_values_and_types(first, second):
    assert fingerprint(first) == fingerprint(copy.deepcopy(first)) != fingerprint(second)


# Attributes that forward changes, of every kind


class Counter:
    """A plain user-defined object."""

    def __init__(self) -> None:
        self.count, self.log = 0, []


def bump(counter: Counter) -> int:
    counter.count += 1
    counter.log.append(1)
    return counter.count + len(counter.log)


class Remembering(nn.Module):
    def __init__(self, memory: Any, use: Any) -> None:
        super().__init__()
        self.memory, self.use = memory, use

    def forward(self, x: Tensor) -> Tensor:
        return x * self.use(self.memory)


def append(memory: Any) -> int:
    memory.append(1)
    return len(memory)


MEMORIES: list[Any] = [
    ([], append),
    ({"a": {"b": []}}, lambda memory: append(memory["a"]["b"])),
    (([],), lambda memory: append(memory[0])),
    (collections.deque([1], maxlen=9), append),
    (Counter(), bump),
    ([{"inner": Counter()}], lambda memory: bump(memory[0]["inner"])),
]


@pytest.mark.parametrize("memory, use", MEMORIES, ids=["list", "nested", "tuple", "deque", "object", "deep"])
def test_nested_attributes_that_forward_writes_are_restored(memory, use):
    parts = from_module(Remembering(memory, use))
    with pytest.warns(UserWarning, match="forward changed memory"):
        first, _ = run(parts, inputs())
    assert torch.equal(run(parts, inputs())[0], first)


def _count(module: Any, args: object, outputs: Tensor) -> Tensor:
    module.count = getattr(module, "count", 0) + 1
    return outputs * module.count


def test_attributes_that_a_hook_writes_on_a_module_of_torch_are_restored():
    net = nn.Linear(4, 3)
    net.register_forward_hook(_count)
    parts = from_module(net)
    with pytest.warns(UserWarning, match="forward changed count"):
        first, _ = run(parts, inputs())
    assert torch.equal(run(parts, inputs())[0], first)


# Functions that keep the user's network


def with_attribute(make_function: Any) -> nn.Module:
    net = make()
    net.f = make_function(net)
    return net


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].register_forward_hook(lambda module, args, outputs: net[1](outputs))
    return net


GLOBAL_NET = nn.Linear(4, 3)


def global_function(x: Tensor) -> Tensor:
    return GLOBAL_NET(x)


def with_global() -> nn.Module:
    net: Any = nn.Sequential(GLOBAL_NET)
    net.f = global_function
    return net


class Calling:
    """A user-defined object that keeps a function."""

    def __init__(self, function: Any) -> None:
        self.function = function


@pytest.mark.parametrize(
    "make_reference",
    [
        lambda net: weakref.ref(net.norm),
        lambda net: [weakref.ref(net.norm)],
        lambda net: Calling(weakref.ref(net.norm)),
        lambda net: weakref.WeakMethod(net.norm.forward),
    ],
    ids=["reference", "list", "object", "method"],
)
def test_weak_references_into_the_network_are_refused(make_reference):
    net = with_attribute(make_reference)
    with pytest.raises(ValueError, match="f has a weak reference that keeps the module 'norm'.*in a list"):
        from_module(net)


@pytest.mark.parametrize(
    "factory, said",
    [
        (lambda: with_attribute(lambda net: Calling(lambda x: net.norm(x))), "f has .* keeps the module 'itself'"),
        (lambda: with_attribute(lambda net: lambda x: net.norm(x)), "f has .* keeps the module 'itself'"),
        (lambda: with_attribute(lambda net: [lambda x, layer=net.norm: layer(x)]), "f has .* keeps the module 'norm'"),
        (lambda: with_attribute(lambda net: lambda w=net.norm.weight: w), "keeps the tensor 'norm.weight'"),
        (
            lambda: with_attribute(lambda net: functools.partial(lambda f, x: net.first(f(x)), torch.relu)),
            "f has .* keeps the module 'itself'",
        ),
        (hooked, "0._forward_hooks has .* keeps the module 'itself'"),
        (with_global, "f has .* keeps the module '0'"),
    ],
    ids=["object", "closure", "default", "tensor", "partial", "hook", "global"],
)
def test_functions_that_keep_the_network_are_refused(factory, said):
    with pytest.raises(ValueError, match=f"{said}.*[Mm]ake it a method"):
        from_module(factory())


def test_functions_and_methods_that_do_not_keep_the_network_are_accepted():
    outside = nn.Linear(4, 4)
    for make_function in (lambda net: net.forward, lambda net: F.relu, lambda net: lambda x: outside(x)):
        from_module(with_attribute(make_function))
    from_module(nn.TransformerEncoderLayer(8, 2, activation=F.gelu))
    with_hook()


def test_a_module_outside_of_the_network_with_its_weights_is_refused() -> None:
    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            hidden = nn.Linear(3, 3)
            hidden.weight, hidden.bias = self.first.weight, self.first.bias
            self.steps = [hidden]

    with pytest.raises(ValueError, match=r"Hiding holds a Linear, which contains 'first.weight'.*nn.ModuleList"):
        from_module(Hiding())
