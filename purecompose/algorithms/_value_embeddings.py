"""Value embeddings: a second embedding of the tokens, added to the values of attention in some blocks.

The tokens reach the blocks as an argument of their forward, not through attributes of modules, so that the network
remains a function of its parameters and inputs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from purecompose import surgery
from purecompose._support.checks import check_whole, shown
from purecompose.algorithms._parts.checks import Where
from purecompose.algorithms._parts.surgery import Derived, changed, surgery_method
from purecompose.core.algorithm import Algorithm, factory
from purecompose.nn.layers._forms import computes_as, is_plain
from purecompose.nn.layers.transformer import SelfAttention
from purecompose.nn.models.transformer import GPT, TransformerBlock


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

    The embedding E, of the shape of the network's own, is shared by the blocks; each has its numbers a and b, which
    start at 1. E is initialised as the network's own embedding, normal with standard deviation 0.02. So there are
    vocabulary * width + 2 * (number of blocks) new parameters.

    It supports the class of `models.gpt`; subclasses that compute in their own way are not changed. The tokens are
    passed on to the blocks as arguments, so the new blocks take two: methods that look for blocks with one, such as
    `stochastic_depth`, leave them as they are.

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
