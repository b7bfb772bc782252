"""RunLength and Timestamp: a published walk, and the counters against manually computed sums."""

import dataclasses
import pickle

import pytest
from hypothesis import given, strategies as st

from purecompose.time import RunLength, Time, Timestamp, TimeUnit


SIZES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 500)), max_size=40)
FIELDS = [field.name for field in dataclasses.fields(Timestamp)]


def test_a_walk_through_epochs() -> None:
    start = Timestamp()
    time = start.advance(10, 20).advance_epoch().advance(5, 0).advance(5, 1)
    assert (time.batch_in_epoch, time.token_in_epoch, time.sample_in_epoch) == (2, 1, 10)
    time = time.advance_epoch().advance(5, 1)
    assert (time.epoch, time.batch, time.sample, time.token) == (2, 4, 25, 22)
    assert start == Timestamp()


@given(SIZES, st.integers(1, 7))
def test_advance_rolls_over_as_nested_loops_do(sizes: list, length: int) -> None:
    run = RunLength(batches_per_epoch=length)
    time = Timestamp(run=run)
    for samples, tokens in sizes:
        time = time.advance(samples, tokens)
    n = len(sizes)
    in_epoch = sizes[n - n % length :]
    assert time == Timestamp(
        epoch=n // length,
        batch=n,
        sample=sum(s for s, _ in sizes),
        token=sum(t for _, t in sizes),
        batch_in_epoch=n % length,
        sample_in_epoch=sum(s for s, _ in in_epoch),
        token_in_epoch=sum(t for _, t in in_epoch),
        run=run,
    )


@given(st.data())
def test_advance_by_equals_repeated_advance(data: st.DataObject) -> None:
    lengths = st.none() | st.integers(1, 5)
    run = RunLength("9ep", batches_per_epoch=data.draw(lengths))
    counters = {name: data.draw(st.integers(0, 7)) for name in FIELDS if name != "run"}
    start = Timestamp(**counters, run=run)
    batches, samples, tokens = data.draw(st.tuples(st.integers(0, 40), st.integers(0, 9), st.integers(0, 9)))
    walked = start
    for _ in range(batches):
        walked = walked.advance(samples, tokens)
    assert start.advance_by(batches, samples, tokens) == walked


@given(st.integers(0, 99), st.integers(0, 9))
def test_advance_equals_building_from_the_fields(batch: int, sample: int) -> None:
    time = Timestamp(batch=batch, sample=sample).advance(4, 5)
    rebuilt = Timestamp(**{name: getattr(time, name) for name in FIELDS})
    assert rebuilt == time and hash(rebuilt) == hash(time)
    assert eval(repr(time)) == time and pickle.loads(pickle.dumps(time)) == time


def test_repr_reads_back_with_a_run() -> None:
    time = Timestamp(epoch=1, run=RunLength("2ep", batches_per_epoch=3))
    assert eval(repr(time)) == time
    assert repr(Timestamp()) == "Timestamp()"


def test_get_returns_the_counter_in_a_unit() -> None:
    time = Timestamp(epoch=2, batch=3, sample=4, token=5)
    assert [time.get(unit) for unit in ("ep", "ba", "sp", "tok")] == [2, 3, 4, 5]
    for unit in (TimeUnit.DURATION, TimeUnit.SECOND):
        with pytest.raises(ValueError, match=f"{unit.value} has no counter.*elapsed.*wall-clock"):
            time.get(unit)


@pytest.mark.parametrize(
    ("run", "fields", "expected"),
    [
        (RunLength(), {"batch": 5}, None),
        (RunLength("10ba"), {"batch": 5}, 0.5),
        (RunLength("10ba"), {"batch": 15}, 1.5),
        (RunLength("4ep", 5), {"batch": 3, "batch_in_epoch": 3}, 0.15),
        (RunLength("4ep"), {"batch": 3, "epoch": 1}, 0.25),
        (RunLength("100sp", 5), {"batch": 3, "sample": 30}, 0.3),
        (RunLength("100tok"), {"token": 30}, 0.3),
        (RunLength("60sec"), {"batch": 15}, None),
    ],
)
def test_elapsed_is_the_fraction_of_the_run(run: RunLength, fields: dict, expected: float | None) -> None:
    assert Timestamp(run=run, **fields).elapsed() == expected


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 100))
def test_a_percentage_is_reached_at_its_exact_batch(epochs: int, length: int, percent: int) -> None:
    run = RunLength(Time(epochs, "ep"), batches_per_epoch=length)
    first = -(-percent * epochs * length // 100)  # ceil, in integers
    assert Timestamp(batch=first, run=run).reached(Time(percent / 100, "dur"))
    if first:
        assert not Timestamp(batch=first - 1, run=run).reached(Time(percent / 100, "dur"))


def test_reached_in_every_unit() -> None:
    time = Timestamp(epoch=2, batch=3, sample=4, token=5, run=RunLength("8sp"))
    for now in ("2ep", "3ba", "4sp", "5tok", "0.5dur"):
        assert time.reached(now) and time.reached("0" + now.lstrip("0123456789."))
    for later in ("3ep", "4ba", "5sp", "6tok", "0.51dur"):
        assert not time.reached(later)
    with pytest.raises(ValueError, match=r"fit\(duration='60sec'\)"):
        time.reached("1sec")
    with pytest.raises(ValueError, match="no duration"):
        Timestamp().reached("0.5dur")
    with pytest.raises(ValueError, match="wall-clock"):
        Timestamp(run=RunLength("60sec")).reached("0.5dur")


def test_is_finished() -> None:
    assert not Timestamp(batch=10**9).is_finished()
    assert Timestamp(epoch=2, run=RunLength("2ep", 5)).is_finished()
    assert not Timestamp(epoch=1, batch=9, run=RunLength("2ep", 5)).is_finished()
    assert not Timestamp(batch=10**9, run=RunLength("1m")).is_finished()


@pytest.mark.parametrize(
    ("run", "time", "expected"),
    [
        (RunLength(), "7ba", 7.0),
        (RunLength(), "2ep", None),
        (RunLength(batches_per_epoch=5), "2ep", 10.0),
        (RunLength("4ep", 5), "0.25dur", 5.0),
        (RunLength("100ba"), "0.07dur", 7.0),
        (RunLength("3ep", 5), "0.5dur", 7.5),
        (RunLength("4ep"), "0.25dur", None),
        (RunLength("90sp", 5), "0.5dur", None),
        (RunLength(), "0.5dur", None),
        (RunLength("9ba", 5), "3sp", None),
        (RunLength("9ba", 5), "3tok", None),
        (RunLength("9ba", 5), "3sec", None),
    ],
)
def test_in_batches(run: RunLength, time: str, expected: float | None) -> None:
    assert run.in_batches(time) == run.in_batches(Time.parse(time)) == expected


def test_run_lengths_are_values() -> None:
    run = RunLength("4ep", 5)
    assert run.total_batches == 20.0
    assert run == RunLength(Time(4, "ep"), 5) and hash(run) == hash(RunLength("4ep", 5))
    assert dataclasses.replace(run, duration="2ep").total_batches == 10.0
    assert RunLength().total_batches is None


def test_replace() -> None:
    time = Timestamp(epoch=1, batch=2)
    assert time.replace(batch=3) == Timestamp(epoch=1, batch=3)
    assert time == Timestamp(epoch=1, batch=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'batches'"):
        time.replace(batches=3)
