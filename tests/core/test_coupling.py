"""Losses that compare examples, in slices and on several processes."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop, loop_events, losses, optim
from purecompose.testing.process import played
from tests.helpers import SumOfMeans, assert_close, make_batch, make_mlp, make_state, nt_xent


class Temperature(nn.Module):
    """InfoNCE with a learned temperature and a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if self.training:
            self.calls.add_(1)
        loss = nt_xent(outputs * self.log_scale.exp(), targets) * self.log_scale.exp()
        return loss, {"scale": self.log_scale.exp()}


def state_of(loss: Any, **options: Any) -> State:
    return make_state(make_mlp(dropout=0.3, dtype=torch.float64), loss=losses.over_batch(loss), **options)


def assert_same(first: State, second: State) -> None:
    assert first.loss is not None and second.loss is not None
    torch.testing.assert_close(first.loss, second.loss)
    for name in ("params", "buffers", "metrics"):
        assert_close(getattr(first, name), getattr(second, name), rtol=1e-9, atol=1e-12)


def batch_of(size: int = 12) -> tuple[Tensor, Tensor]:
    return make_batch(size=size, dtype=torch.float64)


@pytest.mark.parametrize("make", [lambda: nt_xent, Temperature])
@pytest.mark.parametrize("microbatches", [2, 5, 12])
def test_slices_give_the_loss_and_gradient_of_the_whole(make, microbatches):
    whole = compose(loop_events)(state_of(make()), batch_of())
    sliced = compose(loop_events, microbatches=microbatches)(state_of(make()), batch_of())
    assert_same(sliced, whole)


def test_compiled_and_mapped_slices_agree():
    step, states = compose(loop_events, microbatches=4), [state_of(Temperature()), state_of(Temperature(), key=1)]
    expected = [step(state, batch_of()) for state in states]
    assert_same(pc.compile(step, backend="eager", quiet=True)(states[0], batch_of()), expected[0])
    together = pc.population(step, 2)(pc.stack_states(states), batch_of())
    assert_same(together, pc.stack_states(expected))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_each_gradient_of_a_program_has_the_loss_of_its_own_parameters(is_compiled):
    once = (loop.Microbatches(loop.Grad(loop.forward, loop.loss)), loop.update)
    whole, sliced = (compose((*once, *once, loop.advance), microbatches=num) for num in (1, 3))
    sliced = pc.compile(sliced, backend="eager", quiet=True) if is_compiled else sliced
    assert_same(sliced(state_of(Temperature()), batch_of()), whole(state_of(Temperature()), batch_of()))


def test_gradients_through_the_step_agree():
    start = state_of(nt_xent, optimizer=optim.sgd(pc.hparam("lr", 0.1)))

    def after(rate: Tensor, microbatches: int) -> Tensor:
        state, step = start.replace(hparams={"lr": rate}), compose(loop_events, microbatches=microbatches)
        for _ in range(2):
            state = step(state, batch_of())
        assert state.loss is not None
        return state.loss

    rate = torch.tensor(0.3)
    torch.testing.assert_close(torch.func.grad(after)(rate, 3), torch.func.grad(after)(rate, 1))


@pytest.mark.parametrize(
    "algorithm", [alg.sam(0.1), alg.gradient_clipping("norm", 0.01), alg.gradient_noise_scale()], ids=str
)
@pytest.mark.parametrize("loss", [losses.over_batch(nt_xent), SumOfMeans()], ids=["coupled", "sum of means"])
def test_methods_see_the_same_gradient(loss, algorithm):
    state, (inputs, targets) = make_state(make_mlp(dtype=torch.float64), loss=loss), batch_of()
    batch = inputs, targets.index_fill(0, torch.arange(5), -100)
    whole, sliced = (
        step(step.init(state), batch) for step in (compose(loop_events, [algorithm], microbatches=k) for k in (1, 4))
    )
    assert_close(sliced.params, whole.params, rtol=1e-9, atol=1e-12)


class SavedBytes:
    """Count the bytes that autograd keeps for the backward pass, besides the parameters."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        self.now = self.peak = 0
        self.given = {param.data_ptr() for param in params.values()}

    def pack(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()[...]
        if kept.data_ptr() in self.given:
            return kept
        self.now += kept.nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(kept, self.drop, kept.nbytes)
        return kept

    def drop(self, nbytes: int) -> None:
        self.now -= nbytes


def test_slices_need_the_memory_of_a_slice():
    peaks, net = {}, nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3))
    state = make_state(net, loss=losses.over_batch(nt_xent))
    for k in (1, 8):
        saved = SavedBytes(state.params)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            compose(loop_events, microbatches=k)(state, make_batch(size=64))
        peaks[k] = saved.peak
    assert peaks[8] < peaks[1] / 4, peaks


class WithSecond(nn.Module):
    """A network with a second output, a function of the first."""

    def __init__(self, second: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.second = make_mlp(dtype=torch.float64), second

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.net(inputs)
        return outputs, self.second(outputs)


def test_a_coupled_loss_needs_outputs_of_examples():
    loss = losses.over_batch(lambda outputs, targets: nt_xent(outputs[0], targets))
    state = make_state(WithSecond(torch.mean), loss=loss)
    with pytest.raises(ValueError, match=r"the network's outputs have a tensor of shape \(\) in a slice of 3 examples"):
        compose(loop_events, microbatches=4)(state, batch_of())


@pytest.mark.parametrize("wrong", [losses.model_loss, nn.CrossEntropyLoss, 3])
def test_over_batch_takes_a_loss(wrong):
    with pytest.raises(TypeError, match=r"losses\.over_batch: expected a function"):
        losses.over_batch(wrong)


@pytest.mark.parametrize("k", [1, 3])
def test_targets_that_all_examples_share_are_not_joined(k):
    """Neither a prior with one row nor a table with as many rows as a slice has."""

    def loss(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        logits = outputs + targets["prior"].log().sum(0) + targets["table"].sum(0)
        return F.cross_entropy(logits, targets["y"]) + outputs.mean(0).square().sum()

    x, y = make_batch(size=6, dtype=torch.float64)
    shared = {"prior": torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64), "table": x[:2, :3]}
    step, batch = compose(loop_events, microbatches=k), (x, {**shared, "y": y})
    whole = compose(loop_events)(state_of(loss), batch)
    assert_same(step(state_of(loss), batch), whole)
    for found in played(step, 3 if k == 1 else 2)(lambda one: one(state_of(loss), batch)):
        assert_same(found, whole)


def test_batches_without_rows_are_not_cut_for_a_coupled_loss():
    state = state_of(nt_xent, splitter=pc.batch.Splitter(lambda b: len(b[0]), lambda b, i, j: (b[0][i:j], b[1][i:j])))
    assert compose(loop_events)(state, batch_of()).timestamp.sample == 12
    with pytest.raises(ValueError, match=r"losses\.over_batch: .* no splitter.*; leave out microbatches"):
        compose(loop_events, microbatches=2)(state, batch_of())
