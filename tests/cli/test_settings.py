"""Settings come from the command line, a file and the defaults, in that order; wrong ones are named."""

import argparse
import pathlib
import re
import shlex
from typing import Any

import pytest

from purecompose import algorithms
from purecompose.algorithms.recipes import recipe
from purecompose.cli.settings import SETTINGS, UsageError, add_settings
from purecompose.cli.setup import OPTIMIZERS, SCHEDULES
from purecompose.cli.sources import chosen, command_of, with_arguments


FACTORIES = {"algorithms": algorithms.FACTORIES, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("name", ["optimizer", "schedule"])
def test_help_names_all_that_a_setting_may_be(name: str) -> None:
    assert FACTORIES[name].keys() <= set(re.findall(r"\w+", SETTINGS[name].help))


def test_the_command_line_wins_over_the_file_and_set_over_both(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('duration = "1ep"\nbatch-size = 7\nseed = 1\n')
    found = chosen(options("--config", str(file), "--duration", "2ep", "--set", "seed=3"), {"threads": 2, "seed": 9})
    assert found == {"duration": "2ep", "batch_size": 7, "seed": 3, "threads": 2}


def test_a_file_may_have_a_table_and_a_list_of_algorithms(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[train]\nalgorithms = ["mixup(0.2)", "label_smoothing"]\nmicrobatches = 4\ncompile = true\n')
    found = chosen(options("--config", str(file)))
    assert found == {"algorithms": "mixup(0.2), label_smoothing", "microbatches": "4", "compile": True}


def test_set_changes_arguments_of_calls() -> None:
    settings: dict[str, Any] = {
        "algorithms": "mixup(0.2),label_smoothing",
        "optimizer": "sgd(lr=0.1)",
        "model": "cnn",
        "schedule": "cosine",
    }
    given = options("--set", "optimizer.lr=0.01", "--set", "label_smoothing.smoothing=0.2", "--set", "model.width=4")
    found = with_arguments({**settings, **chosen(given)}, FACTORIES)
    assert found["optimizer"] == "sgd(lr=0.01)" and found["model"] == "cnn(width=4)"
    assert found["algorithms"] == "mixup(0.2), label_smoothing(smoothing=0.2)"
    assert "within" not in found


@pytest.mark.parametrize(
    "name, text, argument, expected",
    [
        (
            "algorithms",
            "mixup(0.2), sam(0.5, every=10)",
            "mixup.alpha=0.4",
            "mixup(alpha=0.4), sam(0.5, every=10)",
        ),
        ("algorithms", "mixup(0.2), sam(0.5, every=10)", "sam.every=5", "mixup(0.2), sam(rho=0.5, every=5)"),
        ("optimizer", "sgd(0.1, momentum=0.9)", "optimizer.lr=0.2", "sgd(lr=0.2, momentum=0.9)"),
        ("optimizer", "sgd(0.1)", "optimizer.momentum=0.9", "sgd(lr=0.1, momentum=0.9)"),
        ("schedule", "cosine(0.1)", "schedule.t_max=0.2dur", "cosine(alpha_f=0.1, t_max='0.2dur')"),
        ("model", "cnn(8)", "model.width=4", "cnn(8, width=4)"),  # is refused afterwards: options of models have names
        ("algorithms", "mixup(1, 2)", "mixup.alpha=3", "mixup(1, 2, alpha=3)"),  # too many: also refused
        ("algorithms", "nothing(1)", "nothing.alpha=3", "nothing(1, alpha=3)"),  # unknown: also refused
    ],
)
def test_set_changes_arguments_that_were_given_without_a_name(name, text, argument, expected) -> None:
    settings: dict[str, Any] = {"algorithms": "none", "optimizer": "sgd", "model": "cnn", "schedule": "cosine"}
    found = with_arguments({**settings, name: text, **chosen(options("--set", argument))}, FACTORIES)
    assert found[name] == expected


def test_set_changes_the_methods_of_a_recipe() -> None:
    settings = {"optimizer": "sgd", "model": "cnn", "schedule": "cosine"}
    found = with_arguments({**settings, **chosen(options("--recipe", "medium", "--set", "mixup.alpha=0.4"))}, FACTORIES)
    given = ", ".join(map(repr, recipe("medium").methods))
    assert found["algorithms"] == given.replace("mixup(alpha=0.2", "mixup(alpha=0.4")


@pytest.mark.parametrize(
    "content, said",
    [
        ("duration = ", "is not valid TOML"),
        ('duraton = "1ep"', "did you mean 'duration'"),
        ('batch_size = "many"', "batch_size: expected a whole number, got 'many'"),
        ("seed = true", "seed: expected a whole number"),
        ("compile = 1", "compile: expected true or false"),
        ("data = true", "data: expected a text"),
        ("train = 3", "expected settings"),
    ],
)
def test_files_that_cannot_be_used_are_refused(content: str, said: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=said):
        chosen(options("--config", str(file)))


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--set", "duration"], "expected KEY=VALUE"),
        (["--set", "=3"], "expected KEY=VALUE"),
        (["--set", "foo=3"], "there is no setting 'foo'"),
        (["--config", "nowhere.toml"], "No such file"),
    ],
)
def test_options_that_cannot_be_used_are_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        chosen(options(*arguments))


def test_an_argument_of_an_absent_method_is_named() -> None:
    settings = {"algorithms": "mixup", "optimizer": "sgd", "model": "cnn", "schedule": "cosine"}
    with pytest.raises(UsageError, match="no cutmix in this run; there are optimizer, schedule, model, mixup"):
        with_arguments({**settings, "within": {"cutmix": {"alpha": 1}}}, FACTORIES)


def test_the_command_only_contains_settings_that_are_not_defaults() -> None:
    settings = {"data": "digits", "seed": 3, "compile": True, "algorithms": "mixup(alpha=0.2)", "patience": None}
    words = shlex.split(command_of(settings, "runs/my run"))
    assert words[:4] == ["python", "-m", "purecompose", "train"]
    parsed = options(*words[4:-2])
    assert chosen(parsed) == {"seed": 3, "compile": True, "algorithms": "mixup(alpha=0.2)"}
    assert words[-2:] == ["--out", "runs/my run"]
