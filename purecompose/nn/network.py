"""One forward pass of a skeleton: bind the tensors, draw random numbers by key, return new buffers.

Where parameters are divided among processes, each function of torch gathers those that it is given.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from purecompose import batch as batches, tree
from purecompose._support.contexts import NOTHING, DataGuard, WriteGuard, kept_in_place, together
from purecompose._support.device import (
    AUTOCAST,
    arithmetic,
    check_alike,
    is_shard,
    local,
    may_be_shards,
    names_by_memory,
    whole,
)
from purecompose._support.internals import GradMode, is_fake, is_in_backward, is_transforming, is_watched, unwrapped
from purecompose._support.messages import warn
from purecompose.combinations import unsupported
from purecompose.nn.differentiable import OwnDerivatives, is_in_gradient
from purecompose.nn.kernels import kernels
from purecompose.nn.keyed import modules
from purecompose.nn.keyed.draws import is_first_run
from purecompose.nn.model import Model
from purecompose.nn.skeleton import Skeleton


class GatheredOnUse(TorchFunctionMode):
    """Mode in which functions of torch that are given divided tensors compute on all of their rows.

    So parameters are whole only while they are used, one layer at a time. All processes must call the same functions in
    the same order.

    `gather` returns all rows of the divided tensors that a function of torch reads, after `check` is given these. With
    `only_recorded` what a method computes between two passes acts on divided tensors, as autograd does not record it.
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
    """Return a scope for a forward pass outside of a step's gradient that gathers divided parameters on use."""
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


_CPU = torch.device("cpu")


def call_model(
    model: Model,
    params: Mapping[str, Tensor],
    buffers: dict[str, Tensor],
    inputs: Any,
    *,
    train: bool,
    keyed: Callable[[], modules.Keyed],
    precision: str = "fp32",
) -> tuple[Any, dict[str, Tensor]]:
    """Run the network; no argument is modified.

    In the first run of a schedule, a pass is watched for random functions and for writes into parameters. Later, for a
    user's own modules, the generators and the parameters' versions are compared.

    Args:
        params, buffers: By name; others may be among them.
        inputs: One argument, a list of arguments, or a mapping of keyword arguments.
        keyed: Returns the scope of the network's draws; called only if it draws.

    Returns:
        The outputs, in float32 where autocast made them narrower, and the buffers after the pass.

    Raises:
        UnkeyedRandomError: The network uses a random function that no key can cover.
        RuntimeError: The network wrote into a parameter, which only the first pass through a model prevents.
    """
    skeleton, gathered = model.skeleton(train), gathered_on_use(params)
    device = _device(params)
    narrow = AUTOCAST.get(precision)
    if is_transforming():
        # torch's group_norm does not support other memory formats under vmap.
        params = {name: _contiguous(param) for name, param in params.items()}
        # Views belong to the transform, so that forward may differentiate with respect to them.
        inputs = batches.map_tensors(lambda tensor: _contiguous(tensor.view_as(tensor)), inputs)
    scope = kernels(params, inputs, narrow, device.type, skeleton=skeleton)
    autocast = NOTHING if narrow is None else torch.autocast(device.type, narrow, cache_enabled=False)

    def run() -> _Result:
        looking = is_first_run()
        if skeleton.draws is False and skeleton.is_fixed and not looking:
            return _run(skeleton, params, buffers, inputs)
        is_watched = looking or skeleton.draws is None
        forward = _Pass(skeleton, params, buffers, inputs, keyed, is_watched)
        return forward.first() if is_watched else forward.later()

    with together(arithmetic(precision, device), autocast, gathered, scope):
        outputs, new_buffers = run() if skeleton.is_fixed or is_in_gradient() else _outside(skeleton, run)
    if narrow is not None:
        # The loss, and algorithms that edit outputs, run outside of autocast: in bfloat16 a loss has three digits, and
        # in float16 a sum soon exceeds 65504.
        outputs = batches.map_tensors(lambda tensor: tensor.float() if tensor.dtype is narrow else tensor, outputs)
    return outputs, new_buffers


def warn_of_dropped(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Warn, in the first run of a step, that a pass wrote into buffers, for a caller that drops them."""
    if not is_first_run():
        return
    has_values = not is_transforming() and not any(map(is_fake, after.values()))
    written = [
        name
        for name, buffer in after.items()
        if buffer._version or (has_values and not tree.equal(before[name], buffer))
    ]
    if written:
        names = ", ".join(written[:3]) + (", ..." if len(written) > 3 else "")
        warn(
            f"state.forward(inputs, train=True) dropped what the network wrote into {names}. Keep it by "
            "outputs, state = state.call(inputs), or drop it on purpose by outputs, _ = state.call(inputs)"
        )


_Result = tuple[Any, dict[str, Tensor]]


def _outside(skeleton: Skeleton, run: Callable[[], _Result]) -> _Result:
    """Return the result of a pass outside of gradients, of a network that may take derivatives itself, as forces."""
    own, has_graph = skeleton.own_derivatives, torch.is_grad_enabled()
    if own is None and not has_graph:
        try:
            return run()
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
    own = own or OwnDerivatives()
    with GradMode(True):
        result = own.run(run, is_watched=True)
    if has_graph and not own.need_plain:
        return result
    skeleton.own_derivatives = own
    return result if has_graph else batches.map_tensors(lambda tensor: tensor.detach(), result)


def _run(
    skeleton: Skeleton,
    params: Mapping[str, Tensor],
    buffers: dict[str, Tensor],
    inputs: Any,
    context: AbstractContextManager[Any] = NOTHING,
    *,
    is_watched: bool = False,
) -> _Result:
    """Return the result of a pass within a context, on its own copies of the buffers."""
    # A forward pass writes into the buffers it is given (batch norm's running statistics).
    own = {name: buffer.clone() for name, buffer in buffers.items() if name in skeleton.buffer_names} if buffers else {}
    with skeleton.bound(params, own, is_watched=is_watched) as module, context:
        outputs = module(inputs) if type(inputs) is Tensor else _call(module, inputs)
        if is_watched and (rebound := skeleton.rebound(params)):
            raise _write_error(", ".join(map(repr, rebound)), "by replacing or deleting it")
        return outputs, {**buffers, **_without_aliases(skeleton.current_buffers(), own)} if own else buffers


class _Pass(NamedTuple):
    """One forward pass, which may have to be run again."""

    skeleton: Skeleton
    params: Mapping[str, Tensor]
    buffers: dict[str, Tensor]
    inputs: Any
    keyed: Callable[[], modules.Keyed]
    is_watched: bool

    def first(self) -> _Result:
        """Return the result of a watched pass, which is stopped before it draws without a key or writes into a
        parameter.
        """
        with WriteGuard(self.params, lambda name, by: _write_error(repr(name), f"by {by}, and was stopped")):
            if is_transforming():
                with modules.detect():
                    result, draws = self._drawn()
                self.skeleton.draws = draws > 0
                return result
            result = self._detected() if _is_hidden() else self._compared(self._detected)
            return self._settled(result)

    def later(self) -> _Result:
        """Return the result of a pass of a network that has been watched before."""
        if is_transforming():  # vmap itself raises an error for draws without a key
            return self._drawn()[0]
        if self.skeleton.draws:
            result, draws = self._drawn()
            if draws or self.skeleton.is_fixed:
                return result
            # With keys, some functions return other bits than without. The result must not depend on earlier passes,
            # so a pass that draws nothing is computed without keys.
        result = self._detected() if _is_hidden() else self._compared(self._plain)
        return self._settled(result)

    def _settled(self, result: _Result | None) -> _Result:
        """Return the result of a pass without draws; of one that was stopped at its first draw, that with keys."""
        if result is None:
            with modules.detect():  # some draws may have no keyed form
                result = self._drawn()[0]
            self.skeleton.draws = True  # not if that has raised
        else:
            self.skeleton.draws = False
        return result

    def _plain(self, context: AbstractContextManager[Any] = NOTHING) -> _Result:
        before = _versions(self.params)
        with self._guards():
            result = _run(self.skeleton, self.params, self.buffers, self.inputs, context, is_watched=self.is_watched)
        after = _versions(self.params)
        if before != after:
            names = [repr(name) for name, old, new in zip(self.params, before, after, strict=True) if old != new]
            raise _write_error(", ".join(names), "so the tensor of the caller's state has changed")
        return result

    def _guards(self) -> AbstractContextManager[Any]:
        """Return a scope that stops or detects assignments to `.data`; under transforms torch itself rejects them."""
        is_traced = bool(self.params) and is_fake(next(iter(self.params.values())))
        if is_transforming():
            return NOTHING
        assigned = DataGuard(self.params, _write_error) if is_traced else NOTHING
        return together(assigned, kept_in_place(self.params, _write_error) if self.is_watched else NOTHING)

    def _drawn(self) -> tuple[_Result, int]:
        scope = self.keyed()
        return self._plain(scope), scope.count

    def _detected(self) -> _Result | None:
        """Return the result of a plain pass, or None if it would have drawn."""
        with modules.detect() as detector:
            try:
                result = self._plain()
            except modules.UnkeyedRandomError:
                if not detector.found:
                    raise
                return None
        return None if detector.found else result

    def _compared(self, run: Callable[[], _Result | None]) -> _Result | None:
        """Return the result of `run`, or None if it advanced a global generator, which is then restored."""
        device = _device(self.params)
        cpu = torch.default_generator
        cuda = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
        before = cpu.get_state(), 0 if cuda is None else cuda.get_offset()
        result = run()
        if torch.equal(cpu.get_state(), before[0]) and (cuda is None or cuda.get_offset() == before[1]):
            return result
        cpu.set_state(before[0])
        if cuda is not None:
            cuda.set_offset(before[1])
        return None


def _write_error(names: str, how: str) -> RuntimeError:
    return RuntimeError(
        f"forward wrote into the parameter {names}, {how}. Parameters change only between forward passes: compute a "
        "new tensor from it, or register it as a buffer"
    )


def _versions(params: Mapping[str, Tensor]) -> list[int]:
    try:
        return [param._version for param in params.values()]
    except RuntimeError:  # tensors created in inference mode have no version
        return []


def _without_aliases(buffers: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the buffers; those that forward rebound are copied, since they may be views of the batch."""
    return {
        name: buffer if buffer is own[name] or not isinstance(buffer, Tensor) else buffer.clone()
        for name, buffer in buffers.items()
    }


def _is_hidden() -> bool:
    """Return whether generator states reveal nothing, because tensors are traced or a CUDA graph is being captured."""
    if is_watched():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.contiguous() if tensor.ndim == 4 else tensor


def _device(params: Mapping[str, Tensor]) -> torch.device:
    return next(iter(params.values())).device if params else _CPU


def _call(module: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        try:
            return module(**inputs)
        except TypeError as error:
            if "keyword argument" in str(error) or "positional argument" in str(error):
                error.add_note(f"{_KEYS}, got the keyword arguments {', '.join(map(str, inputs))}")
            raise
    if isinstance(inputs, list):
        return module(*inputs)
    return module(inputs)


_KEYS = (
    "State.create's input_field sets the arguments of the network: the name of a member, a list of names for "
    "several arguments, batch.WHOLE for all members as keyword arguments, batch.AS_ARGUMENT for forward(self, batch)"
)
