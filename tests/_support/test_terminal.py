"""Texts from outside never control the terminal."""

import ast
import io
import json
import pathlib

import pytest

import purecompose as pc
from purecompose._support.messages import escaped, say
from purecompose.cli import main
from tests.helpers import make_state
from tests.pages import ROOT


EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e"


def test_only_what_controls_a_terminal_is_escaped() -> None:
    assert escaped("tabs\t, lines\n, ö, 字, 🙂") == "tabs\t, lines\n, ö, 字, 🙂"
    assert escaped(EVIL) == r"\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e"
    assert escaped("\udc80") == r"\udc80"  # it could not be printed


def test_files_get_texts_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    say(EVIL, file=file)
    say(EVIL, 1, end="")
    assert (file.getvalue(), capsys.readouterr().out) == (f"{EVIL}\n", f"{escaped(EVIL)} 1")


def test_the_command_line_prints_by_this_function() -> None:
    found = []
    for file in sorted((ROOT / "purecompose" / "cli").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                found.append(file.name)
    assert found == []


@pytest.mark.parametrize("setting", ["model", "data", "duration", "optimizer"])
def test_settings_of_a_run_are_escaped(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(f"{setting} = {json.dumps(EVIL)}\n")
    assert main(["train", "--resume", "--out", str(tmp_path / "run")]) != 0
    assert main(["predict", str(tmp_path / "run")]) != 0
    written = capsys.readouterr()
    assert written.err and not {"\x1b", "\x07", "\x9b", "\r", "\u202e"} & {*written.out, *written.err}


def test_lines_of_an_index_are_escaped(tmp_path: pathlib.Path) -> None:
    saved = pc.save(make_state(), tmp_path / "one")
    index = pc.saving.read_index(saved)
    index.description["model"][0] = f"(root): {EVIL}()"
    from purecompose.run.saving.files import to_json

    (saved / "index.json").write_text(to_json(index))
    with pytest.raises(pc.errors.MismatchError) as caught:
        pc.load(saved, make_state())
    assert "\x1b" not in str(caught.value) and r"\x1b" in str(caught.value)
