"""Changes of transformers from speed runs: normalised queries and keys, bounded logits, and value embeddings."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from purecompose import surgery
from purecompose._support.specs import check_whole, shown
from purecompose.algorithms._parts import Derived, Where, changed, stand_in, surgery_method
from purecompose.core.algorithm import Algorithm, factory
from purecompose.nn.layers.replacing import computes_as, is_plain
from purecompose.nn.layers.transformer import HeadNorm, SelfAttention
from purecompose.nn.models.transformer import GPT, TransformerBlock
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

    The mean is over the d numbers of a head, so that a logit is at most scale * d. The norm has no parameters.

    It supports `layers.SelfAttention`, used by `models.gpt` and `models.vit`, and the self-attention of GPT-2, BERT and
    RoBERTa in Hugging Face's transformers. Attention that overrides forward is not changed.

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


class SoftCapped(Derived):
    """Layer whose outputs are between -cap and cap."""

    cap: float

    def forward(self, input: Tensor) -> Tensor:
        """Compute the original forward, and cap * tanh(output / cap)."""
        return self.cap * torch.tanh(super().forward(input) / self.cap)

    def extra_repr(self) -> str:
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

    It acts on the network's last linear layer in the order of definition; choose another layer by `where`. The layer
    itself is changed, so evaluation, exported networks and losses that models compute have the same outputs.

    Events: INIT. Reads and replaces: the model only; parameters keep their names.

    Args:
        cap: The bound, above 0; infinity changes nothing.
        where: Patterns (`fnmatch`) of modules, of whose linear layers, with all that they contain, the last one is
            changed, such as "head"; by default those of the whole network.
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no linear layer, or its last one is frozen or has a forward set on the
            instance.

    Example:
        >>> logit_softcap(30.0)
        logit_softcap(cap=30.0)

    References:
        Gemma Team: Gemma 2: Improving Open Language Models at a Practical Size. 2024. https://arxiv.org/abs/2408.00118
        Irwan Bello et al.: Neural Combinatorial Optimization with Reinforcement Learning. 2016.
        https://arxiv.org/abs/1611.09940
    """

    def last(module: nn.Linear, site: surgery.Site) -> nn.Module | None:
        # A frozen head is out of reach, but the layer before it is not the last one of the network.
        within = site.root.modules() if where is None else site.reach
        linears = [one for one in within if isinstance(one, nn.Linear)]
        if module is not linears[-1] or "forward" in vars(module):
            return None
        new: Any = changed(module, SoftCapped)
        new.cap = cap
        return new

    return surgery_method(name, {SoftCapped: None, nn.Linear: last}, where, is_neutral=math.isinf(cap))


class ValueMix(nn.Module):
    """Layer that adds embeddings to the values of attention: `weight[0] * values + weight[1] * embeddings`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.ones(2))

    def forward(self, values: Tensor, embedded: Tensor) -> Tensor:
        """Return values (N, H, L, d / H) mixed with embeddings (N, L, d), in the dtype of the values."""
        own, other = self.weight.to(values.dtype).unbind()
        heads = embedded.to(values.dtype).unflatten(-1, (values.shape[1], -1)).transpose(1, 2)
        return own * values + other * heads


class MixedAttention(Derived):
    """`SelfAttention` whose values are mixed with embeddings."""

    def forward(self, input: Tensor, embedded: Tensor) -> Tensor:
        """Map (N, L, d) and the embeddings (N, L, d) to (N, L, d)."""
        layer: Any = self
        query, key, value = layer.heads(input)
        return layer.attend(query, key, layer.mix(value, embedded))


class MixedBlock(Derived):
    """`TransformerBlock` whose attention takes embeddings."""

    def forward(self, inputs: Tensor, embedded: Tensor) -> Tensor:
        """Map (N, L, d) and the embeddings (N, L, d) to (N, L, d)."""
        block: Any = self
        attended = inputs + block.dropout(block.attention(block.norm1(inputs), embedded))
        return attended + block.dropout(block.feed_forward(block.norm2(attended)))


class MixedGPT(Derived):
    """`GPT` some of whose blocks take embeddings of the tokens."""

    def through_blocks(self, inputs: Tensor, tokens: Tensor) -> Tensor:
        """Return the output of the blocks for (N, L, d) and tokens (N, L)."""
        net: Any = self
        embedded = net.values(tokens)
        for block in net.blocks:
            inputs = block(inputs, embedded) if isinstance(block, MixedBlock) else block(inputs)
        return inputs


def _checked_blocks(blocks: Any, where: str) -> tuple[int, ...]:
    """Require the numbers of blocks, at least one; return them as a tuple."""
    if not isinstance(blocks, Sequence) or isinstance(blocks, str) or not blocks:
        raise TypeError(f"{where}: expected numbers of blocks, such as (0, -1), got {shown(blocks)}")
    return tuple(check_whole(number, where) for number in blocks)


@factory
def value_embeddings(
    blocks: Annotated[Sequence[int], _checked_blocks] = (0, -1), *, where: Where = None, name: str = "value_embeddings"
) -> Algorithm:
    """Add a second embedding of the tokens to the values of attention.

        values of a block   become   a * values + b * E[tokens]

    The embedding E, of the shape of the network's own and initialised like it (standard deviation 0.02), is shared by
    the blocks; each has its numbers a and b, which start at 1.

    It supports the class of `models.gpt`. The tokens are passed on to the blocks as arguments, so methods that look for
    blocks with one argument, such as `stochastic_depth`, leave the new blocks as they are.

    Events: INIT, after `alibi` and `qk_norm`. Reads and replaces: the model, its parameters and the optimizer's state.

    Args:
        blocks: Numbers of the blocks, from 0 on, or from -1 backwards; by default the first and the last one.
        where: Patterns (`fnmatch`) of modules to change, with all that they contain; by default all but frozen parts.
        name: Name of the algorithm and of the draws of new weights.

    Raises:
        TypeError, ValueError: Not numbers. At INIT: the network lacks such a block, or it has been replaced by another
            kind of block.

    Warns:
        UserWarning: At INIT: the network contains no `models.GPT`.

    Example:
        >>> value_embeddings((0, 1, -1))
        value_embeddings(blocks=(0, 1, -1))

    References:
        Zhanchao Zhou et al.: Value Residual Learning. 2024. https://arxiv.org/abs/2410.17897
        Keller Jordan et al.: modded-nanogpt. 2024. https://github.com/KellerJordan/modded-nanogpt
    """

    def rule(module: GPT, site: surgery.Site) -> nn.Module | None:
        is_own = type(module).through_blocks is not GPT.through_blocks  # as that of a GPT which has been changed
        if is_own or not computes_as(module, GPT) or not is_plain(module.blocks, nn.Sequential):
            return None
        depth = len(module.blocks)
        if not all(-depth <= number < depth for number in blocks):
            raise ValueError(f"{name}: blocks={blocks}: {site.name or 'the network'} has {depth} blocks")
        chosen = {number % depth for number in blocks}
        children = enumerate(module.blocks.named_children())
        new = {child: _mixed(block, name) for at, (child, block) in children if at in chosen}
        vocabulary, width = module.tokens.weight.shape
        values = nn.Embedding(vocabulary, width)
        nn.init.normal_(values.weight, std=0.02)
        return changed(module, MixedGPT, blocks=changed(module.blocks, None, **new), values=values)

    method = surgery_method(name, {ValueMix: None, GPT: rule}, where)
    return dataclasses.replace(method, runs_after=("alibi", "qk_norm"))


def _mixed(block: nn.Module, where: str) -> nn.Module:
    """Return the block with attention that takes embeddings."""
    attention = getattr(block, "attention", nn.Identity())
    if not computes_as(block, TransformerBlock) or not computes_as(attention, SelfAttention):
        raise ValueError(
            f"{where}: expected a TransformerBlock with a SelfAttention, got {type(block).__name__}, or one that "
            "overrides forward; let methods that replace blocks come later, or choose others by blocks="
        )
    return changed(block, MixedBlock, attention=changed(attention, MixedAttention, mix=ValueMix()))
