"""data_parallel: a step that several processes compute together, each a part of the batch.

All processes hold the whole state and are given the whole batch. What is around the gradient (augmentation, the
update, averages) each computes for itself, to the same bits; forward, loss and gradient each computes for its own
part. So a batch may be drawn, mixed and chosen from as if there were one process, and the result is the same for any
number of them, as for any number of microbatches.
"""

import pickle
import re
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._support.checks import shown
from purecompose.core.application import Observe
from purecompose.core.compose import Prepared, Step
from purecompose.core.loop import Grad, Microbatches, Program
from purecompose.core.ranks import WATCHES, Ranks
from purecompose.core.state import State
from purecompose.transforms.lease import LASTING
from purecompose.transforms.rank_timeouts import naming_late_ranks


__all__ = ["DataParallel", "data_parallel"]


class DataParallel(Step):
    """A training step of several processes; made by `data_parallel`.

    Attributes:
        step: The step of one process.
    """

    def __init__(self, step: Step, ranks: Ranks | None, *, is_checked: bool = False) -> None:
        """Takes checked arguments, as `data_parallel` does; without ranks it is the step.

        Args:
            step: The step of one process.
            ranks: The processes.
            is_checked: Whether they are known to have the same states and batches, and to send messages of one form.
        """
        super().__init__(step.program, step.algorithms, step.passes, step.microbatches, step.microbatch_size)
        self.step, self.ranks = step, ranks
        self._checked_epoch: int | None = None
        self._checks = ranks is not None and not is_checked

    def prepare(self, state: State, batch: Any, *, purpose: str = "", draw: int | None = None) -> Prepared:
        """As a step does.

        Raises:
            ValueError: In the first step, and in the first of each epoch: the processes have different states, batches
                or settings.
        """
        prepared = super().prepare(state, batch, purpose=purpose, draw=draw)
        if self._checks and self._checked_epoch != state.timestamp.epoch:
            with naming_late_ranks(self.ranks, state.timestamp.batch):
                _check_alike(self, state, batch)
            self._checked_epoch = state.timestamp.epoch
        return prepared

    def fold(self, state: State, batch: Any, observe: Observe | None = None, **options: Any) -> State:
        """As a step does.

        Raises:
            RankTimeoutError: Another process does not answer.
        """
        with naming_late_ranks(self.ranks, state.timestamp.batch if isinstance(state, State) else -1):
            return super().fold(state, batch, observe, **options)

    def run_checked(self, bits: int, start: State, observe: Observe | None = None) -> State:
        """As a step does; messages between processes are compared before they are sent."""
        token = WATCHES.set(self._checks)
        try:
            return super().run_checked(bits, start, observe)
        finally:
            WATCHES.reset(token)

    def replace(self, **changes: Any) -> Step:
        """The step of several processes with these changes; a program that divides nothing is one process's alone."""
        step = self.step.replace(**changes)
        return DataParallel(step, self.ranks, is_checked=not self._checks) if _is_divided(step.program) else step

    def __reduce__(self) -> tuple[Any, ...]:
        raise pickle.PicklingError(
            "a data_parallel step cannot be pickled: it belongs to a process group. Pickle the step of one process, "
            "and call data_parallel(step) in each process"
        )

    def __repr__(self) -> str:
        return f"data_parallel({self.step!r}, size={1 if self.ranks is None else self.ranks.size})"


def data_parallel(step: Step, mesh: Any = None) -> DataParallel:
    """A step that several processes compute together: `step(state, batch)` on each of them, with the same arguments.

    Each process computes the part of the batch that falls to it, and gets the state that one process would have got
    from all of it, but for rounding. Batches need not divide evenly. What is drawn for an example does not depend on
    the process that computes it. Statistics of BatchNorm are those of the parts, and their means are kept.

    Args:
        step: What `compose` gave; `compile(data_parallel(step))` compiles it.
        mesh: A `torch.distributed.DeviceMesh` of one dimension, or a process group; by default all processes.

    Returns:
        A `Step`. States of all processes stay the same bit for bit, so one of them alone keeps checkpoints and
        reports. Metrics that are single floating numbers are means over the parts; others, and `outputs`, are those of
        the own part. What algorithms remember within a part (between BEFORE_FORWARD and AFTER_BACKWARD) is taken to be
        sums and flags: what each part adds is added up. `state.gradient` is the whole batch's. `evaluate` and whatever
        is outside of the step run on each process.

    Raises:
        TypeError: It is no composed step, or no mesh.
        RuntimeError: There is no process group: `torch.distributed.init_process_group` comes first. In a step: a part
            of the batch has changed params, optimizer, hparams or key, or the form of a slot; or messages differ.
            RankTimeoutError, a RuntimeError, names the ranks that have not answered within the process group's timeout.
        ValueError: A mesh of several dimensions; a process that is not in it; or a gradient in the program that no
            `Microbatches` is around, so that nothing would be divided. In the first step, and the first of each epoch:
            processes with different states, batches or settings.

    Example:
        >>> from purecompose import compose, loop_events
        >>> import tempfile
        >>> where = f"file://{tempfile.mkdtemp()}/store"
        >>> dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        >>> data_parallel(compose(loop_events))
        data_parallel(Step(no algorithms), size=1)
        >>> dist.destroy_process_group()
    """
    if type(step) is not Step:
        raise TypeError(
            f"data_parallel: expected a step made by compose, got {type(step).__name__}; it is compiled afterwards, "
            "compile(data_parallel(step)), and members of a population train in one process"
        )
    if not _is_divided(step.program):
        raise ValueError("data_parallel: the program has no Microbatches(...), so there is nothing to divide")
    return DataParallel(step, _ranks(mesh))


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
    return Ranks(group.group_name, rank, group.size()) if group.size() > 1 else None


def _is_divided(program: Program) -> bool:
    """Whether there is something to divide; raises a `ValueError` for a gradient outside of `Microbatches`."""
    if any(isinstance(node, Grad) for node in program):
        raise ValueError(
            "data_parallel: a Grad in the program is not inside of Microbatches(...), which is what processes divide: "
            "each would compute it for the whole batch. Put Microbatches around it"
        )
    return any(isinstance(node, Microbatches) for node in program)


def _check_alike(step: DataParallel, state: State, batch: Any) -> None:
    """Compares settings, states and batches by sums of their bits."""
    ranks, context = step.ranks, state.context
    assert ranks is not None
    settings = (
        [(algorithm.name, dict(algorithm.config)) for algorithm in step.algorithms],
        *(step.microbatches, step.microbatch_size, state.optimizer, context.trainable, context.precision),
        *(state.timestamp.run, state.timestamp.batch),
    )
    # Functions print with their addresses.
    words = re.sub(r" at 0x[0-9a-f]+", "", repr(settings))
    parts = {"batch": batches.tensors(batch), **{name: tree.leaves(getattr(state, name)) for name in ("key", *LASTING)}}
    found = [_digest(leaves, state.device) for leaves in parts.values()]
    found.append(torch.tensor(zlib.crc32(words.encode()), device=state.device))
    for name, agrees in zip([*parts, "settings"], ranks.agree(found), strict=True):
        if not agrees:
            raise ValueError(
                f"data_parallel: the {ranks.size} processes differ in their {name}: {_REMEDIES.get(name, _SAME_STATE)}"
            )


_SAME_STATE = (
    "all must begin with the same state: seed torch before the network is made, and give State.create the same key; to "
    "go on with a run, resume from the same checkpoint in each. If they were the same once, kernels have given other "
    "bits in one of them: see torch.use_deterministic_algorithms"
)
_REMEDIES = {
    "batch": "give each the whole batch, in one order, and not a part (no DistributedSampler): the step divides it",
    "key": "give State.create the same key in all",
    "settings": "algorithms, optimizer, frozen parameters, precision, microbatches and time must be the same in all",
}


def _digest(leaves: list[Any], device: torch.device) -> Tensor:
    """A number that hardly two lists of tensors have in common: 0-d int64."""
    total = torch.full((), len(leaves), dtype=torch.int64, device=device)
    for leaf in leaves:
        bits = (leaf if leaf.layout is torch.strided else leaf.to_dense()).detach().resolve_conj().resolve_neg()
        bits = (torch.view_as_real(bits) if bits.is_complex() else bits).contiguous()
        for part in bits.view(_BITS[bits.element_size()]).flatten().split(_CHUNK):
            places = 2 * torch.arange(part.numel(), device=part.device) + 1
            total = 31 * total + (part * places).sum().to(device)
        total = 31 * total + leaf.numel()
    return total


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**20
