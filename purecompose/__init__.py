"""Training methods as pure functions that compose, on PyTorch's torch.func.

`State` is an immutable pytree, an `Algorithm` a pair of pure functions, a pass a list-to-list function, and the loop a
tuple; `compose` folds them into a training step.
"""

import importlib
from typing import Any

from purecompose import (
    algorithms,
    analysis,
    batch,
    data,
    errors,
    losses,
    nn,
    observers,
    optim,
    random,
    records,
    schedule,
    surgery,
    time,
    tree,
)
from purecompose._support.version import __version__
from purecompose.algorithms import functional
from purecompose.algorithms.recipes import recipe
from purecompose.core import loop, passes
from purecompose.core.algorithm import Algorithm, Trait, factory, identity
from purecompose.core.compose import Step, compose
from purecompose.core.loop import loop_events
from purecompose.core.passes import DEFAULT_PASSES
from purecompose.core.state import State
from purecompose.core.trace import traced
from purecompose.losses import metrics
from purecompose.run import saving
from purecompose.run.evaluation import Evaluator, evaluate, predict
from purecompose.run.fit import fit, training
from purecompose.run.plateau import ReduceOnPlateau
from purecompose.run.saving import Checkpoints, load, save
from purecompose.run.stopping import EarlyStopping, Threshold
from purecompose.schedule import hparam
from purecompose.surgery.weights import to_module
from purecompose.time.event import Event
from purecompose.time.predicates import after, before, between, epoch_ends, every, on
from purecompose.transforms.compilation import compile
from purecompose.transforms.data_parallel import data_parallel
from purecompose.transforms.population import population, stack_states, unstack_states
from purecompose.transforms.sharding.materialized import materialized
from purecompose.transforms.sharding.placing import shard, whole
from purecompose.transforms.sharding.step import fully_sharded


__all__ = [
    "Algorithm",
    "Checkpoints",
    "DEFAULT_PASSES",
    "EarlyStopping",
    "Evaluator",
    "Event",
    "ReduceOnPlateau",
    "State",
    "Step",
    "Threshold",
    "Trait",
    "__version__",
    "after",
    "algorithms",
    "analysis",
    "batch",
    "before",
    "between",
    "compile",
    "compose",
    "data",
    "data_parallel",
    "fully_sharded",
    "epoch_ends",
    "errors",
    "evaluate",
    "every",
    "factory",
    "fit",
    "functional",
    "hparam",
    "identity",
    "load",
    "loop",
    "loop_events",
    "losses",
    "materialized",
    "metrics",
    "nn",
    "observers",
    "on",
    "optim",
    "passes",
    "population",
    "predict",
    "random",
    "recipe",
    "records",
    "save",
    "saving",
    "schedule",
    "shard",
    "stack_states",
    "surgery",
    "time",
    "to_module",
    "traced",
    "training",
    "tree",
    "unstack_states",
    "whole",
]


def __getattr__(name: str) -> Any:
    """Import `purecompose.testing` on first use, because it needs Hypothesis, which training does not."""
    if name == "testing":
        return importlib.import_module("purecompose.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
