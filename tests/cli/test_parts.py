"""Wrong settings are reported before the data are loaded, with what was meant."""

import dataclasses
import pathlib
from collections.abc import Callable

import pytest

from purecompose.cli import parts
from purecompose.cli.settings import Settings


Run = Callable[..., tuple[int, str, str]]

WRONG = {
    "model": ("cnn(widht=3)", "did you mean 'width'?"),
    "algorithms": ("mixup(alpa=1)", "mixup has no parameter 'alpa'; did you mean 'alpha'?"),
    "loss": ("mse", "nown: binary_cross_entropy, cross_entropy; others need a program: pc.train("),
    "schedule": ("cosin", "no schedule is called 'cosin'; did you mean 'cosine'"),
    "optimizer": ("sgd(lr=-1)", "sgd: lr: expected a finite number >= 0, got -1"),
    "duration": ("5tok", "5tok: expected a number of epochs, batches"),
    "scale_schedule": ("0", "expected a finite number > 0"),
    "batch_size": ("0", "batch_size: expected an int >= 1"),
    "microbatches": ("3x", "expected a number of slices, at least 1, or auto"),
    "seeds": ("0", "seeds: expected an int >= 1"),
    "seed": ("-1", "expected a seed in [0, 2**64)"),
    "precision": ("fp17", "no precision is called 'fp17'; did you mean"),
    "device": ("cudaa", "'cudaa' cannot be used here; there is cpu"),
    "threads": ("1000000", "threads: expected an int in [1, 1024]"),
    "eval_every": ("-1ep", "eval_every='-1ep': expected a positive time"),
    "validation": ("2", "expected a finite number in [0, 1)"),
    "patience": ("0ep", "patience='0ep': expected a positive time"),
    "checkpoint_every": ("0ep", "checkpoint_every='0ep': expected a positive time"),
    "keep": ("0", "expected a number of checkpoints, at least 1, or log"),
    "keep_best": ("0", "keep_best: expected an int >= 1"),
}


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_data(*_: object) -> None:
        raise AssertionError("the data are loaded")

    monkeypatch.setattr("purecompose.cli.setup.load_data", load_data)


def test_all_settings_are_checked() -> None:
    unchecked = {"data", "length", "vocabulary", "compile"}  # those of the data are checked while these are loaded
    assert parts._CHECKED.keys() == WRONG.keys() == {one.name for one in dataclasses.fields(Settings)} - unchecked


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_reported_before_the_data_are_loaded(name: str, run: Run, no_data: None) -> None:
    value, message = WRONG[name]
    option = parts.option_of(name)
    status, _, err = run("train", f"{option}={value}")
    assert status == 2 and f"{option}: " in err and message in err and err.count("\n") == 1
    with pytest.raises(AssertionError, match="the data are loaded"):
        run("train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran"], "no command is called 'tran'; did you mean 'train'? there are train, evaluate"),
        (["train", "--optimzer", "sgd"], "there is no option --optimzer; did you mean '--optimizer'"),
        (["train", "--lr=0.1"], "there is no option --lr; did you mean '--set optimizer.lr=...'?"),
        (["train", "--epochs", "3"], "there is no option --epochs; did you mean '--duration'?"),
        (["train", "--num-train-epochs=3"], "there is no option --num-train-epochs; did you mean '--duration'?"),
        (["train", "--logger", "wandb"], "there is no option --logger; did you mean '--tracker'?"),
        (["sweep", "--out", "a"], "there is no option --out; the command prints its result; --help shows the options"),
        (["evaluate", "run", "--chekpoint", "best"], "there is no option --chekpoint; did you mean '--checkpoint'?"),
        (["evaluate", "run", "--lr", "1"], "there is no option --lr; --help shows the options"),
        (["sweep", "--search", "grids"], "--search: got 'grids'; did you mean 'grid'? there are grid, random, optuna"),
        (["train", "--set", "learning_rate=0.1"], "there is no setting 'learning_rate'; did you mean 'optimizer.lr'?"),
        (["train", "--set", "width=3"], "there is no setting 'width'; did you mean 'model.width'"),
        (["train", "--set", "optimiser.lr=3"], "there is no optimiser in this run; did you mean 'optimizer'?"),
        (["train", "--set", "mixup.alpha=-1"], "--set: mixup.alpha: mixup: alpha"),
        (["train", "--data", "my:data", "--set", "mixup.alpha=-1", "--algorithms", "mixup"], "mixup.alpha: mixup"),
        (["train", "--patience", "3ep", "--seeds", "2"], "--patience: the networks of a population would stop at"),
        (["lr-range", "--batches", "3"], "--batches: expected an int >= 10, got 3"),
        (["lr-range", "--low", "1", "--high", "0.1"], "--high: expected a finite number > 1, got 0.1"),
        (["ablate", "--algorithms", "none"], "--algorithms: none: expected the methods to compare"),
        (["train", "--shard"], "there is only one process; start several by torchrun"),
        (["train", "--algorithms", "mine.half"], "what a module defines is given as mine:half"),
        (["check", "mine"], "write your own as my_module:my_algorithm"),
    ],
)
def test_messages_say_what_was_meant(arguments: list[str], message: str, run: Run, no_data: None) -> None:
    pathlib.Path("mine.py").write_text("raise SystemExit")  # a module is imported only if it is given with a name
    status, _, err = run(*arguments)
    assert status == 2 and message in err and err.count("\n") == 1


def test_folders_and_checkpoints_are_checked_before_the_data(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("train", "--model", "mlp(hidden=4)", "--duration", "1ba", "--quiet", "--out", "a")[0] == 0
    monkeypatch.setattr("purecompose.cli.setup.load_data", None)
    assert "a already holds a run; continue it with --resume" in run("train", "--out", "a")[2]
    err = run("evaluate", "a", "--checkpoint", "bset")[2]
    assert "has no bset; did you mean 'best'? there are newest, best, ep0000-ba00000001" in err
    assert "a is not a checkpoint, and would be lost" in run("replay", "a", "--at", "1ba", "--out", "a")[2]
