"""Time and TimeUnit: a table of texts, and the algebra against plain integers and fractions."""

import dataclasses
import operator

import pytest
from hypothesis import assume, given, strategies as st

from purecompose.time import Time, TimeUnit, UnitError
from purecompose.time.event import named_time


COUNTED = [unit for unit in TimeUnit if unit is not TimeUnit.DURATION]
wholes = st.integers(-(10**20), 10**20)
finite = st.floats(allow_nan=False, allow_infinity=False)
times = st.one_of(
    st.builds(Time, wholes, st.sampled_from(COUNTED)), st.builds(Time, finite, st.just(TimeUnit.DURATION))
)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("90ep", 90, "ep"),
        ("2ba", 2, "ba"),
        ("3e10sp", 30_000_000_000, "sp"),
        ("3_0e10sp", 300_000_000_000, "sp"),
        ("3e4tok", 30_000, "tok"),
        ("4_000tok", 4000, "tok"),
        ("4_00_0tok", 4000, "tok"),
        ("0.5dur", 0.5, "dur"),
        ("1.5dur", 1.5, "dur"),
        (".5dur", 0.5, "dur"),
        ("2.dur", 2.0, "dur"),
        ("2.0ep", 2, "ep"),
        ("3.000ba", 3, "ba"),
        ("030.0sp", 30, "sp"),
        ("1.5e1ba", 15, "ba"),
        ("300e-2ba", 3, "ba"),
        ("12345678901234567891sp", 12345678901234567891, "sp"),
        ("1e23sp", 10**23, "sp"),
        (" 5 ep ", 5, "ep"),
        ("5EP", 5, "ep"),
        ("5 Epoch", 5, "ep"),
        ("-1ba", -1, "ba"),
        ("+1ba", 1, "ba"),
        ("30sec", 30, "sec"),
        ("1h20m40s", 4840, "sec"),
        ("1h", 3600, "sec"),
        ("60m", 3600, "sec"),
        ("24h", 86400, "sec"),
        ("90s", 90, "sec"),
        ("100H90M", 365_400, "sec"),
        ("1h5s", 3605, "sec"),
    ],
)
def test_parse(text: str, value: float, unit: str) -> None:
    time = Time.parse(text)
    assert time == Time(value, unit)
    assert type(time.value) is (float if unit == "dur" else int)


@pytest.mark.parametrize(
    "text",
    ["", " ", "ep", "1m1h", "1s1m", "nanep", "infba", "5epp", "5ep5ba", "1.5h", "-1h", "4_tok", "4__0tok", "٥ep"]
    + ["1e9999dur", "1e999999999sp", "0x10ba", "1,000ba", "h"],
)
def test_text_that_cannot_be_read_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Time.parse(text)


@given(times)
def test_text_and_repr_read_back(time: Time) -> None:
    assert Time.parse(str(time)) == time
    assert eval(repr(time)) == time


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_clock_form_is_a_sum_of_seconds(hours: int, minutes: int, seconds: int) -> None:
    assert Time.parse(f"{hours}h{minutes}m{seconds}s") == Time(hours * 3600 + minutes * 60 + seconds, "sec")


@given(wholes, wholes, st.sampled_from(COUNTED))
def test_order_follows_the_values(a: int, b: int, unit: TimeUnit) -> None:
    x, y = Time(a, unit), Time(b, unit)
    for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
        assert compare(x, y) == compare(a, b)
    assert (x * b).value == a * b == (b * x).value


def test_scaling_has_no_rounding_errors() -> None:
    assert 0.29 * 100 < 29  # plain truncation would make 28 of it
    assert Time(100, "ep") * 0.29 == Time(29, "ep")
    assert Time(100, "ep") * 0.999 == Time(99, "ep")
    assert (Time(2**53 + 1, "sp") * 1).value == 2**53 + 1


@given(times, times)
def test_units_do_not_mix(x: Time, y: Time) -> None:
    assume(x.unit is not y.unit)
    assert x != y and not x == y
    for compare in (operator.lt, operator.le, operator.gt, operator.ge):
        with pytest.raises(UnitError):
            compare(x, str(y))


def test_zero() -> None:
    assert not Time(0, "ep") and Time(1, "ep")


def test_equality_is_plain_and_times_are_frozen() -> None:
    one = Time(1, "ep")
    assert one != "1ep" and one != 1 and one != None  # noqa: E711
    assert hash(one) == hash(Time.parse("1ep"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.value = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_what_a_time_is_made_of() -> None:
    one = Time(1, "ep")
    assert Time.of(one) is one and Time.of("1ep") == Time.of(1, "ep") == named_time(1, "a: b", TimeUnit.EPOCH) == one
    assert TimeUnit("EP") is TimeUnit("Epoch") is TimeUnit.EPOCH
    assert type(Time(1, "dur").value) is float and issubclass(UnitError, RuntimeError)
