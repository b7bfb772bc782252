"""`env`: what a report of a problem needs."""

import platform

import optree
import pytest
import torch

from purecompose import __version__
from purecompose.cli import main


def test_versions_and_settings_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("A_SECRET", "not shown")
    assert main(["env"]) == 0
    printed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert printed["purecompose"] == __version__ and printed["python"] == platform.python_version()
    assert printed["optree"] == optree.__version__ and printed["torch"].partition("+")[0] in torch.__version__
    assert printed["OMP_NUM_THREADS"] == "3" and "A_SECRET" not in printed
    assert int(printed["threads"]) >= 1 and printed["processor"] and printed["gpu"]
