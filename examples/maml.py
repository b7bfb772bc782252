"""MAML learns weights from which one gradient step fits a sine wave to ten points; the step's rate is learned, too.

Adaptation is the forward pass of a network of tasks: training, evaluation, microbatches and compiling are as usual.
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import purecompose as pc
from purecompose import State, Step, compose, data, loop_events, losses, optim


class Adapted(nn.Module):
    """Known points (tasks, n, 1), twice, and places (tasks, m, 1) -> values there, by weights adapted to each task."""

    def __init__(self, turns: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
        self.lr, self.turns = nn.Parameter(torch.tensor(0.01)), turns

    def forward(self, x: Tensor, y: Tensor, places: Tensor) -> Tensor:
        def values(x: Tensor, y: Tensor, places: Tensor) -> Tensor:
            params: dict[str, Tensor] = dict(self.net.named_parameters())
            for _ in range(self.turns):
                grads = torch.func.grad(lambda params: F.mse_loss(functional_call(self.net, params, x), y))(params)
                params = {name: param - self.lr * grads[name] for name, param in params.items()}
            return functional_call(self.net, params, places)

        return torch.vmap(values)(x, y, places)


def sine_waves(rng: pc.random.Rng, dtype: torch.dtype, number: int = 24) -> tuple[list[Tensor], Tensor]:
    """Tasks with ten known points and ten places each, and the values to predict there."""
    amplitudes, phases, places = pc.random.split(rng, 3)
    amplitude = pc.random.uniform(amplitudes, (number, 1, 1), low=0.1, high=5.0, dtype=dtype)
    phase = pc.random.uniform(phases, (number, 1, 1), high=math.pi, dtype=dtype)
    x = pc.random.uniform(places, (number, 20, 1), low=-5.0, high=5.0, dtype=dtype)
    y = amplitude * (x - phase).sin()
    return [x[:, :10], y[:, :10], x[:, 10:]], y[:, 10:]


def make(dtype: torch.dtype = torch.float32) -> tuple[Step, State, data.StateStream]:
    torch.manual_seed(0)  # for the initial weights; each step has new tasks, drawn from the state's key
    state = State.create(Adapted().to(dtype), loss=losses.mse, optimizer=optim.adam(1e-3))
    return compose(loop_events), state, data.stream(lambda state: sine_waves(state.rng("tasks"), dtype))


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, start, batches = make()
    end = pc.fit(step, start, batches, duration=duration)
    new_tasks = [sine_waves(pc.random.Rng(pc.random.key(99)), torch.float32, number=500)]
    before, after = (pc.evaluate(state, new_tasks)["loss"] for state in (start, end))
    print(f"loss {before:.3f} -> {after:.3f} on new tasks, adapted by one step; its rate {end.params['lr']:.3f}")


if __name__ == "__main__":
    main("300ba" if "--short" in sys.argv else "6000ba")
