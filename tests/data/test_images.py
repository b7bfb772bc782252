"""Image sets: the digits, archives and folders are read correctly or refused with a specific error."""

import pathlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from purecompose import data
from purecompose.data import ImageData, load


MNIST = Path(__file__).parents[2].parent / "shared" / "data" / "mnist.npz"


def small_set() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    draws = np.random.default_rng(0)
    train = draws.integers(0, 256, (7, 5, 4), dtype=np.uint8), np.array([0, 1, 2, 3, 2, 1, 0], dtype=np.uint8)
    return *train, draws.integers(0, 256, (3, 5, 4), dtype=np.uint8), np.array([3, 0, 1], dtype=np.uint8)


def write_npz(path: Path, **changes: np.ndarray) -> Path:
    members: dict[str, Any] = dict(zip(("x_train", "y_train", "x_test", "y_test"), small_set(), strict=True)) | changes
    np.savez(path, **members)
    return path


def check_small_set(data: ImageData) -> None:
    """Compare with the same normalisation written out in float64 numpy."""
    train, train_labels, test, test_labels = small_set()
    mean, std = train.astype(np.float64).mean(), train.astype(np.float64).std()
    for inputs, raw in ((data.train_inputs, train), (data.test_inputs, test)):
        assert inputs.dtype == torch.float32 and inputs.is_contiguous()
        np.testing.assert_allclose(inputs.numpy()[:, 0], (raw - mean) / std, rtol=1e-5, atol=1e-6)
    assert data.train_targets.dtype == data.test_targets.dtype == torch.int64
    assert data.train_targets.tolist() == train_labels.tolist()
    assert data.test_targets.tolist() == test_labels.tolist()
    assert (data.num_classes, data.in_shape) == (4, (1, 5, 4))


def test_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn carries the digits")
    data = load("digits")
    assert data.train_inputs.shape == (1437, 1, 8, 8) and data.test_inputs.shape == (360, 1, 8, 8)
    assert (data.num_classes, data.in_shape) == (10, (1, 8, 8))
    bunch = datasets.load_digits()
    inputs = torch.cat([data.train_inputs, data.test_inputs])
    targets = torch.cat([data.train_targets, data.test_targets])
    # Rescaled to 0 to 16 (integers, two of whose values determine the scale), all images and labels are
    # there.
    raw = (inputs - inputs.min()) / (inputs.max() - inputs.min()) * 16
    found = sorted(
        (image.round().int().flatten().tolist(), int(label)) for image, label in zip(raw, targets, strict=True)
    )
    stored = zip(bunch.images, bunch.target, strict=True)
    assert found == sorted((image.astype(int).flatten().tolist(), int(label)) for image, label in stored)


def test_digits_are_split_and_normalised_the_same_way_every_time():
    pytest.importorskip("sklearn.datasets", reason="scikit-learn carries the digits")
    torch.manual_seed(1)
    first = load("digits")
    torch.manual_seed(2)
    second = load("digits")
    assert all(torch.equal(a, b) for a, b in zip(first[:4], second[:4], strict=True))
    std, mean = torch.std_mean(first.train_inputs.double(), correction=0)
    assert abs(mean) < 1e-6 and abs(std - 1) < 1e-6
    # A fixed split, but a mixed one: every class is held out about 36 times.
    assert all(20 <= count <= 52 for count in first.test_targets.bincount().tolist())


def test_npz_in_both_spellings(tmp_path):
    check_small_set(load(write_npz(tmp_path / "a.npz")))
    other = ("train_images", "train_labels", "test_images", "test_labels")
    members: dict[str, Any] = dict(zip(other, small_set(), strict=True))
    np.savez(tmp_path / "b.npz", **members)
    check_small_set(load(tmp_path / "b.npz"))


@pytest.mark.parametrize("dtype", [">u2", "<i4", ">f4", "float64", "float16"])
def test_npz_of_other_types(tmp_path, dtype):
    train, labels, test, _ = small_set()
    changes = {"x_train": train.astype(dtype), "x_test": test.astype(dtype), "y_train": labels.astype(">u2")}
    check_small_set(load(write_npz(tmp_path / "a.npz", **changes)))


def test_npz_in_colour_is_normalised_channel_by_channel(tmp_path):
    draws = np.random.default_rng(1)
    train, test = (draws.normal((1.0, -2.0, 9.0), (1.0, 3.0, 0.1), (7, 6, 5, 3)), draws.normal(size=(3, 6, 5, 3)))
    train[..., 2] = 4.0  # A channel without variation must not give NaN.
    data = load(write_npz(tmp_path / "a.npz", x_train=train, x_test=test))
    assert data.in_shape == (3, 6, 5)
    std, mean = torch.std_mean(data.train_inputs.double(), dim=(0, 2, 3), correction=0)
    np.testing.assert_allclose(mean, [0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(std, [1, 1, 0], atol=1e-6)
    expected = (test[..., 1] - train[..., 1].mean()) / train[..., 1].std()
    np.testing.assert_allclose(data.test_inputs[:, 1], expected, rtol=1e-4, atol=1e-5)


def test_a_class_that_is_only_in_the_test_set_counts(tmp_path):
    assert load(write_npz(tmp_path / "a.npz", y_test=np.array([3, 0, 8]))).num_classes == 9


@pytest.mark.skipif(not MNIST.is_file(), reason="no mnist.npz beside the repository")
def test_mnist():
    data = load(MNIST)
    assert data.train_inputs.shape == (60_000, 1, 28, 28) and data.test_inputs.shape == (10_000, 1, 28, 28)
    # The known first labels and the known count of each digit in the training set.
    assert data.train_targets[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.test_targets[:5].tolist() == [7, 2, 1, 0, 4]
    assert data.train_targets.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    # The commonly quoted mean and standard deviation of MNIST, 0.1307 and 0.3081, on the scale 0 to 1.
    assert float(data.train_inputs.min()) == pytest.approx(-0.1307 / 0.3081, abs=1e-3)
    assert float(data.train_inputs.max()) == pytest.approx((1 - 0.1307) / 0.3081, abs=1e-3)


def test_unknown_name_lists_what_is_known(tmp_path):
    with pytest.raises(ValueError, match=r"'digit', and no such .* Known are 'digits', .*\.npz.*"):
        load("digit")
    with pytest.raises(ValueError, match=r"Known are 'digits'"):
        load(tmp_path / "missing.npz")
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"a\.csv is neither"):
        load(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": np.zeros(6, np.int64)}, r"the train set has 7 images and 6 labels"),
        ({"y_test": np.zeros((3, 1), np.int64)}, r"the test set has labels torch.int64 \(3, 1\)"),
        ({"y_test": np.zeros(3)}, r"labels torch.float32 \(3,\); expected integers"),
        ({"y_train": np.arange(7) - 1}, r"the label -1"),
        ({"x_test": np.zeros((3, 4, 4))}, r"train images are \(1, 5, 4\) and test images \(1, 4, 4\)"),
        ({"x_train": np.zeros((7, 20))}, r"expected images of shape .* got \(7, 20\)"),
        ({"x_train": np.zeros((7, 3, 5, 5))}, r"at most 4 channels, got \(7, 3, 5, 5\)"),
        ({"x_train": np.zeros((0, 5, 4)), "y_train": np.zeros(0, np.int64)}, r"the train set is empty"),
        ({"x_test": np.full((3, 5, 4), np.nan)}, r"the test set has pixels that are not finite"),
        ({"x_train": np.array(["a"] * 7)}, r"x_train\] holds <U1"),
        ({"x_train": np.array([None] * 7)}, r"plain arrays: .*allow_pickle"),
    ],
)
def test_npz_whose_arrays_do_not_fit_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=rf"a\.npz.*{message}"):
        load(write_npz(tmp_path / "a.npz", **changes))


def test_a_file_that_is_not_an_npz_archive_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros(3))
    with pytest.raises(ValueError, match=r"a\.npz .*expected x_train, .*; found images"):
        load(tmp_path / "a.npz")
    for content in (b"", b"no archive", write_npz(tmp_path / "b.npz").read_bytes()[:200]):
        (tmp_path / "c.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"c\.npz cannot be read as an \.npz archive"):
            load(tmp_path / "c.npz")
    with (tmp_path / "d.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match=r"d\.npz cannot be read"):
        load(tmp_path / "d.npz")


@pytest.mark.parametrize(
    ("package", "source"), [("sklearn.datasets", "digits"), ("numpy", "a.npz")], ids=["scikit-learn", "numpy"]
)
def test_missing_package_names_the_extra(tmp_path, monkeypatch, package, source):
    write_npz(tmp_path / "a.npz")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"purecompose\[cli\]"):
        load(source)


def pillow() -> Any:
    return pytest.importorskip("PIL.Image", reason="pillow is not installed")


def draw(path: pathlib.Path, value: int, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((size[1], size[0], 3), value, np.uint8)
    pixels[0, 0, 0] = 200
    pillow().fromarray(pixels).convert(mode).save(path)


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
    pillow().fromarray(np.ones((4, 6), dtype)).save(folder / "train" / "dog" / "1.tif")
    with pytest.raises(ValueError, match=rf"1.tif has {found} for each pixel .*npz"):
        data.load(folder)


def test_images_for_testing_are_needed(tmp_path):
    draw(tmp_path / "train" / "cat" / "0.png", 0)
    with pytest.raises(FileNotFoundError, match="expected images by class"):
        data.load(tmp_path)
