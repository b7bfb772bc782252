"""Decompositions give the bits of torch's own."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.transforms.compilation.rewriting import DECOMPOSITIONS


_aten = torch.ops.aten

SHAPES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "one example": (_aten.nll_loss_backward.default, (5,), ()),
    "one example of one class": (_aten.nll_loss_backward.default, (1,), (1,)),
    "examples": (_aten.nll_loss_backward.default, (4, 5), (4,)),
    "pixels": (_aten.nll_loss2d_backward.default, (2, 5, 3, 4), (2, 3, 4)),
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("ignored", [-100, 0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.filterwarnings("ignore:.*non-contiguous:UserWarning")
def test_the_gradient_of_nll_loss_has_the_bits_of_torchs(
    shape: str, reduction: int, is_weighted: bool, ignored: int, dtype: torch.dtype
) -> None:
    if shape == "one example of one class" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11's own decomposition fails for it")
    operator, size, target_size = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    logits = draw(*size)
    if logits.dim() == 4:
        logits = logits.contiguous(memory_format=torch.channels_last)
    num_classes = logits.shape[min(1, logits.dim() - 1)]
    target = torch.randint(num_classes, target_size, generator=generator)
    target.view(-1)[:1] = ignored if num_classes > 1 else 0
    weight = draw(num_classes).abs() if is_weighted else None
    # Some are negative: the zeros of the result have signs.
    grad_output = draw(*target_size) if reduction == 0 and logits.dim() > 1 else draw()
    args = (grad_output, logits, target, weight, reduction, ignored, draw().abs())
    ours, torchs = DECOMPOSITIONS[operator](*args), get_decompositions([operator])[operator](*args)
    assert torch.equal(bits(ours), bits(torchs))
    assert ours.dtype == torchs.dtype and ours.stride() == torchs.stride()
    if weight is None or dtype != torch.bfloat16:  # the kernel multiplies in another order
        torch.testing.assert_close(ours, operator(args[0], logits.contiguous(), *args[2:]))


def test_infinite_gradients_are_those_of_torchs_decomposition() -> None:
    operator, target = _aten.nll_loss_backward.default, torch.tensor([0, 1])
    for value in (float("inf"), float("nan")):
        args = (torch.tensor(value), torch.randn(2, 3), target, None, 1, -100, torch.tensor(2.0))
        ours, torchs = DECOMPOSITIONS[operator](*args), get_decompositions([operator])[operator](*args)
        assert torch.equal(bits(ours), bits(torchs))


def test_foreach_lerp_rounds_the_weight_as_torch_does() -> None:
    operator, starts, ends = _aten._foreach_lerp.Scalar, [torch.ones(1)], [torch.zeros(1)]
    assert DECOMPOSITIONS[operator](starts, ends, 0.999) == operator(starts, ends, 0.999)


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9, -0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_foreach_lerp_is_torchs_without_a_tensor_of_the_weight(weight: float, dtype: torch.dtype) -> None:
    starts, ends = ([torch.randn(4, 3).to(dtype), torch.randn(5).to(dtype)] for _ in range(2))
    operator = _aten._foreach_lerp.Scalar
    torch.testing.assert_close(DECOMPOSITIONS[operator](starts, ends, weight), operator(starts, ends, weight))

    def call(*tensors: Tensor) -> list[Tensor]:
        return operator(list(tensors[:2]), list(tensors[2:]), weight)

    graph = make_fx(call, decomposition_table=DECOMPOSITIONS)(*starts, *ends).graph
    assert not graph.find_nodes(op="get_attr") and not graph.find_nodes(op="call_function", target=operator)
