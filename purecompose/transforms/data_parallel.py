"""`data_parallel`: a step that several processes compute together, each on a part of the batch.

All processes hold the whole state and are given the whole batch. Each computes everything around the gradient
(augmentation, the update, averages) for the whole batch, to the same bits, but forward, loss and gradient only for its
part. So examples may be drawn, mixed and selected as if there were one process, and the result is the same for any
number of processes, as for any number of microbatches.
"""

import functools
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from purecompose import tree
from purecompose._support.checks import shown
from purecompose._support.functorch import is_fake
from purecompose._support.shards import is_shard
from purecompose._support.warnings import warn
from purecompose.core.again import repeatable
from purecompose.core.compose import Step
from purecompose.core.divided import sharing
from purecompose.core.means import denominators, has_mean, part_of
from purecompose.core.members import SINGLE
from purecompose.core.operation import NO_PURPOSE, Carry, Lowered, Operation, Place, Purpose, walk
from purecompose.core.program import Program, matching_params
from purecompose.core.ranks import WATCHES, Ranks, Shard, Share, SharedPart, scaled, scaled_with_statistics
from purecompose.core.scopes import Grad, Microbatches, Scope, with_own_gradients
from purecompose.core.sealed import SealedOutputs
from purecompose.core.separable import check_halves
from purecompose.core.slices import check_rows
from purecompose.core.state import State
from purecompose.nn.model import STATISTICS
from purecompose.optim.checks import matched
from purecompose.transforms.rank_comparison import check_alike, digest
from purecompose.transforms.rank_timeouts import naming_late_ranks
from purecompose.transforms.sharding.by_layer import by_layer
from purecompose.transforms.sharding.gathering import Placing


__all__ = ["Shared", "data_parallel", "shared_program"]


SumGradients: TypeAlias = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Function from a process's parts of gradients to their sums over all processes."""


@dataclass(frozen=True, init=False, repr=False)
class Shared(Scope):
    """Run the body, a `Microbatches`, on this process's part of the batch, and average the results of all processes.

    Args:
        body: The `Microbatches` whose batch is divided.
        ranks: The processes; `None` if there is only one.
        is_checked: True if they are known to have the same states and batches, and to send messages of one form.
        placing: How parameters are divided among the processes; `None` if each has all.
    """

    body: Program
    ranks: Ranks | None
    is_checked: bool
    placing: Placing | None

    def __init__(
        self, *body: Any, ranks: Ranks | None, is_checked: bool = False, placing: Placing | None = None
    ) -> None:
        # What the last comparison was of; nothing in it changes a result.
        super().__init__(*body, ranks=ranks, is_checked=is_checked or ranks is None, placing=placing, _compared={})

    def lower(self, place: Place) -> Sequence[Lowered]:
        """Return the scope as one operation."""
        ranks = self.ranks
        if ranks is None:
            return place.lower(self.body)
        (inner,) = place._replace(is_shared=True).lower(self.body)
        is_whole = not any((node.cut or place.cut).may_slice for node in self.body if isinstance(node, Microbatches))
        wrt = [node.wrt for node in walk(self.body) if isinstance(node, Grad)]
        build, placing = inner.with_slices, self.placing
        assert build is not None, "what several processes share is cut into slices"
        layers = placing if placing is not None and placing.is_by_layer else None

        def with_slices(transform: Callable[[Operation], Operation]) -> Operation:
            on_part = build(transform if layers is None else _layer_by_layer(transform, layers, is_whole))
            shared = functools.partial(
                _run_shared,
                *(on_part, ranks, wrt),
                is_checked=inner.sets_loss and layers is None,
                is_whole=is_whole,
                is_by_layer=layers is not None,
            )
            on_whole = on_part if layers is None else build(transform)
            run = shared if placing is None else functools.partial(_run_placed, shared, on_whole, placing)
            return repeatable(with_own_gradients(run), self.body, ranks)

        lowered = inner._replace(run=with_slices(lambda body: body), with_slices=with_slices, until_loss=None)
        if not is_whole or inner.until_loss is None:
            return [lowered]
        # A single slice is part of the graph around it, in which messages overlap with the backward pass.
        check = functools.partial(_check_part, inner.until_loss, ranks, placing)
        return [lowered._replace(with_slices=None, check=check)]

    def guard(self, step: Step, state: State, batch: Any, *, is_first: bool) -> AbstractContextManager[Any] | None:
        """Return a context manager that reports ranks that do not answer and, once per epoch, compares all ranks."""
        if self.ranks is None:
            return None
        return self._guarded(self.ranks, step, state, batch, is_first)

    @contextmanager
    def _guarded(self, ranks: Ranks, step: Step, state: State, batch: Any, is_first: bool) -> Iterator[None]:
        now, compared = state.timestamp, vars(self)["_compared"]
        is_known = compared.get("epoch") == now.epoch and compared["model"] is state.model
        is_known = is_known and compared["batch"] <= now.batch
        if not is_known or state.lease is None:  # reading the parameters of a compiled step's own state copies them
            _check_placed(state, self.placing)
        with naming_late_ranks(ranks, now.batch):
            if not self.is_checked and not is_known:
                check_alike(ranks, step, state, batch)
            compared |= {"epoch": now.epoch, "model": state.model, "batch": now.batch}
            token = WATCHES.set(is_first and not self.is_checked)
            try:
                yield
            finally:
                WATCHES.reset(token)

    def describe(self, step: str) -> str:
        """Return the printed form of a step whose program contains the scope."""
        name = "data_parallel" if self.placing is None else "fully_sharded"
        return f"{name}({step}, size={1 if self.ranks is None else self.ranks.size})"

    def __repr__(self) -> str:
        return f"Shared({', '.join(map(repr, self.body))}, size={1 if self.ranks is None else self.ranks.size})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise pickle.PicklingError(
            "a data_parallel step cannot be pickled: it belongs to a process group. Pickle the step of one process, "
            "and call data_parallel(step) in each process"
        )


def _layer_by_layer(
    transform: Callable[[Operation], Operation], placing: Placing, is_whole: bool
) -> Callable[[Operation], Operation]:
    """Return a transform of bodies that makes them run layer by layer, and then transforms them."""
    return lambda body: transform(by_layer(body, placing, shares_statistics=is_whole))


def _run_placed(
    shared: Callable[..., Carry], on_whole: Operation, placing: Placing, carry: Carry, purpose: Purpose
) -> Carry:
    """Run a part of a step on divided parameters; its gradients are divided like them.

    Args:
        shared: What several processes share.
        on_whole: The same for whole parameters, in each process by itself.
        placing: How parameters are divided.
        carry: Input of the part.
        purpose: The purpose of the run.
    """
    if purpose.sharing == "own":
        raise ValueError(
            "fully_sharded: the gradient of one process's part, at parameters of its own, needs parameters that differ "
            "between processes: use data_parallel"
        )
    if placing.is_by_layer and purpose.sharing == "all":
        return shared(carry, purpose)
    params = carry.state.params
    gathered = carry._replace(state=carry.state.replace(params=placing.gathered(params)))
    if purpose.sharing == "none":
        end = on_whole(gathered, purpose)
    else:
        end = shared(gathered, purpose, functools.partial(placing.sum_gradients, like=params))
    return end._replace(state=end.state.replace(params=params))


def _run_shared(
    operation: Operation,
    ranks: Ranks,
    wrt: Sequence[str | None],
    carry: Carry,
    purpose: Purpose,
    sum_gradients: SumGradients | None = None,
    *,
    is_checked: bool,
    is_whole: bool,
    is_by_layer: bool = False,
) -> Carry:
    """Run the operation on this rank's part of the batch, and combine the results of all ranks.

    Args:
        operation: Operation to run on a part of the batch.
        ranks: The processes.
        wrt: The patterns of the gradients that the operation computes.
        carry: Input of the operation, the same on all ranks.
        purpose: The purpose of the run.
        sum_gradients: What sums gradients over the ranks, if not a message that all of them receive.
        is_checked: True to compare the loss of this rank's part with the mean over its halves in a first run.
        is_whole: True if the part is not cut into slices. Then all ranks run the network equally often, and batch
            normalisation may use the statistics of the whole batch.
        is_by_layer: True if results of slices are means over the ranks already; see `by_layer`.
    """
    if purpose.sharing == "none":
        return operation(carry, purpose)
    state = carry.state
    if purpose.is_first:
        check_rows(state)
    share, start = _part(state, ranks)
    if purpose.sharing == "all":
        shard = Shard(ranks, share.first_example, share.num_examples, state.num_examples, is_cut_alike=is_by_layer)
        part = SharedPart(ranks, share.num_examples, state.device)
        with sharing(part if is_whole else None, part if is_whole or is_by_layer else None):
            end = operation(Carry(start, carry.used), purpose._replace(shard=shard))
    else:
        end = operation(Carry(start.replace(denominators=state.denominators), carry.used), purpose)
    if is_checked and purpose.is_first and start.whole_loss is None:
        check_halves(end.state.replace(batch=share.batch, first_example=start.first_example))
    after = end.state.replace(batch=state.batch, first_example=state.first_example, denominators=state.denominators)
    if after.outputs is not state.outputs:
        after = after.replace(outputs=SealedOutputs(ranks.size))
    if purpose.sharing == "own":
        return Carry(after, end.used, carry.terms)
    _check_kept(state, after)
    used, terms, grads = end.used, end.terms, None if after.grads is None else dict(after.grads)
    del end  # so that each gradient is freed when it has been sent
    if not is_by_layer:
        after = after.replace(grads=None)
        names = [name for pattern in wrt for name in matching_params(state.context.trainable, pattern)]
        has_shared = is_whole and share.num_examples > 0 and state.model.skeleton(train=True).has_batch_norms
        after = _averaged_over_ranks(
            *(state, after, grads, names, _weight(share, terms), ranks),
            dict if purpose.replaces_gradients else sum_gradients,
            shares_statistics=has_shared,
        )
    if not purpose.is_again:
        if purpose.watch is not None:
            _warn_of_different_buffers(state, after, ranks)
        after = after.replace(
            buffers=ranks.with_buffers(state.buffers, after.buffers, share.num_examples),
            slots=ranks.with_slots(state.slots, after.slots, counts=share.num_examples > 0),
        )
    return Carry(after, used, carry.terms)


def _check_kept(before: State, after: State) -> None:
    for name in ("params", "opt_state", "hparams", "key"):
        if getattr(after, name) is not getattr(before, name):
            raise RuntimeError(
                f"data_parallel: {name} changed between BEFORE_FORWARD and AFTER_BACKWARD, where each process sees its "
                "own part of the batch, and states would come apart: change it at AFTER_TRAIN_BATCH or later; an "
                "update belongs after Microbatches"
            )


def _weight(share: Share, terms: int | Tensor | None) -> int | Tensor:
    """Return the weight of a part of the batch: its number of terms of the loss, or of examples."""
    if isinstance(terms, Tensor):  # counted even without a share, so that all ranks have the same graph
        return terms * min(share.num_examples, 1)
    return share.num_examples if terms is None or not share.num_examples else terms


def _part(state: State, ranks: Ranks) -> tuple[Share, State]:
    """Return this rank's share of the batch, and the state at the start of its part."""
    share = ranks.share(state.batch, state.context.layout)
    first = share.first_example if state.first_example is None else state.first_example + share.first_example
    own = part_of(denominators(state), max(share.num_examples, 1), state.num_examples)
    return share, state.replace(batch=share.batch, first_example=first, denominators=own)


def _check_part(to_loss: Operation, ranks: Ranks, placing: Placing | None, carry: Carry) -> None:
    """Check loss and buffers of this rank's part by their values, which a traced step does not have.

    Args:
        to_loss: The part of a step before its loss.
        ranks: The processes.
        placing: How parameters are divided among them.
        carry: Input of the part of the step that the processes share.
    """
    state = carry.state
    share, start = _part(state, ranks)
    is_by_layer = placing is not None and placing.is_by_layer
    if placing is not None and not is_by_layer:
        start = start.replace(params=placing.gathered(state.params))
    part = SharedPart(ranks, share.num_examples, state.device)
    with sharing(part, part):
        end = to_loss(Carry(start, carry.used), NO_PURPOSE).state
    if not is_by_layer:  # where a process with one example, which has no halves, would not gather the loss's parameters
        check_halves(end.replace(batch=start.batch, first_example=start.first_example))
    _warn_of_different_buffers(state, end, ranks)


def _warn_of_different_buffers(before: State, after: State, ranks: Ranks) -> None:
    """Warn if the ranks have written different values into buffers whose mean may not be a valid value."""
    new = {name: buffer for name, buffer in after.buffers.items() if buffer is not before.buffers.get(name)}
    names = sorted(new.keys() - matched(STATISTICS, tuple(new)))
    if not names or is_fake(before.key):
        return
    alike = ranks.agree([digest([new[name]], before.device) for name in names])
    if differing := [name for name, is_alike in zip(names, alike, strict=True) if not is_alike]:
        warn(
            f"data_parallel: the processes have written different values into {', '.join(differing)}. The state keeps "
            "their mean, of integers the maximum, which is right for sums and running statistics only: change other "
            "buffers in an algorithm at AFTER_TRAIN_BATCH, where each process has the whole batch"
        )


def _averaged_over_ranks(
    before: State,
    after: State,
    own: dict[str, Tensor] | None,
    names: Sequence[str],
    weight: int | Tensor,
    ranks: Ranks,
    sum_gradients: SumGradients | None,
    *,
    shares_statistics: bool,
) -> State:
    """Return the state with loss, gradients and new metrics averaged over the ranks.

    Args:
        before: The state before the ranks' parts.
        after: The state after this rank's part, without its gradients.
        own: These gradients; the dictionary is emptied.
        names: The parameters with respect to which the part differentiates, the same on all ranks.
        weight: The weight of this rank's part.
        ranks: The processes.
        sum_gradients: See `_run_shared`.
        shares_statistics: True if the network normalises by statistics of the whole batch, so that the gradient of a
            part whose loss does not count is one of other parts' losses.
    """
    new = {name: value for name, value in after.metrics.items() if value is not before.metrics.get(name)}
    found: dict[str, Any] = {"metrics": {name: value for name, value in new.items() if has_mean(value)}}
    if after.loss is not None:
        found["loss"] = after.loss
    # A part may reach parameters that others do not, and all ranks must send the same tensors. Traced steps have no
    # values for these flags and do not need them: all ranks have the same graph.
    flags, is_reached = None, True
    if own and not is_fake(before.key):
        order = dict.fromkeys([*names, *own])
        reached = [name in own for name in order]
        flags, is_reached = torch.tensor(reached).to(before.device, non_blocking=True), all(reached)
        own |= {name: torch.zeros_like(before.params[name]) for name in order if name not in own}
        own = {name: own.pop(name) for name in order}
    share, _, count = ranks.weigh(weight, flags, device=before.device)
    scale = scaled_with_statistics if shares_statistics and isinstance(weight, Tensor) else scaled
    leaves, spec = tree.flatten(found)
    sums, names = ranks.reduced(scaled(leaves, share), "sum"), tuple(own or ())
    if sum_gradients is None:
        # In the order of the backward pass; each gradient is freed when its bucket has been sent.
        parts = (scale([own.popitem()[1]], share)[0] for _ in names if own)
        grads = dict(zip(reversed(names), ranks.reduced(parts, "sum"), strict=True))
    else:
        grads = sum_gradients(dict(zip(names, scale([*(own or {}).values()], share), strict=True)))
    # If this rank's part reaches all of them, skip reading the flags, which would wait for the device.
    if count is not None and not is_reached:
        grads = {name: grads[name] for name, num_ranks in zip(names, count.tolist(), strict=True) if num_ranks}
    means = tree.unflatten(spec, sums)
    grads = None if own is None else {name: grads[name] for name in names if name in grads}
    return after.replace(**{**means, "grads": grads, "metrics": {**after.metrics, **means["metrics"]}})


def data_parallel(step: Step, mesh: Any = None) -> Step:
    """Return a step that several processes compute together, each calling `step(state, batch)` with the same arguments.

    Each process computes its part of the batch, and returns the state that a single process would return for the whole
    batch, up to rounding. Batches need not divide evenly. Draws for an example do not depend on the process that
    computes it. Batch normalisation uses the statistics of the whole batch, unless microbatches cut the parts.

    Args:
        step: A step made by `compose`; `compile(data_parallel(step))` compiles it.
        mesh: A `torch.distributed.DeviceMesh` of one dimension, or a process group; by default all processes.

    Returns:
        A `Step`. States of all processes stay the same bit for bit, so only one of them has to report.
        Metrics that are single floating numbers are means over the parts; other metrics are those of this process's
        part, and `outputs` cannot be read after the parts. Slots that algorithms change within a part (between
        BEFORE_FORWARD and AFTER_BACKWARD) are treated as sums and flags: the changes of all parts are added up.
        `state.gradient` is the gradient of the whole batch. Evaluations, and values by `state.per_example`, are divided
        as well; everything else outside of the parts runs in each process.

    Raises:
        TypeError: `step` is not a composed step, or `mesh` is neither a mesh nor a process group.
        RuntimeError: There is no process group: call `torch.distributed.init_process_group` first. In a step: a part
            of the batch has changed params, optimizer, hparams or key, or the form of a slot; or messages differ.
            RankTimeoutError, a RuntimeError, names the ranks that have not answered within the process group's timeout.
        ValueError: The mesh has several dimensions, this process is not in it, or a gradient in the program is not
            inside a `Microbatches`, so that nothing would be divided. In the first step, and the first of each epoch:
            processes have different states, batches or settings.

    Example:
        >>> from purecompose import compose, loop_events
        >>> import tempfile
        >>> where = f"file://{tempfile.mkdtemp()}/store"
        >>> dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        >>> data_parallel(compose(loop_events))
        data_parallel(Step(no algorithms), size=1)
        >>> dist.destroy_process_group()
    """
    if not isinstance(step, Step):
        raise TypeError(f"data_parallel: expected a step made by compose, got {type(step).__name__}")
    if step.members is not SINGLE:
        raise ValueError(f"data_parallel: members of a population train in one process, got {step!r}")
    return step.replace(program=shared_program(step.program, _ranks(mesh)))


def shared_program(
    program: Program, ranks: Ranks | None, *, is_checked: bool = False, placing: Placing | None = None
) -> Program:
    """Return a program in which several processes share the batch of each `Microbatches`."""
    if any(isinstance(node, Shared) for node in program):
        raise ValueError("data_parallel: the step's batch is divided among processes already")
    if any(isinstance(node, Grad) for node in program):
        raise ValueError(
            "data_parallel: a Grad in the program is not inside of Microbatches(...), which is what processes divide: "
            "each would compute it for the whole batch. Put Microbatches around it"
        )
    if not any(isinstance(node, Microbatches) for node in program):
        raise ValueError("data_parallel: the program has no Microbatches(...), so there is nothing to divide")
    return tuple(
        Shared(node, ranks=ranks, is_checked=is_checked, placing=placing) if isinstance(node, Microbatches) else node
        for node in program
    )


def undivided(program: Program) -> Program:
    """Return the program of one process, the inverse of `shared_program`."""
    return tuple(inner for node in program for inner in (node.body if isinstance(node, Shared) else (node,)))


def _ranks(mesh: Any) -> Ranks | None:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "data_parallel: there is no process group: start the processes by torchrun, and call "
            "torch.distributed.init_process_group() in each"
        )
    group: Any = dist.group.WORLD if mesh is None else mesh
    if mesh is not None and hasattr(mesh, "get_group"):
        if mesh.ndim != 1:
            raise ValueError(f"data_parallel: expected a mesh of one dimension, got one of {mesh.ndim}: mesh['data']")
        group = mesh.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"data_parallel: expected a DeviceMesh or a process group, got {shown(mesh)}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("data_parallel: this process is not in the group")
    return Ranks.of(group) if group.size() > 1 else None


def _check_placed(state: State, placing: Placing | None) -> None:
    """Raise a `ValueError` unless the state is divided among processes exactly if the step expects it."""
    is_divided = any(map(is_shard, state.params.values()))
    if is_divided and placing is None:
        raise ValueError(
            "data_parallel: each process holds only some rows of the state's parameters; fully_sharded(step, mesh) "
            "takes such a state, and pc.whole(state) puts it together"
        )
    if placing is not None and not is_divided and any(param.ndim for param in state.params.values()):
        raise ValueError("fully_sharded: the state is not divided among the processes: call pc.shard(state, mesh)")
