"""The schedules, against tables of reference values and against the formulas written with fractions."""

import pickle

import pytest
from hypothesis import given, strategies as st

from purecompose.schedule import Schedule, constant, cosine, linear
from purecompose.time import RunLength, Timestamp, UnitError


BATCHES = RunLength("100ba")
EPOCHS = RunLength("1000ep", batches_per_epoch=1000)


# Published values for runs of 100 batches and of 1000 epochs of 1000 batches: multipliers by batch.
@pytest.mark.parametrize(
    ("schedule", "run", "values"),
    [
        (cosine(t_max="50ba"), BATCHES, {5: 0.975528, 10: 0.904508, 20: 0.654508}),
        (cosine(alpha_f=0.1, warmup="10ba"), BATCHES, {5: 0.5, 20: 0.972862, 50: 0.628142, 75: 0.260746}),
        (linear(2.0, 0.5, warmup="10ba"), BATCHES, {5: 1.0, 10: 2.0, 50: 1.333333}),
        (linear(), EPOCHS, {100_000: 0.9, 200_000: 0.8, 400_000: 0.6}),
        (linear(0.0, 2.0), EPOCHS, {100_000: 0.2, 200_000: 0.4, 400_000: 0.8}),
        (linear(0.0, 1.0, t_max="0.25dur"), EPOCHS, {100_000: 0.4, 200_000: 0.8, 400_000: 1.0}),
        (cosine(), EPOCHS, {0: 1, 333_333: 0.75, 500_000: 0.5, 666_667: 0.25, 1_000_000: 0}),
        (cosine(alpha_f=0.5, t_max="30ba"), EPOCHS, {0: 1, 10: 0.875, 15: 0.75, 20: 0.625, 30: 0.5, 50: 0.5}),
        (constant(warmup="500ep"), EPOCHS, {250_000: 0.5, 500_000: 1, 750_000: 1, 1_000_000: 1}),
        (constant(3, "500ep"), EPOCHS, {250_000: 1.5, 500_000: 3, 750_000: 3, 1_000_000: 3}),
        (linear(warmup="500ep"), EPOCHS, {0: 0, 250_000: 0.5, 500_000: 1, 750_000: 0.5, 1_000_000: 0}),
        (
            linear(3, 2, t_max="501ep", warmup="500ep"),
            EPOCHS,
            {0: 0, 250_000: 1.5, 500_000: 3, 500_500: 2.5, 501_000: 2, 502_000: 2},
        ),
        (linear(warmup="500ba"), EPOCHS, {250: 0.5, 500: 1}),
        (cosine(warmup="0.9dur"), EPOCHS, {450_000: 0.5, 900_000: 1, 933_333: 0.75, 950_000: 0.5, 1_000_000: 0}),
        (linear(warmup="1dur"), BATCHES, {0: 0, 10: 0.1, 100: 1}),
        (cosine(warmup="100ba"), BATCHES, {0: 0, 10: 0.1, 100: 1}),
    ],
)
def test_reference_values(schedule: Schedule, run: RunLength, values: dict[int, float]) -> None:
    for batch, expected in values.items():
        # The published value for a third is 933333.
        assert schedule(Timestamp(batch=batch, run=run)) == pytest.approx(expected, abs=1e-5)


def test_values_have_no_lag() -> None:
    run = RunLength("8ba")
    assert [linear()(Timestamp(batch=t, run=run)) for t in range(3)] == [1.0, 0.875, 0.75]
    assert [constant(warmup="4ba")(Timestamp(batch=t, run=run)) for t in range(6)] == [0, 0.25, 0.5, 0.75, 1, 1]


alphas = st.floats(-10, 10)


@given(alphas, alphas)
def test_the_ends_are_exact(alpha_i: float, alpha_f: float) -> None:
    for t in (7, 8, 1000):
        now = Timestamp(batch=t)
        assert linear(alpha_i, alpha_f, t_max="7ba", warmup="3ba")(now) == alpha_f
        assert cosine(alpha_f=alpha_f, t_max="7ba", warmup="3ba")(now) == alpha_f
    assert linear(alpha_i, alpha_f, t_max="7ba", warmup="3ba")(Timestamp(batch=3)) == alpha_i


def test_a_warm_up_may_be_the_whole_run() -> None:
    schedule = linear(2.0, 0.5, t_max="4ba", warmup="4ba")
    assert [schedule(Timestamp(batch=t)) for t in (2, 4, 5)] == [1.0, 2.0, 0.5]


def test_a_constant_has_no_end() -> None:
    assert constant(3.0)(Timestamp(batch=10**9)) == 3.0
    assert constant()(Timestamp()) == 1.0


@pytest.mark.parametrize(
    ("t_max", "warmup", "run", "fields"),
    [
        ("1000sp", "200sp", RunLength(), {"sample": 600}),
        ("1000tok", "200tok", RunLength(), {"token": 600}),
        ("10ep", "2ep", RunLength(), {"epoch": 6, "batch": 7}),
        ("10ep", "4ba", RunLength(batches_per_epoch=2), {"batch": 12}),
        ("1dur", "0.2dur", RunLength("1000sp"), {"sample": 600}),
        ("1dur", "200tok", RunLength("1000tok"), {"token": 600}),
        ("1dur", "2ep", RunLength("10ep"), {"epoch": 6}),
        ("1dur", "2ep", RunLength("10ep", batches_per_epoch=10), {"batch": 60}),
        ("10ep", "0.2dur", RunLength("10ep", 10), {"batch": 60}),
    ],
)
def test_units_are_converted_if_the_run_knows_how(t_max: str, warmup: str, run: RunLength, fields: dict) -> None:
    # 60 % of the way with a warm-up of 20 %: half of the descent is done.
    assert linear(t_max=t_max, warmup=warmup)(Timestamp(run=run, **fields)) == pytest.approx(0.5, rel=1e-12)


def test_no_warm_up_has_no_unit() -> None:
    assert linear(t_max="1000tok")(Timestamp(token=250)) == 0.75
    assert linear(t_max="1000tok", warmup="0ep")(Timestamp(token=250)) == 0.75


def test_a_fraction_of_few_samples_is_not_truncated_to_integers() -> None:
    run = RunLength("5sp")
    assert linear(t_max="0.5dur")(Timestamp(sample=2, run=run)) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("schedule", "run", "error", "message"),
    [
        (linear(warmup="5sp"), RunLength("10ep", 5), UnitError, "warmup=5sp and t_max=1.0dur have no unit"),
        (linear(t_max="9tok", warmup="5ba"), RunLength("9tok"), UnitError, "batches_per_epoch"),
        (linear(warmup="5ba"), RunLength("10ep"), UnitError, "in common"),
        (linear(), RunLength(), ValueError, "no duration.*State.create"),
        (cosine(warmup="1ba"), RunLength("60sec"), ValueError, "wall-clock"),
        (linear(warmup="50ba"), RunLength("40ba"), ValueError, "warmup=50ba is longer than t_max=1.0dur"),
    ],
)
def test_times_that_the_run_cannot_determine_are_errors(
    schedule: Schedule, run: RunLength, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        schedule(Timestamp(run=run))


def test_schedules_are_values() -> None:
    with_defaults = cosine(alpha_f=0, t_max="1dur", warmup="0ba")
    assert with_defaults == cosine() and hash(with_defaults) == hash(cosine())
    assert len({cosine(), cosine(alpha_f=0.1), cosine(t_max="5ep"), cosine(warmup="5ep"), linear(), constant()}) == 6
    assert pickle.loads(pickle.dumps(linear(warmup="5ba"))) == linear(warmup="5ba")
