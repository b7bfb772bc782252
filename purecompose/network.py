"""One forward pass of a skeleton: tensors in place, randomness keyed, new buffers out."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from purecompose import batch as batches, random
from purecompose._skeleton import Skeleton
from purecompose.model import Model
from purecompose.random import modules


__all__ = ["call_model", "looking_for_draws"]

_LOOKING: ContextVar[bool] = ContextVar("looking_for_draws", default=False)


@contextmanager
def looking_for_draws() -> Iterator[None]:
    """A scope in which every forward pass is watched for random functions that no key covers.

    Watching costs more than a small network's forward, so a step does it once per schedule; in between a
    skeleton remembers whether it ever drew anything.
    """
    token = _LOOKING.set(True)
    try:
        yield
    finally:
        _LOOKING.reset(token)


def call_model(
    model: Model,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Any,
    *,
    train: bool,
    rng: Callable[[], random.Rng],
    num_examples: int | None = None,
    first_example: int | Tensor = 0,
    precision: str = "fp32",
) -> tuple[Any, dict[str, Tensor]]:
    """Runs the network; nothing that is handed in changes.

    Args:
        model: The architecture.
        params: All parameters by name.
        buffers: All buffers by name.
        inputs: One argument, a list of arguments, or a mapping of keyword arguments.
        train: Whether modules are in training mode.
        rng: Gives the place of the network's draws; called only if it draws.
        num_examples: The batch's size, for draws per example.
        first_example: The index of its first example in the whole batch.
        precision: "fp32", or "bf16" for autocast.

    Returns:
        The outputs, in float32 where autocast made them bfloat16, and the buffers as the pass left them.

    Raises:
        KeyError: A tensor of the architecture is missing.
        UnkeyedRandomError: The network uses a random function that no key can cover.
    """
    skeleton = model.skeleton(train)
    # A forward pass writes into the buffers it is handed (batch norm's running statistics).
    own = {name: buffer.clone() for name, buffer in buffers.items()} if buffers else {}
    looking = _LOOKING.get() or skeleton.draws is None
    with skeleton.bound(params, own) as module, _autocast(precision, params):
        if not looking and not skeleton.draws:
            outputs = _call(module, inputs)
        else:
            outputs = _call_keyed(skeleton, inputs, rng(), num_examples, first_example, looking)
        new_buffers = skeleton.current_buffers() if own else own
    if precision == "bf16":
        # The loss and whatever edits outputs work outside of autocast: in bfloat16 a loss has three digits.
        outputs = batches.map_tensors(_widened, outputs)
    return outputs, new_buffers


def _call_keyed(
    skeleton: Skeleton,
    inputs: Any,
    rng: random.Rng,
    num_examples: int | None,
    first_example: int | Tensor,
    looking: bool,
) -> Any:
    with ExitStack() as stack:
        if looking:
            stack.enter_context(modules.detect())
        record = stack.enter_context(modules.keyed(rng, num_examples=num_examples, first_example=first_example))
        outputs = _call(skeleton.module, inputs)
    skeleton.draws = bool(skeleton.draws) or record.draws > 0
    return outputs


def _autocast(precision: str, params: Mapping[str, Tensor]) -> AbstractContextManager[Any]:
    if precision == "fp32":
        return _AS_IT_IS
    device = next(iter(params.values())).device.type if params else "cpu"
    return torch.autocast(device, torch.bfloat16, cache_enabled=False)


_AS_IT_IS = nullcontext()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


def _call(module: torch.nn.Module, inputs: Any) -> Any:
    if type(inputs) is Tensor:
        return module(inputs)
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, list):
        return module(*inputs)
    return module(inputs)
