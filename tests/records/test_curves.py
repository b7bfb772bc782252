import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from purecompose.records import RunRecords, draw_curves, drawing, panels
from purecompose.records.drawing import picture
from purecompose.records.panels import MOST_POINTS, panels_of, series_of, smooth, spread
from tests.records.run_helpers import at, made_up


pytest.importorskip("matplotlib", reason="pictures need matplotlib")

NAN = {"loss": math.nan}


def figure_of(*runs: RunRecords, x: str = "batch") -> Any:
    return drawing.figure_of(runs, panels_of(runs, x), x)


def remarks(*runs: RunRecords) -> list[str]:
    return [axes.texts[0].get_text() for axes in figure_of(*runs).axes]


def size_of(png: bytes) -> tuple[int, int]:
    """Return width and height from the file's header."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_a_picture_is_wide_enough_and_complete(tmp_path: Path) -> None:
    path = draw_curves(made_up(), tmp_path / "new" / "curves.png")
    width, height = size_of(path.read_bytes())
    assert width >= 1200 and 0.3 < height / width < 1.2
    assert [file.name for file in path.parent.iterdir()] == ["curves.png"]


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_suffix_gives_the_kind_of_picture(tmp_path: Path, suffix: str, start: bytes) -> None:
    assert draw_curves(made_up(), tmp_path / f"curves.{suffix}").read_bytes().startswith(start)


def test_numbers_that_are_not_finite_are_reported() -> None:
    assert remarks(made_up(batch_3=NAN, batch_4=NAN))[0] == "2 of 40 not finite, the first at 3"


def test_a_panel_describes_its_number() -> None:
    lower: dict[str, Any] = {
        "batch_40": {"eval/accuracy": 0.5, "train/accuracy": 0.9},
        "batch_39": {"train/accuracy": 1.0},
    }
    mean = sum(2 * math.exp(-i / 40) for i in range(31, 41)) / 10
    assert remarks(made_up(**lower)) == [
        f"mean of the last 10: {mean:.4g}",
        "last 100.00%, best 100.00%",
        "last 90.00%",  # the best of single batches is a matter of luck
        *("", ""),
    ]
    assert remarks(made_up(members=3))[:2] == [
        f"median of 3, mean of the last 10: {mean + 1:.4g}",
        "median of 3: last 66.67%, best 66.67%",
    ]


def test_a_population_is_named_one_in_the_legend(tmp_path: Path) -> None:
    text = draw_curves([made_up("plain"), made_up("eight", members=8)], tmp_path / "both.svg").read_text()
    assert "<!-- plain -->" in text and "<!-- eight (median of 8) -->" in text


def test_numbers_along_an_axis_have_one_unit_and_counts_are_whole() -> None:
    speeds: dict[str, Any] = {f"batch_{i}": {"speed/samples": 12000.0 + i} for i in range(1, 4)}
    axes = figure_of(made_up(count=3, **speeds)).axes[-1]
    shown = [axes.yaxis.get_major_formatter()(tick) for tick in axes.get_yticks()]
    assert shown[0] == "0" and len(shown) >= 4 and all(one.endswith("k") for one in shown[1:])
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_schedules_that_are_the_same_are_all_seen() -> None:
    (axes,) = (
        one
        for one in figure_of(made_up("a"), made_up("b"), made_up("c", batch_1={"lr": 0.5})).axes
        if one.get_title("left") == "learning rate"
    )
    first, second, other = (line.get_linewidth() for line in axes.get_lines())
    assert first > second + 1 and second == other


def test_a_population_is_a_median_in_a_band() -> None:
    axes = figure_of(made_up(members=3)).axes[0]
    (line,), (band,) = axes.get_lines(), axes.collections
    losses = [record["loss"] for record in made_up(members=3).records if "loss" in record]
    assert list(line.get_ydata()) == pytest.approx([one[1] for one in losses])
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((losses[-1][0], losses[0][2]))


def test_many_batches_are_smoothed_over_the_faint_ones() -> None:
    faint, bold = figure_of(made_up(count=500)).axes[0].get_lines()
    assert faint.get_alpha() < 0.5 and faint.get_linewidth() < bold.get_linewidth()
    assert len(bold.get_xdata()) == len(faint.get_xdata()) == 500


def test_the_number_of_points_that_are_drawn_is_bounded() -> None:
    run = made_up(count=24_400, batch_9000={"loss": 7.0}, batch_12345={"loss": math.nan})
    losses = [record["loss"] for record in run.records if "loss" in record]
    faint, bold = figure_of(run).axes[0].get_lines()
    assert len(bold.get_xdata()) <= 1600 and len(faint.get_xdata()) <= 3000
    at = list(bold.get_xdata()).index(8001)
    assert bold.get_ydata()[at] == pytest.approx(statistics.mean(losses[8000 - 400 : 8000 + 416]))
    drawn = dict(zip(faint.get_xdata(), faint.get_ydata(), strict=True))
    assert drawn[9000] == 7.0 and math.isnan(drawn[12345])  # extreme values and gaps are not left out
    assert all(len(line.get_xdata()) <= 3000 for axes in figure_of(run).axes for line in axes.get_lines())


def test_runs_share_axes_and_a_legend_with_their_literal_names() -> None:
    names = ["plain", "_hidden", "$x$"]
    figure = figure_of(*(made_up(name) for name in names))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    lines = figure.axes[0].get_lines()
    assert len(lines) == 3 and len({line.get_color() for line in lines}) == 3


def test_runs_of_one_name_are_distinguished_by_parent_folders(tmp_path: Path) -> None:
    runs = [RunRecords("run", tmp_path / above / "run", records=made_up().records) for above in "ab"]
    text = draw_curves(runs, tmp_path / "both.svg").read_text()
    # Letters are outlines in the file, whose comments contain the text.
    assert "<!-- a/run -->" in text and "<!-- b/run -->" in text


def test_all_panels_have_one_horizontal_axis() -> None:
    figure = figure_of(made_up(), made_up(count=100), x="epoch")
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    low, high = figure.axes[0].get_xlim()
    assert low < 0 < 10 < high < 10.5


def test_a_loss_that_falls_far_has_a_logarithmic_axis_and_an_outlier_none() -> None:
    losses: dict[str, Any] = {f"batch_{i}": {"loss": math.exp(-i / 4)} for i in range(1, 41)}
    falling = made_up(**losses)
    assert figure_of(falling).axes[0].get_yscale() == "log"
    spiked = figure_of(made_up(count=200, batch_5={"loss": 1e6})).axes[0]
    assert spiked.get_yscale() == "linear" and spiked.get_ylim()[1] < 5


def test_settings_of_matplotlib_are_not_touched(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw_curves([made_up(), made_up("b")], tmp_path / "curves.png")
    assert dict(matplotlib.rcParams) == before


def test_runs_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.png, \.svg, \.pdf, got '.*curves.jpg'"):
        draw_curves(made_up(), tmp_path / "curves.jpg")
    with pytest.raises(ValueError, match="x='loss': expected one of batch, epoch, time/sample, time/seconds"):
        draw_curves(made_up(), tmp_path / "curves.png", x="loss")
    with pytest.raises(ValueError, match="no records yet"):
        draw_curves(made_up(count=0), tmp_path / "curves.png")
    with pytest.raises(ValueError, match="at least one run"):
        draw_curves([], tmp_path / "curves.png")
    with pytest.raises(TypeError, match="the folder of a run"):
        draw_curves([3], tmp_path / "curves.png")  # pyright: ignore[reportArgumentType]
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        draw_curves(tmp_path / "nowhere", tmp_path / "curves.png")
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize(
    "run",
    [
        made_up(count=1, batch_1=NAN),
        made_up(members=2, batch_5={"loss": [math.nan, 1.0]}, batch_6={"loss": [math.inf, math.nan]}),
        made_up(batch_5={"loss": 1e30}, batch_6={"loss": -1e-300}),
        made_up("$\\frac{$ _<&> 日本 \x00", starts=(at(0), at(12))),
    ],
    ids=["only nan", "nan members", "extremes", "name"],
)
def test_odd_runs_can_be_drawn(run: RunRecords) -> None:
    assert size_of(drawing.picture([run], panels_of([run], "batch"), dark=True))[0] >= 1200
