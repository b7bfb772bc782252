"""Weight standardization: convolutions with filters of mean 0 and variance 1.

    W' = (W - mean) / sqrt(var + 1e-10),   over all dims of W but the first, with the biased variance

W trains, W' computes: gradients flow through the standardization, and the optimizer moves the raw weights. Names and
values of parameters stay as they are, so that a checkpoint fits both; `surgery.replace` with the rules of
`purecompose.layers.standardized` undoes it.

Events: INIT. Reads and replaces: the model alone.

What differs from the original: parameters keep their names; applying it twice changes nothing; the method is required
when a checkpoint is loaded, since the same weights mean another function; a network without convolutions is warned
about. The convolutions that are left out are the last ones in the order of definition.

References:
    Siyuan Qiao, Huiyu Wang, Chenxi Liu, Wei Shen, Alan Yuille: Micro-Batch Training with Batch-Channel Normalization and
    Weight Standardization. 2019. https://arxiv.org/abs/1903.10520
"""

from purecompose._checks import check_whole
from purecompose.algorithm import Algorithm


__all__ = ["weight_standardization"]


def weight_standardization(n_last_layers_ignore: int = 0, *, name: str = "weight_standardization") -> Algorithm:
    """Standardizes the filters of convolutions; see `purecompose.algorithms.weight_standardization`.

    Args:
        n_last_layers_ignore: How many convolutions at the end stay as they are: those that give the answers.
        name: Names it.

    Raises:
        TypeError, ValueError: A setting of the wrong kind or out of range.

    Warns:
        UserWarning: At INIT: the network has no convolutions but those that are left out.

    Example:
        >>> weight_standardization(1)
        weight_standardization(n_last_layers_ignore=1)
    """
    check_whole(n_last_layers_ignore, "weight_standardization: n_last_layers_ignore", 0)
