"""A fixture for tests of commands."""

import pathlib
from collections.abc import Callable

import pytest

from purecompose.cli import main


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run commands in an empty folder; return status, output and error output."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> tuple[int, str, str]:
        status = main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command
