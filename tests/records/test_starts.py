import dataclasses

import pytest

from purecompose.records.reading import Start
from purecompose.records.report import in_words
from tests.records.run_helpers import at


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "Not started."),
        ([0], "Started 2026-05-01 10:00 (UTC)."),
        ([0, 1000], "Started 2026-05-01 10:00 (UTC), continued at batch 1,000."),
        ([0, 10, 20, 30], "Started 2026-05-01 10:00 (UTC), continued at batch 10, 20 and 30 (3 times)."),
        ([0, 10, 0, 20], "Started 2026-05-01 10:00 (UTC), continued at batch 20."),
        ([7, 20], "Started 2026-05-01 10:00 (UTC) at batch 7, continued at batch 20."),
    ],
)
def test_a_run_records_where_it_resumed(batches: list[int], words: str) -> None:
    assert in_words([at(batch) for batch in batches]) == words


def test_a_zone_other_than_utc_is_shown() -> None:
    assert in_words([Start(0, "2026-05-01T10:00:00-07:00")]) == "Started 2026-05-01 10:00 (UTC-07:00)."


def test_a_start_is_read_from_plain_values_and_ignores_unknown_ones() -> None:
    start = at(3, until=9, seconds=2.5, evaluation_seconds=0.5, changed={"seed": [0, 1]})
    assert Start.of_plain({**dataclasses.asdict(start), "weather": "fine"}) == start
    assert (start.batches, start.training_seconds) == (6, 2.0)
