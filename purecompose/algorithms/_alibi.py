"""ALiBi: attention with linear biases instead of position embeddings, trained on short sequences."""

import dataclasses
import math
import sys
import weakref
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from purecompose import surgery
from purecompose._support.specs import shown
from purecompose.algorithms._parts import Derived, Where, changed, one_of, stand_in, surgery_method
from purecompose.algorithms._seq_length_warmup import sequences_of, shortened
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.core.state import State
from purecompose.nn.layers.replacing import has_hooks
from purecompose.nn.layers.transformer import AlibiAttention, NoPositions, PositionEmbedding, SelfAttention, alibi_bias
from purecompose.schedule.declared import Within
from purecompose.surgery.operation import left_alone
from purecompose.time.event import Event, snapped
from purecompose.time.predicates import on


_GPT2, _BERT, _ROBERTA = (f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "bert", "roberta"))
_ADDITIVE = ("eager", "sdpa")
_SCALING_HINT = "it is the share of a sequence that becomes a row"


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
    Causal and padding masks are kept. Position embeddings are removed with their parameters. For training, sequences of
    token ids (N, L) or embeddings (N, L, D) are concatenated and cut into rows of floor(L s) tokens, s =
    `train_sequence_length_scaling`.

    It supports `layers.SelfAttention` and `layers.PositionEmbedding`, used by `models.gpt` and `models.vit`, and GPT-2,
    BERT and RoBERTa of Hugging Face's transformers, version 5, with attention computed by "sdpa" or "eager".

    Events: INIT, and AFTER_DATALOADER unless s = 1, before methods that shorten sequences (`Trait.SHORTENS_SEQUENCES`),
    whose lengths refer to the new rows. Reads and replaces: the model, its parameters and the optimizer's state; the
    batch. Time counts the batch as it was loaded, as with `seq_length_warmup`.

    Without supported attention, batches are left as they are.

    Args:
        train_sequence_length_scaling: s, in (0, 1]. The number of sequences grows accordingly, so that a batch has the
            same number of tokens. 1 leaves batches unchanged.
        where: Patterns (`fnmatch`) of modules to change, with all that they contain; by default all but frozen parts.
        name: Name of the algorithm.

    Raises:
        TypeError, ValueError: At INIT: relative positions; attention that accepts no biases, has hooks, or is a
            subclass with a different computation; or position embeddings in a network without any supported attention.
            In the step: inputs that are not sequences, or members of the batch without a position for each token.

    Warns:
        UserWarning: At INIT: the network has no supported attention.

    Example:
        >>> alibi()
        alibi(train_sequence_length_scaling=0.25)

    References:
        Ofir Press et al.: Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation. ICLR
        2022. https://arxiv.org/abs/2108.12409
    """
    rules = _rules()
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


def _rules() -> surgery.Rules:
    """Return the rules of the surgery, for the library's own layers and those of transformers."""
    # GPT-2's positions are a plain nn.Embedding. It is found through the model, which is visited before its children.
    found: weakref.WeakSet[Any] = weakref.WeakSet()

    def gpt2(module: Any, site: surgery.Site) -> None:
        del site
        found.add(module.wpe)

    return {
        AlibiAttention: None,
        NoPositions: None,
        SelfAttention: _attention,
        PositionEmbedding: _positions,
        TransformersAttention: None,
        TransformersPositions: None,
        stand_in(_GPT2, "GPT2Model"): gpt2,
        _GPT2_ATTENTION: _transformers_attention,
        one_of(found, "GPT2Model.wpe"): lambda module, site: NoPositions(),
        _BERT_ATTENTION: _transformers_attention,
        stand_in(_BERT, "BertEmbeddings"): _transformers_embeddings,
        _ROBERTA_ATTENTION: _transformers_attention,
        stand_in(_ROBERTA, "RobertaEmbeddings"): _transformers_embeddings,
    }


def _attention(module: SelfAttention, site: surgery.Site) -> nn.Module:
    where, kind = f"alibi: {site.name or 'the network'}: expected a SelfAttention", type(module)
    parts = {*module._modules, *module._parameters, *module._buffers}
    is_own = kind.forward is not SelfAttention.forward or kind.bias is not SelfAttention.bias
    if is_own or parts - {"qk_norm"} != {"qkv", "out"}:
        raise ValueError(
            f"{where}, got a {kind.__name__}, which overrides forward or bias, or has other parameters; replace it "
            "by a rule of your own (surgery.operate)"
        )
    if has_hooks(module):
        raise ValueError(
            f"{where}, got one with hooks or with a forward set on the instance, which would be lost; remove them"
        )
    return AlibiAttention(module)


def _positions(module: PositionEmbedding, site: surgery.Site) -> nn.Module:
    del module
    _check_attention(site)
    return NoPositions()


def _check_attention(site: surgery.Site) -> None:
    """Reject removing the positions of a network whose attention gets no biases: it could not see any order."""
    if not any(isinstance(module, _ATTENTION) for module in site.root.modules()):
        there = ", ".join(sorted({type(module).__name__ for module in site.root.modules()}))
        raise ValueError(
            f"alibi: {site.name}: expected a supported attention, whose biases replace these positions, found none in "
            f"a network of {there}; replace your own attention and its positions by rules of your own "
            "(surgery.operate), with functional.alibi_bias and layers.NoPositions"
        )


# GPT-2, BERT and RoBERTa of Hugging Face's transformers, version 5. Their attention adds a mask to the logits, whether
# it is computed explicitly ("eager") or by torch ("sdpa"); the biases are added to this mask.


class TransformersAttention(Derived):
    """Attention layer that adds linear biases to its logits."""

    layer_idx: int

    def forward(self, hidden_states: Tensor, *, attention_mask: Tensor | None = None, **others: Any) -> Any:
        """Compute the original forward with biases; `attention_mask` is `None` or (N, 1, Q, K), bool or additive."""
        # The cache; it was the argument past_key_values before version 5.24.
        past = next((given for given in others.values() if hasattr(given, "get_seq_length")), None)
        num_queries, start = hidden_states.shape[1], 0 if past is None else past.get_seq_length(self.layer_idx)
        is_causal = others.get("is_causal")
        if attention_mask is not None and (not isinstance(attention_mask, Tensor) or attention_mask.ndim != 4):
            raise ValueError(
                f"alibi: expected an attention mask (N, 1, queries, keys), got {shown(attention_mask)}; load the "
                "network with attn_implementation='sdpa' or 'eager'"
            )
        bias = alibi_bias(
            _num_heads(self),
            _num_keys(past, self.layer_idx, num_queries) if attention_mask is None else attention_mask.shape[-1],
            # A given mask already excludes future positions, and unused positions of a cache of fixed size.
            is_causal=attention_mask is None and bool(self.is_causal if is_causal is None else is_causal),
            first_query=start,
            num_queries=num_queries,
            dtype=hidden_states.dtype,
            device=hidden_states.device,
        ).unsqueeze(0)
        return super().forward(hidden_states, attention_mask=_masked(bias, attention_mask), **others)


class TransformersPositions(Derived):
    """Embeddings of tokens and token types without position embeddings, for any number of positions."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Compute the original forward, ignoring `position_ids`."""
        del position_ids  # the default comes from a table that is limited to the maximal length
        given = input_ids if input_ids is not None else inputs_embeds
        assert given is not None, "the model requires one of the two"
        first = torch.zeros(1, given.shape[1], dtype=torch.int64, device=given.device)
        return super().forward(
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=first,
            inputs_embeds=inputs_embeds,
            **others,
        )


def _num_heads(module: nn.Module) -> int:
    heads = getattr(module, "num_heads", None)  # GPT-2 only
    return heads if isinstance(heads, int) else module.num_attention_heads  # pyright: ignore[reportReturnType]


def _num_keys(past: Any, layer: int, num_queries: int) -> int:
    """Return the number of keys of the attention, including those in a cache."""
    if past is None:
        return num_queries
    layers = getattr(past, "self_attention_cache", past).layers
    # Not get_mask_sizes, whose arguments differ between versions.
    size = getattr(layers[layer], "max_cache_len", None) if layer < len(layers) else None
    return past.get_seq_length(layer) + num_queries if size is None else size


def _masked(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Return the bias of the logits, (N or 1, H, Q, K)."""
    if mask is None:
        return bias
    # Not -inf: the attention of a query without any allowed key, as in padding, would be NaN.
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def _transformers_attention(module: Any, site: surgery.Site) -> nn.Module | None:
    if getattr(module, "is_cross_attention", False):
        return None
    where = _where(module, site)
    version = getattr(sys.modules.get("transformers"), "__version__", "5")
    if int(version.split(".")[0]) < 5:
        raise ValueError(
            f"{where}: expected version 5 or later, got {version}; earlier ones have different attention masks"
        )
    kind = getattr(module.config, "position_embedding_type", "absolute")
    if kind != "absolute":
        raise ValueError(
            f"{where}: expected absolute positions, got {kind!r}; load the network without relative positions"
        )
    computed_by = module.config._attn_implementation
    if computed_by not in _ADDITIVE:
        raise ValueError(
            f"{where}: expected attention that adds a mask to the logits, {' or '.join(_ADDITIVE)}, got "
            f"{computed_by!r}; load the network with attn_implementation='sdpa'"
        )
    _check_forward(module, site)
    return changed(module, TransformersAttention)


def _transformers_embeddings(module: nn.Module, site: surgery.Site) -> nn.Module:
    _check_attention(site)
    _check_forward(module, site)
    return changed(module, TransformersPositions, position_embeddings=NoPositions())


def _where(module: nn.Module, site: surgery.Site) -> str:
    return f"alibi: {site.name}, a {type(module).__name__} of transformers"


def _check_forward(module: nn.Module, site: surgery.Site) -> None:
    """Reject a forward set on the instance, which would be called instead of the new one."""
    if "forward" in vars(module):
        raise ValueError(
            f"{_where(module, site)}: expected the forward of its class, got one set on the instance, which would be "
            "called without the biases; remove it"
        )


_GPT2_ATTENTION = stand_in(_GPT2, "GPT2Attention")
_BERT_ATTENTION = stand_in(_BERT, "BertSelfAttention")
_ROBERTA_ATTENTION = stand_in(_ROBERTA, "RobertaSelfAttention")
_ATTENTION = (SelfAttention, TransformersAttention, _GPT2_ATTENTION, _BERT_ATTENTION, _ROBERTA_ATTENTION)
