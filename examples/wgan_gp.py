"""A Wasserstein GAN with gradient penalty learns a ring of eight points; its critic takes five turns in each step.

A program is a tuple, so turns are written by a loop. Both players are in one state: one checkpoint, one compiled step.
"""

import argparse
import functools
import math

import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import Event, State, Step, compose, loop, optim


class Players(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, part: str, points: Tensor) -> Tensor:
        return self.get_submodule(part)(points)  # one of the two networks


def generated(state: State, name: str) -> tuple[Tensor, State]:
    noise = pc.random.normal(state.example_rng(name), (state.num_examples, 2), dtype=state.batch.dtype)
    return state.call(["generator", noise])


def critic_loss(turn: int, state: State) -> State:
    """Generated points score low, the turn's real ones high, and the score between them has a slope of 1."""
    real, (fake, state) = state.batch[:, turn], generated(state, f"noise {turn}")
    share = pc.random.uniform(state.example_rng(f"share {turn}"), (len(real), 1), dtype=real.dtype)
    between = (share * real + (1 - share) * fake.detach()).requires_grad_()
    scores, state = state.call(["critic", torch.cat([real, fake.detach(), between])])
    of_real, of_fake, of_between = scores.chunk(3)
    (slopes,) = torch.autograd.grad(of_between.sum(), between, create_graph=True)
    return state.replace(loss=of_fake.mean() - of_real.mean() + (slopes.norm(dim=1) - 1).square().mean())


def generator_loss(state: State) -> State:
    fake, state = generated(state, "noise of the generator")
    scores, state = state.call(["critic", fake])
    return state.replace(loss=-scores.mean())


TURNS = 5  # of the critic in a step
events = [Event.AFTER_DATALOADER]
for i in range(TURNS):
    events += [loop.Grad(functools.partial(critic_loss, i), wrt="critic.*"), loop.update(wrt="critic.*")]
events += [loop.Grad(generator_loss, wrt="generator.*"), loop.update(wrt="generator.*"), loop.advance, Event.BATCH_END]


def make(num_batches: int = 2000, dtype: torch.dtype = torch.float32) -> tuple[Step, State, list[Tensor]]:
    torch.manual_seed(0)  # for the networks' initial weights; training draws from the state's key
    net, optimizer, length = Players().to(dtype), optim.adam(1e-3, betas=(0.5, 0.9)), f"{num_batches}ba"
    state = State.create(net, loss=pc.losses.mse, optimizer=optimizer, duration=length)
    angles, offsets = pc.random.split(pc.random.key(1))
    angle = pc.random.randint(angles, (50, 128, TURNS), 0, 8).to(dtype) * (math.tau / 8)
    offset = 0.02 * pc.random.normal(offsets, (*angle.shape, 2), dtype=dtype)
    step = compose(events)
    return step, step.init(state), list(torch.stack([angle.cos(), angle.sin()], -1) + offset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="150 batches instead of 2000")
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, start, batches = make(150 if parser.parse_args().short else 2000)
    for state in (start, pc.fit(step, start, batches)):
        points = state.forward(["generator", pc.random.normal(pc.random.key(2), (1000, 2))])
        distance = torch.cdist(points, batches[0].flatten(0, 1)).min(dim=1).values.mean()
        print(f"after {state.timestamp.batch} batches: mean distance of generated points from real ones {distance:.3f}")


if __name__ == "__main__":
    main()
