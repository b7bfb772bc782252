"""state.gradients: the running step's gradients of several losses."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import Algorithm, Event, State, Trait, algorithms as alg, compose, loop_events, on, optim, tree
from purecompose.testing.process import played
from tests.helpers import run_steps


class TwoHeads(nn.Module):
    """A network with a shared trunk and a head for each of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.trunk, self.drop = nn.Linear(4, 8), nn.Dropout(0.3)
        self.kind, self.size = nn.Linear(8, 3), nn.Linear(8, 1)
        for param in self.parameters():
            nn.init.uniform_(param, -0.5, 0.5, generator=generator)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = self.drop(self.trunk(inputs).tanh())
        return {"kind": self.kind(hidden), "size": self.size(hidden)[:, 0]}


def kind_loss(outputs: Any, targets: Any) -> Tensor:
    return F.cross_entropy(outputs["kind"], targets["kind"])


def size_loss(outputs: Any, targets: Any) -> Tensor:
    return F.mse_loss(outputs["size"], targets["size"])


def both(outputs: Any, targets: Any) -> Tensor:
    return kind_loss(outputs, targets) + size_loss(outputs, targets)


def projected(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the first gradients without their part against the second ones."""
    dot = sum((first[name] * second[name]).sum() for name in first)
    square = sum((grad * grad).sum() for grad in second.values())
    share = torch.as_tensor(dot / square).clamp(max=0.0)
    return {name: first[name] - share * second[name] for name in first}


def pcgrad() -> Algorithm:
    def apply(event: Event, state: State) -> State:
        del event
        (first, _), (second, _) = state.gradients(of=[kind_loss, size_loss])
        ours, theirs = projected(first, second), projected(second, first)
        return state.replace(grads={name: ours[name] + theirs[name] for name in ours})

    return Algorithm("pcgrad", on(Event.AFTER_TRAIN_BATCH), apply, traits=frozenset({Trait.RENEWS_GRADIENTS}))


def made(*losses: Any, microbatches: int = 1, dropout: bool = True) -> tuple[pc.Step, State]:
    def apply(event: Event, state: State) -> State:
        del event
        found = state.gradients(of=losses)
        sums = {name: sum((grads[name] for grads, _ in found), torch.zeros(())) for name in found[0][0]}
        same = [(sums[name] - grad).abs().max() for name, grad in (state.grads or {}).items()]
        total = sum((loss for _, loss in found), torch.zeros(()))
        metrics = {"apart": torch.stack(same).max(), "loss apart": (total - torch.as_tensor(state.loss)).abs()}
        return state.replace(metrics=metrics)

    net = TwoHeads().double()
    net.drop.p = 0.3 if dropout else 0.0
    step = compose(loop_events, [Algorithm("look", on(Event.AFTER_TRAIN_BATCH), apply)], microbatches=microbatches)
    state = State.create(net, loss=both, optimizer=optim.sgd(0.1, momentum=0.9), key=3)
    return step, step.init(state)


def batches(num: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(num):
        inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64)
        found.append((inputs, {"kind": torch.randint(3, (8,), generator=generator), "size": inputs.sum(1)}))
    return found


@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_gradients_of_the_terms_sum_to_the_steps_own_with_its_draws(microbatches: int) -> None:
    step, state = made(kind_loss, size_loss, microbatches=microbatches)
    end = step(state, batches(1)[0])
    assert end.metrics["apart"] < 1e-14 and end.metrics["loss apart"] < 1e-14


@pytest.mark.parametrize("form", ["plain", "microbatches", "compiled", "population"])
def test_pcgrad_equals_a_plain_loop(form: str) -> None:
    net = TwoHeads().double()
    net.drop.p = 0.0
    step: Any = compose(loop_events, [pcgrad()], microbatches=4 if form == "microbatches" else 1)
    state = State.create(net, loss=both, optimizer=optim.sgd(0.1, momentum=0.9))
    if form == "compiled":
        step = pc.compile(step, backend="eager")
    elif form == "population":
        step, state = pc.population(step, 2), pc.stack_states([state, state])
    end = run_steps(step, step.init(state), batches())
    params, momentum = {name: param.detach() for name, param in net.named_parameters()}, {}
    for inputs, targets in batches():
        leaves = {name: param.requires_grad_() for name, param in params.items()}
        outputs = torch.func.functional_call(net, leaves, (inputs,))
        per_task = []
        for loss_fn in (kind_loss, size_loss):
            found = torch.autograd.grad(
                loss_fn(outputs, targets), list(leaves.values()), retain_graph=True, materialize_grads=True
            )
            per_task.append(dict(zip(leaves, found, strict=True)))
        ours, theirs = projected(*per_task), projected(*per_task[::-1])
        momentum = {name: 0.9 * momentum.get(name, 0.0) + ours[name] + theirs[name] for name in params}
        params = {name: (param - 0.1 * momentum[name]).detach() for name, param in params.items()}
    for one in pc.unstack_states(end) if form == "population" else [end]:
        torch.testing.assert_close(one.params, params, rtol=1e-12, atol=1e-13)


def test_other_parameters_may_be_given_and_algorithms_inside_the_gradient_act() -> None:
    def apply(event: Event, state: State) -> State:
        del event
        moved = {name: param + 0.1 for name, param in state.params.items()}
        ((grads, loss),) = state.gradients(of=[pc.losses.cross_entropy], params=moved)
        expected, expected_loss = state.gradient(moved)
        assert tree.equal((grads, loss), (expected, expected_loss))
        return state

    look = Algorithm("look", on(Event.AFTER_TRAIN_BATCH), apply)
    step = compose(loop_events, [alg.mixup(0.2), alg.label_smoothing(0.1), look])
    state = State.create(nn.Linear(4, 3), loss=pc.losses.cross_entropy, optimizer=optim.sgd(0.1))
    step(step.init(state), (torch.ones(6, 4), torch.arange(6) % 3))


def test_wrong_calls_are_refused() -> None:
    step, state = made(kind_loss)
    with pytest.raises(RuntimeError, match="works inside a step"):
        state.gradients(of=[kind_loss])
    step, state = made(3)
    with pytest.raises(TypeError, match="expected a loss"):
        step(state, batches(1)[0])


class Weighted(nn.Module):
    """A loss with a weight that is trained, and a buffer that each call changes."""

    memory: Tensor

    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(())) if is_trained else 1.0
        self.register_buffer("memory", torch.ones(()))

    def forward(self, outputs: Any, targets: Any) -> Tensor:
        self.memory.mul_(0.5)
        return self.memory * self.weight * both(outputs, targets)


def test_the_own_loss_may_have_parameters_and_buffers_and_no_other_one_may() -> None:
    seen: list[tuple[dict[str, Tensor], Tensor]] = []

    def apply(event: Event, state: State) -> State:
        del event
        seen[:] = state.gradients(of=[state.context.loss, both])
        assert all(tree.equal(seen[0][0][name], grad) for name, grad in (state.grads or {}).items())
        return state

    step = compose(loop_events, [Algorithm("look", on(Event.AFTER_TRAIN_BATCH), apply)])
    state = State.create(TwoHeads().double(), loss=Weighted(is_trained=True), optimizer=optim.sgd(0.1))
    end = step(step.init(state), batches(1)[0])
    assert end.buffers["loss.memory"] == 0.5 and seen[0][1] == end.loss
    assert seen[0][0]["loss.weight"] != 0 and seen[1][0]["loss.weight"] == 0
    for is_trained, message in ((True, "has parameters"), (False, "writes into its buffers")):
        step, state = made(Weighted(is_trained=is_trained))
        with pytest.raises(ValueError, match=f"Weighted {message}"):
            step(state, batches(1)[0])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_slices_would_change_is_refused(ranks: int) -> None:
    def summed(outputs: Any, targets: Any) -> Tensor:
        return both(outputs, targets) * len(targets["kind"])

    step, state = made(summed, microbatches=3 - ranks, dropout=False)
    with pytest.raises(ValueError, match="summed.* is .* as the mean over 2 slices"):
        played(step, ranks)(lambda one: one(state, batches(1)[0])) if ranks > 1 else step(state, batches(1)[0])


def weighted(outputs: Any, targets: Any, weight: Any) -> Tensor:
    return weight * both(outputs, targets)


def test_scalars_and_parameters_of_other_losses_must_be_in_the_state() -> None:
    net, weight = TwoHeads().double(), pc.hparam("weight", 2.0)
    step, state = made(functools.partial(weighted, weight=weight), dropout=False)
    with pytest.raises(ValueError, match=r"weighted.* reads hparam\('weight', 2.0\), which is not in the state: let"):
        step(state, batches(1)[0])
    end = step(state.with_hparams([weight]), batches(1)[0])
    assert end.loss is not None and (end.metrics["loss apart"] - end.loss).abs() < 1e-14
    step, state = made(lambda outputs, targets: both(outputs, targets) + net.kind.weight.sum())
    with pytest.raises(ValueError, match="reads the parameters of net, a TwoHeads, outside of the state"):
        step(state, batches(1)[0])


@pytest.mark.parametrize(("microbatches", "num_passes"), [(1, 1), (2, 6)])
def test_losses_share_the_forward_pass_and_give_the_same_bits(microbatches: int, num_passes: int) -> None:
    losses, passes = (kind_loss, size_loss, both), []
    found: dict[str, Any] = {}

    class Counting(TwoHeads):
        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            passes.append(len(inputs))
            return super().forward(inputs)

    def apply(event: Event, state: State) -> State:
        del event
        passes.clear()
        found["together"] = state.gradients(of=losses)
        found["passes"] = len(passes)
        found["alone"] = [state.gradients(of=[loss])[0] for loss in losses]
        return state

    methods = [Algorithm("look", on(Event.AFTER_TRAIN_BATCH), apply), alg.label_smoothing(0.0)]
    step = compose(loop_events, methods, microbatches=microbatches)
    state = step.init(State.create(Counting(), loss=both, optimizer=optim.sgd(0.1), key=3))
    batch = batches(1)[0]
    batch = tree.map(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, batch)
    run_steps(step, state, [batch, batch])
    assert found["passes"] == num_passes
    for (grads, loss), (alone, loss_alone) in zip(found["together"], found["alone"], strict=True):
        assert torch.equal(loss, loss_alone)
        for name, grad in alone.items():
            assert torch.equal(grads[name], grad), name
