"""Training methods as pure functions that compose, on PyTorch's torch.func.

`State` is an immutable pytree, an `Algorithm` a pair of pure functions, a pass a list-to-list function, the loop a
tuple; `compose` folds them into a training step.
"""

import importlib
from typing import Any

from purecompose import (
    algorithms,
    data,
    functional,
    losses,
    metrics,
    models,
    optim,
    random,
    runs,
    saving,
    schedule,
    surgery,
    tree,
)
from purecompose._version import __version__
from purecompose.algorithm import Algorithm, Trait, factory, identity
from purecompose.clock import Clock
from purecompose.compilation import CompiledStep, TraceError, VariantLimitError, compile
from purecompose.compose import Step, compose
from purecompose.contract import ContractError
from purecompose.data_parallel import data_parallel
from purecompose.evaluation import Evaluator, evaluate, predict
from purecompose.event import Event
from purecompose.fit import fit, training
from purecompose.lease import SpentStateError
from purecompose.loop import (
    Grad,
    Microbatches,
    Stage,
    advance,
    eval_events,
    eval_forward,
    forward,
    loop_events,
    loss,
    predict_events,
    update,
)
from purecompose.losses import Mixture
from purecompose.matching import MatchError
from purecompose.passes import (
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
from purecompose.plateau import ReduceOnPlateau
from purecompose.population import population, stack_states, unstack_states
from purecompose.predicate import ALWAYS, NEVER, after, before, between, epoch_ends, every, on
from purecompose.random.modules import UnkeyedRandomError, checkpoint
from purecompose.recipes import recipe
from purecompose.saving import (
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
from purecompose.schedule import hparam
from purecompose.state import State
from purecompose.stopping import EarlyStopping, Threshold
from purecompose.summary import summary
from purecompose.time import RunLength, Time, Timestamp, TimeUnit
from purecompose.trace import Trace, traced
from purecompose.weights import to_module, with_statistics, with_weights


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
    "load",
    "load_weights",
    "loop_events",
    "loss",
    "losses",
    "metrics",
    "models",
    "on",
    "optim",
    "order_by_constraints",
    "population",
    "predict",
    "predict_events",
    "random",
    "recipe",
    "runs",
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
