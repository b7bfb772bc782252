"""The form of plain values from files: one description, with which whatever is read is compared before it is used."""

from typing import Any


def is_count(value: object) -> bool:
    """Return whether a value is a whole number from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < 2**63


def is_numbers(value: object) -> bool:
    """Return whether a value is a number, or a list of them, also nested."""
    return all(map(is_numbers, value)) if isinstance(value, list) else isinstance(value, (bool, int, float))


PLAIN = (bool, int, float, str, None)
"""A value without members."""


def misfit(value: Any, form: Any, place: str) -> str | None:
    """Return the place of a value that does not have its form; `None` if all do.

    Args:
        value: A value as `json` and `tomllib` return them.
        form: A type, for values of exactly this type, of which `float` accepts whole numbers; `None` for itself; a
            tuple of alternatives; a function that returns a bool; a list with the form of the members; a dict with the
            forms of the named members, of which those with a "?" may be missing, and of all others under "*".
        place: Name of the value.

    Example:
        >>> misfit({"batch": 3, "seconds": 1}, {"batch": is_count, "seconds": float, "command?": (str, None)}, "start")
        >>> misfit({"spans": [[1, True]]}, {"spans": [[is_count]]}, "file")
        "file['spans'][0][1]"
    """
    if isinstance(form, tuple):
        return None if any(misfit(value, one, place) is None for one in form) else place
    if isinstance(form, list):
        members = [(one, form[0], f"{place}[{i}]") for i, one in enumerate(value)] if isinstance(value, list) else None
    elif isinstance(form, dict):
        named = {name.removesuffix("?"): one for name, one in form.items() if name != "*"}
        is_whole = isinstance(value, dict) and value.keys() >= form.keys() - {"*", *(f"{name}?" for name in named)}
        rest = form.get("*", object)
        members = (
            [(one, named.get(name, rest), f"{place}[{name!r}]") for name, one in value.items()] if is_whole else None
        )
    elif isinstance(form, type):
        return None if form is object or type(value) in {float: (int, float)}.get(form, (form,)) else place
    else:
        return None if (value is None if form is None else form(value)) else place
    if members is None:
        return place
    return next((found for member in members if (found := misfit(*member)) is not None), None)
