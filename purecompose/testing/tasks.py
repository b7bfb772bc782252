"""Small tasks on which laws are tried: a network, its batches, and how a state is made of them.

The networks take a fraction of a millisecond, and between them have what breaks algorithms: dropout, BatchNorm,
attention, tied weights, integer inputs, soft targets, ignored positions, dictionaries as batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from purecompose import batch as batches, losses, optim
from purecompose.schedule import hparam
from purecompose.state import State


__all__ = ["TASKS", "Task", "Transformer", "make_cnn", "make_mlp"]

NUM_CLASSES = 3
_VOCABULARY, _LENGTH = 7, 5


@dataclass(frozen=True, repr=False)
class Task:
    """A network with its batches.

    Args:
        name: What reports call it.
        net: A function of a seed that makes the network. Weights may come from the global generator: it is seeded
            for the call, and set back.
        batch: A function `(seed, size)` that makes a batch of so many examples, with tensors of its own.
        loss: As `State.create`.
        options: More arguments of `State.create`, such as `input_key`.
    """

    name: str
    net: Callable[[int], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[..., Tensor] = losses.cross_entropy
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def make_net(self, seed: int) -> nn.Module:
        """The network of a seed; torch's generator is left where it was."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)
            return self.net(seed)

    def make_batch(self, seed: int, size: int, dtype: torch.dtype = torch.float32) -> Any:
        """A batch whose floating tensors have this dtype."""
        return batches.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, self.batch(seed, size))

    def make_state(self, seed: int, *, dtype: torch.dtype = torch.float32, **options: Any) -> State:
        """The state at the start: weights and key by the seed, SGD with momentum, its rate the hparam "lr"."""
        given = {"optimizer": optim.sgd(hparam("lr", 0.1), momentum=0.9), "key": seed, **self.options, **options}
        return State.create(self.make_net(seed).to(dtype), loss=self.loss, **given)

    @property
    def has_batch_norm(self) -> bool:
        """Whether the network mixes examples by batch statistics."""
        return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.make_net(0).modules())

    def __repr__(self) -> str:
        return f"TASKS[{self.name!r}]" if TASKS.get(self.name) is self else f"Task({self.name!r})"


def make_mlp(seed: int = 0, *, dropout: float = 0.0) -> nn.Module:
    """4 -> 6 -> 3, smooth, so that finite differences are good."""
    del seed
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, NUM_CLASSES))


def make_cnn(seed: int = 0, *, dropout: float = 0.0) -> nn.Module:
    """Two convolutions with BatchNorm for 2x6x6 images. No bias that BatchNorm would cancel."""
    del seed
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(16, NUM_CLASSES),
    )


class Transformer(nn.Module):
    """One causal attention layer over token ids `(batch, length)` int64; logits `(batch, vocabulary, length)`.

    Args:
        seed: Not used; weights come from torch's generator.
        dropout: Probability of dropping in attention and in the residual branches.
        tied: Whether the output layer has the embedding's weights.
    """

    def __init__(self, seed: int = 0, *, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        del seed
        self.embedding = nn.Embedding(_VOCABULARY, 4)
        self.position = nn.Parameter(0.1 * torch.randn(_LENGTH, 4))
        self.attention = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
        self.norm, self.dropout = nn.LayerNorm(4), nn.Dropout(dropout)
        self.head = nn.Linear(4, _VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """The logits of the next token at every position."""
        length = ids.shape[1]
        hidden = self.embedding(ids) + self.position[:length]
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        attended, _ = self.attention(hidden, hidden, hidden, attn_mask=mask, need_weights=False)
        return self.head(self.norm(hidden + self.dropout(attended))).transpose(1, 2)


def _dropout_mlp(seed: int) -> nn.Module:
    return make_mlp(seed, dropout=0.4)


def _tied_transformer(seed: int) -> nn.Module:
    return Transformer(seed, dropout=0.2, tied=True)


def _vectors(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randint(NUM_CLASSES, (size,), generator=generator)


def _soft_vectors(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, generator=generator)
    return inputs, torch.randn(size, NUM_CLASSES, generator=generator).softmax(1)


def _images(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 2, 6, 6, generator=generator)
    return inputs, torch.randint(NUM_CLASSES, (size,), generator=generator)


def _tokens(seed: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(_VOCABULARY, (size, _LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, 0] = torch.where(torch.arange(size) % 2 == 0, -100, labels[:, 0])
    return {"input_ids": ids[:, :-1].clone(), "labels": labels}


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task("vectors", make_mlp, _vectors),
            Task("soft", _dropout_mlp, _soft_vectors),
            Task("images", make_cnn, _images),
            Task(
                "tokens",
                _tied_transformer,
                _tokens,
                options={"input_key": "input_ids", "target_key": "labels"},
            ),
        )
    }
)
"""By name: vectors (MLP, class indices), soft (dropout, dense targets), images (CNN with BatchNorm), tokens (a small
transformer with dropout and tied weights, dictionaries, ignored positions)."""
