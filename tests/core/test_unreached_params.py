"""Parameters that the loss does not reach have no gradient, and stay where they are, as under torch.optim."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, losses, optim
from tests.helpers import Batch, Routed, assert_near


class Fixed(Routed):
    """A model that always uses the same branch, so that it can be traced."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.positive(inputs))


def make_net(kind: type[nn.Module] = Routed) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def make_batches(*signs: int) -> list[Batch]:
    """Return one batch of six examples per sign, whose inputs all have that sign; 0 mixes both signs evenly."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for sign in signs:
        inputs = torch.rand(6, 3, generator=generator, dtype=torch.float64)
        factors = torch.tensor([1, 1, 1, -1, -1, -1])[:, None] if sign == 0 else sign
        batches.append((inputs * factors, torch.randint(2, (6,), generator=generator)))
    return batches


def make_state(net: nn.Module, optimizer: object, key: int = 0) -> State:
    return State.create(net, loss=losses.cross_entropy, optimizer=optimizer, key=key)


def torch_params(net: nn.Module, make_optimizer: Any, groups: list[list[Batch]]) -> dict[str, Tensor]:
    """Return the parameters after one torch update per group of parts, each with the mean gradient of its group."""
    optimizer = make_optimizer(net.parameters())
    for parts in groups:
        optimizer.zero_grad()
        num = sum(len(targets) for _, targets in parts)
        for inputs, targets in parts:
            (losses.cross_entropy(net(inputs), targets) * len(targets) / num).backward()
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


OPTIMIZERS = {
    "sgd": (optim.sgd(0.1, momentum=0.9, weight_decay=0.5), lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.5)),
    "adamw": (optim.adamw(0.1, weight_decay=0.5), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.5)),
    "rmsprop": (optim.rmsprop(0.1, momentum=0.9), lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9)),
    "from_torch": (
        optim.from_torch(torch.optim.NAdam, lr=0.1, weight_decay=0.5),
        lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.5),
    ),
}
SIGNS = (1, -1, -1, 1, 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_leave_what_the_loss_does_not_reach(name):
    ours, theirs = OPTIMIZERS[name]
    step, batches = pc.compose(pc.loop_events), make_batches(*SIGNS)
    state = make_state(make_net(), ours)
    for batch in batches:
        state = step(state, batch)
    assert_near(state.params, torch_params(make_net(), theirs, [[batch] for batch in batches]))


def test_a_slice_need_not_reach_what_another_does():
    ours, theirs = OPTIMIZERS["sgd"]
    batches = make_batches(1, 0, -1, 0)
    step = pc.compose(pc.loop_events, microbatches=2)
    state = make_state(make_net(), ours)
    for batch in batches:
        state = step(state, batch)
    assert_near(state.params, torch_params(make_net(), theirs, [[batch] for batch in batches]))


def test_accumulation_applies_what_any_batch_of_the_group_reaches():
    ours, theirs = OPTIMIZERS["sgd"]
    batches = make_batches(1, 1, 1, -1, -1, 1)
    step = pc.compose(pc.loop_events, [alg.gradient_accumulation(2)])
    state = step.init(make_state(make_net(), ours))
    for batch in batches:
        state = step(state, batch)
    assert_near(state.params, torch_params(make_net(), theirs, [batches[i : i + 2] for i in (0, 2, 4)]))


def test_sam_moves_what_its_second_gradient_reaches():
    """The perturbed weights may take another path: here the ascent opens a gate."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.tensor(-0.01))
            self.low, self.high = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return (self.low if self.gate < 0 else self.high)(inputs) * (1 + self.gate)

    (batch,) = make_batches(1)
    optimizer = optim.sgd(0.1, weight_decay=0.5)
    step = pc.compose(pc.loop_events, [alg.sam(0.5)])
    start = make_state(make_net(Gated), optimizer)
    end = step(start, batch)
    moved = {name for name, param in end.params.items() if not torch.equal(param, start.params[name])}
    uphill = torch.func.grad(
        lambda params: losses.cross_entropy(start.replace(params=params).forward(batch[0]), batch[1])
    )
    assert uphill(start.params)["gate"] > 0  # the perturbed gate is open
    assert moved == {"gate", "high.weight", "high.bias"}


METHODS = {
    "ema, clipping, lookahead": [alg.ema("1ba"), alg.gradient_clipping("norm", 0.1), alg.lookahead(every=2)],
    "gradient_accumulation": [alg.gradient_accumulation(2)],
    "sam": [alg.sam(0.1)],
    "loss_scaling": [alg.loss_scaling(8.0), alg.gradient_norm(each=True)],
    "skip_nonfinite": [alg.skip_nonfinite(), alg.gradient_noise_scale()],
    "per_example_clipping": [alg.per_example_clipping(0.5, 0.1)],
    "per_example_clipping, one by one": [alg.per_example_clipping(0.5, chunk_size=1)],
    "decoupled_weight_decay": [alg.decoupled_weight_decay(0.1)],
    "schedule_free": [alg.schedule_free()],
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_leave_what_is_never_used(name):
    step = pc.compose(pc.loop_events, METHODS[name], microbatches=2)
    weight_decay = 0.0 if name == "decoupled_weight_decay" else 0.5
    state = step.init(make_state(make_net(Fixed), optim.sgd(0.1, weight_decay=weight_decay)))
    for batch in make_batches(1, 1, 1, 1):
        state = step(state, batch)
    assert state.params["unused"].item() == 1 and state.metrics.get("gradient_norm/unused") is None


def test_compiled_mapped_and_differentiated_steps_do_as_eager_ones():
    ours, theirs = OPTIMIZERS["adamw"]
    batches = make_batches(*SIGNS)
    step = pc.compose(pc.loop_events, [alg.gradient_accumulation(2)])
    expected = torch_params(make_net(Fixed), theirs, [batches[:2], batches[2:4]])
    start = step.init(make_state(make_net(Fixed), ours))
    fast, pair = pc.compile(step, backend="eager", quiet=True), pc.population(step, 2)
    compiled, both = start, pc.stack_states([start, start])
    for batch in batches:
        compiled, both = fast(compiled, batch), pair(both, batch)
    assert_near(compiled.copy().params, expected)
    for member in pc.unstack_states(both):
        assert_near(member.params, expected)

    def loss_after(params: dict[str, Tensor]) -> Tensor:
        state = start.replace(params=params)
        for batch in batches:
            state = step(state, batch)
        assert_near({name: param.detach() for name, param in state.params.items()}, expected)
        return state.params["unused"].sum()

    leaves = {name: param.clone().requires_grad_() for name, param in start.params.items()}
    (slope,) = torch.autograd.grad(loss_after(leaves), [leaves["unused"]])
    assert slope.item() == 1


def test_a_loss_that_reaches_nothing_is_an_error():
    def no_outputs(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return targets.double().mean()

    state = State.create(make_net(), loss=no_outputs, optimizer=optim.sgd(0.1))
    (batch,) = make_batches(1)
    with pytest.raises(ValueError, match="does not depend on any parameter"):
        pc.compose(pc.loop_events)(state, batch)
