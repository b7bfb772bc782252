"""Draws of compiled graphs for a GPU."""

import itertools
import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.random import bernoulli
from purecompose.random.philox import DTYPES, numbers
from purecompose.transforms.compilation.gpu import draw_in_kernels
from purecompose.transforms.compilation.inductor import inductor_for


KEYS = torch.tensor([[5, -1], [5 + (7 << 40), 2**32 - 1], [-3, 2**33], [0, 0], [1, 2], [2**63 - 1, -(2**63)]])


class Ops:
    """Inductor's operations, on Python's numbers."""

    add, mul = staticmethod(lambda a, b: (a + b) % 2**64), staticmethod(lambda a, b: wrapped(a * b))
    bitwise_and, bitwise_or, bitwise_xor = operator.and_, operator.or_, operator.xor
    bitwise_left_shift, bitwise_right_shift = operator.lshift, operator.rshift
    eq, lt = operator.eq, operator.lt

    @staticmethod
    def where(condition: bool, a: Any, b: Any) -> Any:
        return a if condition else b

    @staticmethod
    def constant(value: Any, dtype: torch.dtype) -> Any:
        del dtype
        return value

    @staticmethod
    def index_expr(value: int, dtype: torch.dtype) -> int:
        del dtype
        return value

    @staticmethod
    def to_dtype(value: Any, dtype: torch.dtype) -> Any:
        if dtype == torch.uint64:
            return value % 2**64
        if dtype.is_floating_point:
            return torch.tensor(value, dtype=dtype).item()
        bits = torch.iinfo(dtype).bits
        return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def wrapped(value: Any) -> Any:
    return value % 2**64 if isinstance(value, int) else value


class Key:
    """A key as Inductor passes it to a lowering."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def make_loader(self) -> Any:
        return lambda index: self.tensor[tuple(index)].item()

    def get_size(self) -> list[int]:
        return list(self.tensor.shape)

    def get_device(self) -> torch.device:
        return self.tensor.device


class Pointwise:
    """What a lowering creates; it is computed at once."""

    @staticmethod
    def create(device: torch.device, dtype: torch.dtype, inner_fn: Any, ranges: list[int]) -> Any:
        places = itertools.product(*map(range, ranges))
        found = [inner_fn(list(place)) for place in places]
        if dtype == torch.int64:
            found = [Ops.to_dtype(value, dtype) for value in found]
        tensor = torch.tensor(found, dtype=dtype, device=device).reshape(ranges)
        return SimpleNamespace(realize=lambda: None, tensor=tensor)


def traced(draw: Any) -> tuple[Any, Any, list[Any]]:
    """Return the graph of a draw, the lowering of its operation, and the nodes that draw."""
    with torch.no_grad():
        module = make_fx(draw, tracing_mode="fake")(torch.zeros(2, dtype=torch.int64, device="meta"))
    lowerings: dict[Any, Any] = {}
    draw_in_kernels(
        module,
        SimpleNamespace(  # pyright: ignore[reportArgumentType]
            lowering=SimpleNamespace(
                lowerings=lowerings,
                register_lowering=lambda target, **options: lambda lower: lowerings.setdefault(target, lower),
            ),
            functions=SimpleNamespace(FloorDiv=operator.floordiv, ModularIndexing=lambda e, by, n: e // by % n),
            virtualized=SimpleNamespace(ops=Ops),
            ir=SimpleNamespace(Pointwise=Pointwise),
        ),
    )
    module.graph.lint()
    (lower,) = lowerings.values()
    return module, lower, module.graph.find_nodes(op="call_function", target=next(iter(lowerings)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 7), ()], ids=str)
def test_kernels_draw_the_bits_of_eager_code(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    _, lower, _ = traced(lambda root: numbers(root, (2,), torch.int32))
    for root in KEYS:
        assert torch.equal(lower(Key(root), shape, dtype, None).tensor, numbers(root, shape, dtype))
    several = lower(Key(KEYS), (len(KEYS), *shape), dtype, None).tensor
    assert torch.equal(several, numbers(KEYS, (len(KEYS), *shape), dtype))


@pytest.mark.parametrize("p", [0.0, 0.25, 0.7])
def test_a_comparison_is_part_of_a_draw(p: float) -> None:
    module, lower, (drawn,) = traced(lambda root: bernoulli(root, p, (9,)))
    assert [node.op for node in module.graph.nodes] == ["placeholder", "call_function", "output"]
    assert drawn.meta["val"].dtype == torch.bool
    for root in KEYS:
        assert torch.equal(lower(Key(root), *drawn.args[1:]).tensor, bernoulli(root, p, (9,)))


def test_bits_that_are_compared_twice_are_drawn_once() -> None:
    def draw(root: Tensor) -> list[Tensor]:
        bits = numbers(root, (4,), torch.int32)
        return [bits < 5, bits < 6]

    _, _, (drawn,) = traced(draw)
    assert drawn.args[1:] == ([4], torch.int32, None)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_inductor_knows_the_operation() -> None:
    with torch.no_grad():
        root = torch.zeros(2, dtype=torch.int64, device="meta")
        module = make_fx(lambda root: bernoulli(root, 0.25, (5,)), tracing_mode="fake")(root)
    inductor = inductor_for(torch.device("cpu"))
    draw_in_kernels(module, inductor)
    (drawn,) = (node for node in module.graph.nodes if node.op == "call_function")
    assert drawn.target in inductor.lowering.lowerings


def test_draws_on_the_host_stay_calls() -> None:
    with torch.no_grad():
        module = make_fx(lambda root: bernoulli(root, 0.25, (5,)), tracing_mode="fake")(KEYS[0])
    draw_in_kernels(module, SimpleNamespace())  # pyright: ignore[reportArgumentType]
    assert module.graph.find_nodes(op="call_function", target=torch.ops.purecompose.philox.default)
