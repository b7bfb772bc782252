"""The programs of the gallery as plain PyTorch loops: `torch.optim`, autograd, and the examples' networks and data.

A loop takes a program's network with its first weights. It returns what it trains, named as in the program's state, and
its step, a function of a batch and of draws. The tests give it the draws of the program, the benchmark those of torch.
"""

import copy
import importlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

import purecompose as pc
from examples.ppo import ppo_loss
from examples.segmentation import BORDER, flipped
from examples.simclr import shifted
from examples.translation import PADDING
from examples.wgan_gp import TURNS
from purecompose import State
from purecompose.data import StateStream, epoch_batches
from purecompose.nn.keyed.modules import keyed


__all__ = ["LOOPS", "Draws", "KeyedDraws", "batch_of", "make", "run", "weights_of"]


class Draws:
    """Draws by torch's generator, as a plain loop makes them."""

    def normal(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    def uniform(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.rand(shape, dtype=dtype)

    def randint(self, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape)

    def bernoulli(self, name: str, p: float, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape) < p

    def of_forward(self, num_examples: int) -> AbstractContextManager[Any]:
        """Return a scope for a forward pass that draws by torch's functions."""
        return nullcontext()


class KeyedDraws(Draws):
    """Draws of a program's step, by the key and the time of the state before it."""

    def __init__(self, state: State) -> None:
        self._rng = state.rng

    def _each(self, name: str, shape: tuple[int, ...]) -> pc.random.Rng:
        return self._rng(name).per_example(torch.arange(shape[0]))

    def normal(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return pc.random.normal(self._each(name, shape), shape, dtype=dtype)

    def uniform(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return pc.random.uniform(self._each(name, shape), shape, dtype=dtype)

    def randint(self, name: str, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return pc.random.randint(self._each(name, shape), shape, low, high)

    def bernoulli(self, name: str, p: float, shape: tuple[int, ...]) -> Tensor:
        return pc.random.bernoulli(self._each(name, shape), p, shape)

    def of_forward(self, num_examples: int) -> AbstractContextManager[Any]:
        return keyed(self._rng(".forward"), num_examples=num_examples)


PlainStep = Callable[[Any, Draws], None]
Loop = tuple[dict[str, nn.Parameter], PlainStep]


def by_loss(net: nn.Module, optimizer: Optimizer, loss: Callable[[Any, Draws], Tensor]) -> Loop:
    """Return the loop with one loss and one update in each step."""

    def step(batch: Any, draws: Draws) -> None:
        optimizer.zero_grad()
        loss(batch, draws).backward()
        optimizer.step()

    return dict(net.named_parameters()), step


def vae(net: nn.Module) -> Loop:
    times = itertools.count()

    def loss(images: Tensor, draws: Draws) -> Tensor:
        with draws.of_forward(len(images)):
            logits, mean, log_var = net(images)
        reconstruction = F.binary_cross_entropy_with_logits(logits, images.flatten(1), reduction="sum") / len(images)
        kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum() / len(images)
        return reconstruction + min(1.0, next(times) / 1000) * kl

    return by_loss(net, Adam(net.parameters(), lr=2e-3), loss)


def simclr(net: nn.Module) -> Loop:
    dtype = next(net.parameters()).dtype
    log_temperature = nn.Parameter(torch.tensor(0.5).log().to(dtype))

    def loss(images: Tensor, draws: Draws) -> Tensor:
        n = len(images)
        views = shifted(images, draws.randint("shifts", (n, 2, 2), 0, 3))
        views = views + 0.3 * draws.normal("noise", (n, 2, 1, 8, 8), dtype)
        z = F.normalize(torch.cat(net(views).unbind(1)), dim=1)
        similarities = z @ z.T / log_temperature.exp()
        others = similarities.masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf).logsumexp(1)
        return (others - similarities.diagonal(n).repeat(2)).mean()

    params, step = by_loss(net, Adam([*net.parameters(), log_temperature], lr=2e-3), loss)
    return {**params, "loss.log_temperature": log_temperature}, step


def ddpm(net: nn.Module) -> Loop:
    def loss(points: Tensor, draws: Draws) -> Tensor:
        with draws.of_forward(len(points)):
            predicted, noise = net(points)
        return F.mse_loss(predicted, noise)

    params, update = by_loss(net, Adam(net.parameters(), lr=2e-3), loss)
    averages, times = dict(copy.deepcopy(net).named_parameters()), itertools.count()

    def step(points: Tensor, draws: Draws) -> None:
        update(points, draws)
        share = 0.01 if next(times) else 1.0
        with torch.no_grad():
            for name, param in params.items():
                averages[name].lerp_(param, share)

    return {**params, **{f"ema.{name}": average for name, average in averages.items()}}, step


def wgan_gp(net: Any) -> Loop:
    generator, critic = net.generator, net.critic
    of_generator, of_critic = (Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.9)) for part in (generator, critic))

    def step(batch: Tensor, draws: Draws) -> None:
        n, dtype = len(batch), batch.dtype
        for turn in range(TURNS):
            real, of_turn = batch[:, turn], f", turn {turn}" * (turn > 0)
            with torch.no_grad():
                fake = generator(draws.normal(f"noise{of_turn}", (n, 2), dtype))
            between = torch.lerp(fake, real, draws.uniform(f"share{of_turn}", (n, 1), dtype)).requires_grad_()
            of_real, of_fake, of_between = critic(torch.cat([real, fake, between])).split(n)
            (slopes,) = torch.autograd.grad(of_between.sum(), between, create_graph=True)
            penalty = (slopes.norm(dim=1) - 1).pow(2).mean()
            of_critic.zero_grad()
            (of_fake.mean() - of_real.mean() + penalty).backward()
            of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(draws.normal("noise of the generator", (n, 2), dtype))).mean()).backward()
        of_generator.step()

    return dict(net.named_parameters()), step


def maml(net: nn.Module) -> Loop:
    def loss(batch: Any, draws: Draws) -> Tensor:
        known_points_and_places, values = batch
        return F.mse_loss(net(*known_points_and_places), values)

    return by_loss(net, Adam(net.parameters(), lr=1e-3), loss)


def lora(net: nn.Module) -> Loop:
    adapters = [param for name, param in net.named_parameters() if name.endswith((".down", ".up"))]
    return by_loss(net, AdamW(adapters, lr=0.02), lambda batch, draws: net(**batch).loss)


def graphs(net: nn.Module) -> Loop:
    optimizer = Adam(net.parameters(), lr=3e-3)
    return by_loss(net, optimizer, lambda batch, draws: F.mse_loss(net(batch), batch["energy"]))


def translation(net: nn.Module) -> Loop:
    def loss(batch: dict[str, Tensor], draws: Draws) -> Tensor:
        return F.cross_entropy(net(batch["word"], batch["given"]), batch["labels"], ignore_index=PADDING)

    return by_loss(net, Adam(net.parameters(), lr=3e-3), loss)


def segmentation(net: nn.Module) -> Loop:
    def loss(batch: tuple[Tensor, Tensor], draws: Draws) -> Tensor:
        images, masks = flipped(*batch, draws.bernoulli("flip", 0.5, (len(batch[0]),)))
        return F.cross_entropy(net(images), masks, ignore_index=BORDER)

    return by_loss(net, Adam(net.parameters(), lr=0.01), loss)


def ppo(net: nn.Module) -> Loop:
    params, update = by_loss(
        net, Adam(net.parameters(), lr=0.01), lambda rollout, draws: ppo_loss(net(rollout[0]), rollout[1:])[0]
    )

    def step(rollout: list[Tensor], draws: Draws) -> None:
        for _ in range(8):
            update(rollout, draws)

    return params, step


def distillation(net: Any) -> Loop:
    net.teacher.eval()

    def loss(batch: tuple[Tensor, Tensor], draws: Draws) -> Tensor:
        inputs, labels = batch
        with torch.no_grad():
            teacher = net.teacher(inputs)
        student = net.student(inputs)
        soft = 4 * F.kl_div((student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean")
        return 0.9 * soft + 0.1 * F.cross_entropy(student, labels)

    return by_loss(net, Adam(net.student.parameters(), lr=3e-3), loss)


def pcgrad(net: nn.Module) -> Loop:
    params = list(net.parameters())
    optimizer = Adam(params, lr=3e-3)

    def step(batch: tuple[Tensor, Tensor], draws: Draws) -> None:
        inputs, targets = batch
        losses = (net(inputs) - targets).square().mean(0)
        grads = [nn.utils.parameters_to_vector(torch.autograd.grad(one, params, retain_graph=True)) for one in losses]
        projected = [grad.clone() for grad in grads]
        for own, other in ((0, 1), (1, 0)):
            dot = projected[own] @ grads[other]
            if dot < 0:
                projected[own] -= dot / grads[other].square().sum() * grads[other]
        total = (projected[0] + projected[1]).split([param.numel() for param in params])
        for param, grad in zip(params, total, strict=True):
            param.grad = grad.view_as(param)
        optimizer.step()

    return dict(net.named_parameters()), step


LOOPS: dict[str, Callable[[Any], Loop]] = {
    loop.__name__: loop
    for loop in (vae, simclr, ddpm, wgan_gp, maml, lora, graphs, translation, segmentation, ppo, distillation, pcgrad)
}
"""The loop of each program, in the order of the gallery."""


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
    params, step = LOOPS[name](pc.to_module(start))
    for number in range(num_batches):
        now = {name: params[name].detach() for name in start.params}
        state = start.replace(params=now, timestamp=start.timestamp.replace(batch=number))
        step(batch_of(batches, state), KeyedDraws(state))
    return {name: param.detach() for name, param in params.items()}


def weights_of(state: State) -> dict[str, Tensor]:
    """Return a state's parameters and, if there are any, their averages, named as by a plain loop."""
    averages = pc.surgery.with_weights(state, "ema").params if "ema" in state.slots else {}
    return {**state.params, **{f"ema.{name}": average for name, average in averages.items()}}
