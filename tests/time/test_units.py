"""Time and TimeUnit: a table of texts, and the algebra against plain integers and fractions."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st

from purecompose.time import Time, TimeUnit, UnitError
from purecompose.time.units import named_time


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


@pytest.mark.parametrize("text", ["1.5ep", "2.1ba", "3.2sp", "3.4tok", "0.1sec", "1e-9ba"])
def test_a_part_of_a_count_is_a_type_error(text: str) -> None:
    with pytest.raises(TypeError, match="expected a whole number"):
        Time.parse(text)


@pytest.mark.parametrize("text", ["5", "1.5", " 3e4 ", "-2"])
def test_a_number_without_a_unit_is_an_error_that_asks_for_one(text: str) -> None:
    with pytest.raises(ValueError, match="has no unit; add one of ep, ba"):
        Time.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", " ", "ep", "1m1h", "1s1m", "nanep", "infba", "5epp", "5ep5ba", "1.5h", "-1h", "4_tok", "4__0tok", "٥ep"]
    + ["1e9999dur", "1e999999999sp", "0x10ba", "1,000ba", "h"],
)
def test_text_that_cannot_be_read_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Time.parse(text)


def test_parse_only_takes_strings() -> None:
    with pytest.raises(TypeError, match=r"got 5 \(int\)"):
        Time.parse(5)  # pyright: ignore[reportArgumentType]


@given(times)
def test_text_and_repr_read_back(time: Time) -> None:
    assert Time.parse(str(time)) == time
    assert eval(repr(time)) == time


def test_text() -> None:
    assert [str(Time(2, "tok")), str(Time(0.5, "dur")), str(Time(6, "sec"))] == ["2tok", "0.5dur", "6sec"]
    assert repr(Time(5, "ep")) == "Time(5, TimeUnit.EPOCH)"


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500))
def test_clock_form_is_a_sum_of_seconds(hours: int, minutes: int, seconds: int) -> None:
    assert Time.parse(f"{hours}h{minutes}m{seconds}s") == Time(hours * 3600 + minutes * 60 + seconds, "sec")


@pytest.mark.parametrize("value", [1.0, 1.5, True, "1", None])
def test_counts_are_ints(value: object) -> None:
    with pytest.raises(TypeError, match="ep: expected an int, got"):
        Time(value, "ep")  # pyright: ignore[reportArgumentType]


def test_a_fraction_is_a_finite_float() -> None:
    assert type(Time(1, "dur").value) is float
    with pytest.raises(TypeError, match="dur: expected a finite number, got '1'"):
        Time("1", "dur")  # pyright: ignore[reportArgumentType]
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            Time(value, "dur")


def test_unit_lookup() -> None:
    assert TimeUnit("EP") is TimeUnit("Epoch") is TimeUnit.EPOCH
    with pytest.raises(ValueError, match=r"'epochs'; there are ep \(epochs\), ba \(batches"):
        TimeUnit("epochs")
    with pytest.raises(TypeError, match=r"got 3 \(int\)"):
        TimeUnit(3)


def test_of() -> None:
    one = Time(1, "ep")
    assert Time.of(one) is one
    assert Time.of("1ep") == Time.of(1, "ep") == one
    for value in (None, [1, "ep"], True):
        with pytest.raises(TypeError, match="expected a Time or a string such as '90ep', got"):
            Time.of(value)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="give it a unit, as in '5ep'"):
        Time.of(5)
    with pytest.raises(TypeError, match=r"got 0.5 \(float\); a share of the run is '0.5dur'"):
        Time.of(0.5)
    with pytest.raises(TypeError, match=r"got 1.5 \(float\)$"):
        Time.of(1.5)


def test_errors_for_unreadable_times_name_the_argument() -> None:
    assert named_time(3, "swa: every", TimeUnit.BATCH) == Time(3, "ba")
    with pytest.raises(ValueError, match="^swa: every='often': cannot read the time 'often'; write"):
        named_time("often", "swa: every", TimeUnit.BATCH)
    with pytest.raises(TypeError, match="^ema: half_life=0.5: ba: expected an int, got .*; write smoothing=0.5$"):
        named_time(0.5, "ema: half_life", TimeUnit.BATCH, share="write smoothing=")


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


def test_unit_error_names_both_sides() -> None:
    with pytest.raises(UnitError, match="5ep < 3ba: ep and ba cannot be converted without a run"):
        _ = Time(5, "ep") < "3ba"
    assert issubclass(UnitError, RuntimeError)


def test_values_that_are_not_times_are_a_type_error() -> None:
    one = Time(1, "ep")
    operations: list[Callable[[Any, Any], Any]] = [operator.mul, operator.lt]
    with pytest.raises(TypeError):
        _ = one < 1.5
    for op in operations:
        with pytest.raises(TypeError):
            op(one, None)


def test_zero() -> None:
    assert not Time(0, "ep") and Time(1, "ep")


def test_equality_is_plain_and_times_are_frozen() -> None:
    one = Time(1, "ep")
    assert one != "1ep" and one != 1 and one != None  # noqa: E711
    assert hash(one) == hash(Time.parse("1ep"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.value = 2  # pyright: ignore[reportAttributeAccessIssue]
