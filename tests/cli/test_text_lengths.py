"""Language models from the shell: windows of other lengths, and points of a run in tokens and samples."""

import json
import pathlib
from collections.abc import Callable

import pytest

from purecompose.cli import main


SMALL = ("--data", "book.txt", "--length", "16", "--model", "gpt(width=8, depth=1, num_heads=2)", "--threads", "1")
SHORT = (*SMALL, "--batch-size", "8", "--duration", "1ep", "--quiet")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run commands in a folder with a text; return status, output and error output."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("book.txt").write_text("".join(f"{i} is {'even' if i % 2 == 0 else 'odd'};\n" for i in range(180)))

    def command(*arguments: str) -> tuple[int, str, str]:
        status = main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


@pytest.mark.slow
def test_windows_of_another_length_are_evaluated(run: Run) -> None:
    run("train", *SHORT, "--algorithms", "alibi", "--out", "a")
    told = {n: json.loads(run("evaluate", "a", "--length", n, "--json")[1])["loss"] for n in ("8", "16", "32")}
    assert told["16"] == json.loads(run("evaluate", "a", "--json")[1])["loss"]
    assert len(set(told.values())) == 3 and all(1 < loss < 4 for loss in told.values())
    for length, said in (("0", "--length: 0: expected"), ("500", "too short for windows of 500")):
        status, _, err = run("evaluate", "a", "--length", length)
        assert status == 2 and said in err and err.count("\n") == 1


@pytest.mark.slow
def test_a_network_with_learned_positions_refuses_longer_windows(run: Run) -> None:
    run("train", *SHORT, "--out", "a")
    status, _, err = run("evaluate", "a", "--length", "32")
    assert status == 2 and "--length" in err and err.count("\n") == 1


def test_a_plan_at_a_point_in_tokens_and_samples(run: Run) -> None:
    method = "seq_length_warmup(0.5, 4, 16, 4)"
    for duration, at in (("1280tok", "0.5dur"), ("10ba", "640tok"), ("80sp", "0.5dur"), ("80sp", "40sp")):
        status, out, err = run("plan", *SMALL, "--batch-size", "8", "--duration", duration, "--at", at,
                               "--algorithms", method)  # fmt: skip
        assert (status, err) == (0, "") and "seq_length_warmup" in out
    status, _, err = run("plan", *SMALL, "--batch-size", "8", "--duration", "1280tok", "--at", "1408tok")
    assert status == 2 and "the run ends earlier, after 10 batches" in err
