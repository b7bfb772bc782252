"""The order of a graph: messages to other processes, writes into donated buffers, and updates of an optimizer.

Fused updates write into donated buffers, instead of returning values to be copied there. Those of a large table whose
gradient is that of an embedding are given the looked-up rows and their places, and the dense gradient is left out.
"""

import itertools
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from purecompose._support import device
from purecompose.core.ranks import Ranks


def messages(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that send a message, in order."""
    return [node for node in graph.nodes if _is_message(node)]


def is_wait(node: fx.Node) -> bool:
    return device.is_wait(node.target)


def drop_unread(graph: fx.Graph) -> None:
    """Remove messages that are not read, such as gradients that a method replaces, and all that only they need."""
    for node in reversed(graph.nodes):
        if (_is_message(node) or is_wait(node)) and not node.users:
            graph.erase_node(node)
        elif not node.users and not node.is_impure():
            graph.erase_node(node)


def in_sending_order(
    before: Mapping[fx.Node, int], writes: Sequence[fx.Node], places: Mapping[fx.Node, int]
) -> list[fx.Node]:
    """Return messages and writes in an order in which they should be reached as early as possible.

    A traced step sends its gradients after the last product of the backward pass, and waits for each message at once;
    here a message is sent as soon as what it contains is known.
    Messages that reduce tensors come in the order in which they depend on each other, and otherwise as traced, so that
    all processes have the same order. Writes into parameters, and waits for messages, come as soon as they can, but
    `_AHEAD` messages later than that which they need, which would be waited for at once otherwise. A graph without
    writes, such as that of a slice, would keep all messages in memory until its end. Where parameters are gathered
    again, a reduction is waited for before the next gather, which the same processes send after it and wait for at
    once.

    Args:
        before: The nodes that must come before each node, as the bits of an integer, with its own.
    """
    everywhere = sum(1 << places[node] for node in before if _is_message(node))
    sends = [node for node in before if _is_message(node) and _is_reduction(node)]
    sends.sort(key=lambda node: ((before[node] & everywhere).bit_count(), places[node]))
    needed = 0
    for node in before:
        if _is_message(node):
            needed |= before[node] & ~(1 << places[node])
    # Messages that others need, such as those of batch normalisation, are waited for at once anyway.
    last = [node for node in sends if not needed >> places[node] & 1]
    gathers: dict[Any, int] = {}
    """The messages that gather, by the group of processes."""
    for node in before:
        if _is_message(node) and not _is_reduction(node):
            gathers[node.args[-1]] = gathers.get(node.args[-1], 0) | 1 << places[node]
    reached: list[int] = []
    """The nodes that have run when each of the last messages is sent."""
    done = 0
    for node in sends:
        done |= before[node]
        if node in last:
            reached.append(done)

    def due(later: fx.Node) -> int:
        own = [turn for turn, node in enumerate(last) if before[later] >> places[node] & 1]
        if not own:
            return -1
        start, end = own[-1], min(own[-1] + _AHEAD, len(last) - 1)
        same = gathers.get(last[start].args[-1], 0)
        return next((turn for turn in range(start, end) if reached[turn + 1] & ~reached[start] & same), end)

    waits = [node for node in before if is_wait(node) and node.args[0] in last]
    late: dict[int, list[fx.Node]] = {}
    for node in sorted([*writes, *waits], key=lambda node: before[node].bit_count()):
        late.setdefault(due(node), []).append(node)
    goals = late.get(-1, [])
    for node in sends:
        goals.append(node)
        if node in last:
            goals += late.get(last.index(node), [])
    return goals


_AHEAD = 2
"""Number of messages that are sent before a message is waited for. With 2 there is always one on its way while the next
gradients are computed, and at most three buckets are in memory."""


def described(graph: fx.Graph) -> list[str]:
    """Return each message in words, in order: what all processes must have in common."""
    groups: dict[Any, int] = {}
    found = []
    for node in messages(graph):
        *settings, group = node.args[1:]
        tensors = ", ".join(_form(tensor) for tensor in pytree.tree_leaves(node.args[0]))
        words = [str(node.target).split(".")[1], *map(str, settings), f"group {groups.setdefault(group, len(groups))}"]
        found.append(f"{words[0]} of {tensors} ({', '.join(words[1:])})")
    return found


class GraphForm(NamedTuple):
    """What a graph has in common with those of other processes."""

    title: str
    """The part of the step, in words."""
    messages: tuple[str, ...]
    """Its messages in order; the same on all processes."""


def check_alike(ranks: Ranks, forms: Sequence[GraphForm], device: torch.device) -> None:
    """Raise a `RuntimeError` on all processes if their graphs send other messages, for which they would wait."""
    sent = [message for form in forms for message in form.messages]
    own = torch.tensor([zlib.crc32(repr(sent).encode())], device=device)
    if len(set(ranks.gather(own).tolist())) > 1:
        texts = _gathered_texts(ranks, forms, device)
        raise RuntimeError(
            f"compile: the processes have different graphs, and would wait for each other: {_first_difference(texts)}. "
            "All must run the same code with the same settings; which operations a network consists of must not depend "
            "on the process"
        )


def _gathered_texts(ranks: Ranks, forms: Sequence[GraphForm], device: torch.device) -> list[list[str]]:
    """Return the messages of all processes in words, each with the part of the step that it is in."""
    text = "\n".join(f"{message}, in {form.title}" for form in forms for message in form.messages).encode()
    (size,) = ranks.reduced([torch.tensor([len(text)], device=device)], "max")
    rows = ranks.gather(torch.tensor([[*text.ljust(int(size))]], dtype=torch.uint8, device=device))
    return [bytes(row).decode().rstrip().split("\n") for row in rows.tolist()]


def _first_difference(texts: Sequence[Sequence[str]]) -> str:
    """Return the first message that differs between processes, in words."""
    rows = enumerate(itertools.zip_longest(*texts, fillvalue=""))
    place, ours = next((place, ours) for place, ours in rows if len({one.partition(", in ")[0] for one in ours}) > 1)
    ways = {way: [str(rank) for rank, one in enumerate(ours) if one == way] for way in ours}
    sides = [f"{way or 'none'} on rank {', '.join(members)}" for way, members in ways.items()]
    return f"message {place} is {'; but '.join(sides)}"


def _form(node: Any) -> str:
    values = [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return " ".join(f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" for value in values)


def _is_message(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "_c10d_functional" and not is_wait(node)


def _is_reduction(node: fx.Node) -> bool:
    return "reduce" in str(node.target)


UPDATES = (torch.ops.purecompose.adam_.default, torch.ops.purecompose.rows_at_.default)
"""Updates of an optimizer in place."""
_WRITES = (torch.ops.aten.copy_.default, *UPDATES)
"""Operations that write into donated buffers."""


def write_early(module: fx.GraphModule, operations: Collection[Any] = _WRITES) -> None:
    """Reorder a graph in place, so that messages and writes into placeholders come as soon as their values are known.

    As traced, all gradients and all new values would be in memory together. Here each layer's parameters move as soon
    as the backward pass has left the layer; if gradients are sent to other processes, a few messages later. Operations
    keep their order wherever one writes into memory that the other reads or writes.
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
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, Tensor):
            yield value.untyped_storage()._cdata


_aten, _ops = torch.ops.aten, torch.ops.purecompose


def update_in_place(module: fx.GraphModule) -> None:
    """Replace `purecompose::adam` by `adam_` and `rows_at` by `rows_at_`, where a graph copies results into the old.

    That is the case in a step that donates, unless the old values are read afterwards, or are gradients as well.
    """
    _drop_idle_views(module.graph)
    places = {node: place for place, node in enumerate(module.graph.nodes)}
    copies: dict[Any, Any] = {}
    """The copy of a value into a placeholder, if any."""
    last_read: dict[int, int] = {}
    """The place of the last node that reads a storage."""
    node: Any
    for node, place in places.items():
        reads = node.all_input_nodes
        if node.target is _aten.copy_.default and node.args[0].op == "placeholder":
            reads = [node.args[1]]
            copies[node.args[1]] = node
        for read in reads:
            last_read.update(dict.fromkeys(memories(read), place))
    for node in [node for node in places if node.target in _UPDATES]:
        in_place, parts = _UPDATES[node.target]
        old, grads, is_possible = parts(node)
        new = {result.args[1]: result for result in node.users}
        copied: list[Any] = [copies.get(new.get(i)) for i in range(len(old))]
        written = {storage for tensor in old for storage in memories(tensor)}
        if (
            is_possible
            and len(set(old)) == len(old)
            and all(copy is not None and copy.args[0] is tensor for copy, tensor in zip(copied, old, strict=True))
            and all(last_read[storage] <= places[node] for storage in written)
            and written.isdisjoint(storage for grad in grads for storage in memories(grad))
        ):
            with module.graph.inserting_before(node):
                module.graph.call_function(in_place, node.args, node.kwargs)
            for i, (copy, tensor) in enumerate(zip(copied, old, strict=True)):
                module.graph.erase_node(copy)
                new[i].replace_all_uses_with(tensor)
                module.graph.erase_node(new[i])
            module.graph.erase_node(node)
    module.recompile()


def _parts_of_adam(node: Any) -> tuple[list[fx.Node], list[fx.Node], bool]:
    """Return what an update moves, its gradients, and whether it may be in place."""
    params, grads, steps, memory = (list(tensors) for tensors in node.args[:4])
    is_alike = _strides(params) * (len(memory) // len(params)) == _strides(memory)  # as the kernel requires
    return [*params, *steps, *memory], grads, is_alike


def _parts_of_rows(node: Any) -> tuple[list[fx.Node], list[fx.Node], bool]:
    return list(node.args[0]), [*node.args[1], *node.args[2]], True


_UPDATES: dict[Any, Any] = {
    _ops.adam.default: (_ops.adam_.default, _parts_of_adam),
    _ops.rows_at.default: (_ops.rows_at_.default, _parts_of_rows),
}
"""Updates that return new tensors, each with its form in place and a function that returns its parts."""


def _drop_idle_views(graph: fx.Graph) -> None:
    """Remove views that change nothing, such as those between a divided tensor and the rows of a process."""
    for node in graph.find_nodes(op="call_function", target=_aten.view.default):
        layout = _layout(node)
        if all(type(size) is int for size in layout[1:]) and layout == _layout(node.args[0]):  # no size is left open
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _layout(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.dtype, value.storage_offset(), *value.shape, *value.stride()


def _strides(nodes: list[fx.Node]) -> list[tuple[int, ...]]:
    return [node.meta["val"].stride() for node in nodes]


def look_up_rows(module: fx.GraphModule) -> None:
    """Replace `purecompose::rows` by `purecompose::rows_at` where its gradient is one of embeddings alone."""
    node: Any
    for node in module.graph.find_nodes(op="call_function", target=_ops.rows.default):
        tensors, grad, *scalars = node.args
        sources = _looked_up(grad)
        if sources is None:
            continue
        with module.graph.inserting_before(node):
            insert = _Inserting(module.graph, grad.meta["val"].fake_mode)
            rows, places = zip(*(_rows_and_places(insert, source) for source in sources), strict=True)
            new = module.graph.call_function(_ops.rows_at.default, (tensors, [*places], [*rows], *scalars))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
        if not grad.users:
            drop_unread(module.graph)
    module.recompile()


def _looked_up(grad: Any) -> list[Any] | None:
    """Return the gradients of embeddings that a node adds, or is itself; `None` if it is something else."""
    if grad.target is _aten.add.Tensor and not grad.kwargs and all(isinstance(arg, fx.Node) for arg in grad.args):
        parts = [_looked_up(arg) for arg in grad.args]
        return None if None in parts else [one for part in parts for one in part or ()]
    if grad.target is _aten.embedding_dense_backward.default:
        return None if grad.args[4] else [grad]  # divided by the number of times that an index occurs
    if grad.target is not _aten._embedding_bag_backward.default:
        return None
    by_frequency, mode, _, weights = grad.args[7:11]
    is_fixed = type(grad.args[1].meta["val"].numel()) is int
    return [grad] if is_fixed and not by_frequency and mode in (_SUM, _MEAN) and weights is None else None


_SUM, _MEAN = 0, 1
"""torch's numbers of the modes of bags."""


class _Inserting(NamedTuple):
    """Inserts operations into a graph, with fake tensors as values."""

    graph: fx.Graph
    mode: Any

    def __call__(self, operation: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(operation, args, kwargs)
        values = fx.map_arg(args, lambda arg: arg.meta["val"])
        with self.mode:
            node.meta["val"] = operation(*values, **kwargs)
        return node


def _rows_and_places(insert: _Inserting, source: Any) -> tuple[fx.Node, fx.Node]:
    """Return the rows that an embedding's gradient consists of, and their places in the table."""
    if source.target is _aten.embedding_dense_backward.default:
        rows, places, _, padding, _ = source.args
    else:
        rows, places, offsets, _, sizes, *_ = source.args
        mode, padding = source.args[8], source.args[11] if len(source.args) > 11 else -1
        if mode == _MEAN:
            counts = insert(_aten.clamp_min.default, insert(_aten.unsqueeze.default, sizes, 1), 1)
            rows = insert(_aten.div.Tensor, rows, counts)
        numbers = insert(_aten.arange.default, places.meta["val"].numel(), device=places.meta["val"].device)
        ends = insert(_aten.searchsorted.Tensor, offsets, numbers, right=True)
        rows = insert(_aten.index_select.default, rows, 0, insert(_aten.sub.Tensor, ends, 1))
    if padding >= 0:
        is_padding = insert(_aten.unsqueeze.default, insert(_aten.eq.Scalar, places, padding), -1)
        rows = insert(_aten.masked_fill.Scalar, rows, is_padding, 0)
    return rows, places
