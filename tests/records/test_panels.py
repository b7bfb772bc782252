import math
import statistics

import pytest
from hypothesis import given, strategies as st

from purecompose.records import panels
from purecompose.records.drawing import picture
from purecompose.records.panels import MOST_POINTS, panels_of, series_of, smooth, spread
from tests.records.run_helpers import made_up


NUMBERS = st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf)


def titles(*runs: object, x: str = "batch") -> list[str]:
    return [panel.title for panel in panels_of(runs, x)]  # pyright: ignore[reportArgumentType]


def test_there_are_panels_only_for_recorded_numbers() -> None:
    run = made_up()
    assert titles(run) == ["training loss", "eval/accuracy", "learning rate", "throughput"]
    assert [panel.unit for panel in panels_of([run], "batch")] == ["", "", "", "batches / s"]
    bare = made_up("bare", count=9)
    assert titles(bare) == ["training loss", "learning rate", "throughput"]
    assert titles(bare, run) == titles(run, bare) == titles(run)


def test_metrics_of_training_have_panels_but_are_not_evaluations() -> None:
    run = made_up(batch_3={"train/accuracy": 0.5, "norm/grad": 1.0})
    assert titles(run) == ["training loss", "eval/accuracy", "train/accuracy", "learning rate", "throughput"]


def test_learning_rates_of_groups_are_drawn_for_a_single_run() -> None:
    run = made_up(batch_3={"lr/*.bias": 0.5})
    (panel,) = (panel for panel in panels_of([run], "batch") if panel.kind == "lr")
    assert [series.column for series in panel.series] == ["lr", "lr/*.bias"]
    (panel,) = (panel for panel in panels_of([run, run], "batch") if panel.kind == "lr")
    assert [(series.run, series.column) for series in panel.series] == [(0, "lr"), (1, "lr")]


def test_epochs_have_fractions() -> None:
    series = series_of(made_up(count=25), 0, "loss", "epoch")
    assert series.x == pytest.approx([batch / 10 for batch in range(1, 26)])


def test_an_evaluation_is_drawn_at_the_preceding_batch() -> None:
    assert series_of(made_up(count=20), 0, "eval/accuracy", "time/seconds").x == [10 / 50, 20 / 50]


def test_another_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="x='loss': expected one of batch, epoch, time/sample, time/seconds"):
        panels_of([made_up()], "loss")
    with pytest.raises(ValueError, match="no records yet"):
        panels_of([made_up(count=0)], "batch")


@given(st.lists(NUMBERS, max_size=30), st.integers(1, 9))
def test_smoothing_gives_means_over_finite_values(values: list[float], window: int) -> None:
    half = window // 2
    for i, mean in enumerate(smooth(values, window)):
        around = [value for j, value in enumerate(values) if abs(i - j) <= half and math.isfinite(value)]
        assert mean == pytest.approx(statistics.fmean(around)) if around else math.isnan(mean)


def test_a_huge_number_does_not_swallow_those_after_it() -> None:
    assert smooth([1e30, *[0.5] * 10], 3)[5:] == [0.5] * 6


@given(st.lists(NUMBERS, min_size=1, max_size=9))
def test_the_spread_of_a_population_is_that_of_its_finite_members(members: list[float]) -> None:
    found, finite = spread([members]), [value for value in members if math.isfinite(value)]
    if finite:
        assert (found.low, found.high) == ([min(finite)], [max(finite)])
        assert found.median == [pytest.approx(statistics.median(finite))]
    else:
        assert math.isnan(found.low[0]) and math.isnan(found.median[0]) and math.isnan(found.high[0])


@pytest.mark.parametrize(
    ("count", "tail"),
    [
        (0, 1),
        (3, 1),  # no epoch has ended yet
        (10, 2),  # a quarter of one epoch, which also contains the first losses
        (40, 10),
        (45, 10),  # in the middle of the fifth
        (400, 10),
    ],
)
def test_the_current_loss_is_a_mean_over_at_most_an_epoch(count: int, tail: int) -> None:
    series = series_of(made_up(count=count), 0, "loss", "batch")
    assert series.tail == tail
    if count:
        assert series.last == pytest.approx(statistics.fmean(series.y[-tail:]))


def test_the_last_number_of_a_population_is_per_member_over_finite_values() -> None:
    run = made_up(members=2, batch_40={"loss": [math.nan, 7.0]})
    series = series_of(run, 0, "loss", "batch")
    first, second = zip(*series.y[-10:], strict=True)
    assert series.members == 2
    assert series.last == [pytest.approx(statistics.fmean(first[:-1])), pytest.approx(statistics.fmean(second))]


def test_the_current_value_of_a_metric_is_its_last_number() -> None:
    assert series_of(made_up(), 0, "eval/accuracy", "batch").last == 1.0


def test_pictures_of_many_records_share_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    run, drawn, line = made_up(count=4 * MOST_POINTS), [], panels._line
    monkeypatch.setattr(panels, "_line", lambda series, is_noisy: [drawn.append(series), line(series, is_noisy)][1])
    found = panels_of([run], "batch")
    for dark in (False, True):
        picture([run], found, dark=dark)
    assert len(drawn) == sum(len(one.series) for one in found)
    assert all(len(line.x) <= MOST_POINTS for one in found for line in one.lines)
