"""Compiled steps with host algorithms in unusual places, and transforms, threads and modes around a leased state."""

import threading
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose import Event, State, compose, loop_events, losses
from tests.helpers import changing, make_batch, make_batches, make_state
from tests.transforms.compilation.compile_helpers import DONATE, assert_agree, assert_runs_agree, compiled, made


@DONATE
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_host_algorithm_inside_the_slices_acts_in_every_step(microbatches: int, donate: bool) -> None:
    def by_time(state: State) -> State:
        assert state.grads is not None
        return state.replace(grads={n: g * (float(g.sum()) + state.timestamp.batch) for n, g in state.grads.items()})

    step = compose(
        loop_events, [changing("scale", Event.AFTER_BACKWARD, by_time, host=True)], microbatches=microbatches
    )
    assert_runs_agree(step, compiled(step, donate=donate), make_state(), make_batches(4), tolerance=1e-4)


def test_metrics_of_a_slice_are_not_donated_buffers() -> None:
    def tell(state: State) -> State:
        return state.replace(metrics={"w": state.params["0.weight"]})

    step, fast = made([changing("tell", Event.AFTER_BACKWARD, tell)], microbatches=2)
    eager = make_state()
    state, kept = eager, []
    for batch in make_batches(3):
        eager, state = step(eager, batch), fast(state, batch)
        kept.append((eager.metrics["w"], state.metrics["w"]))
    for expected, told in kept:
        torch.testing.assert_close(told, expected)


@pytest.mark.parametrize("reads", [True, False])
def test_a_step_within_a_host_algorithm_does_not_affect_the_outer_one(reads: bool) -> None:
    probe = compiled(compose(loop_events))

    def look(state: State) -> State:
        if reads:
            _ = state.params
        probe(state, state.batch)
        return state

    step, fast = made([changing("look", Event.BATCH_START, look, host=True)])
    assert_runs_agree(step, fast, make_state(), make_batches(4))


def test_host_algorithms_act_once_a_step() -> None:
    acted: list[int] = []

    def count(state: State) -> State:
        acted.append(state.timestamp.batch)
        return state

    _, fast = made([changing("count", Event.BATCH_START, count, host=True)])
    state = make_state(duration="9ba")
    fast.warmup(state, make_batch())
    assert acted == []
    for i, size in enumerate((8, 8, 5, 5, 8)):
        state = fast(state, make_batch(i, size))
    assert acted == [0, 1, 2, 3, 4]


def test_code_after_a_host_algorithm_can_fall_back() -> None:
    def by_if(state: State) -> State:
        assert state.loss is not None and state.grads is not None
        return state.replace(grads={n: g * 0.5 for n, g in state.grads.items()}) if state.loss > 0 else state

    methods = [
        changing("host", Event.BEFORE_TRAIN_BATCH, lambda s: s, host=True),
        changing("by_if", Event.AFTER_TRAIN_BATCH, by_if),
    ]
    step, fast = made(methods, fallback=True)
    with pytest.warns(UserWarning, match="As fallback=True asks, such steps run eagerly") as caught:
        assert_runs_agree(step, fast, make_state(), make_batches(4))
    assert len(caught) == 1 and "fallback=True)" not in str(caught[0].message)


def test_host_algorithms_run_without_gradients() -> None:
    teacher, modes = torch.nn.Linear(4, 1), []

    def teach(state: State) -> State:
        modes.append(torch.is_grad_enabled())
        return state.replace(metrics={"t": teacher(state.inputs).mean()})

    _, fast = made([changing("teach", Event.AFTER_DATALOADER, teach, host=True)])
    state = make_state()
    for batch in make_batches(3):
        state = fast(state, batch)
        assert not state.metrics["t"].requires_grad
    assert modes == [False] * 3


def test_a_state_is_read_in_inference_mode() -> None:
    _, fast = made()
    state = fast(make_state(), make_batch())
    with torch.inference_mode():
        state.forward(make_batch()[0])
    assert not state.params["0.weight"].is_inference()
    fast(state, make_batch(1))


def test_a_state_that_a_transform_read_first_is_plain_afterwards() -> None:
    _, fast = made()
    state = fast(make_state(), make_batch())
    torch.func.grad(lambda shift: (state.forward(make_batch()[0] + shift) ** 2).sum())(torch.zeros(4))
    assert state.params["0.weight"].data_ptr() != 0 and state.copy().params["0.weight"].isfinite().all()


def test_a_reader_in_another_thread_gets_the_state_or_an_error() -> None:
    net = torch.nn.Linear(500, 2000, bias=False)
    fast = compiled(compose(loop_events, [changing("tell", Event.BATCH_END, _numbered)]))
    state = pc.State.create(net, loss=losses.mse, optimizer=pc.optim.sgd(0.0), duration="99ba")
    wrong: list[Any] = []

    def read(state: State, number: int) -> None:
        try:
            weight = state.params["weight"]
        except pc.errors.SpentStateError:
            return
        if not bool((weight == number).all()):
            wrong.append((number, weight.unique()[:3]))

    batch = torch.zeros(2, 500), torch.zeros(2, 2000)
    readers = []
    for number in range(1, 30):
        state = fast(state, batch)
        readers.append(threading.Thread(target=read, args=(state, number)))
        readers[-1].start()
    for reader in readers:
        reader.join()
    assert wrong == []


def _numbered(state: State) -> State:
    assert state.clock is not None
    number = state.clock.batch.to(torch.float32)
    return state.replace(params={name: torch.zeros_like(p) + number for name, p in state.params.items()})


def test_first_calls_from_several_threads() -> None:
    step, fast = made()
    results: dict[int, Any] = {}

    def run(size: int) -> None:
        results[size] = fast(make_state(), make_batch(0, size))

    threads = [threading.Thread(target=run, args=(size,)) for size in range(2, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for size in range(2, 7):
        assert_agree(step(make_state(), make_batch(0, size)), results[size])


def test_losses_that_differ_in_slots_are_different() -> None:
    step, fast = made()
    for weight in (1.0, 100.0):
        state = make_state(loss=_Weighted(weight))
        torch.testing.assert_close(fast(state, make_batch()).loss, step(state, make_batch()).loss)


class _Base:
    __slots__ = ("weight",)

    def __init__(self, weight: float) -> None:
        self.weight = weight


class _Weighted(_Base):
    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.weight * torch.nn.functional.cross_entropy(outputs, targets)


def gradient_taken_anew(state: State) -> State:
    grads, _ = state.gradient({name: 1.1 * param for name, param in state.params.items()})
    return state.replace(grads=grads)


def test_a_host_algorithm_in_slices_that_a_second_gradient_runs_again_is_not_traced() -> None:
    def note(state: State) -> State:
        return state.replace(metrics={"batch": torch.tensor(state.timestamp.batch)})

    guests = [
        changing("note", Event.AFTER_BACKWARD, note, host=True),
        changing("again", Event.AFTER_TRAIN_BATCH, gradient_taken_anew),
    ]
    step, fast = made(guests, microbatches=2)
    state = fast(make_state(), make_batch())
    with pytest.raises(pc.errors.TraceError, match=r"note, a host algorithm, was traced"):
        fast(state, make_batch())
    with pytest.warns(UserWarning, match="note, a host"):
        assert_runs_agree(step, compiled(step, fallback=True), make_state(), make_batches(4), tolerance=1e-4)
