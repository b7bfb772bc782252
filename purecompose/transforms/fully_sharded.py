"""`fully_sharded`: a step of several processes, each of which holds some rows of every parameter, and its states."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn

from purecompose import tree
from purecompose._support.device import Place, building, divided, is_shard, whole as whole_tensor
from purecompose._support.specs import shown
from purecompose.combinations import unsupported
from purecompose.core.algorithm import Trait
from purecompose.core.compose import Step
from purecompose.core.operation import SINGLE, walk
from purecompose.core.ranks import Ranks
from purecompose.core.scopes import Microbatches
from purecompose.core.state import State
from purecompose.random.keys import as_rng, fold_in, key as key_of
from purecompose.transforms.data_parallel import shared_program
from purecompose.transforms.gathering import Placing


def fully_sharded(step: Step, mesh: Any, gather: Literal["step", "layer"] = "step") -> Step:
    """Return a step that several processes compute together, each holding some rows of every parameter.

    It computes what `data_parallel(step)` does, for a state made by `shard(state, mesh)`. For the part of a step that
    computes its gradient, parameters are gathered; gradients are summed and divided. Everything else, such as the
    update and averages of weights, is computed on each process's rows.

    With `gather="step"`, all parameters are gathered at once: during a gradient a process holds all of them, and all
    gradients. With `gather="layer"`, each function of the network gathers the parameters that it reads, in the forward
    pass and again in the backward pass, and a gradient is summed and divided once it is complete. Messages have half as
    many bytes again, for each microbatch, and all processes must call the same layers in the same order.

    Args:
        step: A step made by `compose`.
        mesh: The `torch.distributed.DeviceMesh` of `shard`. The batch is divided among all of its processes.
        gather: `"step"`, or `"layer"` for networks whose parameters and gradients do not fit in one process.

    Returns:
        A `Step`, as that of `data_parallel`; each process calls it with its sharded state and the same whole batch.

    Raises:
        TypeError, RuntimeError, ValueError: As `data_parallel`; a mesh of several dimensions does not contain all
            processes; or, with `gather="layer"`, an algorithm needs the gradients of parts of the batch
            (`gradient_noise_scale`, `per_example_clipping`). In a step: an algorithm takes the gradient of one
            process's part at parameters of its own (`sam(per_rank=True)`).

    Example::

        mesh = torch.distributed.init_device_mesh("cuda", (8,))
        step = fully_sharded(compose(loop_events, [alg.ema()]), mesh)
        state = shard(step.init(state), mesh)

    References:
        Samyam Rajbhandari et al.: ZeRO: Memory Optimizations Toward Training Trillion Parameter Models. SC 2020.
    """
    if not isinstance(step, Step):
        raise TypeError(f"fully_sharded: expected a step made by compose, got {shown(step)}")
    _check_mesh(mesh, "fully_sharded")
    if step.members != SINGLE:
        raise unsupported("a population", "several processes", f"fully_sharded({step!r})")
    if gather not in ("step", "layer"):
        raise ValueError(f"fully_sharded: gather={gather!r}: expected 'step' or 'layer'")
    if gather == "layer":
        check_needs_no_parts(step)
    last = mesh.ndim - 1
    owners, *copies = (Ranks.of(mesh.get_group(dim)) for dim in (last, *range(last)))
    everyone = owners if mesh.ndim == 1 else Ranks.of(dist.group.WORLD)
    if everyone.size != mesh.size():
        raise ValueError(
            f"fully_sharded: a mesh of several dimensions must contain all {everyone.size} processes, got {mesh}"
        )
    placing = Placing(owners, tuple(copies), is_by_layer=gather == "layer")
    return step.replace(program=shared_program(step.program, everyone, placing=placing))


def check_needs_no_parts(step: Step) -> None:
    """Raise a `ValueError` if a step needs gradients of parts of the batch, which no process has layer by layer."""
    for algorithm in step.algorithms:
        for trait in (Trait.MEASURES_MICROBATCHES, Trait.CLIPS_EXAMPLES):
            if trait in algorithm.traits:
                what = "methods that read gradients of parts of the batch"
                raise unsupported('fully_sharded(gather="layer")', what, algorithm.name)
    for node in step.program:
        if sum(isinstance(inner, Microbatches) for inner in walk([node])) > 1:
            raise unsupported('fully_sharded(gather="layer")', "a Microbatches within another")


def shard(state: State, mesh: Any) -> State:
    """Return the state with each process holding some rows of every parameter, and of what is kept for each of them.

    Divided are the parameters and, in the optimizer's state and in slots, mappings from parameters' names to tensors of
    their shapes. They become `torch.distributed.tensor.DTensor`s, divided in dimension 0 along the mesh's last
    dimension, and the same along the others. Everything else remains whole on each process. No message is sent.

    Args:
        state: A state that is the same on all processes, after `step.init`.
        mesh: A `torch.distributed.DeviceMesh`, of one dimension, or of several, of which the last one divides:
            `init_device_mesh("cuda", (num_nodes, 8))` divides within a node.

    Raises:
        TypeError: `state` is not a State, or `mesh` is not a mesh.
        ValueError: The state is divided already, or is that of a population.

    Example:
        >>> import tempfile
        >>> import torch.distributed as dist
        >>> from purecompose import losses, optim
        >>> where = f"file://{tempfile.mkdtemp()}/store"
        >>> dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        >>> state = State.create(torch.nn.Linear(2, 3), loss=losses.mse, optimizer=optim.sgd(0.1))
        >>> sharded = shard(state, dist.init_device_mesh("cpu", (1,)))
        >>> sharded.params["weight"].placements
        (Shard(dim=0),)
        >>> dist.destroy_process_group()
    """
    if not isinstance(state, State):
        raise TypeError(f"shard(state, mesh): expected a State, got {shown(state)}")
    _check_mesh(mesh, "shard")
    if any(map(is_shard, tree.leaves(state))):
        raise ValueError("shard: the state is divided already; pc.whole(state) puts it together")
    if state.key.ndim != 1:
        raise unsupported("a population", "several processes", "shard")
    shapes = {name: param.shape for name, param in state.params.items()}
    fields = {name: getattr(state, name) for name in ("params", "opt_state", "slots")}
    return state.replace(**_with_params_mapped(lambda tensor: _placed_on(tensor, mesh), fields, shapes))


def whole(state: State) -> State:
    """Return the state with all rows of its tensors on each process; all processes must call it.

    The result is the state that one process would have. A state that is not divided is returned as it is.

    Args:
        state: A state, divided or not.

    Raises:
        TypeError: `state` is not a State.

    Example::

        pc.save(whole(state), "checkpoint")
    """
    if not isinstance(state, State):
        raise TypeError(f"whole(state): expected a State, got {shown(state)}")
    if not any(map(is_shard, tree.leaves(state))):
        return state
    return tree.map(whole_tensor, state)


def _check_mesh(mesh: Any, where: str) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{where}: expected a DeviceMesh, as torch.distributed.init_device_mesh('cuda', (8,)) returns, got "
            f"{shown(mesh)}"
        )


def _placed_on(tensor: Tensor, mesh: Any) -> Tensor:
    """Return a tensor that every process has as one of which each holds its rows."""
    from torch.distributed.tensor import Replicate, Shard

    if tensor.ndim == 0:
        return tensor
    placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
    return divided(tensor, Place(mesh, placements, tensor.shape, tensor.stride()))


def _with_params_mapped(fn: Callable[[Tensor], Tensor], node: Any, shapes: Mapping[str, torch.Size]) -> Any:
    """Return a tree with the tensors replaced that are kept for parameters, under their names and in their shapes."""
    if not isinstance(node, Tensor) and isinstance(node, Mapping) and node and shapes.keys() >= node.keys():
        values = list(node.values())
        if all(isinstance(value, Tensor) for value in values):
            same = all(value.shape == shapes[name] for name, value in node.items())
            return {name: fn(value) for name, value in node.items()} if same else node
    if isinstance(node, Tensor) or node is None:
        return node
    children, metadata, _, unflatten = optree.tree_flatten_one_level(
        cast(Any, node), none_is_leaf=True, namespace=tree.NAMESPACE
    )
    if not children:
        return node
    return unflatten(metadata, tuple(_with_params_mapped(fn, child, shapes) for child in children))


def materialized(
    net: nn.Module, mesh: Any, *, key: int | Tensor = 0, init: Callable[[nn.Module], Any] | None = None
) -> nn.Module:
    """Return a network with initial values, made from one on the meta device, with parameters divided among processes.

    The network may be larger than the memory of a process, which holds the whole tensors of one module at a time. Each
    module is initialised by its `reset_parameters`, if it has that method, and then by `init`, both on the CPU. The
    draws do not depend on the number of processes.

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
    _check_mesh(mesh, "materialized")
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
    """Return which modules have to be initialised together, found by initialising them on the meta device."""
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
                "into it, or materialized an argument init=, a function of a module"
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
        nn.Parameter(_placed_on(on_device, mesh), value.requires_grad) if isinstance(value, nn.Parameter) else on_device
    )


def _inside_out(module: nn.Module) -> Iterator[nn.Module]:
    """Yield each module after those that it contains, as `nn.Module.apply` visits them."""
    found = dict.fromkeys(inner for child in module.children() for inner in _inside_out(child))
    yield from found
    if module not in found:
        yield module
