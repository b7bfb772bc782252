"""What user code may do to the values that it is given, checked in the first call of each kind.

It writes into none of them, switches no gradient on for values that outlive the call, and draws only by key. The rule
is the same for stages and methods, losses, metrics and networks, in a step, an evaluation, a prediction or a pass.
"""

import random as python_random
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor

from purecompose._support.contexts import NOTHING, storage_of
from purecompose._support.internals import has_values, plainly, unwrapped
from purecompose._support.objects import fingerprint
from purecompose._support.shards import local
from purecompose.errors import GlobalDrawError, InPlaceError
from purecompose.nn.keyed.modules import BY_KEY
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
    """Return the result of a call of user code, which must not write into what it was given, or draw without a key.

    Args:
        call: The call.
        culprit: Description of the code, with which errors begin.
        marks: The marks of what it was given.
        event: The event at which it is called, if any.
        remedy: What to do instead of a write; by default the usual advice.

    Raises:
        InPlaceError, GlobalDrawError: The code did so.
    """
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
