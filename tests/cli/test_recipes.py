"""`train --recipe`: the published recipes run by their names."""

import pathlib

import numpy as np
import pytest

from purecompose import recipe
from purecompose.cli import main


NETWORK = ("--model", "resnet8(width=16)", "--duration", "4ba", "--batch-size", "16", "--quiet")


@pytest.mark.parametrize(
    ("name", "model"), [(name, "resnet8(width=16)") for name in ("mild", "medium", "hot")] + [("mnist-fast", "cnn")]
)
def test_a_recipe_for_images_runs(name: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipe", name, *NETWORK, "--model", model]) == 0
    captured = capsys.readouterr()
    assert "test accuracy" in captured.out and captured.err == ""


def test_a_recipe_for_colour_images_runs_in_slices(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (64, 12, 12, 3), dtype=np.uint8)
    names = {
        f"{part}_{what}": value
        for part in ("train", "test")
        for what, value in {"images": images, "labels": np.arange(64) % 10}.items()
    }
    np.savez(tmp_path / "images.npz", **names)
    given = ["train", "--recipe", "cifar10-fast", "--data", str(tmp_path / "images.npz"), "--batch-size", "16"]
    given += ["--model", "airbench(widths=(4, 6))", "--duration", "3ba", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(given) == 0
    assert "test accuracy" in capsys.readouterr().out
    assert 'microbatches = "2"' in (tmp_path / "run" / "config.toml").read_text()


def test_a_recipe_for_text_runs_with_its_optimizer_and_batch_size(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("abcdefgh" * 1000)
    given = ["train", "--recipe", "text-fast", "--data", str(book), "--model", "gpt(width=16, depth=4)"]
    assert main([*given, "--length", "16", "--duration", "3ba", "--out", str(tmp_path / "run")]) == 0
    assert f"in batches of {recipe('text-fast').batch_size}" in capsys.readouterr().out
    config = (tmp_path / "run" / "config.toml").read_text()
    assert "recipe('text-fast')" in config and 'precision = "bf16"' in config
    assert main(["train", "--recipe", "text-fast", *NETWORK]) == 2
    assert "--optimizer: by_pattern: '*blocks.*' matches no parameter" in capsys.readouterr().err
    assert main([*given, "--schedule", "cosine"]) == 2
    assert "its optimizer has a schedule; leave out --schedule" in capsys.readouterr().err


def test_the_settings_are_the_published_ones() -> None:
    mild, hot = ({method.name: method.config for method in recipe(name).methods} for name in ("mild", "hot"))
    assert mild["label_smoothing"]["smoothing"] == 0.08 and hot["label_smoothing"]["smoothing"] == 0.13
    assert hot["mixup"]["alpha"] == 0.25 and hot["randaugment"]["depth"] == 1 and hot["randaugment"]["severity"] == 9
    resizing = hot["progressive_resizing"]
    assert [resizing[name] for name in ("initial_scale", "delay_fraction", "finetune_fraction")] == [0.6, 0.2, 0.2]
    assert [method.name for method in recipe("mild").methods[:3]] == ["blurpool", "channels_last", "ema"]


def test_a_recipe_together_with_a_list_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipe", "mild", "--algorithms", "mixup", *NETWORK]) == 2
    assert "--recipe: a recipe is a list of algorithms, as is --algorithms; give one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hot"], "Output size is too small; in the stage forward"),
        (["mild", "--model", "mlp"], "in the stage forward"),
        (["hot", "--data", "book.txt"], "progressive_resizing: expected images"),
    ],
)
@pytest.mark.filterwarnings("ignore:(blurpool|channels_last|stochastic_depth)")
def test_a_recipe_that_does_not_fit_says_why(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("book.txt").write_text("abcdefgh" * 1000)
    assert main(["train", "--recipe", *arguments, "--duration", "4ba", "--quiet"]) == 1
    assert said in capsys.readouterr().err
