"""A denoising diffusion model (DDPM) in the plane: two interleaved half circles, made from noise.

The network draws its times and noise by torch's functions, from the run's key: resumed and microbatched runs repeat
them. One more line adds the moving average of the weights, from which samples are made.
"""

import argparse
import math

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

    @torch.no_grad()
    def sample(self, key: Tensor, number: int) -> Tensor:
        """Points (number, 2) from noise, one denoising step after the other."""
        draws = pc.random.normal(key, (len(self.beta) + 1, number, 2))
        points = draws[-1]
        for t in reversed(range(len(self.beta))):
            noise = self.predict(points, torch.full((number,), t))
            points = (points - self.beta[t] / (1 - self.signal[t]).sqrt() * noise) / (1 - self.beta[t]).sqrt()
            points = points + self.beta[t].sqrt() * draws[t] * (t > 0)
        return points


def denoising(outputs: tuple[Tensor, Tensor], targets: None) -> Tensor:
    return F.mse_loss(*outputs)


def half_circles(key: Tensor, number: int, dtype: torch.dtype) -> Tensor:
    angle = math.pi * pc.random.uniform(key, (number,), dtype=dtype)
    upper, lower = torch.stack([angle.cos(), angle.sin()], 1), torch.stack([1 - angle.cos(), 0.5 - angle.sin()], 1)
    return torch.where(torch.arange(number)[:, None] % 2 == 0, upper, lower)


def make(num_batches: int = 6000, dtype: torch.dtype = torch.float32) -> tuple[Step, State, list[Tensor]]:
    torch.manual_seed(0)  # for the initial weights; training draws from the state's key
    net, length = Diffusion().to(dtype), f"{num_batches}ba"
    state = State.create(net, loss=denoising, optimizer=optim.adam(2e-3), duration=length, target_field=None)
    step = compose(loop_events, [alg.ema(smoothing=0.99)])
    return step, step.init(state), [half_circles(key, 256, dtype) for key in pc.random.split(pc.random.key(1), 50)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="600 batches instead of 6000")
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, start, batches = make(600 if parser.parse_args().short else 6000)
    for state in (start, pc.fit(step, start, batches)):
        net = pc.to_module(state, weights="ema")
        assert isinstance(net, Diffusion)
        distance = torch.cdist(net.sample(pc.random.key(2), 500), torch.cat(batches)).min(dim=1).values.mean()
        print(f"after {state.timestamp.batch} batches: mean distance of samples from the half circles {distance:.3f}")


if __name__ == "__main__":
    main()
