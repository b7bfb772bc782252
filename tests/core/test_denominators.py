"""Losses that are sums of means with different denominators, in slices and on several processes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop, loop_events
from purecompose.testing.process import played
from tests.helpers import SumOfMeans, assert_close, make_batch, make_mlp, make_state


def state_of(loss: Any, **options: Any) -> State:
    return make_state(make_mlp(dtype=torch.float64), loss=loss, **options)


def batch_of(size: int = 12) -> tuple[Tensor, Tensor]:
    """Return a batch whose first examples have targets that do not count."""
    inputs, targets = make_batch(size=size, dtype=torch.float64)
    targets[:5] = -100
    return inputs, targets


def assert_agree(first: State, second: State) -> None:
    values = [{"loss": one.loss, **one.params, **one.metrics} for one in (first, second)]
    assert_close(*values, rtol=1e-9, atol=1e-12)


class Weighted(nn.Module):
    """Two means with learned weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([0.5, -0.5], dtype=torch.float64))

    def denominators(self, targets: Tensor) -> Any:
        return SumOfMeans().denominators(targets)

    def forward(self, outputs: Tensor, targets: Tensor, denominators: Any) -> tuple[Tensor, dict[str, Tensor]]:
        _, parts = SumOfMeans()(outputs, targets, denominators)
        scale = self.scales.exp()
        return scale[0] * parts["labelled"] + scale[1] * parts["size"] - self.scales.sum(), parts


LOSSES = {"constant": SumOfMeans, "named": lambda: SumOfMeans(pc.hparam("weight", 0.3)), "learned": Weighted}


@pytest.mark.parametrize("microbatches", [2, 5, 12])
@pytest.mark.parametrize("name", LOSSES)
def test_slices_give_the_loss_gradient_and_parts_of_the_whole(name, microbatches):
    whole = compose(loop_events)(state_of(LOSSES[name]()), batch_of())
    assert_agree(compose(loop_events, microbatches=microbatches)(state_of(LOSSES[name]()), batch_of()), whole)


def test_the_loss_is_that_of_a_plain_loop():
    (inputs, targets), net = batch_of(), make_mlp(dtype=torch.float64)
    outputs = net(inputs)
    labelled = nn.functional.cross_entropy(outputs[5:], targets[5:])
    loss = labelled + 0.5 * outputs.square().sum(1).mean()
    loss.backward()
    state = make_state(net, loss=SumOfMeans(), optimizer=pc.optim.sgd(1.0))
    state = compose(loop_events, microbatches=4)(state, (inputs, targets))
    torch.testing.assert_close(state.loss, loss.detach())
    torch.testing.assert_close(state.metrics["loss/labelled"], labelled.detach())
    torch.optim.SGD(net.parameters(), 1.0).step()
    assert_close(state.params, dict(net.named_parameters()))


def test_compiled_and_mapped_slices_agree():
    step, states = compose(loop_events, microbatches=5), [state_of(Weighted()), state_of(Weighted(), key=1)]
    expected = [compose(loop_events)(state, batch_of()) for state in states]
    assert_agree(pc.compile(step, backend="eager", quiet=True)(states[0], batch_of()), expected[0])
    assert_agree(pc.population(step, 2)(pc.stack_states(states), batch_of()), pc.stack_states(expected))


@pytest.mark.parametrize("size, microbatches", [(12, 1), (11, 3), (2, 1)])
def test_processes_give_the_loss_of_the_whole(size, microbatches):
    batch = batch_of(12)[0][-size:], batch_of(12)[1][-size:]
    whole = compose(loop_events)(state_of(SumOfMeans()), batch)
    play = played(compose(loop_events, microbatches=microbatches), 3)
    for own in play(lambda step: step(state_of(SumOfMeans()), batch)):
        assert_agree(own, whole)


class OfSequences(SumOfMeans):
    """The same loss over the positions of sequences (T, N, ...)."""

    def denominators(self, targets: Tensor) -> dict[str, Any]:
        return super().denominators(targets.flatten())

    def __call__(self, outputs: Tensor, targets: Tensor, denominators: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return super().__call__(outputs.flatten(0, 1), targets.flatten(), denominators)


def test_sequences_that_are_cut_along_another_dimension_agree():
    inputs, targets = make_batch(size=24, dtype=torch.float64)
    inputs, targets = inputs.unflatten(0, (3, 8)), targets.unflatten(0, (3, 8))
    targets[1:, :3] = -100
    whole, sliced = (
        compose(loop_events, microbatches=k)(state_of(OfSequences(), batch_dim=1), (inputs, targets)) for k in (1, 5)
    )
    assert_agree(sliced, whole)


def test_a_loss_that_does_not_divide_by_them_is_found():
    class Own(SumOfMeans):
        def __call__(self, outputs: Tensor, targets: Tensor, denominators: Any) -> Any:
            return super().__call__(outputs, targets, self.denominators(targets))

    with pytest.raises(ValueError, match=r"examples together, but .* as the mean over 2 slices"):
        compose(loop_events, microbatches=4)(state_of(Own()), batch_of())


def test_mixed_targets_are_refused():
    step = compose(loop_events, [alg.mixup(1.0)], microbatches=4)
    with pytest.raises(TypeError, match=r"denominators of the loss SumOfMeans.* losses\.over_batch"):
        step(step.init(state_of(SumOfMeans())), batch_of())


def own_stage(state: State) -> State:
    """Compute the loss `SumOfMeans` in a stage."""
    outputs, state = state.call(state.batch[0])
    loss, parts = SumOfMeans()(outputs, state.batch[1], state.denominators)
    return state.replace(loss=loss, metrics={f"loss/{name}": part for name, part in parts.items()})


own_stage.denominators = lambda state: SumOfMeans().denominators(state.batch[1])  # pyright: ignore


def program_of(**options: Any) -> Any:
    return loop.Microbatches(loop.Grad(own_stage), **options), loop.update, loop.advance


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_a_stage_divides_by_its_share_of_the_denominators_of_the_batch(microbatches: int) -> None:
    start = state_of(SumOfMeans())
    assert_agree(
        compose(program_of(microbatches=microbatches))(start, batch_of()), compose(loop_events)(start, batch_of())
    )


def test_two_scopes_have_their_own_denominators() -> None:
    nodes = program_of(microbatches=3)
    end = compose((nodes[0], loop.update, nodes[0], *nodes[1:]))(state_of(SumOfMeans()), batch_of())
    step = compose(loop_events)
    once = step(state_of(SumOfMeans()), batch_of())
    assert_close(end.params, step(once, batch_of()).params, rtol=1e-9, atol=1e-12)
