"""Gradients of a loss after K whole steps, in settings and in first weights, against finite differences."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import purecompose as pc
from purecompose import State, algorithms as alg, compose, hparam, loop_events, optim, schedule
from tests.helpers import Batch, make_batch, make_batches, run_steps
from tests.pages import run_page
from tests.sampling import one_in


K = 6
BATCHES = make_batches(K, dtype=torch.float64)
VALID = make_batch(100, 24, dtype=torch.float64)
Settings = dict[str, Tensor]
Loss = Callable[[Settings], Tensor]

# The first use of forward mode in a process makes torch script its own formulas with a deprecated function.
# Forward mode follows a plain run, because the checks of a first run use a dispatch mode, in which torch 2.13 may
# crash.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of another category in torch 2.15

# Adam has a large eps: otherwise its step at a gradient near 0 is nearly a sign, which no finite difference resolves.
OPTIMIZERS = {
    "sgd": optim.sgd(hparam("lr", 0.2), momentum=hparam("momentum", 0.9), weight_decay=hparam("decay", 0.05)),
    "adam": optim.adam(
        hparam("lr", 0.05),
        betas=(hparam("beta1", 0.8), hparam("beta2", 0.95)),
        eps=1e-3,
        weight_decay=hparam("decay", 0.05),
    ),
    "adamw": optim.adamw(hparam("lr", 0.05), eps=1e-3, weight_decay=hparam("decay", 0.05)),
    "sgd, biases by themselves": optim.sgd(
        hparam("lr", 0.2), weight_decay=hparam("decay", 0.05), groups={"*.bias": {"lr": hparam("lr.bias", 0.3)}}
    ),
}


def make_net(*middle: nn.Module) -> nn.Sequential:
    """Return a network 4 -> 8 -> 3 in float64, without the bias that batch normalisation would cancel."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), *middle, nn.Tanh(), nn.Linear(8, 3)).double()


NETS = {"dropout": lambda: make_net(nn.Dropout(0.3)), "batch norm": lambda: make_net(nn.BatchNorm1d(8))}


def make_start(step: Any, optimizer: Any = OPTIMIZERS["sgd"], net: nn.Module | None = None) -> State:
    """Return a state before its first step, in float64 throughout."""
    net = NETS["dropout"]() if net is None else net
    state = State.create(net, loss=pc.losses.cross_entropy, optimizer=optimizer, key=3, duration=f"{K}ba")
    return in_float64(step.init(state))


def in_float64(state: State) -> State:
    return state.replace(hparams={name: value.double() for name, value in state.hparams.items()})


def make_step(*methods: Any, microbatches: int = 1) -> Any:
    """Return a step with MixUp, label smoothing whose strength is to be learned, and `methods`."""
    smoothing = alg.label_smoothing(hparam("smoothing", 0.1))
    return compose(loop_events, [alg.mixup(0.4), smoothing, *methods], microbatches=microbatches)


def outer_loss(step: Any, start: State, batches: Sequence[Batch] = BATCHES, *, train: bool = False) -> Loss:
    """Return the validation loss after all batches as a function of settings; settings left out keep their values."""

    def loss(settings: Settings) -> Tensor:
        end = run_steps(step, start.replace(hparams={**start.hparams, **settings}), batches)
        return cross_entropy(end.forward(VALID[0], train=train), VALID[1])

    return loss


def by_autograd(loss: Loss, settings: Settings) -> Settings:
    leaves = {name: value.clone().requires_grad_() for name, value in settings.items()}
    return dict(zip(leaves, torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True))


def difference(fn: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """Return the derivative by central differences of two sizes around 1e-3, with an error of fourth order."""

    def quotient(size: Tensor) -> Tensor:
        return (fn(value + size) - fn(value - size)) / (2 * size)

    size = 1e-3 * value
    return (4 * quotient(size / 2) - quotient(size)) / 3


def by_differences(loss: Loss, settings: Settings) -> Settings:
    return {
        name: difference(lambda moved, name=name: loss({**settings, name: moved}), value)
        for name, value in settings.items()
    }


def assert_equal_slopes(found: Settings, expected: Settings, rtol: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value.detach(), rtol=rtol, atol=0, msg=name)


# Settings


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("optimizer", one_in(3, OPTIMIZERS))
def test_both_forms_equal_finite_differences(optimizer: str, net: str, k: int) -> None:
    step = make_step(microbatches=k)
    start = make_start(step, OPTIMIZERS[optimizer], NETS[net]())
    # Batch normalisation is in training mode, because torch has no gradient for the running statistics.
    loss = outer_loss(step, start, train=net == "batch norm")
    by_func = torch.func.grad(loss)(start.hparams)
    assert {"lr", "decay", "smoothing"} <= by_func.keys()
    assert_equal_slopes(by_func, by_differences(loss, start.hparams), rtol=1e-6)
    assert_equal_slopes(by_autograd(loss, start.hparams), by_func, rtol=1e-10)


@forward_mode
def test_forward_mode_gives_the_same_gradient() -> None:
    step = make_step(microbatches=2)
    start = make_start(step, OPTIMIZERS["adam"])
    loss = outer_loss(step, start)
    loss({})
    assert_equal_slopes(torch.func.jacfwd(loss)(start.hparams), torch.func.grad(loss)(start.hparams), rtol=1e-10)


@forward_mode
def test_second_derivatives_equal_differences_of_the_first() -> None:
    step = make_step()
    start = make_start(step)
    loss = outer_loss(step, start, BATCHES[:5])
    names = ("lr", "smoothing")
    settings = {name: start.hparams[name] for name in names}
    first = torch.func.grad(loss)
    first(settings)
    hessian = torch.func.hessian(loss)(settings)
    leaves = {name: value.clone().requires_grad_() for name, value in settings.items()}
    graph = torch.autograd.grad(loss(leaves), list(leaves.values()), create_graph=True)
    for row, slope in zip(names, graph, strict=True):
        expected = by_differences(lambda moved, row=row: first(moved)[row], settings)
        assert_equal_slopes(hessian[row], expected, rtol=1e-6)
        twice = torch.autograd.grad(slope, list(leaves.values()), retain_graph=True)
        assert_equal_slopes(dict(zip(names, twice, strict=True)), expected, rtol=1e-6)
    torch.testing.assert_close(hessian["lr"]["smoothing"], hessian["smoothing"]["lr"], rtol=1e-10, atol=0)


def test_a_factor_of_a_schedule_is_learned() -> None:
    step = compose(loop_events)
    start = make_start(step, optim.sgd(hparam("lr", 0.3) * schedule.cosine(), momentum=0.9))
    loss = outer_loss(step, start)
    assert_equal_slopes(torch.func.grad(loss)(start.hparams), by_differences(loss, start.hparams), rtol=1e-6)


# First weights, as in MAML


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_reach_the_first_weights(optimizer: str, net: str) -> None:
    step = make_step(microbatches=2)
    start = make_start(step, OPTIMIZERS[optimizer], NETS[net]())

    def loss(params: Settings) -> Tensor:
        end = run_steps(step, start.replace(params=params), BATCHES[:4])
        return cross_entropy(end.forward(VALID[0], train=net == "batch norm"), VALID[1])

    grads = torch.func.grad(loss)(start.params)
    leaves = by_autograd(loss, start.params)
    for name, grad in grads.items():
        torch.testing.assert_close(leaves[name], grad, rtol=1e-9, atol=1e-13, msg=name)
    generator = torch.Generator().manual_seed(0)
    along = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in start.params.items()}
    slope = torch.stack([(grads[name] * along[name]).sum() for name in grads]).sum()

    def moved(size: Tensor) -> Tensor:
        return loss({name: param + (size - 0.01) * along[name] for name, param in start.params.items()})

    expected = difference(moved, torch.tensor(0.01, dtype=torch.float64))
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=0)


# Memory


def graphs(state: State) -> list[str]:
    return [path for path, leaf in pc.tree.leaves_with_paths(state).items() if leaf.requires_grad or leaf.grad_fn]


@pytest.mark.parametrize("net", NETS)
def test_a_graph_is_kept_only_if_a_tensor_requires_a_gradient(net: str) -> None:
    step = make_step(alg.selective_backprop(start=0.0, end=1.0), microbatches=2)
    start = make_start(step, net=NETS[net]())
    assert torch.is_grad_enabled()
    end = run_steps(step, start, BATCHES)
    assert graphs(end) == [] and end.loss is not None and not end.loss.requires_grad
    asked = start.replace(hparams={name: value.requires_grad_() for name, value in in_float64(start).hparams.items()})
    assert ".params['0.weight']" in graphs(step(asked, BATCHES[0]))
    with torch.no_grad():
        assert set(graphs(run_steps(step, asked, BATCHES))) == {f".hparams['{name}']" for name in start.hparams}


def test_the_last_state_leaves_a_transform_without_a_graph() -> None:
    step = make_step()
    start = make_start(step, net=NETS["batch norm"]())

    def loss(settings: Settings) -> tuple[Tensor, State]:
        end = run_steps(step, start.replace(hparams=settings), BATCHES)
        assert end.loss is not None
        return end.loss, end

    grads, end = torch.func.grad(loss, has_aux=True)(start.hparams)
    assert graphs(end) == [] and not any(grad.requires_grad for grad in grads.values())
    assert not any(torch._C._functorch.is_gradtrackingtensor(leaf) for leaf in pc.tree.leaves(end))  # pyright: ignore
    plain = run_steps(step, start, BATCHES)
    for path, leaf in pc.tree.leaves_with_paths(plain).items():
        torch.testing.assert_close(pc.tree.leaves_with_paths(end)[path], leaf, msg=path)
    # A run can continue from there, as in the online form, in which settings are learned while training.
    assert graphs(step(end, BATCHES[0])) == []


def test_the_step_holds_nothing_of_a_run_that_was_differentiated() -> None:
    step = make_step(microbatches=2)
    start = make_start(step)
    leaves = {name: value.clone().requires_grad_() for name, value in start.hparams.items()}
    middle = step(start.replace(hparams=leaves), BATCHES[0])
    seen = [weakref.ref(tensor) for tensor in (*middle.params.values(), middle.loss)]
    end = step(middle, BATCHES[1])
    assert end.loss is not None and end.loss.requires_grad
    torch.autograd.grad(end.loss, list(leaves.values()), allow_unused=True)
    del middle, end
    gc.collect()
    assert [ref() for ref in seen] == [None] * len(seen)


class Checkpointed(nn.Module):
    """A block inside `pc.nn.layers.checkpoint`, or the same block plainly."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.net, self.is_checkpointed = make_net(nn.LayerNorm(8), nn.Dropout(0.3)), is_checkpointed

    def forward(self, inputs: Tensor) -> Tensor:
        return pc.nn.layers.checkpoint(self.net, inputs) if self.is_checkpointed else self.net(inputs)


@pytest.mark.parametrize("grad", [by_autograd, lambda loss, settings: torch.func.grad(loss)(settings)])
def test_a_networks_checkpoints_change_nothing(grad: Callable[[Loss, Settings], Settings]) -> None:
    step = make_step()
    starts = [make_start(step, net=Checkpointed(flag)) for flag in (False, True)]
    plain, recomputed = (grad(outer_loss(step, start, BATCHES[:3]), start.hparams) for start in starts)
    assert_equal_slopes(recomputed, plain, rtol=1e-10)


# Operations that pass no gradient


def test_a_choice_of_examples_has_the_gradient_of_the_kept_examples() -> None:
    step = make_step(alg.selective_backprop(start=0.0, end=1.0, keep=0.5))
    start = make_start(step)
    loss = outer_loss(step, start, BATCHES[:5])
    assert loss({}) != outer_loss(make_step(), start, BATCHES[:5])({})
    # Differences so small that no choice flips.
    size = 1e-6
    for name, found in torch.func.grad(loss)(start.hparams).items():
        ahead, behind = (loss({name: start.hparams[name] + way * size}) for way in (1, -1))
        torch.testing.assert_close(found, (ahead - behind) / (2 * size), rtol=1e-6, atol=1e-9, msg=name)


def test_the_parameter_of_a_distribution_has_no_gradient() -> None:
    step = compose(loop_events, [alg.mixup(hparam("alpha", 0.4))])
    start = make_start(step, optim.sgd(0.2))
    loss = outer_loss(step, start, BATCHES[:3])
    assert torch.func.grad(loss)(start.hparams)["alpha"] == 0
    assert loss({}) != loss({"alpha": torch.tensor(0.8, dtype=torch.float64)})
    with pytest.raises(RuntimeError, match="not have been used|does not require grad"):
        by_autograd(loss, start.hparams)


def test_running_statistics_have_no_gradient() -> None:
    step = make_step()
    start = make_start(step, net=NETS["batch norm"]())
    asked = start.replace(hparams={name: value.clone().requires_grad_() for name, value in start.hparams.items()})
    end = run_steps(step, asked, BATCHES[:3])
    assert not [path for path in graphs(end) if ".buffers" in path]
    # So the gradient of an outer loss that reads them misses a part, as the page explains.
    loss = outer_loss(step, start)
    found, expected = torch.func.grad(loss)(start.hparams), by_differences(loss, start.hparams)
    assert all(abs(found[name] - expected[name]) > 1e-4 * abs(expected[name]) for name in expected)


# The page


@forward_mode
def test_the_examples_of_the_page_are_correct(capsys: pytest.CaptureFixture[str]) -> None:
    page = run_page("gradients.md")
    start, loss = in_float64(page["start"]), page["validation_loss"]
    assert "'smoothing': tensor(" in capsys.readouterr().out
    for found in (dict(zip(page["grads"], page["same"], strict=True)), page["forward_mode"]):
        assert_equal_slopes(found, page["grads"], rtol=1e-3)
    assert_equal_slopes(dict(zip(page["grads"], page["less_memory"], strict=True)), page["grads"], rtol=1e-3)
    torch.testing.assert_close(page["slopes"][1], page["grads"]["lr"], rtol=1e-3, atol=0)
    assert page["curvature"].isfinite() and page["outer_grads"].keys() == start.params.keys()
    assert page["outer_grads"]["0.weight"].abs().sum() > 0
    assert loss(start.hparams).requires_grad is False


def recomputed(step: Any) -> Any:
    """Return the step with checkpoints, as on the page."""
    return lambda state, batch: checkpoint(step, state, batch, use_reentrant=False, preserve_rng_state=False)


# Functions that torch.func cannot transform


class OldSquare(torch.autograd.Function):
    """A function whose `forward` takes the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Squared(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return OldSquare.apply(inputs)


def test_an_old_function_is_differentiated_by_leaves_and_named_by_transforms() -> None:
    step = make_step()
    start = make_start(step, net=make_net(Squared()))
    loss = outer_loss(step, start)
    assert_equal_slopes(by_autograd(loss, start.hparams), by_differences(loss, start.hparams), rtol=1e-6)
    with pytest.raises(RuntimeError, match="OldSquare.*in the layer '1' .Squared.*setup_context.*torch.autograd.grad"):
        torch.func.grad(loss)(start.hparams)
