"""torch's engine without the checks of its public functions: the same gradients and grad mode."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from purecompose._support import internals as autograd


class Calls(TorchFunctionMode):
    """Mode that lists the functions of torch that are called in it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.found.append(func)
        return func(*args, **kwargs or {})


def loss_and_leaves():
    x, y, unreached = (torch.tensor([1.0, 2.0], requires_grad=True) for _ in range(3))
    return (x * y.exp()).sum(), [x, y, unreached]


@pytest.mark.parametrize("private", [True, False])
def test_gradients_are_those_of_the_public_function(private, monkeypatch):
    if not private:
        monkeypatch.setattr(autograd, "_run_on_cpu", None)
    loss, leaves = loss_and_leaves()
    expected = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    found = autograd.gradients(loss, leaves)
    assert found[2] is expected[2] is None
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=0)


def test_a_mode_stays_active_in_hooks_of_the_backward_pass():
    loss, leaves = loss_and_leaves()
    leaves[0].register_hook(torch.sinh)
    with Calls() as calls:
        autograd.gradients(loss, leaves)
    assert torch.sinh in calls.found


@pytest.mark.parametrize("outer", [False, True])
def test_the_grad_mode_is_restored(outer):
    with torch.set_grad_enabled(outer):
        with pytest.raises(KeyError), autograd.GradMode(not outer):
            assert torch.is_grad_enabled() is not outer
            raise KeyError
        assert torch.is_grad_enabled() is outer
