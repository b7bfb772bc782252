"""Language models on a text file, from the shell."""

import contextlib
import csv
import io
import json
import math
import pathlib
import re
import shlex
from collections.abc import Callable

import pytest
import torch.nn.functional as F

from purecompose import compose, data, loop_events, losses, optim, to_module
from purecompose.cli import main
from purecompose.cli.settings import read_config
from purecompose.cli.training import checksum as checksum_of
from purecompose.core.state import State
from purecompose.data import CharacterVocabulary
from purecompose.nn import layers, models


TEXT = "".join(f"{i} is {'even' if i % 2 == 0 else 'odd'};\n" for i in range(180))
SMALL = ("--data", "book.txt", "--length", "16", "--model", "gpt(width=8, depth=1, num_heads=2)", "--threads", "1")
SHORT = (*SMALL, "--batch-size", "8", "--duration", "2ep", "--quiet")

VOCABULARY = CharacterVocabulary.of(TEXT)
NUM_TEST = round(0.1 * len(TEXT))
TRAIN_WINDOWS, TEST_WINDOWS = (len(TEXT) - NUM_TEST - 1) // 16, (NUM_TEST - 1) // 16

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(run: Run) -> Run:
    """Run commands in a folder with a text; return status, output and error output."""
    pathlib.Path("book.txt").write_text(TEXT)
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return the folder of a run, for all tests that only read it, with its output in a file beside it."""
    folder = tmp_path_factory.mktemp("trained")
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        pathlib.Path("book.txt").write_text(TEXT)
        assert main(["train", *SHORT, "--out", "a"]) == 0
    (folder / "out.txt").write_text(printed.getvalue())
    return folder / "a"


def checksum(out: str) -> str:
    found = re.search(r"checksum\W+([0-9a-f]{16})", out)
    assert found is not None, out
    return found[1]


def value(out: str, name: str) -> float:
    found = re.search(rf"test {name}\W+([\d.]+)", out)
    assert found is not None, out
    return float(found[1])


def test_a_run_reports_the_metrics_of_a_language_model(run: Run) -> None:
    status, out, err = run("train", *SHORT[:-1])
    assert (status, err) == (0, "")
    assert f"{TRAIN_WINDOWS} windows in batches of 8" in out
    assert f"the vocabulary has {len(VOCABULARY)}; the text's last {TEST_WINDOWS} windows are for testing" in out
    lines = [line for line in out.splitlines() if re.match(r"\d\.0/2 ep ", line)]
    assert len(lines) == 2 and all("perplexity" in line and "accuracy" in line for line in lines)
    assert value(out, "perplexity") == pytest.approx(math.exp(value(out, "loss")), rel=2e-3)


def test_the_command_is_the_hand_written_loop(run: Run) -> None:
    out = run("train", *SHORT, "--optimizer", "sgd(0.5)", "--schedule", "constant", "--seed", "3")[1]
    tokens = VOCABULARY.encode(TEXT)
    end = len(tokens) - NUM_TEST
    batches = data.arrays(*data.text_windows(tokens[:end], 16), 8, drop_last=True)
    net = models.build("gpt", in_shape=(16,), num_classes=len(VOCABULARY), seed=3, width=8, depth=1, num_heads=2)
    state = State.create(
        layers.ClassesSecond(net),
        loss=losses.cross_entropy,
        optimizer=optim.sgd(0.5),
        key=3,
        duration="2ep",
        batches_per_epoch=len(batches),
    )
    step = compose(loop_events)
    for epoch in range(2):
        for batch in batches.epoch(state.key, epoch):
            state = step(state, batch)
    assert checksum(out) == checksum_of(state.params)
    inputs, labels = data.text_windows(tokens[end:], 16)
    logits = to_module(state)(inputs).movedim(1, -1).reshape(-1, len(VOCABULARY)).double()
    assert value(out, "loss") == pytest.approx(F.cross_entropy(logits, labels.flatten()).item(), rel=1e-3)


@pytest.mark.slow
def test_a_folder_keeps_the_vocabulary_and_the_command_stays_short(run: Run, trained: pathlib.Path) -> None:
    config = read_config(trained / "config.toml")
    assert config["vocabulary"] == "".join(sorted(set(TEXT))) and config["length"] == 16
    assert config["data"] == str((trained.parent / "book.txt").resolve())
    command = (trained / "command.txt").read_text()
    assert "--vocabulary" not in command and "--length 16" in command
    words = shlex.split(command)[3:]
    first = checksum((trained.parent / "out.txt").read_text())
    assert checksum(run(*words[: words.index("--out")], "--quiet")[1]) == first
    assert checksum(run("train", "--config", str(trained / "config.toml"), "--quiet")[1]) == first


@pytest.mark.slow
def test_a_given_vocabulary_is_part_of_the_command(run: Run) -> None:
    larger = f"{''.join(sorted(set(TEXT)))}xyz"
    first = run("train", *SHORT, "--vocabulary", larger, "--out", "a")[1]
    words = shlex.split(pathlib.Path("a/command.txt").read_text())[3:]
    assert words[words.index("--vocabulary") + 1] == larger
    assert checksum(run(*words[: words.index("--out")], "--quiet")[1]) == checksum(first)


def test_evaluation_of_the_run_and_of_another_text(run: Run, trained: pathlib.Path) -> None:
    out, a = (trained.parent / "out.txt").read_text(), str(trained)
    status, told, err = run("evaluate", a, "--json")
    found = json.loads(told)
    assert (status, err) == (0, "")
    assert found["loss"] == pytest.approx(value(out, "loss"), rel=1e-3)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-9)
    # Another text may lack characters; the others keep their numbers.
    pathlib.Path("other.txt").write_text("2 is even;\n" * 60)
    status, told, err = run("evaluate", a, "--data", "other.txt", "--json")
    assert (status, err) == (0, "") and json.loads(told)["loss"] != found["loss"]
    pathlib.Path("foreign.txt").write_text("häß is odd;\n" * 60)
    status, _, err = run("evaluate", a, "--data", "foreign.txt")
    assert status == 2 and "3 characters that the vocabulary of 20 lacks: 'h', 'ß', 'ä'" in err
    status, _, err = run("evaluate", a, "--data", "digits")
    assert status == 2 and "digits holds images" in err


def test_predictions_are_characters(run: Run, trained: pathlib.Path) -> None:
    assert run("predict", str(trained), "--out", "p.csv")[0] == 0
    with open("p.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    num = TEST_WINDOWS * 16
    assert [int(row["index"]) for row in rows] == list(range(num))
    assert "".join(row["target"] for row in rows) == TEXT[len(TEXT) - NUM_TEST + 1 :][:num]
    found = json.loads(run("evaluate", str(trained), "--json")[1])
    share = sum(row["class"] == row["target"] for row in rows) / len(rows)
    assert share == pytest.approx(found["accuracy"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("always::UserWarning")
def test_a_methods_warning_is_one_line_and_only_printed_by_the_run(run: Run) -> None:
    status, _, err = run("train", *SHORT, "--algorithms", "squeeze_excite", "--out", "a")
    assert status == 0 and err.startswith("warning: ") and err.count("\n") == 1 and "Conv2d" in err
    assert run("plan", "a")[2] == err
    assert run("evaluate", "a")[2] == run("predict", "a")[2] == ""


REFUSED = [
    (["--model", "cnn"], "--model: cnn is a network for images; for text there is gpt"),
    (["--data", "digits"], "--length: digits holds images; --length is for text"),
    (["--data", "nowhere.txt"], "--data: [Errno 2] No such file or directory: 'nowhere.txt'"),
    (["--data", "latin.txt"], "latin.txt is not UTF-8: byte 2 is 0xfc"),
    (["--length", "500"], "book.txt is too short for windows of 500: it has"),
    (["--length", "0"], "--length: 0: expected a number of characters"),
    (["--vocabulary", "aa"], "--vocabulary: CharacterVocabulary: expected each character once"),
    (["--vocabulary", "abc"], "characters that the vocabulary of 3 lacks"),
    (["--model", "gpt(widht=4)"], "gpt has no option 'widht'; did you mean 'width'?"),
    (["--duration", "3sec"], "expected a number of epochs, batches, updates, samples or tokens"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_usage_errors_are_one_line_and_status_2(run: Run, arguments: list[str], said: str) -> None:
    pathlib.Path("latin.txt").write_bytes("grün".encode("latin-1") * 100)
    status, out, err = run("train", *SMALL, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_settings_for_text_are_refused_for_images(run: Run) -> None:
    for arguments, said in (
        (("--model", "gpt"), "--model: gpt is a network for text, but the data are images"),
        (("--vocabulary", "ab"), "--vocabulary: digits holds images"),
        (("--duration", "5tok"), "expected a number of epochs, batches, updates or samples"),
    ):
        status, _, err = run("train", *arguments)
        assert status == 2 and said in err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # for attention under vmap on a CPU
def test_seeds_train_a_population(run: Run) -> None:
    status, out, _ = run("train", *SHORT, "--seeds", "2", "--duration", "3ba", "--out", "a")
    assert status == 0 and re.search(r"test loss\W+[\d.]+ \([\d.]+ to", out)
    found = json.loads(run("evaluate", "a", "--json")[1])
    alone = run("train", *SHORT, "--seed", "1", "--duration", "3ba")[1]
    assert found["loss"][1] == pytest.approx(value(alone, "loss"), rel=1e-3)
    status, _, err = run("predict", "a")
    assert status == 2 and "trained a population" in err
