import math
from pathlib import Path
from typing import Any

import pytest

from purecompose.records import RunRecords
from purecompose.records.contents import names_of, panels_of, places
from tests.records.run_helpers import at, made_up


NAN = {"loss": math.nan}


def test_numbers_that_are_not_finite_are_counted_and_leave_gaps() -> None:
    panel = panels_of([made_up(batch_3=NAN, batch_4=NAN)])[0]
    assert (panel.title, panel.bad) == ("training loss", "2 of 40 not finite, the first at 3")
    assert panel.series[0].spread.isnan().nonzero().tolist() == [[level, i] for level in range(3) for i in (2, 3)]


def test_a_population_is_a_median_in_a_band_of_its_finite_members() -> None:
    run = made_up(members=3, batch_9={"loss": [math.nan, math.inf, 7.0]})
    low, median, high = panels_of([run])[0].series[0].spread.tolist()
    losses = [record["loss"] for record in made_up(members=3).records if "loss" in record]
    losses[8] = [7.0] * 3
    assert median == pytest.approx([sorted(one)[1] for one in losses])
    assert (low, high) == ([min(one) for one in losses], [max(one) for one in losses])


def test_runs_of_one_name_are_distinguished_by_parent_folders(tmp_path: Path) -> None:
    assert names_of([RunRecords("run", tmp_path / above / "run") for above in "ab"]) == ["a/run", "b/run"]


def test_a_loss_that_falls_far_has_a_logarithmic_axis() -> None:
    losses: dict[str, Any] = {f"batch_{i}": {"loss": math.exp(-i / 4)} for i in range(1, 41)}
    assert panels_of([made_up(**losses)])[0].is_logarithmic and not panels_of([made_up()])[0].is_logarithmic


def titles(*runs: RunRecords) -> list[str]:
    return [panel.title for panel in panels_of(runs)]


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
    loss, accuracy, *_ = panels_of([run])
    assert (loss.title, loss.columns) == ("loss", ["loss", "eval/loss", "val/loss"])
    assert (accuracy.title, accuracy.columns) == ("accuracy", ["eval/accuracy", "train/accuracy"])


def test_rates_begin_again_where_a_run_continues() -> None:
    slow: dict[str, Any] = {f"batch_{i}": {"speed/batches": 1.0} for i in range(22, 28)}  # of few and cold batches
    run = made_up(starts=(at(0, until=20), at(20, until=40)), **slow)
    (speed,) = (panel for panel in panels_of([run]) if panel.kind == "speed")
    assert [(series.x[0], series.x[-1]) for series in speed.series] == [(1, 20), (30, 40)]
    assert all(bool((series.y == 50).all()) for series in speed.series)
    (loss,) = (panel for panel in panels_of([run]) if panel.kind == "loss")
    assert loss.series[0].x == list(range(1, 41))


def test_an_epoch_advances_evenly_with_its_batches() -> None:
    run = made_up(count=35)
    found = dict(zip((record["batch"] for record in run.records), places(run, "epoch"), strict=True))
    assert [found[batch] for batch in (1, 10, 25, 30, 35)] == pytest.approx([0.1, 1, 2.5, 3, 3.5])
    grows = [{"batch": batch, "epoch": epoch} for batch, epoch in [(2, 0), (4, 1), (6, 1), (12, 2), (14, 2)]]
    assert places(RunRecords("grows", Path(), records=grows), "epoch") == [0.5, 1, 1.25, 2, 2.25]


def test_memory_is_in_megabytes() -> None:
    (panel,) = (panel for panel in panels_of([made_up()]) if panel.kind == "memory")
    assert panel.series[0].y.unique().tolist() == [1.0]


def test_learning_rates_of_groups_are_drawn_for_a_single_run() -> None:
    run = made_up(batch_3={"lr/*.bias": 0.5})
    (panel,) = (panel for panel in panels_of([run]) if panel.kind == "lr")
    assert [series.column for series in panel.series] == ["lr", "lr/*.bias"]
    (panel,) = (panel for panel in panels_of([run, run]) if panel.kind == "lr")
    assert [(series.run, series.column) for series in panel.series] == [(0, "lr"), (1, "lr")]


def test_places_along_the_horizontal_axis() -> None:
    loss, accuracy, *_ = panels_of([made_up(count=20)])
    assert accuracy.series[0].x == [10, 20]  # at the preceding batch
