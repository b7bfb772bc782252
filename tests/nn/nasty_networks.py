"""Networks that researchers write and that break libraries, each with its batches, as tasks for the laws."""

# For a type checker, attributes of modules are Tensor | Module, in every line below.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import purecompose as pc
from purecompose import State
from purecompose.testing.tasks import Task


CLASSES = 3


class Around(nn.Module):
    """Vectors of 4 pass through `inner` at width 6, between two layers of torch."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(4, 6), inner or nn.Identity(), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.inner(torch.tanh(self.enter(x))))


class Slope(nn.Module):
    """The gradient of a sum of squares, as in networks of energies or forces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            points = x.detach().requires_grad_()
            energy = self.linear(points).tanh().square().sum()
            return torch.autograd.grad(energy, points, create_graph=self.training)[0]


# Buffers


class RunningMean(nn.Module):
    """Centres inputs by its own running mean, which it writes in the way `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=how != "setattr")
        self.register_buffer("calls", torch.tensor(0, dtype=torch.int64))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            delta = 0.1 * (x.detach().mean(0) - self.mean)
            if self.how == "in place":
                self.mean.add_(delta)
            elif self.how == "rebound":
                self.mean = self.mean + delta
            else:
                setattr(self, "me" + "an", self.mean + delta)
        return x - self.mean


class History(nn.Module):
    """A ring of past means: integer pointer, writes by index, a view returned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(3, 6))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            slot = (torch.arange(3) == self.at).unsqueeze(1)
            self.ring.copy_(torch.where(slot, x.detach().mean(0), self.ring))
            self.seen.logical_or_(slot.squeeze(1))
            self.at = (self.at + 1) % 3
        return x + self.ring.mean(0)


class ListedBuffers(nn.Module):
    """Tensors in lists and dictionaries, which torch does not register."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [torch.full((6,), 0.5), torch.ones(6)]
        self.shifts = {"low": torch.zeros(6), "high": torch.full((6,), 0.1)}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scales[0] = 0.9 * self.scales[0] + 0.1
            self.shifts["low"].add_(0.01)
        return x * self.scales[0] * self.scales[1] + self.shifts["low"] - self.shifts["high"]


# Attributes that forward changes: the library restores them with a warning


class RotaryCache(nn.Module):
    """Rotates pairs by a table that it computes and caches at the first call."""

    def __init__(self, holder: str = "attribute") -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.tables: dict[int, Tensor] = {}
        self.holder = holder

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1] // 2
        found = self.table if self.holder == "attribute" else self.tables.get(width)
        if found is None:
            found = torch.exp(-torch.arange(width).to(x) / width)
            self.table = found if self.holder == "attribute" else None
            if self.holder == "dictionary":
                self.tables[width] = found
        first, second = x[..., :width], x[..., width:]
        return torch.cat([first * found.cos() - second * found.sin(), first * found.sin() + second * found.cos()], -1)


class LastActivation(nn.Module):
    """Stores its activation and a count in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.activation = x
        self.log.append(tuple(x.shape))
        return x


# Structure


class Tied(nn.Module):
    """One weight at four places: a layer used twice, a transpose, a list, an alias of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.again = self.first
        self.extra = nn.ParameterList([self.first.weight, nn.Parameter(torch.ones(4))])
        self.leave = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.again(torch.tanh(self.second(self.first(x)))))
        return self.leave(x @ self.extra[0].T * self.extra[1])


class Containers(nn.Module):
    """Nested ModuleDict, ModuleList, ParameterDict, ParameterList; walked in reverse, by name, by slices."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"b": nn.Linear(6, 6), "a": nn.ModuleList([nn.LayerNorm(6), nn.Tanh()])}) for _ in range(2)
        )
        self.scales = nn.ParameterDict({"z": nn.Parameter(torch.ones(6)), "a": nn.Parameter(torch.full((1,), 0.5))})
        self.gates = nn.ParameterList([torch.ones(6), torch.zeros(6)])
        self.tail = nn.Sequential(OrderedDict(last=nn.Linear(6, 6), act=nn.GELU()))

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = x + block["a"][1](block["b"](block["a"][0](x)))
        for gate in self.gates[:2]:
            x = x * gate.sigmoid()
        return self.tail[:2](x) * self.scales["z"] + self.scales["a"]


class PartlyFrozen(nn.Module):
    """Frozen weights before, between and after trainable ones; one that is never used; one that has no element."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[0].requires_grad_(False)
        self.layers[2].bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2, 2))
        self.empty = nn.Parameter(torch.zeros(0, 6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self.empty.sum()


class MixedDtypes(nn.Module):
    """Half, single and double precision, and a complex weight, in one network."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        self.high = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False] * 3))
        self.register_buffer("index", torch.tensor([5, 4, 3, 2, 1, 0], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(self.mask, x * self.low.to(x.dtype), x * self.high.to(x.dtype))
        return x[:, self.index.long()]


class Fourier(nn.Module):
    """A complex filter on the spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.complex(torch.ones(4), 0.1 * torch.ones(4)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6)


# Draws


class FunctionalDropout(nn.Module):
    """Dropout in every form except modules, one of them in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.2, self.training)
        x = F.dropout(x * 1.0, 0.2, self.training, inplace=True)
        return x + 0.1 * torch.randn_like(x) if self.training else x


class SometimesNoise(nn.Module):
    """Draws only at every second call, counted by a buffer (stochastic depth with a Python branch)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.calls += 1
        if self.calls.item() % 2:
            x = x + 0.1 * torch.randn(x.shape)
        return x * (torch.rand(x.shape[0], 1) < 0.7)


class Recomputed(nn.Module):
    """Activation checkpointing over dropout and a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), RunningMean("in place"), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return pc.nn.layers.checkpoint(self.body, x)


class Sentences(nn.Module):
    """A recurrent or attention core over padded (batch, 5) ids, which returns logits of the whole sentence."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6, padding_idx=0)
        self.core, self.leave = core, nn.Linear(6, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        if isinstance(self.core, nn.MultiheadAttention):
            found = self.core(hidden, hidden, hidden, key_padding_mask=(ids == 0) & (torch.arange(5) > 0))[0]
        else:
            found = self.core(hidden)
        return self.leave((found[0] if isinstance(found, tuple) else found).mean(1))


class Masked(nn.Module):
    """torch's encoder, which compares its mask, a buffer, with the causal one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, mask=self.mask.to(x.dtype))


# Calls


class Swapped(torch.autograd.Function):
    """Sign with a straight-through gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class Binarised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Swapped.apply(x)  # pyright: ignore[reportReturnType]


class ByShape(nn.Module):
    """Python branches on shapes, with other layers for other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        layers = [self.even, self.odd] if x.shape[-1] % 2 == 0 else [self.odd]
        for i in range(int(math.sqrt(x.shape[-1]))):
            x = x + layers[i % len(layers)](x) / (1 + len(x.shape))
        return x


class ByName(Around):
    """Takes a dictionary as keyword arguments."""

    def forward(self, x: Tensor, *, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        x = x * scale.unsqueeze(1)
        return super().forward(x if shift is None else x + shift)


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]


class ToDataclass(Around):
    """Returns an object."""

    def forward(self, x: Tensor) -> Output:
        hidden = torch.tanh(self.enter(x))
        return Output(self.leave(hidden), [hidden])


def loss_of_output(outputs: Output, targets: Any, reduction: str = "mean") -> Tensor:
    return pc.losses.evaluate_loss(pc.losses.cross_entropy, outputs.logits, targets, reduction)


def twice_the_input(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (2 * args[0],)


def halve_the_output(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    return output / 2


def hooked(_: int) -> nn.Module:
    net = Around(nn.Linear(6, 6))
    net.inner.register_forward_pre_hook(twice_the_input)
    net.leave.register_forward_hook(halve_the_output)
    return net


# Batches


def vectors(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


def images(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 2, 4, 4, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


def sentences(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(7, (size, 5), generator=generator)
    return ids, torch.randint(CLASSES, (size,), generator=generator)


def named(seed: int, size: int) -> tuple[dict[str, Tensor], Tensor]:
    x, y = vectors(seed, size)
    return {"x": x, "scale": 1 + x[:, 0].abs()}, y


def around(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda _: Around(make())


def on_images(*layers: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    def make(_: int) -> nn.Module:
        first, last = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Linear(64, CLASSES)
        return nn.Sequential(first, *(layer() for layer in layers), nn.Tanh(), nn.Flatten(), last)

    return make


def reading(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda _: Sentences(make())


class AsItIs(Task):
    """A task whose network keeps its mixed dtypes."""

    def make_state(self, seed: int, *, dtype: torch.dtype = torch.float32, **options: Any) -> State:
        if dtype is not torch.float32:
            return super().make_state(seed, dtype=dtype, **options)
        optimizer = pc.optim.sgd(pc.hparam("lr", 0.1), momentum=0.9)
        return State.create(self.make_net(seed), loss=self.loss, **{"optimizer": optimizer, "key": seed, **options})


NETWORKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("buffer in place", around(lambda: RunningMean("in place")), vectors),
        Task("buffer rebound", around(lambda: RunningMean("rebound")), vectors),
        Task("buffer by setattr", around(lambda: RunningMean("setattr")), vectors),
        Task("ring of integers and flags", around(History), vectors),
        Task("tensors in lists", around(ListedBuffers), vectors),
        Task("cache in an attribute", around(RotaryCache), vectors),
        Task("cache in a dictionary", around(lambda: RotaryCache("dictionary")), vectors),
        Task("activations left behind", around(LastActivation), vectors),
        Task("tied at four places", lambda _: Tied(), vectors),
        Task("containers", around(Containers), vectors),
        Task("partly frozen", around(PartlyFrozen), vectors),
        AsItIs("mixed dtypes", around(MixedDtypes), vectors),
        AsItIs("complex weights", around(Fourier), vectors),
        Task("functional dropout", around(FunctionalDropout), vectors),
        Task(
            "dropout in place", around(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3, inplace=True))), vectors
        ),
        Task("draws now and then", around(SometimesNoise), vectors),
        Task("checkpointing", around(Recomputed), vectors),
        Task("weight norm", around(lambda: parametrizations.weight_norm(nn.Linear(6, 6))), vectors),
        Task("spectral norm", around(lambda: parametrizations.spectral_norm(nn.Linear(6, 6))), vectors),
        Task("orthogonal", around(lambda: parametrizations.orthogonal(nn.Linear(6, 6, bias=False))), vectors),
        Task("slope", around(Slope), vectors),
        Task("hooks", hooked, vectors),
        Task("autograd function", around(Binarised), vectors),
        Task("control flow by shapes", around(ByShape), vectors),
        Task("keyword inputs", lambda _: ByName(), named),
        Task("dataclass output", lambda _: ToDataclass(), vectors, loss=loss_of_output),
        Task("batch norm, cumulative", on_images(lambda: nn.BatchNorm2d(4, momentum=None)), images),
        Task("batch norm, untracked", on_images(lambda: nn.BatchNorm2d(4, track_running_stats=False)), images),
        Task("batch norm, bare", on_images(lambda: nn.BatchNorm2d(4, affine=False)), images),
        Task("instance norm", on_images(lambda: nn.InstanceNorm2d(4, affine=True)), images),
        Task("instance norm, tracked", on_images(lambda: nn.InstanceNorm2d(4, track_running_stats=True)), images),
        Task("group norm", on_images(lambda: nn.GroupNorm(2, 4)), images),
        Task("channel dropout", on_images(lambda: nn.Dropout2d(0.3)), images),
        Task("lstm", reading(lambda: nn.LSTM(6, 6, batch_first=True)), sentences),
        Task(
            "gru of layers",
            reading(lambda: nn.GRU(6, 3, 2, batch_first=True, dropout=0.3, bidirectional=True)),
            sentences,
        ),
        Task("attention", reading(lambda: nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True)), sentences),
        Task("encoder", reading(lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)), sentences),
        Task("encoder with a mask", reading(Masked), sentences),
    )
}
