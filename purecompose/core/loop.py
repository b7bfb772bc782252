"""The loop programs, and the core stages in them.

A program is a tuple of events, stages and scopes; a training step is the fold over it.
"""

from purecompose import losses
from purecompose.core.calls import run_loss, run_model
from purecompose.core.means import targets_of_loss, with_loss_of_slice
from purecompose.core.program import Program, Stage, Update
from purecompose.core.scopes import Grad, Microbatches
from purecompose.core.state import State
from purecompose.time.event import Event


def _forward(state: State) -> State:
    outputs, buffers = run_model(state, state.inputs, train=True)
    return state.replace(outputs=outputs, buffers=buffers)


def _eval_forward(state: State) -> State:
    try:
        outputs, _ = state.run_model(state.inputs, train=False)
    except (NotImplementedError, TypeError) as error:
        if not str(error) or "forward" in str(error):
            error.add_note(
                "evaluate and predict call forward(inputs): a network of several players gives the argument that "
                "selects one a default, as in forward(self, inputs, player='G')"
            )
        raise
    return state.replace(outputs=outputs)


def _loss(state: State) -> State:
    if state.whole_loss is not None:
        return with_loss_of_slice(state)
    outputs, targets = state.outputs, targets_of_loss(state)
    (loss, parts), buffers = run_loss(state, lambda loss: losses.evaluate_parts(loss, outputs, targets), train=True)
    changes = {} if buffers is state.buffers else {"buffers": buffers}
    if parts:
        changes["metrics"] = {**state.metrics, **losses.metrics_of_parts(parts)}
    return state.replace(loss=loss, **changes)


def _advance(state: State) -> State:
    return state.replace(clock=state.clock.advanced()) if state.clock is not None else state


forward: Stage = Stage("forward", _forward)
"""Stage that runs the network in training mode on the batch's input and sets `outputs` and `buffers`."""

eval_forward: Stage = Stage("eval_forward", _eval_forward)
"""Stage that runs the network in evaluation mode on the batch's input and sets `outputs`."""

loss: Stage = Stage("loss", _loss, sets_loss=True)
"""Stage that sets `loss`, 0-d, from `outputs` and the batch's target; mixtures are resolved here."""

update: Update = Update()
"""Node that updates the parameters with the optimizer."""

advance: Stage = Stage("advance", _advance)
"""Stage that advances the time by one batch: later nodes see the new time."""

loop_events: Program = (
    Event.AFTER_DATALOADER,
    Event.BATCH_START,
    Event.BEFORE_TRAIN_BATCH,
    Microbatches(
        Grad(
            Event.BEFORE_FORWARD,
            forward,
            Event.AFTER_FORWARD,
            Event.BEFORE_LOSS,
            loss,
            Event.AFTER_LOSS,
            Event.BEFORE_BACKWARD,
        ),
        Event.AFTER_BACKWARD,
    ),
    Event.AFTER_TRAIN_BATCH,
    update,
    advance,
    Event.BATCH_END,
)
"""One training step."""

eval_events: Program = (
    Event.EVAL_BATCH_START,
    Event.EVAL_BEFORE_FORWARD,
    eval_forward,
    Event.EVAL_AFTER_FORWARD,
    Event.EVAL_BATCH_END,
)
"""One batch of an evaluation."""

predict_events: Program = (
    Event.PREDICT_BATCH_START,
    Event.PREDICT_BEFORE_FORWARD,
    eval_forward,
    Event.PREDICT_AFTER_FORWARD,
    Event.PREDICT_BATCH_END,
)
"""One batch of a prediction."""
