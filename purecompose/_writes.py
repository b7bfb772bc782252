"""A scope in which certain tensors cannot be written into."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch._C._functorch import (  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
    get_unwrapped,
    is_functorch_wrapped_tensor,
)
from torch.utils._python_dispatch import TorchDispatchMode


__all__ = ["WriteGuard", "storage_of"]


class WriteGuard(TorchDispatchMode):
    """Stops what would write into a tensor's memory, also through `.data`, a view or a tie.

    Args:
        tensors: By name.
        error: What is raised, from the tensor's name and the operation.

    Example:
        >>> import torch
        >>> weight = torch.ones(2)
        >>> with WriteGuard({"weight": weight}, lambda name, operation: RuntimeError(f"{operation} into {name}")):
        ...     weight.data[:1].zero_()
        Traceback (most recent call last):
        RuntimeError: aten.zero_.default into weight
    """

    def __init__(self, tensors: Mapping[str, Tensor], error: Callable[[str, Any], Exception]) -> None:
        super().__init__()
        self._names = {storage_of(tensor): name for name, tensor in tensors.items()}
        self._error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = given.get(argument.name)
                    for tensor in written if isinstance(written, (list, tuple)) else (written,):
                        if isinstance(tensor, Tensor) and storage_of(tensor) in self._names:
                            raise self._error(self._names[storage_of(tensor)], func)
        return func(*args, **kwargs)


def storage_of(tensor: Tensor) -> int:
    """A number by which tensors on the same memory are known, while one of them is there."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return id(tensor)
