"""Methods as transforms of samples: PIL images and tensors keep their type, keys decide, masks are transformed too."""

import pickle
from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from torch import Tensor

from purecompose import data, random, tree
from purecompose.algorithms.images.samples import SampleTransform, as_tensor, like_before
from purecompose.functional import (
    augmix_batch,
    colout_batch,
    cutout_batch,
    mixup_batch,
    randaugment_batch,
    sample_transform,
)


SETTINGS: dict[str, dict[str, Any]] = {
    "augmix": {"width": 2},
    "colout": {"p_row": 0.2, "p_col": 0.4},
    "cutout": {"num_holes": 2},
    "randaugment": {},
}
BATCHES: dict[str, Any] = {
    "augmix": augmix_batch,
    "colout": colout_batch,
    "cutout": cutout_batch,
    "randaugment": randaugment_batch,
}
CORES = {name: partial(core, **SETTINGS[name]) for name, core in BATCHES.items()}
TRANSFORMS = {name: sample_transform(core, **SETTINGS[name]) for name, core in BATCHES.items()}
colout_transform = partial(sample_transform, colout_batch)
KEY = random.key(5)
Pair = namedtuple("Pair", ["image", "label"])

each_method = pytest.mark.parametrize("name", TRANSFORMS)


def make_pixels(channels: int = 3, height: int = 20, width: int = 15, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (channels, height, width), generator=generator, dtype=torch.uint8)


def make_pil(mode: str = "RGB", height: int = 20, width: int = 15, seed: int = 0) -> Image.Image:
    pixels = make_pixels(len(Image.new(mode, (1, 1)).getbands()), height, width, seed)
    return Image.frombytes(mode, (width, height), bytes(pixels.permute(1, 2, 0).flatten().tolist()))


def pixels_of(image: Image.Image) -> list[Any]:
    """Return the pixels, read by Pillow's slow method."""
    return [image.getpixel((x, y)) for y in range(image.height) for x in range(image.width)]


def size_after(name: str) -> tuple[int, int]:
    return (16, 9) if name == "colout" else (20, 15)


# Container types


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *[(name, mode) for name in TRANSFORMS for mode in ("L", "RGB")],
        *[(name, mode) for name in ("colout",) for mode in ("LA", "RGBA", "CMYK", "YCbCr", "HSV")],
    ],
)
def test_a_pil_image_stays_a_pil_image_of_its_mode(name, mode):
    image = make_pil(mode)
    before = pixels_of(image)
    changed = TRANSFORMS[name](image, KEY)
    assert isinstance(changed, Image.Image) and changed.mode == mode
    assert (changed.height, changed.width) == size_after(name)
    assert pixels_of(image) == before != pixels_of(changed)


@each_method
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [1, 3])
def test_tensors_keep_their_dtype_and_number_of_dims(name, dtype, channels):
    image = make_pixels(channels) if dtype == torch.uint8 else (make_pixels(channels) / 255).to(dtype)
    height, width = size_after(name)
    assert CORES[name](KEY, image).shape == (channels, height, width)
    batch = torch.stack([image, image])
    for result in (CORES[name](KEY, batch), TRANSFORMS[name](batch, KEY)):
        assert result.shape == (2, channels, height, width) and result.dtype == dtype
    alone = TRANSFORMS[name](image, KEY)
    assert type(alone) is Tensor and alone.dtype == dtype and alone.shape == (channels, height, width)
    assert alone.isfinite().all() and not torch.equal(alone, image)


@each_method
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_pil_image_and_its_tensor_become_the_same(name, mode):
    image = make_pil(mode)
    changed = TRANSFORMS[name](image, KEY)
    expected = TRANSFORMS[name](make_pixels(len(image.getbands())), KEY)
    assert torch.equal(as_tensor(changed), expected)


@given(st.sampled_from(["L", "RGB"]), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_pil_images_and_tensors_give_the_same_result(mode, height, width, seed):
    image = make_pil(mode, height, width, seed)
    tensor = as_tensor(image)
    for y in range(height):
        for x in range(width):
            pixel = image.getpixel((x, y))
            assert tensor[:, y, x].tolist() == list(pixel if isinstance(pixel, tuple) else (pixel,))
    assert pixels_of(like_before(tensor, image)) == pixels_of(image)
    larger = torch.cat((tensor, tensor), 1)
    assert pixels_of(like_before(larger, image)) == 2 * pixels_of(image)


def test_attributes_of_an_image_are_kept():
    image = make_pil("RGB")
    image.info["dpi"] = (72, 72)
    assert TRANSFORMS["colout"](image, KEY).info == {"dpi": (72, 72)}


# Samples


@each_method
def test_the_image_is_found_in_a_sample_and_the_rest_is_unchanged(name):
    transform, image = TRANSFORMS[name], make_pixels()
    expected, label = transform(image, KEY), object()
    for sample in ((image, label), [image, label], (image,), Pair(image, label)):
        changed = transform(sample, KEY)
        assert type(changed) is type(sample) and sample[0] is image
        assert torch.equal(changed[0], expected) and list(changed[1:]) == list(sample[1:])
    make = partial(sample_transform, BATCHES[name], **SETTINGS[name])
    sample = {"image": image, "label": label}
    changed = make(input_field="image")(sample, KEY)
    assert torch.equal(changed["image"], expected) and changed["label"] is label and sample["image"] is image
    assert torch.equal(make(input_field=1)((label, image), KEY)[1], expected)


@given(st.integers(0, 2**64 - 1), st.integers(1, 12), st.integers(1, 12), st.sampled_from(["L", "P", "I;16", "I", "F"]))
def test_masks_lose_the_rows_and_columns_of_their_image(seed, height, width, mode):
    numbers = torch.arange(height * width).view(1, height, width)
    dtype = {"I;16": torch.int16, "I": torch.int32, "F": torch.float32}.get(mode, torch.uint8)
    mask = like_before(numbers.to(dtype), Image.new(mode, (width, height)))
    if mode == "P":
        mask.putpalette([7 * place % 256 for place in range(768)])
    image, key = numbers.expand(3, -1, -1).float(), random.key(seed)
    changed, smaller = colout_transform(p_row=0.3, p_col=0.5)((image, mask), key)
    assert isinstance(smaller, Image.Image) and smaller.mode == mode
    assert (smaller.height, smaller.width) == changed.shape[1:]
    assert pixels_of(smaller) == changed[0].to(dtype).flatten().tolist()
    if mode == "P":
        assert smaller.getpalette() == mask.getpalette()


def test_masks_of_any_kind_are_transformed_and_other_targets_are_not():
    image, mask, small = make_pil("RGB"), make_pil("L", seed=1), make_pil("L", 5, 5)
    sample = {"image": image, "masks": [mask, make_pixels(1), small, "name", 3]}
    transform = colout_transform(p_row=0.2, p_col=0.4, input_field="image", target_field="masks")
    changed = transform(sample, KEY)
    assert changed["image"].size == changed["masks"][0].size == (9, 16)
    core: tuple[Tensor, Tensor] = colout_batch(KEY, as_tensor(image), as_tensor(mask), p_row=0.2, p_col=0.4)
    assert torch.equal(as_tensor(changed["image"]), core[0]) and torch.equal(as_tensor(changed["masks"][0]), core[1])
    assert changed["masks"][1].shape == (1, 16, 9) and changed["masks"][2].size == (5, 5)
    assert changed["masks"][3:] == ["name", 3] and sample["masks"][0] is mask

    # A target without a mask is returned as the same object, and so is a target that is ignored.
    for target in (7, None, [small, 3], {"box": (1, 2)}):
        assert colout_transform()((image, target), KEY)[1] is target
    assert colout_transform(resize_target=False)((image, mask), KEY)[1] is mask
    plain = make_pixels(1)[0]
    assert colout_transform(p_row=0.2, p_col=0.4)((make_pixels(), plain), KEY)[1] is plain
    insisted = colout_transform(p_row=0.2, p_col=0.4, resize_target=True)
    assert insisted((make_pixels(), plain), KEY)[1].shape == (16, 9)
    with pytest.raises(ValueError, match="there are no targets"):
        insisted(image, KEY)


# Sources of randomness


@each_method
def test_the_same_source_gives_the_same_and_others_differ(name):
    transform, image = TRANSFORMS[name], make_pixels()
    by_key = [transform(image, random.key(seed)) for seed in range(6)]
    by_rng = [transform(image, random.Rng(random.key(0)).per_example(example)) for example in range(6)]
    assert torch.equal(by_rng[2], transform(image, random.Rng(random.key(0)).per_example(2)))
    by_generator = [transform(image, torch.Generator().manual_seed(seed)) for seed in range(6)]
    assert torch.equal(by_generator[3], transform(image, torch.Generator().manual_seed(3)))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        by_global = [transform(image) for _ in range(6)]
        torch.manual_seed(1)
        assert torch.equal(transform(image), by_global[0])
    for results in (by_key, by_rng, by_generator, by_global):
        assert len({tuple(result.flatten().tolist()) for result in results}) > 3


class Pictures:
    """A data set of PIL images with their masks and numbers."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return make_pil("RGB", seed=index), make_pil("L", seed=100 + index)


class Opened:
    """A transform that returns tensors, which can be collated."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, sample: Any, *rng: Any) -> Any:
        return tuple(as_tensor(member) for member in self.transform(sample, *rng))


@pytest.mark.parametrize("rng", ["key", "torch", None])
def test_workers_give_the_same_bits(rng):
    for transform in (
        colout_transform(p_row=0.2, p_col=0.4),
        sample_transform(cutout_batch),
        sample_transform(randaugment_batch, depth=1),
    ):
        epochs = []
        for workers, batch_size in ((0, 4), (2, 3)):
            loader = data.loader(Pictures(), batch_size, workers=workers, transform=Opened(transform), rng=rng)
            epochs.append([torch.cat(parts) for parts in zip(*loader.epoch(KEY, epoch=2), strict=True)])
            loader.close()
        assert tree.equal(epochs[0], epochs[1])
        order = loader.order(KEY, 2).tolist()
        untouched = torch.stack([as_tensor(Pictures()[index][0]) for index in order])
        assert epochs[0][0].shape != untouched.shape or not torch.equal(epochs[0][0], untouched)


def test_samples_and_epochs_have_different_draws():
    class Same:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            return torch.arange(400).view(1, 20, 20)

    for transform in (colout_transform(), sample_transform(cutout_batch)):
        loader = data.loader(Same(), 4, transform=transform, rng="key")
        seen = [image for epoch in range(3) for batch in loader.epoch(KEY, epoch) for image in batch]
        assert len({tuple(image.flatten().tolist()) for image in seen}) == 12


@each_method
def test_transforms_pickle_and_are_the_factories_settings(name):
    transform = pickle.loads(pickle.dumps(TRANSFORMS[name]))  # noqa: S301
    assert torch.equal(transform(make_pixels(), KEY), TRANSFORMS[name](make_pixels(), KEY))


# Errors


def test_bad_settings_are_refused_when_made():
    bad: list[dict[str, Any]] = [{"input_field": 1.5}, {"target_field": True}]
    for keys in bad:
        with pytest.raises(TypeError, match=f"{next(iter(keys))}="):
            colout_transform(**keys)
    with pytest.raises(ValueError, match="colout_batch: p_row: expected a finite number in"):
        colout_transform(p_row=2.0)
    with pytest.raises(TypeError, match=r"colout_batch\(\) got an unexpected keyword argument 'p_rows'; did you mean"):
        colout_transform(p_rows=0.5)
    with pytest.raises(TypeError, match="mixup_batch needs a whole batch"):
        sample_transform(mixup_batch)


def test_arguments_other_than_images_and_sources_are_refused():
    transform = SampleTransform(lambda key, image: image.flip(-1))
    for sample in (3, "image.png", (None, 1), {"image": make_pil()}):
        with pytest.raises(TypeError, match="expected an image, from PIL or as a tensor"):
            transform(sample, KEY)
    for mode in ("1", "P", "I", "F"):
        with pytest.raises(TypeError, match=f"expected a PIL image of mode L, .*got '{mode}'"):
            transform(Image.new(mode, (4, 4)), KEY)
    with pytest.raises(TypeError, match=r"got 'P'; use image.convert\('RGB'\)"):
        transform(Image.new("P", (4, 4)), KEY)
    with pytest.raises(TypeError, match=r"got '1'; use image.convert\('L'\)"):
        colout_transform()((make_pil(), Image.new("1", (15, 20))), KEY)
    with pytest.raises(TypeError, match=r"expected a key, a torch.Generator or None, got 3 \(int\)"):
        transform(make_pil(), 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(KeyError, match="has no member 'picture'"):
        sample_transform(cutout_batch, input_field="picture")({"image": make_pil()}, KEY)


@pytest.mark.parametrize("core", [augmix_batch, randaugment_batch])
def test_floats_out_of_range_are_refused_and_not_cut_off(core):
    make = partial(sample_transform, core)
    image = make_pixels() / 255
    normalised = (image - 0.5) / 0.25
    with pytest.raises(
        ValueError, match=rf"{core.__name__}: .*got values from -2 to .*; apply it before Normalize, or"
    ):
        make()(normalised, KEY)
    with pytest.raises(ValueError, match="value_range="):
        make()((make_pixels().float(), 3), KEY)
    with pytest.raises(ValueError, match="to inf"):
        make()(torch.where(image == image.max(), torch.inf, image), KEY)
    assert make(value_range=(-2, 2))(normalised, KEY).shape == image.shape
    # For each channel, with values that half precision rounds away, and with pixels that are NaN.
    bounds = ((0.0, 1.0, 2.0), (1.0, 2.0, 3.0))
    shifted = image + torch.arange(3.0).view(3, 1, 1)
    assert make(value_range=bounds)(shifted.half(), KEY).dtype == torch.float16
    with pytest.raises(ValueError, match="got values from"):
        make(value_range=bounds)(shifted.flip(0), KEY)
    with_nan = torch.where(image == image.max(), torch.nan, image)
    assert make()(with_nan, KEY).shape == image.shape
    assert make()(torch.zeros(3, 0, 4), KEY).shape == (3, 0, 4)
    # Pixels are moved or covered whatever their values are.
    for transform in (colout_transform(), sample_transform(cutout_batch)):
        transform(normalised, KEY)


def test_two_methods_draw_different_numbers_from_one_source():
    share_of_equal = 0
    one = sample_transform(randaugment_batch, depth=1, augmentation_set=("brightness",))
    two = sample_transform(augmix_batch, depth=1, width=1, augmentation_set=("brightness",))
    for example in range(20):
        rng = random.Rng(random.key(0)).per_example(example)
        share_of_equal += int(torch.equal(one._key(rng), two._key(rng)))  # pyright: ignore[reportArgumentType]
    assert share_of_equal == 0
