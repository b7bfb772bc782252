"""`plan --conflicts`: its output and its errors."""

import pathlib
import sys
from collections.abc import Iterator

import pytest
import torch

from purecompose.cli import main


OWN = """
from purecompose import Algorithm, Event, on


def made(name, change):
    def apply(event, state):
        return state.replace(params={key: change(param) for key, param in state.params.items()})

    return Algorithm(name, on(Event.BATCH_END), apply)


double = made("double", lambda param: 2 * param)


def increase():
    return made("increase", lambda param: param + 1)
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", "--conflicts", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.fixture
def own_module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_conflicts.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_conflicts", None)


@pytest.mark.slow
def test_the_default_list(capsys) -> None:
    threads = torch.get_num_threads()
    out = run(capsys)
    assert "selective_backprop < mixup  sort_selective_backprop_first" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["1", "mixup", ".", ">"] in rows and ["2", "label_smoothing", ".", "."] in rows
    assert torch.get_num_threads() == threads


def test_modules_and_calls_in_one_list(capsys, own_module) -> None:
    listed = "own_conflicts:double, selective_backprop(start=0, end=1.0), own_conflicts:increase"
    out = run(capsys, "--algorithms", listed)
    rows = [line.split() for line in out.splitlines()]
    assert ["1", "double", "-", "!"] in rows and ["2", "selective_backprop", "-", "-"] in rows
    assert "double < increase" in out and "only the list (listed so)" in out
    assert not (pathlib.Path.cwd() / ".hypothesis").exists()


def test_no_algorithms(capsys) -> None:
    assert run(capsys, "--algorithms", "none") == "no algorithms\n"


@pytest.mark.parametrize(
    ("listed", "part"),
    [
        ("mixpu", "no algorithm is called 'mixpu'"),
        ("mixup,mixup", "used twice"),
        ("mixup(alpha=-1)", "mixup"),
        ("mixup(alpha=0.2", "cannot read"),
        ("no_such_module:one", "no_such_module"),
        ("own_conflicts:triple", "triple"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(capsys, own_module, listed: str, part: str) -> None:
    assert main(["plan", "--conflicts", "--algorithms", listed]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("python -m purecompose plan: error: --algorithms: ")
    assert captured.err.count("\n") == 1 and part in captured.err


def test_a_missing_package_is_one_line_and_status_1(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert main(["plan", "--conflicts", "--algorithms", "mixup"]) == 1
    err = capsys.readouterr().err
    assert "purecompose[testing]" in err and err.count("\n") == 1
