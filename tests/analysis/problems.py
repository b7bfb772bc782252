"""A small problem on which runs take milliseconds."""

import torch

import purecompose as pc
from purecompose import Evaluator, State, Step, compose, data, loop_events, optim


__all__ = ["BATCHES_PER_EPOCH", "evaluator", "make_step", "new_state", "train_data"]

BATCHES_PER_EPOCH = 6
_inputs = pc.random.normal(pc.random.key(0), (144, 8))
_targets = (_inputs[:, 0] > _inputs[:, 1]).long()


def train_data() -> data.Arrays:
    return data.arrays(_inputs[:96], _targets[:96], batch_size=96 // BATCHES_PER_EPOCH)


def evaluator(**options: object) -> Evaluator:
    metrics = {"loss": pc.metrics.mean_loss(), "accuracy": pc.metrics.accuracy}
    return Evaluator(data.arrays(_inputs[96:], _targets[96:], batch_size=48), metrics, **options)  # pyright: ignore


def new_state(seed: int, duration: str = "2ep", optimizer: object = None) -> State:
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    weights = pc.random.normal(pc.random.key(100 + seed), (8 * 16 + 16 + 2 * 16 + 2,)) / 4
    torch.nn.utils.vector_to_parameters(weights, net.parameters())
    chosen = optim.sgd(0.1, momentum=0.9) if optimizer is None else optimizer
    return State.create(
        net,
        loss=pc.losses.cross_entropy,
        optimizer=chosen,
        key=seed,
        duration=duration,
        batches_per_epoch=BATCHES_PER_EPOCH,
    )


def make_step(methods: list[pc.Algorithm]) -> Step:
    return compose(loop_events, methods)
