import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from purecompose.records import RunRecords, curves, draw_curves
from purecompose.records.curves import picture
from purecompose.records.series import panels_of, places, smooth
from tests.records.run_helpers import at, made_up


pytest.importorskip("matplotlib", reason="pictures need matplotlib")

NAN = {"loss": math.nan}
NUMBERS = st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf)


def figure_of(*runs: RunRecords, x: str = "batch") -> Any:
    return curves.figure_of(runs, panels_of(runs, x), x)


def size_of(png: bytes) -> tuple[int, int]:
    """Return width and height from the file's header."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_suffix_gives_the_kind_of_picture(tmp_path: Path, suffix: str, start: bytes) -> None:
    assert draw_curves(made_up(), tmp_path / f"curves.{suffix}").read_bytes().startswith(start)


def test_numbers_that_are_not_finite_are_reported_and_leave_gaps() -> None:
    axes = figure_of(made_up(batch_3=NAN, batch_4=NAN)).axes[0]
    assert axes.get_title(loc="left") == "training loss: 2 of 40 not finite, the first at 3"
    (line,) = axes.get_lines()
    assert [i for i, y in enumerate(line.get_ydata()) if math.isnan(y)] == [2, 3]


def test_a_population_is_a_median_in_a_band_of_its_finite_members() -> None:
    axes = figure_of(made_up(members=3, batch_9={"loss": [math.nan, math.inf, 7.0]})).axes[0]
    (line,), (band,) = axes.get_lines(), axes.collections
    losses = [record["loss"] for record in made_up(members=3).records if "loss" in record]
    losses[8] = [7.0] * 3
    assert list(line.get_ydata()) == pytest.approx([one[1] for one in losses])
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((losses[-1][0], 7.0))


def test_many_batches_are_smoothed_over_the_faint_ones() -> None:
    run = made_up(count=500)
    faint, bold = figure_of(run).axes[0].get_lines()
    assert faint.get_alpha() < 0.5 and faint.get_linewidth() < bold.get_linewidth()
    losses = [record["loss"] for record in run.records if "loss" in record]
    assert list(faint.get_ydata()) == losses
    assert bold.get_ydata()[250] == pytest.approx(statistics.fmean(losses[250 - 8 : 250 + 9]))


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


def test_a_loss_that_falls_far_has_a_logarithmic_axis() -> None:
    losses: dict[str, Any] = {f"batch_{i}": {"loss": math.exp(-i / 4)} for i in range(1, 41)}
    assert figure_of(made_up(**losses)).axes[0].get_yscale() == "log"
    assert figure_of(made_up()).axes[0].get_yscale() == "linear"


def test_settings_of_matplotlib_are_not_touched(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw_curves([made_up(), made_up("b")], tmp_path / "curves.png")
    assert dict(matplotlib.rcParams) == before


def test_runs_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    for runs, name, options, error, words in (
        (made_up(), "curves.jpg", {}, ValueError, r"ends in \.png, \.svg, \.pdf, got '.*curves.jpg'"),
        (made_up(), "a.png", {"x": "loss"}, ValueError, "expected one of batch, epoch, time/sample, time/seconds"),
        (made_up(count=0), "a.png", {}, ValueError, "no records yet"),
        ([], "a.png", {}, ValueError, "at least one run"),
        ([3], "a.png", {}, TypeError, "the folder of a run"),
        (tmp_path / "nowhere", "a.png", {}, FileNotFoundError, "there is no folder"),
    ):
        with pytest.raises(error, match=words):
            draw_curves(runs, tmp_path / name, **options)  # pyright: ignore
    assert list(tmp_path.iterdir()) == []


def titles(*runs: RunRecords) -> list[str]:
    return [panel.title for panel in panels_of(runs, "batch")]


def test_there_are_panels_only_for_recorded_numbers() -> None:
    run = made_up()
    assert titles(run) == ["training loss", "eval/accuracy", "learning rate", "throughput (batches / s)", "memory (MB)"]
    bare = made_up("bare", count=9)
    assert titles(bare) == ["training loss", "learning rate", "throughput (batches / s)", "memory (MB)"]
    assert titles(bare, run) == titles(run, bare) == titles(run)
    assert "norm/grad" not in titles(made_up(batch_3={"norm/grad": 1.0}))


def test_a_quantity_has_one_panel_for_training_and_evaluation() -> None:
    run = made_up(batch_3={"train/accuracy": 0.5})
    run.records.append({"batch": 40, "epoch": 4, "eval/loss": 0.5, "val/loss": 0.25})
    loss, accuracy, *_ = panels_of([run], "batch")
    assert (loss.title, loss.columns) == ("loss", ["loss", "eval/loss", "val/loss"])
    assert (accuracy.title, accuracy.columns) == ("accuracy", ["eval/accuracy", "train/accuracy"])
    colors = {line.get_color() for line in figure_of(run).axes[0].get_lines()}
    assert len(colors) == 3  # one for each column; with several runs, each run has one
    assert len({line.get_color() for line in figure_of(run, run).axes[0].get_lines()}) == 2


def test_rates_begin_again_where_a_run_continues() -> None:
    slow: dict[str, Any] = {f"batch_{i}": {"speed/batches": 1.0} for i in range(22, 28)}  # of few and cold batches
    run = made_up(starts=(at(0, until=20), at(20, until=40)), **slow)
    (speed,) = (panel for panel in panels_of([run], "batch") if panel.kind == "speed")
    assert [(series.x[0], series.x[-1]) for series in speed.series] == [(1, 20), (30, 40)]
    assert all(bool((series.y == 50).all()) for series in speed.series)
    (loss,) = (panel for panel in panels_of([run], "batch") if panel.kind == "loss")
    assert loss.series[0].x == list(range(1, 41))


def test_an_epoch_advances_evenly_with_its_batches() -> None:
    run = made_up(count=35)
    found = dict(zip((record["batch"] for record in run.records), places(run, "epoch"), strict=True))
    assert [found[batch] for batch in (1, 10, 25, 30, 35)] == pytest.approx([0.1, 1, 2.5, 3, 3.5])
    grows = [{"batch": batch, "epoch": epoch} for batch, epoch in [(2, 0), (4, 1), (6, 1), (12, 2), (14, 2)]]
    assert places(RunRecords("grows", Path(), records=grows), "epoch") == [0.5, 1, 1.25, 2, 2.25]


def test_memory_is_in_megabytes() -> None:
    (panel,) = (panel for panel in panels_of([made_up()], "batch") if panel.kind == "memory")
    assert panel.series[0].y.unique().tolist() == [1.0]


def test_learning_rates_of_groups_are_drawn_for_a_single_run() -> None:
    run = made_up(batch_3={"lr/*.bias": 0.5})
    (panel,) = (panel for panel in panels_of([run], "batch") if panel.kind == "lr")
    assert [series.column for series in panel.series] == ["lr", "lr/*.bias"]
    (panel,) = (panel for panel in panels_of([run, run], "batch") if panel.kind == "lr")
    assert [(series.run, series.column) for series in panel.series] == [(0, "lr"), (1, "lr")]


def test_places_along_the_horizontal_axis() -> None:
    loss, accuracy, *_ = panels_of([made_up(count=20)], "time/seconds")
    assert accuracy.series[0].x == [10 / 50, 20 / 50]  # at the preceding batch


@given(st.lists(NUMBERS, min_size=1, max_size=30), st.integers(0, 4))
def test_smoothing_gives_means_over_finite_values(values: list[float], half: int) -> None:
    found = smooth(torch.tensor(values, dtype=torch.float64), 2 * half + 1).tolist()
    for i, mean in enumerate(found):
        around = [value for j, value in enumerate(values) if abs(i - j) <= half and math.isfinite(value)]
        assert mean == pytest.approx(statistics.fmean(around), abs=1e-6) if around else math.isnan(mean)


def test_a_huge_number_does_not_swallow_those_after_it() -> None:
    values = torch.tensor([1e30, *[0.5] * 10], dtype=torch.float64)
    assert smooth(values, 3)[5:].tolist() == [0.5] * 6


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
    assert size_of(picture([run]))[0] >= 1200
