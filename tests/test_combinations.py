"""What does not work together is refused with its reason and remedy, and the documentation shows the table."""

import pathlib
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import Algorithm, Event, State, algorithms as alg, compose, loop, loop_events, on
from purecompose.combinations import REFUSED
from purecompose.core.ranks import Ranks
from purecompose.transforms.data_parallel import Shared, shared_program
from purecompose.transforms.fully_sharded import check_needs_no_parts


RANKS = Ranks("nowhere", 0, 2)
BATCH = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)


def new_state(net: nn.Module | None = None, optimizer: Any = None) -> State:
    net, optimizer = net or nn.Linear(3, 2), optimizer or pc.optim.sgd(0.1)
    return State.create(net, loss=pc.losses.cross_entropy, optimizer=optimizer, duration="1ep", batches_per_epoch=2)


def host(event: Event, match: Any = None) -> Algorithm:
    return Algorithm("host", match or on(event), lambda event, state: state, host=True)


def own(state: State) -> State:
    return state.replace(loss=state.forward(state.inputs, train=True).square().mean())


def with_attributes(**attributes: Any) -> loop.Stage:
    def stage(state: State) -> State:
        return own(state)

    for name, value in attributes.items():
        setattr(stage, name, value)
    return loop.Stage("own", stage)


def of(gradient: Any, *methods: Algorithm) -> pc.Step:
    around = Event.BEFORE_TRAIN_BATCH, gradient, Event.AFTER_TRAIN_BATCH, loop.update, loop.advance, Event.BATCH_END
    return compose(around, methods)


def run(step: pc.Step, optimizer: Any = None) -> State:
    return step(step.init(new_state(optimizer=optimizer)), BATCH)


def of_shards() -> None:
    with mock.patch.object(sys.modules["purecompose.optim.lbfgs"], "is_shard", lambda tensor: True):
        run(ONE_STEP, BFGS)


def shared(step: pc.Step) -> pc.Step:
    return step.replace(program=shared_program(step.program, RANKS, is_checked=True))


def lowered(step: pc.Step) -> Any:
    return step.lowered(0)


def members() -> State:
    return pc.stack_states([new_state(), new_state()])


def fit_members(**settings: Any) -> Any:
    data = pc.data.arrays(*BATCH, batch_size=2)
    return pc.fit(pc.population(compose(loop_events), 2), members(), data, **settings)


def enter_guard(state: State) -> None:
    body = loop.Microbatches(loop.Grad(loop.forward, loop.loss))
    guard = Shared(body, ranks=RANKS, is_checked=True).guard(compose(loop_events), state, BATCH, is_first=True)
    assert guard is not None
    with guard:
        pass


def divided_again() -> pc.Step:
    return shared(shared(compose(loop_events)))


def keeps_best() -> Any:
    evaluator = pc.Evaluator(pc.data.arrays(*BATCH, batch_size=2))
    return fit_members(evaluate=evaluator, checkpoints=pc.Checkpoints("never", best="eval/loss"))


def recorded(step: pc.Step, **options: Any) -> pc.Step:
    return pc.compile(step, mode="reduce-overhead", **options)


def other_losses(event: Event, state: State) -> State:
    state.gradients(of=[pc.losses.mse])
    return state


LOOK = Algorithm("look", on(Event.AFTER_TRAIN_BATCH), other_losses)
AT_VALUES = host(Event.BATCH_END, lambda event, state: event is Event.BATCH_END)
ONE_STEP = compose(loop_events)
SLICED, TWICE = loop.Microbatches, with_attributes(denominators=lambda state: 1.0)
COUNTING = with_attributes(num_terms=lambda state: 1)
BFGS = pc.optim.lbfgs(max_iter=2, history_size=2)
LAYERS, GRAPHS = 'fully_sharded(gather="layer")', 'compile(mode="reduce-overhead")'
TRIALS: dict[tuple[str, str], Callable[[], Any]] = {
    ("a population", "another population"): lambda: pc.population(pc.population(ONE_STEP, 2), 2),
    ("a population", "several processes"): lambda: pc.population(shared(ONE_STEP), 2),
    ("a population", "a host algorithm inside Microbatches or another scope"): lambda: pc.population(
        compose(loop_events, [host(Event.AFTER_BACKWARD)]), 2
    ),
    ("a population", "a host algorithm that matches by values"): lambda: pc.population(
        of(loop.Grad(loop.forward, loop.loss), AT_VALUES), 2
    ),
    ("a population", "traced"): lambda: pc.traced(pc.population(ONE_STEP, 2))(members(), BATCH),
    ("a population", "stopping rules"): lambda: fit_members(
        evaluate=pc.Evaluator(pc.data.arrays(*BATCH, batch_size=2)), stop=pc.EarlyStopping("eval/loss", "1ep")
    ),
    ("a population", "states chosen by a metric"): keeps_best,
    ("several processes", "a step that is divided already"): divided_again,
    ("several processes", "a Grad outside of Microbatches"): lambda: shared(of(loop.Grad(loop.forward, loop.loss))),
    ("several processes", "a stage of your own with denominators or losses.over_batch"): lambda: lowered(
        shared(of(SLICED(loop.Grad(TWICE))))
    ),
    ("several processes", "transforms of torch.func and gradients through steps"): lambda: torch.func.vmap(
        lambda x: RANKS.agree([x.sum()])[0]
    )(torch.ones(3)),
    ("several processes", "nn.SyncBatchNorm"): lambda: enter_guard(new_state(nn.SyncBatchNorm(3))),
    ("several processes", "pickle"): lambda: pickle.dumps(shared(ONE_STEP)),
    (LAYERS, "methods that read gradients of parts of the batch"): lambda: check_needs_no_parts(
        compose(loop_events, [alg.gradient_noise_scale()])
    ),
    (LAYERS, "a Microbatches within another"): lambda: check_needs_no_parts(
        of(SLICED(SLICED(loop.Grad(loop.forward, loop.loss))))
    ),
    ("a Grad", "a host algorithm in it"): lambda: compose(loop_events, [host(Event.BEFORE_LOSS)]),
    ("Microbatches", "several stages with denominators"): lambda: run(of(SLICED(loop.Grad(TWICE, TWICE)))),
    ("methods that take means over batches", "a stage of your own with num_terms"): lambda: run(
        of(SLICED(loop.Grad(COUNTING, Event.AFTER_LOSS)), alg.gradient_accumulation(2))
    ),
    ("state.gradients(of=...)", "a loss in a stage of your own"): lambda: run(of(loop.Grad(own), LOOK)),
    ("lbfgs", "compile"): lambda: run(pc.compile(ONE_STEP, backend="eager", quiet=True), BFGS),
    ("lbfgs", "a population, and gradients through steps"): lambda: pc.population(ONE_STEP, 2)(
        pc.stack_states([new_state(optimizer=BFGS)] * 2), BATCH
    ),
    ("lbfgs", "optimizers around it"): lambda: run(compose(loop_events, [alg.skip_nonfinite()]), BFGS),
    ("lbfgs", "fully_sharded"): of_shards,
    ("lbfgs", "methods that change gradients"): lambda: run(compose(loop_events, [alg.sam(0.5)]), BFGS),
    (GRAPHS, "donate=False"): lambda: recorded(ONE_STEP, donate=False),
    (GRAPHS, "dynamic"): lambda: recorded(ONE_STEP, dynamic="all"),
    (GRAPHS, "microbatches"): lambda: recorded(compose(loop_events, microbatch_size=4)),
    (GRAPHS, "several processes"): lambda: recorded(shared(ONE_STEP)),
    (GRAPHS, "host algorithms"): lambda: recorded(compose(loop_events, [host(Event.BATCH_END)])),
}
WITH_PROCESSES = {("fully_sharded", "the gradient of one process's part")}
"""The rows that tests/transforms/test_sharding.py tries."""


@pytest.mark.parametrize("features", TRIALS)
def test_each_row_is_refused_with_its_reason_and_remedy(features: tuple[str, str]) -> None:
    row, error = REFUSED[features], pickle.PicklingError if "pickle" in features else pc.errors.UnsupportedError
    with pytest.raises(error) as raised:
        TRIALS[features]()
    expected = f"{' with '.join(features)} does not work, because {row.reason}. Instead: {row.remedy}"
    assert str(raised.value).endswith(expected)


def test_all_rows_are_tried() -> None:
    assert TRIALS.keys() | WITH_PROCESSES == REFUSED.keys()


def test_the_documentation_shows_the_table() -> None:
    text = (pathlib.Path(__file__).parents[1] / "docs/concepts.md").read_text()
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \| (.*) \|$", text, re.M)
    shown = [tuple(cell.replace("`", "") for cell in row) for row in rows]
    expected = [(*features, row.reason, row.remedy) for features, row in REFUSED.items()]
    assert [row for row in shown if row[:2] in REFUSED] == [tuple(c.replace("`", "") for c in row) for row in expected]
