"""Schedules of torch as functions of time, and `one_cycle` beside torch's."""

import pickle

import pytest
import torch

from purecompose import optim, schedule
from purecompose.time import RunLength, Timestamp


lr_scheduler = torch.optim.lr_scheduler


def values_of(make, num, lr=1.0, **settings):
    optimizer = torch.optim.SGD([torch.zeros(())], lr=lr)
    scheduler, found = make(optimizer, **settings), []
    for _ in range(num):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def chained(optimizer, length):
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=length)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.ExponentialLR(optimizer, 0.9)], [length])


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (lr_scheduler.StepLR, {"step_size": 3, "gamma": 0.5}),
        (lr_scheduler.CosineAnnealingLR, {"T_max": 7, "eta_min": 0.1}),
        (lr_scheduler.CyclicLR, {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 4, "cycle_momentum": False}),
        (chained, {"length": 5}),
        (lr_scheduler.MultiStepLR, {"milestones": [2, 5], "gamma": 0.5}),
    ],
)
@pytest.mark.parametrize("unit", ["batch", "epoch"])
def test_values_equal_those_of_the_scheduler_at_any_time(make, settings, unit):
    curve = schedule.from_torch(make, every="2ba" if unit == "batch" else "2ep", **settings)
    expected = values_of(make, 20, **settings)

    def at(count: int) -> Timestamp:
        return Timestamp(batch=count) if unit == "batch" else Timestamp(epoch=count)

    for place in (*range(19, -1, -3), *range(20)):
        assert curve(at(2 * place + 1)) == expected[place]
    again = pickle.loads(pickle.dumps(curve))
    assert again == curve and again(at(38)) == expected[19]
    assert hash(optim.sgd(again)) == hash(optim.sgd(curve))


def test_a_scheduler_of_a_fixed_length_ends_where_torchs_does():
    settings = {"max_lr": 1.0, "total_steps": 5, "cycle_momentum": False}
    curve = schedule.from_torch(lr_scheduler.OneCycleLR, every="1ba", **settings)
    assert curve(Timestamp(batch=4)) == pytest.approx(4e-6)
    with pytest.raises(ValueError, match="The specified number of total steps is 5"):
        curve(Timestamp(batch=100))


def test_schedulers_that_are_not_functions_of_time_are_refused():
    with pytest.raises(TypeError, match="use fit.*ReduceOnPlateau"):
        schedule.from_torch(lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(ValueError, match="expected epochs or batches"):
        schedule.from_torch(lr_scheduler.StepLR, every="3sp", step_size=1)
    with pytest.raises(TypeError):
        schedule.from_torch(lr_scheduler.StepLR, gamma=0.5)


def test_one_cycle_equals_torchs():
    # Torch reaches the peak in step 0.3 * 101 - 1, and the end in step 100.
    settings = {"max_lr": 1.0, "total_steps": 101, "pct_start": 31 / 101, "cycle_momentum": False}
    expected = values_of(lr_scheduler.OneCycleLR, 101, **settings)
    curve = schedule.one_cycle(peak="30ba", t_max="100ba")
    assert [curve(Timestamp(batch=t)) for t in range(101)] == pytest.approx(expected)


def test_one_cycle_follows_the_run_and_stretches():
    curve, run = schedule.one_cycle(0.5, 0.0, "0.25dur"), RunLength("8ba")
    assert curve(Timestamp(batch=2, run=run)) == 1.0 and curve(Timestamp(batch=8, run=run)) == 0.0
    twice = schedule.one_cycle(0.5, 0.0, "2ba", "8ba").scaled(2.0)
    assert twice(Timestamp(batch=4)) == 1.0 and twice(Timestamp(batch=10)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="peak=9ba comes after t_max=8ba"):
        schedule.one_cycle(peak="9ba", t_max="8ba")
