"""The list arithmetic where its two forms, `_foreach` kernels and loops, could differ."""

import pytest
import torch

from purecompose.optim import lists


X = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).abs() + 0.1


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
