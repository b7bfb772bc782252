"""Errors of torch.vmap in a population come with the layer, the line and a remedy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from purecompose import compose, evaluate, loop_events, population, stack_states
from tests.helpers import make_batch, make_state


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * grad


class Layer(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fn(x)


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "item": (lambda: Layer(lambda x: x.mean().item()), "a number or the memory.*'1' .Layer.*torch.where"),
    "if": (lambda: Layer(lambda x: 1 if x.sum() > 0 else 2), "a number or the memory.*'1' .Layer.*torch.where"),
    "one_hot": (
        lambda: Layer(lambda x: nn.functional.one_hot(x.argmax(1), 3)),
        "F.one_hot.*'1' .Layer.*compare with torch.arange",
    ),
    "mask": (lambda: Layer(lambda x: x[x > 0].sum()), "shape depends on numbers.*'1' .Layer.*Multiply by the mask"),
    "nonzero": (lambda: Layer(lambda x: x.nonzero().sum()), "shape depends on numbers.*'1' .Layer.*in the data"),
    "in place": (lambda: Layer(lambda x: torch.zeros(8, 3).add_(x)), "all members share.*'1' .Layer.*new_zeros"),
    "numpy": (
        lambda: Layer(lambda x: x.detach().numpy().sum()),
        "memory of a tensor is read.*'1' .Layer.*compute with torch",
    ),
    "function": (lambda: Layer(Doubling.apply), "autograd.Function cannot.*'1' .Layer.*generate_vmap_rule"),
    "checkpoint": (
        lambda: Layer(lambda x: checkpoint(torch.tanh, x, use_reentrant=False)),
        "torch.utils.checkpoint.*'1' .Layer.*Leave checkpointing out",
    ),
    "sparse": (
        lambda: Layer(lambda x: torch.sparse.mm(x.to_sparse(), torch.ones(3, 3))),
        "cannot map an operation.*'1' .Layer.*Replace the operation",
    ),
    "no rule": (
        lambda: Layer(lambda x: torch.div(x.detach(), 2, out=torch.empty_like(x))),
        "cannot map an operation.*'1' .Layer.*unstack_states.*aten::div.out",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operations_refused_by_vmap_are_named_with_layer_and_remedy(name):
    factory, said = CASES[name]
    state = make_state(nn.Sequential(nn.Linear(4, 3), factory()))
    step = population(compose(loop_events), 2)
    with pytest.raises(RuntimeError, match=f"population: .*{said}") as caught:
        step(stack_states([state, state]), make_batch())
    assert caught.value.__cause__ is not None
    assert any("in the stage forward" in note for note in caught.value.__notes__)


def test_a_gradient_within_evaluation_is_named():
    def slope(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(x.square().sum(), x)[0]

    state = make_state(nn.Sequential(nn.Linear(4, 3), Layer(slope)))
    step = population(compose(loop_events), 2)
    with pytest.raises(RuntimeError, match=r"where the step takes no gradient.*'1' .Layer.*torch\.func\.grad"):
        evaluate(stack_states([state, state]), [make_batch()], step=step)


def test_a_write_into_the_batch_is_named():
    class Centred(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.sub_(input.mean()))

    state = make_state(Centred(4, 3))
    with pytest.raises(RuntimeError, match=r"population: the batch.* is written into in place.*Make a new tensor"):
        population(compose(loop_events), 2)(stack_states([state, state]), make_batch())


def test_a_wrong_shape_keeps_its_error():
    state = make_state(nn.Sequential(nn.Linear(4, 3), Layer(lambda x: torch.ones(7, 3))))
    with pytest.raises(RuntimeError) as caught:
        population(compose(loop_events), 2)(stack_states([state, state]), make_batch())
    assert "population" not in str(caught.value)
