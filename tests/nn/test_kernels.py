"""Attention under bfloat16 on the CPU, where torch's bfloat16 kernel is slow: by products, or in float32."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import purecompose as pc
from purecompose import State, compose, loop_events, losses, optim
from purecompose._support.contexts import NOTHING
from purecompose.nn.kernels import kernels, short_attention


BATCH = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 0])


class Attending(nn.Module):
    """Self-attention by torch's function, with a mask of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (2, 8)).transpose(1, 2)
        mask = torch.zeros(6, 6, dtype=x.dtype)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).transpose(1, 2).flatten(2)


class ByModule(nn.Module):
    """Self-attention by torch's module, with a mask of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False, attn_mask=torch.zeros(6, 6))[0]


class Unmasked(Attending):
    """Self-attention by torch's function, without a mask."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2)


class InItsOwnDtype(Attending):
    """Attention that its author keeps out of autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            result = super().forward(x.double())
        assert result.dtype is torch.float64
        return result.to(x.dtype)


KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
KERNELS = (KERNEL.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
MASKED = pytest.mark.parametrize("attention", [Attending, ByModule])


class Watch(TorchDispatchMode):
    """Mode that keeps the dtypes of the arguments of attention's kernels, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KERNELS:
            self.dtypes.append({arg.dtype for arg in args if isinstance(arg, Tensor)})
        return func(*args, **kwargs or {})


def make_state(attention: type[nn.Module], precision: str = "bf16") -> State:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), attention(), nn.Linear(16, 16), nn.Flatten(), nn.Linear(96, 2))
    return State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="9ba", precision=precision)


@MASKED
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_masked_attention_and_its_gradient_are_in_float32(attention: type[nn.Module], is_compiled: bool) -> None:
    step = compose(loop_events)
    step = pc.compile(step, backend="eager", quiet=True) if is_compiled else step
    state = step(make_state(attention), BATCH)
    with Watch() as watch:
        step(state, BATCH)
    assert watch.dtypes == [{torch.float32}] * 2


@pytest.mark.parametrize("attention", [Attending, ByModule, Unmasked])
def test_the_other_operations_remain_in_bfloat16(attention: type[nn.Module]) -> None:
    state = make_state(attention)
    seen: list[torch.dtype] = []

    class Seeing(attention):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            seen.extend((x.dtype, result.dtype))
            return result

    make_state(Seeing).forward(BATCH[0])
    assert seen == [torch.bfloat16] * 2
    after, wide = (compose(loop_events)(one, BATCH).params for one in (state, make_state(attention, "fp32")))
    torch.testing.assert_close(after, wide, rtol=0.02, atol=2e-3)


def test_short_attention_without_a_mask_is_computed_by_products() -> None:
    with Watch() as watch:
        compose(loop_events)(make_state(Unmasked), BATCH)
    assert watch.dtypes == []


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "scale": 0.2}], ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (5,)], ids=["heads", "no heads"])
def test_short_attention_equals_attention_but_for_rounding(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (7, 8), (9, 8), (9, 4)
    query, key, value = (torch.randn(*shape, *size, generator=generator).requires_grad_() for size in sizes)
    short = short_attention(torch.bfloat16, query, key, value, **options)
    assert short is not None and short.dtype is torch.bfloat16
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(short.float(), expected, rtol=0.02, atol=0.02)
    grads, expected_grads = (
        torch.autograd.grad(result.float().square().sum(), (query, key, value)) for result in (short, expected)
    )
    torch.testing.assert_close(grads, expected_grads, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("dims", [(0, 2, 1, 3), (0, 1, 2, 3)], ids=["tokens first", "heads first"])
def test_short_attention_has_the_memory_layout_of_torchs(dims: tuple[int, ...]) -> None:
    query = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0)).permute(dims)
    short = short_attention(torch.bfloat16, query, query, query)
    assert short is not None and short.stride() == F.scaled_dot_product_attention(query, query, query).stride()


@pytest.mark.parametrize(
    "change",
    [
        {"query": torch.zeros(1, 4, 257, 8)},
        {"query": torch.zeros(1, 1, 5, 8)},
        {"key": torch.zeros(1, 4, 5, 8, dtype=torch.float64)},
        {"value": torch.zeros(1, 4, 5, 8, dtype=torch.int64)},
        {"query": torch.zeros(5, 8), "key": torch.zeros(5, 8), "value": torch.zeros(5, 8)},
        {"query": torch.zeros(1, 4, 0, 8)},
    ],
    ids=["long", "broadcast", "float64", "integers", "matrices", "empty"],
)
def test_other_attention_is_left_to_torch(change: dict[str, Any]) -> None:
    tensors = dict.fromkeys(("query", "key", "value"), torch.zeros(1, 4, 5, 8))
    assert short_attention(torch.bfloat16, **{**tensors, **change}) is None


def test_networks_of_torchs_layers_are_watched_only_if_one_of_them_attends() -> None:
    # A mode of torch functions costs a call in Python for each of them.
    def scope(net: nn.Module) -> AbstractContextManager[Any]:
        state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1))
        return kernels(state.params, (), torch.bfloat16, "cpu", skeleton=state.model.skeleton(train=True))

    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    assert scope(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())) is NOTHING
    assert all(scope(net) is not NOTHING for net in (layer, Attending(), ByModule()))


def test_attention_outside_of_autocast_is_left_as_it_is() -> None:
    make_state(InItsOwnDtype).forward(BATCH[0])
