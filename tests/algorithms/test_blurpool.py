"""BlurPool: the layers against scipy and manual windows, the surgery, shifts, the factory in a run."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings, strategies as st
from scipy import ndimage
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from purecompose import compose, loop_events
from purecompose.algorithms import blurpool
from purecompose.functional import blur_2d, blurmax_pool2d
from purecompose.nn.layers import BlurConv2d, BlurMaxPool2d
from tests.algorithms.surgery_checks import (
    applied,
    check_keeps_all,
    check_leaves,
    hooked,
    make_batch,
    make_images,
    make_state,
    operated,
    patched,
    trained,
)


FILTER = np.outer([1, 2, 1], [1, 2, 1]) / 16
SEEDS = st.integers(0, 99)
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 8), st.integers(1, 8))
STEPS = st.integers(1, 3) | st.tuples(st.integers(1, 3), st.integers(1, 3))


def pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def drawn(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def smoothed(images: Tensor) -> Tensor:
    """Return the images smoothed by scipy, one image and channel after the other, in float64."""
    planes = images.double().flatten(0, -3).numpy()
    rows = [ndimage.correlate(plane, FILTER, mode="constant") for plane in planes]
    return torch.tensor(np.stack(rows)).view(images.shape)


def windows_by_hand(image: Tensor, window: Any, steps: Any, around: Any, holes: Any, size: Any) -> Tensor:
    """Return the window's maximum at each place that is used by a strided smoothing with `size` results."""
    shape = [(size[i] - 1) * pair(steps)[i] + 1 for i in (0, 1)]
    # Up to the last window that fits and begins in the image or its padding, or the last one.
    fits = [image.shape[i] + 2 * pair(around)[i] - pair(holes)[i] * (pair(window)[i] - 1) for i in (0, 1)]
    shape = [max(there, fit) for there, fit in zip(shape, fits, strict=True)]
    rows = [[-float("inf")] * shape[1] for _ in range(shape[0])]
    for y, x in itertools.product(range(shape[0]), range(shape[1])):
        for dy, dx in itertools.product(range(pair(window)[0]), range(pair(window)[1])):
            at = y - pair(around)[0] + dy * pair(holes)[0], x - pair(around)[1] + dx * pair(holes)[1]
            if 0 <= at[0] < image.shape[0] and 0 <= at[1] < image.shape[1]:
                rows[y][x] = max(rows[y][x], image[at].item())
    return torch.tensor(rows, dtype=torch.float64)


# The layers


@given(SEEDS, SHAPES, STEPS)
def test_smoothing_is_scipys_of_every_stride_th_place(seed, shape, stride):
    images = drawn(seed, shape)
    expected = smoothed(images)[..., :: pair(stride)[0], :: pair(stride)[1]]
    torch.testing.assert_close(blur_2d(images, stride=stride), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(blur_2d(images.float(), stride=stride).double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(blur_2d(images[0], stride=stride), expected[0], rtol=1e-12, atol=1e-12)


@st.composite
def poolings(draw: st.DrawFn) -> dict[str, Any]:
    window = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    return {
        "kernel_size": window,
        "stride": draw(STEPS),
        "padding": tuple(draw(st.integers(0, side // 2)) for side in window),
        "dilation": draw(st.integers(1, 2)),
        "ceil_mode": draw(st.booleans()),
    }


@given(SEEDS, st.integers(1, 8), st.integers(1, 8), poolings())
def test_max_pooling_equals_smoothed_windows_and_has_torchs_shape(seed, height, width, pooling):
    images = drawn(seed, (1, 1, height, width))
    for side, window, around in zip((height, width), pooling["kernel_size"], pooling["padding"], strict=True):
        assume(side + 2 * around > pooling["dilation"] * (window - 1))
        assume(side > pooling["dilation"] * (window - 1))  # otherwise a window may contain only padding
    plain = F.max_pool2d(images, **pooling)
    result = blurmax_pool2d(images, **pooling)
    assert result.shape == plain.shape
    window, steps, around, holes = (pooling[key] for key in ("kernel_size", "stride", "padding", "dilation"))
    highest = windows_by_hand(images[0, 0], window, steps, around, holes, plain.shape[-2:])
    down, right = pair(steps)
    expected = smoothed(highest[None, None])[..., ::down, ::right]
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(BlurMaxPool2d(**pooling)(images), result)


def test_a_pooling_takes_the_windows_size_for_its_stride():
    images = drawn(0, (2, 3, 6, 6))
    assert torch.equal(blurmax_pool2d(images, 3), blurmax_pool2d(images, 3, 3))
    assert torch.equal(BlurMaxPool2d(2)(images), blurmax_pool2d(images))


@given(
    SEEDS,
    st.sampled_from([1, (1, 3), 3]),
    st.sampled_from([2, (2, 1), 3]),
    st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    st.sampled_from([1, 2]),
    st.sampled_from([(3, 3), (3, 7), (4, 4)]),
    st.booleans(),
)
def test_convolutions_are_the_formulas_with_all_settings_kept(seed, side, stride, mode, groups, size, is_first):
    torch.manual_seed(seed)
    around = pair(side)[0] // 2, pair(side)[1] // 2
    conv = nn.Conv2d(4, 6, side, stride, around, groups=groups, padding_mode=mode, dtype=torch.float64)
    images = drawn(seed, (2, 4, *size))
    result = BlurConv2d(conv, is_first)(images)
    pads = (around[1], around[1], around[0], around[0])

    def convolved(x: Tensor, step: Any) -> Tensor:
        padded = F.pad(x, pads, mode="constant" if mode == "zeros" else mode)
        return F.conv2d(padded, conv.weight, conv.bias, step, groups=groups)

    down, right = pair(stride)
    after = convolved(smoothed(images), stride)
    before = smoothed(convolved(images, 1).detach())[..., ::down, ::right]
    assert result.shape == conv(images).shape
    torch.testing.assert_close(result, after if is_first else before, rtol=1e-9, atol=1e-9)


# The surgery


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, 2, 1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(4, 4, 3, (1, 2), 1, bias=False),
        nn.MaxPool2d(3, 1, 1),
        nn.Conv2d(4, 4, 3, 1, 1),
        nn.Flatten(),
        nn.Linear(4 * 2 * 1, 3),
    )


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ("0", "3", "4")),
        ({"min_channels": 3}, ("3", "4")),
        ({"min_channels": 5}, ("3",)),
        ({"replace_maxpools": False}, ("0", "4")),
        ({"replace_convs": False}, ("3",)),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_only_layers_with_a_stride_are_replaced(settings, names, is_first):
    state = trained(make_state(make_net()))
    after, report = check_keeps_all(state, blurpool(blur_first=is_first, **{"min_channels": 1, **settings}))
    assert report.replaced == names and report.made == ()
    kinds = {nn.Conv2d: BlurConv2d, nn.MaxPool2d: BlurMaxPool2d}
    for name, module in state.model.module.named_children():
        new = getattr(after.model.module, name)
        assert isinstance(new, kinds[type(module)]) if name in names else type(new) is type(module)
    assert compose(loop_events)(after, make_batch(5)).timestamp.batch == 3


def test_layers_that_are_not_replaced():
    class Transposed(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.ConvTranspose2d(2, 2, 2, 2), nn.MaxPool2d(2, return_indices=True), nn.MaxPool2d(3, 1))

    with pytest.warns(UserWarning, match="looked for Conv2d or MaxPool2d to replace, and kept all 2"):
        _, report = operated(nn.Sequential(Transposed(), nn.MaxPool3d(2), nn.AvgPool2d(2)), blurpool())
    assert report.replaced == ()


class Lowest(nn.MaxPool2d):
    """A pooling layer with its own forward."""

    def forward(self, input: Tensor) -> Tensor:
        return -F.max_pool2d(-input, self.kernel_size, self.stride)


class Fixed(nn.Conv2d):
    """A convolution that does not read its stride."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight, self.bias, 2, 1)


def test_layers_with_own_forwards_hooks_or_parametrizations_are_kept():
    check_leaves(nn.Sequential(Lowest(2), hooked(nn.MaxPool2d(2)), patched(nn.MaxPool2d(1, 3))), blurpool(), 3)
    wide, convs = blurpool(blur_first=False, min_channels=1), [nn.Conv2d(2, 2, 3, 2, 1) for _ in range(2)]
    parametrized = parametrizations.weight_norm(nn.Conv2d(2, 2, 3, 2, 1))
    net = nn.Sequential(Fixed(2, 2, 3, 2, 1), hooked(convs[0]), patched(convs[1]), parametrized)
    check_leaves(net, wide, 4)
    # Wrapped as a whole, they keep their behaviour.
    state = make_state(net[:1])
    after, report = applied(state, blurpool(min_channels=1))
    assert report.replaced == ("0",)
    assert torch.equal(after.forward(make_images()), net[0](blur_2d(make_images())))
    with pytest.raises(TypeError, match="without an overridden forward, hooks or parametrized tensors, got Fixed"):
        BlurConv2d(Fixed(2, 2, 3, 2, 1), False)


@given(SEEDS, st.sampled_from([torch.float32, torch.float64]), st.booleans())
@settings(max_examples=10)
def test_the_state_after_surgery_computes_what_the_layers_do(seed, dtype, is_first):
    torch.manual_seed(seed)
    conv = nn.Conv2d(2, 4, 3, 2, 1, dtype=dtype)
    state = make_state(nn.Sequential(conv, nn.MaxPool2d(2)))
    after, _ = check_keeps_all(state, blurpool(blur_first=is_first, min_channels=1))
    images = drawn(seed, (2, 2, 8, 8), dtype)
    expected = blurmax_pool2d(BlurConv2d(conv, is_first)(images), 2)
    assert torch.equal(after.forward(images), expected) and after.params["0.conv.weight"].dtype == dtype
