"""Losses with parameters, buffers, schedules and parts, and losses that read what can change."""

import argparse
import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, hparam, loop_events, losses, optim
from purecompose.loop import Grad, Microbatches, Stage, advance, forward, update
from tests.helpers import assert_close, make_batch, make_mlp, make_state


class Uncertainty(nn.Module):
    """Two weighted tasks with learned weights, and a buffer that changes in training."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if self.training:
            self.calls.add_(1)
        parts = torch.stack([F.cross_entropy(outputs, targets), outputs.square().mean()])
        loss = (parts * torch.exp(-self.log_variances)).sum() + self.log_variances.sum()
        return loss, {"class": parts[0], "size": parts[1]}


def by_hand(num_steps: int) -> tuple[nn.Module, Uncertainty]:
    net, loss = make_mlp(), Uncertainty()
    optimizer = torch.optim.SGD([*net.parameters(), *loss.parameters()], 0.1, momentum=0.9)
    for _ in range(num_steps):
        optimizer.zero_grad()
        inputs, targets = make_batch()
        loss(net(inputs), targets)[0].backward()
        optimizer.step()
    return net, loss


def trained(step: Any, state: State, num_steps: int = 3) -> State:
    state = step.init(state)
    for _ in range(num_steps):
        state = step(state, make_batch())
    return state


@pytest.mark.parametrize("is_compiled", [False, True])
def test_parameters_of_a_loss_are_trained_as_by_hand(is_compiled: bool) -> None:
    step, (net, loss) = compose(loop_events), by_hand(3)
    step = pc.compile(step, backend="eager", quiet=True) if is_compiled else step
    state = trained(step, make_state(loss=Uncertainty()))
    params = {**dict(net.named_parameters()), "loss.log_variances": loss.log_variances}
    assert_close(state.params, params)
    assert state.buffers["loss.calls"] == 3


def test_a_loss_has_no_memory_outside_of_the_state() -> None:
    given = Uncertainty()
    state, step = make_state(loss=given), compose(loop_events)
    assert pc.tree.equal(step(state, make_batch()), step(state, make_batch()))
    assert given.calls == 0


def test_a_loss_with_parameters_resumes_and_evaluates(tmp_path: Any) -> None:
    step = compose(loop_events)
    state = trained(step, make_state(loss=Uncertainty()))
    pc.save(state, tmp_path / "one")
    loaded = pc.load(tmp_path / "one", make_state(loss=Uncertainty()))
    assert pc.tree.equal(trained(step, state), trained(step, loaded))
    found = pc.evaluate(loaded, [make_batch()])
    net, loss = by_hand(3)
    value, parts = loss.eval()(net(make_batch()[0]), make_batch()[1])
    expected = {"loss": value.item(), **{f"loss/{name}": part.item() for name, part in parts.items()}}
    assert found == pytest.approx(expected, rel=1e-5)


def test_members_of_a_population_have_their_own_losses() -> None:
    first, second = make_state(loss=Uncertainty()), make_state(make_mlp(1), loss=Uncertainty())
    step = compose(loop_events)
    both = pc.stack_states([trained(step, first), trained(step, second)])
    together = trained(pc.population(step, 2), pc.stack_states([first, second]))
    assert_close(together.params, both.params)
    values = pc.evaluate(together, [make_batch()], step=pc.population(step, 2))
    for i, one in enumerate(pc.unstack_states(together)):
        assert values["loss/size"][i] == pytest.approx(pc.evaluate(one, [make_batch()])["loss/size"])


def test_a_loss_keeps_the_modes_of_its_modules() -> None:
    """As in a plain loop, which puts the network into training mode, but not the loss."""
    evaluates = trained(compose(loop_events), make_state(loss=Uncertainty().eval()))
    trains = trained(compose(loop_events), make_state(loss=Uncertainty()))
    assert [state.buffers["loss.calls"].item() for state in (evaluates, trains)] == [0, 3]


def test_surgery_and_freezing_leave_the_loss_in_place() -> None:
    step = compose(loop_events, [alg.ghost_batchnorm(4)])
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    state = step.init(make_state(net, loss=Uncertainty(), optimizer=optim.adam(0.1)).replace(frozen=["loss.*"]))
    after = step(state, make_batch())
    assert torch.equal(after.params["loss.log_variances"], state.params["loss.log_variances"])
    assert after.buffers["loss.calls"] == 1


@pytest.mark.parametrize("microbatches", [1, 4])
def test_parts_are_means_over_slices(microbatches: int) -> None:
    def with_parts(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        first, second = F.cross_entropy(outputs, targets), outputs.square().mean()
        return first + second, {"first": first, "second": second}

    state = compose(loop_events, microbatches=microbatches)(make_state(loss=with_parts), make_batch())
    loss, parts = with_parts(make_mlp()(make_batch()[0]), make_batch()[1])
    expected = {"loss": loss, **{f"loss/{name}": part for name, part in parts.items()}}
    assert_close({"loss": state.loss, **state.metrics}, expected)


@pytest.mark.parametrize("wrong", [lambda o, t: (o.mean(), t), lambda o, t: (o.mean(), {"part": o}), lambda o, t: 3.0])
def test_other_results_of_a_loss_are_rejected(wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected a tensor, or a tensor and its parts"):
        compose(loop_events)(make_state(loss=wrong), make_batch())


def weighted(outputs: Tensor, targets: Tensor, weight: Any = 1.0) -> Tensor:
    return weight * F.cross_entropy(outputs, targets)


class Weighted:
    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return weighted(outputs, targets, self.weight)


@dataclasses.dataclass(frozen=True, slots=True)
class InSlots:
    weight: Any

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return weighted(outputs, targets, self.weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: functools.partial(weighted, weight=weight),
        Weighted,
        InSlots,
        lambda weight: losses.over_batch(Weighted(weight).__call__),
    ],
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_schedules_and_named_scalars_of_a_loss_are_filled_in(make: Any, is_compiled: bool) -> None:
    loss = make(hparam("weight", 3.0) * pc.schedule.linear(1.0, 0.0))
    step = compose(loop_events)
    step = pc.compile(step, backend="eager", quiet=True) if is_compiled else step
    state = make_state(loss=loss, optimizer=optim.sgd(0.0), duration="4ba")
    plain = F.cross_entropy(make_mlp()(make_batch()[0]), make_batch()[1]).item()
    for factor in (1.0, 0.75, 0.5):
        state = step(state, make_batch())
        assert state.loss is not None and state.loss.item() == pytest.approx(3 * factor * plain, rel=1e-5)
    assert pc.evaluate(state, [make_batch()])["loss"] == pytest.approx(3 * 0.25 * plain, rel=1e-5)
    changed = step(state.replace(hparams={"weight": 1.0}), make_batch())
    assert changed.loss is not None and changed.loss.item() == pytest.approx(0.25 * plain, rel=1e-5)
    if is_compiled:
        assert len(step.variants()) == 1  # pyright: ignore[reportAttributeAccessIssue]


BETA = 1.0


def with_global(outputs: Tensor, targets: Tensor) -> Tensor:
    return BETA * F.cross_entropy(outputs, targets)


def in_global() -> tuple[Any, Any]:
    def change() -> None:
        global BETA
        BETA += 1

    return with_global, change


def in_attribute() -> tuple[Any, Any]:
    loss = Weighted(1.0)
    return loss, lambda: setattr(loss, "weight", 2.0)


def in_cell() -> tuple[Any, Any]:
    weight = 1.0

    def change() -> None:
        nonlocal weight
        weight = 2.0

    return lambda outputs, targets: weight * F.cross_entropy(outputs, targets), change


def in_tensor() -> tuple[Any, Any]:
    weight = torch.ones(1)
    return lambda outputs, targets: (weight * F.cross_entropy(outputs, targets)).sum(), lambda: weight.fill_(2.0)


def in_config() -> tuple[Any, Any]:
    config = argparse.Namespace(weight=1.0, epoch=0)
    loss = lambda outputs, targets: config.weight * F.cross_entropy(outputs, targets)  # noqa: E731
    return loss, lambda: setattr(config, "weight", 2.0)


def in_settings() -> tuple[Any, Any]:
    settings = {"weight": 1.0, "epoch": 0}
    loss = lambda outputs, targets: settings["weight"] * F.cross_entropy(outputs, targets)  # noqa: E731
    return loss, lambda: settings.update(weight=2.0)


class Reading(nn.Module):
    """A loss with a module inside, which reads the weight of an object."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.part = inner, nn.Module()
        self.part.weight = 1.0  # pyright: ignore[reportArgumentType]

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.part.weight * self.inner.weight.value * F.cross_entropy(outputs, targets)


def in_class() -> tuple[Any, Any]:
    class Own(Weighted):
        weight = 1.0

        def __init__(self) -> None:
            pass

    return Own(), lambda: setattr(Own, "weight", 2.0)


def in_property() -> tuple[Any, Any]:
    class Owner(Trainer):
        @property
        def weight(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
            return self._weight

        @weight.setter
        def weight(self, value: float) -> None:
            self._weight = value

    owner = Owner(nn.Module())
    return owner.loss, lambda: setattr(owner, "weight", 3.0)


def in_a_module_inside() -> tuple[Any, Any]:
    loss = Reading(argparse.Namespace(weight=argparse.Namespace(value=1.0)))
    return loss, lambda: setattr(loss.part, "weight", 2.0)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (in_global, "global BETA"),
        (in_attribute, "attribute weight"),
        (in_cell, "weight"),
        (in_tensor, "weight"),
        (in_config, "config.weight"),
        (in_settings, r"settings\['weight'\]"),
        (in_a_module_inside, "attribute part.weight"),
        (in_class, "attribute weight"),
        (in_property, "attribute _weight"),
    ],
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_number_that_a_loss_reads_must_not_change(make: Any, name: str, is_compiled: bool) -> None:
    (loss, change), step = make(), compose(loop_events)
    step = pc.compile(step, backend="eager", quiet=True) if is_compiled else step
    state = step(make_state(loss=loss), make_batch())
    state = step(state, make_batch())
    change()
    with pytest.raises(ValueError, match=rf"reads .*{name}.*must not change during a run"):
        step(state, make_batch())


def test_a_loss_that_writes_outside_of_the_state_is_refused_in_the_first_step() -> None:
    norm, net = nn.BatchNorm1d(3, affine=False), nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3))
    with pytest.raises(ValueError, match="reads norm.*, which has been written into"):
        compose(loop_events)(make_state(loss=lambda outputs, targets: norm(outputs).square().mean()), make_batch())
    with pytest.raises(ValueError, match=r"reads part, a BatchNorm1d of the network, outside of the state"):
        make_state(net, loss=(lambda part: lambda outputs, targets: part(outputs).mean())(net[0]))


class Trainer:
    """An object whose method is a loss, with the network and a counter, which the loss does not read."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.num_steps, self.weight = net, 0, 2.0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.scaled(F.cross_entropy(outputs, targets))

    def scaled(self, loss: Tensor) -> Tensor:
        return self.weight * loss


def test_only_what_a_method_reads_belongs_to_its_loss() -> None:
    net, step = make_mlp(), compose(loop_events)
    trainer = Trainer(net)
    state = step(make_state(net, loss=trainer.loss), make_batch())
    trainer.num_steps += 1
    state = step(state, make_batch())
    trainer.weight = 3.0
    with pytest.raises(ValueError, match="reads its attribute weight"):
        step(state, make_batch())


class WithLoss(nn.Linear):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + sum(param.square().sum() for param in self.parameters())


def test_losses_that_read_parameters_from_outside_are_rejected() -> None:
    net = WithLoss(4, 3)
    penalty = lambda outputs, targets: outputs.mean() + net.weight.sum()  # noqa: E731
    leaf = torch.zeros((), requires_grad=True)
    owner, inside, by_name = Trainer(net), [net], {"leaf": leaf}
    for loss in (
        net.loss,
        penalty,
        lambda outputs, targets: outputs.mean() * leaf,
        functools.partial(net.loss),
        functools.partial(Uncertainty()),
        functools.partial(lambda part, outputs, targets: outputs.mean() + part.weight.sum(), net),
        losses.over_batch(net.loss),
        lambda outputs, targets: outputs.mean() + inside[0].weight.sum(),
        lambda outputs, targets: outputs.mean() * by_name["leaf"],
        lambda outputs, targets: outputs.mean() + owner.net(outputs).sum(),
    ):
        with pytest.raises(ValueError, match="reads .*, outside of the state"):
            make_state(net, loss=loss)


def test_a_loss_may_call_the_dataclass_that_it_derives_from() -> None:
    @dataclasses.dataclass(frozen=True)
    class Doubled(losses.CrossEntropy):
        def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
            return 2 * super().__call__(outputs, targets, reduction)

    state = compose(loop_events)(make_state(loss=Doubled()), make_batch())
    plain = compose(loop_events)(make_state(), make_batch())
    assert state.loss is not None and plain.loss is not None
    torch.testing.assert_close(state.loss, 2 * plain.loss)


def test_scalars_that_cannot_be_filled_in_are_rejected() -> None:
    weight = hparam("weight", 1.0)
    with pytest.raises(TypeError, match="reads weight, hparam.* cannot be filled in"):
        make_state(loss=lambda outputs, targets: weight * outputs.mean())  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: functools.partial(lambda weight, outputs, targets: weight * outputs.mean(), weight),
        lambda weight: Reading(argparse.Namespace(weight=weight)),
        lambda weight: nn.Sequential(Uncertainty(), Reading([weight])),
        lambda weight: Weighted({"weight": weight}),
    ],
)
def test_scalars_inside_of_other_things_are_rejected(make: Any) -> None:
    with pytest.raises(TypeError, match="reads its .*, hparam.* cannot be filled in"):
        make_state(loss=make(hparam("weight", 1.0)))


def test_a_network_with_a_module_called_loss_needs_another_name_for_it() -> None:
    net = nn.Sequential()
    net.add_module("loss", nn.Linear(4, 3))
    make_state(net)
    with pytest.raises(ValueError, match="names that begin with 'loss.' are reserved"):
        make_state(net, loss=Uncertainty())


def test_a_metric_of_a_loss_with_parameters_is_that_of_the_state() -> None:
    with pytest.raises(ValueError, match=r"write mean_loss\(\)"):
        pc.metrics.mean_loss(Uncertainty())
    with pytest.raises(ValueError, match="the training loss of each step is state.loss"):
        alg.training_metrics({"loss": pc.metrics.mean_loss()})


# Shapes of outputs and targets


def column_regression(loss: Any) -> State:
    """Return a state whose outputs are among the targets 0 to 5; outside of them, sums of distances are alike."""
    net = nn.Linear(4, 1)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, -1.0, 0.5, 2.0]]))
        net.bias.fill_(2.5)
    return make_state(net, loss=loss, duration="9ba")


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "loss", [lambda outputs, targets: (outputs - targets).square().mean(), F.l1_loss, nn.MSELoss()]
)
def test_a_loss_of_each_output_with_each_target_is_an_error(loss: Any) -> None:
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6.0)
    step, whole = compose(loop_events), losses.over_batch(loss)
    compiled = pc.compile(step, backend="eager", quiet=True)
    for run, fn in ((step, loss), (compiled, loss), (step, whole), (compose(loop_events, microbatches=2), whole)):
        with pytest.raises(ValueError, match=r"each output with each target: outputs \(., 1\) and targets \(.,\)"):
            run(column_regression(fn), batch)
    own = Stage("own", lambda state: state.replace(loss=loss(state.outputs, state.targets)), sets_loss=True)
    for program in ((Grad(forward, own),), (Microbatches(Grad(forward, own), microbatches=2),)):
        with pytest.raises(ValueError, match="compares each output with each target"):
            compose((*program, update, advance))(column_regression(loss), batch)
    with pytest.raises(ValueError, match="compares each output with each target"):
        pc.population(step, 2)(pc.stack_states([column_regression(loss)] * 2), batch)
    state = column_regression(loss)
    after = compose(loop_events)(state, (batch[0], batch[1][:, None]))
    torch.testing.assert_close(after.loss, loss(pc.to_module(state)(batch[0])[:, 0], batch[1]).detach())


def test_a_loss_that_brings_both_into_one_shape_is_not_refused() -> None:
    """Nor is it called more often, as far as its buffers show."""
    state = column_regression(Squeezing())
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6.0)
    after = compose(loop_events)(state, batch)
    torch.testing.assert_close(after.loss, F.mse_loss(pc.to_module(state)(batch[0])[:, 0], batch[1]).detach())
    assert [buffer.item() for buffer in after.buffers.values()] == [1]


class Squeezing(nn.Module):
    """A loss of one column that counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls.add_(1)
        return F.mse_loss(outputs.squeeze(1), targets)
