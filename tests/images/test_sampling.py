"""The operator that stands for `grid_sample` in compiled steps: its values, gradients and rows are those of torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from purecompose.images import rotate
from purecompose.images.sampling import sampled
from purecompose.random import key, uniform


def make_case(*leading: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    levels = uniform(key(0), (*leading, 3, 5, 4), dtype=dtype) * 255
    grid = uniform(key(1), (*leading, 6, 2, 2), dtype=dtype) * 2.4 - 1.2  # some of it beyond the borders
    return levels, grid


def reference(levels: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(levels, grid, padding_mode="border", align_corners=False)


def operator(levels: Tensor, grid: Tensor) -> Tensor:
    return torch.ops.purecompose.sampled(levels, grid)


def test_values_and_gradients_are_those_of_grid_sample() -> None:
    results = []
    for fn in (reference, operator, sampled):
        levels, grid = (value.requires_grad_() for value in make_case(2, dtype=torch.float64))
        result = fn(levels, grid)
        results.append((result, *torch.autograd.grad(result.square().sum(), (levels, grid))))
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, results[0], strict=True))


def test_it_is_an_operator_as_torch_wants_it() -> None:
    checked = torch.library.opcheck(
        torch.ops.purecompose.sampled.default, tuple(value.requires_grad_() for value in make_case(2))
    )
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (1, 2)])
def test_mapped_it_is_a_loop(in_dims: tuple[int | None, int | None]) -> None:
    levels, grid = make_case(3, 2)
    given = [
        value[0] if dim is None else value.movedim(0, dim) for value, dim in zip((levels, grid), in_dims, strict=True)
    ]
    alone = [
        operator(*(value if dim is None else value.select(dim, i) for value, dim in zip(given, in_dims, strict=True)))
        for i in range(3)
    ]
    assert torch.equal(torch.func.vmap(operator, in_dims)(*given), torch.stack(alone))


def test_a_traced_turn_calls_it_and_gives_the_same() -> None:
    images = (uniform(key(2), (4, 3, 9, 8)) * 255).to(torch.uint8)
    degrees = torch.tensor([0.0, 90.0, -17.0, 200.0])
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    turned = torch.compile(rotate, backend=kept, fullgraph=True)(images, degrees)
    assert torch.equal(turned, rotate(images, degrees))
    assert torch.ops.purecompose.sampled.default in {node.target for node in graphs[0].graph.nodes}
