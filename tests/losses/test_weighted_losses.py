"""Losses with class weights: a batch in parts trains like the whole, whatever the mean divides by."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import purecompose as pc
from purecompose import algorithms as alg, compose, loop_events, losses, tree
from tests.helpers import make_batch, make_mlp, make_state


WEIGHTS = torch.tensor([0.05, 0.3, 2.0], dtype=torch.float64)
BATCH = make_batch(1, 12, dtype=torch.float64)


def by_examples(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the weighted sum divided by the number of examples."""
    found = F.cross_entropy(outputs, targets, weight=WEIGHTS, reduction="none")
    return found if reduction == "none" else found.mean() if reduction == "mean" else found.sum()


@dataclasses.dataclass(frozen=True)
class ByWeights:
    """A mean that divides by the sum of the examples' weights, as in torch; a batch's sum may be below 1."""

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(outputs, targets, weight=WEIGHTS, reduction=reduction)

    def num_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return WEIGHTS[targets].sum()


each_loss = pytest.mark.parametrize("loss", [by_examples, ByWeights()], ids=["examples", "weights"])


def state_of(loss: Any, **options: Any) -> pc.State:
    return make_state(make_mlp(dtype=torch.float64), loss=loss, **options)


def parts(sizes: list[int]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(sizes) for tensor in BATCH), strict=True))


def by_hand(loss: Any, state: pc.State) -> dict[str, Tensor]:
    """Return the parameters after a step of plain gradient descent on the whole batch."""
    net = pc.to_module(state)
    grads = torch.autograd.grad(loss(net(BATCH[0]), BATCH[1]), list(net.parameters()))
    return {n: p.detach() - 0.1 * grad for (n, p), grad in zip(net.named_parameters(), grads, strict=True)}


@each_loss
@pytest.mark.parametrize("cut", [{}, {"microbatches": 5}, {"microbatch_size": 1}], ids=str)
def test_slices_give_the_gradient_of_the_whole(loss, cut):
    state = state_of(loss)
    end = compose(loop_events, **cut)(state, BATCH)
    torch.testing.assert_close(end.params, by_hand(loss, state))
    torch.testing.assert_close(end.loss, loss(state.forward(BATCH[0]), BATCH[1]))


@each_loss
@pytest.mark.parametrize("sizes", [[6, 6], [1, 1, 10], [5, 1, 4, 2]], ids=str)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_collected_gradients_are_those_of_the_whole(loss, sizes, microbatches):
    step = compose(loop_events, [alg.gradient_accumulation(len(sizes))], microbatches=microbatches)
    start = state = step.init(state_of(loss))
    for part in parts(sizes):
        state = step(state, part)
    torch.testing.assert_close(state.params, by_hand(loss, start))


def test_a_parameter_that_is_one_number_keeps_its_dtype_in_a_sum():
    class Scaled(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.scale = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, input: Tensor) -> Tensor:
            return self.scale * super().forward(input)

    step = compose(loop_events, [alg.gradient_accumulation(2)])
    state = step.init(make_state(Scaled()))
    for batch in (make_batch(0), make_batch(1)):
        state = step(state, batch)
    assert state.params["scale"].dtype is torch.float32
    assert state.slots["gradient_accumulation"].sums["scale"].dtype is torch.float32


@each_loss
def test_the_mean_over_batches_of_an_evaluation_is_that_of_all_examples(loss):
    state = state_of(loss)
    found = pc.evaluate(state, parts([3, 1, 8]), {"loss": loss})["loss"]
    assert found == pytest.approx(loss(state.forward(BATCH[0]), BATCH[1]).item(), rel=1e-6)


def test_examples_alone_keep_their_weights_where_the_mean_divides_by_examples():
    step = compose(loop_events, [alg.per_example_clipping(1e6)])
    weighted = state_of(by_examples)
    torch.testing.assert_close(step(weighted, BATCH).params, by_hand(by_examples, weighted))
    # An example's mean by weights is its plain loss.
    alone = step(state_of(ByWeights()), BATCH)
    torch.testing.assert_close(alone.params, by_hand(losses.cross_entropy, weighted))


def test_mixing_and_slices_work_together_if_the_mean_divides_by_examples():
    ends = []
    for microbatches in (1, 4):
        step = compose(loop_events, [alg.mixup(0.4), alg.label_smoothing(0.1)], microbatches=microbatches)
        ends.append(step(step.init(state_of(by_examples)), BATCH))
    assert not list(tree.differences(ends[0].params, ends[1].params, tolerance=1e-9))


def test_shares_by_weights_below_one_add_up():
    values, weights = torch.tensor([3.0, 5.0]), torch.tensor([0.1, 0.3])
    shares = [losses.share_of_mean(value, own, weights.sum()) for value, own in zip(values, weights, strict=True)]
    torch.testing.assert_close(sum(shares), torch.tensor(4.5))
