"""Options come from signatures; settings from the command line, a file and the defaults, in that order."""

import argparse
import pathlib
import re
import shlex
import sys
from typing import Any

import pytest

from purecompose import algorithms
from purecompose.algorithms.recipes import recipe
from purecompose.cli import main
from purecompose.cli.options import UsageError, add_options, arguments_of
from purecompose.cli.settings import Given, Settings, command_of, with_arguments


TEXTS = {"algorithms": "none", "optimizer": "sgd", "model": "cnn", "schedule": "cosine"}


def given(*arguments: str) -> Given:
    parser = argparse.ArgumentParser()
    add_options(parser, Given)
    return Given(**arguments_of(Given, vars(parser.parse_args(arguments))))


def with_set(settings: dict[str, Any], *arguments: str) -> dict[str, Any]:
    return with_arguments({**TEXTS, **settings, **given(*arguments).chosen()}, algorithms.FACTORIES)


def test_the_command_line_wins_over_the_file_and_set_over_both(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('duration = "1ep"\nbatch-size = 7\nseed = 1\n')
    options = given("--config", str(file), "--duration", "2ep", "--set", "seed=3")
    found = options.chosen({"threads": 2, "seed": 9})
    assert found == {"duration": "2ep", "batch_size": 7, "seed": 3, "threads": 2}


def test_a_file_may_have_a_table_and_a_list_of_algorithms(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[train]\nalgorithms = ["mixup(0.2)", "label_smoothing"]\nmicrobatches = 4\ncompile = true\n')
    found = given("--config", str(file)).chosen()
    assert found == {"algorithms": "mixup(0.2), label_smoothing", "microbatches": "4", "compile": True}


@pytest.mark.parametrize(
    "name, text, argument, expected",
    [
        ("algorithms", "mixup(0.2), sam(0.5, every=10)", "mixup.alpha=0.4", "mixup(alpha=0.4), sam(0.5, every=10)"),
        ("algorithms", "mixup(0.2), sam(0.5, every=10)", "sam.every=5", "mixup(0.2), sam(rho=0.5, every=5)"),
        ("algorithms", "ema, sometimes(mixup(), 0.5)", "mixup.alpha=0.4", "ema(), sometimes(mixup(alpha=0.4), 0.5)"),
        ("optimizer", "sgd(0.1, momentum=0.9)", "optimizer.lr=0.2", "sgd(lr=0.2, momentum=0.9)"),
        ("optimizer", "sgd(0.1)", "optimizer.momentum=0.9", "sgd(lr=0.1, momentum=0.9)"),
        ("schedule", "cosine(alpha_f=0.1)", "schedule.t_max=0.2dur", "cosine(alpha_f=0.1, t_max='0.2dur')"),
        ("model", "cnn(8)", "model.width=4", "cnn(8, width=4)"),  # is refused afterwards: options of models have names
    ],
)
def test_set_changes_arguments_of_calls(name, text, argument, expected) -> None:
    found = with_set({name: text}, "--set", argument)
    assert found[name] == expected and "within" not in found


def test_set_changes_the_methods_of_a_recipe() -> None:
    found = with_set({}, "--recipe", "medium", "--set", "mixup.alpha=0.4")
    methods = ", ".join(map(repr, recipe("medium").methods))
    assert found["algorithms"] == methods.replace("mixup(alpha=0.2", "mixup(alpha=0.4")


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
        given("--config", str(file)).chosen()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--set", "duration"], "expected KEY=VALUE"),
        (["--set", "=3"], "expected KEY=VALUE"),
        (["--set", "foo=3"], "there is no setting 'foo'"),
        (["--set", "cutmix.alpha=1"], "no cutmix in this run; there are optimizer, schedule, model"),
        (["--config", "nowhere.toml"], "No such file"),
        (["--recipe", "spicy"], "--recipe: recipe: expected one of mild"),
    ],
)
def test_options_that_cannot_be_used_are_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        with_set({}, *arguments)


def test_the_command_only_contains_settings_that_are_not_defaults() -> None:
    settings = Settings(seed=3, compile=True, algorithms="mixup(alpha=0.2)")
    words = shlex.split(command_of(settings, "runs/my run"))
    assert words[:4] == ["python", "-m", "purecompose", "train"] and words[-2:] == ["--out", "runs/my run"]
    assert given(*words[4:-2]).chosen() == {"seed": 3, "compile": True, "algorithms": "mixup(alpha=0.2)"}


YAML = """\
duration: 8ba
validation: 1e-1     # YAML 1.1 would read a text
seed: 3
compile: no
model: {name: mlp, hidden: [16]}
optimizer:
  name: sgd
  lr: 1e-2
algorithms:
  - mixup(0.3)
  - name: label_smoothing
    smoothing: 0.2
  - name: sometimes
    method: {name: cutout}
    p: 0.5
"""


def test_yaml_is_read_as_toml(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(YAML)
    assert given("--config", str(file)).chosen() == {
        "duration": "8ba",
        "validation": 0.1,
        "seed": 3,
        "compile": False,
        "model": "mlp(hidden=[16])",
        "optimizer": "sgd(lr=0.01)",
        "algorithms": "mixup(0.3), label_smoothing(smoothing=0.2), sometimes(method=cutout(), p=0.5)",
    }
    toml = tmp_path / "run.toml"
    toml.write_text('[optimizer]\nname = "sgd"\nlr = 0.01\n')
    assert given("--config", str(toml)).chosen() == {"optimizer": "sgd(lr=0.01)"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [1", "run.yml is not valid YAML: while parsing a flow sequence"),
        ("- 1", "run.yml: expected settings"),
        ("1: 2", "run.yml: expected settings"),
        ("duraton: 3ep", "run.yml: there is no setting 'duraton'; did you mean 'duration'?"),
        ("optimizer: {lr: 1}", "run.yml: optimizer: expected a text"),
        ("duration: {lr: 1}", "run.yml: duration: expected a text"),
        ("model: !!python/object/apply:os.getcwd []", "is not valid YAML: could not determine a constructor"),
    ],
)
def test_yaml_that_cannot_be_used_is_refused(content: str, said: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.yml"
    file.write_text(content)
    with pytest.raises(UsageError, match=re.escape(said)):
        given("--config", str(file)).chosen()


def test_yaml_needs_a_package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("")
    assert given("--config", str(file)).chosen() == {}
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match="pip install 'purecompose.yaml.'"):
        given("--config", str(file)).chosen()


@pytest.mark.parametrize("options", ["--seed 3", "--recipe mnist-fast", "--model mlp --validation=0.1"])
def test_printed_settings_are_those_of_the_run(
    options: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *options.split(), "--print-config"]) == 0
    printed = capsys.readouterr().out
    pathlib.Path("a.toml").write_text(printed)
    assert main(["train", "--config", "a.toml", "--print-config"]) == 0
    assert capsys.readouterr().out == printed and "threads = 1" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]
