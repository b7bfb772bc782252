"""`ablate`, `sweep` and `lr-range` from the shell."""

import pathlib
from collections.abc import Callable

import pytest


Run = Callable[..., tuple[int, str, str]]
SMALL = ("--model", "mlp(hidden=16)", "--duration", "8ba")


@pytest.mark.filterwarnings("ignore:the checkpoint of batch")
def test_ablate_prints_a_table_and_continues_in_its_folder(run: Run, tmp_path: pathlib.Path) -> None:
    command = ("ablate", *SMALL, "--algorithms", "mixup", "--seeds", "5", "--seed", "3", "--out", str(tmp_path / "a"))
    status, out, _ = run(*command)
    assert status == 0 and "[1/2] all: eval/accuracy" in out and "2 subsets of 1 methods, 5 seeds each" in out
    assert (tmp_path / "a" / "none" / "seeds-3-to-7").is_dir()
    assert run(*command)[1].splitlines()[0] == out.splitlines()[0]
    status, _, err = run(*command, "--metric", "eval/loss")
    assert status == 2 and "metric: eval/accuracy in the folder, eval/loss here" in err


def test_sweep_prints_the_best_setting_first(run: Run) -> None:
    command = ("sweep", *SMALL, "--values", "lr=1e-6,0.05", "--values", "label_smoothing.smoothing=0.1,0.2")
    status, out, err = run(*command)
    assert status == 0 and out.splitlines()[2].startswith("0.05 "), err
    assert run(*(word.replace("lr=", "optimizer.lr=") for word in command)) == (status, out, err)


@pytest.mark.parametrize("search", [(), ("--search", "optuna", "--rounds", "2")])
def test_sweep_searches_in_ranges(run: Run, search: tuple[str, ...]) -> None:
    command = ("sweep", *SMALL, "--values", "lr=log(1e-4,1e-1)", "--values", "mixup.alpha=0.1,0.4", "--trials", "4")
    if search:
        pytest.importorskip("optuna")
    (status, out, err), again, other = (run(*command, *search, "--seed", seed) for seed in ("1", "1", "2"))
    rows = [[float(word) for word in line.split()] for line in out.splitlines()[2:]]
    assert status == 0 and (status, out, err) == again and out != other[1], err
    assert len(rows) == 4 and all(1e-4 <= rate <= 1e-1 and alpha in (0.1, 0.4) for rate, alpha, _ in rows)
    assert [row[2] for row in rows] == sorted(row[2] for row in rows)


def test_lr_range_suggests_a_rate(run: Run) -> None:
    status, out, _ = run("lr-range", *SMALL, "--batches", "20", "--high", "0.1")
    assert status == 0 and "suggested lr: " in out


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("lr=a", "--values: lr=a: expected a name and numbers"),
        ("sam.rho=1,2", "--values: sam.rho: there is no sam in this run; there are optimizer, schedule, model, "),
        ("mixup.p=1,2", "mixup has no parameter 'p'; write pc.algorithms.sometimes(method, 0.5). It has alpha"),
        ("mixup.alpha=0.1,-1", "--values: mixup.alpha: mixup: alpha: expected"),
        ("optimizer.betas=1,2", "adam: betas: expected two numbers"),
        (
            "learning_rate=1,2",
            "--values: learning_rate: expected lr, optimizer.ARGUMENT or METHOD.ARGUMENT; did you mean 'optimizer.lr'?",
        ),
        ("lr=1 --values lr=2", "--values: expected each name once, got lr, lr"),
        ("lr=1 --values optimizer.lr=2", "--values: expected each name once, got lr, optimizer.lr"),
        ("lr=log(1e-4,1e-1)", "values of 'lr' are a range: a grid has all combinations"),
        ("lr=log(0,1)", "--values: log: Range: low: expected a finite number > 0"),
        ("lr=loguniform(1e-4,1e-1)", "--values: no range is called 'loguniform'; did you mean 'log'"),
        ("lr=normal(0,1)", "--values: no range is called 'normal'; did you mean 'uniform'?"),
    ],
)
def test_wrong_values_are_usage_errors(run: Run, values: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purecompose.cli.setup.load_data", None)
    status, _, err = run("sweep", *SMALL, "--values", *values.split())
    assert status == 2 and message in err and err.count("\n") == 1
