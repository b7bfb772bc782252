"""The transformers: their contexts, and the numbers and initial values of their weights."""

import math
from typing import Any

import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from purecompose.nn import models


SMALL: dict[str, Any] = {"width": 8, "depth": 2, "num_heads": 2}
IMAGE, TOKENS = (3, 8, 8), 7


def num_weights(net: nn.Module) -> int:
    return sum(param.numel() for param in net.parameters())


def tokens_of(seed: int, *shape: int, vocabulary: int = TOKENS) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def images_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
