"""Calls of a state's network and loss, with the state's tensors and draws."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from purecompose import batch as batches, random
from purecompose._support.device import as_scalar
from purecompose.core.loss import with_scalars
from purecompose.nn.keyed.parts import CURRENT
from purecompose.nn.model import Model
from purecompose.nn.network import call_model


__all__ = ["rng_of_turn", "run_loss", "run_model"]

_Result = tuple[Any, dict[str, Tensor]]


def _shared_rng(state: Any, name: str) -> random.Rng:
    """Return the generator of the draws called `name`, the same in all turns of a stage; see `State.rng`."""
    if state.clock is None:
        return random.Rng(state.key, draw=random.salt(name), example=0, batch=state.timestamp.batch)
    names = (state.clock.domain, name) if state.clock.domain else (name,)
    return random.Rng(state.key, draw=random.salt(*names), example=0, batch=state.clock.draw)


def rng_of_turn(state: Any, name: str) -> random.Rng:
    """See `State.rng`."""
    part = CURRENT.get()
    return _shared_rng(state, name if part is None or not part.turn else f"{name}, turn {part.turn}")


def run_model(state: Any, inputs: Any, *, train: bool, rng_name: str | None = None) -> _Result:
    """See `State.run_model`."""
    part = CURRENT.get() if rng_name is None else None
    name = rng_name or (".state.forward" if part is None else part.next_pass())

    def rng() -> random.Rng:
        if part is not None:
            part.check_replayable()
        return _shared_rng(state, name)

    def num_examples() -> int | None:
        return batches.leading_size(inputs) if state.context.layout.has_rows(state.batch) else None

    return _call(state, state.context.model, inputs, num_examples, train=train, rng=rng)


def run_loss(
    state: Any, fn: Callable[[Callable[..., Any]], Any], *, train: bool, num_examples: int | None = None
) -> _Result:
    """See `State.call_loss`."""
    context = state.context
    if context.loss_scalars:
        inner, dtype = fn, context.loss_dtype  # schedules are in float64, and would change the loss's dtype
        scalars = {
            name: as_scalar(state.scalar(scalar), dtype, state.device) for name, scalar in context.loss_scalars.items()
        }
        fn = lambda loss: inner(with_scalars(loss, scalars))  # noqa: E731
    if context.loss_model is None:
        return fn(context.loss), state.buffers

    def num_rows() -> int | None:
        if not context.layout.has_rows(state.batch):
            return None
        return state.num_examples if num_examples is None else num_examples

    return _call(state, context.loss_model, [fn], num_rows, train=train, rng=lambda: state.rng(".loss"))


def _call(
    state: Any,
    model: Model,
    inputs: Any,
    num_examples: Callable[[], int | None],
    *,
    train: bool,
    rng: Callable[[], random.Rng],
) -> _Result:
    context, buffers = state.context, state.buffers
    is_whole = context.loss_model is None
    result, new_buffers = call_model(
        model,
        state.params,
        buffers if is_whole else {name: buffers[name] for name in model.buffer_names},
        inputs,
        train=train,
        rng=rng,
        num_examples=num_examples,
        first_example=0 if state.first_example is None else state.first_example,
        precision="fp32" if model is context.loss_model else context.precision,
    )
    return result, new_buffers if is_whole else {**buffers, **new_buffers}
