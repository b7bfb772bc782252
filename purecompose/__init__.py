"""Training methods as pure functions that compose, on PyTorch's torch.func.

`State` is an immutable pytree, an `Algorithm` a pair of pure functions, a pass a list-to-list function, and the loop a
tuple; `compose` folds them into a training step.

A public name is imported when it is first used, so that a program loads the parts of the library that it needs.
"""

import importlib
from typing import TYPE_CHECKING

from purecompose._support import INSTALLED, __version__


if TYPE_CHECKING:  # what `__getattr__` returns
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
        testing as testing,
        time,
        tree,
    )
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
    from purecompose.run.rules import EarlyStopping, ReduceOnPlateau, Threshold
    from purecompose.run.saving import Checkpoints, load, save
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

_MODULES = {
    "algorithms": "algorithms",
    "analysis": "analysis",
    "batch": "batch",
    "data": "data",
    "errors": "errors",
    "functional": "algorithms.functional",
    "loop": "core.loop",
    "losses": "losses",
    "metrics": "losses.metrics",
    "nn": "nn",
    "observers": "observers",
    "optim": "optim",
    "passes": "core.passes",
    "random": "random",
    "records": "records",
    "saving": "run.saving",
    "schedule": "schedule",
    "surgery": "surgery",
    "testing": "testing",
    "time": "time",
    "tree": "tree",
}
"""Modules by their public names."""

_HOMES = {
    "Algorithm": "core.algorithm",
    "Checkpoints": "run.saving",
    "DEFAULT_PASSES": "core.passes",
    "EarlyStopping": "run.rules",
    "Evaluator": "run.evaluation",
    "Event": "time.event",
    "ReduceOnPlateau": "run.rules",
    "State": "core.state",
    "Step": "core.compose",
    "Threshold": "run.rules",
    "Trait": "core.algorithm",
    "after": "time.predicates",
    "before": "time.predicates",
    "between": "time.predicates",
    "compile": "transforms.compilation",
    "compose": "core.compose",
    "data_parallel": "transforms.data_parallel",
    "epoch_ends": "time.predicates",
    "evaluate": "run.evaluation",
    "every": "time.predicates",
    "factory": "core.algorithm",
    "fit": "run.fit",
    "fully_sharded": "transforms.sharding.step",
    "hparam": "schedule",
    "identity": "core.algorithm",
    "load": "run.saving",
    "loop_events": "core.loop",
    "materialized": "transforms.sharding.materialized",
    "on": "time.predicates",
    "population": "transforms.population",
    "predict": "run.evaluation",
    "recipe": "algorithms.recipes",
    "save": "run.saving",
    "shard": "transforms.sharding.placing",
    "stack_states": "transforms.population",
    "to_module": "surgery.weights",
    "traced": "core.trace",
    "training": "run.fit",
    "unstack_states": "transforms.population",
    "whole": "transforms.sharding.placing",
}
"""The module of each other public name."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name on first use; `testing`, which is not in `__all__`, needs Hypothesis."""
        if name in _MODULES:
            found = importlib.import_module(f"purecompose.{_MODULES[name]}")
        elif name in _HOMES:
            found = getattr(importlib.import_module(f"purecompose.{_HOMES[name]}"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def _call_in_torch_compile(*call: object) -> object:
    """Call a step within `torch.compile`: compiled, with its backend."""
    dynamo = importlib.import_module("purecompose.transforms.compilation.dynamo")
    return dynamo.call_in_torch_compile(*call)


INSTALLED["torch.compile"] = _call_in_torch_compile


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
