"""`data_parallel`: a step that several processes compute together, each on a part of the batch.

All processes hold the whole state and are given the whole batch. Each computes everything around the gradient
(augmentation, the update, averages) for the whole batch, to the same bits, but forward, loss and gradient only for its
part. So examples may be drawn, mixed and selected as if there were one process, and the result is the same for any
number of processes, as for any number of microbatches.
"""

from typing import Any

import torch.distributed as dist

from purecompose._support.checks import shown
from purecompose.core.compose import Step
from purecompose.core.members import SINGLE
from purecompose.core.ranks import Ranks
from purecompose.transforms.shared import shared_program


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
        raise ValueError(f"data_parallel: members of a population train in one process, got {step!r}")
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
