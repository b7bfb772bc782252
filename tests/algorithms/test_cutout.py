"""Cutout: the core against manual slices, its probabilities against closed forms, the factory in a step."""

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats
from torch import Tensor, nn

from purecompose import State, compose, loop_events, losses, optim, random, tree
from purecompose.algorithms import cutout
from purecompose.algorithms.images.samples import whole_part
from purecompose.functional import cutout_batch
from purecompose.testing.tasks import TASKS
from purecompose.time.event import Event
from tests.algorithms.method_helpers import make_image_state, spy


SEEDS = st.integers(0, 2**64 - 1)
SHAPES = st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 12)] * 2)
LENGTHS = st.sampled_from([0.25, 0.5, 1.0]) | st.floats(0, 1, exclude_min=True)
DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.bool]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def by_hand(images: Tensor, centers: Any, half: int) -> Tensor:
    """Cut one image after the other, one hole after the other."""
    result = images.clone()
    height, width = images.shape[-2:]
    for image, holes in zip(result, centers, strict=True):
        for y, x in holes:
            top, bottom = max(y - half, 0), min(max(y + half, 0), height)
            left, right = max(x - half, 0), min(max(x + half, 0), width)
            image[:, top:bottom, left:right] = 0
    return result


def covered(seed: int, height: int, width: int, **settings: Any) -> Tensor:
    """Return which pixels of a single image are covered, bool (H, W)."""
    return cutout_batch(random.key(seed), ones(1, height, width), **settings)[0] == 0


# The core


@given(SEEDS, SHAPES, LENGTHS, st.integers(0, 3), st.booleans(), st.booleans(), st.sampled_from(DTYPES))
def test_elements_are_kept_or_zero_and_shape_and_dtype_are_kept(
    seed, shape, length, num_holes, uniform, per_example, dtype
):
    images = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed % 2**32)).to(dtype)
    before = images.clone()
    settings = {"num_holes": num_holes, "length": length, "uniform_sampling": uniform, "per_example": per_example}
    result = cutout_batch(random.key(seed), images, **settings)
    assert result.shape == images.shape and result.dtype == dtype
    assert torch.equal(images, before)
    assert ((result == images) | (result == 0)).all()
    again = cutout_batch(random.key(seed), images, **settings)
    assert torch.equal(result, again)
    # The draws only depend on sizes, so images of ones show where the holes are.
    holes = cutout_batch(random.key(seed), ones(*shape), **settings) == 0
    assert torch.equal(result, images.masked_fill(holes, 0))
    assert (holes == holes[:, :1]).all()
    if not per_example:
        assert (holes == holes[:1]).all()


@given(SEEDS, SHAPES, LENGTHS, st.booleans())
def test_a_hole_is_a_full_rectangle_of_bounded_sides(seed, shape, length, uniform):
    *_, height, width = shape
    holes = covered(seed, height, width, length=length, uniform_sampling=uniform)
    side = int(min(height, width) * length + 1e-9)
    rows, columns = holes.any(1), holes.any(0)
    assert torch.equal(holes, rows.unsqueeze(1) & columns)
    for line in (rows, columns):
        places = line.nonzero().flatten()
        assert len(places) <= 2 * (side // 2)
        assert torch.equal(places, torch.arange(len(places)) + (places[0] if len(places) else 0))
    assert holes.sum() <= side * side
    if side >= 2:
        assert holes.any()  # every draw touches the image


@given(SEEDS, SHAPES, LENGTHS, st.integers(1, 3), st.booleans(), st.booleans())
def test_holes_are_slices_around_the_drawn_centers(seed, shape, length, num_holes, uniform, per_example):
    num, _, height, width = shape
    images = torch.full(shape, torch.nan)  # which does not survive in a hole
    half = whole_part(length, min(height, width)) // 2
    beyond = max(half - 1, 0) if uniform else 0
    rows, columns = (
        random.randint(
            random.Rng(random.key(seed)).named(axis),
            (num if per_example else 1, num_holes),
            -beyond,
            side + beyond + uniform,
        ).tolist()
        for axis, side in (("row", height), ("column", width))
    )
    centers = [list(zip(*pairs, strict=True)) for pairs in zip(rows, columns, strict=True)]
    settings = {"num_holes": num_holes, "length": length, "uniform_sampling": uniform, "per_example": per_example}
    got = cutout_batch(random.key(seed), images, **settings)
    expected = by_hand(images, centers if per_example else centers * num, half)
    assert torch.equal(got.isnan(), expected.isnan()) and (got[~got.isnan()] == 0).all()


def counts(num: int, height: int, width: int, **settings: Any) -> Tensor:
    keys = random.split(random.key(11), num)
    images = ones(1, height, width)
    return torch.func.vmap(lambda key: cutout_batch(key, images, **settings))(keys).eq(0).sum(0)[0]


@pytest.mark.parametrize("length", [0.4, 0.6, 1.0])  # sides 2, 2 (of 3), 4 (of 5)
def test_chances_are_those_of_the_closed_form(length):
    height, width, num = 5, 9, 4000
    half = int(5 * length + 1e-9) // 2
    for uniform in (False, True):
        chances = []
        for size in (height, width):
            middles = range(1 - half, size + half) if uniform else range(size)
            hits = [sum(y - half <= row < y + half for y in middles) for row in range(size)]
            assert not uniform or set(hits) == {2 * half}  # each row equally often
            assert uniform or hits[size // 2] > hits[size - 1]  # the middle more often than the last
            chances.append(torch.tensor(hits) / len(middles))
        expected = chances[0].unsqueeze(1) * chances[1]
        got = counts(num, height, width, length=length, uniform_sampling=uniform)
        for hits, chance in zip(got.flatten().tolist(), expected.flatten().tolist(), strict=True):
            assert stats.binomtest(hits, num, chance).pvalue > 1e-5


def test_each_image_has_its_own_holes_whatever_the_batch_is():
    images = ones(16, 2, 12, 12)
    result = cutout_batch(random.key(3), images, num_holes=2, per_example=True)
    masks = result[:, 0].flatten(1)
    assert len({tuple(mask.tolist()) for mask in masks}) > 10
    part = cutout_batch(random.key(3), images[:5], num_holes=2, per_example=True)
    assert torch.equal(part, result[:5])
    # With the examples' numbers, a part draws the same as the whole batch.
    rng = random.Rng(random.key(3))
    whole = cutout_batch(rng.per_example(torch.arange(16)), images, per_example=True)
    rest = cutout_batch(rng.per_example(torch.arange(9, 16)), images[9:], per_example=True)
    assert torch.equal(rest, whole[9:])


def test_an_image_alone_is_a_batch_of_one():
    image = torch.randn(3, 10, 8)
    for per_example in (False, True):
        settings = {"num_holes": 2, "per_example": per_example}
        alone = cutout_batch(random.key(0), image, **settings)
        assert alone.shape == image.shape
        assert torch.equal(alone, cutout_batch(random.key(0), image.unsqueeze(0), **settings)[0])


@given(SEEDS, st.booleans())
def test_the_gradient_is_the_mask(seed, per_example):
    images = torch.randn(3, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    result = cutout_batch(random.key(seed), images, num_holes=2, per_example=per_example)
    (gradient,) = torch.autograd.grad(result.sum(), images)
    assert torch.equal(gradient, (result != 0).double())


def test_settings_that_cover_nothing_are_the_identity():
    images = torch.randn(2, 1, 9, 9)
    assert cutout_batch(random.key(0), images, num_holes=0) is images
    assert cutout_batch(random.key(0), images, length=0.15) is images  # one pixel
    assert cutout_batch(random.key(0), images[:0]).shape == (0, 1, 9, 9)
    assert cutout_batch(random.key(0), images[..., :0]).shape == (2, 1, 9, 0)


def test_decimal_lengths_lose_no_pixel():
    assert int(0.58 * 100) == 57
    assert max(int(covered(seed, 100, 100, length=0.58).sum()) for seed in range(20)) == 58 * 58


# In a step


def test_a_step_trains_on_the_images_of_the_core():
    seen: list[Any] = []
    settings = {"num_holes": 2, "length": 0.7, "per_example": True}
    step = compose(loop_events, [cutout(**settings), spy(seen, Event.BATCH_START)])
    state = step.init(make_image_state())
    batch = TASKS["images"].make_batch(0, 6)
    kept = tree.map(torch.clone, batch)
    after = step(state, batch)
    expected = cutout_batch(state.rng("cutout"), batch[0], **settings)
    assert torch.equal(seen[0][0], expected) and seen[0][1].data_ptr() == batch[1].data_ptr()
    assert tree.equal(batch, kept)
    plain = compose(loop_events, [])(make_image_state(), (expected, batch[1]))
    assert tree.equal(after.params, plain.params)
    assert not tree.equal(after.params, compose(loop_events, [])(make_image_state(), batch).params)


# Errors


def test_bad_arguments_of_the_core_are_refused():
    images = ones(2, 3, 8, 8)
    with pytest.raises(TypeError, match=r"images: expected a tensor of images, got \[\] \(list\)"):
        cutout_batch(random.key(0), [])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"expected \(N, C, H, W\) or \(C, H, W\), got shape \(8, 8\)"):
        cutout_batch(random.key(0), images[0, 0])
    with pytest.raises(TypeError, match="cutout_batch: expected a key"):
        cutout_batch(torch.zeros(2), images)


def test_a_step_refuses_inputs_that_are_not_images_and_read_only_keys():
    step = compose(loop_events, [cutout(name="mine")])
    with pytest.raises(TypeError, match=r"mine: expected images, one tensor \(N, C, H, W\), got float32\[4, 4\]"):
        step(step.init(TASKS["vectors"].make_state(0, duration="8ba")), TASKS["vectors"].make_batch(0, 4))
    with pytest.raises(TypeError, match="input_field=.*is read-only"):
        cutout(input_field=lambda batch: batch[0])


def test_a_mapping_in_place_of_images_is_refused_with_its_keys():
    class Own(nn.Module):
        """A model that is called with the whole batch, as those of transformers are."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 3)

        def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.head(pixel_values.flatten(1)), labels)}

    state = State.create(Own(), loss=losses.model_loss, optimizer=optim.sgd(0.1), key=0)
    batch = {"pixel_values": torch.ones(2, 1, 8, 8), "labels": torch.tensor([0, 1])}
    plain = compose(loop_events)
    whole, named = (compose(loop_events, [cutout(input_field=field)]) for field in (None, "pixel_values"))
    state = named.init(state)
    with pytest.raises(TypeError, match=r"got a dict of 'pixel_values', 'labels'; select .* such as 'pixel_values'"):
        whole(state, batch)
    assert not tree.equal(named(state, batch).params, plain(state, batch).params)
