"""data_parallel: a step that several processes compute together, each a part of the batch.

All processes hold the whole state and are given the whole batch. What is around the gradient (augmentation, the
update, averages) each computes for itself, to the same bits; forward, loss and gradient each computes for its own
part. So a batch may be drawn, mixed and chosen from as if there were one process, and the result is the same for any
number of them, as for any number of microbatches.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from purecompose import batch as batches, tree
from purecompose._checks import shown
from purecompose.compose import Prepared, Step
from purecompose.loop import Grad, Microbatches, Program
from purecompose.ranks import Ranks
from purecompose.state import State


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
            is_checked: Whether they are known to have the same states and batches.
        """
        super().__init__(step.program, step.algorithms, step.passes, step.microbatches, step.microbatch_size)
        self.step, self.ranks = step, ranks
        self._is_checked = is_checked or ranks is None

    def prepare(self, state: State, batch: Any, *, purpose: str = "", draw: int | None = None) -> Prepared:
        """As a step does.

        Raises:
            ValueError: The first time: the processes have different states or batches.
        """
        prepared = super().prepare(state, batch, purpose=purpose, draw=draw)
        if not self._is_checked and self.ranks is not None:
            _check_alike(self.ranks, state, batch)
            self._is_checked = True
        return prepared

    def replace(self, **changes: Any) -> Step:
        """The step of several processes with these changes; a program that divides nothing is one process's alone."""
        step = self.step.replace(**changes)
        _check_divided(step.program)
        return DataParallel(step, self.ranks) if any(isinstance(node, Microbatches) for node in step.program) else step

    def __repr__(self) -> str:
        return f"data_parallel({self.step!r}, {1 if self.ranks is None else self.ranks.size} ranks)"


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
        reports. Metrics that are single numbers are means over the parts; others, and `outputs`, are those of the own
        part. What algorithms remember within a part (between BEFORE_FORWARD and AFTER_BACKWARD) is taken to be sums,
        and flags: of what each part adds all is added. `state.gradient` is the whole batch's. `evaluate` and whatever
        is outside of the step run on each process.

    Raises:
        TypeError: It is no composed step, or no mesh.
        RuntimeError: There is no process group: `torch.distributed.init_process_group` comes first.
        ValueError: A mesh of several dimensions; a process that is not in it; or a gradient in the program that no
            `Microbatches` is around, so that nothing would be divided. In the first step: processes with different
            states or batches.

    Example:
        >>> from purecompose import compose, loop_events
        >>> import tempfile
        >>> where = f"file://{tempfile.mkdtemp()}/store"
        >>> dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        >>> data_parallel(compose(loop_events))
        data_parallel(Step(no algorithms), 1 ranks)
        >>> dist.destroy_process_group()
    """
    if type(step) is not Step:
        raise TypeError(
            f"data_parallel: expected a step made by compose, got {type(step).__name__}; it is compiled afterwards, "
            "compile(data_parallel(step)), and members of a population train in one process"
        )
    _check_divided(step.program)
    if not any(isinstance(node, Microbatches) for node in step.program):
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


def _check_divided(program: Program) -> None:
    """Raises a `ValueError` for a gradient outside of `Microbatches`."""
    if any(isinstance(node, Grad) for node in program):
        raise ValueError(
            "data_parallel: a Grad in the program is not inside of Microbatches(...), which is what processes divide: "
            "each would compute it for the whole batch. Put Microbatches around it"
        )


def _check_alike(ranks: Ranks, state: State, batch: Any) -> None:
    """Compares states and batches by sums of their bits, once."""
    parts: dict[str, Any] = {
        "batch": batches.tensors(batch),
        "key": state.key,
        "params": state.params,
        "buffers": state.buffers,
        "opt_state": state.opt_state,
        "slots": state.slots,
        "hparams": state.hparams,
    }
    found = [_digest(tree.leaves(part), state.device) for part in parts.values()]
    found.append(torch.tensor(state.timestamp.batch, device=state.device))
    least, most = (torch.stack(ranks.sums(found, how)).tolist() for how in ("min", "max"))
    for name, low, high in zip([*parts, "time"], least, most, strict=True):
        if low != high:
            raise ValueError(
                f"data_parallel: the {ranks.size} processes differ in their {name}: {_REMEDIES.get(name, _SAME_STATE)}"
            )


_SAME_STATE = (
    "all must begin with the same state: seed torch before the network is made, and give State.create the same key; "
    "to go on with a run, load the checkpoint in each"
)
_REMEDIES = {
    "batch": "give each the whole batch, and not a part (no DistributedSampler): the step divides it",
    "key": "give State.create the same key in all",
}


def _digest(leaves: list[Any], device: torch.device) -> Tensor:
    """A number that hardly two lists of tensors have in common: 0-d int64."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for leaf in leaves:
        bits = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        bits = bits.detach().contiguous().view(_BITS[bits.element_size()])
        total = 31 * total + bits.sum(dtype=torch.int64).to(device) + leaf.numel()
    return total


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
