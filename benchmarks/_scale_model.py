"""The time and memory of a step on many GPUs, from what is counted and what is assumed; see docs/scaling.md."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from _counts import MESH, Counts, Message


@dataclasses.dataclass(frozen=True)
class Machine:
    """GPUs in hosts, and what connects them: assumptions, of which none was measured here.

    Attributes:
        flops: Peak operations per second of a GPU in bfloat16.
        utilisation: The share of the peak that forward and backward pass reach, without messages.
        memory: Bytes of a GPU, of which a step can use the share `usable`.
        per_host: GPUs of a host.
        nvlink: Bytes per second that a GPU sends to others of its host.
        network: Bytes per second that a GPU sends to other hosts.
        achieved: The share of these that large messages reach.
        launch: Seconds to start a message.
        nvlink_latency, network_latency: Seconds for each hop within a host and between hosts.
        to_gpu: Bytes per second from a host's memory to a GPU.
    """

    flops: float = 989e12
    utilisation: float = 0.4
    memory: float = 80e9
    usable: float = 0.9
    per_host: int = 8
    nvlink: float = 450e9
    network: float = 50e9
    achieved: float = 0.8
    launch: float = 10e-6
    nvlink_latency: float = 1e-6
    network_latency: float = 5e-6
    to_gpu: float = 50e9


class Plan(NamedTuple):
    """How a step is divided."""

    mode: str
    """One of `MODES`."""
    num_gpus: int
    num_shards: int
    """Processes that hold the rows of a parameter: all, or those of a host. Not read by data_parallel."""
    batch_size: int
    """Examples of all processes together."""
    has_whole_batch: bool = True
    """True if each GPU is given the whole batch, as now; False to see what it would be without."""


class Estimate(NamedTuple):
    """What the model says of a step; times in seconds."""

    step: float
    compute: float
    exposed: float
    """Time in which a GPU waits for messages."""
    latency: float
    """The part of it that would remain with links of any bandwidth."""
    input: float
    """Time to copy the batch to the GPU, while the step before it runs."""
    efficiency: float
    """The time of the step's examples on as many independent GPUs, over the time of the step."""
    num_messages: int
    sent_bytes: float
    """Bytes that a GPU sends, in rings."""
    memory: float
    """Bytes of a GPU at the peak."""
    microbatches: int
    """Slices into which a process cuts its examples, as few as fit."""
    limit: str
    """What costs most."""


def estimate(counts: Counts, plan: Plan, machine: Machine) -> Estimate:
    """Return time and memory of a step, which is computed as one that was compiled.

    A GPU computes its examples at `machine.utilisation` of its peak. Messages are sent one after the other, in the
    order and at the places of the traced graph, and a pass waits where the graph waits; see `with_messages`. With
    microbatches, `data_parallel` and `gather="step"` send after the last one, and `gather="layer"` in each.
    """
    own_size = -(-plan.batch_size // plan.num_gpus)
    example = counts.flops / (machine.flops * machine.utilisation)
    microbatches = fewest_microbatches(counts, plan, machine)
    compute = own_size * example
    messages = sent(counts, plan, has_statistics=microbatches == 1)
    by_layer = plan.mode == "layer"

    def step_time(machine: Machine) -> float:
        def seconds(message: Message) -> float:
            size, per_host = group(message.role, plan, machine)
            return message_seconds(message.kind, message.num_bytes, size, per_host, machine)

        if microbatches > 1 and not by_layer:
            return compute + sum(map(seconds, messages))
        return microbatches * with_messages(messages, compute / microbatches, seconds)

    step = step_time(machine)
    latency = step_time(dataclasses.replace(machine, nvlink=math.inf, network=math.inf)) - compute
    input_bytes = (plan.batch_size if plan.has_whole_batch else own_size) * counts.batch_bytes
    input_time = input_bytes / machine.to_gpu
    repeated = microbatches if by_layer else 1
    memory = memory_bytes(counts, plan, -(-own_size // microbatches), is_cut=microbatches > 1)
    found = Estimate(
        step=max(step, input_time),
        compute=compute,
        exposed=step - compute,
        latency=latency,
        input=input_time,
        efficiency=plan.batch_size / plan.num_gpus * example / max(step, input_time),
        num_messages=len(messages) * repeated,
        sent_bytes=repeated * sum(ring_bytes(one.kind, one.num_bytes, group(one.role, plan)[0]) for one in messages),
        memory=memory,
        microbatches=microbatches,
        limit="",
    )
    return found._replace(limit=_limit(found, plan, machine))


def as_if(counts: Counts, *changes: str) -> Counts:
    """Return the counts of a library that would send otherwise, to see what that would be worth.

    Args:
        counts: What was counted.
        changes: Any of `CHANGES`.
    """
    messages = counts.messages
    if "overlap" in changes:
        waiting = [one for one in messages if one.role == "copies"]
        messages, before = [one for one in messages if one.role != "copies"], messages
        total = sum(one.num_bytes for one in waiting)
        scattered = sum(one.num_bytes for one in before if one.kind == "reduce_scatter")
        order, done, due = [], 0, 0.0
        for one in messages:
            is_gather = one.kind == "all_gather" and one.role == "shard"
            order.append(one._replace(until=1.0) if is_gather else one)
            if one.kind == "reduce_scatter":
                done += one.num_bytes
                while waiting and due + waiting[0].num_bytes <= total * done / scattered:
                    due += waiting[0].num_bytes
                    order.append(waiting.pop(0)._replace(at=one.at, until=1.0))
        messages = [*order, *waiting]
    return dataclasses.replace(counts, messages=messages)


CHANGES = {
    "part": "each GPU is given only its part of the batch",
    "overlap": "gathers of parameters are waited for by nothing, and sums over hosts are sent with those within",
}


def with_messages(messages: Iterable[Message], compute: float, seconds: Callable[[Message], float]) -> float:
    """Return the time of a pass that sends these messages.

    Message i may start at the time s_i at which the pass reaches it, and when the one before it has ended:
    e_i = max(s_i, e_(i-1)) + seconds(i). Where the result is read, the pass waits until e_i.

    Args:
        messages: The messages in the order in which they are sent.
        compute: The time of the pass without them.
        seconds: The time that a message takes by itself.
    """
    waited = end = 0.0
    open_messages: list[tuple[float, float]] = []

    def wait(place: float) -> None:
        nonlocal waited
        for until, when in sorted(one for one in open_messages if one[0] <= place):
            waited = max(waited, when - until * compute)
        open_messages[:] = [one for one in open_messages if one[0] > place]

    for message in messages:
        wait(message.at)
        end = max(message.at * compute + waited, end) + seconds(message)
        open_messages.append((message.until, end))
    wait(1.0)
    return compute + waited


def message_seconds(kind: str, num_bytes: float, size: int, per_host: int, machine: Machine) -> float:
    """Return the time of a message among `size` processes, `per_host` of them in each host.

    A ring of n processes passes S (n-1)/n bytes on to the next process, in n-1 hops, or twice that to reduce for all;
    its rings use the network of all of the group's GPUs in a host. For all_reduce, a tree has 2 log2(n) hops and 2 S.
    """
    if size == 1:
        return 0.0
    hosts = -(-size // per_host)
    bandwidth = machine.achieved * min(
        machine.nvlink if per_host > 1 else math.inf, per_host * machine.network if hosts > 1 else math.inf
    )
    crossings = hosts if hosts > 1 else 0
    hops = (size - 1 - crossings) * machine.nvlink_latency + crossings * machine.network_latency
    passes = 2 if kind == "all_reduce" else 1
    ring = passes * hops + ring_bytes(kind, num_bytes, size) / bandwidth
    if kind != "all_reduce":
        return machine.launch + ring
    depth = math.log2(min(per_host, size)) * machine.nvlink_latency + math.log2(hosts) * machine.network_latency
    return machine.launch + min(ring, 2 * depth + 2 * num_bytes / bandwidth)


def ring_bytes(kind: str, num_bytes: float, size: int) -> float:
    """Return the bytes that a process sends for a message of `num_bytes`, the size of the whole tensor."""
    return (2 if kind == "all_reduce" else 1) * num_bytes * (size - 1) / size


def sent(counts: Counts, plan: Plan, *, has_statistics: bool = True) -> list[Message]:
    """Return the messages of a step, or of a microbatch of `gather="layer"`, with their sizes for these processes.

    Args:
        counts: What was counted.
        plan: How the step is divided.
        has_statistics: False without the messages of batch normalisation, which slices do not share.
    """
    is_padded = _padded(counts, plan.num_shards) / _padded(counts, MESH[-1])
    found = []
    for message in counts.messages:
        size, _ = group(message.role, plan)
        if size == 1 or (message.role == "statistics" and not has_statistics):
            continue
        factor = 1.0
        if message.role == "shard":
            factor = is_padded
        elif message.role == "copies":
            factor = is_padded * MESH[-1] / plan.num_shards
        found.append(message._replace(num_bytes=message.num_bytes * factor))
    return found


def group(role: str, plan: Plan, machine: Machine | None = None) -> tuple[int, int]:
    """Return how many processes a message is among, and how many of them are in a host."""
    in_host = min(plan.num_gpus, (machine or Machine()).per_host)
    if role == "shard":
        return plan.num_shards, min(plan.num_shards, in_host)
    if role == "copies":
        return plan.num_gpus // plan.num_shards, max(in_host // plan.num_shards, 1)
    return plan.num_gpus, in_host


def memory_bytes(counts: Counts, plan: Plan, num_examples: int, *, is_cut: bool = False) -> float:
    """Return the bytes of a GPU at the peak of a step that computes `num_examples` at a time.

    If these are microbatches, `is_cut`, their mean gradients are kept during a pass, and the update begins with all
    gradients: 3 P, as measured with AdamW (docs/compile.md), divided by the shards of `gather="layer"`.
    """
    shards = 1 if plan.mode == "data_parallel" else plan.num_shards
    state = counts.divided_bytes / shards * _padded(counts, shards) / _padded(counts, 1) + counts.other_bytes
    batch = (plan.batch_size if plan.has_whole_batch else num_examples) * counts.batch_bytes
    means = counts.param_bytes / (shards if plan.mode == "layer" else 1) if is_cut else 0
    passes = counts.step_bytes + num_examples * counts.example_bytes + means
    return state + batch + max(passes, counts.update_bytes, 3 * means)


def fewest_microbatches(counts: Counts, plan: Plan, machine: Machine) -> int:
    """Return into how few slices a process can cut its examples so that they fit; 1 if even single examples do not."""
    own_size = -(-plan.batch_size // plan.num_gpus)
    for microbatches in range(1, own_size + 1):
        needed = memory_bytes(counts, plan, -(-own_size // microbatches), is_cut=microbatches > 1)
        if needed <= machine.usable * machine.memory:
            return microbatches
    return 1


def selective_backprop_speedup(
    num_gpus: int, *, keep: float = 0.5, forward: float = 1 / 3, is_divided: bool = True
) -> float:
    """Return how much faster steps with `selective_backprop` are on n GPUs than on one, without messages.

    A step is an additional forward pass, of which each GPU computes a share d, and the step of the examples kept:

        S(n) = (forward + keep) / (forward d + keep / n)

    Args:
        num_gpus: n.
        keep: The share of examples kept.
        forward: The share of a step's operations that its forward pass has.
        is_divided: True for d = 1 / n; False for d = 1, where S(n) < 1 + keep / forward for any n.
    """
    share = 1 / num_gpus if is_divided else 1
    return (forward + keep) / (forward * share + keep / num_gpus)


def _padded(counts: Counts, num_shards: int) -> int:
    """The bytes of all parameters with their rows filled up to a multiple of the processes."""
    return sum(-(-rows // num_shards) * num_shards * row_bytes for rows, row_bytes in counts.rows)


def _limit(found: Estimate, plan: Plan, machine: Machine) -> str:
    if found.memory > machine.usable * machine.memory:
        return "memory: does not fit"
    if plan.batch_size < plan.num_gpus:
        return "fewer examples than GPUs"
    if found.step > found.compute + found.exposed:
        return "copying the whole batch"
    if found.exposed < 0.1 * found.step:
        return "compute"
    return "latency" if found.latency > found.exposed / 2 else "bandwidth"
