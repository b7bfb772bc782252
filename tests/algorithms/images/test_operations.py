"""Operations on images: properties of each, closed forms, scales of levels, and sizes."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from purecompose.algorithms.images.samples import check_image_tensor, whole_part
from purecompose.functional import randaugment_batch
from purecompose.random import key
from tests.algorithms.images.applying import applied


# For each operation, the amount that changes nothing (None if it has no amount), and some other amounts.
AMOUNTS: dict[str, tuple[float | None, list[float]]] = {
    "autocontrast": (None, []),
    "equalize": (None, []),
    "posterize": (8, [0, 1, 3, 7]),
    "solarize": (256, [0, 99, 255]),
    "rotate": (0, [-90, -3, 17.5, 180, 400]),
    "shear_x": (0, [-0.3, 0.05, 2]),
    "shear_y": (0, [-2, 0.3]),
    "translate_x": (0, [-3, 1, 50]),
    "translate_y": (0, [-1, 2]),
    "saturation": (1, [0, 0.3, 1.7, 9]),
    "contrast": (1, [0, 0.5, 9]),
    "brightness": (1, [0, 0.9, 4]),
    "sharpness": (1, [0, 0.2, 5]),
}
DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64]
WITH_AMOUNT = [name for name, (neutral, _) in AMOUNTS.items() if neutral is not None]


def call(name: str, batch: Tensor, amount: Any, **options: Any) -> Tensor:
    return applied(name, batch, 1.0 if AMOUNTS[name][0] is None else amount, **options)


def make_images(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
    pixels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))
    return pixels.to(torch.uint8) if dtype == torch.uint8 else (pixels / 255).to(dtype)


@st.composite
def calls(draw: Any) -> tuple[str, float | None]:
    name = draw(st.sampled_from(sorted(AMOUNTS)))
    neutral, others = AMOUNTS[name]
    return name, None if neutral is None else draw(st.sampled_from([neutral, *others]))


shapes = st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3]), st.integers(1, 9), st.integers(1, 9))


@given(calls(), shapes, st.sampled_from(DTYPES), st.integers(0, 99))
def test_shape_dtype_and_range_stay_and_nothing_is_changed_in_place(
    called: tuple[str, float | None], shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    name, amount = called
    batch = make_images(seed, shape, dtype)
    before = batch.clone()
    result = call(name, batch, amount)
    assert torch.equal(batch, before)
    assert result.shape == batch.shape and result.dtype == dtype
    top = 255 if dtype == torch.uint8 else 1
    assert result.min() >= 0 and result.max() <= top


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WITH_AMOUNT)
def test_the_neutral_amount_keeps_every_bit(name: str, dtype: torch.dtype) -> None:
    batch = make_images(3, (4, 3, 7, 6), dtype) * (1 if dtype == torch.uint8 else 3.7)
    assert torch.equal(call(name, batch, AMOUNTS[name][0]), batch)
    assert torch.equal(call(name, batch, torch.full((4,), float(AMOUNTS[name][0] or 0))), batch)


@given(calls(), st.integers(0, 99), st.integers(2, 4))
def test_each_image_is_treated_separately(called: tuple[str, float | None], seed: int, num: int) -> None:
    name, amount = called
    batch = make_images(seed, (num, 3, 8, 5))
    alone = torch.stack([call(name, image, amount) for image in batch])
    assert torch.equal(call(name, batch, amount), alone)


@given(st.sampled_from(WITH_AMOUNT), st.data(), st.integers(0, 99))
def test_each_image_may_have_its_own_amount(name: str, data: st.DataObject, seed: int) -> None:
    neutral, others = AMOUNTS[name]
    amounts = data.draw(st.lists(st.sampled_from([neutral, *others]), min_size=3, max_size=3))
    batch = make_images(seed, (3, 3, 6, 8))
    single = torch.stack([call(name, image, amount) for image, amount in zip(batch, amounts, strict=True)])
    assert torch.equal(call(name, batch, torch.tensor(amounts, dtype=torch.float32)), single)


@pytest.mark.parametrize("name", sorted(AMOUNTS))
@pytest.mark.parametrize("fill", ["constant channel", "black", "white", "one pixel"])
def test_gradients_are_finite_where_nothing_varies(name: str, fill: str) -> None:
    batch = make_images(0, (2, 3, 1, 1) if fill == "one pixel" else (2, 3, 5, 4), torch.float32)
    if fill == "constant channel":
        batch[:, 1] = 0.5
    elif fill != "one pixel":
        batch[:] = float(fill == "white")
    batch.requires_grad_()
    changed = call(name, batch, (AMOUNTS[name][1] or [None])[0], value_range=(0.0, 1.0))
    if changed.requires_grad:
        (gradient,) = torch.autograd.grad(changed.sum(), batch)
        assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("name", "amount"), [("translate_x", -3), ("translate_y", 2), ("shear_x", 2.0), ("shear_y", -2.0), ("rotate", 45.0)]
)
def test_pixels_from_outside_the_image_are_black(name: str, amount: float) -> None:
    batch = torch.ones(1, 1, 6, 6)
    is_black = call(name, batch, amount, value_range=(0.0, 1.0)) == 0
    frame = torch.ones(6, 6, dtype=torch.bool)
    frame[1:-1, 1:-1] = False
    batch[..., frame] = torch.nan
    assert is_black.any() and (call(name, batch, amount, value_range=(0.0, 1.0))[is_black] == 0).all()


@given(st.sampled_from(["translate_x", "translate_y"]), st.integers(-9, 9), st.integers(0, 99))
def test_translations_move_pixels_as_they_are(name: str, pixels: int, seed: int) -> None:
    batch = make_images(seed, (2, 3, 7, 7), torch.float32) + 0.001
    result = call(name, batch, pixels, value_range=(0.0, 2.0))
    dim = 3 if name == "translate_x" else 2
    kept = max(0, 7 - abs(pixels))
    source = batch.narrow(dim, max(0, min(pixels, 7)), kept)
    torch.testing.assert_close(result.narrow(dim, min(7, max(0, -pixels)), kept), source, atol=1e-6, rtol=0)
    assert (result == 0).sum() == (7 - kept) * 7 * 6


@given(st.integers(0, 99))
def test_a_turn_by_right_angles_moves_pixels(seed: int) -> None:
    batch = make_images(seed, (2, 3, 6, 6))
    assert torch.equal(applied("rotate", batch, 90), batch.rot90(1, (2, 3)))
    assert torch.equal(applied("rotate", batch, 180), batch.rot90(2, (2, 3)))


@given(shapes, st.integers(0, 99))
def test_equalize_and_autocontrast_use_the_whole_scale(shape: tuple[int, ...], seed: int) -> None:
    batch = make_images(seed, shape) // 2 + 20
    stretched = applied("autocontrast", batch).flatten(2)
    is_flat = batch.flatten(2).amin(2) == batch.flatten(2).amax(2)
    assert ((stretched.amin(2) == 0) | is_flat).all() and ((stretched.amax(2) == 255) | is_flat).all()
    # Order is kept by both.
    order = batch.flatten(2).argsort(2)
    for changed in (stretched, applied("equalize", batch).flatten(2)):
        assert (changed.gather(2, order).int().diff(dim=2) >= 0).all()


@given(st.floats(-5, 5), st.floats(0.1, 9), calls(), st.integers(0, 99))
def test_the_scale_of_floats_does_not_matter(
    low: float, extent: float, called: tuple[str, float | None], seed: int
) -> None:
    name, amount = called
    if name in ("posterize", "solarize", "equalize"):
        return  # steps: values at a boundary may be rounded to either side
    pixels = make_images(seed, (2, 3, 6, 6), torch.float64)
    plain = call(name, pixels, amount, value_range=(0.0, 1.0))
    scaled = call(name, pixels * extent + low, amount, value_range=(low, low + extent))
    torch.testing.assert_close((scaled - low) / extent, plain, atol=0.01, rtol=0)  # greys are rounded to whole levels


def test_by_default_a_channels_extremes_are_black_and_white() -> None:
    pixels = make_images(0, (8, 3, 5, 5), torch.float32)
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.1]).view(3, 1, 1)
    pixels[0, :, 0, 0], pixels[0, :, 0, 1] = 0, 1
    normalised = applied("brightness", (pixels - mean) / std, 0.5)
    torch.testing.assert_close(normalised * std + mean, applied("brightness", pixels, 0.5), atol=1e-5, rtol=0)
    given = applied(
        "brightness",
        (pixels - mean) / std,
        0.5,
        value_range=(tuple((-mean / std).flatten().tolist()), tuple(((1 - mean) / std).flatten().tolist())),
    )
    torch.testing.assert_close(given, normalised, atol=1e-5, rtol=0)


def test_gradients_flow_through_smooth_operations() -> None:
    batch = make_images(0, (2, 3, 6, 6), torch.float64).requires_grad_()
    applied("rotate", batch, 10.0, value_range=(0.0, 1.0)).sum().backward()
    assert batch.grad is not None and batch.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("images", "settings", "error", "message"),
    [
        ([1], {}, TypeError, "randaugment_batch: images: expected a tensor"),
        (torch.zeros(1, 1, 2, 2, dtype=torch.int64), {}, TypeError, r"images.to\(torch.uint8\)"),
        (torch.zeros(2, 2), {}, ValueError, r"or \(C, H, W\), got shape \(2, 2\)"),
        (torch.zeros(2, 2, 2), {"value_range": ((0, 0, 0), 1)}, ValueError, "each of 2 channels"),
    ],
)
def test_bad_input_is_named(images: Any, settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        randaugment_batch(key(0), images, **settings)


def test_an_empty_batch_of_images_is_returned_empty() -> None:
    assert applied("equalize", torch.zeros(0, 3, 4, 4)).shape == (0, 3, 4, 4)


# The core


SIZES = st.integers(0, 2000)


@given(st.decimals(0, 1, places=3), SIZES)
def test_decimal_shares_are_taken_exactly(share, size):
    exact = Fraction(str(share))
    assert whole_part(float(share), size) == math.floor(exact * size)
    assert whole_part(1 - float(share), size) == math.floor((1 - exact) * size)


@given(st.integers(1, 50), st.data(), st.integers(0, 50))
def test_quotients_of_whole_numbers_lose_no_pixel(whole, data, factor):
    part = data.draw(st.integers(0, whole))
    assert whole_part(part / whole, whole * factor) == part * factor
    assert whole_part(1 - part / whole, whole * factor) == (whole - part) * factor


@given(st.floats(0, 1), SIZES)
def test_a_part_is_rounded_down_except_for_rounding_errors(share, size):
    assert 0 <= whole_part(share, size) - int(share * size) <= 1
    assert whole_part(share, size) <= share * size + 1e-9


def test_only_tensors_of_three_or_four_dimensions_are_images():
    for shape in ((2, 3, 4), (1, 2, 3, 4), (0, 0, 0)):
        check_image_tensor(torch.zeros(shape), "fn: images")
    with pytest.raises(TypeError, match=r"fn: images: expected a tensor of images, got \[1\] \(list\)"):
        check_image_tensor([1], "fn: images")
    for shape in ((), (2, 2), (1, 1, 1, 1, 1)):
        with pytest.raises(ValueError, match=r"expected \(N, C, H, W\) or \(C, H, W\), got shape"):
            check_image_tensor(torch.zeros(shape), "fn: images")
