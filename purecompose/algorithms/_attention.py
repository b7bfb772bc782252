"""Methods on attention: normalised queries and keys."""

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from purecompose import surgery
from purecompose.algorithms._parts.checks import Where
from purecompose.algorithms._parts.surgery import Derived, changed, stand_in, surgery_method
from purecompose.core.algorithm import Algorithm, factory
from purecompose.nn.layers._forms import computes_as
from purecompose.nn.layers.transformer import HeadNorm, SelfAttention
from purecompose.schedule.declared import Within


_BERT, _GPT2, _ROBERTA = (f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "roberta"))


@factory
def qk_norm(
    eps: Annotated[float, Within(0, above=True)] = 1e-6,
    *,
    scale: Annotated[float, Within(0, above=True)] | None = None,
    where: Where = None,
    name: str = "qk_norm",
) -> Algorithm:
    """Normalise the queries and keys of each head before their product.

        logits = scale * norm(q)_i norm(k)_j,    norm(x) = x / sqrt(mean(x^2) + eps),   scale = 1 / sqrt(d) by default

    The mean is over the d numbers of a head, so that a logit is at most scale * d, whatever the weights. The norm has
    no parameters, and biases of attention (`alibi`) are added to the logits as before.

    It supports `layers.SelfAttention`, used by `models.gpt` and `models.vit`, and the self-attention of GPT-2, BERT and
    RoBERTa in Hugging Face's transformers, whose caches then hold normalised keys. Attention that overrides forward is
    not changed.

    Events: INIT. Reads and replaces: the model only; parameters keep their names.

    Args:
        eps: Number that is added to the mean of the squares.
        scale: Factor of the products, by default 1 / sqrt(d); modded-nanogpt has 0.12 with d = 128.
        where: Patterns (`fnmatch`) of modules to change, with all that they contain; by default all but frozen parts.
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no supported attention.

    Example:
        >>> qk_norm(scale=0.12)
        qk_norm(eps=1e-06, scale=0.12)

    References:
        Alex Henry et al.: Query-Key Normalization for Transformers. Findings of EMNLP 2020.
        https://arxiv.org/abs/2010.04245
        Mostafa Dehghani et al.: Scaling Vision Transformers to 22 Billion Parameters. ICML 2023.
        https://arxiv.org/abs/2302.05442
        Keller Jordan et al.: modded-nanogpt. 2024. https://github.com/KellerJordan/modded-nanogpt
    """

    def attention(module: SelfAttention, site: surgery.Site) -> nn.Module | None:
        del site
        if module.qk_norm is not None or not computes_as(module, SelfAttention):
            return None
        return changed(module, qk_norm=HeadNorm(eps, scale))

    def gpt2(module: Any, site: surgery.Site) -> nn.Module | None:
        del site
        return None if module.is_cross_attention else normed(module, module.head_dim, 2 * module.embed_dim, "c_attn")

    def bert(module: Any, site: surgery.Site) -> nn.Module | None:
        del site
        return normed(module, module.attention_head_size, module.all_head_size, "query", "key")

    def normed(module: nn.Module, width: int, num_normed: int, *names: str) -> nn.Module | None:
        layers: dict[str, Any] = {name: module.get_submodule(name) for name in names}
        if any(isinstance(layer, NormedHeads) or "forward" in vars(layer) for layer in layers.values()):
            return None
        new: dict[str, Any] = {
            name: changed(layer, NormedHeads, qk_norm=HeadNorm(eps, scale)) for name, layer in layers.items()
        }
        for layer in new.values():
            layer.head_width, layer.num_normed = width, num_normed
        return changed(module, **new)

    rules = {
        HeadNorm: None,
        SelfAttention: attention,
        stand_in(_GPT2, "GPT2Attention"): gpt2,
        stand_in(_BERT, "BertSelfAttention"): bert,
        stand_in(_ROBERTA, "RobertaSelfAttention"): bert,
    }
    return surgery_method(name, rules, where)


class NormedHeads(Derived):
    """Layer whose output has queries, keys or both, which it normalises, and possibly values after them."""

    qk_norm: HeadNorm
    head_width: int
    num_normed: int

    __repr__ = nn.Module.__repr__  # that of GPT-2's layers would hide the norm

    def forward(self, input: Tensor) -> Tensor:
        """Compute the original forward, (..., features), and normalise the heads in the first `num_normed` of them."""
        output = super().forward(input)
        normed, values = output.tensor_split((self.num_normed,), -1)
        normed = self.qk_norm(normed.unflatten(-1, (-1, self.head_width))).flatten(-2)
        return torch.cat([normed, values], -1) if values.shape[-1] else normed
