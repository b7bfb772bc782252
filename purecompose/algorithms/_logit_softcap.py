"""Soft cap of logits: the outputs of the last linear layer stay between two bounds.

    logits   become   cap * tanh(logits / cap)

It is a surgery on the layer and not a change of `state.outputs`, so that evaluation, prediction, exported modules and
losses that models compute themselves all see the same outputs.
"""

import math
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from purecompose import surgery
from purecompose.algorithms._parts.checks import Where
from purecompose.algorithms._parts.surgery import Derived, changed, surgery_method
from purecompose.core.algorithm import Algorithm, factory
from purecompose.schedule.declared import Within


class SoftCapped(Derived):
    """Layer whose outputs are between -cap and cap."""

    cap: float

    def forward(self, input: Tensor) -> Tensor:
        """Compute the original forward, and cap * tanh(output / cap)."""
        return self.cap * torch.tanh(super().forward(input) / self.cap)

    def extra_repr(self) -> str:
        """Return the layer's settings and the cap."""
        return f"{super().extra_repr()}, cap={self.cap}"


@factory
def logit_softcap(
    cap: Annotated[float, Within(0, above=True, or_infinite=True)] = 15.0,
    *,
    where: Where = None,
    name: str = "logit_softcap",
) -> Algorithm:
    """Keep logits between -cap and cap.

        logits   become   cap * tanh(logits / cap)

    Small logits hardly change, and the gradient of large ones tends to 0. It acts on the network's last linear layer in
    the order of definition, which computes the logits in the library's own networks and in most others; choose another
    layer by `where`.

    Events: INIT. Reads and replaces: the model only; parameters keep their names.

    Args:
        cap: The bound, above 0; infinity changes nothing.
        where: Patterns (`fnmatch`) of modules, of whose linear layers, with all that they contain, the last one is
            changed, such as "head"; by default all but frozen parts.
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no linear layer, or its last one has a forward set on the instance.

    Example:
        >>> logit_softcap(30.0)
        logit_softcap(cap=30.0)

    References:
        Gemma Team: Gemma 2: Improving Open Language Models at a Practical Size. 2024. https://arxiv.org/abs/2408.00118
        Irwan Bello et al.: Neural Combinatorial Optimization with Reinforcement Learning. 2016.
        https://arxiv.org/abs/1611.09940
    """

    def last(module: nn.Linear, site: surgery.Site) -> nn.Module | None:
        linears = [one for one in site.reach if isinstance(one, nn.Linear)]
        if module is not linears[-1] or "forward" in vars(module):
            return None
        new: Any = changed(module, SoftCapped)
        new.cap = cap
        return new

    return surgery_method(name, {SoftCapped: None, nn.Linear: last}, where, is_neutral=math.isinf(cap))
