"""Ghost batch normalisation: normalises parts of a batch by statistics of their own."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from purecompose import surgery
from purecompose._support.checks import check_whole
from purecompose.algorithms._parts.surgery import on_module, surgery_method
from purecompose.core.algorithm import Algorithm, factory
from purecompose.nn.layers.ghost_batchnorm import GhostBatchNorm, check_momentum, is_known


__all__ = ["GhostBatchNorm", "apply_ghost_batchnorm", "ghost_batchnorm", "ghost_batchnorm_rules"]


def ghost_batchnorm_rules(ghost_batch_size: int = 32) -> surgery.Rules:
    """Return the rules that replace batch normalisation; for `purecompose.surgery`.

    Args:
        ghost_batch_size: See `ghost_batchnorm`.

    Raises:
        TypeError, ValueError: As `ghost_batchnorm`.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm2d(8))
        >>> ghost_batchnorm_rules(16)[nn.BatchNorm2d](net[0], surgery.Site("0", 0, net, net)).ghost_batch_size
        16
    """
    check_whole(ghost_batch_size, "ghost_batchnorm: ghost_batch_size", 1)

    def norm(module: _BatchNorm, site: surgery.Site) -> nn.Module | None:
        if not is_known(module):
            return None
        # What the layer refuses, said with its place.
        check_momentum(module, f"ghost_batchnorm: {site.name or 'the network'}")
        return GhostBatchNorm(module, ghost_batch_size)

    return {nn.BatchNorm1d: norm, nn.BatchNorm2d: norm, nn.BatchNorm3d: norm, GhostBatchNorm: None}


apply_ghost_batchnorm = on_module("ghost_batchnorm", ghost_batchnorm_rules)


@factory
def ghost_batchnorm(ghost_batch_size: int = 32, *, name: str = "ghost_batchnorm") -> Algorithm:
    """Normalise parts of batches.

    A batch of B examples is taken in n = ceil(B / g) parts of equal size, or with one example less, with g =
    `ghost_batch_size`. In training each part is normalised by itself, and the running statistics r take a step for
    each, in order, with its mean or variance s:

        r <- (1 - m / n) r + m / n s        m: the momentum

    In evaluation nothing changes; a layer without running statistics has parts there, too. With microbatches the batch
    that is parted is the microbatch.

    timm's `BatchNormAct2d`, which has an activation in it, is replaced as well; its activation comes after the parts.
    Other layers with a forward of their own, hooks or parametrized tensors stay, and so does `nn.SyncBatchNorm`.

    Events: INIT. Reads and replaces: the model and its parameters' names; there are no new parameters.

    Args:
        ghost_batch_size: The greatest number of examples that are normalised together, 16 to 64 in the papers.
        name: Names it.

    Raises:
        TypeError, ValueError: A setting of the wrong kind or out of range. In the surgery: a layer with
            `momentum=None`.

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
    return surgery_method(name, ghost_batchnorm_rules(ghost_batch_size), {"ghost_batch_size": ghost_batch_size})
