"""Distillation: a small student learns from noisy labels, and from the probabilities of a frozen teacher.

The teacher is a part of the network, frozen and in evaluation mode: it has no dropout, its weights and statistics stand
still, and the optimizer has no memory for it. The loss returns its parts, which are logged in training and evaluation.
"""

import argparse
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import State, compose, loop_events, losses, optim, random


def points(seed: int, dtype: torch.dtype, wrong: float = 0.0, number: int = 64) -> tuple[Tensor, Tensor]:
    """Return points (N, 8) and classes (N,), a share of which is drawn at random."""
    keys, first, second = random.split(random.key(seed), 3), *random.split(random.key(12345))
    inputs = random.normal(keys[0], (number, 8))
    classes = ((inputs @ random.normal(first, (8, 16))).tanh() @ random.normal(second, (16, 4))).argmax(1)
    others = random.randint(keys[1], (number,), 0, 4)
    return inputs.to(dtype), torch.where(random.bernoulli(keys[2], wrong, (number,)), others, classes)


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


def distillation_loss(outputs: tuple[Tensor, Tensor], labels: Tensor, share: float) -> tuple[Tensor, dict[str, Tensor]]:
    student, teacher = ((logits / 2).log_softmax(1) for logits in outputs)  # a temperature of 2
    soft = 4 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    hard = F.cross_entropy(outputs[0], labels)
    return share * soft + (1 - share) * hard, {"soft": soft, "hard": hard}


def make(dtype: torch.dtype = torch.float32, *, microbatches: int = 1, teacher: Any = None, share: float = 0.9) -> Any:
    """Return the step, the state before it, and the batches."""
    net, loss = Pair(teacher or make_teacher()).to(dtype), functools.partial(distillation_loss, share=share)
    state = State.create(net, loss=loss, optimizer=optim.adam(3e-3), eval_mode=["teacher"], key=0)
    return compose(loop_events, microbatches=microbatches), state, [points(i, dtype, wrong=0.5) for i in range(20)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="300 batches instead of 2000")
    duration = "300ba" if parser.parse_args().short else "2000ba"
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    clean, test = [points(i, torch.float32) for i in range(100, 500)], [points(99999, torch.float32, number=2000)]
    teacher = State.create(make_teacher(), loss=losses.cross_entropy, optimizer=optim.adam(3e-3))
    teacher = pc.fit(compose(loop_events), teacher, clean, duration=duration)
    scores, metrics = [], {"accuracy": lambda outputs, labels: outputs[0].argmax(1) == labels}
    for share in (0.0, 0.9):
        step, state, batches = make(teacher=pc.to_module(teacher), share=share)
        state = pc.fit(step, state, batches, duration=duration)
        scores.append(pc.evaluate(state, test, metrics)["accuracy"])
    print(f"accuracy {scores[0]:.3f} -> {scores[1]:.3f}: a student of noisy labels, and one of a teacher as well")


if __name__ == "__main__":
    main()
