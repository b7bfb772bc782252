"""Ghost batch normalisation: normalises parts of a batch by statistics of their own.

A batch of B examples is taken in n = ceil(B / g) parts of equal size, or with one example less, with g =
`ghost_batch_size`. In training each part is normalised by itself, and the running statistics take a step with
momentum / n for each. In evaluation nothing changes.

With microbatches the batch that is parted is the microbatch.

Events: INIT. Reads and replaces: the model and its parameters' names; there are no new parameters.

What differs from the original: a batch smaller than g is one part, in evaluation as in training, not an error; no part
is smaller than the others by more than one; `momentum=None` is refused when the method is applied.

References:
    Elad Hoffer, Itay Hubara, Daniel Soudry: Train longer, generalize better. NeurIPS 2017.
    https://arxiv.org/abs/1705.08741
    Neofytos Dimitriou, Ognjen Arandjelovic: A New Look at Ghost Normalization. 2020. https://arxiv.org/abs/2007.08554
"""

from torch import nn

from purecompose import surgery
from purecompose._checks import check_whole
from purecompose.algorithm import Algorithm
from purecompose.algorithms._surgery import surgery_method
from purecompose.layers.ghost_batchnorm import GhostBatchNorm


__all__ = ["ghost_batchnorm"]


def ghost_batchnorm(ghost_batch_size: int = 32, *, name: str = "ghost_batchnorm") -> Algorithm:
    """Normalises parts of batches; see `purecompose.algorithms.ghost_batchnorm`.

    Args:
        ghost_batch_size: The greatest number of examples that are normalised together, 16 to 64 in the papers.
        name: Names it.

    Raises:
        TypeError, ValueError: A setting of the wrong kind or out of range. At INIT: a layer with `momentum=None`.

    Warns:
        UserWarning: At INIT: the network has no batch normalisation of one to three dimensions.

    Example:
        >>> ghost_batchnorm(16)
        ghost_batchnorm(ghost_batch_size=16)
    """
    check_whole(ghost_batch_size, "ghost_batchnorm: ghost_batch_size", 1)

    def norm(module: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, site: surgery.Site) -> nn.Module:
        del site
        return GhostBatchNorm(module, ghost_batch_size)

    rules = dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), norm)
    return surgery_method(name, rules, {"ghost_batch_size": ghost_batch_size}, done=(GhostBatchNorm,))
