"""`materialized`: a network without values is given initial ones, of which each process keeps some rows."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from purecompose._support.checks import shown
from purecompose._support.device import building
from purecompose.random.keys import as_rng, fold_in, key as key_of
from purecompose.transforms.sharding.placing import check_mesh, placed_on


def materialized(
    net: nn.Module, mesh: Any, *, key: int | Tensor = 0, init: Callable[[nn.Module], Any] | None = None
) -> nn.Module:
    """Return a network with initial values, made from one on the meta device, with parameters divided among processes.

    The network may be larger than the memory of a process, which holds the whole tensors of one module at a time. Each
    module is initialised by its `reset_parameters`, if it has that method, and then by `init`, both on the CPU. The
    draws depend on the key and on the module's place among the modules, and so not on the number of processes.

    Args:
        net: A network whose tensors are on the meta device: `with torch.device("meta"): net = Net()`. Buffers that have
            values keep them. It is not changed.
        mesh: The `torch.distributed.DeviceMesh`; see `shard`.
        key: The seed of the initial values, or a key (int64 of shape (2,)).
        init: A function that initialises the tensors of one module in place, as for `torch.nn.Module.apply`. Like
            `reset_parameters`, it is called once with tensors on the meta device, and once with values.

    Returns:
        The network for `State.create`, whose state needs no `shard`. It computes only within `fully_sharded` steps.

    Raises:
        TypeError: `net` is not a module, or `mesh` is not a mesh.
        ValueError: Nothing sets the values of a parameter or buffer, or a parameter has values already.

    Example:
        >>> import tempfile
        >>> import torch.distributed as dist
        >>> where = f"file://{tempfile.mkdtemp()}/store"
        >>> dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        >>> with torch.device("meta"):
        ...     net = nn.Linear(2, 3)
        >>> materialized(net, dist.init_device_mesh("cpu", (1,))).weight.placements
        (Shard(dim=0),)
        >>> dist.destroy_process_group()
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"materialized(net, mesh): expected an nn.Module, got {shown(net)}")
    check_mesh(mesh, "materialized")
    for name, param in net.named_parameters():
        if not param.is_meta:
            raise ValueError(
                f"materialized: {name} has values already: create the network within torch.device('meta'), or give "
                "State.create the network as it is, and divide its state by pc.shard(state, mesh)"
            )
    root = as_rng(key, "materialized").key if isinstance(key, Tensor) else key_of(key)
    net = copy.deepcopy(net)
    modules = [*_inside_out(net)]
    for group in _groups(net, modules, init):
        values = {number: _empty(tensor) for number, tensor in group.tensors.items()}
        _exchange(net, values)
        for index in group.modules:
            with building(int(fold_in(root, index)[0]) % 2**64), torch.no_grad():
                _initialise(modules[index], init)
        _exchange(net, {id(value): _kept(value, mesh) for value in values.values()})
    return net


class _Group(NamedTuple):
    """Modules that write into common tensors when they are initialised, in order, and all tensors that they write."""

    modules: list[int]
    tensors: dict[int, Tensor]


def _groups(net: nn.Module, modules: Sequence[nn.Module], init: Callable[[nn.Module], Any] | None) -> list[_Group]:
    """Return which modules have to be initialised together, found by initialising them on the meta device.

    Raises:
        ValueError: Nothing writes into a tensor.
    """
    groups: list[_Group] = []
    for index, module in enumerate(modules):
        group = _Group([index], _written(module, init))
        for other in [other for other in groups if not group.tensors.keys().isdisjoint(other.tensors)]:
            groups.remove(other)
            group = _Group([*other.modules, *group.modules], {**other.tensors, **group.tensors})
        if group.tensors:
            groups.append(group)
    known = {number for group in groups for number in group.tensors}
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if tensor.is_meta and id(tensor) not in known and tensor.numel():
            owner = type(net.get_submodule(name.rpartition(".")[0])).__name__
            raise ValueError(
                f"materialized: nothing sets the values of {name}: {owner} needs a method reset_parameters that writes "
                "into it, or materialized an argument init=, a function of a module; or create a buffer with "
                "device='cpu'"
            )
    return groups


def _written(module: nn.Module, init: Callable[[nn.Module], Any] | None) -> dict[int, Tensor]:
    """Return the tensors on meta into which the initialisation of a module writes."""
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_meta]
    versions = [tensor._version for tensor in tensors]
    with building(0), torch.no_grad():
        _initialise(module, init)
    return {id(x): x for x, version in zip(tensors, versions, strict=True) if x._version != version}


def _initialise(module: nn.Module, init: Callable[[nn.Module], Any] | None) -> None:
    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if reset is not None:
        reset()
    if init is not None:
        init(module)


def _exchange(net: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Put other tensors in the places of some, given by their `id`."""
    for module in net.modules():
        containers: Any = (module._parameters, module._buffers)
        for container in containers:
            container.update({name: new[id(old)] for name, old in container.items() if id(old) in new})


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="cpu")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _kept(value: Tensor, mesh: Any) -> Tensor:
    """Return the part of a tensor that this process keeps."""
    on_device = value.detach().to(mesh.device_type)
    return (
        nn.Parameter(placed_on(on_device, mesh), value.requires_grad) if isinstance(value, nn.Parameter) else on_device
    )


def _inside_out(module: nn.Module) -> Iterator[nn.Module]:
    """Yield each module after those that it contains, as `nn.Module.apply` visits them."""
    found = dict.fromkeys(inner for child in module.children() for inner in _inside_out(child))
    yield from found
    if module not in found:
        yield module
