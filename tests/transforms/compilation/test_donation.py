"""Donation: ownership of memory, spent states, and that tensors read from a state never change."""

import copy
import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Event, State, compose, hparam, loop_events, optim, tree
from purecompose.errors import SpentStateError
from purecompose.transforms.signature import LASTING
from tests.helpers import changing, counter, make_batch, make_batches, make_cnn, make_state
from tests.sampling import one_in
from tests.transforms.compilation.compile_helpers import (
    assert_agree,
    assert_runs_agree,
    average,
    breaking,
    cloned,
    compiled,
    host_log,
    made,
    scaling,
    spent_text,
    swap,
)


DONATE = pytest.mark.parametrize("donate", [True, False], ids=["donate", "keep"])


def test_the_first_state_stays_usable_and_later_ones_are_spent() -> None:
    step, fast = made()
    first = make_state(make_cnn())
    before = first.copy()
    batch = make_batch(shape=(2, 6, 6))
    second = fast(first, batch)
    third = fast(second, batch)
    assert tree.equal(before, first)
    for name in LASTING:
        with pytest.raises(SpentStateError):
            getattr(second, name)
    _ = third.params
    assert_agree(step(step(first, batch), batch), third)
    assert_agree(fast(first, batch), step(first, batch))  # a second start from it


def test_without_donation_no_state_is_spent() -> None:
    step, fast = made([average()], donate=False)
    states = [step.init(make_state())]
    copies = [states[0].copy()]
    for batch in make_batches(4):
        states.append(fast(states[-1], batch))
        copies.append(states[-1].copy())
    assert all(tree.equal(state, kept) for state, kept in zip(states, copies, strict=True))
    assert_agree(fast(states[1], make_batch(1)), copies[2])


def test_what_was_read_before_never_changes_and_stays_readable() -> None:
    _, fast = made([swap(), average()])
    state = fast.init(make_state(optimizer=optim.adam(1e-2)))
    held = []
    for batch in make_batches(6):
        state = fast(state, batch)
        seen = {name: getattr(state, name) for name in (*LASTING, "key", "loss", "metrics")}
        held.append((state, seen, cloned(seen)))
    for spent, seen, kept in held:
        assert tree.equal(seen, kept)
        assert spent.params is seen["params"]


def test_a_spent_state_keeps_loss_metrics_and_time() -> None:
    _, fast = made([swap()])
    state = fast(fast.init(make_state()), make_batch())
    loss, metrics = state.loss, cloned(state.metrics)
    assert loss is not None
    number = float(loss)
    fast(state, make_batch(1))
    assert float(loss) == number and tree.equal(state.metrics, metrics)
    assert state.timestamp.batch == 1 and state.key.shape == (2,)


def test_metrics_that_are_parameters_do_not_change_later() -> None:
    show = changing("show", Event.BATCH_START, lambda s: s.replace(metrics={**s.params, "v": s.params["0.bias"][2:]}))
    lose = changing("lose", Event.BATCH_END, lambda s: s.replace(loss=s.params["0.bias"][0]))
    step, fast = made([show, lose])
    assert_runs_agree(step, fast, make_state(), make_batches(4))
    state = fast(fast(make_state(), make_batch()), make_batch(1))
    kept = cloned((state.metrics, state.loss))
    fast(state, make_batch(2))
    assert tree.equal((state.metrics, state.loss), kept)


@pytest.mark.parametrize("change", [{"metrics": {}}, {"key": pc.random.key(3)}, {"loss": torch.zeros(())}, {}], ids=str)
def test_twins_are_spent_together(change: dict[str, Any]) -> None:
    _, fast = made()
    state = fast(make_state(), make_batch())
    twin = state.replace(**change)
    after = fast(twin, make_batch(1))
    assert all("batch 2" in spent_text(one) and "spent" in repr(one) for one in (state, twin))
    with pytest.raises(SpentStateError, match="donate=False"):
        fast(state, make_batch(1))
    _ = after.params


def mapped(state: State) -> State:
    return tree.map(lambda leaf: leaf, state)


@pytest.mark.parametrize(
    "keep", [State.copy, State.unleased, copy.copy, copy.deepcopy, mapped], ids=lambda f: f.__name__
)
def test_copies_outlive_the_step_and_can_start_runs(keep: Callable[[State], State]) -> None:
    step, fast = made()
    state = fast(make_state(), make_batch())
    kept = keep(state)
    numbers = cloned(dict(kept.params))
    fast(state, make_batch(1))
    assert tree.equal(kept.params, numbers)
    again = fast(kept, make_batch(1))
    assert_agree(step(kept, make_batch(1)), again)
    fast(again, make_batch(2))
    assert tree.equal(kept.params, numbers)


# Aliases


@DONATE
def test_slots_that_alias_parameters_in_every_step_agree(donate: bool) -> None:
    def apply(event: Event, state: State) -> State:
        transposed = {
            "t": state.params["0.weight"].t(),
            "same": state.params["0.bias"],
            "part": state.params["3.bias"][1:],
        }
        return state.replace(slots={**state.slots, "was": transposed})

    was = pc.Algorithm("was", pc.on(Event.INIT, Event.BATCH_START), apply)
    step, fast = made([was], donate=donate)
    assert_runs_agree(step, fast, step.init(make_state()), make_batches(6))


@DONATE
def test_parameters_and_momentum_that_are_swapped_agree(donate: bool) -> None:
    def turn(state: State) -> State:
        momentum = state.opt_state["momentum"]
        return state.replace(params=dict(momentum), opt_state={**state.opt_state, "momentum": dict(state.params)})

    step, fast = made([changing("turn", Event.BATCH_END, turn)], donate=donate)
    assert_runs_agree(step, fast, make_state(), make_batches(4))


@DONATE
def test_overlapping_tensors_of_the_first_state_agree(donate: bool) -> None:
    step, fast = made(donate=donate)
    wide = torch.randn(4, generator=torch.Generator().manual_seed(0))
    state = make_state()
    state = state.replace(params={**state.params, "0.bias": wide[:1].expand(8), "3.bias": wide[1:]})
    assert_runs_agree(step, fast, state, make_batches(4))


# Changes that users make between steps


OVERRIDES: dict[str, Callable[[State], State]] = {
    "hparams": lambda s: s.replace(hparams={"lr": torch.tensor(0.3)}),
    "one param": lambda s: s.replace(params={**s.params, "0.bias": torch.ones(8)}),
    "params": lambda s: s.replace(params={name: param * 0.5 for name, param in s.params.items()}),
    "slot": lambda s: s.replace(slots={**s.slots, "ema": dict(s.params)}),
    "another slot": lambda s: s.replace(slots={**s.slots, "more": {"x": torch.ones(2)}}),
    "momentum from params": lambda s: s.replace(opt_state={**s.opt_state, "momentum": dict(s.params)}),
    "key": lambda s: s.replace(key=pc.random.key(9)),
    "in place": lambda s: (s.params["0.weight"].mul_(2), s)[1],
    "in the dictionary": lambda s: (s.params.__setitem__("0.bias", torch.ones(8)), s)[1],
    "read only": lambda s: (s.params, s.slots, s.hparams, s.buffers, s)[-1],
    "nothing lasting": lambda s: s.replace(metrics={}),
}


@DONATE
@pytest.mark.parametrize("override", one_in(3, OVERRIDES.values()))
def test_overrides_between_steps_are_respected(override: Callable[[State], State], donate: bool) -> None:
    step, fast = made([average()], donate=donate)
    eager = leased = step.init(make_state(optimizer=optim.sgd(hparam("lr", 0.1), momentum=0.9)))
    for number, batch in enumerate(make_batches(8)):
        if number in (2, 3, 6):
            # The eager run shares tensors with the first state, so it must not edit them in place.
            eager, leased = override(eager.copy()), override(leased)
        eager, leased = step(eager, batch), fast(leased, batch)
    assert_agree(eager, leased)


def test_twins_see_an_edit_in_the_state_and_in_the_step() -> None:
    step, fast = made()
    state = fast(make_state(), make_batch())
    twin, other = state.replace(metrics={}), state.replace(metrics={})
    state.params["0.weight"].mul_(2)
    expected = step(other.copy(), make_batch(1))
    assert_agree(expected, fast(twin, make_batch(1)))


def test_an_override_with_another_dtype_runs_with_the_remaining_fields() -> None:
    step, fast = made()
    eager = leased = make_state()
    eager, leased = step(eager, make_batch()), fast(leased, make_batch())
    wide = lambda s: s.replace(  # noqa: E731
        params={name: param.double() for name, param in s.params.items()},
        opt_state=tree.map(lambda leaf: leaf.double(), s.opt_state),
    )
    eager, leased = wide(eager), wide(leased)
    batch = make_batch(1, dtype=torch.float64)
    eager, leased = step(eager, batch), fast(leased, batch)
    assert leased.params["0.bias"].dtype is torch.float64
    assert_agree(eager, leased)


# Several donated buffers, several steps


def test_two_runs_in_turn_do_not_touch_each_other() -> None:
    step, fast = made([average()])
    eager = [step.init(make_state(key=key)) for key in (0, 1)]
    leased = list(eager)
    for number, batch in enumerate(make_batches(8)):
        buffers = number % 2 if number < 6 else 0
        eager[buffers], leased[buffers] = step(eager[buffers], batch), fast(leased[buffers], batch)
    for first, second in zip(eager, leased, strict=True):
        assert_agree(first, second)


def test_states_pass_between_compiled_steps() -> None:
    step = compose(loop_events)
    ways = [compiled(step), compiled(step, donate=False), compiled(step), step, compiled(step, donate=False)]
    eager = leased = make_state()
    held: list[tuple[State, Any]] = []
    for number, batch in enumerate(make_batches(15)):
        way = ways[(number * 2) % len(ways)] if number % 3 else ways[number % len(ways)]
        eager, leased = step(eager, batch), way(leased, batch)
        held.append((leased, cloned((leased.metrics, leased.loss))))
    assert_agree(eager, leased)
    assert all(tree.equal((state.metrics, state.loss), kept) for state, kept in held)


def test_a_donated_state_stays_usable_after_a_step_without_donation() -> None:
    step = compose(loop_events)
    donating, keeping = compiled(step), compiled(step, donate=False)
    state = donating(make_state(), make_batch())
    before = state.copy()
    kept = keeping(state, make_batch(1))
    assert tree.equal(before, state.copy())
    copies = kept.copy()
    donating(kept, make_batch(2))
    assert tree.equal(kept, copies)
    donating(state, make_batch(1))
    with pytest.raises(SpentStateError):
        donating(state, make_batch(1))
    assert tree.equal(state, before), "what was read stays"
    assert tree.equal(kept, copies)


# Steps that fail


class Stop(Exception):
    """An error that a test raises on purpose."""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stop()], ids=["Ctrl-C", "error"])
def test_a_step_stopped_while_it_writes_spends_its_state_and_says_so(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch, [None, error])
    step, fast = made()
    first = make_state()
    state = fast(first, make_batch())
    with pytest.raises(type(error)):
        fast(state, make_batch(1))
    assert "has not finished" in spent_text(state)
    again = fast(fast(first, make_batch()), make_batch(1))
    assert_agree(step(step(first, make_batch()), make_batch(1)), again)


def test_a_step_stopped_before_it_writes_leaves_its_state_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BaseException | None] = [None, None, KeyboardInterrupt()]
    breaking(monkeypatch, errors)
    step = compose(loop_events, [scaling("a", Event.AFTER_DATALOADER, 2, 2), scaling("b", Event.BATCH_END, 0.9, 3)])
    fast = compiled(step)
    first = make_state()
    state = fast(first, make_batch())
    with pytest.raises(KeyboardInterrupt):
        fast(state, make_batch(1))
    assert_agree(step(step(first, make_batch()), make_batch(1)), fast(state, make_batch(1)))


@pytest.mark.parametrize("kind", ["plain", "host", "replaced"])
def test_of_two_threads_that_give_one_state_to_a_step_one_succeeds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = importlib.import_module("purecompose.transforms.compilation.step")
    execute, both = calls.execute, threading.Barrier(2)
    host = host_log([], Event.BATCH_START, lambda state: state.timestamp)
    step = compose(loop_events, [host] if kind == "host" else [])
    fast = compiled(step)
    state = fast(fast(step.init(make_state()), make_batch()), make_batch(2))
    if kind == "replaced":
        state = state.replace(params={name: 2 * value for name, value in state.params.items()})
    expected = step(state.copy(), make_batch(1))

    def after_the_check(*arguments: Any) -> State:
        both.wait(timeout=60)  # here both threads have found that the state is not spent
        return execute(*arguments)

    monkeypatch.setattr(calls, "execute", after_the_check)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(fast, state, make_batch(1)) for _ in range(2)]
    errors = [future.exception() for future in futures]
    assert sorted(type(error).__name__ for error in errors) == ["NoneType", "SpentStateError"], errors
    (found,) = (future.result() for future, error in zip(futures, errors, strict=True) if error is None)
    assert_agree(expected, found)


@pytest.mark.parametrize("event", [Event.AFTER_DATALOADER, Event.AFTER_TRAIN_BATCH, Event.BATCH_END])
@DONATE
def test_a_host_algorithm_that_raises_leaves_the_state_usable_or_spent(event: Event, donate: bool) -> None:
    broken: list[bool] = []

    def fail(state: State) -> State:
        if broken:
            raise Stop
        return state

    step, fast = made([changing("fail", event, fail, host=True)], donate=donate)
    state = fast(fast(make_state(), make_batch(0)), make_batch(1))
    kept = state.copy()
    broken.append(True)
    with pytest.raises(Stop) as caught:
        fast(state, make_batch(2))
    assert caught.value.__notes__ == [f"in fail at {event}"]
    broken.clear()
    assert_agree(step(kept, make_batch(2)), fast(state, make_batch(2)))


def test_a_step_that_cannot_be_built_leaves_the_state_usable() -> None:
    step, fast = made([counter()])
    state = fast(step.init(make_state()), make_batch())
    with pytest.raises(RuntimeError):
        fast(state, (torch.ones(8, 5), make_batch()[1]))  # five features where the network takes four
    kept = state.copy()
    assert_agree(step(kept, make_batch(1)), fast(state, make_batch(1)))


# Tensors that host algorithms keep


@pytest.mark.parametrize("read", [lambda s: s.params["0.weight"], lambda s: s.opt_state["momentum"]["0.bias"]])
@pytest.mark.parametrize("event", [Event.AFTER_DATALOADER, Event.AFTER_TRAIN_BATCH, Event.BATCH_END])
def test_what_a_host_algorithm_reads_never_changes(event: Event, read: Callable[[State], Any]) -> None:
    log: list[Any] = []
    step, fast = made([host_log(log, event, lambda s: (read(s), cloned(read(s))))])
    state = make_state()
    for batch in make_batches(4):
        state = fast(state, batch)
    assert len(log) >= 4 and all(tree.equal(held, kept) for held, kept in log)


def test_a_state_that_a_host_algorithm_kept_is_spent_later() -> None:
    log: list[State] = []
    _, fast = made([host_log(log, Event.BATCH_START, lambda s: s)])
    fast(fast(make_state(), make_batch()), make_batch(1))  # with a host algorithm, the first step runs as composed
    spent_text(log[-1])
