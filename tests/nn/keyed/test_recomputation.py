"""Activation checkpointing under keyed draws: the second computation draws what the first did."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from purecompose.errors import UnkeyedRandomError
from purecompose.nn.keyed.modules import checkpoint, keyed
from purecompose.random.keys import Rng, key, split
from tests.nn.keyed.module_helpers import images, run


class Block(nn.Module):
    """Two dropouts, one in a checkpointed region; `nested` puts a checkpoint in the region."""

    def __init__(self, checkpoint_fn: Callable[..., Tensor], nested: bool = False) -> None:
        super().__init__()
        self.checkpoint_fn, self.nested = checkpoint_fn, nested

    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.4).cos()

    def region(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.4).tanh()
        return self.checkpoint_fn(self.inner, x).exp() if self.nested else self.inner(x).exp()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.dropout(self.checkpoint_fn(self.region, F.dropout(x, 0.4)), 0.4)
        return x


def plainly(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_gradients_with_checkpoint_are_those_without(nested: bool, inside: bool) -> None:
    x = images().requires_grad_()

    def gradient(checkpoint_fn: Callable[..., Any]) -> tuple[Tensor, Tensor, int]:
        with keyed(Rng(key(0)), num_examples=len(x)) as record:
            out = Block(checkpoint_fn, nested)(x)
            if inside:
                return out, torch.autograd.grad(out.sum(), x)[0], record.count
        return out, torch.autograd.grad(out.sum(), x)[0], record.count

    for result, expected in zip(gradient(checkpoint), gradient(plainly), strict=True):
        assert torch.equal(torch.as_tensor(result), torch.as_tensor(expected))


def test_a_checkpoint_can_be_computed_again_more_than_once() -> None:
    x = images().requires_grad_()
    with keyed(Rng(key(0))):
        out = Block(checkpoint)(x).sum()
        first = torch.autograd.grad(out, x, retain_graph=True)[0]
        after = F.dropout(x)
        assert torch.equal(torch.autograd.grad(out, x)[0], first)
    with keyed(Rng(key(0))):
        Block(plainly)(x)
        assert torch.equal(F.dropout(x), after)


def test_a_checkpoint_keeps_the_global_generator_and_passes_keywords() -> None:
    x, before = images().requires_grad_(), torch.get_rng_state()
    with keyed(Rng(key(0))):
        out = checkpoint(F.dropout, x, p=0.25)
    torch.autograd.grad(out.sum(), x)
    assert torch.equal(out[out != 0], (x * (1 / 0.75))[out != 0])
    assert torch.equal(torch.get_rng_state(), before)


def test_outside_of_a_scope_a_checkpoint_is_torchs() -> None:
    x = images().requires_grad_()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = torch.autograd.grad(Block(plainly)(x).sum(), x)[0]
        torch.manual_seed(0)
        assert torch.equal(torch.autograd.grad(Block(checkpoint)(x).sum(), x)[0], expected)


def test_under_a_transform_a_checkpoint_runs_plainly() -> None:
    def loss(checkpoint_fn: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda x: run(Block(checkpoint_fn), x).sum()

    x = images()
    assert torch.equal(grad(loss(checkpoint))(x), grad(loss(plainly))(x))
    keys = split(key(0), 2)
    stacked = vmap(lambda k: run(Block(checkpoint), x, Rng(k)))(keys)
    assert torch.equal(stacked[1], run(Block(plainly), x, Rng(keys[1])))


def test_torchs_own_checkpoint_around_a_draw_is_named() -> None:
    x = images().requires_grad_()
    with keyed(Rng(key(0))):
        with pytest.raises(UnkeyedRandomError, match="purecompose.nn.layers.checkpoint"):
            torch_checkpoint(F.dropout, x, use_reentrant=False)
        with pytest.raises(UnkeyedRandomError, match="purecompose.nn.layers.checkpoint"):
            checkpoint(lambda x: torch_checkpoint(F.dropout, x, use_reentrant=False), x)
        with pytest.raises(UnkeyedRandomError, match="purecompose.nn.layers.checkpoint"):
            torch_checkpoint(F.dropout, x, use_reentrant=True)
        with torch.no_grad():
            assert F.dropout(x).shape == x.shape


def test_torchs_own_checkpoint_around_a_whole_scope_draws_the_same_again() -> None:
    x = images().requires_grad_()
    forward = Block(plainly)
    out: Any = torch_checkpoint(lambda x: run(forward, x), x, use_reentrant=False)
    expected = run(forward, x)
    assert torch.equal(out, expected)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])


def test_a_recomputation_draws_as_the_comparison_of_slices_did():
    x = torch.ones(2, requires_grad=True)
    scope = keyed(Rng(key(0)), num_examples=2)
    scope.is_compared = True
    with scope:
        y = checkpoint(lambda x: (x * torch.randn(7).mean()).sin(), x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    factor = y.detach().asin()
    torch.testing.assert_close(gradient, factor * factor.cos())
