"""`ablate` and `lr-range` from the shell."""

import pathlib

import pytest

from purecompose.cli import main


SMALL = ("--model", "mlp(hidden=16)", "--duration", "8ba")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.filterwarnings("ignore:the checkpoint of batch")
def test_ablate_prints_a_table_and_continues_in_its_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    command = ("ablate", *SMALL, "--algorithms", "mixup", "--seeds", "5", "--seed", "3", "--out", str(tmp_path / "a"))
    status, out, _ = run(capsys, *command)
    assert status == 0 and "[1/2] all: eval/accuracy" in out and "2 subsets of 1 methods, 5 seeds each" in out
    assert (tmp_path / "a" / "none" / "seeds-3-to-7").is_dir()
    assert run(capsys, *command)[1].splitlines()[0] == out.splitlines()[0]
    status, _, err = run(capsys, *command, "--metric", "eval/loss")
    assert status == 2 and "metric was eval/accuracy, and is eval/loss" in err


def test_lr_range_suggests_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "lr-range", *SMALL, "--batches", "20", "--high", "0.1")
    assert status == 0 and "suggested lr: " in out
