"""Two tasks, one trunk: PCGrad takes out of each task's gradient what conflicts with the other's (arXiv:2001.06782).

It is a method of a few lines: `state.gradients` returns the gradient of each task, in microbatches and compiled too.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import Algorithm, Event, State, Step, compose, loop_events, on, optim


def points(seed: int, dtype: torch.dtype, number: int = 64) -> tuple[Tensor, Tensor]:
    """Return points (N, 4) and the targets (N, 2) of both tasks."""
    x = pc.random.normal(pc.random.key(seed), (number, 4)).to(dtype)
    return x, torch.stack([(x[:, 0] + x[:, 1]).sin(), 3 * (x[:, 0] * x[:, 1] - x[:, 2]).cos()], 1)


def loss_of(task: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, targets: (outputs - targets)[:, task].square().mean()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(0).sum()


def pcgrad(event: Event, state: State) -> State:
    """Set the sum of both gradients, each less its projection on the other if they conflict."""
    (first, _), (second, _) = state.gradients(of=[loss_of(0), loss_of(1)])
    product = torch.stack([(first[name] * second[name]).sum() for name in first]).sum()
    sizes = [torch.stack([grad.square().sum() for grad in grads.values()]).sum() for grads in (first, second)]
    # g - min(g h, 0) / |h|^2 h for both gradients, sorted by g and by h
    shares = [1 - product.clamp(max=0) / size for size in sizes]
    grads = {name: shares[0] * first[name] + shares[1] * second[name] for name in first}
    return state.replace(grads=grads, metrics={**state.metrics, "conflict": (product < 0).float()})


def make(dtype: torch.dtype = torch.float32) -> tuple[Step, State, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)  # for the initial weights
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)).to(dtype)
    state = State.create(net, loss=loss, optimizer=optim.adam(3e-3))
    step = compose(loop_events, [Algorithm("pcgrad", on(Event.AFTER_TRAIN_BATCH), pcgrad)])
    return step, state, [points(seed, dtype) for seed in range(20)]


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, start, batches = make()
    states = list(pc.training(step, start, batches, duration=duration))
    before, after = (pc.evaluate(one, [points(99, torch.float32, 1000)])["loss"] for one in (start, states[-1]))
    share = torch.stack([state.metrics["conflict"] for state in states]).mean()
    print(f"loss {before:.3f} -> {after:.3f}; gradients conflicted in {share:.0%} of the steps")


if __name__ == "__main__":
    main("200ba" if "--short" in sys.argv else "2000ba")
