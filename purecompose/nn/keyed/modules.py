"""Keyed random functions inside users' modules.

Inside `with keyed(rng):` dropout in all its forms, attention with dropout, the `torch.rand` family, the
in-place fills and the samplers draw from the run's key: call number i of the scope from `rng.named(i)`. The
global generators are neither read nor advanced. `detect` raises an `UnkeyedRandomError` with the name of a random
function that has no keyed form, or bypasses the scope (C++ extensions, scripted code, `torch.ops`).

**Examples.** With `num_examples=n`, a tensor whose leading dimension is n * m is taken to contain m rows of each
example, in order, and is drawn per example: a microbatch draws the rows that the whole batch would have drawn. Any
other tensor (a sequence-first activation, a permutation) has one draw for all n examples, another one for each
`first_example`: slices of a batch draw independently, but not what the whole batch would have drawn. A single number,
of shape (), is the same in all slices. Recurrent layers know their layout, and draw per example in both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from purecompose._support.internals import DispatchMode, is_transforming
from purecompose.errors import UnkeyedRandomError as UnkeyedRandomError
from purecompose.nn.differentiable import plain_operations, replaces_functions
from purecompose.nn.keyed.draws import CURRENT, Draws, running, unkeyed
from purecompose.nn.keyed.functions import HANDLERS
from purecompose.nn.skeleton import replay
from purecompose.random.keys import Rng


class Keyed(Draws):
    """Mode that `keyed` switches on. Its attribute `count` is the number of random calls handled so far."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = HANDLERS.get(func)
        if handler is None:
            return func(*args) if kwargs is None else func(*args, **kwargs)
        kwargs = dict(kwargs or {})
        if kwargs.pop("generator", None) is not None:
            advice = "Leave `generator` out: the call then draws from the run's key."
            raise unkeyed(func, "was given a generator, which is state outside of the run's", advice)
        if func is not torch.empty and kwargs.pop("out", None) is not None:
            raise unkeyed(func, "has no keyed form with out=", "Use the tensor that it returns.")
        return handler(self, func, *args, **kwargs)


def keyed(rng: Rng, *, num_examples: int | None = None, first_example: int | Tensor = 0) -> Keyed:
    """Return a scope in which the random functions of a forward pass draw from `rng`.

    Args:
        rng: The scope's key and path; `first_example` takes the place of its examples.
        num_examples: Number of examples in the forward pass, for draws per example; None for draws for all of them.
        first_example: Index of the first of them in the whole batch: an int, or an int64 tensor of shape (). Passes
            with another one draw other numbers.

    Returns:
        A context manager, for one use; after `with ... as record`, `record.count` is the number of random calls
        handled.
    """
    return Keyed(rng, num_examples, first_example)


BY_KEY = (
    "In a stage or an algorithm draw from the state: purecompose.random.uniform(state.example_rng(name), shape), and "
    "for the batch as a whole from state.rng(name). In a network use functions with a keyed form, such as "
    "torch.rand, torch.randn and dropout, called from Python. A loss has no key: draw in the network, and return the "
    "numbers with its outputs"
)


class Detector(DispatchMode):
    """Mode that `detect` switches on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_idle(func, args, kwargs):
            self.found.append(str(func))
            raise unkeyed(func, f"would draw from a generator ({func}), not from the run's key", BY_KEY)
        return func(*args, **kwargs)


def _is_idle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments switch the randomness off: dropout with p = 0, or not training."""
    schema = func._schema.arguments
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    given |= dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    if given.get("train") is False or given.get("training") is False:
        return True
    # `p` is a dropout rate only in the dropouts: bernoulli_ and geometric_ draw for any value.
    rates = ["dropout_p", "dropout", *(["p"] if "dropout" in func._schema.name else [])]
    return any(name in given and given[name] == 0 for name in rates)


def detect() -> Detector:
    """Return a scope in which an operation that would draw from a generator raises an error with its name instead.

    It intercepts the operations that torch tags as seeded, below the level of Python. It costs far more than `keyed`:
    use it while tracing, and in the first step.
    """
    return Detector()


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn(*args, **kwargs)` without keeping its activations, which backward computes again.

    Inside `keyed`, the second computation draws the same numbers as the first. Elsewhere this is torch's non-reentrant
    checkpoint, which restores the global generator. In the forward pass of a state's network, the second computation
    uses the same parameters and buffers as the first, and its writes into buffers are dropped. Under `torch.func`
    transforms, where torch has no checkpointing, `fn` runs plainly.

    Args:
        fn: A module or a function of tensors.
        *args: The arguments of `fn`.
        **kwargs: The keyword arguments of `fn`.

    Returns:
        The result of `fn`.

    Example:
        >>> from purecompose.random import key
        >>> x = torch.ones(3, requires_grad=True)
        >>> with keyed(Rng(key(0))):
        ...     y = checkpoint(torch.nn.functional.dropout, x)
        >>> torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())
        True
    """
    if is_transforming():
        return fn(*args, **kwargs)
    # Bound here, so that no keyword argument of `fn` is taken as one of torch's.
    bound = functools.partial(fn, **kwargs)
    modes = reversed(_get_current_function_mode_stack())
    draws = next((mode for mode in modes if isinstance(mode, Keyed)), None)
    region = _replayable(bound, draws)
    return torch_checkpoint(region, *args, use_reentrant=False, preserve_rng_state=draws is None)


def _replayable(fn: Callable[..., Any], draws: Keyed | None) -> Callable[..., Any]:
    """Return `fn` such that its first call draws in `draws`, and later calls draw the same numbers again."""
    start = 0 if draws is None else draws.count
    part = CURRENT.get()
    num_passes = 0 if part is None else part.num_passes
    # Without gradients nothing is recomputed.
    bound_again = replay() if torch.is_grad_enabled() else nullcontext
    plain = plain_operations if replaces_functions() else nullcontext
    is_first = True

    def replayable(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        # The region counts its passes separately, so that a recomputation can begin from the same number.
        region = None if part is None else part.region(num_passes)
        if not is_first:
            repeated = nullcontext() if draws is None else draws.again(start)
            with bound_again(), plain(), running(region), repeated:
                return fn(*args, **kwargs)
        is_first = False
        with running(region), nullcontext() if draws is None else draws.replayable():
            result = fn(*args, **kwargs)
        if part is not None and region is not None:
            part.num_passes = region.num_passes
        return result

    return replayable
