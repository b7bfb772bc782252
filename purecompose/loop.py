"""The loop programs, and the core stages and scopes in them.

A program is a tuple of events, stages and scopes; a training step is the fold over it.
"""

from purecompose._support import publish
from purecompose.core.loop import (
    advance as advance,
    eval_events as eval_events,
    eval_forward as eval_forward,
    forward as forward,
    loop_events as loop_events,
    loss as loss,
    predict_events as predict_events,
    update as update,
)
from purecompose.core.program import Program as Program, Stage as Stage, Update as Update
from purecompose.core.scopes import Grad as Grad, Microbatches as Microbatches, Scope as Scope


publish(__name__)
