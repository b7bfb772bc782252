"""Impure algorithms: they write into arguments, draw or remember outside the state, or match by more than time."""

import datetime as datetime_module
import random as python_random
import time
from datetime import datetime, timedelta
from time import time as now

import torch
from torch import Tensor

from purecompose import random
from purecompose.core.algorithm import Algorithm
from purecompose.core.context import SealedTime
from purecompose.core.state import State
from purecompose.time import Timestamp
from purecompose.time.event import Event
from tests.testing.mutants.mutant import mutant, scaled_grads, scaled_params, with_slot


# input_untouched


@mutant("input_untouched", at=Event.BATCH_END)
def decays_in_place(state: State) -> State:
    """Weight decay as in an imperative loop, `param.mul_(...)`: the caller's weights shrink, too."""
    for param in state.params.values():
        param.mul_(0.99)
    return state


@mutant("input_untouched", at=Event.BATCH_END)
def clamps_through_data(state: State) -> State:
    """Clips weights through `param.data`, where torch counts no write, so that only the values show it."""
    for param in state.params.values():
        param.data.clamp_(-0.05, 0.05)
    return state


@mutant("input_untouched", at=Event.AFTER_DATALOADER)
def noise_into_batch(state: State) -> State:
    """Adds keyed noise to the inputs with `+=`: the loader's tensor is noisier in every epoch."""
    inputs: Tensor = state.inputs
    inputs += 0.1 * random.normal(state.rng("noise_into_batch"), tuple(inputs.shape)).to(inputs)
    return state.replace(inputs=inputs)


@mutant("input_untouched", at=Event.AFTER_TRAIN_BATCH)
def replaces_entry(state: State) -> State:
    """Makes a new tensor, but puts it into the old state's dictionary."""
    for name, param in list(state.params.items()):
        state.params[name] = param * 0.99
    return state.replace(params=state.params)


@mutant("input_untouched", at=(Event.INIT, Event.AFTER_DATALOADER))
def remembers_batch_view(event: Event, state: State) -> State:
    """Keeps the first target as a view: the slot changes when the loader fills its buffer again."""
    if event is Event.INIT:
        return with_slot(state, "remembers_batch_view", torch.zeros((), dtype=torch.int64, device=state.device))
    return with_slot(state, "remembers_batch_view", state.targets[0])


@mutant("input_untouched", at=Event.AFTER_TRAIN_BATCH)
def stashes_on_tensor(state: State) -> State:
    """Stores gradients in `param.grad`, as imperative code expects, that is on the caller's tensors."""
    for name, grad in (state.grads or {}).items():
        state.params[name].grad = grad.clone()
    return scaled_grads(state, 0.99)


# deterministic


@mutant("deterministic", at=Event.AFTER_DATALOADER)
def torch_noise(state: State) -> State:
    """Draws with `torch.randn` from torch's global generator."""
    inputs: Tensor = state.inputs
    return state.replace(inputs=inputs + 0.1 * torch.randn(inputs.shape))


@mutant("deterministic", at=Event.BATCH_END)
def python_coin(state: State) -> State:
    """Tosses a coin with Python's `random`."""
    return scaled_params(state, python_random.random())


@mutant("deterministic", at=Event.AFTER_DATALOADER)
def numpy_mixing(state: State) -> State:
    """Takes the mixing coefficient from `numpy.random.beta`, as many published versions of MixUp do."""
    import numpy  # the library only needs it for this mistake

    inputs: Tensor = state.inputs
    share = float(numpy.random.beta(1.0, 1.0))
    return state.replace(inputs=(1 - share) * inputs + share * inputs.flip(0))


@mutant("deterministic", at=Event.BATCH_END)
def stops_after_an_hour():
    """Trains for an hour by the wall clock, and does nothing from then on."""
    start = time.monotonic()
    return lambda state: state if time.monotonic() - start > 3600 else scaled_params(state, 0.99)


@mutant("deterministic", at=(Event.INIT, Event.BATCH_END))
def stops_an_hour_after_init():
    """Stops an hour after INIT, in which it reads the clock again: every run that is short acts in all its steps."""
    start = [0.0]

    def change(event: Event, state: State) -> State:
        if event is Event.INIT:
            start[0] = time.time()
        return state if event is Event.INIT or time.time() - start[0] > 3600 else scaled_params(state, 0.99)

    return change


@mutant("deterministic", at=Event.BATCH_END)
def stops_at_a_date():
    """Stops a day after it was made, by `datetime.now()`."""
    end = datetime.now() + timedelta(days=1)
    return lambda state: state if datetime.now() > end else scaled_params(state, 0.99)


@mutant("deterministic", at=Event.BATCH_END)
def stops_on_another_day():
    """Stops when the day has changed, by `datetime.date.today()`."""
    day = datetime_module.date.today()
    return lambda state: scaled_params(state, 0.99) if datetime_module.date.today() == day else state


@mutant("deterministic", at=Event.BATCH_END)
def trains_today_only():
    """Acts on the day of the year on which it was made, by `time.localtime()`."""
    day = time.localtime().tm_yday
    return lambda state: scaled_params(state, 0.99) if time.localtime().tm_yday == day else state


@mutant("deterministic", at=Event.BATCH_END)
def imports_the_clock():
    """Stops after an hour, by a clock that its module imports from `time`."""
    start = now()
    return lambda state: state if now() - start > 3600 else scaled_params(state, 0.99)


# global_state_kept


@mutant("global_state_kept", at=Event.BATCH_END)
def seeds_in_apply(state: State) -> State:
    """Calls `torch.manual_seed` to be reproducible: later draws from torch's generator repeat."""
    torch.manual_seed(0)
    return scaled_params(state, 0.999)


@mutant("global_state_kept", at=(Event.INIT, Event.BATCH_END))
def seeds_python_in_apply(event: Event, state: State) -> State:
    """The same with Python's generator, at INIT."""
    python_random.seed(0)
    return state if event is Event.INIT else scaled_params(state, 0.999)


@mutant("global_state_kept", at=Event.AFTER_TRAIN_BATCH)
def sets_default_dtype(state: State) -> State:
    """Switches the default dtype to float64 for a computation, and not back."""
    torch.set_default_dtype(torch.float64)
    return scaled_params(state, 0.999)


@mutant("global_state_kept", at=Event.BEFORE_FORWARD)
def switches_grad_off(state: State) -> State:
    """Calls `torch.set_grad_enabled(False)` in place of `with torch.no_grad()`: the forward pass has no graph."""
    torch.set_grad_enabled(False)
    return state.replace(inputs=state.inputs - state.inputs.mean())


def _shrunk(event: Event, state: State) -> State:
    del event
    return scaled_params(state, 0.99)


# match_pure


@mutant("match_pure")
def counts_matches() -> Algorithm:
    """Acts in every second step by counting the calls of `match`."""
    asked = 0

    def match(event: Event, state: State) -> bool:
        nonlocal asked
        del state
        if event is not Event.BATCH_END:
            return False
        asked += 1
        return asked % 2 == 0

    return Algorithm("counts_matches", match, _shrunk)


@mutant("match_pure")
def matches_by_loss() -> Algorithm:
    """Reads the loss with `.item()`, which is not known when matching is decided."""

    def match(event: Event, state: State) -> bool:
        return event is Event.AFTER_TRAIN_BATCH and state.loss is not None and not state.loss.item() < 0.1

    return Algorithm("matches_by_loss", match, _shrunk)


@mutant("match_pure")
def matches_by_kept_loss() -> Algorithm:
    """Bypasses the sealed values: apply keeps the last two losses in a closure, where match reads them."""
    kept: list[Tensor] = []

    def match(event: Event, state: State) -> bool:
        del state
        rises = len(kept) > 1 and kept[-1].tolist() > kept[-2].tolist()
        return event is Event.AFTER_TRAIN_BATCH or (event is Event.BATCH_END and rises)

    def apply(event: Event, state: State) -> State:
        if event is Event.AFTER_TRAIN_BATCH and state.loss is not None:
            kept[:] = [*kept[-1:], state.loss]
            return state
        return _shrunk(event, state)

    return Algorithm("matches_by_kept_loss", match, apply)


@mutant("match_pure")
def matches_by_key() -> Algorithm:
    """Reads the run's key at INIT and acts only in runs with an even seed, so that the schedule depends on the seed."""
    seen = {"seed": 0}

    def match(event: Event, state: State) -> bool:
        del state
        return event is Event.INIT or (event is Event.BATCH_END and seen["seed"] % 2 == 0)

    def apply(event: Event, state: State) -> State:
        if event is Event.INIT:
            seen["seed"] = int(state.key.sum())
            return state
        return _shrunk(event, state)

    return Algorithm("matches_by_key", match, apply)


@mutant("match_pure")
def host_match_writes() -> Algorithm:
    """A host algorithm whose match writes its answer into `state.metrics`."""

    def match(event: Event, state: State) -> bool:
        acts = event is Event.BATCH_END
        if acts:
            state.metrics["host_match_writes/acts"] = state.key.sum()
        return acts

    return Algorithm("host_match_writes", match, _shrunk, host=True)


# time_from_clock


@mutant("compiled_agrees", at=Event.AFTER_TRAIN_BATCH)
def reads_timestamp(state: State) -> State:
    """Decays by `state.timestamp` inside apply, where it would be compiled in as a constant."""
    return scaled_params(state, 1 / (1 + state.timestamp.batch))


@mutant("compiled_agrees", at=Event.AFTER_TRAIN_BATCH)
def opens_the_seal(state: State) -> State:
    """Opens the sealed timestamp, which is there for the host's use only."""
    sealed = state.static.timestamp
    assert isinstance(sealed, SealedTime)
    return scaled_params(state, 1 / (1 + sealed.opened(later=False).batch))


@mutant("compiled_agrees")
def time_by_match() -> Algorithm:
    """Its match stores the time in a closure, where apply reads it as a Python number."""
    moment: dict[str, Timestamp] = {}

    def match(event: Event, state: State) -> bool:
        moment["now"] = state.timestamp
        return event is Event.BATCH_START

    def apply(event: Event, state: State) -> State:
        del event
        return scaled_params(state, 0.9 ** moment["now"].batch)

    return Algorithm("time_by_match", match, apply)
