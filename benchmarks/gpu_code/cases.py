"""The networks and methods whose code is written, as steps of ours and as loops that people write."""

import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from purecompose import Algorithm, State, Step, algorithms as alg, compose, loop_events, losses, optim
from purecompose.nn import layers, models


class Case(NamedTuple):
    """A network with a batch, and how it is trained."""

    net: nn.Module
    batch: tuple[Tensor, Tensor]
    precision: str = "fp32"
    optimizer: str = "sgd"
    recipe: Callable[[], Any] | None = None
    """The methods and the optimizer of the task's recipe, as `Parts` of benchmarks/quality."""


def mlp() -> Case:
    """An MLP 64-128-128-10 and a batch of 64, in float32."""
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return Case(net, (torch.randn(64, 64), torch.randint(10, (64,))))


def gpt() -> Case:
    """A GPT of two blocks of width 512 with a vocabulary of 8,192, and 16 sequences of 512 tokens."""
    return _gpt(8192, 512, 16, width=512, num_heads=8, depth=2)


def gpt2() -> Case:
    """GPT-2 small, tied, with AdamW, and 8 sequences of 1,024 tokens."""
    case = _gpt(50257, 1024, 8, width=768, num_heads=12, depth=12, is_tied=True)
    return case._replace(optimizer="adamw")


def resnet18() -> Case:
    """A ResNet-18 in the form for small images and a batch of 512 images of 32x32."""
    return _images(models.resnet18(3, 10, width=64, small_images=True), 512, 32, 10)


def resnet50() -> Case:
    """A ResNet-50 and a batch of 128 images of 224x224."""
    return _images(models.resnet50(3, 1000), 128, 224, 1000)


def vit_s() -> Case:
    """A ViT-S/16 with AdamW and a batch of 128 images of 224x224."""
    net = models.build(
        "vit", in_shape=(3, 224, 224), num_classes=1000, seed=0, width=384, num_heads=6, depth=12, patch_size=16
    )
    images, classes = torch.randn(128, 3, 224, 224), torch.randint(1000, (128,))
    return Case(net, (images, classes), "bf16", "adamw")


class Encoder(nn.Module):
    """A transformer encoder of post-norm blocks that predicts a token at each position: `(N, T) -> (N, V, T)`."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        block = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout, F.gelu, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.blocks(self.tokens(ids) + self.positions)).movedim(-1, 1)


def bert() -> Case:
    """An encoder of BERT-base's size, with dropout outside of attention and AdamW, and 16 sequences of 512 tokens."""
    case = bert_dropout()
    for module in case.net.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return case


def bert_dropout() -> Case:
    """The same encoder, with dropout in attention, too."""
    ids = torch.randint(30522, (16, 512))
    return Case(Encoder(30522, 512, 768, 12, 0.1), (ids, ids), "bf16", "adamw")


def airbench() -> Case:
    """The network of benchmarks/quality/cifar10_94.py and a batch of 1,000 images of 32x32."""
    task = _quality("cifar10_94")
    case = _images(task.SETUP.network(0), 1000, 32, 10)
    return case._replace(recipe=lambda: task.SETUP.parts(task.RECIPE))


def fineweb() -> Case:
    """The GPT-2 of benchmarks/quality/fineweb.py and 64 sequences of 1,024 tokens, an eighth of its batch."""
    task = _quality("fineweb")
    ids = torch.randint(task.VOCABULARY, (64, 1025))
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    return Case(task.new_net(0, {}), batch, "bf16", "adamw", lambda: task.recipe_parts(task.RECIPE))


def _quality(name: str) -> Any:
    """Return a script of benchmarks/quality, which makes its network on the CPU."""
    benchmarks = pathlib.Path(__file__).parents[1]
    sys.path.extend(str(folder) for folder in (benchmarks, benchmarks / "quality") if str(folder) not in sys.path)
    with mock.patch("torch.cuda.is_available", return_value=False):
        return importlib.import_module(name)


def _gpt(vocabulary: int, length: int, num: int, *, is_tied: bool = False, **sizes: int) -> Case:
    net = layers.ClassesSecond(models.gpt(vocabulary, length, is_tied=is_tied, **sizes))
    ids = torch.randint(vocabulary, (num, length + 1))
    return Case(net, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), "bf16")


def _images(net: nn.Module, num: int, size: int, num_classes: int) -> Case:
    net = net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = torch.randn(num, 3, size, size).contiguous(memory_format=torch.channels_last)
    return Case(net, (images, torch.randint(num_classes, (num,))), "bf16")


NETWORKS: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "gpt": gpt,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "vit_s": vit_s,
    "gpt2": gpt2,
    "bert": bert,
    "bert_dropout": bert_dropout,
    "airbench": airbench,
    "fineweb": fineweb,
}

METHODS: dict[str, Callable[[], list[Algorithm]]] = {
    "plain": list,
    "label_smoothing": lambda: [alg.label_smoothing(0.1)],
    "mixup+label_smoothing": lambda: [alg.mixup(0.2), alg.label_smoothing(0.1)],
    "ema": lambda: [alg.ema()],
    "sam": lambda: [alg.sam(0.05)],
    "recipe": list,  # the case's own
}


def build(network: str) -> Case:
    """Return a network with its batch, the same in every call."""
    torch.manual_seed(0)
    return NETWORKS[network]()


def ours(case: Case, methods: str) -> tuple[Step, State]:
    """Return the step of a case with methods, and the state at its start.

    Patches are whitened once, by the host; a step's code begins after it.
    """
    chosen = METHODS[methods]()
    optimizer = optim.adamw(1e-3) if case.optimizer == "adamw" else optim.sgd(0.01, momentum=0.9)
    if methods == "recipe":
        if case.recipe is None:
            raise SystemExit("this network has no recipe; airbench and fineweb have")
        parts = case.recipe()
        chosen, optimizer = [one for one in parts.methods if one.name != "patch_whitening"], parts.optimizer
    settings: dict[str, Any] = {"precision": case.precision, "duration": "2ep", "batches_per_epoch": 100}
    state = State.create(case.net, loss=losses.cross_entropy, optimizer=optimizer, key=0, **settings)
    step = compose(loop_events, chosen)
    return step, step.init(state)


def optimizer_by_hand(case: Case) -> torch.optim.Optimizer:
    """Return torch's optimizer with the settings of `ours`."""
    params = case.net.parameters()
    if case.optimizer == "adamw":
        return torch.optim.AdamW(params, lr=1e-3)
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)
