"""ALiBi: attention with linear biases instead of position embeddings, trained on short sequences."""

import dataclasses
import math
from typing import Annotated, Any

from torch import nn

from purecompose import surgery
from purecompose.algorithms._parts.alibi_transformers import check_attention, transformers_rules
from purecompose.algorithms._parts.checks import Where
from purecompose.algorithms._parts.surgery import on_module, surgery_method
from purecompose.algorithms._seq_length_warmup import sequences_of, shortened
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.nn.layers._forms import has_hooks
from purecompose.nn.layers.transformer import AlibiAttention, NoPositions, PositionEmbedding, SelfAttention
from purecompose.schedule.declared import Within, checked
from purecompose.surgery.visiting import left_alone
from purecompose.time.event import Event
from purecompose.time.predicates import on
from purecompose.time.units import snapped


_SCALING_HINT = "it is the share of a sequence that becomes a row"


@checked
def alibi_rules() -> surgery.Rules:
    """Return the rules of the surgery; see `purecompose.algorithms.alibi`.

    To support other layers, add rules for them, and also one for `PositionEmbedding` if the network has only such
    attention. Pass `layers.alibi_bias` to `F.scaled_dot_product_attention` as `attn_mask`, and replace embeddings by
    `layers.NoPositions`.

    Raises:
        ValueError: When the rules are applied: relative positions; attention that accepts no biases; subclasses of
            `SelfAttention` with a different computation; attention with hooks or with a forward set on the instance,
            which would be lost; or position embeddings in a network without any supported attention.

    Example:
        >>> from purecompose import random
        >>> from purecompose.nn import models
        >>> from purecompose.nn.model import from_module
        >>> model, params, buffers, _ = from_module(models.gpt(65, 16, width=8, depth=1))
        >>> after = surgery.replace(model, alibi_rules(), params, buffers, key=random.key(0))
        >>> len(after.report.replaced), len(after.report.dropped)
        (2, 1)
    """

    def attention(module: SelfAttention, site: surgery.Site) -> nn.Module:
        where, kind = f"alibi: {site.name or 'the network'}: expected a SelfAttention", type(module)
        parts = {*module._modules, *module._parameters, *module._buffers}
        is_own = kind.forward is not SelfAttention.forward or kind.bias is not SelfAttention.bias
        if is_own or parts != {"qkv", "out"}:
            raise ValueError(
                f"{where}, got a {kind.__name__}, which overrides forward or bias, or has other parameters; add "
                f"{kind.__name__}: None to the rules to leave it as it is, or give another rule for SelfAttention"
            )
        if has_hooks(module):
            raise ValueError(
                f"{where}, got one with hooks or with a forward set on the instance, which would be lost; remove "
                "them, or give another rule for SelfAttention"
            )
        return AlibiAttention(module)

    def positions(module: PositionEmbedding, site: surgery.Site) -> nn.Module:
        del module
        check_attention(site)
        return NoPositions()

    return {
        AlibiAttention: None,
        NoPositions: None,
        SelfAttention: attention,
        PositionEmbedding: positions,
        **transformers_rules(),
    }


apply_alibi = on_module("alibi", alibi_rules)
"""`apply_alibi(net, **settings)` returns a copy of a network with attention with linear biases in place of positions;
the settings are those of `alibi_rules`.
"""


@factory
def alibi(
    train_sequence_length_scaling: Annotated[float, Within(0, 1, above=True, hint=_SCALING_HINT)] = 0.25,
    *,
    where: Where = None,
    name: str = "alibi",
) -> Algorithm:
    """Replace positions by linear biases, and train on shorter sequences.

        attention logits of head h:   q_i k_j / sqrt(d) - m_h |i - j|,   m_h = 2^(-8 h / H), h = 1 ... H

    If H is not a power of two, the slopes are those of the next smaller power and every second one of the next greater.
    Causal and padding masks are kept. Position embeddings are removed with their parameters, and thereby the limit on
    the length of a sequence. For training, sequences (N, L) are concatenated and cut into rows of floor(L s) tokens,
    s = `train_sequence_length_scaling`; the network then generalises to longer sequences.

    It supports `layers.SelfAttention` and `layers.PositionEmbedding`, used by `models.gpt` and `models.vit`, and GPT-2,
    BERT and RoBERTa of Hugging Face's transformers, version 5, with attention computed by "sdpa" or "eager". In a
    vision transformer, distances are measured in the sequence of patches; afterwards it accepts images of any size.

    Events: INIT, and AFTER_DATALOADER unless s = 1, before methods that shorten sequences (`Trait.SHORTENS_SEQUENCES`),
    whose lengths refer to the new rows. Reads and replaces: the model, its parameters and the optimizer's state; the
    batch. Time counts the batch as it was loaded, as with `seq_length_warmup`.

    The input must be token ids (N, L) or embeddings (N, L, D), as for `seq_length_warmup`, unless s = 1. In a network
    without supported attention, batches are left as they are.

    Args:
        train_sequence_length_scaling: s, in (0, 1], the factor by which the length of sequences for training is
            multiplied. The number of sequences grows accordingly, so that a batch has the same number of tokens. 1
            leaves batches unchanged. The resulting length should be at least 128 tokens, 256 to be safe.
        where: Pattern or patterns (`fnmatch`) of the names of modules to change, including their submodules, such as
            "student.*"; by default all except parts without trainable parameters, such as a frozen teacher.
        name: Name of the algorithm.

    Raises:
        TypeError, ValueError: A setting of the wrong type or out of range. At INIT: see `alibi_rules`. In the step:
            inputs that are not sequences, or members of the batch without a position for each token.

    Warns:
        UserWarning: At INIT: the network has no supported attention.

    Example:
        >>> alibi()
        alibi(train_sequence_length_scaling=0.25)

    References:
        Ofir Press, Noah A. Smith, Mike Lewis: Train Short, Test Long: Attention with Linear Biases Enables Input Length
        Extrapolation. ICLR 2022. https://arxiv.org/abs/2108.12409
    """
    rules = alibi_rules()
    operation, changed = surgery_method(name, rules, where), left_alone(rules)
    if train_sequence_length_scaling == 1:
        return operation

    def apply(event: Event, state: State) -> Any:
        if event is Event.INIT:
            return operation.apply(event, state)
        if not any(isinstance(module, changed) for module in state.model.module.modules()):
            return state
        try:
            sequences = sequences_of(state, name)
            length = max(1, math.floor(snapped(sequences.shape[1] * train_sequence_length_scaling)))
            return state.replace(batch=shortened(state.batch, sequences, length, truncate=False, preserve=False))
        except (TypeError, ValueError) as error:
            error.add_note(
                f"{name} cuts sequences into shorter rows; with train_sequence_length_scaling=1 it leaves batches as "
                "they are"
            )
            raise

    # Runs before a warm-up of the sequence length, which then shortens the new rows.
    match, later = on(Event.INIT, Event.AFTER_DATALOADER), (Trait.SHORTENS_SEQUENCES,)
    return dataclasses.replace(operation, match=match, apply=apply, runs_before=later)
