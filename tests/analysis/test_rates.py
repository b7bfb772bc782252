"""The range test finds the rates between which training works, and leaves the state as it was."""

from typing import Any

import pytest
import torch

from purecompose import hparam, optim, schedule
from purecompose.analysis import learning_rate_range
from purecompose.analysis.sweeping import _result, with_named_rate
from tests.analysis.problems import BATCHES_PER_EPOCH, make_step, new_state, train_data


def test_the_suggested_rate_trains_and_the_test_ends_where_the_loss_diverges() -> None:
    state = new_state(0, optimizer=optim.sgd(0.1))
    before = {name: param.clone() for name, param in state.params.items()}
    found = learning_rate_range(make_step([]), state, train_data(), low=1e-4, high=1e4, num_batches=120)
    assert found.has_diverged and len(found.rates) < 120
    assert 0.01 < found.suggested < found.lowest < found.rates[-1]
    assert all(torch.equal(before[name], param) for name, param in state.params.items())
    assert "suggested lr" in str(found) and "diverged at" in str(found)


def test_the_rate_of_each_batch_is_the_one_reported() -> None:
    """With the parameters of one batch to the next: w <- w - lr g."""
    state = new_state(0, optimizer=optim.sgd(0.3 * schedule.cosine()))
    batch = next(iter(train_data()))
    found = learning_rate_range(make_step([]), state, [batch] * BATCHES_PER_EPOCH, low=0.01, high=0.1, num_batches=10)
    assert found.rates[0] == 0.01 and found.rates[-1] == pytest.approx(0.1)
    step = make_step([])
    for rate, loss in zip(found.rates, found.losses, strict=True):
        plain = state.replace(optimizer=optim.sgd(rate))
        after = step(plain, batch)
        assert after.loss is not None and loss == pytest.approx(after.loss.item(), rel=1e-5)
        state = state.replace(params=after.params)


@pytest.mark.parametrize("first", [0.5, 2.5])
def test_a_single_batch_decides_nothing(first: float) -> None:
    losses = [first, *[2.3] * 9, 2.2, 1.9, 1.4, 1.2, 1.1, 1.0, 1.0, 1.2, 1.9, 0.4]
    rates = [10.0**-i for i in range(20, 0, -1)]
    found = _result(rates, losses, 1, has_diverged=False)
    assert (found.suggested, found.lowest) == (rates[11], rates[15])


def test_a_named_rate_keeps_the_schedule_on_request() -> None:
    state = new_state(0, optimizer=optim.sgd(0.3 * schedule.cosine()))
    assert with_named_rate(state, keeps_schedule=True).optimizer.lr == hparam("lr", 0.3) * schedule.cosine()
    assert with_named_rate(state, keeps_schedule=False).optimizer.lr == hparam("lr", 0.3)
    named = new_state(0, optimizer=optim.sgd(hparam("lr", 0.2) * schedule.cosine()))
    assert with_named_rate(named, keeps_schedule=True) is named


def test_a_rate_that_is_too_high_from_the_start_is_an_error() -> None:
    with pytest.raises(ValueError, match="begin below low=1.00e\\+06"):
        learning_rate_range(make_step([]), new_state(0), train_data(), low=1e6, high=1e7)


def test_a_rate_with_a_scalar_of_another_name_is_replaced_too() -> None:
    batches = [next(iter(train_data()))] * BATCHES_PER_EPOCH
    options: dict[str, Any] = {"low": 0.01, "high": 1.0, "num_batches": 20}
    plain, other = (
        learning_rate_range(make_step([]), new_state(0, optimizer=optim.sgd(rate)), batches, **options)
        for rate in (0.1, hparam("rate", 0.1) * schedule.cosine())
    )
    assert other.losses == plain.losses
    kept = with_named_rate(new_state(0, optimizer=optim.sgd(0.5 * hparam("rate", 0.1))), keeps_schedule=True)
    assert {name: value.item() for name, value in kept.hparams.items()} == pytest.approx({"rate": 0.1, "lr": 0.5})
