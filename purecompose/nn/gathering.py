"""Networks whose parameters are divided among processes: those of the function that runs are put together."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from purecompose._support.contexts import NOTHING
from purecompose._support.internals import is_in_backward, is_transforming, unwrapped
from purecompose._support.shards import check_alike, is_shard, local, may_be_shards, names_by_memory, whole
from purecompose.combinations import unsupported


class GatheredOnUse(TorchFunctionMode):
    """Mode in which functions of torch that are given divided tensors compute on all of their rows.

    So the parameters of a network are whole only while they are used, one layer at a time. All processes must call the
    same functions in the same order.

    Args:
        gather: Function that returns all rows of each of the divided tensors that a function of torch reads.
        check: Function that is given these tensors before they are gathered.
        only_recorded: True for functions that a network calls, or that autograd records or calls, only. What a method
            computes between two passes acts on divided tensors.
    """

    def __init__(
        self,
        gather: Callable[[list[Tensor]], Iterable[Tensor]],
        check: Callable[[list[Tensor]], None],
        *,
        only_recorded: bool = False,
    ) -> None:
        super().__init__()
        self._gather, self._check, self._only_recorded = gather, check, only_recorded
        self._networks = 0
        """Number of forward passes that are running."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shards = [shard for value in (*args, *kwargs.values()) for shard in _shards(value)]
        if shards and _computes(func) and self._acts_on(func, args):
            self._check(shards)
            rows = iter(self._gather(shards))
            args = tuple(_filled(value, rows) for value in args)
            kwargs = {name: _filled(value, rows) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _acts_on(self, func: Any, args: tuple[Any, ...]) -> bool:
        is_in_engine = is_in_backward()
        if not is_in_engine:
            return torch.is_grad_enabled() or not self._only_recorded or self._networks > 0
        # The engine adds two gradients of one parameter, which are divided like it. It calls no function of torch, but
        # a dispatch mode, such as that which watches a first run, calls the operation again.
        return func is not torch.ops.aten.add.Tensor or not all(map(is_shard, args))

    @contextmanager
    def in_network(self) -> Iterator[None]:
        """Return a scope of a forward pass, which may compute with its parameters under no_grad, too."""
        self._networks += 1
        try:
            yield
        finally:
            self._networks -= 1


def gathered_on_use(params: Mapping[str, Tensor]) -> AbstractContextManager[Any]:
    """Return a scope for a forward pass outside of a step's gradient, in which divided parameters are gathered on use.

    Raises:
        UnsupportedError: A gradient or map would go through the messages.
        RuntimeError: In the scope: processes read other parameters.
    """
    if not may_be_shards():
        return NOTHING
    divided = {name: param for name, given in params.items() if is_shard(param := unwrapped(given))}
    if not divided:
        return NOTHING
    active = next((mode for mode in _get_current_function_mode_stack() if isinstance(mode, GatheredOnUse)), None)
    if active is not None and (torch.is_grad_enabled() or is_transforming()):
        return active.in_network()
    if is_transforming() or torch.is_grad_enabled() and any(param.requires_grad for param in divided.values()):
        raise unsupported("several processes", "transforms of torch.func and gradients through steps")
    return _compared(divided)


@contextmanager
def _compared(divided: Mapping[str, Any]) -> Iterator[None]:
    """Return a scope in which the processes compare what they gather, and that they leave it together."""
    like, name_of = next(iter(divided.values())), names_by_memory(divided)
    group = like.device_mesh.get_group(like.device_mesh.ndim - 1).group_name

    def check(shards: list[Tensor]) -> None:
        check_alike(f"reads {', '.join(map(name_of, shards))}", group, local(like))

    with GatheredOnUse(lambda shards: map(whole, shards), check):
        yield
    check_alike("has left the network", group, local(like))


_DESCRIBING = {
    getattr(Tensor, name)
    for name in (
        *("detach", "requires_grad_", "size", "dim", "ndimension", "stride", "numel", "nelement", "element_size"),
        *("is_floating_point", "is_complex", "is_contiguous", "is_conj", "is_neg", "is_inference", "storage_offset"),
        *("untyped_storage", "register_hook", "__hash__", "__len__"),
    )
} | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_conj, torch.is_neg, torch.autograd.grad}
"""Functions that do not compute with the numbers of a tensor."""

_COMPUTED_ATTRIBUTES = ("T", "mT", "H", "mH", "real", "imag", "data")


def _computes(func: Any) -> bool:
    if getattr(func, "__name__", "") == "__get__":
        return func.__self__.__name__ in _COMPUTED_ATTRIBUTES
    return func not in _DESCRIBING


def _filled(value: Any, rows: Iterator[Tensor]) -> Any:
    """Return an argument of a function with whole tensors in place of divided ones."""
    if is_shard(value):
        return next(rows)
    return type(value)(next(rows) if is_shard(one) else one for one in value) if _shards(value) else value


def _shards(value: Any) -> list[Tensor]:
    return list(filter(is_shard, value if type(value) in (tuple, list) else (value,)))
