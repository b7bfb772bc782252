"""Algorithms that change the structure of lasting fields, or fields of others."""

import torch
from torch import Tensor, nn

from purecompose import random, surgery, tree
from purecompose._support.device import AUTOCAST
from purecompose.core.state import State
from purecompose.time.event import Event
from tests.testing.mutants.mutant import mutant, scaled_params, with_slot


# structure_kept


@mutant("structure_kept", at=Event.AFTER_TRAIN_BATCH)
def late_slot(state: State) -> State:
    """Makes its slot when it first acts, not at INIT: the state before and after a step differ in structure."""
    return with_slot(state, "late_slot", state.slots.get("late_slot", torch.zeros(())) + 1)


@mutant("structure_kept", at=Event.BATCH_END)
def widens_params(state: State) -> State:
    """Scales weights by a float64 tensor of one element, as converted from NumPy: they become float64."""
    return scaled_params(state, torch.tensor([0.99], dtype=torch.float64))


@mutant("structure_kept", at=Event.BATCH_END, task="images")
def drops_buffers(state: State) -> State:
    """Averages the floating buffers and drops all others."""
    kept = {name: buffer for name, buffer in state.buffers.items() if buffer.is_floating_point()}
    return state.replace(buffers=kept)


@mutant("structure_kept", at=(Event.INIT, Event.AFTER_TRAIN_BATCH))
def momentum_of_shape_one(event: Event, state: State) -> State:
    """Keeps a number as 0-d at INIT and as shape (1,) afterwards."""
    name = "momentum_of_shape_one"
    if event is Event.INIT:
        return with_slot(state, name, torch.zeros(()))
    norm = tree.global_norm(state.grads).reshape(1)
    return with_slot(state, name, 0.9 * state.slots[name] + 0.1 * norm)


@mutant("structure_kept", at=Event.EPOCH_END)
def slot_at_epoch_end(state: State) -> State:
    """Keeps an average of the weights, and makes it at the first EPOCH_END, an event outside the step."""
    return with_slot(state, "slot_at_epoch_end", state.params)


@mutant("structure_kept", at=Event.BATCH_START)
def freezes_by_context(state: State) -> State:
    """Freezes a layer in the middle of a run: the static part changes inside a step."""
    return state.replace(frozen=frozenset({next(iter(state.params))}))


@mutant("structure_kept", at=Event.BATCH_END)
def flips_strides(state: State) -> State:
    """Leaves matrices transposed in memory, as a product from the other side does; values and shapes are unchanged."""
    flipped = {name: p.t().contiguous().t() if p.ndim == 2 else p for name, p in state.params.items()}
    return scaled_params(state.replace(params=flipped), 0.99)


@mutant("structure_kept", at=(Event.INIT, Event.BATCH_END))
def inference_slot(event: Event, state: State) -> State:
    """Averages the weights under `torch.inference_mode`: no later step may differentiate or save these tensors."""
    with torch.inference_mode():
        old = state.params if event is Event.INIT else state.slots["inference_slot"]
        averages = {name: 0.9 * old[name] + 0.1 * param for name, param in state.params.items()}
    return with_slot(state, "inference_slot", averages)


# own_slot


@mutant("own_slot", at=(Event.INIT, Event.AFTER_TRAIN_BATCH))
def decays_all_slots(event: Event, state: State) -> State:
    """Maps over all of `state.slots` where its own was meant."""
    if event is Event.INIT:
        return with_slot(state, "decays_all_slots", torch.ones(()))
    return state.replace(slots=tree.map(lambda leaf: leaf * 0.5 + 0.1, state.slots))


@mutant("own_slot", at=(Event.INIT, Event.BATCH_END))
def replaces_slots(event: Event, state: State) -> State:
    """Sets `slots={name: ...}`, without the others: algorithms initialised before lose their memory."""
    count = torch.zeros(()) if event is Event.INIT else state.slots["replaces_slots"] + 1
    return state.replace(slots={"replaces_slots": count})


@mutant("own_slot", at=Event.AFTER_DATALOADER)
def splits_key(state: State) -> State:
    """Splits `state.key` and passes on the rest, as in JAX: adding it changes the draws of all algorithms."""
    own, rest = random.split(state.key)
    inputs: Tensor = state.inputs
    return state.replace(inputs=inputs + 0.1 * random.normal(own, tuple(inputs.shape)).to(inputs), key=rest)


@mutant("own_slot", at=Event.BATCH_START)
def halves_learning_rate(state: State) -> State:
    """Writes into the optimizer's hparam without naming it in its settings."""
    return state.replace(hparams={**state.hparams, "lr": state.hparams["lr"] * 0.5})


@mutant("own_slot", at=Event.BATCH_END)
def drops_metrics(state: State) -> State:
    """Sets `metrics={name: ...}`, without the others: metrics measured before it are not recorded."""
    return state.replace(metrics={"drops_metrics/loss": state.loss})


@mutant("own_slot", at=(Event.INIT, Event.BATCH_END))
def overwrites_loss(event: Event, state: State) -> State:
    """Replaces the loss by a smoothed one: the logged loss is not the differentiated one."""
    name = "overwrites_loss"
    if event is Event.INIT:
        return with_slot(state, name, torch.zeros((), device=state.device))
    assert state.loss is not None
    smoothed = 0.9 * state.slots[name] + 0.1 * state.loss
    return with_slot(state.replace(loss=smoothed), name, smoothed)


# buffers_kept


@mutant("own_slot", at=Event.AFTER_DATALOADER, task="images")
def second_forward(state: State) -> State:
    """Keeps the buffers of an extra forward pass in training mode: running statistics see a batch twice."""
    outputs, buffers = state.run_model(state.inputs, train=True, rng_name="second_forward")
    return state.replace(buffers=buffers, metrics={**state.metrics, "outputs": outputs.mean()})


@mutant("own_slot", at=Event.AFTER_TRAIN_BATCH, task="images")
def statistics_in_place(state: State) -> State:
    """Damps running means in place, so that old and new state agree and both are wrong."""
    for name, buffer in state.buffers.items():
        if name.endswith("running_mean"):
            buffer.data.mul_(0.9)
    return state


# frozen_kept


@mutant("own_slot", at=Event.AFTER_TRAIN_BATCH)
def decays_frozen(state: State) -> State:
    """Decays all of `state.params`, where those of `state.context.trainable` were meant."""
    return scaled_params(state, 0.99)


@mutant("own_slot", at=Event.BATCH_END)
def decays_frozen_biases(state: State) -> State:
    """Pulls biases to zero, frozen ones too, in a network where nothing need be frozen."""
    return state.replace(params={name: p * 0.9 if p.ndim == 1 else p for name, p in state.params.items()})


# init_once


@mutant("init_once", at=Event.INIT)
def rescales_at_init(state: State) -> State:
    """Multiplies the weights at INIT: pretrained weights are lost, and a second INIT scales them again."""
    return scaled_params(state, 0.5)


@mutant("init_once", at=Event.INIT)
def slot_by_position(state: State) -> State:
    """Counts the slots at INIT to number itself, so that its memory depends on the order of the algorithms."""
    number = torch.tensor(float(len([name for name in state.slots if name != "slot_by_position"])))
    return with_slot(state, "slot_by_position", number)


@mutant("init_once", at=Event.INIT)
def counts_inits(state: State) -> State:
    """Adds to its slot at INIT if it exists: two INITs differ from one."""
    return with_slot(state, "counts_inits", state.slots.get("counts_inits", torch.zeros(())) + 1)


class _InHalf(nn.Module):
    """A layer whose result is rounded to bfloat16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: Tensor) -> Tensor:
        return self.inner(input).bfloat16()


@mutant("init_once", at=Event.INIT, task="bf16_tokens")
def wraps_norms_again(state: State) -> State:
    """Wraps layer norms in a half-precision layer, and at a second INIT wraps the one inside again."""
    if state.context.precision not in AUTOCAST:
        return state
    return surgery.operate(state, {nn.LayerNorm: lambda norm, site: _InHalf(norm)}, name="wraps_norms_again")[0]
