"""Draws of compiled graphs where torch has no kernels for them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.random import key, uniform
from purecompose.transforms.compilation import rewriting
from purecompose.transforms.compilation.rewriting import replace_draws
from tests.helpers import make_batches, make_state
from tests.transforms.compilation.compile_helpers import assert_runs_agree, made


def draw(number: int) -> Any:
    """Return a function that draws in one shape several times, and once in another."""
    return lambda root: [uniform(root + i, (3, 5)) for i in range(number)] + [uniform(root, (2,))]


@pytest.mark.parametrize("number, calls", [(3, 0), (4, 4)], ids=["few", "many"])
def test_draws_of_one_shape_share_a_subgraph(monkeypatch: pytest.MonkeyPatch, number: int, calls: int) -> None:
    monkeypatch.setattr(rewriting, "has_kernels", lambda device: False)
    with torch.no_grad():
        module = make_fx(draw(number), tracing_mode="fake")(key(3))
    (root,) = module.graph.find_nodes(op="placeholder")
    with root.meta["val"].fake_mode:
        replace_draws(module, {})
    module.graph.lint()
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.purecompose.philox.default)
    shared = torch.ops.higher_order.invoke_subgraph
    assert len(module.graph.find_nodes(op="call_function", target=shared)) == calls
    expected: list[Tensor] = draw(number)(key(7))
    assert all(map(torch.equal, module(key(7)), expected))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_inductor_draws_for_many_dropouts_what_eager_code_draws(dynamic: bool) -> None:
    net = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(4, 4), nn.Dropout(0.5))], nn.Linear(4, 3))
    step, fast = made(backend="inductor", dynamic=dynamic)
    assert_runs_agree(step, fast, make_state(net), make_batches(3))
