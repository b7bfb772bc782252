"""`shard` and `whole`: states whose parameters are divided among processes, and back."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import optree
import torch
from torch import Tensor

from purecompose import tree
from purecompose._support import shards
from purecompose._support.checks import shown
from purecompose.combinations import unsupported
from purecompose.core.state import State


def shard(state: State, mesh: Any) -> State:
    """Return the state with each process holding some rows of every parameter, and of what is kept for each of them.

    Divided are the parameters and, in the optimizer's state and in slots, mappings from parameters' names to tensors of
    their shapes, such as moments and averages. They become `torch.distributed.tensor.DTensor`s, divided in dimension 0
    along the mesh's last dimension, and the same along the others. Everything else, and tensors without dimensions,
    remains whole on each process. No message is sent.

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
    check_mesh(mesh, "shard")
    if any(map(shards.is_shard, tree.leaves(state))):
        raise ValueError("shard: the state is divided already; pc.whole(state) puts it together")
    if state.key.ndim != 1:
        raise unsupported("a population", "several processes", "shard")
    shapes = {name: param.shape for name, param in state.params.items()}
    fields = {name: getattr(state, name) for name in ("params", "opt_state", "slots")}
    return state.replace(**_with_params_mapped(lambda tensor: placed_on(tensor, mesh), fields, shapes))


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
    if not any(map(shards.is_shard, tree.leaves(state))):
        return state
    return tree.map(shards.whole, state)


def check_mesh(mesh: Any, where: str) -> None:
    """Raise a `TypeError` unless this is a mesh of processes."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{where}: expected a DeviceMesh, as torch.distributed.init_device_mesh('cuda', (8,)) returns, got "
            f"{shown(mesh)}"
        )


def placed_on(tensor: Tensor, mesh: Any) -> Tensor:
    """Return a tensor that every process has as one of which each holds its rows."""
    from torch.distributed.tensor import Replicate, Shard

    if tensor.ndim == 0:
        return tensor
    placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
    return shards.divided(tensor, shards.Place(mesh, placements, tensor.shape, tensor.stride()))


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
