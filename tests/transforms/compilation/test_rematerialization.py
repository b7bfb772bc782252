"""Rematerialization: the signs of ReLUs from their arguments, and what Inductor stores."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.transforms.compilation.gpu import recompute_signs, storing_by_bytes


IR = importlib.import_module("torch._inductor.ir")


def normalised(x: Tensor, scale: Tensor) -> Tensor:
    """ReLU after a normalisation of the columns, whose gradient reads what was normalised."""
    return F.relu((x - x.mean(0)) * torch.rsqrt(x.square().mean(0) + 1e-5) * scale)


def gradients_of(function: Callable[..., Tensor], *inputs: Tensor) -> fx.GraphModule:
    """Return the graph of the gradients, with comparisons in place of `threshold_backward`."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in inputs]
        return torch.autograd.grad(function(*leaves).square().sum(), leaves)

    decompositions = importlib.import_module("torch._inductor.decomposition").select_decomp_table()
    return make_fx(run, tracing_mode="fake", decomposition_table=decompositions)(*inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signs_from_the_argument_give_the_same_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, scale = torch.randn(64, 8, generator=generator).to(dtype), torch.randn(8, generator=generator).to(dtype)
    x[:, 0], x[3, 1], x[5, 2], scale[3] = 0, torch.nan, torch.inf, 0
    graph = gradients_of(normalised, x, scale)
    before = graph(x, scale)
    (relu,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    assert recompute_signs(graph) == 1
    (sign,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.le.Scalar)
    assert sign.args[0] is not relu and sign.args[0].target is not torch.ops.aten.alias.default
    for old, new in zip(before, graph(x, scale), strict=True):
        assert torch.equal(old.nan_to_num(nan=7.0), new.nan_to_num(nan=7.0))


def test_an_argument_that_is_kept_is_read_itself() -> None:
    def both(x: Tensor, y: Tensor) -> Tensor:
        product = x @ y
        return product.sin() + F.relu(product)

    x = torch.randn(8, 8)
    graph = gradients_of(both, x, x.clone())
    before = graph(x, x)
    assert recompute_signs(graph) == 1
    assert all(map(torch.equal, graph(x, x), before))
    (sign,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.le.Scalar)
    assert sign.args[0].target is torch.ops.aten.mm.default


@pytest.mark.parametrize(
    "function",
    [lambda x, y: F.relu(x @ y), lambda x, y: F.relu(x.exp() + y.exp()), lambda x, y: torch.sigmoid(x + y)],
    ids=["a product that is not kept", "two tensors", "not a relu"],
)
def test_other_arguments_are_not_computed_again(function: Callable[..., Tensor]) -> None:
    x = torch.randn(8, 8)
    assert recompute_signs(gradients_of(function, x, x.clone())) == 0


class Buffer:
    def __init__(self, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.sizes, self.dtype = sizes, dtype

    def get_size(self) -> tuple[int, ...]:
        return self.sizes

    def get_dtype(self) -> torch.dtype:
        return self.dtype


@pytest.mark.parametrize(
    ("buffers", "dtype", "is_stored"),
    [
        ([(512, 64), *[(64,)] * 6], torch.float32, False),
        ([(512, 64)] * 6, torch.bfloat16, True),
        ([(512, 64)] * 2, torch.float32, False),
    ],
    ids=["one large and six small tensors", "six large ones", "as few as it writes"],
)
def test_a_value_is_stored_where_that_moves_fewer_bytes(
    monkeypatch: pytest.MonkeyPatch, buffers: list[Any], dtype: torch.dtype, is_stored: bool
) -> None:
    class Value(IR.Pointwise):
        def __init__(self) -> None: ...

        def get_size(self) -> tuple[int, ...]:
            return 512, 64

        def get_dtype(self) -> torch.dtype:
            return dtype

        def get_device(self) -> torch.device:
            return torch.device("cuda")

        def inner_fn_opcount(self) -> Any:
            return type("Count", (), {"read_buffers": list(range(len(buffers))), "used_ops": [], "num_ops": 9})

        def has_large_inner_fn(self, threshold: int | None = None) -> bool:
            return False

    graphs = type("Graphs", (), {"graph": type("G", (), {"try_get_buffer": lambda self, i: Buffer(*buffers[i])})()})()
    plain, box = IR.StorageBox.should_realize_on_reuse, IR.StorageBox(Value())
    with storing_by_bytes(IR, graphs):
        assert box.should_realize_on_reuse(2) is is_stored
        assert not box.should_realize_on_reuse(1)
    assert IR.StorageBox.should_realize_on_reuse is plain
