"""`data_parallel`: a step that several processes compute together, each on a part of the batch.

All processes hold the whole state and are given the whole batch. Each computes forward, loss and gradient for its part
only, and all else for the whole batch, to the same bits. So examples may be drawn, mixed and selected as if there were
one process, and the result is the same for any number of processes.
"""

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from purecompose import batch as batches, tree
from purecompose._support.device import is_shard
from purecompose._support.specs import shown
from purecompose.combinations import unsupported
from purecompose.core.compose import Step
from purecompose.core.means import denominators, part_of
from purecompose.core.operation import SINGLE, Carry, Lowered, Operation, Place, Purpose, walk
from purecompose.core.program import Program, matching_params
from purecompose.core.ranks import Ranks, Share, SharedPart
from purecompose.core.repeated import SealedOutputs, repeatable
from purecompose.core.scopes import Grad, Microbatches, Scope, with_own_gradients
from purecompose.core.separable import Check
from purecompose.core.state import State
from purecompose.transforms.gathering import Placing, by_layer
from purecompose.transforms.rank_results import (
    SumGradients,
    averaged,
    check_alike,
    naming_late_ranks,
    warn_of_different_buffers,
    with_buffers,
    with_slots,
)


@dataclass(frozen=True, init=False, repr=False)
class Shared(Scope):
    """Run the body, a `Microbatches`, on this process's part of the batch, and average the results of all processes.

    Args:
        ranks: The processes; `None` if there is only one.
        is_checked: True if they are known to have the same states and batches.
    """

    body: Program
    ranks: Ranks | None
    is_checked: bool
    placing: Placing | None
    _compared: dict[str, Any] = field(compare=False)
    """What the last comparison was of; nothing in it changes a result."""

    def __init__(
        self, *body: Any, ranks: Ranks | None, is_checked: bool = False, placing: Placing | None = None
    ) -> None:
        super().__init__(*body, ranks=ranks, is_checked=is_checked or ranks is None, placing=placing, _compared={})

    def lower(self, place: Place) -> Sequence[Lowered]:
        ranks = self.ranks
        if ranks is None:
            return place.lower(self.body)
        (inner,) = place._replace(is_shared=True).lower(self.body)
        is_whole = not any((node.cut or place.cut).may_slice for node in self.body if isinstance(node, Microbatches))
        wrt = [node.wrt for node in walk(self.body) if isinstance(node, Grad)]
        build, placing = inner.with_slices, self.placing
        assert build is not None, "what several processes share is cut into slices"
        layers = placing if placing is not None and placing.is_by_layer else None

        separable = None if layers is not None else _on_whole_params(inner.separable, placing)

        def as_slice(body: Operation) -> Operation:
            return body if layers is None else by_layer(body, layers, shares_statistics=is_whole)

        def with_slices(transform: Callable[[Operation], Operation]) -> Operation:
            on_part = build(lambda body: transform(as_slice(body)))
            shared = _OnPart(
                on_part, ranks, wrt, is_whole=is_whole, is_by_layer=layers is not None, is_checked=self.is_checked
            )
            on_whole = on_part if layers is None else build(transform)
            run = shared if placing is None else functools.partial(_run_placed, shared, on_whole, placing)
            return repeatable(with_own_gradients(run), self.body, ranks, separable)

        lowered = inner._replace(
            run=with_slices(lambda body: body), with_slices=with_slices, until_loss=None, separable=separable
        )
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
        tensors = batches.tensors(batch)
        forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
        is_new = not is_known or compared["forms"] != forms
        if is_new:
            words = f"{', '.join(map(tree.describe, tensors))} in epoch {now.epoch}"
            # Simulated processes take turns, and cannot wait for each other here.
            compared |= {"forms": forms, "words": "" if self.is_checked or dist.get_backend() == "threaded" else words}
        if not is_known or state.lease is None:  # reading the parameters of a compiled step's own state copies them
            _check_state(state, self.placing)
        with naming_late_ranks(ranks, now.batch, compared["words"], is_new=is_new):
            if not self.is_checked and not is_known:
                check_alike(ranks, step, state, batch)
            compared |= {"epoch": now.epoch, "model": state.model, "batch": now.batch}
            yield

    @property
    def gathers_at_once(self) -> bool:
        """True if parameters that are divided among the processes are gathered together, and not layer by layer."""
        return self.placing is not None and not self.placing.is_by_layer

    def describe(self, step: str) -> str:
        """Return the printed form of a step whose program contains the scope."""
        name = "data_parallel" if self.placing is None else "fully_sharded"
        return f"{name}({step}, size={1 if self.ranks is None else self.ranks.size})"

    def __repr__(self) -> str:
        return f"Shared({', '.join(map(repr, self.body))}, size={1 if self.ranks is None else self.ranks.size})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise pickle.PicklingError(str(unsupported("several processes", "pickle")))


def shared_program(
    program: Program, ranks: Ranks | None, *, is_checked: bool = False, placing: Placing | None = None
) -> Program:
    """Return a program in which several processes share the batch of each `Microbatches`."""
    if any(isinstance(node, Shared) for node in program):
        raise unsupported("several processes", "a step that is divided already", "data_parallel")
    divided = [node for node in program if isinstance(node, Microbatches)]
    if any(isinstance(node, Grad) for node in walk(node for node in program if node not in divided)):
        raise unsupported("several processes", "a Grad outside of Microbatches", "data_parallel")
    if not divided:
        raise ValueError("data_parallel: the program has no Microbatches(...), so there is nothing to divide")
    return tuple(
        Shared(node, ranks=ranks, is_checked=is_checked, placing=placing) if isinstance(node, Microbatches) else node
        for node in program
    )


def undivided(program: Program) -> Program:
    """Return the program of one process, the inverse of `shared_program`."""
    return tuple(inner for node in program for inner in (node.body if isinstance(node, Shared) else (node,)))


def _run_placed(shared: "_OnPart", on_whole: Operation, placing: Placing, carry: Carry, purpose: Purpose) -> Carry:
    """Run a part of a step on divided parameters; its gradients are divided like them."""
    if purpose.sharing == "own":
        raise unsupported("fully_sharded", "the gradient of one process's part")
    if placing.is_by_layer and purpose.sharing == "all":
        return shared(carry, purpose)
    if shared.compares(purpose):
        placing = placing.comparing()
    params = carry.state.params
    gathered = carry._replace(state=carry.state.replace(params=placing.gathered(params)))
    if purpose.sharing == "none":
        end = on_whole(gathered, purpose)
    else:
        end = shared(gathered, purpose, functools.partial(placing.sum_gradients, like=params))
    return end._replace(state=end.state.replace(params=params))


def _on_whole_params(check: Check | None, placing: Placing | None) -> Check | None:
    """Return the check of a scope, on divided parameters that are put together first."""
    if check is None or placing is None:
        return check

    def run(carry: Carry, earlier: Iterable[Operation]) -> None:
        check(carry._replace(state=carry.state.replace(params=placing.gathered(carry.state.params))), earlier)

    return run


def _check_state(state: State, placing: Placing | None) -> None:
    """Raise a `ValueError` if the state is not divided among processes as the step expects, or synchronises itself."""
    if any(isinstance(module, nn.SyncBatchNorm) for module in state.model.module.modules()):
        raise unsupported("several processes", "nn.SyncBatchNorm")
    is_divided = any(map(is_shard, state.params.values()))
    if is_divided and placing is None:
        raise ValueError(
            "data_parallel: each process holds only some rows of the state's parameters; fully_sharded(step, mesh) "
            "takes such a state, and pc.whole(state) puts it together"
        )
    if placing is not None and not is_divided and any(param.ndim for param in state.params.values()):
        raise ValueError("fully_sharded: the state is not divided among the processes: call pc.shard(state, mesh)")


@dataclass(frozen=True, eq=False)
class _OnPart:
    """An operation that runs another one on this rank's part of the batch, and combines the results of all ranks."""

    operation: Operation
    """The operation for a part of the batch."""
    ranks: Ranks
    wrt: Sequence[str | None]
    """The patterns of the gradients that the operation computes."""
    is_whole: bool
    """True if the part is not cut into slices. Then all ranks run the network equally often, and batch normalisation
    may use the statistics of the whole batch."""
    is_by_layer: bool
    """True if results of slices are means over the ranks already; see `by_layer`."""
    is_checked: bool
    """True if the ranks are known to send messages of one form."""

    def compares(self, purpose: Purpose) -> bool:
        return purpose.is_first and not self.is_checked

    def __call__(self, carry: Carry, purpose: Purpose, sum_gradients: SumGradients | None = None) -> Carry:
        if purpose.sharing == "none":
            return self.operation(carry, purpose)
        state, ranks = carry.state, self.ranks.comparing() if self.compares(purpose) else self.ranks
        share, end = self._run(carry, purpose, ranks)
        if purpose.sharing == "own":
            return end._replace(terms=carry.terms)
        after, used, terms = end
        _check_kept(state, after)
        own = None if after.grads is None else dict(after.grads)
        del end  # so that each gradient is freed when it has been sent
        if not self.is_by_layer:
            after = after.replace(grads=None)
            names = [name for pattern in self.wrt for name in matching_params(state.context.trainable, pattern)]
            has_shared = self.is_whole and share.num_examples > 0 and state.model.skeleton(train=True).has_batch_norms
            sum_gradients = dict if purpose.replaces_gradients else sum_gradients
            weight = _weight(share, terms)
            after = averaged(state, after, own, names, weight, ranks, sum_gradients, shares_statistics=has_shared)
        if not purpose.is_again:
            if purpose.watch is not None:
                warn_of_different_buffers(state, after, ranks)
            after = after.replace(
                buffers=with_buffers(ranks, state.buffers, after.buffers, share.num_examples),
                slots=with_slots(ranks, state.slots, after.slots, counts=share.num_examples > 0),
            )
        return Carry(after, used, carry.terms)

    def _run(self, carry: Carry, purpose: Purpose, ranks: Ranks) -> tuple[Share, Carry]:
        """Return this rank's share of the batch, and the end of its part, where the batch is whole again."""
        state = carry.state
        share, start = _start_of_part(state, ranks)
        purpose = purpose._replace(whole_batch=None)
        if purpose.sharing == "all":
            part = _part(share, state, ranks, shares_statistics=self.is_whole, is_cut_alike=self.is_by_layer)
            end = self.operation(Carry(start, carry.used), purpose._replace(part=part))
        else:
            end = self.operation(Carry(start.replace(denominators=state.denominators), carry.used), purpose)
        after = end.state.replace(batch=state.batch, first_example=state.first_example, denominators=state.denominators)
        if after.outputs is not state.outputs:
            after = after.replace(outputs=SealedOutputs(ranks.size))
        return share, end._replace(state=after)


def _check_part(to_loss: Operation, ranks: Ranks, placing: Placing | None, carry: Carry) -> None:
    """Check the buffers of this rank's part by their values, which a traced step does not have."""
    state = carry.state
    share, start = _start_of_part(state, ranks)
    is_by_layer = placing is not None and placing.is_by_layer
    if placing is not None and not is_by_layer:
        start = start.replace(params=placing.gathered(state.params))
    part = _part(share, state, ranks, shares_statistics=True)
    end = to_loss(Carry(start, carry.used), Purpose(part=part, is_first=True)).state
    warn_of_different_buffers(state, end, ranks)


def _part(share: Share, state: State, ranks: Ranks, **how: bool) -> SharedPart:
    return SharedPart(ranks, share, state.num_examples, state.batch, state.device, **how)


def _start_of_part(state: State, ranks: Ranks) -> tuple[Share, State]:
    """Return this rank's share of the batch, and the state at the start of its part."""
    share = ranks.share(state.batch, state.context.layout)
    first = share.first_example if state.first_example is None else state.first_example + share.first_example
    own = part_of(denominators(state), max(share.num_examples, 1), state.num_examples)
    return share, state.replace(batch=share.batch, first_example=first, denominators=own)


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
            processes have different states, batches or settings. In any step: batches differ in size, shape or dtype.

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
    if step.members != SINGLE:
        raise unsupported("a population", "several processes", f"data_parallel({step!r})")
    return step.replace(program=shared_program(step.program, _ranks(mesh)))


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
