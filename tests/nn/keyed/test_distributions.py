"""Distributions of torch in a network: eager, compiled and in a population."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions as D, nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import State, compose, loop_events
from purecompose.errors import TraceError
from tests.helpers import assert_close, make_batch
from tests.sampling import one_in


class Drawing(nn.Module):
    """A network that applies a function, which may draw, to the outputs of a linear layer."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.fn = nn.Linear(4, 3), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.linear(x))


def mean_square(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    losses = outputs.square().mean(-1)
    return losses.mean() if reduction == "mean" else losses


# Functions of real numbers (n, 3).
SAMPLES: dict[str, Callable[[Tensor], Tensor]] = {
    "Normal": lambda x: D.Normal(x, x.exp()).rsample(),
    "Normal of no tensor": lambda x: x * D.Normal(0.0, 1.0).rsample(x.shape),
    "several samples": lambda x: D.Normal(x, x.exp()).rsample(torch.Size([5])).mean(0),
    "Independent": lambda x: D.Independent(D.Normal(x, x.exp()), 1).rsample(),
    "MultivariateNormal": lambda x: D.MultivariateNormal(x, torch.eye(3)).rsample(),
    "TransformedDistribution": lambda x: D.TransformedDistribution(D.Normal(x, 1.0), [D.TanhTransform()]).rsample(),
    "Laplace": lambda x: D.Laplace(x, x.exp()).rsample(),
    "Uniform": lambda x: D.Uniform(x - 1, x + 1).rsample(),
    "Exponential": lambda x: D.Exponential(x.exp()).rsample(),
    "Gumbel": lambda x: D.Gumbel(x, x.exp()).rsample(),
    "Bernoulli": lambda x: x * D.Bernoulli(logits=x).sample(),
    "Geometric": lambda x: x * D.Geometric(x.sigmoid()).sample(),
    "Categorical": lambda x: x * D.Categorical(logits=x).sample()[:, None],
    "RelaxedBernoulli": lambda x: D.RelaxedBernoulli(torch.tensor(0.5), logits=x).rsample(),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "gumbel_softmax, hard": lambda x: x * F.gumbel_softmax(x, hard=True),
    "log_prob": lambda x: D.Normal(x, x.exp()).log_prob(torch.zeros(3)),
    "kl_divergence": lambda x: D.kl_divergence(D.Normal(x, x.exp()), D.Normal(0.0, 1.0)),
}


def start(fn: Callable[[Tensor], Tensor], key: int = 0) -> State:
    torch.manual_seed(0)
    return State.create(Drawing(fn), loss=mean_square, optimizer=pc.optim.sgd(0.01), key=key)


def compiled(step: Any) -> Any:
    return pc.compile(step, backend="eager", quiet=True)


@pytest.mark.parametrize("name", one_in(4, SAMPLES))
def test_distributions_are_the_same_eager_compiled_and_in_a_population(name):
    step, batch, members = compose(loop_events), make_batch(), [start(SAMPLES[name], key) for key in range(2)]
    expected = [step(member, batch).params for member in members]
    assert_close(compiled(step)(members[0], batch).params, expected[0])
    for transform in (lambda step: step, compiled):
        found = transform(pc.population(step, 2))(pc.stack_states(members), batch).params
        for index, params in enumerate(expected):
            assert_close({key: param[index] for key, param in found.items()}, params)


def test_values_are_checked_in_an_eager_step_even_after_a_compiled_one(monkeypatch):
    monkeypatch.setattr(D.Distribution, "_validate_args", True)  # torch.compile turns it off for the process

    def wrong(x: Tensor) -> Tensor:
        return D.Normal(x, x - x - 1).rsample()

    compiled(compose(loop_events))(start(wrong), make_batch())
    with pytest.raises(ValueError, match="parameter scale"):
        compose(loop_events)(start(wrong), make_batch())


def test_a_check_that_compiled_code_cannot_make_is_named():
    def checked(x: Tensor) -> Tensor:
        return D.Normal(x, x.exp(), validate_args=True).rsample()

    with pytest.raises(TraceError, match="a distribution checks its values, as validate_args=True asks"):
        compiled(compose(loop_events))(start(checked), make_batch())
