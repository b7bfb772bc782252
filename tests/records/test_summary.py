import math
import statistics

import pytest

from purecompose.records.report import Fact, facts_of
from tests.records.run_helpers import at, made_up


def test_every_number_has_a_description() -> None:
    run = made_up(batch_40={"train/accuracy": 0.25, "norm": 3.0}, starts=(at(0, until=40, seconds=75.0),))
    mean = statistics.fmean(2 * math.exp(-i / 40) for i in range(31, 41))
    assert facts_of(run) == [
        Fact("eval/accuracy", "100.00%", "at batch 40"),
        Fact("training loss", f"{mean:.4g}", "mean of the last 10 batches"),
        Fact("train/accuracy", "25.00%", "at batch 40"),
        Fact("norm", "3", "at batch 40"),
        Fact("batches", "40"),
        Fact("wall-clock time", "1 min 15 s"),
    ]


def test_a_population_has_medians_that_are_labelled_so() -> None:
    mean = statistics.fmean(2 * math.exp(-i / 40) for i in range(31, 41))
    accuracy, loss, *_ = facts_of(made_up(members=8))
    assert accuracy == Fact("eval/accuracy", "56.25%", "median of 8; 12.50% to 100.00%; at batch 40")
    words = f"median of 8; {mean:.4g} to {mean + 7:.4g}; mean of the last 10 batches"
    assert loss == Fact("training loss", f"{mean + 3.5:.4g}", words)


def test_members_without_finite_numbers_are_not_in_the_median() -> None:
    run = made_up(count=4, members=3, batch_4={"loss": [1.0, math.inf, 2.0]})
    assert facts_of(run)[0] == Fact("training loss", "1.5", "median of 2 finite of 3; 1 to 2; of the last batch")
    run = made_up(count=4, members=2, batch_4={"loss": [math.nan, math.nan]})
    assert facts_of(run)[0] == Fact("training loss", "not finite", "of the last batch")


def test_losses_that_are_not_finite_are_reported() -> None:
    run = made_up(batch_40={"loss": math.nan}, batch_39={"loss": math.inf})
    mean = statistics.fmean(2 * math.exp(-i / 40) for i in range(31, 39))
    assert facts_of(run)[1] == Fact("training loss", f"{mean:.4g}", "mean of the last 10 batches, 2 not finite")


def test_batches_without_a_record_are_not_said_to_be_in_the_mean() -> None:
    run = made_up(count=80)
    run.records[:] = [record for record in run.records if record["batch"] % 5 == 0]
    assert facts_of(run)[1].note == "mean of the last 2 recorded batches"


@pytest.mark.parametrize("batch", [40, 30])
def test_a_result_without_its_records_only_has_known_facts(batch: int) -> None:
    run = made_up(result={"metrics": {"eval/accuracy": 0.5, "loss": 0.25}, "batches": batch})
    assert facts_of(run)[0] == Fact("eval/accuracy", "50.00%")  # the records contain another one
    run.records.clear()
    assert facts_of(run)[1] == Fact("training loss", "0.25", "of the last batch")
    assert facts_of(run)[2] == Fact("batches", str(batch))
