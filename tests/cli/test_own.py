"""User-defined code on the command line, and when it is executed."""

import pathlib
import sys

import pytest

from purecompose.cli import load_run, main
from purecompose.cli.options import UsageError
from tests.sampling import one_in


MODULE = """
import torch
from torch import nn
from purecompose import Algorithm, Event, factory, on

def net(num_classes, width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, num_classes))

def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 1, 4, 4, generator=generator)
    y = (x.sum((1, 2, 3)) > 0).long()
    return x[:40], y[:40], x[40:], y[40:]

@factory
def scaled(by=0.5, *, name="scaled"):
    def apply(event, state):
        return state.replace(grads={key: by * grad for key, grad in state.grads.items()})
    return Algorithm(name, on(Event.AFTER_TRAIN_BATCH), apply, config={"by": by})

fixed = scaled(0.25, name="fixed")
number = 3
"""

OWN = (
    "--model",
    "own_code:net(width=6)",
    "--data",
    "own_code:data",
    "--algorithms",
    "own_code:scaled(0.1),own_code:fixed",
)
SHORT = ("--duration", "2ba", "--batch-size", "8", "--quiet")


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Change to a folder with a module."""
    (tmp_path / "own_code.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    return tmp_path


@pytest.mark.slow
def test_user_defined_code_trains(folder, capsys):
    assert main(["train", *OWN, *SHORT, "--out", "run"]) == 0
    run = load_run("run", allow_imports=True)
    assert run.state.timestamp.batch == 2 and [*run.state.params] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert [(a.name, dict(a.config)) for a in run.step.algorithms] == [("scaled", {"by": 0.1}), ("fixed", {"by": 0.25})]
    assert len(run.train_data) == 5


@pytest.mark.parametrize(
    "command",
    one_in(
        5,
        [
            ("evaluate", "run"),
            ("predict", "run"),
            ("plan", "run"),
            ("train", "--resume", "--out", "run", "--quiet"),
            ("train", "--config", "run/config.toml", "--quiet"),
        ],
    ),
)
@pytest.mark.slow
def test_code_that_a_file_names_is_not_run_unless_allowed(command, folder, capsys):
    assert main(["train", *OWN, *SHORT, "--out", "run"]) == 0
    sys.modules.pop("own_code")
    (folder / "own_code.py").write_text("raise SystemExit('it was run')")
    assert main([*command]) == 2
    said = capsys.readouterr().err
    assert "name code to import, own_code:data, own_code:fixed, own_code:net, own_code:scaled" in said
    with pytest.raises(UsageError, match="--allow-imports"):
        load_run("run")
    (folder / "own_code.py").write_text(MODULE)
    assert main([*command, "--allow-imports"]) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the run is .* long, and was")
def test_code_named_on_the_command_line_is_allowed(folder):
    assert main(["train", *OWN, *SHORT, "--out", "run"]) == 0
    assert main(["train", *OWN, *SHORT, "--duration", "3ba", "--out", "run", "--resume"]) == 0
    assert main(["train", *OWN[2:], *SHORT, "--out", "run", "--resume"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "own_code:nets"), "--model: own_code:nets: the module own_code has no 'nets'"),
        (("--model", "own_cod:net"), "--model: own_cod:net: there is no module 'own_cod' in "),
        (("--model", "own_code:net(widht=2)"), "has no parameter 'widht'; did you mean 'width'?"),
        (("--model", "own_code:data"), "--model: own_code:data returned a tuple, expected a torch.nn.Module"),
        (("--data", "own_code:number"), "--data: own_code:number returned a int, expected data.ImageData"),
        (("--algorithms", "own_code:fixed(2)"), "--algorithms: own_code:fixed"),
    ],
)
def test_missing_attributes_of_user_code_are_reported_in_one_line(arguments, said, folder, capsys):
    assert main(["train", *SHORT, *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
