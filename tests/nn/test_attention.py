"""The fused kernel of attention in populations: it agrees with the plain operations, and is used only where it may."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import purecompose as pc
from purecompose import State, compose, loop_events, losses, optim, stack_states, unstack_states
from purecompose.nn.attention import _Fused, fused_attention
from purecompose.nn.layers import SelfAttention


KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
GENERATOR = torch.Generator().manual_seed(0)
QUERY, KEY, VALUE, WEIGHTS = (
    torch.randn(shape, generator=GENERATOR, dtype=torch.float64)
    for shape in ((3, 2, 2, 5, 4), (3, 2, 2, 7, 4), (2, 2, 7, 4), (2, 2, 5, 4))
)
DIMS = (0, 0, None)
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def fused(is_causal: bool) -> Callable[..., Tensor]:
    return lambda query, key, value: _Fused.apply(query, key, value, is_causal, 0.3)[0]


def plain(is_causal: bool) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=0.3)

    return attend


def gradients(attend: Callable[..., Tensor]) -> Callable[..., Any]:
    return grad(lambda *tensors: (attend(*tensors).sin() * WEIGHTS).sum(), (0, 1, 2))


@CAUSAL
@pytest.mark.parametrize("of", [lambda attend: attend, gradients], ids=["values", "gradients"])
def test_members_agree_with_the_plain_operations(of: Callable[..., Any], is_causal: bool) -> None:
    results = [vmap(of(form(is_causal)), DIMS)(QUERY, KEY, VALUE) for form in (fused, plain)]
    torch.testing.assert_close(*results)


@CAUSAL
def test_derivatives_agree_with_finite_differences(is_causal: bool) -> None:
    tensors = [tensor.clone().requires_grad_() for tensor in (QUERY[0], KEY[0], VALUE)]
    torch.autograd.gradcheck(fused(is_causal), tensors)


def test_tensors_with_gaps_in_the_last_dimension_are_accepted() -> None:
    spread = QUERY.mT.contiguous().mT
    torch.testing.assert_close(
        vmap(fused(False), DIMS)(spread, KEY, VALUE), vmap(plain(False), DIMS)(QUERY, KEY, VALUE)
    )


def test_it_is_used_within_vmap_and_one_gradient() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = fused_attention(query, key, value)
        assert result is not None
        return result

    for fn in (attend, gradients(attend)):
        vmap(fn, DIMS)(QUERY, KEY, VALUE)


def used(*args: Any, **kwargs: Any) -> bool:
    """Whether it is used within `vmap`; the second of the tensors of all members is not mapped."""
    found = []
    vmap(lambda query: found.append(fused_attention(query, *args, **kwargs)) or query)(QUERY)
    return found[0] is not None


def test_other_arguments_are_left_to_the_plain_operations() -> None:
    key = KEY[0]
    assert used(key, VALUE)
    assert not used(key, VALUE, torch.zeros(5, 7, dtype=torch.float64))
    assert not used(key, VALUE, dropout_p=0.5)
    assert not used(key[:, :1], VALUE[:, :1], enable_gqa=True)
    assert not used(key, VALUE[..., :3])
    assert not used(key[:, :, :0], VALUE[:, :, :0])
    assert not used(key[0], VALUE[0])
    assert not used(key, VALUE, is_causal=True, scale=0.0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own forward mode uses it
@pytest.mark.parametrize(
    "transform",
    [
        lambda fn: fn(QUERY[0]),
        lambda fn: grad(lambda query: fn(query).sum())(QUERY[0]),
        lambda fn: grad(lambda queries: vmap(grad(lambda query: fn(query).sum()))(queries).sum())(QUERY),
        lambda fn: vmap(grad(lambda query: grad(lambda inner: fn(inner).sum())(query).sum()))(QUERY),
        lambda fn: vmap(lambda query: jvp(fn, (query,), (query,))[1])(QUERY),
    ],
    ids=["plain", "gradient", "gradient around", "second", "forward mode"],
)
def test_other_transforms_are_left_to_the_plain_operations(transform: Callable[..., Any]) -> None:
    found = []

    def fn(query: Tensor) -> Tensor:
        found.append(fused_attention(query, KEY[0], VALUE))
        return query.square()

    transform(fn)
    assert found == [None]


class Watch(TorchDispatchMode):
    """Mode that keeps the number of examples of each call of the kernels, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (KERNEL, BACKWARD):
            self.calls.append((func, len(args[0])))
        return func(*args, **kwargs or {})


class ByModule(nn.Module):
    """Self-attention by torch's module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("attention", [lambda: SelfAttention(8, 2, is_causal=True), ByModule], ids=["ours", "torch's"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_the_members_of_a_population_are_one_batch_of_the_kernel(
    attention: Callable[[], nn.Module], precision: str, is_compiled: bool
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), attention(), nn.Flatten(), nn.Linear(48, 2))
    options: Any = {"loss": losses.cross_entropy, "optimizer": optim.sgd(0.1), "precision": precision}
    singles = [State.create(net, key=seed, **options) for seed in range(3)]
    batch = torch.randn(4, 6, 8), torch.tensor([0, 1, 1, 0])
    step = compose(loop_events)
    many = pc.population(step, 3)
    many = pc.compile(many, donate=False, backend="eager", quiet=True) if is_compiled else many
    states = many(stack_states(singles), batch)
    with Watch() as watch:
        states = many(states, batch)
    assert watch.calls == [(KERNEL, 12), (BACKWARD, 12)]
    tolerance: Any = {"rtol": 0.05, "atol": 5e-3} if precision == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
    for state, one in zip(unstack_states(states), singles, strict=True):
        torch.testing.assert_close(state.params, step(step(one, batch), batch).params, **tolerance)
