"""Writes into placeholders, grouped into lists: which of them, and with the same results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.transforms.compilation.grouping import write_together


Step = Callable[..., list[Tensor]]


def traced(step: Step, num: int) -> fx.GraphModule:
    return make_fx(step, tracing_mode="fake")(*tensors(num))


def tensors(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 3, generator=generator) for _ in range(num)]


def lengths(step: Step, num: int) -> list[int]:
    """Return the lengths of the lists that a step's writes are grouped to; it must compute the same."""
    graph, before, after = traced(step, num), tensors(num), tensors(num)
    expected = step(*before)
    write_together(graph)
    found = graph(*after)
    assert all(map(torch.equal, [*before, *expected], [*after, *found]))
    return [len(node.args[0]) for node in graph.graph.nodes if "_foreach_copy_" in str(node.target)]


def momentum(p: Tensor, q: Tensor, m: Tensor, n: Tensor, g: Tensor) -> list[Tensor]:
    """Two parameters with momentum: each new parameter is computed from a memory that is written as well."""
    new_m, new_n = 0.9 * m + g, 0.9 * n + g.t()
    new_p, new_q = p - 0.1 * new_m, q - 0.1 * new_n
    for to, value in ((p, new_p), (q, new_q), (m, new_m), (n, new_n)):
        to.copy_(value)
    return [g.sum()]


def crossed(a: Tensor, b: Tensor) -> list[Tensor]:
    """Each is computed from the other, so that in one kernel a block could read what another has written."""
    new = 2 * b.t(), 2 * a.t()
    a.copy_(new[0])
    b.copy_(new[1])
    return []


def by_products(a: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
    """Each is computed from the other by a matrix product, which is a kernel of its own."""
    new = a + x @ b, b + x @ a
    a.copy_(new[0])
    b.copy_(new[1])
    return []


def of_lists(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """Averages of parameters that are updated as a list."""
    new = torch.ops.aten._foreach_add.Scalar([a, b], 1)
    averages = [average.lerp(one, 0.1) for average, one in zip((x, y), new, strict=True)]
    for to, value in zip((a, b, x, y), (*new, *averages), strict=True):
        to.copy_(value)
    return []


def unlike(a: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
    """A sum and an activation, and a value that is not computed elementwise."""
    new = a + 1, b.tanh(), x.flip(0)
    for to, value in zip((a, b, x), new, strict=True):
        to.copy_(value)
    return []


@pytest.mark.parametrize(
    "step, num, expected",
    [(momentum, 5, [2, 2]), (crossed, 2, []), (by_products, 3, [2]), (of_lists, 4, []), (unlike, 3, [])],
)
def test_writes_of_values_computed_alike_are_grouped(step: Step, num: int, expected: list[int]) -> None:
    assert lengths(step, num) == expected


def test_a_list_has_one_dtype() -> None:
    def step(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        for to in (a, b, c):
            to.copy_(to + 1)
        return []

    given = torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.float64)
    graph = make_fx(step, tracing_mode="fake")(*given)
    write_together(graph)
    (group,) = (node for node in graph.graph.nodes if "_foreach_copy_" in str(node.target))
    assert [node.meta["val"].shape for node in group.args[0]] == [(2,), (3,)]
    graph(*given)
    assert all((tensor == 2).all() for tensor in given)
