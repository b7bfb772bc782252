"""ColOut: kept rows and columns, shown by numbered pixels; masks, mixtures and labels as targets; the factory."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats
from torch import Tensor, nn

from purecompose import Algorithm, State, compose, loop_events, losses, optim, random, tree
from purecompose.algorithms import colout
from purecompose.functional import colout_batch
from purecompose.losses.targets import Mixture
from purecompose.testing.tasks import TASKS
from purecompose.time.event import Event
from purecompose.time.predicates import on
from tests.algorithms.method_helpers import make_image_state, spy


SEEDS = st.integers(0, 2**64 - 1)
SHARES = st.sampled_from([0.0, 0.15, 0.5, 1.0]) | st.decimals(0, 1, places=3).map(float)
SHAPES = st.tuples(st.integers(1, 4), st.sampled_from([1, 3]), st.integers(1, 14), st.integers(1, 14))
DTYPES = [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]


def places(*shape: int) -> Tensor:
    """Return images (N, C, H, W) with a different number in every pixel; in the last two dims 1000 row + column."""
    num, channels, height, width = shape
    pixels = 1000 * torch.arange(height).view(-1, 1) + torch.arange(width)
    return pixels.expand(num, channels, height, width).contiguous()


def exact_count(p: float, size: int) -> int:
    return max(1, math.floor((1 - Fraction(repr(p))) * size))


def kept(image: Tensor) -> tuple[list[int], list[int]]:
    """Return the rows and columns that an image of places (H', W') contains."""
    return (image[:, 0] // 1000).tolist(), (image[0] % 1000).tolist()


# The core


@given(SEEDS, SHAPES, SHARES, SHARES)
def test_sorted_rows_and_columns_of_the_exact_number_stay(seed, shape, p_row, p_col):
    images = places(*shape)
    before = images.clone()
    got = colout_batch(random.key(seed), images, p_row=p_row, p_col=p_col)
    num, channels, height, width = shape
    assert got.shape == (num, channels, exact_count(p_row, height), exact_count(p_col, width))
    assert torch.equal(images, before)
    chosen = [kept(image) for image in got[:, 0]]
    for (rows, columns), image in zip(chosen, got, strict=True):
        assert rows == sorted(set(rows)) and columns == sorted(set(columns))
        assert torch.equal(image, images[0][:, rows][:, :, columns])  # nothing interpolated, all channels alike
    assert all(one == chosen[0] for one in chosen)
    assert torch.equal(got, colout_batch(random.key(seed), images, p_row=p_row, p_col=p_col))


@given(SEEDS, SHAPES, st.sampled_from(DTYPES))
def test_a_share_of_zero_is_the_identity_and_dtypes_are_kept(seed, shape, dtype):
    images = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed % 2**32)).to(dtype)
    assert colout_batch(random.key(seed), images, p_row=0, p_col=0) is images
    got = colout_batch(random.key(seed), images, p_row=0.5, p_col=0)
    assert got.dtype == dtype and got.shape[3] == shape[3]


@pytest.mark.parametrize(
    ("p", "size", "count"), [(0.9, 10, 1), (0.7, 10, 3), (1 / 7, 224, 192), (0.15, 32, 27), (1, 10, 1), (0.99, 10, 1)]
)
def test_numbers_of_kept_rows_have_no_rounding_errors(p, size, count):
    got = colout_batch(random.key(0), torch.zeros(1, size, size), p_row=p, p_col=p)
    assert got.shape == (1, count, count)


def test_every_row_and_column_stays_with_the_same_chance():
    images, num = places(1, 1, 7, 5), 2100
    keys = random.split(random.key(2), num)

    def fn(key: Tensor) -> Tensor:
        return colout_batch(key, images, p_row=0.4, p_col=0.4)

    drawn = torch.func.vmap(fn)(keys)[:, 0, 0]
    rows, columns = (drawn[:, :, 0] // 1000).flatten(), (drawn[:, 0] % 1000).flatten()
    for counts, share in ((rows.bincount(minlength=7), 4 / 7), (columns.bincount(minlength=5), 3 / 5)):
        for count in counts.tolist():
            assert stats.binomtest(count, num, share).pvalue > 1e-5
    pairs = {tuple(rows) for rows in (drawn[:, :, 0] // 1000).tolist()}
    assert len(pairs) == math.comb(7, 4)  # every choice occurs


def test_the_gradient_is_one_for_kept_pixels():
    images = places(2, 1, 6, 7).double().requires_grad_()
    got = colout_batch(random.key(0), images, p_row=0.5, p_col=0.3)
    (gradient,) = torch.autograd.grad(got.sum(), images)
    for grad, image in zip(gradient[:, 0], got.detach()[:, 0], strict=True):
        rows, columns = kept(image.long())
        expected = torch.zeros(6, 7, dtype=torch.float64)
        expected[torch.tensor(rows).unsqueeze(1), torch.tensor(columns)] = 1
        assert torch.equal(grad, expected)


# Targets


@given(SEEDS, SHAPES, SHARES, st.sampled_from(["auto", True]), st.integers(0, 2))
def test_masks_lose_the_same_rows_and_columns(seed, shape, p, resize_target, extra):
    num, _, height, width = shape
    images = places(*shape)
    masks = images[:, 0].view(num, *[1] * extra, height, width)
    settings: dict[str, Any] = {"p_row": p, "p_col": 0.3, "resize_target": resize_target}
    got, mask = colout_batch(random.key(seed), images, masks, **settings)
    assert torch.equal(mask.view(got[:, 0].shape), got[:, 0])
    assert torch.equal(got, colout_batch(random.key(seed), images, p_row=p, p_col=0.3))


@pytest.mark.parametrize(
    "target",
    [
        torch.arange(4),
        torch.zeros(4, 4),  # as long as the width of the images, but not a mask
        torch.zeros(4, 3, 4, 5),
        torch.zeros(4, 5),
        torch.zeros(()),
        ["a", "b", "c", "d"],
        {"label": torch.arange(4), "name": "x"},
        Mixture.of(torch.arange(4)).mixed_with(torch.tensor([1, 0, 3, 2]), 0.2),
    ],
    ids=lambda target: f"{getattr(target, 'shape', type(target).__name__)}",
)
def test_other_targets_come_back_as_the_object_that_they_are(target):
    images = places(4, 3, 4, 4)
    got, same = colout_batch(random.key(0), images, target, p_row=0.5)
    assert same is target and got.shape == (4, 3, 2, 3)
    _, same = colout_batch(random.key(0), images, images, resize_target=False)
    assert same is images


def test_a_mask_of_a_single_image_is_resized_on_request():
    image = places(1, 3, 6, 8)[0]
    got, mask = colout_batch(random.key(4), image, image[0], resize_target=True)
    assert torch.equal(got[0], mask) and mask.shape == (5, 6)
    _, same = colout_batch(random.key(4), image, image[0])
    assert same.shape == (6, 8)


def test_terms_of_a_mixture_and_members_of_a_tree_are_resized_each():
    images = places(4, 1, 8, 8)
    masks, order = images[:, 0] + 0.5, torch.tensor([1, 0, 3, 2])
    mixture = Mixture.of(masks).mixed_with(order, 0.25)
    settings: dict[str, Any] = {"p_row": 0.5, "p_col": 0.25}
    got, mixed = colout_batch(random.key(0), images, mixture, **settings)
    assert isinstance(mixed, Mixture) and mixed.weights is mixture.weights
    assert torch.equal(mixed.targets[0], got[:, 0] + 0.5)
    # The partner's mask loses the rows of the image that it is mixed into.
    assert torch.equal(mixed.targets[1], got[:, 0] + 0.5)

    labels = torch.arange(4)
    _, nested = colout_batch(random.key(0), images, {"mask": masks, "labels": labels, "names": ["a"] * 4}, **settings)
    assert torch.equal(nested["mask"], got[:, 0] + 0.5)
    assert nested["labels"] is labels and nested["names"] == ["a"] * 4


# In a step


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images)


def test_a_step_trains_on_the_images_of_the_core():
    settings: dict[str, Any] = {"p_row": 0.4, "p_col": 0.2}
    state = State.create(Segmenter(), loss=losses.cross_entropy, optimizer=optim.sgd(0.1), key=3, duration="4ba")
    images = torch.randn(5, 2, 10, 10)
    masks = (images[:, 0] > 0).long()
    step = compose(loop_events, [colout(**settings)])
    after = step(step.init(state), (images, masks))
    smaller = colout_batch(state.rng("colout"), images, masks, **settings)
    assert smaller[0].shape == (5, 2, 6, 8) and torch.equal((smaller[0][:, 0] > 0).long(), smaller[1])
    assert tree.equal(after.params, compose(loop_events, [])(state, smaller).params)


def test_a_batch_without_a_target_and_targets_that_can_only_be_read():
    seen: list[Any] = []
    images, labels = TASKS["images"].make_batch(0, 4)
    read = {"target_field": lambda batch: batch[1]}
    step = compose(loop_events, [colout(0.5, 0.5), spy(seen, Event.BATCH_START)])
    step(step.init(make_image_state(**read)), (images, labels))
    assert seen[-1][0].shape == (4, 2, 3, 3)
    own = Algorithm("own_loss", on(Event.BATCH_START), lambda _, state: state.replace(batch=(state.inputs, labels)))
    step = compose(loop_events, [colout(0.5, 0.5), own, spy(seen, Event.BATCH_START)])
    step(step.init(make_image_state()), (images, None))
    assert seen[-1][0].shape == (4, 2, 3, 3)


# Errors


def test_a_step_names_the_target_that_does_not_fit():
    step = compose(loop_events, [colout(name="mine")])
    with pytest.raises(TypeError, match=r"mine: expected images, one tensor \(N, C, H, W\), got float32\[4, 4\]"):
        step(step.init(TASKS["vectors"].make_state(0, duration="8ba")), TASKS["vectors"].make_batch(0, 4))
    step = compose(loop_events, [colout(resize_target=True)])
    with pytest.raises(ValueError, match="got shape .*4,") as caught:
        step(step.init(make_image_state()), TASKS["images"].make_batch(0, 4))
    assert any("colout at" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match="input_field=.*is read-only"):
        colout(input_field=lambda batch: batch[0])
