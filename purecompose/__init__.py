"""Training methods as pure functions that compose, on PyTorch's torch.func.

`State` is an immutable pytree, an `Algorithm` a pair of pure functions, a pass a list-to-list function, the loop a
tuple; `compose` folds them into a training step.
"""

import importlib
from typing import Any

from purecompose import algorithms, batch, data, losses, observers, optim, random, records, schedule, surgery, tree
from purecompose._support.version import __version__
from purecompose.algorithms import functional
from purecompose.algorithms.recipes import recipe
from purecompose.core.algorithm import Algorithm, Trait, factory, identity
from purecompose.core.clock import Clock
from purecompose.core.compose import Step, compose
from purecompose.core.contract import ContractError
from purecompose.core.loop import advance, eval_events, eval_forward, forward, loop_events, loss, predict_events, update
from purecompose.core.matching import MatchError
from purecompose.core.passes import (
    DEFAULT_PASSES,
    OrderError,
    compose_passes,
    order_by_constraints,
    set_filo_order,
    sort_fused_layernorm_last,
    sort_loss_scaling_innermost,
    sort_selective_backprop_first,
    sort_to_back,
    sort_to_front,
    warn_if_multiple_loss_interpolation,
)
from purecompose.core.scopes import Grad, Microbatches, Stage
from purecompose.core.state import State
from purecompose.core.trace import Trace, traced
from purecompose.losses import Mixture, metrics
from purecompose.nn import layers, models
from purecompose.nn.keyed.modules import UnkeyedRandomError, checkpoint
from purecompose.run import saving
from purecompose.run.evaluation import Evaluator, evaluate, predict
from purecompose.run.fit import fit, training
from purecompose.run.plateau import ReduceOnPlateau
from purecompose.run.saving import (
    CheckpointError,
    Checkpoints,
    CheckpointWarning,
    DamagedError,
    MismatchError,
    export_onnx,
    load,
    load_weights,
    save,
    save_weights,
)
from purecompose.run.stopping import EarlyStopping, Threshold
from purecompose.schedule import hparam
from purecompose.surgery.summary import summary
from purecompose.surgery.weights import to_module, with_statistics, with_weights
from purecompose.time import RunLength, Time, Timestamp, TimeUnit
from purecompose.time.event import Event
from purecompose.time.predicates import ALWAYS, NEVER, after, before, between, epoch_ends, every, on
from purecompose.transforms.compilation import CompiledStep, TraceError, VariantLimitError, compile
from purecompose.transforms.data_parallel import data_parallel
from purecompose.transforms.donation import SpentStateError
from purecompose.transforms.population import population, stack_states, unstack_states


__all__ = [
    "ALWAYS",
    "Algorithm",
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "Clock",
    "CompiledStep",
    "ContractError",
    "DEFAULT_PASSES",
    "DamagedError",
    "EarlyStopping",
    "Evaluator",
    "Event",
    "Grad",
    "MatchError",
    "Microbatches",
    "MismatchError",
    "Mixture",
    "NEVER",
    "OrderError",
    "ReduceOnPlateau",
    "RunLength",
    "SpentStateError",
    "Stage",
    "State",
    "Step",
    "Threshold",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trace",
    "TraceError",
    "Trait",
    "UnkeyedRandomError",
    "VariantLimitError",
    "__version__",
    "advance",
    "after",
    "algorithms",
    "batch",
    "before",
    "between",
    "checkpoint",
    "compile",
    "compose",
    "compose_passes",
    "data",
    "data_parallel",
    "epoch_ends",
    "eval_events",
    "eval_forward",
    "evaluate",
    "every",
    "export_onnx",
    "factory",
    "fit",
    "forward",
    "functional",
    "hparam",
    "identity",
    "layers",
    "load",
    "load_weights",
    "loop_events",
    "loss",
    "losses",
    "metrics",
    "models",
    "observers",
    "on",
    "optim",
    "order_by_constraints",
    "population",
    "predict",
    "predict_events",
    "random",
    "recipe",
    "records",
    "save",
    "save_weights",
    "saving",
    "schedule",
    "set_filo_order",
    "sort_fused_layernorm_last",
    "sort_loss_scaling_innermost",
    "sort_selective_backprop_first",
    "sort_to_back",
    "sort_to_front",
    "stack_states",
    "summary",
    "surgery",
    "to_module",
    "traced",
    "training",
    "tree",
    "unstack_states",
    "update",
    "warn_if_multiple_loss_interpolation",
    "with_statistics",
    "with_weights",
]


def __getattr__(name: str) -> Any:
    """`purecompose.testing` is imported when first asked for: it needs Hypothesis, which training does not."""
    if name == "testing":
        return importlib.import_module("purecompose.testing")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
