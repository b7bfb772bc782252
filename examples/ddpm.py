"""A denoising diffusion model (DDPM) in the plane: two interleaved half circles, made from noise.

The network draws its times and noise by torch's functions, from the run's key: resumed and microbatched runs repeat
them. One more line adds the moving average of the weights, from which samples are made.
"""

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, Step, algorithms as alg, compose, loop_events, optim


class Diffusion(nn.Module):
    """Points (N, 2) -> predicted and true noise, at random times; `predict` is the network itself."""

    def __init__(self, times: int = 100) -> None:
        super().__init__()
        self.beta = nn.Buffer(torch.linspace(1e-3, 0.1, times))
        self.signal = nn.Buffer((1 - self.beta).cumprod(0))
        self.frequencies = nn.Buffer(math.pi * torch.arange(1.0, 9.0) / times)
        self.net = nn.Sequential(nn.Linear(18, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def predict(self, points: Tensor, times: Tensor) -> Tensor:
        angles = times[:, None] * self.frequencies
        return self.net(torch.cat([points, angles.sin(), angles.cos()], dim=1))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        times, noise = torch.randint(len(self.beta), (len(points),)), torch.randn_like(points)
        signal = self.signal[times, None]
        return self.predict(signal.sqrt() * points + (1 - signal).sqrt() * noise, times), noise


def denoising(outputs: tuple[Tensor, Tensor], targets: None) -> Tensor:
    return F.mse_loss(*outputs)


def half_circles(seed: int, dtype: torch.dtype, number: int = 256) -> Tensor:
    angle = math.pi * pc.random.uniform(pc.random.key(seed), (number,), dtype=dtype)
    upper, lower = torch.stack([angle.cos(), angle.sin()], 1), torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    return torch.where(torch.arange(number)[:, None] % 2 == 0, upper, lower)


@torch.no_grad()
def sampled(net: Any, number: int = 500) -> Tensor:
    """Points (number, 2) from noise, one denoising step by a `Diffusion` after the other."""
    draws = pc.random.normal(pc.random.key(99), (len(net.beta) + 1, number, 2))
    points = draws[-1]
    for t in reversed(range(len(net.beta))):
        noise = net.predict(points, torch.full((number,), t))
        points = (points - net.beta[t] / (1 - net.signal[t]).sqrt() * noise) / (1 - net.beta[t]).sqrt()
        points = points + net.beta[t].sqrt() * draws[t] * (t > 0)
    return points


def make(dtype: torch.dtype = torch.float32) -> tuple[Step, State, list[Tensor]]:
    torch.manual_seed(0)  # for the initial weights; training draws from the state's key
    state = State.create(Diffusion().to(dtype), loss=denoising, optimizer=optim.adam(2e-3), target_field=None)
    return compose(loop_events, [alg.ema(smoothing=0.99)]), state, [half_circles(seed, dtype) for seed in range(50)]


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, start, batches = make()
    end = pc.fit(step, start, batches, duration=duration)
    points = (sampled(net) for net in (pc.to_module(start), pc.to_module(end, weights="ema")))
    before, after = (torch.cdist(one, torch.cat(batches)).min(dim=1).values.mean() for one in points)
    print(f"distance {before:.3f} -> {after:.3f} of samples from the half circles")


if __name__ == "__main__":
    main("600ba" if "--short" in sys.argv else "18000ba")
