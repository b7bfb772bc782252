"""Both forms of the list arithmetic, `_foreach` kernels and loops, against plain formulas."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from purecompose.optim import lists


X, Y, Z = (torch.randn(3, 2, generator=torch.Generator().manual_seed(seed)).abs() + 0.1 for seed in range(3))
HALF = torch.tensor(0.5)
CASES: dict[str, tuple[Callable[..., list[Tensor]], tuple[Any, ...], Tensor]] = {
    "add number": (lists.add, ([X], [Y], 0.3), X + 0.3 * Y),
    "add tensor": (lists.add, ([X], [Y], HALF), X + Y / 2),
    "increment": (lists.increment, ([X],), X + 1),
    "multiply": (lists.multiply, ([X], [Y]), X * Y),
    "multiply 0-d": (lists.multiply, ([X], [HALF]), X / 2),
    "divide": (lists.divide, ([X], [Y]), X / Y),
    "divide 0-d": (lists.divide, ([X], [HALF]), 2 * X),
    "lerp number": (lists.lerp, ([X], [Y], 0.25), 0.75 * X + 0.25 * Y),
    "lerp tensor": (lists.lerp, ([X], [Y], HALF), (X + Y) / 2),
    "maximum": (lists.maximum, ([X], [Y]), torch.where(X > Y, X, Y)),
    "clamp_min": (lists.clamp_min, ([X - 1], -0.25), torch.where(X - 1 > -0.25, X - 1, -0.25)),
    "sign": (lists.sign, ([X - 0.5],), torch.where(X > 0.5, 1.0, -1.0)),
    "root_plus number": (lists.root_plus, ([X], 0.5), X**0.5 + 0.5),
    "root_plus": (lists.root_plus, ([X], [HALF]), X**0.5 + 0.5),
    "subtract_ratio": (lists.subtract_ratio, ([X], [Y], [Z]), X - Y / Z),
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_its_formula_and_does_not_change_its_arguments(case: str, watched: bool):
    function, args, expected = CASES[case]
    before = [arg[0].clone() for arg in args if isinstance(arg, list)]
    with torch.set_grad_enabled(watched):
        assert lists.is_plain() is not watched
        (result,) = function(*args)
    torch.testing.assert_close(result, expected)
    assert all(torch.equal(arg[0], old) for arg, old in zip(args, before, strict=False))


@pytest.mark.parametrize("watched", [False, True])
def test_mean_squares_are_those_of_double_precision(watched: bool):
    # 300^2 is beyond float16.
    tensors = [torch.tensor([300.0, 100.0], dtype=torch.float16), torch.zeros(2, 2), X]
    with torch.set_grad_enabled(watched):
        means = lists.mean_squares(tensors, torch.float32)
    torch.testing.assert_close(means, torch.tensor([5e4, 0.0, (X.double() ** 2).sum().item() / 6]))


def test_functorch_levels_are_detected_under_no_grad():
    seen = []
    with torch.no_grad():
        torch.func.vmap(lambda x: (seen.append(lists.is_plain()), x)[1])(torch.ones(2))
    assert seen == [False]


def test_the_root_has_no_slope_at_zero_and_lets_nan_through():
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    roots, lost = lists.root_plus([x, torch.tensor([float("nan")])], [torch.tensor(1.0)] * 2)
    torch.testing.assert_close(roots.detach(), torch.tensor([1.0, 3.0]))
    (slope,) = torch.autograd.grad(roots.sum(), x)
    torch.testing.assert_close(slope, torch.tensor([0.0, 0.25]))
    assert bool(lost.isnan())
