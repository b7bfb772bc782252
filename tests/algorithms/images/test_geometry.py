"""The operator that replaces `grid_sample` in compiled steps: values, gradients and rows equal those of torch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose.algorithms.images.primitives import sampled
from purecompose.random import key, uniform
from tests.algorithms.images.applying import applied


def make_case(*leading: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    levels = uniform(key(0), (*leading, 3, 5, 4), dtype=dtype) * 255
    grid = uniform(key(1), (*leading, 6, 2, 2), dtype=dtype) * 2.4 - 1.2  # some of it beyond the borders
    return levels, grid


def reference(levels: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(levels, grid, padding_mode="zeros", align_corners=False)


def operator(levels: Tensor, grid: Tensor) -> Tensor:
    return torch.ops.purecompose.sampled(levels, grid)


def test_values_are_those_of_grid_sample() -> None:
    levels, grid = make_case(2, dtype=torch.float64)
    assert torch.equal(operator(levels, grid), reference(levels, grid))
    assert torch.equal(sampled(levels, grid), reference(levels, grid))


def test_the_operator_passes_torchs_opcheck() -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    checked = torch.library.opcheck(torch.ops.purecompose.sampled.default, make_case(2), test_utils=tests)
    assert set(checked.values()) == {"SUCCESS"}


def test_a_traced_rotation_uses_the_operator_and_gives_the_same_result() -> None:
    images = (uniform(key(2), (4, 3, 9, 8)) * 255).to(torch.uint8)
    degrees = torch.tensor([0.0, 90.0, -17.0, 200.0])
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    turned = torch.compile(partial(applied, "rotate"), backend=kept, fullgraph=True)(images, degrees)
    assert torch.equal(turned, applied("rotate", images, degrees))
    assert torch.ops.purecompose.sampled.default in {node.target for node in graphs[0].graph.nodes}


def turned(images: Tensor, degrees: Tensor) -> Tensor:
    return applied("rotate", images, degrees, (0.0, 1.0)).square().sum()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own forward mode uses it
def test_forward_mode_is_right_where_torch_has_it() -> None:
    images, degrees = uniform(key(2), (2, 3, 9, 8)), torch.tensor([20.0, 35.0])

    def tangent(values: Tensor) -> Tensor:
        return torch.func.jvp(lambda value: turned(images, value), (values,), (torch.ones(2),))[1]

    if torch.__version__ < "2.15":
        with pytest.raises(Exception, match="forward AD"):
            tangent(degrees)
        return
    expected = torch.func.grad(lambda value: turned(images, value))(degrees).sum()
    torch.testing.assert_close(tangent(degrees), expected)
