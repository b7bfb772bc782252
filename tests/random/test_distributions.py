"""Exponential, truncated normal, gamma and beta against scipy's distribution functions, at fixed seeds."""

import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from purecompose.random import Rng, beta, distributions, exponential, fold_in, gamma, key, split


LEAST_P = 1e-3  # the seeds are fixed, so a statistic that passes once always passes
N = 5000

DRAWS: dict[str, Callable[..., Tensor]] = {
    "exponential": exponential,
    "gamma": lambda k, s, **kw: gamma(k, 0.7, s, **kw),
    "beta": lambda k, s, **kw: beta(k, 0.2, 0.9, s, **kw),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
each_float = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])


@each_float
@pytest.mark.parametrize("rate", [0.25, 1.0, 30.0])
def test_exponential_distribution(rate: float, dtype: torch.dtype) -> None:
    draw = exponential(key(0), N, rate=rate, dtype=dtype)
    assert draw.dtype == dtype
    assert stats.kstest(draw.numpy(), "expon", args=(0, 1 / rate)).pvalue > LEAST_P


def test_exponential_lets_gradients_through_to_its_rate() -> None:
    rate = torch.tensor(2.0, requires_grad=True, dtype=torch.float64)
    draw = exponential(key(0), 100, rate=rate, dtype=torch.float64)
    (grad,) = torch.autograd.grad(draw.sum(), rate)
    torch.testing.assert_close(grad, -draw.sum().detach() / 2)


@each_float
@pytest.mark.parametrize("concentration", [0.05, 0.2, 0.5, 1.0, 1.5, 4.0, 100.0, 1e6])
def test_gamma_distribution(concentration: float, dtype: torch.dtype) -> None:
    """At concentration 0.05 one percent of the mass is below the smallest float32, and is counted separately."""
    draw = gamma(key(2), concentration, N, dtype=dtype)
    assert draw.dtype == dtype
    assert (draw > 0).all()
    assert torch.isfinite(draw).all()
    least = torch.finfo(dtype).smallest_normal
    inside = draw[draw > least].double().numpy()
    law = stats.gamma(concentration)
    below = float(law.cdf(least))
    num_below = N - len(inside)
    assert stats.binomtest(num_below, N, below).pvalue > LEAST_P if below > 1e-6 else num_below == 0
    assert stats.kstest(inside, lambda x: (law.cdf(x) - below) / (1 - below)).pvalue > LEAST_P


@each_float
@pytest.mark.parametrize(("a", "b"), [(0.2, 0.2), (1.0, 1.0), (0.05, 0.05), (2.0, 5.0), (0.5, 3.0), (300.0, 200.0)])
def test_beta_distribution(a: float, b: float, dtype: torch.dtype) -> None:
    """Float32 rounds values near 1 to 1, so the mass near the edges is counted and the rest compared in shape."""
    draw = beta(key(3), a, b, N, dtype=dtype)
    assert draw.dtype == dtype
    assert ((draw >= 0) & (draw <= 1)).all()
    law, values = stats.beta(a, b), draw.double().numpy()
    for edge in (1e-9, 1e-6, 1e-3, 0.5, 1 - 1e-3, 1 - 1e-6):
        count = int((values <= edge).sum())
        assert stats.binomtest(count, N, float(law.cdf(edge))).pvalue > LEAST_P
    inside = values[(values > 1e-6) & (values < 1 - 1e-6)]
    start, end = law.cdf(1e-6), law.cdf(1 - 1e-6)
    assert stats.kstest(inside, lambda x: (law.cdf(x) - start) / (end - start)).pvalue > LEAST_P


@each_dtype
@pytest.mark.parametrize("concentration", [5e-324, 1e-6, 1e-3, 0.02, 1.0, 50.0])
def test_beta_and_gamma_are_never_nan(concentration: float, dtype: torch.dtype) -> None:
    draw = beta(key(4), concentration, concentration, 2000, dtype=dtype)
    assert ((draw >= 0) & (draw <= 1)).all()
    draw = gamma(key(4), concentration, 2000, dtype=dtype)
    assert ((draw > 0) & torch.isfinite(draw)).all()


def test_beta_of_tiny_weights_is_a_fair_coin() -> None:
    draw = beta(key(5), 1e-6, 1e-6, N)
    assert set(draw.tolist()) == {0.0, 1.0}
    assert stats.binomtest(int(draw.sum()), N, 0.5).pvalue > LEAST_P


def test_all_rounds_failing_gives_a_finite_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """No round accepts these words: the smallest radius word gives a far point, the largest uniform refuses it."""

    def bits(key: object, shape: tuple[int, ...], num: int, what: str) -> Tensor:
        block = torch.tensor([0, -(2**31), -1, -1], dtype=torch.int32)  # cos = -1: base < 0 at concentration 1
        return block.repeat(num // 4).repeat(*shape, 1)

    monkeypatch.setattr(distributions, "element_bits", bits)
    for shape in ((1,), (2,)):  # a single draw is computed on the host
        torch.testing.assert_close(gamma(key(0), 1.0, shape), torch.full(shape, 1 - 1 / 3))
        torch.testing.assert_close(beta(key(0), 1.0, 1.0, shape), torch.full(shape, 0.5))


@pytest.mark.parametrize("alpha", [1e-3, 0.2, 1.0, 30.0])
def test_a_single_draw_equals_the_same_draw_by_tensor_operations(alpha: float) -> None:
    keys = split(key(4), 50)
    for draw in (lambda k: gamma(k, alpha, ()), lambda k: beta(k, alpha, torch.tensor(alpha))):
        torch.testing.assert_close(torch.func.vmap(draw)(keys), torch.stack([draw(k) for k in keys]))


def test_a_single_draw_takes_any_tensor_as_parameter() -> None:
    """Values of tensors are not checked, so they must not raise an error on the host either."""
    for alpha in (-2.0, math.nan, math.inf, 0.0):
        weights = torch.tensor([alpha, alpha], dtype=torch.float64)
        for draw in (gamma, lambda k, a: beta(k, a, a)):
            torch.testing.assert_close(draw(key(0), weights[:1]), draw(key(0), weights)[:1], equal_nan=True)


def test_parameters_may_be_tensors() -> None:
    alphas = torch.tensor([0.05, 0.5, 1.0, 20.0])
    expected = torch.stack([gamma(key(7), float(a), 4)[i] for i, a in enumerate(alphas)])
    torch.testing.assert_close(gamma(key(7), alphas), expected)
    torch.testing.assert_close(gamma(key(7), alphas, (3, 4))[0], expected)
    pairs = torch.stack([beta(key(7), float(a), 2.0, 4)[i] for i, a in enumerate(alphas)])
    torch.testing.assert_close(beta(key(7), alphas, 2.0), pairs)
    assert beta(key(7), alphas, torch.ones(2, 1)).shape == (2, 4)
    by_alpha = torch.func.vmap(lambda a: gamma(key(7), a, 2))(alphas)
    torch.testing.assert_close(by_alpha, torch.stack([gamma(key(7), float(a), 2) for a in alphas]))


def test_gamma_and_beta_carry_no_gradient() -> None:
    alpha = torch.tensor(0.5, requires_grad=True)
    assert not gamma(key(0), alpha, 3).requires_grad
    assert not beta(key(0), alpha, alpha, 3).requires_grad


@each_draw
@each_dtype
def test_draws_start_with_shorter_draws_and_keep_rows(draw: Callable[..., Tensor], dtype: torch.dtype) -> None:
    assert torch.equal(draw(key(0), 9, dtype=dtype)[:4], draw(key(0), 4, dtype=dtype))
    rng = Rng(fold_in(key(0), 3)).named("x")
    whole = draw(rng.per_example(torch.arange(6)), (6, 2), dtype=dtype)
    some = torch.tensor([4, 1])
    assert torch.equal(draw(rng.per_example(some), (2, 2), dtype=dtype), whole[some])
    assert whole.dtype == dtype
    assert draw(key(0), (0, 3), dtype=dtype).shape == (0, 3)
    assert draw(key(0), (), dtype=dtype).shape == ()


@pytest.mark.parametrize("a, b", [(0.2, 0.2), (1.0, 3.0), (1e-300, 2.0)])
def test_a_beta_number_is_a_beta_draw(a, b):
    rngs = [Rng(fold_in(key(5), number)).named("share") for number in range(20)]
    numbers = [distributions.beta_number(rng, a, b) for rng in rngs]
    assert all(isinstance(number, float) for number in numbers)
    assert numbers == [beta(rng, a, b).item() for rng in rngs]
    keys = torch.stack([rng.key for rng in rngs])
    mapped = torch.func.vmap(lambda one: distributions.beta_number(Rng(one).named("share"), a, b))(keys)
    torch.testing.assert_close(mapped, torch.tensor(numbers))
