"""`replay`, `bisect` and `compare` from the shell."""

import pathlib
import warnings
from collections.abc import Callable

import pytest

import purecompose as pc
from purecompose.analysis import replaying
from purecompose.cli import load_run, main
from tests.analysis.forms import digests


Run = Callable[..., tuple[int, str, str]]
SMALL = ("--model", "mlp(hidden=16, dropout=0.1)", "--duration", "1ep", "--keep", "log", "--checkpoint-every", "4ba")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder with two runs that differ in a learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    for name, lr in (("a", "1e-3"), ("b", "2e-3")):
        out = str(folder / name)
        assert main(["train", *SMALL, "--optimizer", f"adam({lr})", "--quiet", "--out", out]) == 0
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], trained: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run commands in the folder of the two runs, which they must not change; return status, output and errors."""
    monkeypatch.chdir(trained)
    capsys.readouterr()

    def command(*arguments: str) -> tuple[int, str, str]:
        before = [digests(trained / name) for name in "ab"]
        status = main(list(arguments))
        captured = capsys.readouterr()
        assert [digests(trained / name) for name in "ab"] == before
        return status, captured.out, captured.err

    return command


def test_replay(run: Run, tmp_path: pathlib.Path) -> None:
    status, out, err = run("replay", "a", "--at", "22", "--out", str(tmp_path / "state"))
    assert (status, err) == (0, "") and "batch 22 (epoch 1)" in out and "bit-identical to the run" in out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pc.errors.CheckpointWarning)  # of other kernels than those of the command
        loaded = load_run("a")
        saved = pc.load(tmp_path / "state", loaded.state)
    assert saved.timestamp.batch == 22 and pc.tree.diff(saved, loaded.state) == []
    assert "saved in" in out


def test_a_run_in_remote_storage_is_read_as_well(run: Run, trained: pathlib.Path) -> None:
    pytest.importorskip("fsspec")
    at = ("--at", "7ba")
    assert run("replay", (trained / "a").as_uri(), *at)[:2] == run("replay", "a", *at)[:2]


def test_bisect(run: Run, tmp_path: pathlib.Path) -> None:
    status, out, err = run("bisect", "a", "--until", "weight_norm_above(1.0)", "--stays")
    assert status == 2 and "holds in a/checkpoints/ep0000-ba00000000 already" in err
    (tmp_path / "own_predicates.py").write_text("def late(state):\n    return state.timestamp.batch >= 13\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        status, out, err = run("bisect", "a", "--until", "own_predicates:late", "--stays")
    assert (status, err) == (0, "") and out.startswith("late holds from batch 13 on\n")
    status, out, err = run("bisect", "a", "--until", "loss_above(0.0)", "--passes")
    assert (status, err) == (0, "") and out.startswith("loss_above(0.0) holds from batch 1 on\n")


def test_compare(run: Run) -> None:
    status, out, err = run("compare", "a", "b")
    assert (status, err) == (0, "")
    assert "optimizer: adam(1e-3) in a, adam(2e-3) in b" in out
    assert "the first difference is at batch 2: params['1.weight']: " in out
    assert "no settings differ" in run("compare", "a", "a")[1]


def test_compare_names_versions_that_prevent_a_replay(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = replaying.environment
    monkeypatch.setattr(replaying, "environment", lambda *given: {**now(*given), "torch": "99"})
    status, out, err = run("compare", "a", "b")
    assert (status, err) == (0, "")
    assert "optimizer: adam(1e-3) in a, adam(2e-3) in b" in out and "the first difference is after batch" in out
    assert "the runs are not replayed: " in out and "99 here" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("replay", "a", "--at", "99ba"), "is recorded up to batch 22, its last checkpoint, not to 99ba"),
        (("replay", "a", "--at", "soon"), "cannot read the time 'soon'"),
        (("replay", "nothing", "--at", "1ba"), "nothing"),
        (("bisect", "a", "--until", "not_finite"), "bisect needs one of --stays, if what is true stays true"),
        (("bisect", "a", "--until", "weight_norm_above(1.0, 'x')", "--stays"), "no parameter has a name like 'x'"),
        (("bisect", "a", "--until", "not_finit", "--stays"), "did you mean 'not_finite'"),
        (("compare", "a", "nothing"), "nothing has no checkpoints"),
    ],
)
def test_errors_are_one_line(run: Run, words: tuple[str, ...], message: str) -> None:
    status, out, err = run(*words)
    assert status == 2 and out == "" and message in err and err.count("\n") == 1
