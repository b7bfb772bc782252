"""Monitors: the actual learning rate of a batch, memory, and the speed by a clock that the test controls."""

import types
from typing import Any

import pytest
import torch

from purecompose import Event, State, compose, fit, loop_events, optim, population, schedule, stack_states
from purecompose.observers import Recorder, Stopwatch, learning_rate, memory, progress, speed, updates
from tests.observers.observer_helpers import Kept, at, make_batches, make_population, make_state


def run(optimizer: Any, monitor: Any, duration: str = "2ep") -> list[dict[str, Any]]:
    kept = Kept()
    observers = Recorder(kept, monitors=monitor)
    fit(compose(loop_events), make_state(duration, optimizer), make_batches(), observers=observers)
    return kept


def test_the_learning_rate_is_the_one_that_the_batch_was_trained_with() -> None:
    seen: list[float] = []

    @schedule.scheduled
    def falling(timestamp: Any) -> float:
        return 1.0 / (1 + timestamp.batch + 100 * timestamp.epoch + timestamp.sample)

    def moved(event: Event, state: State) -> None:
        # With a gradient of one, a step of SGD moves the parameter by the learning rate.
        if event is Event.BATCH_END:
            seen.append(state.params["weight"].item())

    net = torch.nn.Linear(1, 1, bias=False).requires_grad_(True)
    state = State.create(
        net, loss=lambda outputs, targets, reduction="mean": outputs.mean(), optimizer=optim.sgd(falling)
    )
    before = net.weight.item()
    kept = Kept()
    observers = [Recorder(kept, monitors=learning_rate()), moved]
    batches = [(torch.ones(2, 1, dtype=torch.float32), torch.zeros(2)) for _ in range(3)]
    fit(compose(loop_events), state, batches, duration="2ep", observers=observers)
    steps = [first - second for first, second in zip([before, *seen], seen, strict=False)]
    assert [record["lr"] for record in kept] == pytest.approx(steps, abs=1e-6)


def test_settings_of_groups_and_products() -> None:
    lr = 0.5 * schedule.hparam("lr", 0.25) * schedule.linear()
    groups = {"bias": {"lr": 0.125, "weight_decay": 0.0}}
    optimizer = optim.sgd(lr, momentum=schedule.hparam("momentum", 0.5), groups=groups)
    records = run(optimizer, learning_rate("lr", "momentum", "weight_decay", "nesterov", "beta"), "4ba")
    names = [name for name in records[0] if name not in ("batch", "epoch", "loss", "time/sample")]
    assert names == ["lr", "momentum", "weight_decay", "lr/bias", "weight_decay/bias"]
    assert [record["lr"] for record in records] == pytest.approx([0.125 * (1 - batch / 4) for batch in range(4)])
    assert {(r["momentum"], r["weight_decay"], r["lr/bias"]) for r in records} == {(0.5, 0.0, 0.125)}


def test_settings_of_several_optimizers() -> None:
    optimizer = optim.by_pattern({"*weight": optim.muon(0.5)}, optim.adamw(0.25 * schedule.linear()))
    records = run(optimizer, learning_rate(), "4ba")
    assert [record["lr"] for record in records] == pytest.approx([0.25 * (1 - batch / 4) for batch in range(4)])
    assert {record["lr/*weight"] for record in records} == {0.5}


def test_members_have_their_own_learning_rates() -> None:
    states = make_population(3, optim.sgd(schedule.hparam("lr", 0.5)))
    states = states.replace(hparams={"lr": torch.tensor([0.5, 0.25, 0.125])})
    kept = Kept()
    fit(population(compose(loop_events), 3), states, make_batches(), observers=Recorder(kept, monitors=learning_rate()))
    assert kept[-1]["lr"] == [0.5, 0.25, 0.125]


def test_the_memory_is_that_of_the_process() -> None:
    found = memory()(make_state())
    block = torch.ones(64 * 2**20 // 4)  # 64 MiB that are in use
    later = memory()(make_state())
    assert later["memory/peak"] >= later["memory/resident"]
    assert later["memory/resident"] - found["memory/resident"] > 0.7 * block.numel() * 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    fake = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: fake.now))
    return fake


def test_the_speed_leaves_out_the_first_batch_and_evaluation(clock: types.SimpleNamespace) -> None:
    monitor, found = speed(window=3), []
    state = make_state("20ba")
    monitor.observe(Event.FIT_START, at(state, 0))  # type: ignore[attr-defined]
    for batch in range(1, 11):
        clock.now += 60 if batch == 1 else 0.5 if batch < 7 else 0.25
        monitor.observe(Event.BATCH_END, at(state, batch))  # type: ignore[attr-defined]
        monitor.observe(Event.BATCH_END, at(state, batch))  # type: ignore[attr-defined]  # by a second recorder
        found.append(monitor(at(state, batch)))
        if batch == 4:
            monitor.observe(Event.EVAL_BEFORE_ALL, at(state, batch))  # type: ignore[attr-defined]
            clock.now += 32
            monitor.observe(Event.EVAL_AFTER_ALL, at(state, batch))  # type: ignore[attr-defined]
    assert found[0] == {}
    assert [one["speed/batches"] for one in found[1:6]] == [2.0] * 5
    assert found[-1]["speed/batches"] == 4.0 and found[-1]["speed/samples"] == 32.0
    assert "speed/tokens" not in found[-1]
    assert found[3]["time/left"] == pytest.approx(16 * 0.5)
    training, evaluating = 60 + 5 * 0.5 + 4 * 0.25, 32
    assert found[-1]["time/left"] == pytest.approx(10 * 0.25 * (training + evaluating) / training)


def test_rates_of_a_population_count_the_samples_of_every_member(clock: types.SimpleNamespace) -> None:
    monitor, state = speed(), stack_states([make_state(None)] * 3)
    for batch in (1, 2):
        clock.now += 1
        monitor.observe(Event.BATCH_END, at(state, batch))  # type: ignore[attr-defined]
    assert monitor(at(state, 2)) == {"speed/batches": 1.0, "speed/samples": 24.0}


def test_updates_are_those_of_the_batch() -> None:
    start, kept, states = make_state("3ba"), Kept(), []
    observers = [Recorder(kept, monitors=updates()), lambda event, state: states.append(dict(state.params))]
    fit(compose(loop_events), start, make_batches(), observers=observers)
    batches = [record for record in kept if "loss" in record]
    assert not any(name.startswith("update") for name in batches[0])
    by_batch = {}
    for params in states:
        by_batch.setdefault(tuple(float(p.sum()) for p in params.values()), params)
    before, after = list(by_batch.values())[1:3]
    for name, param in after.items():
        moved = (param - before[name]).norm().item()
        assert batches[1][f"update/{name}"] == pytest.approx(moved, rel=1e-5)
        assert batches[1][f"update_ratio/{name}"] == pytest.approx(moved / before[name].norm().item(), rel=1e-5)


def test_a_parameter_of_zeros_has_a_ratio_of_zero() -> None:
    state = make_state("1ba")
    blank = state.replace(params={name: torch.zeros_like(param) for name, param in state.params.items()})
    monitor = updates()
    monitor(blank)
    assert all(value == 0 for value in monitor(blank).values())
    assert all(value == 0 for name, value in monitor(state).items() if "ratio" in name)


def test_evaluation_is_timed_separately(clock) -> None:
    watch = Stopwatch()
    for event, seconds, batch in (
        (Event.FIT_START, 0, 10),
        (Event.BATCH_END, 2, 11),
        (Event.EVAL_BEFORE_ALL, 1, 11),
        (Event.EVAL_BATCH_END, 4, 11),
    ):
        clock.now += seconds
        watch(event, at(make_state(), batch))
    assert (watch.seconds, watch.training_seconds) == (7.0, 3.0)
    for event, seconds, batch in ((Event.EVAL_AFTER_ALL, 1, 11), (Event.BATCH_END, 3, 13), (Event.FIT_END, 0, 13)):
        clock.now += seconds
        watch(event, at(make_state(), batch))
    assert (watch.seconds, watch.training_seconds, watch.batches) == (11.0, 6.0, 3)
    assert watch.batches_per_second == 0.5


def test_a_new_run_starts_at_zero(clock) -> None:
    watch = Stopwatch()
    watch(Event.FIT_START, at(make_state(), 0))
    clock.now += 5
    watch(Event.BATCH_END, at(make_state(), 1))
    watch(Event.FIT_START, at(make_state(), 1))
    assert (watch.seconds, watch.batches, watch.batches_per_second) == (0.0, 0, 0.0)


def test_in_a_hand_written_loop_the_first_batch_counts(clock) -> None:
    watch = Stopwatch()
    watch(Event.BATCH_END, at(make_state(), 1))
    clock.now += 1
    watch(Event.BATCH_END, at(make_state(), 2))
    assert watch.batches == 2
