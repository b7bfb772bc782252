"""The order of a graph: messages to other processes, and writes into donated buffers."""

import itertools
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from purecompose._support import shards
from purecompose.core.ranks import Ranks


# Messages between processes in a graph: which there are, which are not read, and the order in which they are sent.
#
# A traced step sends its gradients after the last product of the backward pass, and waits for each message at once. In
# the order returned here a message is sent as soon as what it contains is known, so that it travels while the backward
# pass goes on.


def messages(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that send a message, in order."""
    return [node for node in graph.nodes if _is_message(node)]


def is_wait(node: fx.Node) -> bool:
    """Return whether a node waits for a message."""
    return shards.is_wait(node.target)


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

    Messages that reduce tensors come in the order in which they depend on each other, and otherwise as traced. All
    processes have the same order, even if their graphs differ in other operations, as those of unequal parts of a
    batch may. Writes into parameters, and waits for messages, come as soon as they can, but `_AHEAD` messages later
    than that which they need: otherwise each message would be waited for at once. A graph without writes, such as that
    of a slice, would wait for all of them at its end, and until then keep what they send in memory. Where parameters
    are gathered again, a reduction is waited for before the next gather: the same processes send one message after the
    other, and the pass waits for the gather at once, so that a later wait would save no time.

    Args:
        before: The nodes that must come before each node, as the bits of an integer, with its own.
        writes: Nodes that write into placeholders.
        places: The bit of each node.
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


# Order of a graph: messages are sent, and new values written into donated buffers, as early as possible.
#
# A traced step computes all gradients, then all new values, and then writes them. In this order all of them are in
# memory together. Here each layer's parameters move as soon as the backward pass has left the layer; if gradients are
# sent to other processes, a few messages later (`messages.py`).


UPDATES = (torch.ops.purecompose.adam_.default, torch.ops.purecompose.rows_at_.default)
"""Updates of an optimizer in place."""
_WRITES = (torch.ops.aten.copy_.default, *UPDATES)
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
