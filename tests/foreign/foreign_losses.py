"""Cases: losses of torch.nn and manual ones, with the reductions and targets that they take."""

# For a type checker, attributes of modules are Tensor | Module.
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.foreign.foreign_case import READS, Case, MakeBatch, classes, mapped, values, vectors


class Several(nn.Module):
    """A hidden layer and several heads, each with a width."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, width) for width in widths)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.body(x))
        return tuple(head(hidden) for head in self.heads)


class Embedder(nn.Module):
    """The same network over each of several inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.net(one) for one in inputs)


class AutoEncoder(nn.Module):
    """A variational autoencoder, whose latent vector is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Several(2, 2), nn.Linear(2, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean, log_var = self.encoder(x)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return {"x": self.decoder(mean + noise * (log_var / 2).exp()), "mean": mean, "log_var": log_var}


def plain(width: int = 3, last: Callable[[], nn.Module] = nn.Identity) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, width), last())


def grids(g: Generator) -> tuple[Tensor, Tensor]:
    """Return images of 2 channels and a class for each position, some without."""
    targets = classes(g, 4, 5, 5)
    return torch.randn(4, 2, 5, 5, generator=g), torch.where(torch.rand(4, 5, 5, generator=g) < 0.4, -100, targets)


def sometimes_ignored(g: Generator) -> tuple[Tensor, Tensor]:
    x, y = vectors()(g)
    return x, torch.cat([torch.tensor([-100]), y[1:]])


def binary(g: Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, generator=g), classes(g, 4, 3, num=2).to(torch.get_default_dtype())


def tuples(num: int) -> MakeBatch:
    """Several inputs and a sign for each example."""
    return lambda g: ([torch.randn(4, 6, generator=g) for _ in range(num)], 2.0 * classes(g, 4, num=2) - 1)


def transcripts(g: Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Series of 7 and shorter texts, for CTC."""
    texts = {"ids": 1 + classes(g, 4, 3, num=2), "lengths": torch.tensor([3, 2, 1, 2])}
    return torch.randn(4, 7, 6, generator=g), texts


def two_tasks(g: Generator) -> tuple[Tensor, dict[str, Tensor]]:
    x, y = vectors()(g)
    return x, {"class": y, "value": torch.randn(4, 1, generator=g)}


def contrastive(outputs: tuple[Tensor, Tensor], targets: Any) -> Tensor:
    first, second = (F.normalize(one, dim=1) for one in outputs)
    return F.cross_entropy(first @ second.T / 0.5, torch.arange(len(first)))


def evidence(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    mean, log_var = outputs["mean"], outputs["log_var"]
    divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
    return F.mse_loss(outputs["x"], targets, reduction="sum") / len(targets) + divergence


def mixture_density(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    weights, means, log_scales = outputs
    parts = torch.distributions.Normal(means, log_scales.exp())
    return -torch.logsumexp(weights.log_softmax(1) + parts.log_prob(targets[:, :1]), 1).mean()


def connectionist(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
    logs = outputs.log_softmax(2).transpose(0, 1)
    lengths = torch.full((logs.shape[1],), logs.shape[0])
    return F.ctc_loss(logs, targets["ids"], lengths, targets["lengths"])


def both_tasks(outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs[0], targets["class"]) + 0.5 * F.mse_loss(outputs[1], targets["value"])


def same(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def log_softmax() -> nn.Module:
    return nn.LogSoftmax(1)


class ClassWeights(nn.CrossEntropyLoss):
    """torch's loss with weights of the dtype in use."""

    def __init__(self) -> None:
        super().__init__(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))


def convolution() -> nn.Module:
    return nn.Conv2d(2, 3, 3, padding=1)


CASES = [
    Case("CrossEntropyLoss", plain(), vectors(), nn.CrossEntropyLoss(), adam=True),
    Case("CrossEntropyLoss, some ignored", plain(), sometimes_ignored, nn.CrossEntropyLoss()),
    Case("CrossEntropyLoss with weights", plain(), vectors(), ClassWeights()),
    Case("CrossEntropyLoss of places, some ignored", convolution, grids, nn.CrossEntropyLoss(), inductor=True),
    Case("NLLLoss", plain(3, log_softmax), vectors(), nn.NLLLoss()),
    Case("BCEWithLogitsLoss", plain(), binary, nn.BCEWithLogitsLoss()),
    Case("MSELoss", plain(), values(), nn.MSELoss(), adam=True),
    Case("GaussianNLLLoss", lambda: Several(3, 3), values(),
         lambda o, t: F.gaussian_nll_loss(o[0], t, F.softplus(o[1])), refused=READS),
    Case("CTCLoss", lambda: nn.Linear(6, 4), transcripts, connectionist,
         refused={"compiled": "losses.ctc"}),
    Case("contrastive loss", Embedder, tuples(2), contrastive, sliced="its negatives are in the slice"),
    Case("two tasks", lambda: Several(3, 1), two_tasks, both_tasks, inductor=True),
    Case("mixture density", lambda: Several(2, 2, 2), values(1), mixture_density,
         refused={"compiled": READS["compiled"]}),
    Case("variational autoencoder", AutoEncoder, mapped(vectors(), same), evidence, draws=True),
]  # fmt: skip
