"""`fully_sharded`: a step of several processes, each of which holds some rows of every parameter."""

from typing import Any

import torch.distributed as dist

from purecompose._support.checks import shown
from purecompose.core.compose import Step
from purecompose.core.members import SINGLE
from purecompose.core.ranks import Ranks
from purecompose.transforms.data_parallel import shared_program
from purecompose.transforms.sharding.gathering import Placing
from purecompose.transforms.sharding.placing import check_mesh


__all__ = ["fully_sharded"]


def fully_sharded(step: Step, mesh: Any) -> Step:
    """Return a step that several processes compute together, each holding some rows of every parameter.

    It computes what `data_parallel(step)` does, for a state made by `shard(state, mesh)`. For the part of a step that
    computes its gradient, parameters are gathered; gradients are summed and divided at once. Everything else, such as
    the update and averages of weights, is computed on each process's rows. So a process needs its part of parameters,
    gradients and the optimizer's memory, and during a gradient all parameters and gradients in addition. The messages
    have as many bytes as those of `data_parallel`.

    Args:
        step: A step made by `compose`.
        mesh: The `torch.distributed.DeviceMesh` of `shard`. The batch is divided among all of its processes.

    Returns:
        A `Step`, as that of `data_parallel`; each process calls it with its sharded state and the same whole batch.

    Raises:
        TypeError, RuntimeError, ValueError: As `data_parallel`, or a mesh of several dimensions does not contain all
            processes. In a step: an algorithm takes the gradient of one
            process's part at parameters of its own (`sam(per_rank=True)`).
    """
    if not isinstance(step, Step):
        raise TypeError(f"fully_sharded: expected a step made by compose, got {shown(step)}")
    check_mesh(mesh, "fully_sharded")
    if step.members is not SINGLE:
        raise ValueError(f"fully_sharded: members of a population train in one process, got {step!r}")
    last = mesh.ndim - 1
    owners, *copies = (_ranks(mesh.get_group(dim)) for dim in (last, *range(last)))
    everyone = owners if mesh.ndim == 1 else _ranks(dist.group.WORLD)
    if everyone.size != mesh.size():
        raise ValueError(
            f"fully_sharded: a mesh of several dimensions must contain all {everyone.size} processes, got {mesh}"
        )
    return step.replace(program=shared_program(step.program, everyone, placing=Placing(owners, tuple(copies))))


def _ranks(group: Any) -> Ranks:
    return Ranks(group.group_name, dist.get_rank(group), group.size())
