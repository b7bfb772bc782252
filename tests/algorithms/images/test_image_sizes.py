"""Fractions of sides against exact fractions; which tensors count as images."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st

from purecompose.algorithms.images.levels import check_image_tensor, whole_part


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
