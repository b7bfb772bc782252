"""Small tasks on which laws are tried: a network, its batches, and the options of its state.

The networks take a fraction of a millisecond, and together have the features that break algorithms: dropout, BatchNorm,
GroupNorm, strides, attention, tied weights, frozen parameters, a head that starts at zero, weights in float64 and
bfloat16, integer inputs, soft targets, ignored positions, dictionaries as batches, a forward pass in half precision.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from purecompose import batch as batches, losses, optim
from purecompose._support.device import AUTOCAST, PRECISIONS
from purecompose.core.state import State
from purecompose.nn.layers.transformer import ClassesSecond, FeedForward, SelfAttention
from purecompose.nn.models.transformer import gpt
from purecompose.schedule import hparam
from purecompose.testing.process import seeded


KINDS = ("vectors", "images", "tokens")
"""Kinds of inputs: float (N, 4), float (N, 2, 6, 6), and token ids int64 (N, 5)."""

NUM_CLASSES = 3
_VOCABULARY, _LENGTH = 7, 5


@dataclass(frozen=True, repr=False)
class Task:
    """A network with its batches.

    Args:
        name: Name in reports.
        net: Function of a seed that returns the network. Weights may come from the global generator, which is seeded
            for the call and restored afterwards.
        batch: Function `(seed, size)` that returns a batch of `size` examples, with new tensors. The global generators
            are seeded for it as well.
        loss: As in `State.create`.
        options: Further arguments of `State.create`, such as `input_field`.
        dtype: Dtype of weights and floating batches, unless a law needs another one.
    """

    name: str
    net: Callable[[int], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[..., Tensor] = losses.cross_entropy
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dtype: torch.dtype = torch.float32

    def make_net(self, seed: int) -> nn.Module:
        """Return the network of a seed, with float32 as the default dtype; the process is not changed."""
        with seeded(seed), torch.device("cpu"):
            torch.set_default_dtype(torch.float32)
            return self.net(seed)

    def make_batch(self, seed: int, size: int, dtype: torch.dtype | None = None) -> Any:
        """Return a batch whose floating tensors have this dtype, or the task's; the process is not changed."""
        dtype = self.dtype if dtype is None else dtype
        with seeded(seed):
            batch = self.batch(seed, size)
        return batches.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)

    def make_state(self, seed: int, *, dtype: torch.dtype | None = None, **options: Any) -> State:
        """Return the initial state: weights and key from the seed, SGD with momentum and the hparam "lr"."""
        dtype = self.dtype if dtype is None else dtype
        given = {"optimizer": optim.sgd(hparam("lr", 0.1), momentum=0.9), "key": seed, **self.options, **options}
        return State.create(_cast(self.make_net(seed), dtype), loss=self.loss, **given)

    @property
    def kind(self) -> str | None:
        """Kind of its inputs, one of `KINDS`; `None` if its batches do not come from `MakeBatch`."""
        return self.batch.kind if isinstance(self.batch, MakeBatch) else None

    @property
    def is_half(self) -> bool:
        """True if the forward pass of weights in float32 is in half precision; autocast does not affect float64."""
        return self.options.get("precision") in AUTOCAST

    @property
    def has_buffers(self) -> bool:
        """True if the network has buffers, such as batch statistics."""
        return any(True for _ in self.make_net(0).buffers())

    def __repr__(self) -> str:
        if TASKS.get(self.name) == self:
            return f"TASKS[{self.name!r}]"
        return self.name if self.name.startswith("make_task(") else f"Task({self.name!r})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        del cycle
        printer.text(repr(self))  # Hypothesis would print every field of a dataclass


def make_mlp(seed: int = 0, *, dropout: float = 0.0) -> nn.Module:
    """Return an MLP 4 -> 6 -> 3, which is smooth, so that finite differences are accurate."""
    del seed
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, NUM_CLASSES))


class Residual(nn.Module):
    """The sum of a branch and its input, `branch(x) + x`."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, nn.Identity()

    def forward(self, input: Tensor) -> Tensor:
        return self.branch(input) + self.shortcut(input)


def make_cnn(seed: int = 0, *, dropout: float = 0.0) -> nn.Module:
    """Return a CNN with BatchNorm and GroupNorm for images of 2x6x6, at least 2x3x3.

    Its convolutions have no bias, which the normalisation would cancel.
    """
    del seed
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.Sequential(nn.Tanh(), nn.MaxPool2d(1)),  # a pooling that changes nothing, for methods that move poolings
        # With padding, an image of half the size keeps more than one pixel.
        nn.Conv2d(4, 4, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(1, 4),
        Residual(nn.Conv2d(4, 4, 1)),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()),  # for methods that shrink images
        nn.Dropout(dropout),
        nn.Linear(16, NUM_CLASSES),
    )


class Transformer(nn.Module):
    """Two causal attention layers over token ids `(batch, length)` int64; logits `(batch, vocabulary, length)`.

    The first is torch's, the second `layers.SelfAttention` with a feed-forward part, which surgery can replace.
    """

    def __init__(self, seed: int = 0, *, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        del seed
        self.embedding = nn.Embedding(_VOCABULARY, 4)
        self.position = nn.Parameter(0.1 * torch.randn(_LENGTH, 4))
        self.attention = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
        self.norm, self.dropout = nn.LayerNorm(4), nn.Dropout(dropout)
        self.second, self.feed_forward = SelfAttention(4, 2, is_causal=True), FeedForward(4, 6, dropout=dropout)
        self.head = nn.Linear(4, _VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        length = ids.shape[1]
        hidden = self.embedding(ids) + self.position[:length]
        mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        attended, _ = self.attention(hidden, hidden, hidden, attn_mask=mask, need_weights=False)
        hidden = hidden + self.dropout(attended)
        hidden = hidden + self.second(hidden)
        hidden = hidden + self.feed_forward(hidden)
        return self.head(self.norm(hidden)).transpose(1, 2)


def make_gpt(seed: int = 0) -> nn.Module:
    """Return the library's GPT with two blocks and tied weights, for the same token ids; logits as `Transformer`."""
    del seed
    return ClassesSecond(gpt(_VOCABULARY, _LENGTH, width=4, depth=2, num_heads=2))


@dataclass(frozen=True)
class MakeNet:
    """A function `make_net(seed)` that returns networks for a kind of inputs; it can be compared, pickled and printed.

    Of a transformer the output layer may share the embedding's weights (`tied`). With `frozen` the first parameter is
    not trained; with `zero_head` the last layer starts at zero, so that all gradients before it are exactly 0.
    """

    kind: str = "vectors"
    dropout: float = 0.0
    tied: bool = False
    frozen: bool = False
    zero_head: bool = False

    def __post_init__(self) -> None:
        _check_one_of("kind", self.kind, KINDS)
        if self.tied and self.kind != "tokens":
            raise ValueError(f"tied=True: a network for {self.kind} has no weights to tie; expected kind='tokens'")

    def __call__(self, seed: int) -> nn.Module:
        if self.kind == "tokens":
            net: nn.Module = Transformer(seed, dropout=self.dropout, tied=self.tied)
        else:
            net = (make_mlp if self.kind == "vectors" else make_cnn)(seed, dropout=self.dropout)
        if self.frozen:
            next(net.parameters()).requires_grad_(False)
        if self.zero_head:
            head = list(net.children())[-1]
            for param in head.parameters():
                nn.init.zeros_(param)
        return net


@dataclass(frozen=True)
class MakeBatch:
    """A function `make_batch(seed, size)` that returns batches; it can be compared, pickled and printed.

    Args:
        kind: One of `KINDS`.
        targets: "index" for int64, where every second row of tokens has an ignored one (-100); "soft" for float32
            probabilities, with classes in dim 1.
        form: "tuple" for (inputs, targets), "dict" for {"inputs": ..., "labels": ...}, of tokens with "input_ids".
    """

    kind: str = "vectors"
    targets: str = "index"
    form: str = "tuple"

    def __post_init__(self) -> None:
        _check_one_of("kind", self.kind, KINDS)
        _check_one_of("targets", self.targets, ("index", "soft"))
        _check_one_of("form", self.form, ("tuple", "dict"))

    @property
    def keys(self) -> tuple[str, str] | None:
        """Names of input and target in a dictionary; `None` for a tuple."""
        return None if self.form == "tuple" else ("input_ids" if self.kind == "tokens" else "inputs", "labels")

    def __call__(self, seed: int, size: int) -> Any:
        inputs, targets = _members(self.kind, self.targets == "soft", size, torch.Generator().manual_seed(seed))
        return (inputs, targets) if self.keys is None else dict(zip(self.keys, (inputs, targets), strict=True))


def make_task(
    kind: str = "vectors",
    *,
    targets: str = "index",
    form: str = "tuple",
    dropout: float = 0.0,
    tied: bool = False,
    frozen: bool = False,
    zero_head: bool = False,
    precision: str = "fp32",
    dtype: torch.dtype = torch.float32,
) -> Task:
    """Return a task of a network and fitting batches; see `MakeNet`, `MakeBatch` and `Task`.

    Args:
        kind: One of `KINDS`: "vectors", "images" or "tokens".
        targets, form: As for `MakeBatch`.
        dropout, tied, frozen, zero_head: As for `MakeNet`.
        precision: Passed to `State.create`.
        dtype: Dtype of the parameters and of floating inputs.

    Example:
        >>> make_task("images", targets="soft", dropout=0.2)
        make_task('images', targets='soft', dropout=0.2)
        >>> make_task("vectors", precision="bf16").make_state(0).context.precision
        'bf16'
        >>> make_task("tokens", form="dict").make_batch(0, 2)["input_ids"].shape
        torch.Size([2, 5])
    """
    net, batch = MakeNet(kind, dropout, tied, frozen, zero_head), MakeBatch(kind, targets, form)
    _check_one_of("precision", precision, PRECISIONS)
    options: dict[str, Any] = {} if precision == "fp32" else {"precision": precision}
    if batch.keys is not None:
        options["input_field"], options["target_field"] = batch.keys
    return Task(_call(net, batch, precision, dtype), net, batch, options=options, dtype=dtype)


def _call(net: MakeNet, batch: MakeBatch, precision: str, dtype: torch.dtype) -> str:
    """Return the text of the call that creates the task, with the arguments that are not defaults."""
    settings = {**vars(batch), **vars(net), "precision": precision, "dtype": dtype}
    defaults = {**vars(MakeBatch()), **vars(MakeNet()), "precision": "fp32", "dtype": torch.float32}
    given = [f"{key}={value!r}" for key, value in settings.items() if key != "kind" and value != defaults[key]]
    return f"make_task({', '.join([repr(net.kind), *given])})"


def _check_one_of(role: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{role}={value!r} ({type(value).__name__}): expected one of {', '.join(map(repr, known))}")


def _members(kind: str, is_soft: bool, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    if kind == "tokens":
        ids = torch.randint(_VOCABULARY, (size, _LENGTH + 1), generator=generator)
        inputs, labels = ids[:, :-1].clone(), ids[:, 1:].clone()
        if is_soft:
            return inputs, torch.randn(size, _VOCABULARY, _LENGTH, generator=generator).softmax(1)
        labels[:, 0] = torch.where(torch.arange(size) % 2 == 0, -100, labels[:, 0])
        return inputs, labels
    inputs = torch.randn(size, *((4,) if kind == "vectors" else (2, 6, 6)), generator=generator)
    if is_soft:
        return inputs, torch.randn(size, NUM_CLASSES, generator=generator).softmax(1)
    return inputs, torch.randint(NUM_CLASSES, (size,), generator=generator)


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        name: replace(task, name=name)
        for name, task in {
            "vectors": make_task(),
            "soft": make_task(dropout=0.4, targets="soft"),
            "images": make_task("images"),
            "tokens": make_task("tokens", dropout=0.2, tied=True, form="dict"),
            "frozen": make_task(frozen=True, targets="soft", form="dict"),
            "zero_head": make_task(zero_head=True),
            "double": make_task(dtype=torch.float64),
            "bf16_weights": make_task(dtype=torch.bfloat16),
            "bf16_images": make_task("images", precision="bf16"),
            "bf16_tokens": make_task("tokens", dropout=0.2, form="dict", precision="bf16"),
            "gpt": Task("gpt", make_gpt, MakeBatch("tokens")),
        }.items()
    }
)
"""The tasks by name: vectors (MLP, class indices), soft (dropout, dense targets), images (CNN with BatchNorm, GroupNorm
and a stride), tokens (a small transformer with dropout and tied weights, dictionaries, ignored positions), frozen (an
MLP whose first weight is frozen, dense targets in dictionaries), zero_head (an MLP whose last layer starts at zero),
double and bf16_weights (an MLP with weights and inputs in float64 and bfloat16), bf16_images and bf16_tokens (the same
CNN, and the transformer without tied weights, whose forward pass is in bfloat16), gpt (the library's GPT with
tied weights)."""


def _cast(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the network with floating tensors in another dtype; for float32 it is returned unchanged."""
    if dtype is torch.float32:
        return net
    return net._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
