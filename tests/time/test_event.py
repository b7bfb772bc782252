"""The Event enum: lookup, and properties derived from the names against a manual table."""

import pathlib
import re

import pytest
from hypothesis import given, strategies as st

from purecompose.core.program import events_in
from purecompose.loop import loop_events
from purecompose.time.event import Event


# b: opens, a: closes, -: neither; with the canonical name. Written manually on purpose.
TABLE = """
INIT - init | BEFORE_LOAD b load | AFTER_LOAD a load | FIT_START b fit
EPOCH_START b epoch | BEFORE_DATALOADER b dataloader | AFTER_DATALOADER a dataloader | BATCH_START b batch
BEFORE_TRAIN_BATCH b train_batch | BEFORE_FORWARD b forward | AFTER_FORWARD a forward | BEFORE_LOSS b loss
AFTER_LOSS a loss | BEFORE_BACKWARD b backward | AFTER_BACKWARD a backward | AFTER_TRAIN_BATCH a train_batch
BATCH_END a batch | BATCH_CHECKPOINT - batch_checkpoint | EPOCH_END a epoch
EPOCH_CHECKPOINT - epoch_checkpoint | FIT_END a fit | EVAL_BEFORE_ALL b eval_all | EVAL_START b eval
EVAL_BATCH_START b eval_batch | EVAL_BEFORE_FORWARD b eval_forward | EVAL_AFTER_FORWARD a eval_forward
EVAL_BATCH_END a eval_batch | EVAL_END a eval | EVAL_AFTER_ALL a eval_all
EVAL_STANDALONE_START b eval_standalone | EVAL_STANDALONE_END a eval_standalone | PREDICT_START b predict
PREDICT_END a predict | PREDICT_BATCH_START b predict_batch | PREDICT_BATCH_END a predict_batch
PREDICT_BEFORE_FORWARD b predict_forward | PREDICT_AFTER_FORWARD a predict_forward
"""
ALONE: set[str] = set()
"""Canonical names of events that have no partner."""
ROWS = [row.split() for row in re.split(r"[|\n]", TABLE) if row.strip()]


def test_the_table_contains_every_event_once() -> None:
    names = [name for name, _, _ in ROWS]
    assert sorted(names) == sorted(event.name for event in Event)


@pytest.mark.parametrize(("name", "kind", "canonical"), ROWS, ids=lambda text: text)
def test_facts_match_the_table(name: str, kind: str, canonical: str) -> None:
    event = Event[name]
    assert event.value == name.lower()
    assert event.is_before_event == (kind == "b")
    assert event.is_after_event == (kind == "a")
    assert event.canonical_name == canonical


def test_every_pair_has_one_opening_and_one_closing_event() -> None:
    opening = [event.canonical_name for event in Event if event.is_before_event]
    closing = [event.canonical_name for event in Event if event.is_after_event]
    assert len(set(opening)) == len(opening) and len(set(closing)) == len(closing)
    assert set(opening) ^ set(closing) == ALONE


def test_exactly_the_after_events_are_reversed() -> None:
    names = {event.name for event in Event if event.is_reversed}
    assert names == {name for name, kind, _ in ROWS if kind == "a" and "AFTER_" in name}


def test_exactly_the_ends_of_training_see_the_new_time() -> None:
    spans = ("BATCH", "EPOCH")
    expected = {f"{span}_{end}" for span in spans for end in ("END", "CHECKPOINT")} | {"FIT_END"}
    assert {event.name for event in Event if event.sees_new_time} == expected


def test_evaluation_and_prediction_events() -> None:
    assert sum(event.is_eval for event in Event) == 10
    assert sum(event.is_predict for event in Event) == 6
    assert not any(event.is_eval and event.is_predict for event in Event)
    assert Event.EVAL_STANDALONE_END.is_eval and not Event.BATCH_END.is_eval


@given(st.sampled_from(list(Event)), st.data())
def test_lookup_ignores_case(event: Event, data: st.DataObject) -> None:
    upper = data.draw(st.lists(st.booleans(), min_size=len(event.name), max_size=len(event.name)))
    letters = zip(event.value, upper, strict=True)
    assert Event("".join(c.upper() if up else c for c, up in letters)) is event
    assert Event(event) is event


def test_members_are_plain() -> None:
    assert str(Event.INIT) == "Event.INIT"
    with pytest.raises(TypeError, match=r"an event is not a string; compare with a member, or with Event\('init'\)"):
        assert Event.INIT == "init"
    assert {Event.INIT: 1}[Event("INIT")] == 1


def test_the_table_of_the_training_steps_events_is_in_their_order() -> None:
    text = (pathlib.Path(__file__).parents[2] / "docs" / "concepts.md").read_text()
    assert re.findall(r"^\| `([A-Z_]+)` \| once a", text, re.M) == [event.name for event in events_in(loop_events)]
    named = {name.strip("`*") for name in re.findall(r"`[A-Z_]+\*?`", text)}
    others = {event.name for event in Event if not (event.is_eval or event.is_predict)} - named
    assert others == set()
