"""Training methods as pure functions that compose, on PyTorch's torch.func.

`State` is an immutable pytree, an `Algorithm` a pair of pure functions, a pass a list-to-list function, and the loop a
tuple; `compose` folds them into a training step.
"""

import importlib
from typing import TYPE_CHECKING

from purecompose import (
    algorithms as algorithms,
    analysis as analysis,
    batch as batch,
    data as data,
    errors as errors,
    functional as functional,
    integrations as integrations,
    loop as loop,
    losses as losses,
    metrics as metrics,
    nn as nn,
    observers as observers,
    optim as optim,
    passes as passes,
    random as random,
    records as records,
    saving as saving,
    schedule as schedule,
    surgery as surgery,
    time as time,
    tree as tree,
)
from purecompose._support import INSTALLED, __version__ as __version__, publish, refuse
from purecompose.algorithms.recipes import recipe as recipe
from purecompose.core.algorithm import Algorithm as Algorithm, Trait as Trait, factory as factory, identity as identity
from purecompose.core.compose import Step as Step, compose as compose
from purecompose.core.loop import loop_events as loop_events
from purecompose.core.passes import DEFAULT_PASSES as DEFAULT_PASSES
from purecompose.core.state import State as State
from purecompose.core.trace import traced as traced
from purecompose.run.evaluation import Evaluator as Evaluator, evaluate as evaluate, predict as predict
from purecompose.run.fit import fit as fit, training as training
from purecompose.run.rules import (
    EarlyStopping as EarlyStopping,
    ReduceOnPlateau as ReduceOnPlateau,
    Threshold as Threshold,
)
from purecompose.run.train import train as train
from purecompose.saving import Checkpoints as Checkpoints, load as load, save as save
from purecompose.schedule import hparam as hparam
from purecompose.surgery.weights import to_module as to_module
from purecompose.time.event import Event as Event
from purecompose.time.predicates import (
    after as after,
    before as before,
    between as between,
    epoch_ends as epoch_ends,
    every as every,
    on as on,
)
from purecompose.transforms.compilation import compile as compile
from purecompose.transforms.compilation.step import call_in_torch_compile
from purecompose.transforms.data_parallel import data_parallel as data_parallel
from purecompose.transforms.fully_sharded import (
    fully_sharded as fully_sharded,
    materialized as materialized,
    shard as shard,
    whole as whole,
)
from purecompose.transforms.population import (
    by_form as by_form,
    population as population,
    stack_states as stack_states,
    unstack_states as unstack_states,
)


if TYPE_CHECKING:
    from purecompose import testing as testing
else:

    def __getattr__(name: str) -> object:
        """Import `testing`, which needs Hypothesis, on first use."""
        if name == "testing":
            return importlib.import_module("purecompose.testing")
        return refuse(__name__, name)


publish(__name__)
INSTALLED["torch.compile"] = call_in_torch_compile
