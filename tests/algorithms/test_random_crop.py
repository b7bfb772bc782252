"""Random crop: each image is a window of the padded one, uniformly drawn; masks move along; the factory."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from purecompose import compose, loop_events, random, tree
from purecompose.algorithms import random_crop
from purecompose.functional import random_crop_batch
from purecompose.testing.tasks import TASKS


def window(images: Tensor, cropped: Tensor, padding: int, mode: str) -> list[tuple[int, int]]:
    """Return the corner of each crop in the padded image, found by comparing all windows."""
    padded = F.pad(images, [padding] * 4, mode="reflect" if mode == "reflect" else "constant")
    height, width = images.shape[-2:]
    corners = [(row, column) for row in range(2 * padding + 1) for column in range(2 * padding + 1)]
    found = list[tuple[int, int]]()
    for one, whole in zip(cropped, padded, strict=True):
        same = [(r, c) for r, c in corners if torch.equal(one, whole[:, r : r + height, c : c + width])]
        assert len(same) == 1
        found += same
    return found


@pytest.mark.parametrize("mode", ["reflect", "zeros"])
@pytest.mark.parametrize("padding", [1, 3])
def test_each_image_is_a_window_of_the_padded_one(mode: str, padding: int) -> None:
    images = torch.randn(300, 2, 6, 5)
    cropped, _ = random_crop_batch(random.key(1), images, padding=padding, mode=mode)  # pyright: ignore[reportArgumentType]
    corners = window(images, cropped, padding, mode)
    counts = torch.tensor([[corners.count((r, c)) for c in range(2 * padding + 1)] for r in range(2 * padding + 1)])
    expected = 300 / counts.numel()
    assert ((counts - expected).square() / expected).sum() < 2 * counts.numel()  # chi-squared, far above its mean


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("form", ["channels last", "strided", "expanded"])
def test_dtypes_and_layouts(dtype: torch.dtype, form: str) -> None:
    images = (100 * torch.rand(5, 3, 8, 8)).to(dtype)
    expected, _ = random_crop_batch(random.key(0), images, padding=2)
    other = images.contiguous(memory_format=torch.channels_last) if form == "channels last" else images
    other = images.repeat(1, 1, 2, 1)[:, :, :8] if form == "strided" else other
    if form == "expanded":
        other, expected = (
            images[:1].expand_as(images),
            random_crop_batch(random.key(0), images[:1].repeat(5, 1, 1, 1), padding=2)[0],
        )
    cropped, _ = random_crop_batch(random.key(0), other, padding=2)
    assert cropped.dtype == dtype and torch.equal(cropped, expected)


@pytest.mark.parametrize("mode", ["reflect", "zeros"])
@pytest.mark.parametrize("channels", [0, 1])
def test_masks_move_with_their_images(mode: str, channels: int) -> None:
    masks = torch.arange(1, 6 * 7 * 7 + 1).reshape(6, *[1] * channels, 7, 7)
    images = masks.reshape(6, 1, 7, 7).float()
    cropped, moved = random_crop_batch(random.key(2), images, masks, padding=2, mode=mode)  # pyright: ignore[reportArgumentType]
    assert moved.shape == masks.shape and torch.equal(moved.reshape(cropped.shape).float(), cropped)
    classes = torch.arange(6)
    assert random_crop_batch(random.key(2), images, classes)[1] is classes


def test_padding_that_reflection_cannot_fill_is_refused() -> None:
    with pytest.raises(ValueError, match="expected padding below the images' sides, got 4"):
        random_crop_batch(random.key(0), torch.rand(2, 1, 4, 8), padding=4)
    with pytest.raises(ValueError, match="expected masks of the images' size"):
        random_crop_batch(random.key(0), torch.rand(2, 1, 8, 8), torch.rand(2, 4, 4), crop_targets=True)


def test_a_step_trains_on_the_cropped_images_and_slices_alike() -> None:
    task = TASKS["images"]
    state, batch = task.make_state(0), task.make_batch(1, 6)
    step = compose(loop_events, [random_crop(1)])
    cropped, _ = random_crop_batch(step.init(state).rng("random_crop"), batch[0], padding=1)
    expected = compose(loop_events)(state, (cropped, batch[1])).params
    assert tree.equal(step(state, batch).params, expected)
    assert not tree.equal(compose(loop_events)(state, batch).params, expected)
