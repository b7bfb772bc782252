"""`from_torch`: torch's optimizer classes applied to values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import purecompose as pc
from purecompose import optim
from purecompose.schedule import cosine, hparam, linear


CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Adam": (torch.optim.Adam, {"amsgrad": True, "foreach": False}),
    "AdamW": (torch.optim.AdamW, {"foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "fused": True}),
    "Adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9, "eps": 1e-3}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"weight_decay": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 10.0}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
}
every_class = pytest.mark.parametrize("kind", CLASSES)


def ours(kind: str, **more: Any) -> Any:
    optimizer, settings = CLASSES[kind]
    return optim.from_torch(optimizer, **settings, **more)


@every_class
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torchs_own_bit_for_bit(tensors, kind: str, dtype: torch.dtype):
    optimizer, (torchs, settings), params = ours(kind), CLASSES[kind], tensors(0, dtype)
    twins = {name: nn.Parameter(param.clone()) for name, param in params.items()}
    opt_state, reference = optimizer.init(params), torchs(twins.values(), **settings)  # type: ignore[call-arg]
    for step in range(50):
        grads = tensors(step + 1, dtype)
        if step % 7 == 0:
            grads = {name: grad for name, grad in grads.items() if not name.startswith("head")}
        params, opt_state = optimizer.update(grads, opt_state, params)
        for name, twin in twins.items():
            twin.grad = grads[name].clone() if name in grads else None
        reference.step()
        assert all(torch.equal(params[name], twin.detach()) for name, twin in twins.items()), step
    for name, twin in twins.items():
        for slot, kept in reference.state[twin].items():
            assert torch.equal(opt_state[slot][name], torch.as_tensor(kept).detach())


@every_class
def test_parameters_without_gradient_keep_their_tensors_and_state(tensors, kind: str):
    optimizer, params = ours(kind), tensors(0)
    params, opt_state = optimizer.update(tensors(1), optimizer.init(params), params)
    moved, new_state = optimizer.update({"head.bias": tensors(2)["head.bias"]}, opt_state, params)
    assert [name for name in params if moved[name] is not params[name]] == ["head.bias"]
    for slot, leaves in new_state.items():
        changed = [name for name in leaves if leaves[name] is not opt_state[slot][name]]
        assert changed == (["head.bias"] if "head.bias" in leaves else [])
    same, same_state = optimizer.update({}, opt_state, params)
    assert same == params and pc.tree.equal(same_state, opt_state)


def test_a_parameter_that_is_thawed_late_starts_late(tensors):
    optimizer = optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    params, opt_state = tensors(0), optimizer.init(tensors(0))
    params, opt_state = optimizer.update({"head.bias": tensors(1)["head.bias"]}, opt_state, params)
    assert opt_state["started"]["head.bias"] and not opt_state["started"]["body.bias"]
    _, opt_state = optimizer.update(tensors(2), opt_state, params)
    # The first gradient is not dampened.
    assert torch.equal(opt_state["momentum_buffer"]["body.bias"], tensors(2)["body.bias"])
    late = 0.9 * tensors(1)["head.bias"] + 0.5 * tensors(2)["head.bias"]
    torch.testing.assert_close(opt_state["momentum_buffer"]["head.bias"], late)


def test_groups_equal_torchs(assert_like_torch):
    groups = {"body.bias": {"lr": 0.5, "weight_decay": 0.1}, "head.weight": {"betas": (0.5, 0.6)}}
    assert_like_torch(
        optim.from_torch(torch.optim.NAdam, lr=0.1, groups=groups),
        torch.optim.NAdam,
        {"lr": 0.1},
        groups,
        tolerance=0.0,
    )


@pytest.mark.parametrize("wrapped", [float, torch.tensor, lambda x: torch.tensor(x, dtype=torch.float64)])
def test_hparams_and_schedules_are_read_in_every_update(tensors, wrapped: Callable[[float], Any]):
    moving = optim.from_torch(torch.optim.NAdam, lr=hparam("lr", 0.5) * linear(), betas=(hparam("b1", 0.5), 0.75))
    params, opt_state = tensors(0), moving.init(tensors(0))
    twins = {name: nn.Parameter(param.clone()) for name, param in params.items()}
    reference = torch.optim.NAdam(twins.values(), betas=(0.5, 0.75))
    for step in range(4):
        rate = 0.5 ** (step + 1)
        value = {"lr": rate, "b1": 0.5}
        params, opt_state = moving.update(
            tensors(step), opt_state, params, lambda s, v=value: wrapped(v[getattr(s, "name", "lr")])
        )
        reference.param_groups[0]["lr"] = rate
        for name, twin in twins.items():
            twin.grad = tensors(step)[name]
        reference.step()
        assert all(torch.equal(params[name], twin.detach()) for name, twin in twins.items())


class Counting(torch.optim.Optimizer):
    """A realistic user-defined class: a Python counter, a flag, an entry that may be missing."""

    def __init__(self, params: Any, lr: float = 0.5, mode: str = "") -> None:
        super().__init__(params, {"lr": lr, "mode": mode})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("count", 0)
                state.setdefault("scale", 1.0)
                state.setdefault("flag", False)
                state["nothing"] = None
                state["count"], state["scale"], state["flag"] = state["count"] + 1, state["scale"] / 2, True
                param.data.sub_(group["lr"] * state["scale"] * param.grad)
                if group["mode"] == "group":
                    group["steps"] = group.get("steps", 0) + 1
                if group["mode"] == "attribute":
                    self.steps = getattr(self, "steps", 0) + 1
                if group["mode"] == "global":
                    state_of_all: Any = self.state
                    state_of_all["global"] = {"steps": 1}
                if group["mode"] == "list":
                    state["history"] = [1.0]
                if group["mode"] == "started":
                    state["started"] = True
                if group["mode"] == "late" and state["count"] == 2:
                    state["more"] = torch.ones(())
                if group["mode"] == "growing":
                    state["buffer"] = torch.ones(state["count"])
                if group["mode"] == "late group" and state["count"] == 2:
                    group["steps"] = 1


def test_numbers_that_a_class_remembers_are_kept_as_tensors(tensors):
    optimizer = optim.from_torch(Counting)
    params, opt_state = {"w": torch.zeros(2)}, optimizer.init({"w": torch.zeros(2)})
    for _ in range(3):
        params, opt_state = optimizer.update({"w": torch.ones(2)}, opt_state, params)
    assert opt_state["count"]["w"].dtype == torch.int64 and opt_state["count"]["w"].item() == 3
    assert opt_state["scale"]["w"].dtype == torch.float64 and opt_state["scale"]["w"].item() == 0.125
    assert opt_state["flag"]["w"].item() is True and "nothing" not in opt_state
    torch.testing.assert_close(params["w"], torch.full((2,), -(0.25 + 0.125 + 0.0625)))


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("group", r"it keeps memory in its groups or attributes.*only what is in state\[param\]"),
        ("attribute", "it keeps memory in its groups or attributes"),
        ("global", "or in `state` outside of"),
        ("list", r"it keeps \[1.0\] \(list\) of a parameter; a slot holds a tensor, a number or a bool"),
        ("started", "its memory uses the name 'started'"),
    ],
)
def test_state_that_no_slot_can_store_is_an_error_in_init(mode: str, message: str):
    with pytest.raises(ValueError, match=rf"from_torch\(.*Counting\): .*{message}"):
        optim.from_torch(Counting, mode=mode).init({"w": torch.zeros(2)})


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("late", r"flag \(\) torch.bool, more \(\) torch.float32 now, but .*flag \(\) torch.bool after its first step"),
        ("growing", r"buffer \(2,\) torch.float32 now, but .*buffer \(1,\) torch.float32 after its first step"),
        ("late group", "it keeps memory in its groups"),
    ],
)
def test_state_that_changes_its_shape_is_an_error_in_the_update(mode: str, message: str):
    optimizer, params = optim.from_torch(Counting, mode=mode), {"w": torch.zeros(2)}
    params, opt_state = optimizer.update({"w": torch.ones(2)}, optimizer.init(params), params)
    with pytest.raises(RuntimeError, match=message):
        optimizer.update({"w": torch.ones(2)}, opt_state, params)


@pytest.mark.parametrize(
    ("optimizer", "settings", "error", "message"),
    [
        (torch.optim.LBFGS, {}, TypeError, r"from_torch\(torch.optim.LBFGS\): it evaluates the loss several times"),
        (torch.optim.SparseAdam, {}, TypeError, "use optim.sparse_adam"),
        (torch.optim.Adam, {"rate": 0.1}, TypeError, r"from_torch\(torch.optim.Adam\): .*unexpected keyword .*'rate'"),
        (torch.optim.Adam, {"lr": -1.0}, ValueError, r"from_torch\(torch.optim.Adam\): Invalid learning rate: -1.0"),
        (torch.optim.Adam, {"lr": torch.tensor(0.1)}, TypeError, r"lr: expected a number, .*use hparam"),
        (torch.optim.Adam, {"groups": {"*": {"rate": 1}}}, TypeError, r"groups\['\*'\]: no option 'rate'; the options"),
        (torch.optim.Adam, {"groups": {"*": {"lr": -1.0}}}, ValueError, r"groups\['\*'\]: .*Invalid learning rate"),
        (torch.optim.Adam, {"fused": True, "foreach": True}, RuntimeError, r"from_torch\(torch.optim.Adam\): .*fused"),
        (torch.optim.Optimizer, {}, TypeError, r"from_torch\(torch.optim.Optimizer\)"),
        (torch.nn.Linear, {}, TypeError, "from_torch: expected a class of torch's optimizers"),
        (torch.optim.Adam([torch.zeros(1)]), {}, TypeError, "from_torch: expected a class of torch's optimizers"),
        (optim.adam, {}, TypeError, "from_torch: expected a class of torch's optimizers"),
    ],
)
def test_classes_that_cannot_be_wrapped_are_refused_with_a_reason(
    optimizer: Any, settings: Any, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        optim.from_torch(optimizer, **settings)


def test_parameters_that_the_class_refuses_are_refused_by_init(tensors):
    with pytest.raises(ValueError, match=r"cannot move a parameter of shape \(3,\) .*2D"):
        optim.from_torch(torch.optim.Muon).init(tensors())
    with pytest.raises(ValueError, match=r"groups\['bias'\] matches no parameter"):
        optim.from_torch(torch.optim.Adam, groups={"bias": {"lr": 0.1}}).init(tensors())


def test_parameters_that_never_train_have_no_memory():
    opt_state = optim.from_torch(torch.optim.Adamax).init(
        {"w": torch.zeros(2), "ids": torch.zeros(2, dtype=torch.int64)}
    )
    assert all(list(leaves) == ["w"] for leaves in opt_state.values())


def test_equal_settings_are_equal_values():
    one = optim.from_torch(torch.optim.Adam, lr=0.1 * cosine(), betas=[0.5, 0.9])
    two = optim.from_torch(torch.optim.Adam, betas=(0.5, 0.9), lr=0.1 * cosine())
    assert one == two and hash(one) == hash(two)
    assert one != optim.from_torch(torch.optim.AdamW, lr=0.1 * cosine(), betas=(0.5, 0.9))
    assert repr(optim.from_torch(Counting, lr=1.0)).endswith("test_from_torch.Counting, lr=1.0)")


# Unsupported uses.


def test_it_is_neither_mapped_nor_differentiated_nor_traced(tensors):
    optimizer, params = optim.from_torch(torch.optim.NAdam), {"w": torch.zeros(3, 2)}
    opt_state = optimizer.init(params)

    def moved(grad: Tensor) -> Tensor:
        return optimizer.update({"w": grad}, opt_state, params)[0]["w"].sum()

    with pytest.raises(RuntimeError, match=r"from_torch\(torch.optim.NAdam\): .*can be neither traced"):
        torch.vmap(moved)(torch.ones(4, 3, 2))
    with pytest.raises(RuntimeError, match="can be neither traced"):
        torch.func.grad(moved)(torch.ones(3, 2))
    with pytest.raises(RuntimeError, match="nor differentiated: .*within torch.no_grad"):
        moved(torch.ones(3, 2, requires_grad=True))
    with torch.no_grad():
        moved(torch.ones(3, 2, requires_grad=True))
    for mode in ("fake", "real"):
        with pytest.raises(RuntimeError, match="can be neither traced"):
            make_fx(moved, tracing_mode=mode)(torch.ones(3, 2))


def test_a_setting_that_requires_a_gradient_is_an_error():
    optimizer, params = optim.from_torch(torch.optim.NAdam, lr=hparam("lr", 0.1)), {"w": torch.zeros(2)}
    lr = torch.tensor(0.1, requires_grad=True)
    with pytest.raises(RuntimeError, match="nor differentiated"):
        optimizer.update({"w": torch.ones(2)}, optimizer.init(params), params, lambda scalar: lr)


def make_state(optimizer: Any) -> pc.State:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 2)
    return pc.State.create(net, loss=pc.losses.cross_entropy, optimizer=optimizer, key=0, duration="8ba")


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(num)]


SCHEDULED = optim.from_torch(torch.optim.NAdam, lr=hparam("lr", 0.05) * cosine(), groups={"*.bias": {"lr": 0.01}})


@pytest.mark.parametrize("kind", ["ASGD", "Rprop", "RAdam", "Adagrad", "SGD dampening"])
def test_a_run_is_cut_and_resumed_to_the_same_bits(kind: str, tmp_path):
    step = pc.compose(pc.loop_events)
    whole = half = step.init(make_state(ours(kind)))
    for i, batch in enumerate(batches(6)):
        whole = step(whole, batch)
        if i == 2:
            pc.save(whole, tmp_path / "half")
            half = pc.load(tmp_path / "half", like=make_state(ours(kind)))
        elif i > 2:
            half = step(half, batch)
    assert pc.tree.equal(half, whole)


def test_a_compiled_step_and_a_population_are_errors_with_a_remedy():
    step = pc.compose(pc.loop_events)
    state, batch = step.init(make_state(SCHEDULED)), batches(1)[0]
    with pytest.raises(RuntimeError, match=r"from_torch\(torch.optim.NAdam\): .*can be neither traced"):
        pc.compile(step, backend="aot_eager", quiet=True)(state, batch)
    with pytest.warns(UserWarning, match="As fallback=True asks, such steps run eagerly"):
        fallen = pc.compile(step, backend="aot_eager", quiet=True, fallback=True)(state, batch)
    torch.testing.assert_close(fallen.params, step(state, batch).params)
    with pytest.raises(RuntimeError, match="mapped .as in a population"):
        pc.population(step, 2)(pc.stack_states([state, state]), batch)
    with pytest.raises(RuntimeError, match="nor differentiated"):
        step(state.replace(hparams={"lr": torch.tensor(0.1, requires_grad=True)}), batch)


class GlobalClip(torch.optim.SGD):
    """Moves each parameter by gradients that are clipped by the norm of all."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 1.0)
        super().step(closure)


class Hidden(torch.optim.SGD):
    """Remembers something in a large tensor outside of the parameters' memory."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.seen = torch.zeros(2000)

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.seen[1000] += 1
        super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "words"), [(GlobalClip, "by the gradients of others"), (Hidden, "keeps memory in its groups or attr")]
)
def test_classes_that_couple_parameters_or_hide_memory_are_refused(optimizer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optim.from_torch(optimizer, lr=0.1).init({"weight": torch.ones(3, 2)})
