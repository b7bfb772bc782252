"""The keyed draws of a forward pass: their key, place in the batch, and device, and the part of a step that runs it.

`Draws` counts the random calls of one pass, gives each its own draw from the run's key, and makes the draw per example
if the tensor's leading dimension is the batch.

A part is a stage, or an algorithm at an event. Its forward passes are numbered by their order, so that each draws other
numbers; from the start again each time the part runs: in every slice, in `state.gradient`, and when it is traced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import CodeType, FrameType, MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.checkpoint import CheckpointFunction

from purecompose._support.contexts import NOTHING, during
from purecompose._support.internals import saved_tensors_hooks
from purecompose._support.messages import calling_frames
from purecompose.errors import UnkeyedRandomError
from purecompose.random.keys import Rng


Sampler = Callable[[Rng, tuple[int, ...]], Tensor]
"""`(rng, shape) -> Tensor`: a function that draws a tensor of the given shape."""

Handler = Callable[..., Any]
"""`(draws, func, *args, **kwargs) -> result`: a function that replaces a random call."""


def unkeyed(func: Any, why: str, advice: str) -> UnkeyedRandomError:
    """Return an error that names `func`, the code it was called from, the reason and the remedy."""
    name = func if isinstance(func, str) else function_name(func)
    own, torchs = calling_frames()
    caller = name if torchs is None else _running(torchs)
    names = f"`{name}`" if caller == name else f"`{caller}`, by `{name}`,"
    return UnkeyedRandomError(f"{names}{called_from(sys._getframe(1), own)} {why}. {advice}")


def _running(frame: FrameType) -> str:
    """Return the full name of the function of a frame; of a method, that of its object's class."""
    owner = frame.f_locals.get("self")
    if owner is None:
        return f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"
    return f"{type(owner).__module__}.{type(owner).__qualname__}.{frame.f_code.co_name}"


def function_name(func: Any) -> str:
    """Return the name a user would type, such as `torch.nn.functional.dropout` or `torch.Tensor.uniform_`."""
    if hasattr(func, "overloadpacket"):  # an operation of torch.ops
        base = func.overloadpacket.__name__
        return f"torch.{base}" if hasattr(torch, base) else f"torch.Tensor.{base}"
    name = resolve_name(func) or getattr(func, "__qualname__", None) or repr(func)
    return name.replace("_VariableFunctionsClass.", "torch.")


def called_from(
    frame: FrameType | None, own: FrameType | None = None, lines: Mapping[FrameType, int] = MappingProxyType({})
) -> str:
    """Return ` in Net.forward (net.py:12)` for the innermost module that runs in a frame, else for the user's code."""
    own = own or calling_frames(frame)[0]
    while frame is not None:
        if isinstance(owner := frame.f_locals.get("self"), nn.Module) and "forward" in frame.f_code.co_name:
            name, own = f"{type(owner).__name__}.{frame.f_code.co_name}", frame
            break
        frame = frame.f_back
    else:
        name = "" if own is None else own.f_code.co_name
    return "" if own is None else f" in {name} ({own.f_code.co_filename}:{lines.get(own, own.f_lineno)})"


class Draws(TorchFunctionMode):
    """The keyed draws of one forward pass.

    A torch-function mode, so that a handler can switch it on again (`with draws:`) while it runs a Python
    composite; the subclass `Keyed` finds the handler of a call.

    Attributes:
        count: Number of random calls that have been given a key so far. Call i draws from `rng.named(i)`.
        is_compared: True if draws that are not per example are a single number, so that slices can be compared.
    """

    is_compared: bool = False

    def __init__(
        self, rng: Rng, num_examples: int | None = None, first_example: int | Tensor = 0, *, count: int = 0
    ) -> None:
        super().__init__()
        self.count = count
        self.rng: Rng = rng.per_example(None)
        self.num_examples = num_examples
        self.first_example = first_example
        # The regions whose recomputation repeats these draws: the one in which the scope was opened (a recomputation
        # opens it again), and those that `checkpoint` adds.
        self.replayable_hooks: list[tuple[Any, Any] | None] = [saved_tensors_hooks()]
        # Derived when first needed, and shared by all draws of the pass.
        self._keys_of_examples: Tensor | None = None
        self._key_of_slice: Tensor | None = None

    def draw(
        self, func: Any, sampler: Sampler, shape: Sequence[int], device: torch.device, *, per_example: bool = True
    ) -> Tensor:
        """Return the next keyed draw, `sampler(rng, shape)` on a device.

        If `shape[0]` is `num_examples * m`, leading index j holds element `j % m` of example `first_example + j // m`.
        A single number, of shape (), is drawn for the whole batch. Otherwise, and unless the draw is `per_example`,
        there is one for all examples of this pass, another one for each `first_example`.
        """
        self._check_replayable(func)
        shape = tuple(shape)
        rng = self.rng.named(self.count)
        self.count += 1
        if not shape:  # a decision about the whole batch, such as to drop a block
            return sampler(_moved(rng, device), shape)
        count = self.num_examples if per_example else None
        if not (count and shape[0] and shape[0] % count == 0):
            if self.is_compared:
                return sampler(_moved(rng, device), (1,) * len(shape)).expand(shape)
            return sampler(_moved(replace(rng, examples=self._slice()), device), shape)
        rng = _moved(replace(rng, examples=self._examples(count)), device)
        if shape[0] == count:
            return sampler(rng, shape)
        return sampler(rng, (count, shape[0] // count, *shape[1:])).reshape(shape)

    def _examples(self, count: int) -> Tensor:
        """Return the keys of the examples, (n, 2)."""
        if self._keys_of_examples is None:
            indices = torch.arange(count, device=self.rng.key.device) + self.first_example
            self._keys_of_examples = self.rng.per_example(indices).examples
        assert self._keys_of_examples is not None
        return self._keys_of_examples

    def _slice(self) -> Tensor:
        """Return the key of draws for all examples of this slice of the batch, which its first example identifies."""
        if self._key_of_slice is None:
            self._key_of_slice = self.rng.per_example(self.first_example).examples
        assert self._key_of_slice is not None
        return self._key_of_slice

    def again(self, count: int) -> Self:
        """Return draws that repeat these from a number of calls on."""
        new = type(self)(self.rng, self.num_examples, self.first_example, count=count)
        new.is_compared = self.is_compared
        return new

    @contextmanager
    def replayable(self) -> Iterator[None]:
        """Return a scope that may draw in the checkpointed region in which it is entered."""
        self.replayable_hooks.append(saved_tensors_hooks())
        try:
            yield
        finally:
            self.replayable_hooks.pop()

    def _check_replayable(self, func: Any) -> None:
        """Raise inside of torch's own checkpoint, which cannot repeat the draws of a recomputed forward.

        Its gradient would be that of another function, without an error. Only `checkpoint` knows the draw to restart
        from.
        """
        if is_under_foreign_checkpoint(self.replayable_hooks):
            why = "was called under `torch.utils.checkpoint`, which cannot replay its key"
            raise unkeyed(func, why, "Use `purecompose.nn.layers.checkpoint(fn, *args)` in its place.")


def _moved(rng: Rng, device: torch.device) -> Rng:
    if rng.key.device == device:
        return rng
    draw, examples = rng.draw, rng.examples
    draw = draw.to(device) if isinstance(draw, Tensor) else draw
    return Rng(rng.key.to(device), draw, None if examples is None else examples.to(device))


def is_under_foreign_checkpoint(replayable_hooks: Iterable[tuple[Any, Any] | None]) -> bool:
    """Return whether this runs in a checkpointed region other than those with these hooks."""
    hooks = saved_tensors_hooks()
    if hooks is None:
        return not torch.is_grad_enabled() and _is_on_stack(_REENTRANT_FORWARD)
    # Recognized by name, because torch has no public mark for a checkpointed region.
    is_checkpoint = getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.")
    return is_checkpoint and all(known is None or hooks[0] is not known[0] for known in replayable_hooks)


# The code that torch.utils.checkpoint(..., use_reentrant=True) runs in the forward pass, without gradients.
_REENTRANT_FORWARD = CheckpointFunction.forward.__code__


def _is_on_stack(code: CodeType) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


class Part:
    """A part that begins to run; the forward passes in it are counted while `CURRENT` holds it.

    Attributes:
        name: That of the draws of its first pass.
        run: The run of a step (`core.operation.Purpose`); `None` outside of steps.
        num_passes: Number of passes so far.
        turn: Number of earlier stages of the same name.
        is_compared: True if slices of a batch are compared: draws must not depend on their sizes.
        is_apart: True if batch normalisation uses the statistics of what it is given, whatever the run shares.
    """

    __slots__ = ("_hooks", "is_apart", "is_compared", "name", "num_passes", "run", "turn")

    def __init__(self, name: str, run: Any = None, turn: int = 0, num_passes: int = 0) -> None:
        self.name, self.run, self.turn, self.num_passes = name, run, turn, num_passes
        self.is_compared: bool = run is not None and run.is_compared
        self.is_apart = False
        self._hooks = saved_tensors_hooks()

    def region(self, num_passes: int, run: Any = None) -> Part:
        """Return a part of this one whose passes are counted separately, from a number on."""
        part = Part(self.name, run or self.run, self.turn, num_passes)
        part.is_compared, part.is_apart = self.is_compared, self.is_apart
        return part

    def next_pass(self) -> str:
        """Return the name of the next pass's draws."""
        number = self.num_passes
        self.num_passes += 1
        return self.name if number == 0 else f"{self.name}, pass {number}"

    def check_replayable(self) -> None:
        """Raise inside of torch's own checkpoint, whose recomputation would give the pass another number."""
        if is_under_foreign_checkpoint([self._hooks]):
            why = "was called under `torch.utils.checkpoint`, whose recomputation would draw other numbers"
            advice = "Use `purecompose.nn.layers.checkpoint(fn, *args)` in its place, or name the pass: name='teacher'."
            raise unkeyed("state.forward", why, advice)


CURRENT: ContextVar[Part | None] = ContextVar("part", default=None)
"""The innermost part that is running."""


def running(part: Part | None) -> AbstractContextManager[Any]:
    """Return a scope in which this is the current part."""
    return during(CURRENT, part)


def current_run() -> Any:
    """Return the run that the caller belongs to, or `None`."""
    part = CURRENT.get()
    return None if part is None else part.run


def is_first_run() -> bool:
    """Return whether the caller is in the first run of a step, which is watched."""
    run = current_run()
    return run is not None and run.is_first


def shared_batch() -> Any:
    """Return the `SharedPart` whose statistics batch normalisation uses, or `None`."""
    part = CURRENT.get()
    return None if part is None or part.run is None or part.is_apart else part.run.shared_batch


def apart() -> AbstractContextManager[Any]:
    """Return a scope in which batch normalisation uses the statistics of what it is given."""
    part = CURRENT.get()
    if part is None:
        return NOTHING
    region = part.region(part.num_passes)
    region.is_apart = True
    return during(CURRENT, region)


def is_compared() -> bool:
    """Return whether the current part is one in which slices of a batch are compared."""
    part = CURRENT.get()
    return part is not None and part.is_compared
