"""Cases: torch.nn's layers, one or a few at a time."""

# For a type checker, attributes of modules are Tensor | Module.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.foreign.foreign_case import SHAPES, WRITES, Case, classes, images, mapped, tokens, vectors


BATCH_NORM = "batch normalization sees slices"


def on_vectors(*layers: Callable[[], nn.Module], width: int = 8) -> Callable[[], nn.Module]:
    """Return a network for vectors of 6 through layers of the width."""
    return lambda: nn.Sequential(nn.Linear(6, 8), *(layer() for layer in layers), nn.Tanh(), nn.Linear(width, 3))


def on_images(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a network for images of 2 channels: layers, then the mean of each remaining channel."""

    def make() -> nn.Module:
        features = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), *(layer() for layer in layers))
        return nn.Sequential(features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LazyLinear(3))

    def shaped() -> nn.Module:
        net = make()
        training = {module: module.training for module in net.modules()}
        net.eval()(torch.zeros(2, 2, 8, 8))
        for module, was in training.items():
            module.training = was
        return net

    return shaped


def volumes(dims: int, side: int = 6) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    return lambda g: (torch.randn(4, 2, *[side] * dims, generator=g), classes(g, 4))


class Unpooled(nn.Module):
    """Max pooling and unpooling."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.unpool(*self.pool(x))


class ScaledByOne(nn.Module):
    """A parametrization: the exponential of the learnt tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Symmetric(nn.Module):
    """A parametrization: the upper triangle and its mirror image."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


def parametrized() -> nn.Module:
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    parametrize.register_parametrization(layer, "bias", ScaledByOne())
    return layer


class Bags(nn.Module):
    """An EmbeddingBag over rows of ids, by its mode."""

    def __init__(self, mode: str, **options: object) -> None:
        super().__init__()
        self.bag, self.leave = nn.EmbeddingBag(7, 6, mode=mode, **options), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.leave(self.bag(ids))


class Embedded(nn.Module):
    """An embedding, averaged."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embedding, self.leave = nn.Embedding(7, 6, **options), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.leave(self.embedding(ids).mean(1))


class AdaptiveSoftmax(nn.Module):
    """A network that returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 12, cutoffs=[4, 8])

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(inputs)), targets).loss


def as_named(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"inputs": inputs, "targets": targets}


def own_loss(outputs: Tensor, targets: object, reduction: str = "mean") -> Tensor:
    return outputs


def of_named(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return net(**batch)


VECTOR_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(8),
    "in-place relu": lambda: nn.ReLU(inplace=True),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    "own parametrizations": parametrized,
}

IMAGE_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "group norm": lambda: nn.GroupNorm(2, 4),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "max pooling": lambda: nn.MaxPool2d(3, 2, 1),
    "max unpooling": Unpooled,
    "depthwise and dilated": lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2, padding="same", padding_mode="reflect"),
}

CASES = [
    *(Case(name, on_vectors(make), vectors(), adam=i % 2 > 0) for i, (name, make) in enumerate(VECTOR_LAYERS.items())),
    *(Case(name, on_images(make), images(), adam=i % 3 > 1) for i, (name, make) in enumerate(IMAGE_LAYERS.items())),
    Case("spectral norm", on_vectors(lambda: parametrizations.spectral_norm(nn.Linear(8, 8))), vectors(),
         sliced="the power iteration runs once a slice"),
    Case("batch norm", on_images(lambda: nn.BatchNorm2d(4)), images(), sliced=BATCH_NORM, inductor=True),
    Case("instance norm with statistics", on_images(lambda: nn.InstanceNorm2d(4, track_running_stats=True)), images(),
         sliced="its statistics see slices"),
    Case("batch norm in evaluation mode", on_images(lambda: nn.BatchNorm2d(4).eval()), images(),
         options={"eval_mode": ["0.2"]}),
    Case("convolution 1d", lambda: nn.Sequential(nn.Conv1d(2, 4, 3, stride=2), nn.BatchNorm1d(4), nn.SiLU(),
         nn.MaxPool1d(2), nn.Flatten(), nn.Linear(4, 3)), volumes(1), sliced=BATCH_NORM),
    Case("channels last", lambda: on_images(lambda: nn.Conv2d(4, 4, 3))().to(memory_format=torch.channels_last),
         mapped(images(), lambda x, y: (x.to(memory_format=torch.channels_last), y))),
    Case("embedding", lambda: Embedded(padding_idx=0), tokens(), adam=True),
    Case("embedding scaled by frequency", lambda: Embedded(scale_grad_by_freq=True), tokens(),
         sliced="it counts ids in slices"),
    Case("embedding with a maximal norm", lambda: Embedded(max_norm=1.0), tokens(), refused=WRITES),
    Case("embedding bag of maxima", lambda: Bags("max", padding_idx=1), tokens()),
    Case("adaptive softmax", AdaptiveSoftmax, mapped(vectors(num_classes=12), as_named), own_loss, of_named,
         options={"input_field": "*", "target_field": "*"}, adam=True, refused={"compiled": SHAPES["compiled"]}),
]  # fmt: skip
