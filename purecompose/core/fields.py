"""The fields of a state: what each of them is, which is declared once in `FieldInfo`, and where its value is kept."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn

from purecompose.time import Timestamp


@dataclass(frozen=True)
class FieldInfo:
    """The properties of one field of `State`, declared only here."""

    persists: bool = False
    """True if the field is part of the state between steps and of checkpoints; otherwise it is `None` there."""
    keeps_form: bool = False
    """True if no step changes its structure, shapes or dtypes, so that compiled steps may write into its memory."""
    leaves_grad: bool = False
    """True if a value set in the body of a `Grad` is kept; otherwise the earlier value is restored after the scope."""
    holds_values: bool = True
    """True if algorithms read and write its value, which is compared when they are traced and tested."""


def state_field(info: FieldInfo, default_factory: Callable[[], Any] | None = None) -> Any:
    """Return a dataclass field with its properties as metadata; a default is given by a function.

    A default factory leaves no attribute on the class, so that absent fields are looked up by `Leasable.__getattr__`.
    """
    default: dict[str, Any] = {} if default_factory is None else {"default_factory": default_factory}
    return field(metadata={"info": info}, **default)


def none() -> None:
    return None


DONATED = FieldInfo(persists=True, keeps_form=True, leaves_grad=True)
REPORT = FieldInfo(persists=True, leaves_grad=True)
TEMPORARY = FieldInfo()
HIDDEN = FieldInfo(holds_values=False)


class Leasable:
    """A dataclass whose fields may be absent and are then read through a lease; see `purecompose.transforms.donation`.

    A compiled step with donation returns such states: their tensors are in buffers that the next step overwrites.
    """

    @property
    def lease(self) -> Any:
        """The lease through which a compiled step's buffers are read; `None` if the fields are held here."""
        return self.__dict__.get("_lease")

    def unleased(self) -> Self:
        """Return the same with all leased fields read."""
        successor = object.__new__(type(self))
        successor.__dict__.update(self.__getstate__())
        return successor

    def __getattr__(self, name: str) -> Any:
        lease, fields = self.lease, self.__dataclass_fields__
        if lease is None or name not in fields:
            raise AttributeError(f"a state has no attribute {name!r}; {_hint(name, fields)}")
        value = self.__dict__[name] = lease.read(name)
        return value

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields themselves, without a lease, for `copy` and `pickle`."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)


def _hint(name: str, fields: dict[str, Any]) -> str:
    if name in Timestamp.__dataclass_fields__:
        return f"its time is state.timestamp.{name}"
    if hasattr(nn.Module, name):
        return "it is not a module: to_module(state) returns one, and state.to(device) moves the state"
    infos = {known: fields[known].metadata.get("info", HIDDEN) for known in fields}
    return f"its fields are {', '.join(known for known, info in infos.items() if info.holds_values)}"
