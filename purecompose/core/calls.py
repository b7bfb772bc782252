"""Calls of a state's network and loss, with the state's tensors and draws, and what user code may do to values.

User code writes into none of the values that it is given, switches no gradient on for values that outlive the call,
and draws only by key. The rule is the same for stages and methods, losses, metrics and networks, in a step, an
evaluation, a prediction or a pass; it is checked in the first call of each kind.
"""

import functools
import random as python_random
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from purecompose import batch as batches, random, tree
from purecompose._support.contexts import NOTHING, storage_of
from purecompose._support.device import as_scalar, local
from purecompose._support.internals import has_values, plainly, unwrapped
from purecompose._support.objects import fingerprint
from purecompose._support.specs import shown
from purecompose.batch.examples import leading_sizes
from purecompose.batch.fields import aliases, tensors
from purecompose.core.clock import with_scalars
from purecompose.core.ranks import Ranks, SharedPart
from purecompose.core.values import Values
from purecompose.errors import GlobalDrawError, InPlaceError
from purecompose.nn.keyed import modules
from purecompose.nn.keyed.draws import CURRENT, current_run, is_compared, running
from purecompose.nn.keyed.modules import BY_KEY
from purecompose.nn.network import call_model
from purecompose.time.event import Event


T = TypeVar("T")
Named = list[tuple[str, Tensor]]
"""Tensors, each with its path."""


class Marks:
    """The versions, memory and flags of tensors at some time, by which later writes are found.

    Args:
        find: Function that returns the tensors, which is called again for each check.
        with_values: True to compare the values of small tensors on the CPU too, into which NumPy may write.
    """

    def __init__(self, find: Callable[[], Named], *, with_values: bool = False) -> None:
        self._find, self._with_values, self._tensors = find, with_values, find()
        self._marks = self._now()

    def check(self, culprit: str, event: Event | None = None, remedy: str = "") -> None:
        """Raise an `InPlaceError` that names the culprit if a tensor is not as it was."""
        now = self._find()
        if [id(tensor) for _, tensor in now] != [id(tensor) for _, tensor in self._tensors]:
            raise InPlaceError(
                f"{culprit} replaced an entry of a dictionary or list of the state or batch it was given, which "
                "belongs to the caller: make a new one, as in state.replace(params={**state.params, name: tensor})",
                event,
            )
        remedy = remedy or "make a new tensor (mul instead of mul_, inplace=False in a layer), and return that"
        for (path, tensor), mark, found in zip(self._tensors, self._marks, self._now(), strict=True):
            if found == mark:
                continue
            how = f"wrote in place into {path}, which belongs to the caller and has lost its value now: {remedy}"
            if found[:-1] == mark[:-1]:
                tensor.requires_grad_(mark[-1])
                how = f"switched requires_grad of {path}: differentiate an alias, x = x.detach().requires_grad_()"
            raise InPlaceError(f"{culprit} {how}", event)

    def _now(self) -> list[tuple[Any, ...]]:
        with plainly() if self._with_values else NOTHING:
            return [self._mark(tensor) for _, tensor in self._tensors]

    def _mark(self, tensor: Tensor) -> tuple[Any, ...]:
        version = None if tensor.is_inference() else tensor._version  # inference tensors have no counter
        if not self._with_values:
            return version, storage_of(tensor), tensor.requires_grad
        # The flags of a batch and outputs are those of aliases, and of no consequence.
        plain = local(unwrapped(tensor))
        if plain.device.type != "cpu" or plain.numel() > _MANY or not has_values(plain):
            return version, storage_of(tensor), False
        return version, storage_of(tensor), fingerprint(plain.detach()), False


_MANY = 2**18
"""The values of larger tensors are not compared."""


def watched(
    call: Callable[[], T], culprit: str, marks: Iterable[Marks], event: Event | None = None, remedy: str = ""
) -> T:
    """Return the result of a call of user code, which must not write into what it was given, or draw without a key."""
    before = _generators()
    result = call()
    for given in marks:
        given.check(culprit, event, remedy)
    if _generators() != before:
        raise GlobalDrawError(
            f"{culprit} drew from the global generator of Python's random or of NumPy, which no state holds. "
            f"{BY_KEY}. In a model of a library, switch it off by its settings (apply_spec_augment=False)",
            event,
        )
    return result


def _generators() -> tuple[Any, ...]:
    """Return the states of the generators whose draws torch's modes do not intercept."""
    numpy = sys.modules.get("numpy")
    _, numbers, *rest = (None, None) if numpy is None else numpy.random.get_state()
    return python_random.getstate(), None if numbers is None else numbers.tobytes(), rest


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
