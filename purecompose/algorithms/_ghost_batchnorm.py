"""Ghost batch normalisation: normalises each part of a batch by its own statistics."""

from typing import Annotated

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from purecompose import surgery
from purecompose.algorithms._parts.checks import Where
from purecompose.algorithms._parts.surgery import surgery_method
from purecompose.core.algorithm import Algorithm, factory
from purecompose.nn.layers.norms import GhostBatchNorm, check_momentum, is_known
from purecompose.schedule.declared import Within


@factory
def ghost_batchnorm(
    ghost_batch_size: Annotated[int, Within(1)] = 32, *, where: Where = None, name: str = "ghost_batchnorm"
) -> Algorithm:
    """Normalise each part of a batch separately.

    A batch of B examples is split into n = ceil(B / g) parts whose sizes differ by at most one, with g =
    `ghost_batch_size`. In training each part is normalised separately, and the running statistics r are updated for
    each part in order, with its mean or variance s:

        r <- (1 - m / n) r + m / n s        m: the momentum

    Evaluation is unchanged, except that a layer without running statistics also splits its batches there. With
    microbatches, each microbatch is split.

    timm's `BatchNormAct2d`, which contains an activation, is replaced as well; the activation is applied after the
    parts are joined. Other layers that override forward, or have hooks or parametrized tensors, are not replaced, and
    neither is `nn.SyncBatchNorm`.

    Events: INIT. Reads and replaces: the model and its parameters' names; there are no new parameters.

    Args:
        ghost_batch_size: The greatest number of examples that are normalised together, 16 to 64 in the papers.
        where: Pattern or patterns (`fnmatch`) of the names of modules to change, including their submodules, such as
            "student.*"; by default all except parts without trainable parameters, such as a frozen teacher.
        name: Name of the algorithm.

    Raises:
        TypeError, ValueError: A setting of the wrong type or out of range. At INIT: a layer with `momentum=None`.

    Warns:
        UserWarning: At INIT: the network has no batch normalisation of one to three dimensions.

    Example:
        >>> ghost_batchnorm(16)
        ghost_batchnorm(ghost_batch_size=16)

    References:
        Elad Hoffer, Itay Hubara, Daniel Soudry: Train longer, generalize better. NeurIPS 2017.
        https://arxiv.org/abs/1705.08741
        Neofytos Dimitriou, Ognjen Arandjelovic: A New Look at Ghost Normalization. 2020.
        https://arxiv.org/abs/2007.08554
    """

    def norm(module: _BatchNorm, site: surgery.Site) -> nn.Module | None:
        if not is_known(module):
            return None
        # GhostBatchNorm checks this too, but its message cannot name the layer.
        check_momentum(module, f"ghost_batchnorm: {site.name or 'the network'}")
        return GhostBatchNorm(module, ghost_batch_size)

    rules = {nn.BatchNorm1d: norm, nn.BatchNorm2d: norm, nn.BatchNorm3d: norm, GhostBatchNorm: None}
    return surgery_method(name, rules, where)
