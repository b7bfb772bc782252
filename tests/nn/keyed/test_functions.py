"""The keyed forms of torch's random functions follow their distributions, ranges and options."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from purecompose.nn.keyed.modules import keyed
from purecompose.random.keys import Rng, key


N = 20_000
NAMED: dict[str, Any] = {"from": -1.0, "to": 3.0}
FLOATS: dict[str, tuple[Callable[[], Tensor], Any]] = {
    "rand": (lambda: torch.rand(N), stats.uniform()),
    "randn": (lambda: torch.randn(N), stats.norm()),
    "normal": (lambda: torch.normal(torch.full((N,), 1.0), 2.0), stats.norm(1, 2)),
    "uniform_": (lambda: torch.empty(N).uniform_(-1.0, 3.0), stats.uniform(-1, 4)),
    "uniform_ named": (lambda: torch.empty(N).uniform_(**NAMED), stats.uniform(-1, 4)),
    "normal_": (lambda: torch.empty(N).normal_(1.0, 2.0), stats.norm(1, 2)),
    "exponential_": (lambda: torch.empty(N).exponential_(2.0), stats.expon(scale=0.5)),
    "randn complex": (lambda: torch.randn(N, dtype=torch.complex64).real, stats.norm(0, 0.5**0.5)),
}


@pytest.mark.parametrize("name", FLOATS)
def test_continuous_distributions(name: str) -> None:
    draw, law = FLOATS[name]
    with keyed(Rng(key(3))):
        sample = draw()
    assert stats.kstest(sample.double().numpy(), law.cdf).pvalue > 1e-3


def counts_agree(sample: Tensor, probabilities: list[float]) -> bool:
    counts = torch.bincount(sample.long().flatten(), minlength=len(probabilities))
    assert len(counts) == len(probabilities)
    expected = [p * sample.numel() for p in probabilities]
    keep = [i for i, e in enumerate(expected) if e > 0]
    assert all(counts[i] == 0 for i, e in enumerate(expected) if e == 0)
    return stats.chisquare([counts[i].item() for i in keep], [expected[i] for i in keep]).pvalue > 1e-3


WEIGHTS = torch.tensor([0.0, 0.1, 0.0, 0.4, 0.5, 0.0])
INTEGERS: dict[str, tuple[Callable[[], Tensor], list[float]]] = {
    "randint": (lambda: torch.randint(3, 7, (N,)) - 3, [0.25] * 4),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), [0.7, 0.3]),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.3), [0.7, 0.3]),
    "multinomial": (lambda: torch.multinomial(WEIGHTS, N, replacement=True), WEIGHTS.tolist()),
    "multinomial first": (lambda: torch.multinomial(WEIGHTS.expand(N, 6), 2)[:, 0], WEIGHTS.tolist()),
    "gumbel_softmax": (lambda: F.gumbel_softmax(WEIGHTS.log().expand(N, 6), hard=True).argmax(-1), WEIGHTS.tolist()),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_discrete_distributions(name: str) -> None:
    draw, probabilities = INTEGERS[name]
    with keyed(Rng(key(3))):
        assert counts_agree(draw(), probabilities)


def test_ranges_and_options_are_those_of_torch() -> None:
    with keyed(Rng(key(0))):
        assert torch.rand(N, dtype=torch.bfloat16).max() < 1
        assert torch.empty(5).uniform_(2.0, 2.0).eq(2).all()
        order = torch.randperm(50, dtype=torch.int32)
        assert order.dtype == torch.int32 and order.sort().values.equal(torch.arange(50, dtype=torch.int32))
        assert torch.rand(3, requires_grad=True).requires_grad
        assert torch.rand(()).shape == () and torch.rand(0, 3).shape == (0, 3)
        assert torch.randn(2, 3, device="meta").shape == (2, 3)
        picks = torch.multinomial(torch.ones(100, 5), 5)
        assert picks.sort(-1).values.equal(torch.arange(5).expand(100, 5))
    with keyed(Rng(key(0))) as record:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.rand(2).dtype == torch.float64
        finally:
            torch.set_default_dtype(default)
    assert record.count == 1
