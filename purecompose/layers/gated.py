"""Feed-forward layers with a gate.

    h = act(G x) * (N x),   y = W h

References:
    Noam Shazeer: GLU Variants Improve Transformer. 2020. https://arxiv.org/abs/2002.05202
    Yann N. Dauphin, Angela Fan, Michael Auli, David Grangier: Language Modeling with Gated Convolutional Networks. 2016.
    https://arxiv.org/abs/1612.08083
"""

from torch import Tensor, nn


__all__ = ["GatedLinearUnit"]


class GatedLinearUnit(nn.Module):
    """(..., d) to (..., d_ff), the product of an activated and a plain linear layer.

    Attributes:
        gate: G, (d, d_ff).
        linear: N, (d, d_ff).
        act: The gate's activation.
    """

    def __init__(
        self, features: int, width: int, act: nn.Module, *, gate_bias: bool = False, linear_bias: bool = False
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(features, width, bias=gate_bias)
        self.linear = nn.Linear(features, width, bias=linear_bias)
        self.act = act

    def forward(self, input: Tensor) -> Tensor:
        """(..., d) to (..., d_ff)."""
        return self.act(self.gate(input)) * self.linear(input)
