"""Low-precision layer and group norm, and the older name of the first."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

import purecompose as pc
from purecompose import State, compose, loop_events
from purecompose._support.device import AUTOCAST
from purecompose.algorithms import fused_layernorm, low_precision_groupnorm, low_precision_layernorm
from purecompose.nn.layers.replacing import LowPrecisionGroupNorm, LowPrecisionLayerNorm


METHODS = {
    "layer": (low_precision_layernorm, LowPrecisionLayerNorm, nn.LayerNorm),
    "fused": (fused_layernorm, LowPrecisionLayerNorm, nn.LayerNorm),
    "group": (low_precision_groupnorm, LowPrecisionGroupNorm, nn.GroupNorm),
}
CASES = pytest.mark.parametrize(("factory", "layer", "plain"), METHODS.values(), ids=METHODS)
NARROW = list(AUTOCAST.items())
DIGITS = {torch.bfloat16: 2**-6, torch.float16: 2**-9}


def make_net(is_affine: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8, eps=1e-3, elementwise_affine=is_affine), nn.Tanh(),
        nn.GroupNorm(2, 8, eps=1e-4, affine=is_affine), nn.LayerNorm(8, bias=False), nn.Linear(8, 3),
    )  # fmt: skip
    for param in net.parameters():
        nn.init.normal_(param)
    return net


def make_state(net: nn.Module | None = None, precision: str = "bf16", **options: Any) -> State:
    optimizer = pc.optim.sgd(0.1, momentum=0.9)
    return State.create(
        net or make_net(),
        loss=pc.losses.cross_entropy,
        optimizer=optimizer,
        duration="8ba",
        precision=precision,
        **options,
    )


def make_batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator)


@CASES
@pytest.mark.parametrize("is_affine", [True, False])
def test_all_are_replaced_with_their_weights_and_settings(factory: Any, layer: Any, plain: Any, is_affine: bool):
    before = make_state(make_net(is_affine))
    after = compose(loop_events, [factory()]).init(before)
    found = {n: m for n, m in after.model.module.named_modules() if isinstance(m, plain)}
    assert found and all(type(module) is layer for module in found.values())
    for name, module in found.items():
        old = before.model.module.get_submodule(name)
        for setting in ("eps", "normalized_shape", "elementwise_affine", "num_groups", "num_channels", "affine"):
            assert getattr(module, setting, None) == getattr(old, setting, None)
    assert list(after.params) == list(before.params)
    assert all(after.params[name] is before.params[name] for name in before.params)


@pytest.mark.parametrize(("precision", "dtype"), NARROW)
@given(seed=st.integers(0, 99), is_affine=st.booleans())
def test_layer_norm_is_narrow_only_under_autocast(precision: str, dtype: Any, seed: int, is_affine: bool):
    del precision
    torch.manual_seed(seed)
    norm = nn.LayerNorm(16, elementwise_affine=is_affine)
    low, x = LowPrecisionLayerNorm.of(norm), torch.randn(3, 5, 16)
    assert torch.equal(low(x), norm(x)) and low.weight is norm.weight
    exact = x.double()
    mean, var = exact.mean(-1, keepdim=True), exact.var(-1, keepdim=True, unbiased=False)
    expected = (exact - mean) / (var + norm.eps).sqrt()
    torch.testing.assert_close(low(exact.float()).double(), expected, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype):
        found, double = low(x), low.double()(exact) if is_affine else low(exact)
    assert found.dtype is dtype and double.dtype is torch.float64
    torch.testing.assert_close(found.double(), expected, rtol=DIGITS[dtype], atol=DIGITS[dtype])
    assert found.double().mean(-1).abs().max() < DIGITS[dtype]
    assert (found.double().var(-1, unbiased=False) - 1).abs().max() < 4 * DIGITS[dtype]


@pytest.mark.parametrize(("precision", "dtype"), NARROW)
@given(seed=st.integers(0, 99), groups=st.sampled_from([1, 2, 4]), is_affine=st.booleans())
def test_group_norm_is_narrow_only_under_autocast(precision: str, dtype: Any, seed: int, groups: int, is_affine: bool):
    del precision
    torch.manual_seed(seed)
    norm = nn.GroupNorm(groups, 4, affine=is_affine)
    low, x = LowPrecisionGroupNorm.of(norm), torch.randn(3, 4, 5, 5)
    assert torch.equal(low(x), norm(x)) and low.affine is is_affine and low.weight is norm.weight
    if groups == 1:
        torch.testing.assert_close(low(x), F.layer_norm(x, (4, 5, 5)))
    if groups == 4:
        torch.testing.assert_close(low(x), F.instance_norm(x))
    with torch.autocast("cpu", dtype):
        found = low(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), norm(x), rtol=DIGITS[dtype], atol=2 * DIGITS[dtype])


def slopes(norm: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of a weighted sum with respect to the input and the parameters."""
    x = x.clone().requires_grad_()
    weights = torch.linspace(-1, 1, x.numel()).view_as(x)
    return list(torch.autograd.grad((norm(x).float() * weights).sum(), [x, *norm.parameters()]))


@CASES
@pytest.mark.parametrize("is_affine", [True, False])
def test_gradients_are_the_plain_layers(factory: Any, layer: Any, plain: Any, is_affine: bool):
    torch.manual_seed(0)
    norm = plain(8, elementwise_affine=is_affine) if plain is nn.LayerNorm else plain(2, 8, affine=is_affine)
    for param in norm.parameters():
        nn.init.normal_(param)
    network: Any = pc.to_module(compose(loop_events, [factory()]).init(make_state(nn.Sequential(norm))))
    found, x = network[0], torch.randn(5, 8)
    assert type(found) is layer and len(slopes(found, x)) == (3 if is_affine else 1)
    for mine, theirs in zip(slopes(found, x), slopes(norm, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    for _, dtype in NARROW:
        with torch.autocast("cpu", dtype):
            narrow = slopes(found, x)
        for mine, theirs in zip(narrow, slopes(norm, x), strict=True):
            assert mine.dtype is theirs.dtype
            assert (mine - theirs).norm() < 2 * DIGITS[dtype] * theirs.norm()


def test_large_rows_do_not_overflow_float16():
    """Their variance, 1e8, exceeds float16 and is summed in float32."""
    x = 1e4 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.float16):
        found = LowPrecisionLayerNorm(64)(x), LowPrecisionGroupNorm(4, 64)(x)
    for norm, plain in zip(found, (nn.LayerNorm(64), nn.GroupNorm(4, 64)), strict=True):
        torch.testing.assert_close(norm.float(), plain(x), rtol=1e-2, atol=1e-2)


@CASES
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_in_full_precision_it_warns_that_it_changes_nothing(factory: Any, layer: Any, plain: Any, precision: str):
    del layer, plain
    method, state = factory(name="mine"), make_state(precision=precision)
    with pytest.warns(UserWarning, match=f"^mine has no effect under precision='{precision}'.*bf16") as caught:
        after = compose(loop_events, [method]).init(state)
    assert len(caught) == 1 and after.model is state.model


@CASES
def test_nothing_to_replace_is_warned_about_in_every_precision(factory: Any, layer: Any, plain: Any):
    del layer
    for precision in ("fp32", "bf16"):
        with pytest.warns(UserWarning, match=f"looked for {plain.__name__} to replace") as caught:
            compose(loop_events, [factory()]).init(make_state(nn.Linear(6, 3), precision=precision))
        assert len(caught) == 1


def test_subclasses_with_their_own_forward_are_kept():
    class Mine(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    state = compose(loop_events, [low_precision_layernorm()]).init(make_state(nn.Sequential(Mine(6), nn.LayerNorm(6))))
    assert [type(module) for module in state.model.module] == [Mine, LowPrecisionLayerNorm]  # type: ignore


@CASES
def test_subclasses_keep_their_attributes(factory: Any, layer: Any, plain: Any):
    class Gained(plain):  # type: ignore
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.gain, self.inner, self.tag = nn.Parameter(torch.randn(6)), nn.Linear(6, 6), "mine"
            self.register_buffer("shift", torch.ones(6))

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm: Any = Gained(6) if plain is nn.LayerNorm else Gained(2, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm.inner(self.norm(x) * self.norm.gain + self.norm.shift)

    before = make_state(Reads())
    after = compose(loop_events, [factory()]).init(before)
    norm: Any = after.model.module.norm
    assert type(norm) is layer and norm.tag == "mine"
    assert list(after.params) == list(before.params) and list(after.buffers) == list(before.buffers)
    x = make_batch()[0]
    torch.testing.assert_close(after.forward(x), before.forward(x), rtol=0.05, atol=0.05)


def test_it_comes_last():
    methods = [low_precision_groupnorm(), low_precision_layernorm(), pc.algorithms.ghost_batchnorm()]
    ordered = compose(loop_events, methods).order(methods, pc.Event.INIT)
    assert ordered[0].name == "ghost_batchnorm"
