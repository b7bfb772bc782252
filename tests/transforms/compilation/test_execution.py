"""Host algorithms in compiled steps: before, between and after the graphs, whatever they change."""

from collections.abc import Callable

import pytest
import torch

import purecompose as pc
from purecompose import Event, State
from tests.helpers import changing, counter, make_batches, make_mlp, make_state
from tests.sampling import one_in
from tests.transforms.compilation.compile_helpers import DONATE, assert_runs_agree, average, made, scaling


PLACES = [Event.AFTER_DATALOADER, Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH, Event.BATCH_END]


def is_odd(state: State) -> bool:
    return bool(state.timestamp.batch % 2)


RELU = make_mlp()
RELU[1] = torch.nn.ReLU()
MODELS = make_state().model, make_state(RELU).model  # made here, because within a step initial weights would be drawn


CHANGES: dict[str, Callable[[State], State]] = {
    "nothing": lambda s: s,
    "numbers": lambda s: s.replace(params={k: p * (1 + 0.1 * s.timestamp.batch) for k, p in s.params.items()}),
    "alias": lambda s: s.replace(slots={**s.slots, "ema": dict(s.params)}),
    "turn": lambda s: s.replace(
        params=dict(s.opt_state["momentum"]), opt_state={**s.opt_state, "momentum": dict(s.params)}
    ),
    "strides": lambda s: s.replace(params={k: p.t().contiguous().t() * 1.1 for k, p in s.params.items()}),
    "metrics": lambda s: s.replace(metrics={**s.metrics, "w": s.params["0.bias"], "n": torch.ones(())}),
    "optimizer": lambda s: s.replace(optimizer=pc.optim.sgd(0.2 if is_odd(s) else 0.1, momentum=0.9)),
    "model": lambda s: s.replace(model=MODELS[is_odd(s)]),
}


@DONATE
@pytest.mark.parametrize("event", one_in(3, PLACES, lambda event: event.name))
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_host_algorithm_changes_agrees(change: Callable[[State], State], event: Event, donate: bool) -> None:
    step, fast = made([average(), changing("host", event, change, host=True)], donate=donate)
    assert_runs_agree(step, fast, step.init(make_state()), make_batches(5))


@pytest.mark.parametrize("event", PLACES, ids=lambda event: event.name)
def test_metrics_of_a_host_algorithm_are_tensors_compiled_or_not(event: Event) -> None:
    number = changing("host", event, lambda s: s.replace(metrics={"n": 0.5 * s.timestamp.batch}), host=True)
    for step in made([number]):
        with pytest.raises(
            pc.errors.ContractError, match=r"metrics\['n'\]: expected a tensor, got 0.[05] .* from host at"
        ):
            step(make_state(), make_batches(1)[0])


@DONATE
def test_a_host_algorithm_that_changes_the_batch_agrees(donate: bool) -> None:
    def crop(state: State) -> State:
        size = 4 + state.timestamp.batch % 3
        return state.replace(batch=tuple(member[:size] for member in state.batch))

    step, fast = made([changing("crop", Event.AFTER_DATALOADER, crop, host=True)], donate=donate)
    assert_runs_agree(step, fast, make_state(), make_batches(7))
    assert len(fast.variants()) == 3


@DONATE
@pytest.mark.parametrize("event", [PLACES[0], PLACES[3]], ids=lambda event: event.name)
def test_host_algorithms_that_read_and_write_gradients_agree(event: Event, donate: bool) -> None:
    def clip(state: State) -> State:
        assert state.grads is not None
        norm = float(pc.tree.global_norm(state.grads))
        grads, _ = state.gradient({k: p * 1.01 for k, p in state.params.items()})
        return state.replace(grads={k: g / max(1.0, norm) + 0.1 * grads[k] for k, g in state.grads.items()})

    methods = [changing("clip", Event.AFTER_TRAIN_BATCH, clip, host=True), scaling("s", event, 0.9, 2)]
    step, fast = made(methods, donate=donate)
    assert_runs_agree(step, fast, make_state(), make_batches(5))


@DONATE
def test_a_host_algorithm_that_changes_the_structure_of_slots_agrees(donate: bool) -> None:
    def grow(state: State) -> State:
        is_late = state.timestamp.batch >= 2  # the first, watched step is over
        return state.replace(slots={**state.slots, "x": torch.ones(2)}) if is_late else state

    step, fast = made([counter(), changing("grow", Event.BATCH_START, grow, host=True)], donate=donate)
    assert_runs_agree(step, fast, step.init(make_state()), make_batches(5))


@DONATE
def test_a_slot_that_exists_only_within_the_step_crosses_a_boundary(donate: bool) -> None:
    methods = [
        changing("put", Event.AFTER_DATALOADER, lambda s: s.replace(slots={**s.slots, "tmp": torch.ones(())})),
        scaling("early", Event.AFTER_DATALOADER, 2, 2),
        scaling("late", Event.BATCH_END, 0.9, 3),
        changing("drop", Event.BATCH_END, lambda s: s.replace(slots={k: v for k, v in s.slots.items() if k != "tmp"})),
        counter(),
    ]
    step, fast = made(methods, donate=donate)
    assert_runs_agree(step, fast, step.init(make_state()), make_batches(7))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_strides_that_a_host_algorithm_leaves_agree_compiled() -> None:
    turn = changing("turn", Event.BATCH_START, CHANGES["strides"], host=True)
    step, fast = made([turn], backend="inductor")
    assert_runs_agree(step, fast, make_state(), make_batches(3))
