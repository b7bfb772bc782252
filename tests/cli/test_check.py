"""The command `check`: exit statuses, refusals in one line, output on a terminal."""

import importlib
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from purecompose.cli import main


MODULE = """
from purecompose import Algorithm, Event, on

def scale(factor):
    def apply(event, state):
        return state.replace(params={name: factor() * param for name, param in state.params.items()})
    return apply

seen = []
def grow():
    seen.append(1)
    return 1 - 0.001 * len(seen)

good = Algorithm("good", on(Event.BATCH_END), scale(lambda: 0.99))

def bad():
    return Algorithm("bad", on(Event.BATCH_END), scale(grow))

def takes_much(amount):
    return good

number = 3

def failing():
    raise LookupError("no such thing")
"""
QUICK = ("--laws", "input_untouched,deterministic", "--tasks", "vectors", "--max-examples", "3")


@pytest.fixture
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Change to a folder with a user's modules."""
    (tmp_path / "cli_algorithms.py").write_text(MODULE)
    (tmp_path / "cli_missing.py").write_text("import no_such_package")
    (tmp_path / "cli_syntax.py").write_text("x = (")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    importlib.invalidate_caches()
    yield tmp_path
    for name in ("cli_algorithms", "cli_missing", "cli_syntax"):
        sys.modules.pop(name, None)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["check", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_lawful_algorithm(here, capsys) -> None:
    status, out, err = run(capsys, "cli_algorithms:good", *QUICK)
    assert (status, err) == (0, "")
    assert out.startswith("good() on vectors\n") and re.search(r"^deterministic +kept +3/3$", out, re.M)
    assert "ok: 2 kept (" in out and "\x1b" not in out
    assert sorted(path.name for path in here.iterdir() if path.suffix == "" and path.name != "__pycache__") == []


def test_a_broken_law_gives_status_1_and_a_remedy(here, capsys) -> None:
    status, out, _ = run(capsys, "cli_algorithms:bad", *QUICK)
    assert status == 1
    for part in ("BROKEN", "the law deterministic is broken", "event      BATCH_END", "to do      "):
        assert part in out


def test_several_algorithms_end_with_a_line_for_each(here, capsys) -> None:
    status, out, _ = run(capsys, "cli_algorithms:good", "cli_algorithms:bad", *QUICK)
    good, bad = out.splitlines()[-2:]
    assert status == 1
    assert good.startswith("good(): ok: 2 kept (")
    assert bad.startswith("bad(): NOT OK: 1 kept, 1 broken (") and bad.endswith("): deterministic")


@pytest.mark.filterwarnings("always::UserWarning")
def test_a_warning_is_said_once(here, capsys) -> None:
    laws = "deterministic,own_slot"
    status, _, err = run(capsys, "alibi", "--laws", laws, "--tasks", "vectors", "--max-examples", "6")
    assert status == 0 and err.startswith("warning: alibi changed nothing") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("cli_algorithms:god", "cli_algorithms:god: the module cli_algorithms has no 'god'"),
        ("cli_algoritms:good", "there is no module 'cli_algoritms' in "),
        ("cli_algorithms.py:good", "expected a module's name, not a file's, such as cli_algorithms:good"),
        ("cli_missing:good", "cli_missing cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ("cli_syntax:good", "cli_syntax:good: cli_syntax cannot be imported: SyntaxError: "),
        ("cli_algorithms:failing", "cli_algorithms:failing: LookupError: no such thing"),
        ("mixpu(0.2)", "did you mean 'mixup'?"),
        ("cli_algorithms", "write your own as my_module:my_algorithm"),
        ("cli_algorithms:good --laws determinstic", "no law is called 'determinstic'; did you mean 'deterministic'?"),
        ("cli_algorithms:good --max-examples 0", "max_examples: expected an int >= 1, got 0"),
        ("cli_algorithms:good mixup(0.2) --neutral mixup(0)", "--neutral: expected one algorithm, got 2"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(here, capsys, arguments, expected) -> None:
    status, out, err = run(capsys, *arguments.split())
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1 and expected in err


def test_without_hypothesis_one_line_says_what_to_install(here, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    status, out, err = run(capsys, "cli_algorithms:good")
    assert (status, out) == (1, "")
    assert err == (
        "python -m purecompose check: error: check needs hypothesis; "
        "install it with `pip install 'purecompose[testing]'`\n"
    )


def test_progress_is_only_shown_on_a_terminal(here, capsys, monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, _, err = run(capsys, "cli_algorithms:good", *QUICK)
    assert status == 0 and "[2/2] deterministic  good()" in err


@pytest.mark.slow
def test_other_commands_do_not_load_hypothesis() -> None:
    code = "import sys, purecompose.cli; assert 'hypothesis' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
