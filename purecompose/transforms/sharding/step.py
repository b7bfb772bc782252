"""`fully_sharded`: a step of several processes, each of which holds some rows of every parameter."""

from typing import Any, Literal

import torch.distributed as dist

from purecompose._support.checks import shown
from purecompose.combinations import unsupported
from purecompose.core.algorithm import Trait
from purecompose.core.compose import Step
from purecompose.core.operation import SINGLE, walk
from purecompose.core.ranks import Ranks
from purecompose.core.scopes import Microbatches
from purecompose.transforms.data_parallel import shared_program
from purecompose.transforms.sharding.gathering import Placing
from purecompose.transforms.sharding.placing import check_mesh


def fully_sharded(step: Step, mesh: Any, gather: Literal["step", "layer"] = "step") -> Step:
    """Return a step that several processes compute together, each holding some rows of every parameter.

    It computes what `data_parallel(step)` does, for a state made by `shard(state, mesh)`. For the part of a step that
    computes its gradient, parameters are gathered; gradients are summed and divided. Everything else, such as the
    update and averages of weights, is computed on each process's rows.

    With `gather="step"`, all parameters are gathered at once: during a gradient a process holds all of them, and all
    gradients, and the messages have as many bytes as those of `data_parallel`, whatever the number of microbatches.
    With `gather="layer"`, each function of the network gathers the parameters that it reads, in the forward pass and
    again in the backward pass, and a gradient is summed and divided once it is complete: a process holds those of one
    layer at a time. Messages have half as many bytes again, for each microbatch, and all processes must call the same
    layers in the same order, whatever their examples.

    Args:
        step: A step made by `compose`.
        mesh: The `torch.distributed.DeviceMesh` of `shard`. The batch is divided among all of its processes.
        gather: `"step"`, or `"layer"` for networks whose parameters and gradients do not fit in one process.

    Returns:
        A `Step`, as that of `data_parallel`; each process calls it with its sharded state and the same whole batch.

    Raises:
        TypeError, RuntimeError, ValueError: As `data_parallel`; a mesh of several dimensions does not contain all
            processes; or, with `gather="layer"`, an algorithm needs the gradients of parts of the batch
            (`gradient_noise_scale`, `per_example_clipping`). In a step: an algorithm takes the gradient of one
            process's part at parameters of its own (`sam(per_rank=True)`).

    Example::

        mesh = torch.distributed.init_device_mesh("cuda", (8,))
        step = fully_sharded(compose(loop_events, [alg.ema()]), mesh)
        state = shard(step.init(state), mesh)

    References:
        Samyam Rajbhandari, Jeff Rasley, Olatunji Ruwase, Yuxiong He: ZeRO: Memory Optimizations Toward Training
        Trillion Parameter Models. SC 2020.
    """
    if not isinstance(step, Step):
        raise TypeError(f"fully_sharded: expected a step made by compose, got {shown(step)}")
    check_mesh(mesh, "fully_sharded")
    if step.members != SINGLE:
        raise unsupported("a population", "several processes", f"fully_sharded({step!r})")
    if gather not in ("step", "layer"):
        raise ValueError(f"fully_sharded: gather={gather!r}: expected 'step' or 'layer'")
    if gather == "layer":
        check_needs_no_parts(step)
    last = mesh.ndim - 1
    owners, *copies = (Ranks.of(mesh.get_group(dim)) for dim in (last, *range(last)))
    everyone = owners if mesh.ndim == 1 else Ranks.of(dist.group.WORLD)
    if everyone.size != mesh.size():
        raise ValueError(
            f"fully_sharded: a mesh of several dimensions must contain all {everyone.size} processes, got {mesh}"
        )
    placing = Placing(owners, tuple(copies), is_by_layer=gather == "layer")
    return step.replace(program=shared_program(step.program, everyone, placing=placing))


def check_needs_no_parts(step: Step) -> None:
    """Raise a `ValueError` if a step needs gradients of parts of the batch, which no process has layer by layer."""
    for algorithm in step.algorithms:
        for trait in (Trait.MEASURES_MICROBATCHES, Trait.CLIPS_EXAMPLES):
            if trait in algorithm.traits:
                what = "methods that read gradients of parts of the batch"
                raise unsupported('fully_sharded(gather="layer")', what, algorithm.name)
    for node in step.program:
        if sum(isinstance(inner, Microbatches) for inner in walk([node])) > 1:
            raise unsupported('fully_sharded(gather="layer")', "a Microbatches within another")
