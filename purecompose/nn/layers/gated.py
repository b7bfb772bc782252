"""Feed-forward layers with a gate.

    h = act(G x) * (N x)

References:
    Noam Shazeer: GLU Variants Improve Transformer. 2020. https://arxiv.org/abs/2002.05202
    Yann N. Dauphin, Angela Fan, Michael Auli, David Grangier: Language Modeling with Gated Convolutional Networks.
    2016. https://arxiv.org/abs/1612.08083
"""

from collections.abc import Callable

from torch import Tensor, nn

from purecompose._support.checks import check_flag, check_whole, shown


class GatedLinearUnit(nn.Module):
    """Layer from (..., d) to (..., d_ff), the product of an activated and a plain linear layer.

    Args:
        features: d.
        width: d_ff.
        act: The gate's activation, a module or a function: the sigmoid for GLU, GELU for GEGLU, SiLU for SwiGLU, and
            `nn.Identity()` for the bilinear layer.
        gate_bias: True to give the gate a bias.
        linear_bias: True to give the linear layer a bias.

    Attributes:
        gate: G, (d, d_ff).
        linear: N, (d, d_ff).
        act: The gate's activation.

    Raises:
        TypeError, ValueError: A setting is of the wrong kind, or a size is below 1.

    Example:
        >>> import torch
        >>> GatedLinearUnit(4, 6, nn.SiLU())(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 3, 6])
    """

    def __init__(
        self,
        features: int,
        width: int,
        act: Callable[[Tensor], Tensor],
        *,
        gate_bias: bool = False,
        linear_bias: bool = False,
    ) -> None:
        super().__init__()
        check_whole(features, "GatedLinearUnit: features", 1)
        check_whole(width, "GatedLinearUnit: width", 1)
        check_flag(gate_bias, "GatedLinearUnit: gate_bias")
        check_flag(linear_bias, "GatedLinearUnit: linear_bias")
        if not callable(act) or isinstance(act, type):
            raise TypeError(
                f"GatedLinearUnit: act: expected a module or a function, such as nn.GELU(), got {shown(act)}"
            )
        self.gate: nn.Linear = nn.Linear(features, width, bias=gate_bias)
        self.linear: nn.Linear = nn.Linear(features, width, bias=linear_bias)
        self.act = act

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., d) to (..., d_ff)."""
        return self.act(self.gate(input)) * self.linear(input)
