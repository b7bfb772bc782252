"""Folders of images by class: files that are read, and files that are refused."""

import pathlib

import numpy as np
import pytest
import torch

from purecompose import data


image_module = pytest.importorskip("PIL.Image", reason="pillow is not installed")


def draw(path: pathlib.Path, value: int, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((size[1], size[0], 3), value, np.uint8)
    pixels[0, 0, 0] = 200
    image_module.fromarray(pixels).convert(mode).save(path)


def make_folder(folder: pathlib.Path, mode: str = "RGB", test: str = "test") -> pathlib.Path:
    for part, num in (("train", 3), (test, 2)):
        for label, name in enumerate(("cat", "dog")):
            for index in range(num):
                draw(folder / part / name / f"{index}.png", 50 * label + index, mode=mode)
    return folder


@pytest.mark.parametrize("test", ["test", "val"])
@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_images_and_labels(tmp_path, mode, channels, test):
    found = data.load(make_folder(tmp_path, mode, test))
    assert found.in_shape == (channels, 4, 6) and found.num_classes == 2
    assert found.train_targets.tolist() == [0, 0, 0, 1, 1, 1] and found.test_targets.tolist() == [0, 0, 1, 1]
    raw = torch.tensor([0, 1, 2, 50, 51, 52]).float()
    last = found.train_inputs[:, -1, 1, 1]
    torch.testing.assert_close((last - last[0]) / (last[3] - last[0]), (raw - raw[0]) / 50)
    torch.testing.assert_close(found.train_inputs.mean((0, 2, 3)), torch.zeros(channels), atol=1e-5, rtol=0)


def test_files_that_cannot_be_read_are_named(tmp_path):
    folder = make_folder(tmp_path)
    draw(folder / "train" / "dog" / "9.png", 0, size=(5, 5))
    with pytest.raises(ValueError, match=r"dog.9.png is 5 x 5, and .*0.png is 6 x 4: expected images of one size"):
        data.load(folder)
    (folder / "train" / "dog" / "9.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"9.png cannot be read as an image"):
        data.load(folder)
    (folder / "train" / "dog" / "9.png").unlink()
    draw(folder / "test" / "cow" / "0.png", 0)
    with pytest.raises(ValueError, match=r"has classes that .*train lacks: cow"):
        data.load(folder)
    (folder / "train" / "cow").mkdir()
    with pytest.raises(ValueError, match=r"cow has no images"):
        data.load(folder)


@pytest.mark.parametrize(("dtype", "found"), [(np.uint16, "more than 8 bits"), (np.float32, "floats")])
def test_values_that_would_be_clipped_are_refused(tmp_path, dtype, found):
    folder = make_folder(tmp_path)
    image_module.fromarray(np.ones((4, 6), dtype)).save(folder / "train" / "dog" / "1.tif")
    with pytest.raises(ValueError, match=rf"1.tif has {found} for each pixel .*npz"):
        data.load(folder)


def test_images_for_testing_are_needed(tmp_path):
    draw(tmp_path / "train" / "cat" / "0.png", 0)
    with pytest.raises(FileNotFoundError, match="a folder train, and none of test, val"):
        data.load(tmp_path)
