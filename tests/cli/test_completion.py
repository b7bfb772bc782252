"""Shell completion: bash runs the script as when a user presses the key."""

import pathlib
import shlex
import shutil
import subprocess

import pytest

from purecompose.algorithms import FACTORIES
from purecompose.cli import main
from purecompose.nn.models import MODELS


shtab = pytest.importorskip("shtab")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_values_and_folders(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "purecompose.bash").write_text(capsys.readouterr().out)
    (tmp_path / "runs").mkdir()

    def completed(*words: str) -> set[str]:
        line = f"COMP_WORDS=({shlex.join(['purecompose', *words])}); COMP_CWORD={len(words)}"
        command = f'source ./purecompose.bash; {line}; _shtab_purecompose; printf "%s\\n" "${{COMPREPLY[@]}}"'
        asked = ["bash", "--norc", "-c", command]
        done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return set(done.stdout.split("\n")) - {""}

    assert completed("re") == {"report", "replay"}
    assert completed("train", "--check") == {"--checkpoint-every"}
    assert completed("train", "--model", "") == set(MODELS)
    assert completed("algorithms", "mix") == {name for name in FACTORIES if name.startswith("mix")}
    assert completed("predict", "a", "--checkpoint", "b") == {"best"}
    assert completed("evaluate", "run") == completed("train", "--out", "run") == {"runs"}


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells_complete_values(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("resnet20", "cosine", "adamw", "bf16", "checkpoint-every"))


def test_a_shell_that_shtab_does_not_know_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shtab, "SUPPORTED_SHELLS", ["bash"])
    assert main(["completion", "fish"]) == 2
    assert "the installed shtab does not support fish; try `pip install --upgrade shtab`" in capsys.readouterr().err
