"""Early stopping and thresholds, which stop a resumed run at the same batch as an unbroken one."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Checkpoints, EarlyStopping, Evaluator, State, Threshold, compose, fit, loop_events, training
from tests.helpers import assert_same, make_batches, make_state


BATCHES = make_batches(2)


def stopped_after(stopper: Any, values: Sequence[float]) -> int | None:
    """Return the number of epochs after which a run with these values stops."""
    state = stopper.init(make_state(duration="100ep"))
    for epoch, value in enumerate(values, 1):
        state = state.replace(timestamp=state.timestamp.advance_epoch())
        state = stopper.see(state, {"eval/loss": value, "eval/accuracy": value})
        if stopper.is_over(state):
            return epoch
    return None


@pytest.mark.parametrize(
    "stopper, values, epochs",
    [
        (EarlyStopping("eval/loss", "2ep"), [3, 2, 1, 1, 1, 1], 5),
        (EarlyStopping("eval/loss", "2ep"), [3, 4, 2, 3, 1, 2, 2], 7),
        (EarlyStopping("eval/accuracy", "1ep"), [0.1, 0.2, 0.2], 3),
        (EarlyStopping("eval/accuracy", "1ep", mode="min"), [0.3, 0.2, 0.3], 3),
        (EarlyStopping("eval/loss", "1ep", min_delta=0.5), [3, 2.7, 1], 2),
        (EarlyStopping("eval/loss", "2ep"), [math.nan, 3, 2, math.nan, math.nan], 5),
        (EarlyStopping("eval/loss", "9ep"), [3, 2, 1], None),
        (EarlyStopping("eval/loss", "3ep"), [math.nan] * 9, 3),
        (EarlyStopping("eval/loss", "1ep"), [0.3, 0.3], 2),  # in float32 0.3 is above 0.3
        (Threshold("eval/loss", 0.5), [1, 0.6, 0.5, 0.7], 3),
        (Threshold("eval/accuracy", 0.9), [0.1, 0.95], 2),
        (Threshold("eval/accuracy", 0.9), [0.1, math.nan], None),
    ],
)
def test_runs_stop_when_the_metric_meets_the_condition(stopper: Any, values: list[float], epochs: int | None) -> None:
    assert stopped_after(stopper, values) == epochs


def evaluator() -> Evaluator:
    """Return an evaluator whose error is lowest after the first epoch: training leads away from its zero targets."""
    inputs, _ = BATCHES[0]

    def away(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).pow(2).mean(1)

    return Evaluator([(inputs, torch.zeros(8, 3))], {"error": away})


def test_a_resumed_run_stops_early_at_the_same_batch(tmp_path: pathlib.Path) -> None:
    def run(**options: Any) -> State:
        state = make_state(duration="50ep")
        stop = EarlyStopping("eval/error", patience="2ep")
        return fit(compose(loop_events), state, BATCHES, evaluate=evaluator(), stop=stop, **options)

    whole = run()
    assert 2 < whole.timestamp.epoch < 50
    settings = Checkpoints(tmp_path, every="1ba", background=False)
    options: dict[str, Any] = {"evaluate": evaluator(), "stop": EarlyStopping("eval/error", patience="2ep")}
    for state in training(compose(loop_events), make_state(duration="50ep"), BATCHES, checkpoints=settings, **options):
        if state.timestamp.epoch == whole.timestamp.epoch - 1:
            break
    assert_same(run(checkpoints=settings, resume="auto"), whole)
    assert_same(run(checkpoints=settings, resume="auto"), whole)  # this run has been stopped by now


def test_two_evaluators_of_different_intervals_and_a_cut_within_the_patience(tmp_path: pathlib.Path) -> None:
    """The last evaluation decides, also if a run is resumed between two of them."""

    def options() -> dict[str, Any]:
        inputs, targets = BATCHES[0]
        often = Evaluator([(inputs, targets)], {"loss": pc.losses.cross_entropy}, every="1ba", label="often")
        rare = Evaluator(evaluator().data, evaluator().metrics, every="5ba")
        return {"evaluate": [often, rare], "stop": EarlyStopping("eval/error", patience="3ba")}

    def start() -> State:
        return make_state(duration="50ep")

    whole = fit(compose(loop_events), start(), BATCHES, **options())
    assert whole.timestamp.batch == 10
    for cut in range(5, 10):
        settings = Checkpoints(tmp_path / str(cut), every="1ba", background=False)
        states = training(compose(loop_events), start(), BATCHES, checkpoints=settings, **options())
        assert next(state for state in states if state.timestamp.batch == cut)
        states.close()  # pyright: ignore[reportAttributeAccessIssue]
        again = fit(compose(loop_events), start(), BATCHES, checkpoints=settings, resume="auto", **options())
        assert_same(again, whole)


def test_conditions_for_stopping_may_be_added_or_removed_on_resumption(tmp_path: pathlib.Path) -> None:
    settings = Checkpoints(tmp_path, background=False)
    stop = Threshold("eval/error", 1e9, mode="max")
    fit(
        compose(loop_events), make_state(duration="1ep"), BATCHES, checkpoints=settings, evaluate=evaluator(), stop=stop
    )
    plain = fit(compose(loop_events), make_state(), BATCHES, checkpoints=settings, resume="auto")
    assert not plain.slots
    settings = Checkpoints(tmp_path / "other", background=False)
    fit(compose(loop_events), make_state(duration="1ep"), BATCHES, checkpoints=settings)
    options: dict[str, Any] = {"checkpoints": settings, "evaluate": evaluator(), "stop": stop, "resume": "auto"}
    assert_same(fit(compose(loop_events), make_state(), BATCHES, **options).params, plain.params)


def test_metrics_of_training_decide_after_each_epoch() -> None:
    step = compose(loop_events, [pc.algorithms.training_metrics(), pc.algorithms.gradient_norm()])
    ends: list[State] = []

    def watch(event: pc.Event, state: State) -> None:
        ends.extend([state] if event is pc.Event.EPOCH_END else [])

    fit(step, make_state(duration="20ep"), BATCHES, observers=watch)
    for metric, mode in (("train/accuracy", "max"), ("gradient_norm", "min")):
        values = [state.metrics[metric].item() for state in ends]
        goal = values[10]
        reached = [value >= goal if mode == "max" else value <= goal for value in values]
        end = fit(step, make_state(duration="20ep"), BATCHES, stop=Threshold(metric, goal, mode))
        assert end.timestamp.epoch == 1 + reached.index(True)
    with pytest.raises(ValueError, match=r"no algorithm reports 'train/top_5': .* are train/accuracy, gradient_norm"):
        fit(step, make_state(duration="20ep"), BATCHES, stop=EarlyStopping("train/top_5", mode="max"))


def away_from(target: float) -> pc.metrics.Metric:
    """Return a metric that declares lower values as better, under a name that does not say so."""
    return pc.metrics.from_function(lambda outputs, targets: (outputs - target).abs().mean(1), higher_is_better=False)


def test_the_metric_decides_which_values_are_better(tmp_path: pathlib.Path) -> None:
    """Training leads away from outputs of 0, so the first evaluation is the best one."""
    declared = Evaluator(BATCHES, {"accuracy": away_from(0.0)})
    settings = Checkpoints(tmp_path, best="eval/accuracy", keep=1, background=False)
    found: list[float] = []

    def watch(event: pc.Event, state: State) -> None:
        found.extend([state.metrics["eval/accuracy"].item()] if event is pc.Event.EVAL_END else [])

    stop = [EarlyStopping("eval/accuracy", "6ep"), Threshold("eval/accuracy", 0.0)]
    options: dict[str, Any] = {"evaluate": declared, "stop": stop, "checkpoints": settings, "observers": watch}
    fit(compose(loop_events), make_state(duration="6ep"), BATCHES, **options)
    kept = [pc.saving.read_index(path).metrics.get("eval/accuracy") for path in tmp_path.iterdir()]
    assert len(found) == 6 and min(found) != found[-1]
    assert min(found) in kept


def values_after_periods(period: int) -> dict[int, float]:
    """Return the training accuracy at the end of each period, by the number of batches."""
    step, found = compose(loop_events, [pc.algorithms.training_metrics(reset=f"{period}ba")]), {}
    batches = make_batches(10)
    for state in training(step, make_state(duration="3ep"), batches):
        if state.timestamp.batch % period == 0:
            found[state.timestamp.batch] = state.metrics["train/accuracy"].item()
    return found


def test_metrics_of_training_decide_within_an_epoch(tmp_path: pathlib.Path) -> None:
    step, batches = compose(loop_events, [pc.algorithms.training_metrics(reset="4ba", name="mine")]), make_batches(10)
    values = values_after_periods(4)
    goal = max(value for batch, value in values.items() if batch > 4)
    first = next(batch for batch, value in values.items() if value >= goal)
    start = make_state(duration="3ep")
    assert fit(step, start, batches, stop=Threshold("train/accuracy", goal)).timestamp.batch == first
    waited = fit(step, start, batches, stop=EarlyStopping("train/accuracy", "4ba", min_delta=9))
    assert waited.timestamp.batch == 8
    settings = Checkpoints(tmp_path, every="1dur", keep=1, best="train/accuracy", background=False)
    fit(step, start, batches, checkpoints=settings)
    kept = {index.batch: index.metrics for path in tmp_path.iterdir() if (index := pc.saving.read_index(path))}
    best = max(values, key=lambda batch: values[batch])
    assert kept[best]["train/accuracy"] == pytest.approx(values[best]) and kept.keys() == {best, 30}


def test_a_metric_of_training_says_which_values_are_better() -> None:
    gap = pc.metrics.from_function(lambda outputs, targets: outputs.abs().mean(1), higher_is_better=False)
    step = compose(loop_events, [pc.algorithms.training_metrics({"gap": gap})])
    assert fit(step, make_state(duration="3ep"), BATCHES, stop=Threshold("train/gap", 1e9)).timestamp.epoch == 1
    plain = compose(loop_events, [pc.algorithms.training_metrics({"gap": gap._replace(higher_is_better=None)})])
    with pytest.raises(ValueError, match="'train/gap': are lower or higher values better"):
        fit(plain, make_state(duration="3ep"), BATCHES, stop=Threshold("train/gap", 1e9))


@pytest.mark.parametrize(
    ("first", "second", "end"),
    [
        (EarlyStopping("eval/loss", "1ep", min_delta=9), EarlyStopping("eval/loss", "50ep", min_delta=9), 24),
        (EarlyStopping("eval/loss", "1ep", min_delta=9), EarlyStopping("eval/loss", "10ba", min_delta=9), 16),
        (Threshold("eval/loss", 9.0), Threshold("eval/loss", 1e-9), 24),
    ],
)
def test_a_stopped_run_continues_under_a_more_lenient_condition(
    first: Any, second: Any, end: int, tmp_path: pathlib.Path
) -> None:
    step, state, data = compose(loop_events), make_state(duration="6ep"), make_batches(4)
    shared = {"evaluate": Evaluator(data), "checkpoints": Checkpoints(tmp_path, background=False)}
    stopped = fit(step, state, data, stop=first, **shared)
    assert stopped.timestamp.batch < end
    resumed = fit(step, state, data, stop=second, resume="auto", **shared)
    assert (
        resumed.timestamp.batch == end == fit(step, state, data, stop=second, evaluate=Evaluator(data)).timestamp.batch
    )
    assert fit(step, stopped, data, stop=second, evaluate=Evaluator(data)).timestamp.batch == end
