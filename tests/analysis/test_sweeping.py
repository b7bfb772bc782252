"""A sweep trains each setting as a single run would."""

from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import algorithms as alg, hparam, optim, schedule
from purecompose.analysis import sweep
from tests.analysis.problems import evaluator, make_step, new_state, train_data


RATES = [0.001, 0.01, 0.1, 1.0]


def test_each_setting_is_trained_as_a_single_run() -> None:
    smoothing = alg.label_smoothing(hparam("smoothing", 0.1))
    optimizer = optim.sgd(0.5 * schedule.cosine(), momentum=0.9)
    state = new_state(0, optimizer=optimizer)
    values = {"lr": [0.01, 0.1], "smoothing": [0.1, 0.5]}
    found = sweep(make_step([smoothing]), state, train_data(), values, evaluate=evaluator())
    assert len(found.trials) == 4
    for trial in found.trials:
        rate = optim.sgd(trial.values["lr"] * schedule.cosine(), momentum=0.9)
        step = make_step([alg.label_smoothing(trial.values["smoothing"])])
        end = pc.fit(step, new_state(0, optimizer=rate), train_data())
        assert trial.metric == pytest.approx(pc.evaluate(end, evaluator().data)["loss"], rel=1e-4)
    assert [trial.metric for trial in found.trials] == sorted(trial.metric for trial in found.trials)
    best = pc.unstack_states(found.state)[found.best]
    assert pc.evaluate(best, evaluator().data)["loss"] == pytest.approx(found.trials[0].metric, rel=1e-5)


def test_seeds_of_a_setting_are_averaged() -> None:
    found = sweep(make_step([]), new_state(0), train_data(), {"lr": RATES}, evaluate=evaluator(), seeds=2)
    for trial in found.trials:
        assert len(set(trial.by_seed)) == 2 and trial.metric == pytest.approx(sum(trial.by_seed) / 2)


def test_settings_are_ranked_as_the_metric_declares() -> None:
    def gap(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 1 - outputs.softmax(1).gather(1, targets[:, None])[:, 0]

    def ranked(metric: Any) -> list[float]:
        own = pc.Evaluator(evaluator().data, {"gap": metric})
        found = sweep(make_step([]), new_state(0), train_data(), {"lr": RATES}, evaluate=own)
        return [trial.metric for trial in found.trials]

    lowest = ranked(pc.metrics.from_function(gap, higher_is_better=False))
    assert lowest == sorted(lowest) and ranked(pc.metrics.from_function(gap, higher_is_better=True)) == lowest[::-1]
    with pytest.raises(ValueError, match="'eval/gap': are lower or higher values better"):
        ranked(gap)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_a_compiled_sweep_has_the_graph_of_one_population() -> None:
    step = pc.compile(make_step([]), backend="eager", quiet=True)
    compiled, eager = (
        sweep(one, new_state(0), train_data(), {"lr": RATES}, evaluate=evaluator()) for one in (step, make_step([]))
    )
    torch.testing.assert_close([t.metric for t in compiled.trials], [t.metric for t in eager.trials], rtol=1e-4, atol=0)
