"""Settings that a sweep proposes: keyed random ones, and those of Optuna, which learn from earlier rounds."""

import math
import sys
from typing import Any

import pytest

from purecompose import optim, random
from purecompose.analysis import Range, sweep
from purecompose.analysis.proposing import proposed
from tests.analysis.problems import evaluator, make_step, new_state, train_data


SPACE: dict[str, Any] = {"lr": Range(1e-4, 1e-1, log=True), "decay": Range(-1.0, 3.0), "rho": [0.1, 0.2, 0.4]}


def settings(search: str | None, trials: int | None, *, seed: int = 0, space: Any = None) -> list[dict[str, float]]:
    return next(proposed(SPACE if space is None else space, search, trials, 1, random.key(seed), True))


def test_random_settings_are_keyed_and_uniform() -> None:
    found = settings(None, 400)
    assert found[:7] == settings("random", 7) != settings("random", 7, seed=1)
    only = settings("random", 7, space={"rho": SPACE["rho"]})
    assert [one["rho"] for one in found[:7]] == [one["rho"] for one in only]  # names draw on their own
    shares = [math.log10(one["lr"] / 1e-4) / 3 for one in found], [(one["decay"] + 1) / 4 for one in found]
    for share in shares:
        assert all(0 <= one <= 1 for one in share)
        assert abs(sum(share) / 400 - 0.5) < 4 * math.sqrt(1 / 12 / 400)
        assert abs(sum(one < 0.25 for one in share) - 100) < 4 * math.sqrt(400 * 3 / 16)
    for value in SPACE["rho"]:
        assert abs(sum(one["rho"] == value for one in found) - 400 / 3) < 4 * math.sqrt(400 * 2 / 9)


def test_few_trials_need_no_smaller_number_of_rounds() -> None:
    assert len(next(proposed(SPACE, None, 2, 4, random.key(0), True))) == 2
    proposals = proposed({"x": Range(0.0, 1.0)}, "optuna", 2, 4, random.key(0), True)
    assert [len(next(proposals)), len(proposals.send([0.5]))] == [1, 1]


def test_optuna_learns_from_the_rounds_before() -> None:
    pytest.importorskip("optuna")

    def search(seed: int) -> list[list[dict[str, float]]]:
        proposals = proposed({"x": Range(-10.0, 10.0)}, "optuna", 60, 6, random.key(seed), True)
        rounds = [next(proposals)]
        with pytest.raises(StopIteration):
            while True:
                rounds.append(
                    proposals.send([math.nan if one["x"] < -9 else (one["x"] - 3) ** 2 for one in rounds[-1]])
                )
        return rounds

    rounds = search(0)
    assert [len(one) for one in rounds] == [10] * 6 and rounds == search(0) != search(1)
    far = [sum(abs(one["x"] - 3) for one in some) / 10 for some in rounds]
    assert sum(far[3:]) < 0.6 * sum(far[:3])


@pytest.mark.parametrize("search", ["random", "optuna"])
def test_each_trial_is_that_of_a_grid(search: str) -> None:
    if search == "optuna":
        pytest.importorskip("optuna")
    values = {"lr": Range(0.01, 1.0, log=True)}
    common: Any = {"evaluate": evaluator(), "seeds": 2}
    state = new_state(0, optimizer=optim.sgd(0.1))
    found = sweep(make_step([]), state, train_data(), values, trials=6, search=search, rounds=3, **common)
    again = sweep(make_step([]), state, train_data(), {"lr": [one.values["lr"] for one in found.trials]}, **common)
    assert len(found.trials) == 6 and found.trials == again.trials
    best = found.state.hparams["lr"][found.best].item()
    assert best == pytest.approx(found.trials[0].values["lr"])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((SPACE, None, None), ValueError, "values of 'lr' are a range: a grid has all combinations of lists"),
        (({"lr": [1, 2]}, "grid", 3), ValueError, "trials=3: a grid has all combinations"),
        ((SPACE, "tpe", 3), ValueError, "search='tpe': expected 'grid', 'random' or 'optuna'"),
        ((SPACE, "optuna", None), ValueError, "search='optuna' needs the number of trials"),
        ((SPACE, "random", 1), ValueError, "trials: expected an int >= 2"),
        (({"lr": 3}, None, 3), TypeError, r"values\['lr'\]: expected a list of numbers or a Range, got 3"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        settings(arguments[1], arguments[2], space=arguments[0])


def test_wrong_ranges_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Range: low: expected a finite number > 0, got 0"):
        Range(0, 1, log=True)
    with pytest.raises(ValueError, match="Range: high: expected a finite number > 2, got 1"):
        Range(2, 1)
    with pytest.raises(TypeError, match="Range: log: expected True or False"):
        Range(1, 2, log=1)  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match="pip install 'purecompose.optuna.'"):
        settings("optuna", 3)
