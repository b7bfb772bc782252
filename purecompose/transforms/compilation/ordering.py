"""Order of a graph: messages are sent, and new values written into donated buffers, as early as possible.

A traced step computes all gradients, then all new values, and then writes them. In this order all of them are in memory
together. Here each layer's parameters move as soon as the backward pass has left the layer; if gradients are sent to
other processes, a few messages later (`messages.py`).
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import purecompose.optim.fused  # noqa: F401  # defines purecompose::adam_
from purecompose.transforms.compilation.messages import in_sending_order, is_wait


_WRITES = (torch.ops.aten.copy_.default, torch.ops.purecompose.adam_.default)
"""Operations that write into donated buffers."""


def write_early(module: fx.GraphModule, operations: Collection[Any] = _WRITES) -> None:
    """Reorder a graph in place, so that messages and writes into placeholders come as soon as their values are known.

    Operations keep their order wherever one writes into memory that the other reads or writes.

    Args:
        module: A graph whose nodes carry fake tensors (`meta["val"]`).
        operations: The kinds of writes to move.
    """
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    needs = _dependencies(nodes)
    before: dict[fx.Node, int] = {}
    """The set of nodes that come before a node in every order, as the bits of an integer."""
    for index, node in enumerate(nodes):
        before[node] = 1 << index
        for needed in needs[node]:
            before[node] |= before[needed]
    writes = [
        node for node in nodes if node.target in operations and all(to.op == "placeholder" for to in _written(node))
    ]
    places = {node: index for index, node in enumerate(nodes)}
    goals = [*in_sending_order(before, writes, places), *nodes]
    (output,) = module.graph.find_nodes(op="output")
    done = 0
    for goal in goals:
        missing = before[goal] & ~done
        done |= missing
        while missing:
            output.prepend(nodes[(missing & -missing).bit_length() - 1])
            missing &= missing - 1
    module.recompile()


def _dependencies(nodes: Iterable[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Return the nodes that must come before each node: its arguments, and those that access memory before it."""
    needs: dict[fx.Node, set[fx.Node]] = {}
    last_write: dict[int, fx.Node] = {}
    reads: dict[int, list[fx.Node]] = {}
    """The nodes that have accessed a memory since it was last written."""
    for node in nodes:
        found = {needed for needed in node.all_input_nodes if needed in needs}
        written = {memory for argument in _written(node) for memory in memories(argument)}
        inputs = set(node.all_input_nodes)
        if is_wait(node):  # until then, a message may still read what it sends
            inputs |= {sent for message in node.all_input_nodes for sent in message.all_input_nodes}
        for memory in {memory for argument in inputs for memory in memories(argument)}:
            if memory in last_write:
                found.add(last_write[memory])
            if memory in written:
                found.update(reads.pop(memory, ()))
                last_write[memory] = node
            else:
                reads.setdefault(memory, []).append(node)
        needs[node] = found
    return needs


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments that an operation writes into."""
    if "batch_norm" in str(node.target):  # the schemas of several do not mention that they write running statistics
        yield from node.all_input_nodes
    schema = getattr(node.target, "_schema", None)
    for index, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, fx.Node))


def memories(node: fx.Node) -> Iterator[int]:
    """Yield the storages of a node's tensors."""
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, Tensor):
            yield value.untyped_storage()._cdata
