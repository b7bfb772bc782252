"""Scale schedule: a run's length and its optimizer's schedules, stretched together, from the state to the run's end."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

import purecompose as pc
from purecompose import Checkpoints, State, compose, fit, loop_events, optim, schedule, training
from purecompose.algorithms import gyro_dropout, loss_scaling, mixup
from purecompose.algorithms._optimizer_settings import scale_schedule
from purecompose.time import RunLength
from tests.helpers import assert_same, make_batches, make_mlp, make_state, run_steps


RATIOS = [0.5, 0.75, 1.0]
PER_EPOCH = 4
BATCHES = make_batches(PER_EPOCH)


def start(rate: Any = 0.1, duration: str | None = "8ep", **options: Any) -> State:
    net = make_mlp(dropout=options.pop("dropout", 0.0))
    return make_state(net, optimizer=optim.sgd(rate), duration=duration, batches_per_epoch=PER_EPOCH, **options)


def at_the_start_of(duration: str) -> pc.time.Timestamp:
    return pc.time.Timestamp(run=RunLength(duration, PER_EPOCH))


def rate(state: State, batch: int | None = None) -> float:
    """Return the learning rate at a batch of the state's run, by default the current one."""
    now = state.timestamp if batch is None else state.timestamp.replace(batch=batch, epoch=batch // PER_EPOCH)
    return float(schedule.resolve(state.optimizer.lr, hparams=state.hparams, scheduled=lambda curve: curve(now)))


def rates(state: State, data: Any = BATCHES, step: Any = None, **options: Any) -> list[float]:
    """Return the learning rates of the batches of a whole run, and the one after it."""
    found = [rate(state, 0)]
    for one in training(step or compose(loop_events), state, data, **options):
        found.append(rate(one))
    return found[:-1]  # the last state occurs twice


CURVES = [
    schedule.step("2ep", 0.5),
    schedule.multi_step(["2ep", "7ep"], 0.5),
    schedule.linear(t_max="8ep"),
    schedule.linear(2.0, 0.5),
    schedule.cosine(alpha_f=0.1),
    schedule.cosine(t_max="32ba"),
    schedule.polynomial(2, "8ep", 0.2),
    schedule.exponential(0.9),
    schedule.cosine_warm_restarts("8ba", 2),
    schedule.sequence([schedule.linear(0.0, 1.0), schedule.cosine()], ["2ep"]),
]


# The invariants


@given(curve=st.sampled_from(CURVES), ratio=st.sampled_from([*RATIOS, 1.5, 2.0]), t=st.integers(0, 32))
def test_the_rate_at_ratio_times_t_is_the_one_that_was_at_t(curve: Any, ratio: float, t: int) -> None:
    assume((t * ratio).is_integer())
    state = start(0.1 * curve)
    assert rate(scale_schedule(state, ratio), int(t * ratio)) == pytest.approx(rate(state, t), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    "curve", [c for c in CURVES if "exponential" not in repr(c) and "step" not in repr(c)], ids=repr
)
def test_the_last_rate_is_the_same_for_every_ratio(curve: Any) -> None:
    last = [rates(scale_schedule(start(0.1 * curve), ratio))[-1] for ratio in [*RATIOS, 0.25]]
    assert last == pytest.approx([last[2]] * 4, rel=1e-12, abs=1e-12)


@given(ratio=st.sampled_from([*RATIOS, 0.3, 1.25]), epochs=st.integers(1, 9), warmup=st.sampled_from(["0ba", "0.3dur"]))
def test_curves_over_the_run_end_where_it_ends_however_it_is_rounded(ratio: float, epochs: int, warmup: str) -> None:
    assume(epochs * ratio >= 1)
    state = scale_schedule(start(schedule.cosine(alpha_f=0.25, warmup=warmup), f"{epochs}ep"), ratio)
    assert rate(state, int(epochs * ratio) * PER_EPOCH) == 0.25


@settings(max_examples=10)
@given(ratio=st.sampled_from(RATIOS), epochs=st.integers(1, 9), unit=st.sampled_from(["ep", "ba", "sp"]))
def test_the_run_is_of_the_length_times_the_ratio(ratio: float, epochs: int, unit: str) -> None:
    value = {"ep": epochs, "ba": epochs * PER_EPOCH, "sp": epochs * PER_EPOCH * 8}[unit]
    assume(value * ratio >= 1)
    state = fit(compose(loop_events), scale_schedule(start(0.1, f"{value}{unit}"), ratio), BATCHES)
    assert str(state.timestamp.run.duration) == f"{int(value * ratio)}{unit}"
    # The first batch at whose end the counter has reached int(D r).
    assert int(value * ratio) <= state.timestamp.get(unit) < int(value * ratio) + 8


def test_steps_and_milestones_are_not_rounded() -> None:
    """A step of 3 epochs becomes 1.5, milestones at 2 and 7 epochs become 1 and 3.5; an epoch has 4 batches."""
    half = scale_schedule(start(schedule.step("3ep")), 0.5)
    assert rates(half) == pytest.approx([1] * 6 + [0.1] * 6 + [0.01] * 5)
    half = scale_schedule(start(schedule.multi_step(["2ep", "7ep"])), 0.5)
    assert rates(half) == pytest.approx([1] * 4 + [0.1] * 10 + [0.01] * 3)


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_the_warm_up_is_stretched_on_request(ratio: float) -> None:
    state = start(schedule.linear(warmup="4ba"))
    plain, whole = rates(state), rates(scale_schedule(state, ratio, scale_warmup=True))
    assert whole[:: max(1, int(ratio))] == pytest.approx(plain[:: max(1, int(1 / ratio))])
    # Otherwise it takes as long as before, and then the curve continues.
    kept = rates(scale_schedule(state, ratio))
    assert kept[:5] == [0, 0.25, 0.5, 0.75, 1] and kept == rates(
        start(schedule.linear(warmup="4ba"), f"{int(8 * ratio)}ep")
    )


# Cases that other libraries get wrong


@pytest.mark.parametrize("t_max", ["32ba", "8ep", "1dur"])
def test_a_warm_up_and_an_absolute_end_both_work_in_a_shorter_run(t_max: str) -> None:
    found = rates(scale_schedule(start(schedule.cosine(t_max=t_max, warmup="3ba")), 0.5))
    assert found[3] == 1 and found[-1] == 0 and len(found) == 17


def test_it_happens_once_however_the_run_continues(tmp_path: pathlib.Path) -> None:
    step, folder = compose(loop_events, [mixup(0.2)]), tmp_path / "run"
    checkpoints = Checkpoints(folder, every="1ba", keep=None, background=False)

    def fresh() -> State:
        return scale_schedule(start(0.1 * schedule.step("3ep", warmup="2ba"), dropout=0.3), 0.5)

    whole = fit(step, fresh(), BATCHES)
    assert whole.timestamp.batch == 16
    cut = training(step, fresh(), BATCHES, checkpoints=checkpoints)
    at_7 = next(state for state in cut if state.timestamp.batch == 7)
    pc.save(at_7, tmp_path / "saved", step=step)
    loaded = pc.load(tmp_path / "saved", like=step.init(fresh()), step=step)
    assert loaded.timestamp.run == whole.timestamp.run

    (at_5,) = folder.glob("*ba00000005")
    ends = [fit(step, loaded, BATCHES), fit(step, step.init(fresh()), BATCHES, resume=at_5)]
    for end in (*ends, fit(step, fresh(), BATCHES, checkpoints=checkpoints, resume="auto")):
        assert end.timestamp == whole.timestamp
        assert_same(end, whole)
    with pytest.raises(ValueError, match="expected a state at the start of its run, got one at batch 7"):
        scale_schedule(loaded, 0.5)


# Place in the program


def test_the_given_state_is_unchanged_and_the_rest_is_shared() -> None:
    state = start(0.1 * schedule.step("2ep"))
    copied, before = state.copy(), state.timestamp
    half = scale_schedule(state, 0.5)
    assert_same(state, copied)
    assert state.timestamp == before == at_the_start_of("8ep") and half.timestamp == at_the_start_of("4ep")
    assert all(half.params[name] is param for name, param in state.params.items())
    assert half.model is state.model and half.key is state.key and half.opt_state is state.opt_state
    assert half.context.schedules == (schedule.step("2ep").scaled(0.5),)
    assert state.context.schedules == (schedule.step("2ep"),)


def test_the_duration_given_to_fit_is_that_of_the_whole_run() -> None:
    state = scale_schedule(start(schedule.sequence([schedule.cosine(), 0.5], ["4ep"])), 0.5)
    found = rates(state, duration="3ep")
    assert len(found) == 13 and found[8:] == [0.5] * 5


def test_methods_that_read_the_runs_length_at_init_read_the_new_one() -> None:
    def period(state: State) -> float:
        step = compose(loop_events, [gyro_dropout()])
        return step.init(state).slots["gyro_dropout"].period_length.item()

    plain = start(0.1, "8ep", dropout=0.5)
    assert period(scale_schedule(plain, 0.5)) == period(start(0.1, "4ep", dropout=0.5)) == period(plain) / 2


def test_named_scalars_groups_and_optimizers_inside_of_others() -> None:
    curve = schedule.step("2ep", 0.5)
    groups = {"*.bias": {"lr": 0.2 * curve, "weight_decay": 0.0}}
    optimizer = optim.adamw(pc.hparam("lr", 0.1) * curve, weight_decay=0.01, groups=groups)
    state = make_state(optimizer=optimizer, duration="8ep", batches_per_epoch=PER_EPOCH)
    half = scale_schedule(state, 0.5)
    groups = {"*.bias": {"lr": 0.2 * curve.scaled(0.5), "weight_decay": 0.0}}
    assert half.optimizer == optim.adamw(pc.hparam("lr", 0.1) * curve.scaled(0.5), weight_decay=0.01, groups=groups)
    assert half.hparams == state.hparams and half.context.schedules == (curve.scaled(0.5),)
    step = compose(loop_events, [loss_scaling()])
    end = run_steps(step, step.init(half), BATCHES)
    assert end.optimizer.inner == half.optimizer and end.context.schedules == half.context.schedules


# Refused settings


call: Any = scale_schedule
"""Past the type checker, which knows that the arguments are wrong."""


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: call(optim.sgd(0.1), 0.5), TypeError, "scale_schedule: expected a State, got sgd"),
        (lambda: scale_schedule(start(duration="8ep"), 0.1), ValueError, "0.1 \\* 8ep is less than 1ep.*smaller unit"),
        (lambda: scale_schedule(start(duration=None), 0.5), ValueError, "0.5 has no effect: the state has no duration"),
        (lambda: scale_schedule(start(schedule.cosine(), None), 0.5), ValueError, "has no effect"),
        (lambda: scale_schedule(start(schedule.cosine(warmup="4ba"), None), 0.5), ValueError, "has no effect"),
        (lambda: scale_schedule(start(schedule.scheduled(float_of)), 0.5), ValueError, "float_of.*plain function"),
    ],
)
def test_schedules_that_cannot_be_stretched_are_refused(
    make: Callable[[], State], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def float_of(timestamp: pc.time.Timestamp) -> float:
    return float(timestamp.batch)


def test_without_a_duration_only_schedules_are_stretched() -> None:
    half = scale_schedule(start(schedule.step("2ep"), None), 0.5)
    assert half.timestamp.run.duration is None and rate(half, 4) == 0.1
    assert scale_schedule(start(duration=None), 1).timestamp.run.duration is None


def test_an_initialised_state_is_refused() -> None:
    step = compose(loop_events, [gyro_dropout()])
    with pytest.raises(ValueError, match="INIT is over for gyro_dropout.*before step.init"):
        scale_schedule(step.init(start(dropout=0.5)), 0.5)
    assert scale_schedule(compose(loop_events).init(start()), 0.5).timestamp.run.duration == pc.time.Time(4, "ep")
