"""The memory of an optimizer for other parameters than before: after surgery, freezing and thawing."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from purecompose import tree


def carried(
    optimizer: Any, opt_state: Any, params: Mapping[str, Tensor], kept: Mapping[str, str], frozen: Collection[str] = ()
) -> Any:
    """Return an optimizer's state with the old memory of parameters that were kept, and fresh memory of the others.

    A frozen parameter has memory only if it had some before. Memory that is not stored by parameter name is kept as it
    is, or fresh if there was none.

    Args:
        optimizer: The optimizer.
        opt_state: Its state for the old parameters; `None` if there is none.
        params: The parameters by their new names.
        kept: Map from the new names of parameters that were kept to their old names.
        frozen: The new names of parameters that do not train.
    """
    names, allocated = set(params), set(params).difference(kept, frozen)

    def is_by_name(memory: Any) -> bool:
        # Only the innermost such mapping: the name of a slot may also be the name of a parameter.
        is_named = isinstance(memory, Mapping) and bool(memory) and memory.keys() <= names
        return is_named and not any(map(is_by_name, memory.values()))

    def joined(new: Any, old: Any) -> Any:
        if is_by_name(new):
            had = {name: old[kept[name]] for name in new if old and name in kept and kept[name] in old}
            return {name: had.get(name, value) for name, value in new.items() if name in had or name not in frozen}
        if isinstance(new, Mapping):
            return {key: joined(value, old[key] if old and key in old else None) for key, value in new.items()}
        if isinstance(new, tuple | list):
            members = [joined(mine, theirs) for mine, theirs in zip(new, old or [None] * len(new), strict=True)]
            return type(new)(*members) if hasattr(new, "_fields") else type(new)(members)
        return new if old is None else old

    def result() -> Any:
        # Parameters without fresh memory are on the meta device, where theirs need not be allocated.
        given = {name: param if name in allocated else param.detach().to("meta") for name, param in params.items()}
        return joined(optimizer.init(given), opt_state)

    memory = result()
    if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree.leaves(memory)):
        return memory
    # A kept parameter may need memory that it did not have, for example in another group.
    allocated = names
    return result()
