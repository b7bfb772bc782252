"""Small lawful methods of many kinds, as their authors would write them; no law may report one.

They are short on purpose: each represents a technique (memory, draws, pairs, host work, surgery, outer
events) that a law could take for a mistake.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from purecompose import batch as batches, losses, random, tree
from purecompose.core.algorithm import Algorithm, Trait
from purecompose.core.state import State
from purecompose.nn.model import from_module
from purecompose.schedule import hparam
from purecompose.surgery.weights import to_module
from purecompose.time.event import Event
from purecompose.time.predicates import on


__all__ = ["LAWFUL"]

LAWFUL: dict[str, tuple[Callable[[], Algorithm], tuple[str, ...]]] = {}
"""Each method's factory and the tasks it is tried on, by name."""

_ALL = ("vectors", "images", "tokens", "frozen")
_CLOSING = (Event.EVAL_START, Event.PREDICT_START)


def lawful(match: Any, *tasks: str, **options: Any) -> Callable[[Callable[[Event, State, str], State]], Any]:
    """Make a factory, named like the function, from `apply(event, state, name)`, and add it to the table."""

    def made(apply: Callable[[Event, State, str], State]) -> Callable[[], Algorithm]:
        name = apply.__name__

        def factory() -> Algorithm:
            return Algorithm(name, match, lambda event, state: apply(event, state, name), **options)

        LAWFUL[name] = factory, tasks or ("vectors", "images")
        return factory

    return made


def remember(state: State, name: str, value: Any) -> State:
    return state.replace(slots={**state.slots, name: value})


def forget(state: State, name: str) -> State:
    return state.replace(slots={key: slot for key, slot in state.slots.items() if key != name})


def report(state: State, name: str, value: Tensor) -> State:
    return state.replace(metrics={**state.metrics, name: value})


# Weights


@lawful(on(Event.INIT, Event.EPOCH_END, *_CLOSING))
def ema_of_epochs(event: Event, state: State, name: str) -> State:
    if event is Event.INIT:
        return remember(state, name, dict(state.params))
    if event is Event.EPOCH_END:
        return remember(state, name, {k: torch.lerp(v, state.params[k], 0.5) for k, v in state.slots[name].items()})
    return state.replace(params=dict(state.slots[name]))


@lawful(on(Event.EVAL_START, Event.PREDICT_START))
def noisy_weights_at_evaluation(event: Event, state: State, name: str) -> State:
    noise = {k: random.normal(state.rng(f"{name}.{k}"), tuple(p.shape)) for k, p in state.params.items()}
    return state.replace(params={k: p + 0.01 * noise[k].to(p) for k, p in state.params.items()})


@lawful(on(Event.BATCH_START, Event.BATCH_END), "vectors", "frozen")
def freezing_by_mask(event: Event, state: State, name: str) -> State:
    if event is Event.BATCH_START:
        return remember(state, name, state.params)
    num = (state.clock.elapsed - 0.25).clamp(0, 1) * len(state.params)  # pyright: ignore[reportOptionalMemberAccess]
    pairs = zip(state.slots[name].values(), state.params.items(), strict=True)
    held = {k: torch.where(i < num, old, p) for i, (old, (k, p)) in enumerate(pairs)}
    return forget(state.replace(params=held), name)


# Gradients


def _row_norms(x: Tensor) -> Tensor:
    return x.abs() if x.ndim < 2 else x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.ndim - 1))


@lawful(on(Event.AFTER_TRAIN_BATCH), traits=[Trait.CLIPS_GRADIENTS])
def adaptive_clipping(event: Event, state: State, name: str) -> State:
    def clipped(param: Tensor, grad: Tensor) -> Tensor:
        bound = 0.1 * _row_norms(param).clamp(min=1e-3)
        return grad * (bound / _row_norms(grad).clamp(min=1e-6)).clamp(max=1.0)

    return state.replace(grads={k: clipped(state.params[k], g) for k, g in (state.grads or {}).items()})


@lawful(on(Event.AFTER_TRAIN_BATCH), "vectors", "tokens")
def gradient_noise(event: Event, state: State, name: str) -> State:
    noise = {k: random.normal(state.rng(f"{name}.{k}"), g) for k, g in (state.grads or {}).items()}
    return state.replace(grads={k: g + 0.01 * noise[k].to(g) for k, g in (state.grads or {}).items()})


# Loss


@lawful(on(Event.AFTER_LOSS), "vectors", traits=[Trait.EDITS_LOSS])
def weight_penalty(event: Event, state: State, name: str) -> State:
    assert state.loss is not None
    return state.replace(loss=state.loss + 0.01 * sum(p.pow(2).sum() for p in state.params.values()))


# Data


@lawful(on(Event.BEFORE_LOSS, Event.AFTER_LOSS))
def label_noise(event: Event, state: State, name: str) -> State:
    if event is Event.AFTER_LOSS:
        return forget(state.replace(targets=state.slots[name]), name)
    if not isinstance(state.targets, Tensor):
        raise TypeError(f"{name}: expected class indices, got {type(state.targets).__name__}")
    shape = tuple(state.targets.shape)
    is_noisy = random.bernoulli(state.example_rng(f"{name}.where"), 0.3, shape)
    drawn = random.randint(state.example_rng(f"{name}.what"), shape, 0, 3)
    return remember(state.replace(targets=torch.where(is_noisy, drawn, state.targets)), name, state.targets)


@lawful(on(Event.AFTER_DATALOADER), "vectors")
def adversarial_inputs(event: Event, state: State, name: str) -> State:
    def loss(inputs: Tensor) -> Tensor:
        return losses.evaluate_loss(state.context.loss, state.forward(inputs), state.targets)

    return state.replace(inputs=state.inputs + 0.1 * torch.tanh(torch.func.grad(loss)(state.inputs)))


# Settings, reports, and both


@lawful(on(Event.BATCH_START, Event.BATCH_END), config={"lr": hparam("lr", 0.1)})
def lr_pair(event: Event, state: State, name: str) -> State:
    if event is Event.BATCH_START:
        halved = {**state.hparams, "lr": state.hparams["lr"] * 0.5}
        return remember(state.replace(hparams=halved), name, state.hparams["lr"])
    return forget(state.replace(hparams={**state.hparams, "lr": state.slots[name]}), name)


@lawful(on(Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.EVAL_END, Event.EVAL_BATCH_END), *_ALL)
def recorder(event: Event, state: State, name: str) -> State:
    tensors = state.grads if event is Event.AFTER_TRAIN_BATCH else state.params
    return report(state, f"{name}/{event.value}", tree.global_norm(tensors))


@lawful(lambda event, state: event is Event.BATCH_END)
def matches_by_a_function(event: Event, state: State, name: str) -> State:
    return state.replace(params={**state.params, **{k: state.params[k] * 0.99 for k in state.context.trainable}})


# Surgery


@lawful(on(Event.INIT), "vectors")
def other_activation(event: Event, state: State, name: str) -> State:
    module = to_module(state)
    found = [key for key, child in module.named_children() if isinstance(child, nn.Tanh)]
    for key in found:
        setattr(module, key, nn.GELU())
    return state.replace(model=from_module(module).model) if found else state


class _DropsRows(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output * (torch.rand(len(output), 1) >= 0.3).to(output) if self.training else output


@lawful(on(Event.INIT), "vectors")
def stochastic_layers(event: Event, state: State, name: str) -> State:
    module = to_module(state)
    plain = [child for child in module.modules() if type(child) is nn.Linear]
    for child in plain:
        child.__class__ = _DropsRows
    return state.replace(model=from_module(module).model) if plain else state


# Unusual, and correct


@lawful(on(Event.AFTER_TRAIN_BATCH), "vectors", "zero_head")
def guarded_trust_ratio(event: Event, state: State, name: str) -> State:
    def scaled(param: Tensor, grad: Tensor) -> Tensor:
        norms = param.square().sum(), grad.square().sum()
        is_fine = (norms[0] > 0) & (norms[1] > 0)
        ratio = (torch.where(is_fine, norms[0], 1) / torch.where(is_fine, norms[1], 1)).sqrt()
        return grad * torch.where(is_fine, 0.01 * ratio, 1)

    return state.replace(grads={k: scaled(state.params[k], g) for k, g in (state.grads or {}).items()})


@lawful(on(Event.AFTER_TRAIN_BATCH), "vectors")
def takes_float32_only(event: Event, state: State, name: str) -> State:
    grads = state.grads or {}
    if any(g.dtype is not torch.float32 for g in grads.values()):
        raise TypeError(f"{name}: expected gradients in float32")
    return state.replace(grads={k: 0.9 * g for k, g in grads.items()})


@lawful(on(Event.AFTER_LOSS), "vectors", traits=[Trait.EDITS_LOSS, Trait.STOPS_GRADIENTS])
def own_targets(event: Event, state: State, name: str) -> State:
    assert state.loss is not None
    confident = state.outputs.detach().softmax(1)
    return state.replace(loss=0.9 * state.loss - 0.1 * (confident * state.outputs.log_softmax(1)).sum(1).mean())


@lawful(on(Event.BEFORE_FORWARD), "vectors", traits=[Trait.STOPS_GRADIENTS])
def straight_through_rounding(event: Event, state: State, name: str) -> State:
    params = {k: state.params[k] for k in state.context.trainable}
    rounded = {k: p + ((p * 16).round() / 16 - p).detach() for k, p in params.items()}
    return state.replace(params={**state.params, **rounded})


@lawful(on(Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH), "vectors", "frozen")
def gradient_at_another_point(event: Event, state: State, name: str) -> State:
    if event is Event.BEFORE_TRAIN_BATCH:
        moved = {k: state.params[k] * 1.01 for k in state.context.trainable}
        return remember(state.replace(params={**state.params, **moved}), name, dict(state.params))
    return forget(state.replace(params=dict(state.slots[name])), name)


@lawful(on(Event.AFTER_DATALOADER), "vectors")
def one_draw_in_two_places(event: Event, state: State, name: str) -> State:
    def order() -> Tensor:
        return random.permutation(state.rng(f"{name}.order"), state.num_examples)

    return state.replace(batch=batches.map_tensors(lambda tensor: tensor[order()], state.batch))


@lawful(on(Event.AFTER_DATALOADER), "vectors", "images", host=True)
def host_generator_from_the_key(event: Event, state: State, name: str) -> State:
    import numpy

    seed = random.bits(state.rng(name), 4).tolist()
    noise = numpy.random.default_rng(seed).normal(size=tuple(state.inputs.shape))
    return state.replace(inputs=state.inputs + 0.1 * torch.as_tensor(noise).to(state.inputs))


@lawful(on(Event.INIT, Event.AFTER_TRAIN_BATCH), "vectors", "zero_head")
def mask_drawn_once(event: Event, state: State, name: str) -> State:
    if event is Event.INIT:
        params = {k: state.params[k] for k in state.context.trainable}
        masks = {k: random.bernoulli(state.rng(f"{name}.{k}"), 0.5, tuple(p.shape)) for k, p in params.items()}
        return remember(state, name, masks)
    return state.replace(grads={k: g * state.slots[name][k] for k, g in (state.grads or {}).items()})


@lawful(on(Event.AFTER_LOSS), "tokens", traits=[Trait.EDITS_LOSS])
def entropy_where_it_counts(event: Event, state: State, name: str) -> State:
    assert state.loss is not None
    logs = state.outputs.log_softmax(1)
    entropies = torch.where(state.targets >= 0, -(logs.exp() * logs).sum(1), 0)
    return state.replace(loss=state.loss - 0.1 * entropies.sum() / (state.targets >= 0).sum().clamp(min=1))


class _Halved(nn.Linear):
    """A layer with halved weights and doubled outputs: the same function with other values under the same names."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@lawful(on(Event.INIT), "vectors")
def reparametrised_layers(event: Event, state: State, name: str) -> State:
    module = to_module(state)
    plain = [child for child in module.modules() if type(child) is nn.Linear]
    for child in plain:
        child.__class__ = _Halved
        with torch.no_grad():
            child.weight.mul_(0.5)
            child.bias.mul_(0.5)
    return state.replace(model=from_module(module).model, params=dict(from_module(module).params)) if plain else state


@lawful(on(Event.INIT, Event.BATCH_END, *_CLOSING), "vectors", "double", "bf16_weights")
def ema_of_any_dtype(event: Event, state: State, name: str) -> State:
    if event is Event.INIT:
        return remember(state, name, {k: p.float() for k, p in state.params.items()})
    if event is Event.BATCH_END:
        return remember(
            state, name, {k: torch.lerp(v, state.params[k].float(), 0.1) for k, v in state.slots[name].items()}
        )
    return state.replace(params={k: v.to(state.params[k]) for k, v in state.slots[name].items()})
