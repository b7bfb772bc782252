"""A Wasserstein GAN with gradient penalty learns a ring of eight points; its critic takes five turns in each step.

A program is a tuple, so turns are written by a loop. Both players are in one state: one checkpoint, one compiled step.
"""

import functools
import sys

import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import Event, State, Step, compose, loop, losses, optim


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
    real, (fake, state) = state.batch[:, turn], generated(state, "noise")
    share = pc.random.uniform(state.example_rng("share"), (len(real), 1), dtype=real.dtype)
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
turns = [("critic.*", functools.partial(critic_loss, i)) for i in range(TURNS)] + [("generator.*", generator_loss)]
events = [Event.AFTER_DATALOADER]
for player, loss in turns:
    events += [loop.Microbatches(loop.Grad(loss, wrt=player)), loop.update(wrt=player)]
events += [loop.advance, Event.BATCH_END]


def ring(seed: int, dtype: torch.dtype, number: int = 128) -> Tensor:
    """Points (number, TURNS, 2) near eight places on the unit circle."""
    angles, offsets = pc.random.split(pc.random.key(seed))
    angle = pc.random.randint(angles, (number, TURNS), 0, 8).to(dtype) * (torch.pi / 4)
    offset = 0.02 * pc.random.normal(offsets, (number, TURNS, 2), dtype=dtype)
    return torch.stack([angle.cos(), angle.sin()], -1) + offset


def make(dtype: torch.dtype = torch.float32) -> tuple[Step, State, list[Tensor]]:
    torch.manual_seed(0)  # for the initial weights; training draws from the state's key
    state = State.create(Players().to(dtype), loss=losses.mse, optimizer=optim.adam(1e-3, betas=(0.5, 0.9)))
    return compose(events), state, [ring(seed, dtype) for seed in range(50)]


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, start, batches = make()
    end, noise = pc.fit(step, start, batches, duration=duration), pc.random.normal(pc.random.key(99), (1000, 2))
    points = (state.forward(["generator", noise]) for state in (start, end))
    before, after = (torch.cdist(one, batches[0].flatten(0, 1)).min(dim=1).values.mean() for one in points)
    print(f"distance {before:.3f} -> {after:.3f} of generated points from real ones")


if __name__ == "__main__":
    main("150ba" if "--short" in sys.argv else "2000ba")
