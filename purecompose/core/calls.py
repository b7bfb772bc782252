"""Calls of a state's network and loss, with the state's tensors and draws."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, random, tree
from purecompose._support.checks import shown
from purecompose._support.device import as_scalar
from purecompose.batch.examples import leading_sizes
from purecompose.batch.fields import aliases, tensors
from purecompose.core.given import Marks, watched
from purecompose.core.loss import with_scalars
from purecompose.core.ranks import Ranks, SharedPart
from purecompose.core.values import Values
from purecompose.nn.keyed import modules
from purecompose.nn.keyed.draws import CURRENT, current_run, is_compared, running
from purecompose.nn.network import call_model


_Result = tuple[Any, dict[str, Tensor]]


def _shared_rng(state: Values, name: str) -> random.Rng:
    """Return the generator of the draws called `name`, the same in all turns of a stage; see `State.rng`."""
    if state.clock is None:
        return random.Rng(random.fold_in(state.key, state.timestamp.batch), random.salt(name))
    names = (state.clock.domain, name) if state.clock.domain else (name,)
    return random.Rng(state.clock.key_of_draws(state.key), random.salt(*names))


def rng_of_turn(state: Values, name: str) -> random.Rng:
    """See `State.rng`."""
    part = CURRENT.get()
    return _shared_rng(state, name if part is None or not part.turn else f"{name}, turn {part.turn}")


def run_model(state: Values, inputs: Any, *, train: bool, rng_name: str | None = None) -> _Result:
    """See `State.run_model`."""
    current = CURRENT.get()
    part = current if rng_name is None else None
    name = rng_name or (".state.forward" if part is None else part.next_pass())
    context = state.context
    if state.clock is None:  # outside of a step, whose batch consists of aliases already
        inputs = aliases(inputs)

    def call() -> _Result:
        def keyed() -> modules.Keyed:
            if part is not None:
                part.check_replayable()
            sizes = leading_sizes(inputs) if context.layout.has_rows(state.batch) else []
            num_examples = sizes[0] if len(sizes) == 1 else None
            if state.batch is not None and sizes:
                num = state.num_examples
                if len(sizes) > 1 or sizes[0] > num:  # what all examples share is among the inputs; or several views
                    num_examples = num
                if num not in sizes and is_compared():
                    num_examples = None  # which rows belong to an example of a slice is not known
            return _keyed(state, _shared_rng(state, name), num_examples)

        return call_model(
            context.model, state.params, state.buffers, inputs, train=train, keyed=keyed, precision=context.precision
        )

    if state.clock is not None or context.model.skeleton(train).draws is not None:
        return call()
    marks = Marks(lambda: [("its inputs", one) for one in tensors(inputs)], with_values=True)
    return watched(call, "the network", [marks])


def per_example(state: Values, fn: Callable[[Any], Any]) -> Any:
    """See `State.per_example`."""
    current, purpose, num = CURRENT.get(), current_run(), state.num_examples
    with torch.no_grad():
        if current is None or purpose is None or purpose.whole_batch is None:
            return _checked(fn(state), num)
        ranks = purpose.whole_batch.comparing() if purpose.is_first else purpose.whole_batch
        share = ranks.share(state.batch, state.context.layout)
        part = SharedPart(ranks, share, num, state.batch, state.device, shares_statistics=True)
        inner = current.region(current.num_passes, purpose._replace(part=part, whole_batch=None))
        first = share.first_example + (0 if state.first_example is None else state.first_example)
        with running(inner):
            own = fn(state.replace(batch=share.batch, first_example=first))
        current.num_passes = inner.num_passes
        own = _checked(own, max(share.num_examples, 1))
        bounds = batches.bounds(num, min(ranks.size, num))
        return tree.map(lambda rows: _joined(rows[: share.num_examples], bounds, ranks), own)


def run_loss(
    state: Values, fn: Callable[[Callable[..., Any]], Any], *, train: bool, num_examples: int | None = None
) -> _Result:
    """See `State.call_loss`."""
    context = state.context
    if state.denominators is not None:
        plain, denominators = fn, state.denominators
        fn = lambda loss: plain(functools.partial(loss, denominators=denominators))  # noqa: E731
    if context.loss_scalars:
        inner, dtype = fn, context.loss_dtype  # schedules are in float64, and would change the loss's dtype
        scalars = {
            name: as_scalar(state.scalar(scalar), dtype, state.device) for name, scalar in context.loss_scalars.items()
        }
        fn = lambda loss: inner(with_scalars(loss, scalars))  # noqa: E731
    if context.loss_model is None:
        return fn(context.loss), state.buffers

    def keyed() -> modules.Keyed:
        has_rows = context.layout.has_rows(state.batch)
        rows = None if not has_rows else state.num_examples if num_examples is None else num_examples
        return _keyed(state, rng_of_turn(state, ".loss"), rows)

    return call_model(context.loss_model, state.params, state.buffers, [fn], train=train, keyed=keyed)


def _keyed(state: Values, rng: random.Rng, num_examples: int | None) -> modules.Keyed:
    first_example = 0 if state.first_example is None else state.first_example
    scope = modules.keyed(rng, num_examples=num_examples, first_example=first_example)
    scope.is_compared = is_compared()
    return scope


def _joined(own: Tensor, bounds: list[int], ranks: Ranks) -> Tensor:
    """Return the rows of all processes, one after the other; the first has the most."""
    most = bounds[1]
    padded = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])]) if len(own) < most else own
    rows = ranks.gather(padded).split(most)
    return torch.cat([part[: stop - start] for part, start, stop in zip(rows, bounds, bounds[1:], strict=False)])


def _checked(values: Any, num_examples: int) -> Any:
    for leaf in tree.leaves(values):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != num_examples:
            raise ValueError(
                f"state.per_example: expected tensors with one row for each of {num_examples} examples, got "
                f"{tree.describe(leaf) if isinstance(leaf, Tensor) else shown(leaf)}"
            )
    return values
