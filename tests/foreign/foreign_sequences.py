"""Cases: recurrent networks, attention and transformers."""

# For a type checker, attributes of modules are Tensor | Module.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.foreign.foreign_case import SHAPES, Case, classes, mapped, tokens


VOCABULARY = 7


def series(g: Generator, length: int = 5, size: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(size, length, 6, generator=g), classes(g, size)


def time_first(g: Generator) -> tuple[Tensor, Tensor]:
    x, y = series(g)
    return x.transpose(0, 1).contiguous(), y


def next_tokens(g: Generator) -> tuple[Tensor, Tensor]:
    ids = classes(g, 4, 7, num=VOCABULARY)
    return ids[:, :-1], ids[:, 1:]


def each_token(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of logits (N, T, C)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


class Last(nn.Module):
    """A recurrent core, read at the last time step."""

    def __init__(self, core: nn.RNNBase, *, is_batch_first: bool = True) -> None:
        super().__init__()
        width = core.hidden_size * (2 if core.bidirectional else 1)
        width = core.proj_size * (2 if core.bidirectional else 1) if core.proj_size else width
        self.core, self.leave, self.is_batch_first = core, nn.Linear(width, 3), is_batch_first

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.core(x)
        return self.leave(found[:, -1] if self.is_batch_first else found[-1])


class Cells(nn.Module):
    """A loop of cells over time steps that collects its outputs in a list."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell, self.leave = kind(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, seen = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            seen.append(state[0] if isinstance(state, tuple) else state)
        return self.leave(torch.stack(seen, 1).amax(1))


class Packed(nn.Module):
    """Sequences of several lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.leave = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.leave(self.core(packed)[1][0][-1])


class Attending(nn.Module):
    """Multi-head attention with masks."""

    def __init__(self, *, mask: str, **options: Any) -> None:
        super().__init__()
        self.embedding, self.mask = nn.Embedding(VOCABULARY, 8), mask
        self.attention, self.leave = nn.MultiheadAttention(8, 2, batch_first=True, **options), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x, masks = self.embedding(ids), {}
        if self.mask == "causal":
            masks = {"attn_mask": nn.Transformer.generate_square_subsequent_mask(ids.shape[1]), "is_causal": True}
        elif self.mask == "padding":
            masks = {"key_padding_mask": (ids == 0) & (torch.arange(ids.shape[1]) > 0)}
        elif self.mask == "additive":
            masks = {"attn_mask": -torch.arange(ids.shape[1]).to(x.dtype).expand(ids.shape[1], -1)}
        found, weights = self.attention(x, x, x, **masks)
        return self.leave(found.mean(1)) + weights.mean((1, 2)).unsqueeze(1)


class Encoder(nn.Module):
    """torch's Transformer encoder over tokens with learnt positions."""

    def __init__(self, *, dropout: float = 0.0, is_batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=is_batch_first, **options)
        self.embedding, self.position = nn.Embedding(VOCABULARY, 8), nn.Parameter(0.1 * torch.randn(5, 8))
        self.encoder, self.leave = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)
        self.is_batch_first = is_batch_first

    def forward(self, ids: Tensor) -> Tensor:
        position = self.position if self.is_batch_first else self.position.unsqueeze(1)
        padding = (ids if self.is_batch_first else ids.T) == 0
        padding = torch.cat([torch.zeros_like(padding[:, :1]), padding[:, 1:]], 1)
        found = self.encoder(self.embedding(ids) + position, src_key_padding_mask=padding)
        return self.leave(found.mean(1 if self.is_batch_first else 0))


class Translator(nn.Module):
    """torch's whole Transformer: two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.leave = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.core = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.leave(self.core(self.embedding(source), self.embedding(target), tgt_mask=mask))


class Block(nn.Module):
    """A GPT's block, its attention by scaled_dot_product_attention."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.mix(self.norms[0](x)).view(n, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        found = F.scaled_dot_product_attention(*parts.unbind(0), dropout_p=dropout, is_causal=True)
        x = x + self.project(found.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Embeddings tied to the head, and weights drawn by `apply`."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 8), nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(Block(8, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("order", torch.arange(6), persistent=False)
        self.apply(self._draw)

    @staticmethod
    def _draw(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(self.order[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Rotary(nn.Module):
    """Attention written out, with rotary positions by complex numbers, and a cache in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix, self.leave = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 24), nn.Linear(8, 3)
        angles = torch.outer(torch.arange(5).float(), 10 ** -torch.arange(2).float())
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def turn(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], 2, 2))
        return torch.view_as_real(pairs * self.turns).flatten(-2)

    def forward(self, ids: Tensor) -> Tensor:
        n, length = ids.shape
        q, k, v = (part.view(n, length, 2, 4).transpose(1, 2) for part in self.mix(self.embedding(ids)).chunk(3, -1))
        scores = self.turn(q) @ self.turn(k).mT / math.sqrt(4)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        found = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        return self.leave(found.transpose(1, 2).reshape(n, length, 8).mean(1))


def with_lengths(x: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor]:
    return [x, torch.tensor([5, 3, 4, 2])], y


def translations(g: Generator) -> tuple[list[Tensor], Tensor]:
    source, target = classes(g, 4, 5, num=VOCABULARY), classes(g, 4, 6, num=VOCABULARY)
    return [source, target[:, :-1]], target[:, 1:]


def recurrent(kind: Callable[..., Any], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Last(kind(6, 5, batch_first=True, **options))


CASES = [
    Case("gru", recurrent(nn.GRU), series, inductor=True),
    Case("lstm, time first", lambda: Last(nn.LSTM(6, 5), is_batch_first=False), time_first, options={"batch_dim": 1}),
    Case("lstm with dropout", recurrent(nn.LSTM, num_layers=2, dropout=0.3), series, draws=True),
    Case("gru cells", lambda: Cells(nn.GRUCell), series, adam=True),
    Case("packed sequences", Packed, mapped(series, with_lengths),
         refused={"compiled": SHAPES["compiled"], "population": "a number or the memory of a tensor is read"}),
    Case("attention", lambda: Attending(mask=""), tokens(), adam=True),
    Case("attention with padding", lambda: Attending(mask="padding", add_zero_attn=True), tokens(), inductor=True),
    Case("attention with dropout", lambda: Attending(mask="", dropout=0.3), tokens(), draws=True),
    Case("encoder", Encoder, tokens(), inductor=True),
    Case("encoder and decoder", Translator, translations, each_token),
    Case("gpt", GPT, next_tokens, each_token, adam=True, inductor=True),
    Case("rotary attention", Rotary, tokens()),
]  # fmt: skip
