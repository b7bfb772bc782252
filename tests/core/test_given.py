"""What user code does to the values that it is given: in steps, evaluation, prediction and single passes."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import Algorithm, Event, State, compose, hparam, loop, loop_events, losses, on, optim
from purecompose.errors import ContractError, GlobalDrawError, InPlaceError, UnkeyedRandomError
from purecompose.transforms.compilation.step import CompiledStep
from tests.helpers import changing, loss_of, make_batch, make_state


class Force(nn.Module):
    """A network whose output contains its derivative with respect to the input, as forces do."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        x.requires_grad_()
        energy = self.net(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + slope.sum(1, keepdim=True)


def force_state(rate: Any = 0.1) -> State:
    torch.manual_seed(0)
    return State.create(Force(), loss=losses.mse, optimizer=optim.sgd(rate), key=0)


def force_batch():
    torch.manual_seed(1)
    return torch.randn(6, 2), torch.randn(6, 1)


def force_losses(num_steps):
    """Return the losses of a plain loop."""
    torch.manual_seed(0)
    net, (x, y), found = Force(), force_batch(), []
    plain = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(num_steps):
        loss = nn.functional.mse_loss(net(x), y)
        plain.zero_grad()
        loss.backward()
        plain.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_network_that_requires_gradients_of_its_input_leaves_no_flag(is_compiled):
    step, state, batch = compose(loop_events), force_state(), force_batch()
    step = pc.compile(step, backend="eager", quiet=True) if is_compiled else step
    for expected in force_losses(3):
        state = step(state, batch)
        assert loss_of(state).item() == pytest.approx(expected, rel=1e-5)
    assert not batch[0].requires_grad
    assert all(not one.requires_grad and one.grad_fn is None for one in pc.tree.leaves((state.params, state.loss)))
    assert not isinstance(step, CompiledStep) or len(step.variants()) == 1


def test_gradients_with_respect_to_the_input_are_taken_in_evaluation():
    state, (x, y) = force_state(), force_batch()
    with torch.enable_grad():
        expected = pc.to_module(state)(x.clone())
    (outputs,) = pc.predict(state, [(x, y)])
    torch.testing.assert_close(outputs, expected.detach())
    assert not outputs.requires_grad and not x.requires_grad
    value = pc.evaluate(state, [(x, y)])["loss"]
    assert value == pytest.approx(nn.functional.mse_loss(expected, y).item(), rel=1e-5)


def test_hypergradients_pass_through_a_network_that_requires_gradients_of_its_input():
    state, batch, step = force_state(hparam("lr", 0.1)), force_batch(), compose(loop_events)

    def loss(rate):
        end = step.init(state).replace(hparams={"lr": rate})
        for _ in range(3):
            end = step(end, batch)
        return loss_of(end)

    rate = torch.tensor(0.1, requires_grad=True)
    (plain,) = torch.autograd.grad(loss(rate), rate)
    assert not batch[0].requires_grad
    functional = torch.func.grad(loss)(torch.tensor(0.1))
    assert not batch[0].requires_grad
    both = [loss(torch.tensor(0.1 + sign * 1e-3)) for sign in (1, -1)]
    assert plain.item() == pytest.approx(functional.item(), rel=1e-4)
    assert plain.item() == pytest.approx((both[0] - both[1]).item() / 2e-3, rel=2e-2)


def test_a_batch_that_requires_gradients_still_gets_them():
    state, (x, y), step = force_state(), force_batch(), compose(loop_events)
    x.requires_grad_()
    end = step(step(state, (x, y)), (x, y))
    assert torch.autograd.grad(loss_of(end), x)[0].abs().sum() > 0


# Writes


def plain_state(loss: Any = losses.mse, net: nn.Module | None = None, **options: Any) -> State:
    torch.manual_seed(0)
    return State.create(net or nn.Linear(2, 1), loss=loss, optimizer=optim.sgd(0.1), **options)


def writes_targets(outputs, targets, reduction="mean"):
    return (outputs - targets.mul_(0.5)).square().mean()


def writes_outputs(outputs, targets):
    outputs.detach().clamp_(max=-1)
    return (outputs - targets).abs().mean(1)


def writes_by_numpy(outputs, targets):
    values = outputs.numpy()
    values += 1
    return (outputs - targets).abs().mean(1)


def test_a_loss_that_writes_into_targets_is_refused_in_evaluation_and_training():
    state, batch = plain_state(writes_targets), force_batch()
    with pytest.raises(InPlaceError, match="^the loss wrote in place into state.batch"):
        pc.evaluate(state, [batch])
    with pytest.raises(InPlaceError, match="^the stage loss wrote in place into state.batch"):
        compose(loop_events)(state, batch)


@pytest.mark.parametrize("metric", [writes_outputs, writes_by_numpy])
def test_a_metric_that_writes_into_outputs_is_refused(metric):
    with pytest.raises(InPlaceError, match="^the metric 'own' wrote in place into state.outputs"):
        pc.evaluate(plain_state(), [force_batch()], {"own": metric, "loss": pc.metrics.mean_loss(losses.mse)})


def test_a_loss_that_writes_into_outputs_is_refused():
    with pytest.raises(InPlaceError, match="^the stage loss wrote in place into state.outputs"):
        compose(loop_events)(
            plain_state(lambda outputs, targets: writes_outputs(outputs, targets).mean()), force_batch()
        )


def test_a_network_that_writes_into_its_input_is_refused_outside_of_a_step():
    x, _ = force_batch()
    with pytest.raises(InPlaceError, match="^the network wrote in place into its inputs.*inplace=False"):
        plain_state(net=nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 1))).forward(x)


def test_a_method_that_switches_gradients_of_parameters_on_is_refused():
    def switch(state: State) -> State:
        state.params["bias"].requires_grad_()
        return state

    method, state = changing("switch", Event.AFTER_TRAIN_BATCH, switch), plain_state()
    with pytest.raises(ContractError, match=r"^switch at .* switched requires_grad of state.params\['bias'\]"):
        compose(loop_events, [method])(state, force_batch())
    assert not state.params["bias"].requires_grad


# Draws


class Noisy(nn.Linear):
    """A layer that draws by NumPy, as Wav2Vec2 masks its spectra."""

    def forward(self, input):
        return super().forward(input) + numpy_noise()


def numpy_noise():
    return float(np.random.rand())


def test_a_draw_of_numpy_in_a_network_is_refused():
    said = "In a network use functions with a keyed form"
    state, batch = plain_state(net=nn.Sequential(Noisy(2, 1))), force_batch()
    with pytest.raises(GlobalDrawError, match=f"^the stage forward drew from .*{said}"):
        compose(loop_events)(state, batch)
    with pytest.raises(GlobalDrawError, match=f"^the network drew from .*{said}"):
        plain_state(net=Noisy(2, 1)).forward(batch[0])


def draws_by_torch(outputs, targets, reduction="mean"):
    return (outputs - targets).square().mean() + torch.rand(())


def draws_by_python(outputs, targets, reduction="mean"):
    return (outputs - targets).square().mean() + random.random()


def test_draws_of_a_loss_in_evaluation_are_refused():
    with pytest.raises(UnkeyedRandomError, match="`torch.rand` in draws_by_torch"):
        pc.evaluate(plain_state(draws_by_torch), [force_batch()])
    with pytest.raises(GlobalDrawError, match="^the loss drew .*A loss has no key"):
        pc.evaluate(plain_state(draws_by_python), [force_batch()])


def test_draws_of_a_metric_are_refused():
    for metric, error in ((draws_by_torch, UnkeyedRandomError), (draws_by_python, GlobalDrawError)):
        with pytest.raises(error):
            pc.evaluate(plain_state(), [force_batch()], {"own": metric})


def in_a_list(box: list[int]) -> Any:
    def fn(event: Event, state: State) -> State:
        box[0] += 1
        return state.replace(inputs=state.inputs * box[0])

    return fn


class InAnAttribute:
    def __init__(self) -> None:
        self.num = 0

    def __call__(self, event: Event, state: State) -> State:
        self.num += 1
        return state.replace(inputs=state.inputs * self.num)


@pytest.mark.parametrize(("fn", "where"), [(in_a_list([0]), r"box\[0\]"), (InAnAttribute(), "its attribute num")])
def test_a_compiled_method_that_counts_outside_of_the_state_is_an_error(fn: Any, where: str) -> None:
    step = pc.compile(compose(loop_events, [Algorithm("counts", on(Event.BEFORE_FORWARD), fn)]), backend="eager")
    with pytest.raises(ContractError, match=f"counts at Event.BEFORE_FORWARD changes .*{where}, which was 0 and is 1"):
        step(step.init(make_state()), make_batch())


def test_a_compiled_stage_that_counts_outside_of_the_state_is_an_error() -> None:
    box = [0]

    def stage(state: State) -> State:
        box[0] += 1
        outputs, state = state.call(state.batch[0])
        return state.replace(loss=outputs.square().mean() * box[0])

    step = pc.compile(compose((loop.Grad(stage), loop.update, loop.advance)), backend="eager")
    with pytest.raises(ContractError, match=r"the stage stage changes .*box\[0\]"):
        step(make_state(), make_batch())
