"""Two players as a loop program: a tiny GAN learns a ring of eight points in the plane."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import Event, State, compose, loop, optim


class Players(nn.Module):
    """Both networks in one module; `part` says which one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.G = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        self.D = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, part: str, inputs: torch.Tensor) -> torch.Tensor:
        return (self.G if part == "G" else self.D)(inputs)


def noise(state: State, name: str) -> torch.Tensor:
    """One two-dimensional sample per example, by the state's key."""
    return pc.random.normal(state.example_rng(name), (state.num_examples, 2))


def discriminator_loss(state: State) -> State:
    """Real points are to score high, generated ones low."""
    made, state = state.call(["G", noise(state, "for D")])
    real, state = state.call(["D", state.batch])
    fake, state = state.call(["D", made.detach()])
    return state.replace(loss=F.softplus(-real).mean() + F.softplus(fake).mean())


def generator_loss(state: State) -> State:
    """Generated points are to score high."""
    made, state = state.call(["G", noise(state, "for G")])
    score, state = state.call(["D", made])
    return state.replace(loss=F.softplus(-score).mean())


gan_events = (
    Event.AFTER_DATALOADER,
    loop.Grad(discriminator_loss, wrt="D.*"),
    loop.update(wrt="D.*"),
    loop.Grad(generator_loss, wrt="G.*"),
    loop.update(wrt="G.*"),
    loop.advance,
    Event.BATCH_END,
)


def ring(key: torch.Tensor, number: int) -> torch.Tensor:
    """Points near eight places on the unit circle."""
    angles, offsets = pc.random.split(key)
    angle = pc.random.randint(angles, (number,), 0, 8) * (math.tau / 8)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * pc.random.normal(offsets, (number, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="200 batches instead of 4000")
    batches = 200 if parser.parse_args().short else 4000
    torch.manual_seed(0)  # for the networks' initial weights; training draws from the state's key
    optimizer = optim.adam(1e-3, betas=(0.5, 0.9), groups={"D.*": {"lr": 2e-3}})
    state = State.create(Players(), loss=pc.losses.mse, optimizer=optimizer, key=0, duration=f"{batches}ba")
    step = compose(gan_events)
    state = step.init(state)
    keys = pc.random.split(pc.random.key(1), batches)
    for i in range(batches):
        state = step(state, ring(keys[i], 256))
    made = state.forward(["G", pc.random.normal(pc.random.key(2), (512, 2))])
    print(f"mean distance of generated points from the circle: {(made.norm(dim=1) - 1).abs().mean():.3f}")


if __name__ == "__main__":
    main()
