"""What a step computes, sends and keeps in memory, counted in its traced graph for `scaling.py`.

A step of 16 processes, in 2 hosts of 8, is traced as `pc.compile` traces it, on tensors that have shapes but no
numbers, with a process group that sends nothing. Nothing runs, so networks of any size can be counted.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from real_sizes import next_token_loss
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

import purecompose as pc
from purecompose import State, compose, loop_events, losses, optim
from purecompose._support.device import arithmetic
from purecompose.nn import models
from purecompose.transforms.compilation.capture import capture, fake_mode
from purecompose.transforms.compilation.updates import memories, messages, update_in_place, write_early
from purecompose.transforms.signature import FIELDS, Boundary, Signature


MODES = ("data_parallel", "step", "layer")
"""`pc.data_parallel`, and `pc.fully_sharded` with `gather="step"` and `gather="layer"`."""
MESH = (2, 8)
"""Copies and shards of the traced processes."""

_aten: Any = torch.ops.aten
_FORMULAS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}
"""Operations of the CPU that torch has formulas for under their names on a GPU."""


class Task(NamedTuple):
    """A network and how it is trained."""

    make_net: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]
    """Function from a number of examples to a batch."""
    loss: Callable[..., Tensor]
    optimizer: Any
    num_examples: tuple[int, int]
    """Numbers of examples of a process in two traces, from which the bytes of an example are known."""


def gpt(vocabulary: int = 50257, width: int = 2048, depth: int = 24, num_heads: int = 16, length: int = 2048) -> Task:
    """A GPT, by default of 1.3 billion parameters, with AdamW; an example is a sequence."""

    def make_batch(num: int) -> Any:
        return torch.zeros(num, length, dtype=torch.int64), torch.zeros(num, length, dtype=torch.int64)

    def make_net() -> nn.Module:
        return models.gpt(vocabulary, length, width=width, depth=depth, num_heads=num_heads)

    return Task(make_net, make_batch, next_token_loss, optim.adamw(1e-4), (4, 8))


def resnet50(size: int = 224, width: int = 64, num_classes: int = 1000) -> Task:
    """A ResNet-50 with SGD and momentum; an example is an image."""

    def make_batch(num: int) -> Any:
        return torch.zeros(num, 3, size, size), torch.zeros(num, dtype=torch.int64)

    return Task(
        lambda: models.resnet50(3, num_classes, width=width),
        make_batch,
        losses.cross_entropy,
        optim.sgd(0.1, momentum=0.9),
        (64, 128),
    )


class Message(NamedTuple):
    """A message in the order of the compiled step."""

    kind: str
    """"all_reduce", "all_gather" or "reduce_scatter"."""
    role: str
    """"shard" and "copies" are among the processes of one dimension of the mesh; "statistics", which the rest of the
    forward or backward pass waits for, and "all" are among all processes."""
    num_bytes: int
    """Bytes of the whole tensor."""
    at: float
    """When it is sent, as the share of the step's arithmetic that comes before."""
    until: float
    """When it is waited for."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """The counts of one process's step.

    Attributes:
        flops: Operations of the step for each example, forward, backward and, if there is one, recomputation.
        forward_flops: Those of the forward pass.
        param_bytes: Bytes of all parameters.
        rows: For each parameter the number of its rows and the bytes of one of them.
        divided_bytes: Bytes of parameters and of what the optimizer keeps for them, of all processes.
        other_bytes: Bytes of the rest of the state, such as buffers.
        batch_bytes: Bytes of an example.
        example_bytes: Bytes that forward and backward pass need in addition for each example of a process's part.
        step_bytes: Bytes that the passes need in addition for any number of examples, such as gathered parameters.
        update_bytes: Bytes that the update needs in addition.
        messages: The messages in the order in which they are sent.
    """

    flops: int
    forward_flops: int
    param_bytes: int
    rows: list[list[int]]
    divided_bytes: int
    other_bytes: int
    batch_bytes: int
    example_bytes: int
    step_bytes: int
    update_bytes: int
    messages: list[Message]


def counts(task: Task, mode: str, mesh_shape: tuple[int, ...] = MESH) -> Counts:
    """The counts of a mode, from two traces."""
    size = int(torch.Size(mesh_shape).numel())
    with fake_processes(size):
        mesh = init_device_mesh("cpu", mesh_shape)
        roles = [] if mode == "data_parallel" else [*["copies"] * (len(mesh_shape) - 1), "shard"]
        groups = {str(mesh.get_group(dim).group_name): role for dim, role in enumerate(roles)}
        few, many = (_traced(task, mode, mesh, num * size) for num in task.num_examples)
        with fake_mode():
            params = [*task.make_net().parameters()]
    by_field = {name: sum(_bytes(spec) for spec in few.signatures[name].specs) for name in FIELDS}
    param_bytes = sum(param.nbytes for param in params)
    rest = by_field["params"] + by_field["opt_state"]
    shards = 1 if mode == "data_parallel" else mesh_shape[-1]
    num, more = task.num_examples
    per_example = (many.peak - few.peak) // (more - num)
    return Counts(
        flops=few.flops // num,
        forward_flops=_forward_flops(few.graph) // num,
        param_bytes=param_bytes,
        rows=[[len(param), param[0].nbytes] for param in params if param.ndim],
        divided_bytes=rest * shards,
        other_bytes=by_field["buffers"] + by_field["slots"],
        batch_bytes=by_field["batch"] // (num * size),
        example_bytes=per_example,
        step_bytes=few.peak - num * per_example,
        update_bytes=few.update_peak,
        messages=_messages(few, groups, mesh_shape[-1]),
    )


@contextlib.contextmanager
def fake_processes(size: int) -> Iterator[None]:
    """Be the first of some processes, of which the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Traced(NamedTuple):
    graph: fx.Graph
    signatures: dict[str, Signature]
    flops: int
    peak: int
    update_peak: int


def _traced(task: Task, mode: str, mesh: Any, num_examples: int) -> _Traced:
    """The graph of a step in the order in which it is compiled, what it takes, and what it needs."""
    step = compose(loop_events)
    step = pc.data_parallel(step) if mode == "data_parallel" else pc.fully_sharded(step, mesh, gather=mode)  # pyright: ignore[reportArgumentType]
    with fake_mode():
        options: dict[str, Any] = {"duration": "99ba", "batches_per_epoch": 99, "precision": "bf16"}
        state = State.create(task.make_net(), loss=task.loss, optimizer=task.optimizer, **options)
        state = state if mode == "data_parallel" else pc.shard(state, mesh)
        prepared = step.prepare(state, task.make_batch(num_examples))
        start = prepared.start()
    signatures = {name: Signature.of(getattr(start, name))[0] for name in FIELDS}
    boundary = Boundary.start(start.static, signatures, is_donated=True)
    with arithmetic("bf16", state.device):
        module = capture(step.operation(prepared.bits), boundary, is_last=True).graph
    update_in_place(module)
    write_early(module)
    return _Traced(module.graph, signatures, sum(map(_flops, module.graph.nodes)), *_peaks(module.graph))


def _flops(node: fx.Node) -> int:
    packet = getattr(node.target, "_overloadpacket", None)
    formula = _FORMULAS.get(packet) or flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = pytree.tree_map_only(fx.Node, lambda one: one.meta["val"], (node.args, node.kwargs))
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _forward_flops(graph: fx.Graph) -> int:
    """The operations before the loss, which is a cross entropy."""
    nodes = itertools.takewhile(lambda node: node.target is not _aten._log_softmax.default, graph.nodes)
    return sum(map(_flops, nodes))


def _messages(traced: _Traced, groups: dict[str, str], num_shards: int) -> list[Message]:
    """The messages of a graph, with the places of their waits."""
    needed = _reaching_products(traced.graph)
    places, done = {}, 0
    for node in traced.graph.nodes:
        places[node] = done / traced.flops
        done += _flops(node)
    found = []
    for node in messages(traced.graph):
        kind = str(node.target).split(".")[1].removesuffix("_into_tensor").removesuffix("_tensor")
        role = groups.get(str(node.args[-1]), "statistics" if node in needed else "all")
        (own,) = node.all_input_nodes
        num_bytes = own.meta["val"].nbytes * (num_shards if kind == "all_gather" and role == "shard" else 1)
        # Nothing waits for a message whose result is not read before the end of the step.
        until = min((places[user] for user in node.users), default=1.0)
        found.append(Message(kind, role, num_bytes, round(places[node], 4), round(until, 4)))
    return found


def _reaching_products(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose results a product or a convolution depends on."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in found or _flops(user) for user in node.users):
            found.add(node)
    return found


def _peaks(graph: fx.Graph) -> tuple[int, int]:
    """The most bytes in memory at a time, beside what the step is given: in both passes, and after them."""
    sizes: dict[int, int] = {}
    last: dict[int, fx.Node] = {}
    given: set[int] = set()
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor):
                sizes[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        own = {*memories(node)}
        if node.op == "placeholder":
            given |= own
        for memory in own.union(*(memories(needed) for needed in node.all_input_nodes)):
            last[memory] = node
    ends: dict[fx.Node, int] = {}
    for memory, node in last.items():
        if memory not in given:
            ends[node] = ends.get(node, 0) + sizes[memory]
    now, peaks, seen = 0, [0, 0], set(given)
    *_, end = (place for place, node in enumerate(graph.nodes) if _flops(node))
    for place, node in enumerate(graph.nodes):
        new = {*memories(node)} - seen
        seen |= new
        now += sum(sizes[memory] for memory in new)
        peaks[place > end] = max(peaks[place > end], now)
        now -= ends.get(node, 0)
    return peaks[0], peaks[1]


def _bytes(spec: Any) -> int:
    return int(torch.Size(spec.shape).numel()) * spec.dtype.itemsize


def written(found: dict[str, dict[str, Counts]]) -> str:
    """Counts of networks and modes as JSON, a line for each mode."""
    lines = [
        f' "{network} {mode}": {json.dumps(dataclasses.asdict(one), separators=(",", ":"))}'
        for network, modes in found.items()
        for mode, one in modes.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(text: str) -> dict[str, dict[str, Counts]]:
    """The counts that `written` has written."""
    found: dict[str, dict[str, Counts]] = {}
    for title, fields in json.loads(text).items():
        network, mode = title.split()
        fields["messages"] = [Message(*message) for message in fields["messages"]]
        found.setdefault(network, {})[mode] = Counts(**fields)
    return found
