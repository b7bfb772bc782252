"""Graphs for GPUs: what Inductor fuses into one kernel, draws computed in the kernel that uses them, and CUDA graphs.

A draw is one operation, `purecompose::draw`. Dropout compares the bits with a threshold. The comparison is part of the
draw, so that a byte for each element is kept for the backward pass, not four. On a CPU, GCC 12 compiles this code to
other bits: there `rewriting.py` draws.

The step of a small network is a hundred short kernels, and launching them costs more than running them. Nothing in a
step reads a host clock or a generator, and donated buffers keep their addresses, so CUDA graphs record the launches.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.library import Library, register_fake

from purecompose._support.internals import OpOverload
from purecompose.random.philox import KEY_STEPS, MULTIPLIERS, PRECISION, ROUNDS, WORD
from purecompose.transforms.compilation.inductor import Inductor, replaced


def fusing_near(scheduler: Any) -> AbstractContextManager[None]:
    """Return a scope in which Inductor does not fuse what is far apart if that keeps more memory than it saves.

    The loss of the first of two passes, for example, is needed only for a difference at the end of the step. In one
    kernel with the loss of the second pass it would keep the logits of the first one until then.
    """

    def can_fuse(plain: Any, self: Any, one: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
        return plain(self, one, other, *args, **kwargs) and not _keeps_more(self, one, other)

    return replaced(scheduler.Scheduler, "can_fuse", can_fuse)


_FAR = 64
"""The distance, in operations, from which Inductor, too, takes nodes that do not depend on each other for far apart."""


def _keeps_more(scheduler: Any, one: Any, other: Any) -> bool:
    """Return whether the earlier of two nodes far apart, done with the later one, keeps more bytes than are saved."""
    early, late = sorted((one, other), key=lambda node: node.min_order)
    place = max((scheduler.name_to_node[name].min_order for name in late.ancestors), default=0)
    """The place from which on the later one can be done."""
    if place - early.max_order < _FAR:
        return False
    read = (scheduler.name_to_buf.get(name) for name in {dep.name for dep in early.read_writes.reads})
    ended = [
        buffer
        for buffer in read
        if buffer is not None and all(getattr(user.node, "min_order", place) < place for user in buffer.users)
    ]
    try:
        kept = sum(map(_bytes, ended)) - sum(map(_bytes, early.get_outputs()))
    except TypeError:  # a size is left open
        return False
    return kept > scheduler.score_fusion_memory(one, other)


def _bytes(buffer: Any) -> int:
    if not buffer.node.has_tensor_output():
        return 0
    return math.prod(map(int, buffer.node.get_size())) * buffer.node.get_dtype().itemsize


def fusing_within_lists(scheduler: Any) -> AbstractContextManager[None]:
    """Return a scope in which Inductor fuses into an operation on a list only what one tensor of it depends on.

    It fuses what several tensors of a list depend on into the part of the kernel for the first one (torch 2.14), and
    the blocks of another part may read it before it is written.
    """

    def can_fuse(plain: Any, cls: Any, producer: Any, consumer: Any) -> bool:
        pairs = [(producer, None)]
        if producer.is_foreach():
            pairs = list(zip(producer.snodes, consumer.snodes, strict=False)) if consumer.is_foreach() else []
        for first, own in pairs:
            names = {buffer.get_name() for buffer in first.get_outputs()}
            readers = [one for one in consumer.snodes if any(dep.name in names for dep in one.read_writes.reads)]
            if len(readers) > 1 or (own is not None and any(reader is not own for reader in readers)):
                return False
        return plain(cls, producer, consumer)

    return replaced(scheduler.ForeachKernelSchedulerNode, "can_fuse", can_fuse)


# Rematerialization: a GPU computes cheap values again where it would otherwise store and read them.
#
# A GPU's time is mostly that of moving bytes. Inductor computes a value that several kernels use in each of them,
# unless it is made from more than four tensors: then it is stored. That counts the mean of a channel like a tensor of
# all images. Here bytes are counted instead. Besides, the backward pass of a ReLU after a normalisation finds the
# signs from the input of the normalisation, which it reads anyway, and not from the result of the ReLU.
#
# For a ResNet-18 in bfloat16 this moves 0.94 of the bytes (`benchmarks/gpu_code`). On a CPU nothing is changed: its
# code takes as long either way.


_aten = torch.ops.aten
_ALIAS = _aten.alias.default
_CONVERT = torch.ops.prims.convert_element_type.default
_LONGEST = 32
"""Number of operations up to which a chain is computed again."""


def recompute_signs(graph: fx.GraphModule) -> int:
    """Let comparisons of a ReLU with 0 read the argument of the ReLU, computed again from one tensor; return their
    number.

    The numbers of the graph stay the same: `relu(x) <= 0` where `x <= 0`, also for NaN. A fused kernel does not round
    the argument to half precision, so that the sign of a number next to 0 may be another. It is done where the tensor
    from which the argument is computed, by elementwise operations with small tensors, is in memory at that time anyway.
    """
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    num = 0
    for sign in graph.graph.find_nodes(op="call_function", target=_aten.le.Scalar):
        found: Any = sign.args[0]
        while found.target is _ALIAS:
            found = found.args[0]
        if sign.args[1] != 0 or found.target is not _aten.relu.default:
            continue
        argument = found.args[0]
        chain, sources = _chain(argument)
        large = [one for one in sources if _is_large(one, argument)]
        if len(chain) <= _LONGEST and len(large) == 1 and _is_used_after(large[0], order[sign], order):
            with graph.graph.inserting_before(sign):
                copies = _copied(graph.graph, sorted(chain, key=order.__getitem__))
            sign.args = (copies.get(argument, argument), 0)
            num += 1
    graph.recompile()
    return num


def _is_used_after(node: fx.Node, place: int, order: dict[fx.Node, int]) -> bool:
    if node.op == "placeholder":  # in memory during all of the step
        return True
    return any(
        _is_used_after(user, place, order) if user.target is _ALIAS else order.get(user, -1) > place
        for user in node.users
    )


def _copied(graph: fx.Graph, nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda one: copies.get(one, one))
    return copies


def _chain(end: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the large elementwise operations from which a node is computed, with itself, and what these are given."""
    chain, sources, left = set[fx.Node](), set[fx.Node](), [end]
    while left and len(chain) <= _LONGEST:
        node = left.pop()
        if node in chain:
            continue
        target: Any = node.target
        is_elementwise = node.op == "call_function" and isinstance(target, OpOverload)
        is_elementwise = is_elementwise and (target is _CONVERT or target.is_view or torch.Tag.pointwise in target.tags)
        if is_elementwise and _is_large(node, end):
            chain.add(node)
            left += node.all_input_nodes
        else:
            sources.add(node)
    return chain, sources


def _is_large(node: fx.Node, other: fx.Node) -> bool:
    """Return whether reading a node takes long, compared with another one."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and 16 * value.numel() > other.meta["val"].numel()


def storing_by_bytes(ir: Any, graphs: Any) -> AbstractContextManager[None]:
    """Return a scope in which Inductor stores a value that several operations use if that moves fewer bytes."""

    def is_stored(plain: Any, self: Any, users: int, **options: Any) -> bool:
        is_asked = plain(self, users, **options)
        data = self.data
        if users < 2 or not isinstance(data, ir.Pointwise) or ir.is_cpu(data) or self.has_large_inner_fn():
            return is_asked
        try:
            size = math.prod(map(int, data.get_size()))
            buffers = [graphs.graph.try_get_buffer(name) for name in data.inner_fn_opcount().read_buffers]
            read = sum(
                min(size, math.prod(map(int, buffer.get_size()))) * buffer.get_dtype().itemsize for buffer in buffers
            )
        except (AttributeError, TypeError):  # sizes that are left open, or another form of this torch
            return is_asked
        written = size * data.get_dtype().itemsize
        return options.get("graph_reuse", True) and users * read > read + written + users * written

    return replaced(ir.StorageBox, "should_realize_on_reuse", is_stored)


_WORD = torch.uint64
_philox, _below = torch.ops.purecompose.philox.default, torch.ops.aten.lt.Scalar


def draw_in_kernels(module: fx.GraphModule, inductor: Inductor) -> None:
    """Replace draws by `purecompose::draw`."""
    for node in module.graph.find_nodes(op="call_function", target=_philox):
        key, shape, dtype = node.args
        if node.meta["val"].device.type == "cpu":
            continue
        _register(inductor)
        compared = [user for user in node.users if user.target is _below]
        thresholds = {user.args[1] for user in compared}
        is_compared = dtype == torch.int32 and len(compared) == len(node.users) and len(thresholds) == 1
        last = compared[0] if is_compared else node
        with module.graph.inserting_before(node):
            drawn = module.graph.call_function(_draw, (key, shape, dtype, thresholds.pop() if is_compared else None))
        drawn.meta["val"] = last.meta["val"]
        for old in (*compared, node) if is_compared else (node,):
            old.replace_all_uses_with(drawn)
            module.graph.erase_node(old)
    module.recompile()


def _fake(key: Tensor, shape: Sequence[int], dtype: torch.dtype, below: int | None) -> Tensor:
    return torch.empty(shape, dtype=dtype if below is None else torch.bool, device=key.device)


_library = Library("purecompose", "FRAGMENT")
_library.define("draw(Tensor key, SymInt[] shape, ScalarType dtype, int? below) -> Tensor")
register_fake("purecompose::draw", _fake, lib=_library)
_draw = torch.ops.purecompose.draw.default


def _register(inductor: Inductor) -> None:
    """Tell Inductor how to compile `purecompose::draw`: each element computes its block of the key's stream."""
    if _draw in inductor.lowering.lowerings:
        return
    indexing, ops = inductor.functions, inductor.virtualized.ops

    def lower(key: Any, shape: Sequence[Any], dtype: torch.dtype, below: int | None) -> Any:
        load, lead = key.make_loader(), len(key.get_size()) - 1
        words_each = 2 if dtype in (torch.int64, torch.float64) else 1
        per_block = 4 // words_each

        def element(index: Sequence[Any]) -> Any:
            place = 0
            for i, size in zip(index[lead:], shape[lead:], strict=True):
                place = place * size + i
            block = ops.index_expr(indexing.FloorDiv(place, per_block), torch.int64)
            start, seed = load([*index[:lead], 1]), load([*index[:lead], 0])
            lanes = _lanes(ops, *(ops.to_dtype(number, _WORD) for number in (seed, ops.add(start, block))))
            which = ops.index_expr(indexing.ModularIndexing(place, 1, per_block), torch.int64)
            return _number(ops, _chosen(ops, lanes, which, words_each), dtype, below)

        pointwise = inductor.ir.Pointwise.create(
            device=key.get_device(), dtype=dtype if below is None else torch.bool, inner_fn=element, ranges=list(shape)
        )
        pointwise.realize()  # otherwise each use would draw again
        return pointwise

    inductor.lowering.register_lowering(_draw, type_promotion_kind=None)(lower)


def _lanes(ops: Any, seed: Any, position: Any) -> list[Any]:
    """Return the four words of `random.philox`, in Inductor's operations; all are uint64, whose products may wrap."""

    def split(value: Any) -> list[Any]:
        return [
            ops.bitwise_right_shift(value, ops.constant(32, _WORD)),
            ops.bitwise_and(value, ops.constant(WORD, _WORD)),
        ]

    (c1, c0), c2, c3 = split(position), *(ops.constant(0, _WORD) for _ in range(2))
    k1, k0 = split(seed)
    for round in range(ROUNDS):
        if round:
            k0, k1 = (
                split(ops.add(key, ops.constant(step, _WORD)))[1] for key, step in zip((k0, k1), KEY_STEPS, strict=True)
            )
        (high0, low0), (high1, low1) = (
            split(ops.mul(lane, ops.constant(multiplier, _WORD)))
            for lane, multiplier in zip((c0, c2), MULTIPLIERS, strict=True)
        )
        c0, c1 = ops.bitwise_xor(ops.bitwise_xor(high1, c1), k0), low1
        c2, c3 = ops.bitwise_xor(ops.bitwise_xor(high0, c3), k1), low0
    return [c0, c1, c2, c3]


def _chosen(ops: Any, lanes: Sequence[Any], which: Any, words_each: int) -> Any:
    """Return the word, or the two words as one number, that is at a place of a block, as int64."""

    def number(i: int) -> Any:
        return ops.constant(i, torch.int64)

    lanes = [ops.to_dtype(lane, torch.int64) for lane in lanes]
    if words_each == 2:
        is_first = ops.eq(which, number(0))
        w0, w1 = (ops.where(is_first, lanes[i], lanes[i + 2]) for i in range(2))
        return ops.bitwise_or(ops.bitwise_left_shift(w0, number(32)), w1)
    early, late = (ops.where(ops.eq(which, number(i)), lanes[i], lanes[i + 1]) for i in (0, 2))
    return ops.where(ops.lt(which, number(2)), early, late)


def _number(ops: Any, bits: Any, dtype: torch.dtype, below: int | None) -> Any:
    if dtype in PRECISION:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        precision = PRECISION[dtype]
        whole = ops.to_dtype(ops.bitwise_and(bits, ops.constant((1 << precision) - 1, torch.int64)), wide)
        return ops.to_dtype(ops.mul(whole, ops.constant(2.0**-precision, wide)), dtype)
    number = ops.to_dtype(bits, dtype)
    return number if below is None else ops.lt(number, ops.constant(below, dtype))


Compiled: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]
"""A compiled graph. It may empty the list passed to it."""


def check_on_device(graph: fx.GraphModule, device: torch.device) -> None:
    """Raise a `ValueError` if a graph computes with tensors on the host, whose numbers a recording would repeat."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.device != device:
            what = "an argument" if node.op == "placeholder" else f"the result of {node.target}"
            raise ValueError(
                f"compile: mode='reduce-overhead': {what}, {value.dtype} of shape {tuple(value.shape)}, is on "
                f"{value.device}, and the state on {device}; a CUDA graph would repeat its numbers. Create it on the "
                "device of the inputs"
            )


class Replay:
    """A compiled part, recorded at its second call: the first one loads kernels and chooses algorithms.

    A recording repeats the same kernels with the same arguments, so it assumes of the part and its calls, which
    `Options.checked` ensures:

    * *Fixed addresses.* The bound arguments are donated buffers, and a part has a recording for each set of them. All
      other arguments are copied to fixed places. What the part allocates is in the recording's own memory, which the
      next replay overwrites, so results are copied out.
    * *No host work between kernels.* The part is one graph that reads no value and copies nothing between host and
      device. It draws by keys, which are arguments, as is the clock, which is sent to the device before the call.
    * *Static shapes and numbers.* The look-up of the part has compared shapes, strides and dtypes of all arguments.
      What kernels take by value, such as sizes and the settings of an optimizer, are constants of the code.

    Of a step in several parts, only the first one is recorded, since what the next one takes is in new memory.

    Args:
        num_bound: The number of leading arguments that are the same tensors in every call.
    """

    def __init__(self, call: Compiled, num_bound: int) -> None:
        self._call, self._num_bound = call, num_bound
        self._is_warm = False
        self._graph: Any = None
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def __call__(self, args: list[Tensor]) -> list[Tensor]:
        if self._graph is None:
            if not self._is_warm:
                results = list(self._call(args))
                self._is_warm = True
                return results
            self._record(args)
        else:
            for place, value in zip(self._inputs, args[self._num_bound :], strict=True):
                _memory_of(place).copy_(_memory_of(value), non_blocking=True)
        self._graph.replay()  # pyright: ignore[reportOptionalMemberAccess]
        return [output.clone() for output in self._outputs]

    def _record(self, args: list[Tensor]) -> None:
        """Record the launches with their addresses; this runs nothing."""
        self._inputs = [_alike(tensor) for tensor in args[self._num_bound :]]
        graph = torch.cuda.CUDAGraph()
        # The current device may be another one; a thread that pins batches, say, does not disturb the recording.
        stream = torch.cuda.Stream(args[0].device)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = list(self._call([*args[: self._num_bound], *self._inputs]))
        self._graph = graph


def _alike(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, which the part relies on; `clone` would close gaps and copy repeats."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    _memory_of(copy).copy_(_memory_of(tensor))
    return copy


def _memory_of(tensor: Tensor) -> Tensor:
    """Return the memory between a tensor's first and last element, which can be copied for any strides."""
    if tensor.is_contiguous():
        return tensor
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))
