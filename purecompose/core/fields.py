"""The declaration of a state's fields: what each of them is is said once, in `FieldInfo`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


__all__ = ["DONATED", "HIDDEN", "REPORT", "TEMPORARY", "FieldInfo", "none", "state_field"]


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

    A default factory leaves no attribute on the class, so that absent fields are looked up by `State.__getattr__`.
    """
    default: dict[str, Any] = {} if default_factory is None else {"default_factory": default_factory}
    return field(metadata={"info": info}, **default)


def none() -> None:
    return None


DONATED = FieldInfo(persists=True, keeps_form=True, leaves_grad=True)
REPORT = FieldInfo(persists=True, leaves_grad=True)
TEMPORARY = FieldInfo()
HIDDEN = FieldInfo(holds_values=False)
