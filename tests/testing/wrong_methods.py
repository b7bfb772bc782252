# pyright: reportOptionalOperand=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
"""Methods that are wrong in ways that researchers' methods really are, beyond `mutants.MUTANTS`.

Each names the law that detects it, and describes the mistake. They are grouped by what is needed to detect it: events
outside the step, richer cases, the full text of a law, the process, or quantities that no other law compares.
"""

import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from purecompose import random, surgery
from purecompose.batch import map_tensors
from purecompose.core.algorithm import Algorithm
from purecompose.core.state import State
from purecompose.schedule import hparam
from purecompose.time.event import Event
from purecompose.time.predicates import on
from tests.testing.mutants.mutant import Mutant, mutant, scaled_grads, scaled_params, with_slot


__all__ = ["WRONG"]

WRONG: list[Mutant] = []

_PREDICTING = (Event.EVAL_START, Event.PREDICT_START)


def wrong(breaks: str, **options: Any) -> Any:
    """Make a `mutant` and add it to the table."""

    def decorate(mistake: Any) -> Any:
        WRONG.append(mutant(breaks, **options)(mistake))
        return WRONG[-1] if "at" in options else mistake  # the author's form, a factory that may take a name

    return decorate


# Events outside the step


@wrong("deterministic", at=Event.EPOCH_END)
def averages_epochs_in_a_closure() -> Any:
    """Averages the weights at the end of each epoch, in a closure."""
    average: dict[str, Tensor] = {}

    def change(state: State) -> State:
        for name, param in state.params.items():
            average[name] = 0.5 * (average.get(name, param) + param)
        return state.replace(params=dict(average))

    return change


@wrong("fit_repeats", at=(Event.FIT_START, Event.BATCH_END))
def starts_once() -> Any:
    """Remembers in a closure that the run has begun, so that a second run in the process skips its start."""
    begun: list[bool] = []

    def change(event: Event, state: State) -> State:
        if event is not Event.FIT_START or begun:
            return state
        begun.append(True)
        return scaled_params(state, 0.5)

    return change


@wrong("fit_repeats", at=Event.EVAL_END)
def stops_after_evaluations() -> Any:
    """Counts evaluations in a closure, and reports a smaller step size from the third on."""
    seen: list[int] = []

    def change(state: State) -> State:
        seen.append(1)
        return state.replace(metrics={**state.metrics, "stops_after_evaluations/num": torch.tensor(len(seen))})

    return change


@wrong("own_slot", at=Event.EPOCH_END)
def decays_frozen_each_epoch(state: State) -> State:
    """Decays all params at the end of each epoch, frozen ones too."""
    return scaled_params(state, 0.9)


@wrong("global_state_kept", at=Event.EPOCH_START)
def seeds_each_epoch(state: State) -> State:
    """Seeds torch at each epoch, as samplers of old did."""
    torch.manual_seed(0)
    return state


@wrong("global_state_kept", at=Event.BATCH_START)
def silences_warnings(state: State) -> State:
    """Silences all warnings of the process, since one of its own operations warns."""
    warnings.simplefilter("ignore")
    return state


@wrong("global_state_kept", at=Event.BATCH_START)
def ignores_numpy_errors(state: State) -> State:
    """Makes NumPy ignore divisions by zero from now on."""
    import numpy

    numpy.seterr(all="ignore", divide="ignore" if numpy.geterr()["divide"] != "ignore" else "warn")
    return state


@wrong("stays_finite", at=Event.EPOCH_START)
def divides_by_elapsed(state: State) -> State:
    """Divides by the elapsed fraction of the run, which is 0 when the first epoch starts."""
    assert state.clock is not None
    return scaled_params(state, 1 - 1e-3 / state.clock.elapsed)


@wrong("resume_exact", at=Event.EPOCH_END)
def restarts_from_the_first_weights() -> Any:
    """Pulls towards the weights of the first epoch's end, kept in a closure: a resumed run pulls elsewhere."""
    anchor: dict[int, dict[str, Tensor]] = {}

    def change(state: State) -> State:
        first = anchor.setdefault(int(state.key.sum()), dict(state.params))
        return state.replace(params={k: torch.lerp(p, first[k], 0.1) for k, p in state.params.items()})

    return change


# Richer cases


@wrong("stays_finite", at=Event.AFTER_TRAIN_BATCH, task="zero_head")
def normalises_each_gradient(state: State) -> State:
    """Divides each gradient by its norm, which is 0 below a head that starts at zero."""
    return state.replace(grads={k: g / g.norm() for k, g in (state.grads or {}).items()})


@wrong("stays_finite", at=Event.AFTER_DATALOADER)
def standardises_the_batch(state: State) -> State:
    """Standardises inputs by the batch's standard deviation, which one example does not have."""
    inputs = state.inputs
    centred = inputs - inputs.mean(0)
    variance = centred.square().sum(0) / (torch.tensor(float(len(inputs))) - 1)
    return state.replace(inputs=centred / (variance.sqrt() + 1e-6))


@wrong("stays_finite", at=(Event.INIT, Event.BATCH_START, Event.BATCH_END))
def speed_by_the_rate(event: Event, state: State) -> State:
    """Divides the move of the weights by the rate, which is 0 in the first step of a warm-up."""
    name = "speed_by_the_rate"
    if event in (Event.INIT, Event.BATCH_START):
        return with_slot(state, name, dict(state.params))
    rate, old = state.hparams["lr"], state.slots[name]
    return state.replace(params={k: p - 1e-3 * (p - old[k]) / rate.to(p) for k, p in state.params.items()})


@wrong("mixtures_taken", at=Event.AFTER_DATALOADER)
def relabels_by_index(state: State) -> State:
    """Indexes targets as a tensor: beside MixUp they are a Mixture."""
    return state.replace(targets=torch.where(state.targets == 0, 1, state.targets))


@wrong("mixtures_taken", at=Event.AFTER_DATALOADER)
def relabels_weights_too(state: State) -> State:
    """Maps over all tensors of the targets: those of a Mixture are targets and weights."""
    return state.replace(targets=map_tensors(lambda given: torch.where(given == 0, 1, given + 1) % 3, state.targets))


@wrong("mixtures_taken", at=Event.AFTER_LOSS, task="soft")
def weighs_by_the_target(state: State) -> State:
    """Weighs the loss by its targets' confidence, of which a Mixture has none."""
    assert state.loss is not None
    return state.replace(loss=state.loss * state.targets.max(1).values.mean())


# Laws to the full extent of their text


@wrong("pairs_undone", at=(Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH))
def lookahead_point_half_undone(event: Event, state: State) -> State:
    """Moves to Nesterov's point and back, for all but the biases."""
    name = "lookahead_point_half_undone"
    if event is Event.BEFORE_TRAIN_BATCH:
        return with_slot(scaled_params(state, 1.01), name, dict(state.params))
    back = {k: state.slots[name][k] if p.ndim > 1 else p for k, p in state.params.items()}
    return state.replace(params=back, slots={k: v for k, v in state.slots.items() if k != name})


@wrong("gradient_exact")
def own_strength_detached() -> Algorithm:
    """Reads its own strength as a plain number, so that no gradient reaches it."""
    name = "own_strength_detached"

    def apply(event: Event, state: State) -> State:
        strength = state.hparams["strength"].detach()
        return state.replace(grads={k: g * (1 - strength.to(g)) for k, g in (state.grads or {}).items()})

    return Algorithm(name, on(Event.AFTER_TRAIN_BATCH), apply, config={"strength": hparam("strength", 0.3)})


@wrong("draws_keyed", at=Event.AFTER_DATALOADER)
def one_name_for_strength_and_order(state: State) -> State:
    """Draws the mixing coefficient and the partners under one name."""
    rng = state.rng("one_name_for_strength_and_order")
    share = random.uniform(rng, ())
    order = random.permutation(rng, state.num_examples)
    return state.replace(inputs=torch.lerp(state.inputs, state.inputs[order], (0.1 * share).to(state.inputs)))


@wrong("draws_keyed")
def name_is_hard_coded(name: str = "name_is_hard_coded") -> Algorithm:
    """Takes a name, but draws under a fixed one: two instances draw the same numbers."""

    def apply(event: Event, state: State) -> State:
        noise = random.normal(state.example_rng("name_is_hard_coded"), tuple(state.inputs.shape))
        return state.replace(inputs=state.inputs + 0.1 * noise.to(state.inputs))

    return Algorithm(name, on(Event.AFTER_DATALOADER), apply)


@wrong("own_slot")
def slot_is_hard_coded(name: str = "slot_is_hard_coded") -> Algorithm:
    """Takes a name, but keeps its slot under a fixed one: two instances share it."""

    def apply(event: Event, state: State) -> State:
        old = torch.zeros(()) if event is Event.INIT else state.slots["slot_is_hard_coded"]
        return with_slot(state, "slot_is_hard_coded", old + 1)

    return Algorithm(name, on(Event.INIT, Event.BATCH_END), apply)


@wrong("deterministic")
def host_generator_by_batch() -> Algorithm:
    """Draws on the host from a generator that the batch's number seeds, and not the run's key."""

    def apply(event: Event, state: State) -> State:
        generator = torch.Generator().manual_seed(state.timestamp.batch)
        noise = torch.randn(state.inputs.shape, generator=generator)
        return state.replace(inputs=state.inputs + 0.1 * noise.to(state.inputs))

    return Algorithm("host_generator_by_batch", on(Event.AFTER_DATALOADER), apply, host=True)


class _Wide(nn.Linear):
    """A linear layer of another type."""


@wrong("init_once", at=Event.INIT)
def reinitialises_by_surgery(state: State) -> State:
    """Replaces each linear layer by one of another type, with new weights under the same names."""

    def made(layer: nn.Linear, site: Any) -> nn.Module | None:
        del site
        if type(layer) is _Wide:
            return None
        new = _Wide(layer.in_features, layer.out_features)
        with torch.no_grad():
            for param in new.parameters():
                param.fill_(0.1)
        return new

    return surgery.operate(state, {nn.Linear: made}, name="wide")[0]


# The process


@wrong("ranks_agree", at=Event.AFTER_TRAIN_BATCH)
def scales_by_the_rank(state: State) -> State:
    """Adds its decay only in the first process, identified by RANK."""
    return scaled_grads(state, 0.9 if os.environ.get("RANK", "0") == "0" else 1.0)


@wrong("deterministic", at=Event.AFTER_TRAIN_BATCH)
def scales_by_the_environment(state: State) -> State:
    """Multiplies gradients by WORLD_SIZE, as another library's means require."""
    return scaled_grads(state, float(os.environ.get("WORLD_SIZE", "1")))


# Quantities that no other law looks at


@wrong("loss_differentiated", at=Event.AFTER_LOSS)
def penalty_without_grad(state: State) -> State:
    """Adds a penalty computed under `no_grad`: it is logged and never minimised."""
    with torch.no_grad():
        penalty = sum((p.pow(2).sum() for p in state.params.values()), torch.zeros(()))
    return state.replace(loss=state.loss + 0.1 * penalty.to(state.loss))


@wrong("loss_differentiated", at=Event.BEFORE_BACKWARD)
def reports_another_loss(state: State) -> State:
    """Halves the reported loss by subtracting a constant: the gradient belongs to another loss."""
    return state.replace(loss=state.loss - 0.5 * state.loss.detach())


@wrong("loss_differentiated", at=Event.AFTER_FORWARD)
def temperature_by_item(state: State) -> State:
    """Divides outputs by their largest, taken as a constant."""
    return state.replace(outputs=state.outputs / (1 + state.outputs.detach().abs().amax(1, keepdim=True)))


@wrong("ignored_stay_ignored", at=Event.AFTER_LOSS, task="tokens")
def entropy_over_padding(state: State) -> State:
    """Adds the mean entropy of all positions, ignored ones too."""
    logs = state.outputs.log_softmax(1)
    return state.replace(loss=state.loss + 0.1 * (logs.exp() * logs).sum(1).mean())


@wrong("ignored_stay_ignored", at=Event.AFTER_DATALOADER, task="tokens")
def noise_in_ignored_labels(state: State) -> State:
    """Replaces a tenth of the labels at random, including those that should be ignored."""
    name, shape = "noise_in_ignored_labels", tuple(state.targets.shape)
    where = random.bernoulli(state.example_rng(f"{name}.where"), 0.1, shape)
    drawn = random.randint(state.example_rng(f"{name}.what"), shape, 0, 7)
    return state.replace(targets=torch.where(where, drawn, state.targets))


@wrong("ignored_stay_ignored", at=Event.BEFORE_LOSS, task="tokens")
def smooths_padding(state: State) -> State:
    """Smooths one-hot targets of clamped indices: ignored positions become class 0."""
    hot = F.one_hot(state.targets.clamp(min=0), state.outputs.shape[1]).movedim(-1, 1)
    return state.replace(targets=(0.9 * hot + 0.1 / state.outputs.shape[1]).to(state.outputs))


@wrong("evaluation_blind", at=(Event.INIT, Event.BATCH_END, Event.EVAL_START))
def averages_for_evaluation_only(event: Event, state: State) -> State:
    """Puts averaged weights in place for evaluation and not for prediction."""
    name = "averages_for_evaluation_only"
    if event is Event.EVAL_START:
        return state.replace(params=dict(state.slots[name]))
    old = state.slots.get(name, state.params)
    return with_slot(state, name, {k: torch.lerp(v, state.params[k], 0.1) for k, v in old.items()})


@wrong("evaluation_blind", at=(Event.INIT, Event.BATCH_END, *_PREDICTING), task="images")
def old_statistics_for_prediction(event: Event, state: State) -> State:
    """Puts averaged buffers in place for prediction only."""
    name = "old_statistics_for_prediction"
    if event is Event.EVAL_START:
        return state
    if event is Event.PREDICT_START:
        return state.replace(buffers=dict(state.slots[name]))
    return with_slot(state, name, dict(state.buffers)) if event is Event.INIT else state
