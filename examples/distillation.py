"""Distillation: a small student learns from noisy labels, and from the probabilities of a frozen teacher.

The teacher is a part of the network, frozen and in evaluation mode: it has no dropout, its weights and statistics stand
still, and the optimizer has no memory for it. The loss returns its parts, which are logged in training and evaluation.
"""

import sys

import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, Step, compose, loop_events, losses, optim


def points(seed: int, dtype: torch.dtype, wrong: float = 0.0, number: int = 64) -> tuple[Tensor, Tensor]:
    """Return points (N, 8) and classes (N,), a share of which is drawn at random."""
    keys, first, second = pc.random.split(pc.random.key(seed), 3), *pc.random.split(pc.random.key(12345))
    inputs = pc.random.normal(keys[0], (number, 8))
    hidden = (inputs @ pc.random.normal(first, (8, 16))).tanh()
    classes = (hidden @ pc.random.normal(second, (16, 4))).argmax(1)
    others = pc.random.randint(keys[1], (number,), 0, 4)
    return inputs.to(dtype), torch.where(pc.random.bernoulli(keys[2], wrong, (number,)), others, classes)


def mlp(width: int, *layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), *layers, nn.ReLU(), nn.Linear(width, 4))


def make_teacher() -> nn.Module:
    torch.manual_seed(0)  # for the initial weights
    return mlp(512, nn.BatchNorm1d(512), nn.Dropout(0.1))


class Pair(nn.Module):
    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)  # for the initial weights
        self.teacher, self.student = teacher.requires_grad_(False), mlp(64)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(inputs), self.teacher(inputs)


def taught_by(teacher: nn.Module, share: float, dtype: torch.dtype = torch.float32) -> State:
    loss, net = losses.Distillation(temperature=2.0, alpha=share), Pair(teacher).to(dtype)
    return State.create(net, loss=loss, optimizer=optim.adam(3e-3), eval_mode=["teacher"])


def make(dtype: torch.dtype = torch.float32) -> tuple[Step, State, list[tuple[Tensor, Tensor]]]:
    state = taught_by(make_teacher(), 0.9, dtype)
    return compose(loop_events), state, [points(seed, dtype, wrong=0.5) for seed in range(20)]


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, _, batches = make()
    teacher = State.create(make_teacher(), loss=losses.cross_entropy, optimizer=optim.adam(3e-3))
    clean = [points(seed, torch.float32) for seed in range(100, 500)]
    teacher = pc.to_module(pc.fit(step, teacher, clean, duration=duration))
    students = [pc.fit(step, taught_by(teacher, share), batches, duration=duration) for share in (0.0, 0.9)]
    test, metrics = [points(99, torch.float32, number=2000)], {"accuracy": lambda outputs, y: outputs[0].argmax(1) == y}
    before, after = (pc.evaluate(student, test, metrics)["accuracy"] for student in students)
    print(f"accuracy {before:.3f} -> {after:.3f}: a student of noisy labels, and one of a teacher as well")


if __name__ == "__main__":
    main("300ba" if "--short" in sys.argv else "2000ba")
