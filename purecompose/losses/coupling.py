"""Losses that compare the examples of a batch with each other."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from purecompose._support.checks import shown
from purecompose.losses.from_model import ModelLoss


Loss = TypeVar("Loss", bound=Callable[..., Any])


def over_batch(loss: Loss) -> Loss:
    """Declare that a loss couples examples: it is not a mean of losses of single examples.

    Contrastive losses (NT-Xent, InfoNCE, CLIP) and normalisation over the batch are such losses. In microbatches and on
    several processes, the outputs of all slices are computed first, the loss is that of all outputs together, and the
    gradient is propagated back slice by slice ("GradCache"). The result is that of the whole batch; only the network's
    outputs are held for all of it. Each slice passes forward through the network twice. BatchNorm still uses the
    statistics of each slice.

    A sum of means with different denominators is such a loss, too, but needs no second pass if the targets determine
    the denominators and the loss declares them; see `purecompose.losses`.

    A class may set the attribute `couples_examples = True` instead of using this function.

    Args:
        loss: `(outputs, targets) -> loss`, a function or module. The tensors in outputs and targets have the examples
            along their first dimension (`batch_dim` of `State.create`).

    Returns:
        The loss, marked; the argument is not changed.

    Raises:
        TypeError: It is not a function, or `losses.model_loss`, which is computed in the network.

    References:
        Luyu Gao, Yunyi Zhang, Jiawei Han, Jamie Callan: Scaling Deep Contrastive Learning Batch Size under Memory
        Limited Setup. 2021. https://arxiv.org/abs/2101.06983

    Example:
        >>> import torch
        >>> def info_nce(outputs, targets):
        ...     similarities = outputs["text"] @ outputs["image"].T
        ...     return torch.nn.functional.cross_entropy(similarities, torch.arange(len(similarities)))
        >>> couples_examples(info_nce), couples_examples(over_batch(info_nce))
        (False, True)
    """
    if not callable(loss) or isinstance(loss, (type, ModelLoss)):
        raise TypeError(f"losses.over_batch: expected a function (outputs, targets) -> loss, got {shown(loss)}")
    takes_mark = not inspect.isroutine(loss) and hasattr(loss, "__dict__")  # an object with __slots__ does not
    marked: Any = copy.copy(loss) if takes_mark else functools.partial(loss)
    object.__setattr__(marked, "couples_examples", True)
    return marked


def couples_examples(loss: Any) -> bool:
    """Return whether a loss declares that it couples examples; see `over_batch`.

    Args:
        loss: A loss.

    Example:
        >>> import torch
        >>> couples_examples(torch.nn.functional.mse_loss), couples_examples(over_batch(torch.nn.functional.mse_loss))
        (False, True)
    """
    return getattr(loss, "couples_examples", False)
