"""Draws of compiled graphs where torch has no kernels for them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.random import bernoulli, key
from purecompose.random.native import DTYPES
from purecompose.random.streams import numbers
from purecompose.transforms.compilation import draws
from purecompose.transforms.compilation.backends import compile_graph
from purecompose.transforms.compilation.draws import draw_in_kernels
from purecompose.transforms.compilation.inductor import inductor_for
from tests.helpers import make_batches, make_state
from tests.transforms.compilation.compile_helpers import assert_runs_agree, made


def drawing(root: Tensor) -> list[Tensor]:
    """Draw in every dtype, from one key and from several, with and without a comparison of the bits."""
    bits = numbers(root[0], (3, 7), torch.int32)
    draws = [numbers(root[i], (2, 5), dtype) for i, dtype in enumerate(DTYPES)]
    draws += [numbers(root, (len(DTYPES), 3, 2), dtype) for dtype in DTYPES]
    return [*draws, bits < 77, bits < -5, bernoulli(root[1], 0.3, (9,)), bernoulli(root[2], 1.0, (3,))]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_inductor_draws_the_bits_of_eager_code(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    monkeypatch.setattr(draws, "has_kernels", lambda device: False)
    keys = torch.tensor([[5, -1], [5 + (7 << 40), 2**32 - 1], [-3, 2**33], [0, 0], [1, 2], [2**63 - 1, -(2**63)]])
    with torch.no_grad():
        module = make_fx(drawing, tracing_mode=mode)(torch.zeros_like(keys))
    compiled = compile_graph(module, "inductor", None)
    for found, expected in zip(compiled([keys]), drawing(keys), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_a_comparison_is_part_of_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "has_kernels", lambda device: False)
    with torch.no_grad():
        module = make_fx(lambda root: bernoulli(root, 0.25, (5,)), tracing_mode="fake")(key(3))
    draw_in_kernels(module, inductor_for(torch.device("cpu")))
    (drawn,) = (node for node in module.graph.nodes if node.op == "call_function")
    assert drawn.args[1:] == ([5], torch.int32, -(2**30))
    assert drawn.meta["val"].dtype == torch.bool


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_inductor_draws_for_many_dropouts_what_eager_code_draws(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    monkeypatch.setattr(draws, "has_kernels", lambda device: False)
    net = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(4, 4), nn.Dropout(0.5))], nn.Linear(4, 3))
    step, fast = made(backend="inductor", dynamic=dynamic)
    assert_runs_agree(step, fast, make_state(net), make_batches(3))
