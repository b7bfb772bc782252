"""MAML learns weights from which one gradient step fits a sine wave to ten points; the step's rate is learned, too.

Adaptation is the forward pass of a network of tasks: training, evaluation, microbatches and compiling are as usual.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import purecompose as pc
from purecompose import State, Step, compose, loop_events, optim


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


def sine_waves(key: Tensor, number: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Tasks with ten known points and ten places each, and the values to predict there."""
    amplitudes, phases, places = pc.random.split(key, 3)
    amplitude = pc.random.uniform(amplitudes, (number, 1, 1), low=0.1, high=5.0, dtype=dtype)
    phase = pc.random.uniform(phases, (number, 1, 1), high=math.pi, dtype=dtype)
    x = pc.random.uniform(places, (number, 20, 1), low=-5.0, high=5.0, dtype=dtype)
    y = amplitude * (x - phase).sin()
    return [x[:, :10], y[:, :10], x[:, 10:]], y[:, 10:]


def make(num_batches: int = 6000, dtype: torch.dtype = torch.float32) -> tuple[Step, State, list]:
    torch.manual_seed(0)  # for the initial weights; tasks are made from keys
    net, length = Adapted().to(dtype), f"{num_batches}ba"
    state = State.create(net, loss=pc.losses.mse, optimizer=optim.adam(1e-3), duration=length)
    step = compose(loop_events)
    return step, step.init(state), [sine_waves(key, 24, dtype) for key in pc.random.split(pc.random.key(1), 500)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="300 batches instead of 6000")
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, start, batches = make(300 if parser.parse_args().short else 6000)
    new_tasks = [sine_waves(pc.random.key(2), 500, torch.float32)]
    for state in (start, pc.fit(step, start, batches)):
        error = pc.evaluate(state, new_tasks)["loss"]
        print(f"after {state.timestamp.batch} batches: mean squared error on new tasks, adapted once, {error:.3f}")


if __name__ == "__main__":
    main()
