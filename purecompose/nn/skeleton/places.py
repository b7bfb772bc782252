"""Places of a module's tensors: the containers that hold them, and their keys there."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn


OWN = frozenset(vars(nn.Module()))
"""Names of torch's own entries in every module's `__dict__`."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Place(NamedTuple):
    """Place of a tensor: `container[key]` is `tensor`; `kind` is the attribute of the module that leads there."""

    tensor: Tensor
    container: Any
    key: Any
    name: str
    kind: str


def places(module: nn.Module) -> Iterator[Place]:
    """Yield every place of a tensor, registered ones first; a tied tensor has several."""
    modules = list(module.named_modules())
    for kind in ("_parameters", "_buffers", "__dict__"):
        for prefix, child in modules:
            container = getattr(child, kind)
            for key in list(container):
                if kind != "__dict__" or key not in OWN:
                    yield from _inside(container, key, f"{prefix}.{key}".lstrip("."), kind)


def _inside(container: Any, key: Any, name: str, kind: str) -> Iterator[Place]:
    value = container[key]
    if isinstance(value, Tensor):
        yield Place(value, container, key, name, kind)
    elif isinstance(value, (list, dict)):
        for inner in range(len(value)) if isinstance(value, list) else list(value):
            yield from _inside(value, inner, f"{name}.{inner}", kind)
