"""The programs of the gallery as plain PyTorch loops: `torch.optim`, autograd, and the examples' networks and data.

A loop trains a program's network on batches. It is a generator, so that the tests and the benchmark can stop it after
each step; it yields what it trains beside the network. It draws by torch's functions, to which the tests give the
draws of the program.
"""

import copy
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import Adam, AdamW
from torch.overrides import TorchFunctionMode

import purecompose as pc
from examples.ppo import ppo_loss
from examples.segmentation import BORDER, flipped
from examples.simclr import shifted
from examples.translation import PADDING
from examples.wgan_gp import TURNS
from purecompose import State
from purecompose.data import StateStream, epoch_batches
from purecompose.nn.keyed.modules import keyed


__all__ = ["LOOPS", "batch_of", "make", "run", "weights_of"]

Batches = Iterable[Any]
Steps = Iterator[nn.Module | nn.Parameter | None]


def vae(net: nn.Module, batches: Batches) -> Steps:
    optimizer = Adam(net.parameters(), lr=2e-3)
    for number, images in enumerate(batches):
        logits, mean, log_var = net(images)
        reconstruction = F.binary_cross_entropy_with_logits(logits, images.flatten(1), reduction="sum") / len(images)
        kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum() / len(images)
        optimizer.zero_grad()
        (reconstruction + min(1.0, number / 1000) * kl).backward()
        optimizer.step()
        yield


def simclr(net: nn.Module, batches: Batches) -> Steps:
    log_temperature = nn.Parameter(torch.tensor(0.5).log().to(next(net.parameters()).dtype))
    optimizer = Adam([*net.parameters(), log_temperature], lr=2e-3)
    for images in batches:
        n = len(images)
        views = shifted(images, torch.randint(0, 3, (n, 2, 2)))
        views = views + 0.3 * torch.randn_like(views)
        z = F.normalize(torch.cat(net(views).unbind(1)), dim=1)
        similarities = z @ z.T / log_temperature.exp()
        others = similarities.masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf).logsumexp(1)
        optimizer.zero_grad()
        (others - similarities.diagonal(n).repeat(2)).mean().backward()
        optimizer.step()
        yield log_temperature


def ddpm(net: nn.Module, batches: Batches) -> Steps:
    optimizer, average = Adam(net.parameters(), lr=2e-3), copy.deepcopy(net)
    for number, points in enumerate(batches):
        predicted, noise = net(points)
        optimizer.zero_grad()
        F.mse_loss(predicted, noise).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, param in zip(average.parameters(), net.parameters(), strict=True):
                mean.lerp_(param, 0.01 if number else 1.0)
        yield average


def wgan_gp(net: Any, batches: Batches) -> Steps:
    generator, critic = net.generator, net.critic
    of_generator, of_critic = (Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.9)) for part in (generator, critic))
    for batch in batches:
        for real in batch.unbind(1):
            with torch.no_grad():
                fake = generator(torch.randn_like(real))
            between = torch.lerp(fake, real, torch.rand_like(real[:, :1])).requires_grad_()
            of_real, of_fake, of_between = critic(torch.cat([real, fake, between])).chunk(3)
            (slopes,) = torch.autograd.grad(of_between.sum(), between, create_graph=True)
            penalty = (slopes.norm(dim=1) - 1).pow(2).mean()
            of_critic.zero_grad()
            (of_fake.mean() - of_real.mean() + penalty).backward()
            of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(torch.randn_like(batch[:, 0]))).mean()).backward()
        of_generator.step()
        yield


def maml(net: nn.Module, batches: Batches) -> Steps:
    optimizer = Adam(net.parameters(), lr=1e-3)
    for known_points_and_places, values in batches:
        optimizer.zero_grad()
        F.mse_loss(net(*known_points_and_places), values).backward()
        optimizer.step()
        yield


def lora(net: nn.Module, batches: Batches) -> Steps:
    adapters = [param for name, param in net.named_parameters() if name.endswith((".down", ".up"))]
    optimizer = AdamW(adapters, lr=0.02)
    for batch in batches:
        optimizer.zero_grad()
        net(**batch).loss.backward()
        optimizer.step()
        yield


def graphs(net: nn.Module, batches: Batches) -> Steps:
    optimizer = Adam(net.parameters(), lr=3e-3)
    for batch in batches:
        optimizer.zero_grad()
        F.mse_loss(net(batch), batch["energy"]).backward()
        optimizer.step()
        yield


def translation(net: nn.Module, batches: Batches) -> Steps:
    optimizer = Adam(net.parameters(), lr=3e-3)
    for batch in batches:
        logits = net(batch["word"], batch["given"])
        optimizer.zero_grad()
        F.cross_entropy(logits, batch["labels"], ignore_index=PADDING).backward()
        optimizer.step()
        yield


def segmentation(net: nn.Module, batches: Batches) -> Steps:
    optimizer = Adam(net.parameters(), lr=0.01)
    for images, masks in batches:
        images, masks = flipped(images, masks, torch.bernoulli(torch.full((len(images),), 0.5)).bool())
        optimizer.zero_grad()
        F.cross_entropy(net(images), masks, ignore_index=BORDER).backward()
        optimizer.step()
        yield


def ppo(net: nn.Module, batches: Batches) -> Steps:
    optimizer = Adam(net.parameters(), lr=0.01)
    for places, *targets in batches:
        for _ in range(8):
            optimizer.zero_grad()
            ppo_loss(net(places), targets)[0].backward()
            optimizer.step()
        yield


def distillation(net: Any, batches: Batches) -> Steps:
    net.teacher.eval()
    optimizer = Adam(net.student.parameters(), lr=3e-3)
    for inputs, labels in batches:
        with torch.no_grad():
            teacher = net.teacher(inputs)
        student = net.student(inputs)
        soft = 4 * F.kl_div((student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean")
        optimizer.zero_grad()
        (0.9 * soft + 0.1 * F.cross_entropy(student, labels)).backward()
        optimizer.step()
        yield


def pcgrad(net: nn.Module, batches: Batches) -> Steps:
    params = list(net.parameters())
    optimizer = Adam(params, lr=3e-3)
    for inputs, targets in batches:
        losses = (net(inputs) - targets).square().mean(0)
        grads = [parameters_to_vector(torch.autograd.grad(loss, params, retain_graph=True)) for loss in losses]
        projected = [grad.clone() for grad in grads]
        for own, other in ((0, 1), (1, 0)):
            dot = projected[own] @ grads[other]
            if dot < 0:
                projected[own] -= dot / grads[other].square().sum() * grads[other]
        total = (projected[0] + projected[1]).split([param.numel() for param in params])
        for param, grad in zip(params, total, strict=True):
            param.grad = grad.view_as(param)
        optimizer.step()
        yield


LOOPS: dict[str, Callable[[Any, Batches], Steps]] = {
    loop.__name__: loop
    for loop in (vae, simclr, ddpm, wgan_gp, maml, lora, graphs, translation, segmentation, ppo, distillation, pcgrad)
}
"""The loop of each program, in the order of the gallery."""

DRAWS = {
    "simclr": ["shifts", "noise"],
    "wgan_gp": [
        *(f"{name}{f', turn {turn}' * (turn > 0)}" for turn in range(TURNS) for name in ("noise", "share")),
        "noise of the generator",
    ],
    "segmentation": ["flip"],
}
"""Names of the draws in a step of a program whose network does not draw."""


class NamedDraws(TorchFunctionMode):
    """Give the random functions of a plain step the draws of a program's step, by their names in order."""

    def __init__(self, state: State, names: Iterable[str]) -> None:
        super().__init__()
        self._rng, self._names = state.rng, iter(names)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.rand_like, torch.randn_like, torch.randint, torch.bernoulli):
            return func(*args, **(kwargs or {}))
        shape = args[-1] if func is torch.randint else args[0].shape
        rng = self._rng(next(self._names)).per_example(torch.arange(shape[0]))
        if func is torch.randint:
            return pc.random.randint(rng, shape, *args[:-1])
        if func is torch.bernoulli:
            return pc.random.bernoulli(rng, args[0])
        draw = pc.random.normal if func is torch.randn_like else pc.random.uniform
        return draw(rng, shape, dtype=args[0].dtype)


def make(name: str, dtype: torch.dtype) -> tuple[pc.Step, State, Any]:
    """Return a program's step, the state before it, and the batches."""
    return importlib.import_module(f"examples.{name}").make(dtype)


def batch_of(batches: Any, state: State) -> Any:
    """Return the batch on which `fit` trains this state, of the first epoch."""
    if isinstance(batches, StateStream):
        return batches.batch(state)
    return next(epoch_batches(batches, state.key, 0, state.timestamp.batch))


def run(name: str, num_batches: int) -> dict[str, Tensor]:
    """Return what a plain loop has trained in float64, with the batches and draws of the program."""
    _, start, batches = make(name, torch.float64)
    net, given, others = pc.to_module(start), [], None
    steps = LOOPS[name](net, (given.pop() for _ in itertools.count()))
    for number in range(num_batches):
        now = {**start.params, **{name: param.detach() for name, param in net.named_parameters()}}
        state = start.replace(params=now, timestamp=start.timestamp.replace(batch=number))
        given.append(batch_of(batches, state))
        with _draws_of(name, state, given[0]):
            others = next(steps)
    weights = dict(net.named_parameters())
    if isinstance(others, nn.Parameter):
        weights["loss.log_temperature"] = others
    elif others is not None:
        weights |= {f"ema.{name}": mean for name, mean in others.named_parameters()}
    return {name: weight.detach() for name, weight in weights.items()}


def _draws_of(name: str, state: State, batch: Any) -> AbstractContextManager[Any]:
    if name in ("vae", "ddpm"):  # their networks draw
        return keyed(state.rng(".forward"), num_examples=len(batch))
    return NamedDraws(state, DRAWS.get(name, ()))


def weights_of(state: State) -> dict[str, Tensor]:
    """Return a state's parameters and, if there are any, their averages, named as by a plain loop."""
    averages = pc.surgery.with_weights(state, "ema").params if "ema" in state.slots else {}
    return {**state.params, **{f"ema.{name}": average for name, average in averages.items()}}
