"""Linear biases for GPT-2, BERT and RoBERTa of Hugging Face's transformers, version 5.

Their attention adds a mask to the logits, whether it is computed explicitly ("eager") or by torch ("sdpa"); the biases
are added to this mask. Parameters keep their names.
"""

import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from purecompose import surgery
from purecompose._support.checks import shown
from purecompose.algorithms._parts.surgery import Derived, changed, one_of, stand_in
from purecompose.nn.layers.transformer import NoPositions, SelfAttention, alibi_bias


_GPT2, _BERT, _ROBERTA = (f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "bert", "roberta"))
_ADDITIVE = ("eager", "sdpa")


class Alibi(Derived):
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


class NoPosition(Derived):
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


def _attention(module: Any, site: surgery.Site) -> nn.Module | None:
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
    return changed(module, Alibi)


def _embeddings(module: nn.Module, site: surgery.Site) -> nn.Module:
    check_attention(site)
    _check_forward(module, site)
    return changed(module, NoPosition, position_embeddings=NoPositions())


def _where(module: nn.Module, site: surgery.Site) -> str:
    return f"alibi: {site.name}, a {type(module).__name__} of transformers"


def _check_forward(module: nn.Module, site: surgery.Site) -> None:
    """Reject a forward set on the instance, which would be called instead of the new one."""
    if "forward" in vars(module):
        raise ValueError(
            f"{_where(module, site)}: expected the forward of its class, got one set on the instance, which would be "
            "called without the biases; remove it"
        )


def check_attention(site: surgery.Site) -> None:
    """Reject removing the positions of a network whose attention gets no biases: it could not see any order."""
    if not any(isinstance(module, _ATTENTION) for module in site.root.modules()):
        there = ", ".join(sorted({type(module).__name__ for module in site.root.modules()}))
        raise ValueError(
            f"alibi: {site.name}: expected a supported attention, whose biases replace these positions, found none in "
            f"a network of {there}; give a rule for your attention, and one for PositionEmbedding that returns "
            "layers.NoPositions()"
        )


_GPT2_ATTENTION = stand_in(_GPT2, "GPT2Attention")
_BERT_ATTENTION = stand_in(_BERT, "BertSelfAttention")
_ROBERTA_ATTENTION = stand_in(_ROBERTA, "RobertaSelfAttention")
_ATTENTION = (SelfAttention, Alibi, _GPT2_ATTENTION, _BERT_ATTENTION, _ROBERTA_ATTENTION)


def transformers_rules() -> surgery.Rules:
    """Return the rules for GPT-2, BERT and RoBERTa."""
    # GPT-2's positions are a plain nn.Embedding. It is found through the model, which is visited before its children.
    found: weakref.WeakSet[Any] = weakref.WeakSet()

    def model(module: Any, site: surgery.Site) -> None:
        del site
        found.add(module.wpe)

    def positions(module: nn.Module, site: surgery.Site) -> nn.Module:
        del module, site
        return NoPositions()

    return {
        Alibi: None,
        NoPosition: None,
        stand_in(_GPT2, "GPT2Model"): model,
        _GPT2_ATTENTION: _attention,
        one_of(found, "GPT2Model.wpe"): positions,
        _BERT_ATTENTION: _attention,
        stand_in(_BERT, "BertEmbeddings"): _embeddings,
        _ROBERTA_ATTENTION: _attention,
        stand_in(_ROBERTA, "RobertaEmbeddings"): _embeddings,
    }
