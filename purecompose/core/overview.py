"""A state in short, in words and as HTML for notebooks: its time, and shapes and dtypes by field; no value is read."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from purecompose import tree
from purecompose._support.tables import columns, fragment, note


_HEAD = ("field", "tensors", "numbers", "dtype", "shapes")
_MOST_SHAPES = 4


def state_as_html(title: str, fields: Iterable[tuple[str, Any]]) -> str:
    """Return a title above a table with a row for each field that has tensors.

    Args:
        title: A line about the whole.
        fields: The names of the fields, with their values.
    """
    rows = []
    for name, value in fields:
        leaves = tree.leaves_with_paths(value, into_objects=True)
        if tensors := {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}:
            rows.append(_row(name, tensors))
    return fragment(note(title), *([columns(_HEAD, rows)] if rows else []))


def describe_moment(timestamp: Any) -> str:
    """Return the time in words, for reasons."""
    elapsed = timestamp.elapsed()
    share = "" if elapsed is None else f" ({elapsed:.1%} of the run)"
    return f"at batch {timestamp.batch}{share}"


def describe_replaced(replaced: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the modules that each method has replaced in words, by its name; see `Context.replaced`."""
    words = {name: listed([one or "the whole network" for one in found]) for name, found in replaced.items()}
    return {name: f"modules replaced: {len(replaced[name])} ({words[name]})" for name in words}


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _row(name: str, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    count = sum(tensor.numel() for tensor in tensors.values())
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    shown = [f"{_dotted(path)} {tuple(tensor.shape)}".strip() for path, tensor in tensors.items()]
    if len(shown) > _MOST_SHAPES:
        shown[_MOST_SHAPES - 1 :] = [f"and {len(shown) - _MOST_SHAPES + 1:,} more"]
    return name, f"{len(tensors):,}", f"{count:,}", ", ".join(dtypes), ", ".join(shown)


def _dotted(path: str) -> str:
    """Return a key path such as `['momentum']['0.weight']` as `momentum.0.weight`."""
    return ".".join(filter(None, (part.strip(".") for part in re.split(r"\['|'\]|[\[\]]", path))))
