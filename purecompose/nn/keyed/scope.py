"""The scope of keyed draws: which key, which place in the batch, which device.

One `Scope` lives for one forward pass. It counts the random calls, gives each its own draw of the run's key,
and lays a draw out per example where the tensor leads with the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from purecompose.random.keys import Rng


__all__ = ["Handler", "Sampler", "Scope", "UnkeyedRandomError", "top_hooks", "unkeyed"]

Sampler = Callable[[Rng, tuple[int, ...]], Tensor]
"""What makes the numbers: a generator and a shape in, a tensor of that shape out."""

Handler = Callable[..., Any]
"""`(scope, func, *args, **kwargs) -> result`: what a random call gives in its place."""


class UnkeyedRandomError(RuntimeError):
    """A random function would have used hidden state: it has no key, or its key cannot be replayed."""


def unkeyed(func: Any, why: str, advice: str) -> UnkeyedRandomError:
    """Return the error that names `func`, the module it was called from, the reason and the way out."""
    name = func if isinstance(func, str) else function_name(func)
    return UnkeyedRandomError(f"`{name}`{_called_from()} {why}. {advice}")


def function_name(func: Any) -> str:
    """Return the name a user would type: `torch.nn.functional.dropout`, `torch.Tensor.uniform_`."""
    return resolve_name(func) or getattr(func, "__qualname__", None) or repr(func)


def _called_from() -> str:
    """` in Net.forward (net.py:12)`, for the innermost module on the call stack; empty outside of modules."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and "forward" in frame.f_code.co_name:
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            return f" in {type(owner).__name__}.{frame.f_code.co_name} ({where})"
        frame = frame.f_back
    return ""


class Scope(TorchFunctionMode):
    """The keyed draws of one forward pass.

    A torch-function mode, so that a handler can switch it on again (`with scope:`) while it runs a Python
    composite; what is done with a call is the subclass's matter.

    Attributes:
        draws: How many random calls have been given a key so far. Call i draws from `rng.named(i)`.
    """

    def __init__(
        self,
        rng: Rng,
        num_examples: int | None = None,
        first_example: int | Tensor = 0,
        *,
        draws: int = 0,
    ) -> None:
        super().__init__()
        self.draws = draws
        self.rng = rng
        self.num_examples = num_examples
        self.first_example = first_example
        # The regions whose recomputation repeats these draws: the one that the scope was opened in (it is
        # opened again), and those that `checkpoint` adds.
        self.replayable_hooks = [top_hooks()]
        self._indices: Tensor | None = None
        if num_examples is not None:
            self._indices = torch.arange(num_examples, device=rng.key.device) + first_example

    def draw(
        self,
        func: Any,
        sampler: Sampler,
        shape: Sequence[int],
        device: torch.device,
        *,
        per_example: bool = True,
    ) -> Tensor:
        """Return the next keyed draw: `sampler` called with its key and place.

        Args:
            func: The random function that asked; named in errors.
            sampler: Makes the tensor.
            shape: What the caller wants. Where `shape[0]` is `num_examples * m` and m >= 1, leading index j
                holds element `j % m` of example `first_example + j // m`; otherwise the draw is one for the
                whole batch.
            device: Where the result lives. The draw is made there, from a moved key.
            per_example: False for draws that concern the whole batch whatever their shape.

        Returns:
            A tensor of `shape`.

        Raises:
            UnkeyedRandomError: The call is made under a checkpoint that cannot replay it.
        """
        self._check_replayable(func)
        shape = tuple(shape)
        rng = self._moved(self.rng.named(self.draws), device)
        self.draws += 1
        count = self.num_examples if per_example else None
        if self._indices is None or not (count and shape and shape[0] and shape[0] % count == 0):
            return sampler(rng, shape)
        rng = rng.per_example(self._indices.to(device))
        if shape[0] == count:
            return sampler(rng, shape)
        return sampler(rng, (count, shape[0] // count, *shape[1:])).reshape(shape)

    def _moved(self, rng: Rng, device: torch.device) -> Rng:
        if rng.key.device == device:
            return rng
        return tree_map_only(Tensor, lambda leaf: leaf.to(device), rng)

    def _check_replayable(self, func: Any) -> None:
        """Return a recomputed forward must draw the same numbers, and only `checkpoint` knows where to start again.

        Under torch's own function the recomputation would read the global generator, or count on from the end
        of the forward: the gradient of another function, without a word.
        """
        if self._is_under_foreign_checkpoint():
            why = "was called under `torch.utils.checkpoint`, which cannot replay its key"
            raise unkeyed(func, why, "Use `purecompose.checkpoint(fn, *args)` in its place.")

    def _is_under_foreign_checkpoint(self) -> bool:
        hooks = top_hooks()
        if hooks is None:
            return not torch.is_grad_enabled() and _is_on_stack(_REENTRANT_FORWARD)
        # Known by name: torch has no public mark for a checkpointed region.
        is_checkpoint = getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook.")
        return is_checkpoint and all(known is None or hooks[0] is not known[0] for known in self.replayable_hooks)


# What torch.utils.checkpoint(..., use_reentrant=True) runs in the forward pass, without gradients.
_REENTRANT_FORWARD = CheckpointFunction.forward.__code__


def _is_on_stack(code: CodeType) -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def top_hooks() -> tuple[Any, Any] | None:
    """Return the innermost saved-tensor hooks (pack, unpack): activation checkpointing works by them."""
    return _autograd._top_saved_tensors_default_hooks(True)
