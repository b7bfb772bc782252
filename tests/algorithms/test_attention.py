"""Methods on attention: normalised queries and keys against attention computed in float64, and with other methods."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import purecompose as pc
from purecompose import algorithms as alg, losses, optim
from purecompose.nn.layers import ClassesSecond, HeadNorm, SelfAttention, alibi_slopes
from purecompose.nn.models import gpt, vit
from tests.algorithms.surgery_checks import applied, check_keeps_all, hooked, patched


VOCABULARY, LENGTH = 7, 8


def language(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return ClassesSecond(gpt(VOCABULARY, LENGTH, **{"width": 8, "depth": 2, "num_heads": 2, **options}))


def make_state(net: nn.Module, **options: Any) -> pc.State:
    options = {"optimizer": optim.sgd(0.1, momentum=0.9), "key": 3, "duration": "8ba", **options}
    return pc.State.create(net, loss=losses.cross_entropy, **options)


def make_batch(num: int = 4, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (num, length + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def make_hidden(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def surgically(net: nn.Module, *methods: pc.Algorithm) -> Any:
    """Return the network after the methods' INIT, in the given order."""
    state = make_state(net)
    for method in methods:
        state = applied(state, method)[0]
    return pc.to_module(state)


def by_hand(
    layer: SelfAttention, input: Tensor, *, eps: float, scale: float | None, slopes: Tensor | None = None
) -> Tensor:
    """Return attention with normalised queries and keys in float64, one head and one query after the other."""
    weight, bias = layer.qkv.weight.double(), layer.qkv.bias.double()
    query, key, value = (input.double() @ weight.T + bias).chunk(3, -1)
    width = query.shape[-1] // layer.num_heads
    heads = []
    for head in range(layer.num_heads):
        q, k, v = (part[..., head * width : (head + 1) * width] for part in (query, key, value))
        q, k = (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() for x in (q, k))
        rows = []
        for place in range(input.shape[1]):
            last = place + 1 if layer.is_causal else input.shape[1]
            logits = (k[:, :last] * q[:, place : place + 1]).sum(-1) * (width**-0.5 if scale is None else scale)
            if slopes is not None:
                logits = logits - slopes[head].double() * (torch.arange(last) - place).abs()
            rows.append((logits.softmax(-1).unsqueeze(-1) * v[:, :last]).sum(1))
        heads.append(torch.stack(rows, 1))
    return torch.cat(heads, -1) @ layer.out.weight.double().T + layer.out.bias.double()


@settings(max_examples=10, deadline=None)
@given(st.booleans(), st.sampled_from([1, 2, 4]), st.sampled_from([None, 0.12, 3.0]), st.sampled_from([1e-6, 0.5]))
def test_normalised_attention_is_the_formula(is_causal: bool, num_heads: int, scale: float | None, eps: float) -> None:
    torch.manual_seed(1)
    layer, input = SelfAttention(8, num_heads, is_causal=is_causal), make_hidden(2, 5, 8)
    expected = by_hand(layer, input, eps=eps, scale=scale)
    found = surgically(layer, alg.qk_norm(eps, scale=scale))(input)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, layer(input), atol=1e-3)


@pytest.mark.parametrize("is_first", [True, False])
def test_biases_are_added_to_normalised_products(is_first: bool) -> None:
    layer, input = SelfAttention(8, 2, is_causal=True), make_hidden(2, 5, 8)
    methods = [alg.qk_norm(scale=0.7), alg.alibi(1)]
    net = surgically(layer, *methods[:: 1 if is_first else -1])
    expected = by_hand(layer, input, eps=1e-6, scale=0.7, slopes=alibi_slopes(2))
    torch.testing.assert_close(net(input).double(), expected, rtol=1e-4, atol=1e-5)


def test_logits_have_a_bound_and_gradients_at_zero_are_finite() -> None:
    norm = HeadNorm(1e-6, 0.12)
    query, key = norm(100 * make_hidden(50, 16)), norm(make_hidden(50, 16, seed=1))
    assert float((query @ key.mT / math.sqrt(16)).abs().max()) <= 0.12 * 16 + 1e-5
    torch.testing.assert_close(query.square().sum(-1), torch.full((50,), 16 * 0.12 * 4.0))
    zero = torch.zeros(2, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(norm(zero).sum(), zero, create_graph=True)
    torch.testing.assert_close(grad, torch.full_like(grad, 1e3 * math.sqrt(0.12 * 4)))
    assert not torch.autograd.grad(grad.sum(), zero)[0].any()  # the norm is an odd function
    assert torch.autograd.gradgradcheck(HeadNorm(0.1, 0.5), make_hidden(2, 3).double().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_norms_keep_the_dtype_and_have_their_mean_in_float32(dtype: torch.dtype) -> None:
    # The sum of the squares is beyond float16, and bfloat16 would lose the small numbers.
    input = torch.cat([torch.full((1,), 300.0), torch.full((4095,), 6.0)]).to(dtype)
    found = HeadNorm(1e-6)(input)
    expected = input.double() / (input.double().square().mean() + 1e-6).sqrt()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0.01 if dtype != torch.float64 else 1e-12, atol=0)


@pytest.mark.parametrize("enabled", [False, True])
def test_the_length_of_a_head_may_exceed_float16(enabled: bool) -> None:
    input = torch.full((1, 32), 30_000.0, dtype=torch.float16)
    with torch.autocast("cpu", torch.float16, enabled=enabled):
        for own in (input, input.float()):
            torch.testing.assert_close(HeadNorm(1e-6)(own), torch.ones_like(own), rtol=2e-3, atol=0)


def test_all_attention_of_a_network_is_changed_once_and_weights_keep_their_names() -> None:
    state = make_state(language())
    after, report = check_keeps_all(state, alg.qk_norm())
    assert report.replaced == ("net.blocks.0.attention", "net.blocks.1.attention") and not report.made
    assert after.params.keys() == state.params.keys()
    torch.manual_seed(0)
    images = surgically(vit((3, 8, 8), 5, width=8, depth=1, num_heads=2), alg.qk_norm())
    assert images.blocks[0].attention.qk_norm is not None and images(torch.zeros(2, 3, 8, 8)).shape == (2, 5)


@pytest.mark.parametrize(("precision", "dropout"), [("fp32", 0.3), ("bf16", 0.0)])
def test_a_compiled_step_is_the_eager_one_and_dropout_is_keyed(precision: Any, dropout: float) -> None:
    methods = [alg.alibi(1), alg.qk_norm(), alg.activation()]
    step = pc.compose(pc.loop_events, methods)
    start = step.init(make_state(language(dropout=dropout), precision=precision))
    eager, again = step(start, make_batch()), step(start, make_batch())
    assert not pc.tree.diff(eager.params, again.params)  # the masks come from the key
    other = step(start.replace(key=pc.random.key(4)), make_batch())
    assert bool(pc.tree.diff(eager.params, other.params)) == (dropout > 0)
    compiled = pc.compile(step, backend="aot_eager", quiet=True)(start, make_batch())
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    for name, value in eager.params.items():
        torch.testing.assert_close(compiled.params[name], value, rtol=tolerance, atol=tolerance)


def test_half_precision_is_near_full_precision() -> None:
    near, far = (
        pc.compose(pc.loop_events, [alg.qk_norm(scale=3.0)]).init(make_state(language(), precision=precision))
        for precision in ("fp32", "bf16")
    )
    ids, _ = make_batch()
    torch.testing.assert_close(near.forward(ids), far.forward(ids).float(), rtol=0.05, atol=0.02)


class Reads(SelfAttention):
    """A subclass whose forward computes no attention."""

    def forward(self, input: Tensor) -> Tensor:
        return self.out(self.qkv(input)[..., : input.shape[-1]])


def test_attention_with_its_own_forward_is_kept_and_hooks_stay() -> None:
    net = nn.Sequential(Reads(8, 2), patched(SelfAttention(8, 2)), hooked(SelfAttention(8, 2)))
    after, report = applied(make_state(net), alg.qk_norm())
    assert report.replaced == ("2",)
    layer, input = net[2], make_hidden(2, 5, 8)
    assert isinstance(layer, SelfAttention)
    found: Any = pc.to_module(after)
    expected = 2 * by_hand(layer, input, eps=1e-6, scale=None)  # the hook doubles
    torch.testing.assert_close(found[2](input).double(), expected, rtol=1e-4, atol=1e-5)


def test_a_network_without_attention_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="qk_norm changed nothing: it looked for SelfAttention or GPT2Attention"):
        applied(make_state(nn.Linear(2, 2)), alg.qk_norm())
