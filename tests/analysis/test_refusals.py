"""Arguments that the functions of `analysis` refuse, with the words of the message."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import purecompose as pc
from purecompose import algorithms as alg, compose, loop_events
from tests.analysis.forms import Form, recorded
from tests.analysis.problems import evaluator, make_step, new_state, train_data
from tests.helpers import make_batches, make_state


RATES = [0.001, 0.01]
analysis: Any = pc.analysis


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    form = Form(compose(loop_events, []), make_state(duration="1ep"), make_batches(6))
    return recorded(form, tmp_path_factory.mktemp("run"))[0]


def refused_ablation(**options: Any) -> object:
    given = {"make_step": make_step, "state": new_state, "data": train_data(), "methods": [alg.mixup(0.4)], **options}
    return analysis.ablate(**{"evaluate": evaluator(), "seeds": 2, **given})  # pyright: ignore


def refused_sweep(values: Any, **options: Any) -> object:
    return analysis.sweep(make_step([]), new_state(0), train_data(), values, **{"evaluate": evaluator(), **options})


def refused_range(**options: Any) -> object:
    return analysis.learning_rate_range(make_step([]), new_state(0), train_data(), **options)


def own_generator() -> DataLoader[Any]:
    dataset = TensorDataset(torch.zeros(8, 8), torch.zeros(8).long())
    return DataLoader(dataset, 4, shuffle=True, generator=torch.Generator())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda run: analysis.replay(run.path, 3),
            r"replay: expected a RecordedRun\(path, step, state, data\), got PosixPath",
        ),
        (lambda run: analysis.RecordedRun(run.path, run.state, run.step, run.data), "expected a Step and a State"),
        (
            lambda run: analysis.RecordedRun(Path(run.path) / "no", run.step, run.state, run.data),
            "has no checkpoints to begin",
        ),
        (
            lambda run: analysis.replay(analysis.RecordedRun(run.path, run.step, run.state, iter(run.data)), 3),
            "an iterator cannot be",
        ),
        (
            lambda run: analysis.bisect("runs/a", analysis.predicates.not_finite(), stays=True),
            "bisect: expected a RecordedRun",
        ),
        (lambda run: analysis.bisect(run, 3, stays=True), "predicate: expected a function State -> bool, got 3"),
        (lambda run: analysis.bisect(run, lambda: True, stays=True), "predicate: expected a function State -> bool"),
        (lambda run: analysis.compare(run, Path("nothing")), "has no checkpoints"),
        (lambda run: analysis.compare(run, 3), "compare: expected a RecordedRun or the folder of a run, got 3"),
        (lambda run: analysis.compare(run, run, tolerance=-1.0), "tolerance"),
        (lambda run: refused_ablation(methods=[]), r"expected methods that are not called all or none, got \[\]"),
        (lambda run: refused_ablation(methods=[alg.mixup(0.2, name="none")]), r"got \['none'\]"),
        (lambda run: refused_ablation(methods=[alg.mixup]), "call a factory"),
        (lambda run: refused_ablation(evaluate=[1]), r"evaluate: expected Evaluator\(data, metrics\)"),
        (lambda run: refused_ablation(metric="eval/f1"), "metric='eval/f1': the evaluator reports eval/loss"),
        (lambda run: refused_ablation(seeds=2.0), "seeds: expected a number of seeds, or a list of them, got 2.0"),
        (lambda run: refused_ablation(seeds="12"), "seeds: expected a number of seeds, or a list of them, got '12'"),
        (lambda run: refused_ablation(seeds=[1, 1]), r"seeds=\[1, 1\]"),
        (lambda run: refused_ablation(data=pc.data.stream(lambda state: None)), "single state: give sequential=True"),
        (lambda run: refused_ablation(state=lambda seed: seed), r"state\(0\): expected a State, got int"),
        (lambda run: refused_ablation(make_step=lambda methods: methods), "make_step: expected a Step"),
        (lambda run: refused_ablation(make_step=lambda methods: compose(loop_events)), "differs in mixup: pass the"),
        (lambda run: refused_ablation(data=own_generator()), "the DataLoader has its own generator"),
        (lambda run: refused_sweep({"lr": 0.1}), r"values\['lr'\]: expected a list of numbers or a Range, got 0.1"),
        (lambda run: refused_sweep({"lr": [0.1]}), "expected at least two settings"),
        (lambda run: refused_sweep([{"lr": 0.1}]), "values: expected lists of numbers by name"),
        (lambda run: refused_sweep({"decay": RATES}), "no hparam 'decay'"),
        (lambda run: refused_sweep({"lr": RATES}, metric="eval/f1"), "the evaluator reports eval/loss, eval/accuracy"),
        (lambda run: refused_range(low=0), "low: expected a finite number > 0"),
        (lambda run: refused_range(low=1, high=0.1), "high: expected a finite number > 1"),
        (lambda run: refused_range(num_batches=3), "num_batches: expected an int >= 10"),
    ],
)
def test_wrong_arguments_are_refused(run: Any, call: Callable[[Any], object], words: str) -> None:
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=words):
        call(run)
