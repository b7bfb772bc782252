"""Shell completion: bash runs the script as when a user presses the key."""

import pathlib
import shlex
import shutil
import subprocess

import pytest

from purecompose.algorithms import FACTORIES
from purecompose.cli import main
from purecompose.cli.completion import SHELLS
from purecompose.cli.settings import SETTINGS
from purecompose.nn.models import MODELS


shtab = pytest.importorskip("shtab")
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


def script(capsys: pytest.CaptureFixture[str], shell: str) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def bash(text: str, command: str, folder: pathlib.Path) -> str:
    (folder / "purecompose.bash").write_text(text)
    asked = ["bash", "--norc", "-c", f"source ./purecompose.bash\n{command}"]
    done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def completed(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path):
    """Return the completions of the last word, with words split as by bash."""
    text = script(capsys, "bash")
    for name in ("ep0001-ba00000022", "ep0002-ba00000044"):
        (tmp_path / "run a" / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "run a" / "checkpoints" / name / "index.json").touch()
    (tmp_path / "run a" / "checkpoints" / ".unfinished").mkdir()
    (tmp_path / "digital.npz").touch()

    def ask(*words: str) -> set[str]:
        line = ["purecompose", *words]
        command = f"COMP_WORDS=({shlex.join(line)}); COMP_CWORD={len(words)}; _purecompose; "
        return set(bash(text, command + 'printf "%s\\n" "${COMPREPLY[@]}"', tmp_path).split("\n")) - {""}

    return ask


@needs_bash
def test_bash_completes_commands_and_options(completed) -> None:
    assert completed("pl") == {"plot", "plan"}
    assert completed("train", "--check") == {"--checkpoint-every"}
    assert completed("train", "--resume", "--quiet", "--mod") == {"--model"}


@needs_bash
def test_bash_completes_values(completed) -> None:
    assert completed("train", "--model", "") == set(MODELS)
    assert completed("train", "--quiet", "--model", "resnet2") == {"resnet20"}
    assert completed("plan", "--optimizer", "a") == {"adafactor", "adam", "adamw"}
    assert completed("train", "--schedule", "cos") == {"cosine", "cosine_warm_restarts"}
    assert completed("train", "--precision", "b") == {"bf16"}
    assert completed("plot", "a", "--x", "e") == {"epoch"}
    assert completed("algorithms", "mix") == {name for name in FACTORIES if name.startswith("mix")}
    assert completed("check", "all") == {"all"}
    assert completed("check", "mixup", "label") == {"label_smoothing"}
    assert completed("completion", "") == set(SHELLS)
    assert completed("train", "--set", "") == {f"{name}=" for name in SETTINGS}


@needs_bash
def test_bash_completes_after_an_equals_sign(completed) -> None:
    assert completed("train", "--model", "=", "cn") == {"cnn"}
    assert completed("train", "--model", "=") == set(MODELS)
    assert completed("train", "--model", "=", "cnn", "--schedule", "lin") == {"linear"}


@needs_bash
def test_bash_completes_each_of_a_list_of_algorithms(completed) -> None:
    assert completed("train", "--algorithms", "") == {*FACTORIES, "none"}
    assert completed("train", "--algorithms", "mixup,lab") == {"mixup,label_smoothing"}
    assert completed("train", "--algorithms", "mixup,") == {f"mixup,{name}" for name in (*FACTORIES, "none")}
    # A quote that is still open belongs to the shell; within parentheses, commas separate arguments.
    assert completed("train", "--algorithms", '"mixup(alpha=0.2), lab') == {"mixup(alpha=0.2), label_smoothing"}
    assert completed("train", "--algorithms", '"mixup(0.2, lab') == set()


@needs_bash
def test_bash_completes_checkpoints_files_and_folders(completed) -> None:
    names = {"ep0001-ba00000022", "ep0002-ba00000044"}
    assert completed("evaluate", "run a", "--checkpoint", "") == {"newest", "best", *names}
    assert completed("evaluate", "--checkpoint", "") == {"newest", "best"}
    assert completed("train", "--data", "dig") == {"digits", "digital.npz"}
    assert completed("train", "--config", "digital") == {"digital.npz"}
    assert completed("evaluate", "ru") == completed("plan", "ru") == completed("train", "--out", "ru") == {"run a"}


@needs_bash
def test_bash_falls_back_to_names_of_files(capsys, tmp_path: pathlib.Path) -> None:
    registered = bash(script(capsys, "bash"), "complete -p purecompose", tmp_path)
    assert registered == "complete -o bashdefault -o default -F _purecompose purecompose\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_completes_the_values(capsys, shell: str) -> None:
    text = script(capsys, shell)
    for words in (MODELS, ("newest", "best"), ("cpu", "cuda", "mps")):
        assert " ".join(words) in text
    assert all(name in text for name in ("selective_backprop", "cosine", "adamw", "bf16", "checkpoint-every"))


def test_a_shell_that_shtab_does_not_know_is_an_error(capsys, monkeypatch) -> None:
    monkeypatch.setattr(shtab, "SUPPORTED_SHELLS", ["bash"])
    assert main(["completion", "fish"]) == 2
    assert "the installed shtab does not support fish; try `pip install --upgrade shtab`" in capsys.readouterr().err
