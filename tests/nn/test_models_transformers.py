"""The transformers: their contexts, and the numbers and initial values of their weights."""

import math
from typing import Any

import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from purecompose.nn import models
from purecompose.nn.layers import SelfAttention


SMALL: dict[str, Any] = {"width": 8, "depth": 2, "num_heads": 2}
IMAGE, TOKENS = (3, 8, 8), 7


def num_weights(net: nn.Module) -> int:
    return sum(param.numel() for param in net.parameters())


def block_weights(width: int) -> int:
    """Count the weights: queries, keys, values, output; two layers with hidden width 4 * `width`; two norms."""
    return (4 * width**2 + 4 * width) + (8 * width**2 + 5 * width) + 4 * width


def tokens_of(seed: int, *shape: int, vocabulary: int = TOKENS) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def images_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


sizes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 2))


@given(vocabulary=st.integers(1, 9), length=st.integers(1, 9), form=sizes, is_tied=st.booleans())
def test_weights_of_a_gpt(vocabulary, length, form, is_tied):
    heads, size, depth = form
    net = models.gpt(vocabulary, length, width=heads * size, depth=depth + 1, num_heads=heads, is_tied=is_tied)
    width, tables = heads * size, vocabulary if is_tied else 2 * vocabulary
    assert num_weights(net) == (tables + length) * width + (depth + 1) * block_weights(width) + 2 * width
    assert (net.head.weight is net.tokens.weight) == is_tied


@given(
    channels=st.integers(1, 3),
    patch=st.integers(1, 3),
    grid=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    form=sizes,
    pool=st.sampled_from(["token", "mean"]),
)
def test_weights_of_a_vision_transformer(channels, patch, grid, form, pool):
    heads, size, depth = form
    width, shape = heads * size, (channels, grid[0] * patch, grid[1] * patch)
    options: dict[str, Any] = {"patch_size": patch, "width": width, "depth": depth + 1, "num_heads": heads}
    net = models.vit(shape, 5, pool=pool, **options)
    token = int(pool == "token")
    total = (channels * patch**2 + 1) * width + token * width + (depth + 1) * block_weights(width) + 2 * width
    total += (math.prod(grid) + token) * width
    assert num_weights(net) == total + 5 * (width + 1)
    assert net(images_of(0, 2, *shape)).shape == (2, 5)


def test_known_sizes():
    """GPT-2 small and ViT-B/16 in numbers of weights."""
    with torch.device("meta"):
        assert num_weights(models.gpt(50257, 1024, width=768, depth=12, num_heads=12)) == 124_439_808
        base = models.vit((3, 224, 224), 1000, patch_size=16, width=768, depth=12, num_heads=12)
    assert num_weights(base) == 86_567_656


@given(length=st.integers(2, 10), data=st.data(), seed=st.integers(0, 99))
def test_no_logit_sees_a_later_token(length, data, seed):
    torch.manual_seed(seed)
    net, tokens = models.gpt(TOKENS, 10, **SMALL), tokens_of(seed, 3, length)
    place = data.draw(st.integers(0, length - 1))
    changed = tokens.clone()
    changed[:, place] = (tokens[:, place] + data.draw(st.integers(1, TOKENS - 1))) % TOKENS
    before, after = net(tokens), net(changed)
    torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-6)
    assert (after[:, place:] - before[:, place:]).abs().flatten(2).amax(2).min() > 1e-6  # all later ones see it


@given(length=st.integers(1, 10), seed=st.integers(0, 99))
def test_the_logits_of_a_prefix_do_not_depend_on_the_rest(length, seed):
    torch.manual_seed(seed)
    net, tokens = models.gpt(TOKENS, 10, **SMALL), tokens_of(seed, 2, 10)
    torch.testing.assert_close(net(tokens[:, :length]), net(tokens)[:, :length], rtol=1e-5, atol=1e-6)


def patches_in_order(images: Tensor, order: list[int], side: int) -> Tensor:
    rows = images.unfold(2, side, side).unfold(3, side, side)
    grid = rows.shape[2:4]
    moved = rows.flatten(2, 3)[:, :, order].unflatten(2, grid)
    return moved.permute(0, 1, 2, 4, 3, 5).reshape(images.shape)


@given(order=st.permutations(range(4)).filter(lambda order: order != [0, 1, 2, 3]), seed=st.integers(0, 99))
def test_with_positions_the_order_of_patches_matters(order, seed):
    torch.manual_seed(seed)
    net, images = models.vit(IMAGE, 5, **SMALL), images_of(seed, 3, *IMAGE)
    assert (net(patches_in_order(images, order, 4)) - net(images)).abs().max() > 1e-6


def test_first_weights_of_a_gpt_have_gpt_2s_deviations():
    net = models.build("gpt", in_shape=(64,), num_classes=300, seed=0, width=128, depth=3, num_heads=2, is_tied=False)
    for name, param in net.named_parameters():
        if param.ndim == 2:
            is_last = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            torch.testing.assert_close(param.std().item(), 0.02 / (math.sqrt(6) if is_last else 1), rtol=0.05, atol=0.0)
            assert abs(param.mean().item()) < 1e-3
        else:
            assert torch.equal(param, torch.full_like(param, float("norm" in name and name.endswith("weight")))), name


def test_first_weights_of_a_vision_transformer_are_truncated():
    net = models.build("vit", in_shape=(3, 32, 32), num_classes=300, seed=0, width=128, depth=1, num_heads=2)
    # The deviation of a normal distribution truncated at two deviations on either side.
    left = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))
    for name, param in net.named_parameters():
        if param.ndim in (2, 4):
            std = 0.02 if param.ndim == 2 else 48**-0.5
            assert param.abs().max() <= 2 * std
            torch.testing.assert_close(param.std().item(), left * std, rtol=0.05, atol=0.0)
        else:
            assert torch.equal(param, torch.full_like(param, float("norm" in name and name.endswith("weight")))), name


@given(dropout=st.sampled_from([0.0, 0.3]), name=st.sampled_from(["vit", "gpt"]))
def test_dropout_is_everywhere_or_nowhere(dropout, name):
    net = models.build(name, in_shape=(8,) if name == "gpt" else IMAGE, num_classes=5, seed=0, dropout=dropout, **SMALL)
    assert sum(isinstance(module, nn.Dropout) for module in net.modules()) == (3 if dropout else 0)
    probabilities = [module.dropout for module in net.modules() if isinstance(module, SelfAttention)]
    assert probabilities == [dropout] * 2
