"""Training by `fit`: the recipe's side of a task."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from _curve import Curve, Observer
from _task import Settings
from torch import nn

import purecompose as pc
from purecompose import Algorithm, State, compose, loop_events


METRICS: Mapping[str, Mapping[str, Any]] = {"accuracy": {"accuracy": pc.metrics.accuracy}, "loss": {}}
"""The metrics of the evaluators, besides the loss, by what a curve shows."""


class Parts(NamedTuple):
    """What a recipe consists of."""

    methods: list[Algorithm]
    optimizer: Any


def fit(
    net: nn.Module,
    parts: Parts,
    train: Any,
    test: Any,
    *,
    num_batches: int,
    due: Collection[int],
    metric: str,
    seed: int,
    curve: Curve,
    settings: Settings,
) -> int:
    """Train by a composed step, and draw the curve.

    Args:
        net: The network.
        parts: The recipe.
        train, test: The batches of training and evaluation.
        num_batches: The length of the run.
        due: The numbers of the batches after which the network is evaluated.
        metric: What the curve shows: "accuracy" or "loss".
        seed: The key of the run.
        curve: The curve.
        settings: Of these, "precision", "compile" and "microbatches", by default 1.

    Returns:
        The number of parameters that the network has at the end, those of the methods included.
    """
    curve.start()
    step = new_step(parts.methods, settings)
    state = new_state(net, parts, num_batches, seed, settings)
    end = pc.fit(
        pc.compile(step, quiet=True) if settings["compile"] else step,
        state,
        train,
        evaluate=pc.Evaluator(test, METRICS[metric], every=lambda now: now.batch in due),
        observers=Observer(curve, f"eval/{metric}"),
    )
    return sum(param.numel() for param in end.params.values())


def new_step(methods: Sequence[Algorithm], settings: Settings) -> pc.Step:
    """Return the step with these methods, in slices as the settings say."""
    return compose(loop_events, methods, microbatches=settings.get("microbatches", 1))


def new_state(net: nn.Module, parts: Parts, num_batches: int, seed: int, settings: Settings) -> State:
    """Return the state at the start of a run."""
    return State.create(
        net,
        loss=pc.losses.cross_entropy,
        optimizer=parts.optimizer,
        key=seed,
        duration=f"{num_batches}ba",
        precision=settings["precision"],
    )


def num_params(net: nn.Module) -> int:
    """Return the number of parameters of a network."""
    return sum(param.numel() for param in net.parameters())
