"""Every shipped method with losses that couple examples and have state, and with networks of several kinds."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from purecompose import State, Step, compose, loop_events, losses, tree
from purecompose.nn.model import STATISTICS
from purecompose.optim.base import matched
from purecompose.testing import TASKS, Status, Subject, Task, check
from tests.shipped import SHIPPED, Row


def each_method(quick: str | None = None, *, without: tuple[str, ...] = ()) -> Any:
    """Parametrize a test by all methods but those named; `quick` is the only one in the quick tests."""
    rows = [row for row in SHIPPED.values() if row.name not in without and not row.is_alone]
    return pytest.mark.parametrize(
        "row", [pytest.param(row, id=row.name, marks=[] if row.name == quick else pytest.mark.slow) for row in rows]
    )


def task_of(row: Row) -> Task:
    return TASKS[
        next(name for name in ("images", "tokens", "bf16_images", "bf16_tokens", "vectors") if name in row.accepted)
    ]


def with_network(task: Task, wrap: Any) -> Task:
    return Task(wrap.__name__, lambda seed: wrap(task.net(seed)), task.batch, options=task.options)


def started(row: Row, task: Task, microbatches: int = 2, **options: Any) -> tuple[Step, State]:
    algorithm = Subject.of(row.examples[0]).algorithm
    step = compose(loop_events, [algorithm, *options.pop("algorithms", ())], microbatches=microbatches)
    return step, step.init(task.make_state(0, duration="8ba", batches_per_epoch=4, **options))


def run(step: Step, state: State, task: Task, num: int = 3) -> State:
    for number in range(num):
        state = step(state, task.make_batch(number, 6))
    return state


# Losses with parameters and buffers that compare examples


class Centred(nn.Module):
    """Cross entropy of outputs less their mean over the batch, at a learned temperature; it counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Any, reduction: str = "mean") -> Tensor:
        if self.training:
            self.calls.add_(1)
        return F.cross_entropy((outputs - outputs.mean(0)) * self.log_scale.exp(), targets, reduction=reduction)


LAWS = ["microbatches_agree", "ranks_agree", "shards_agree", "vmap_agrees", "compiled_agrees"]
HALF = ("fused_layernorm", "low_precision_groupnorm", "low_precision_layernorm")  # idle in float32
# These need a loss for each example: losses of the batch as a whole have none.
PER_EXAMPLE = ("per_example_clipping", "selective_backprop")


@each_method(without=(*PER_EXAMPLE, *HALF))
def test_a_loss_with_state_that_compares_examples(row: Row) -> None:
    base = TASKS["vectors"] if "vectors" in row.accepted else task_of(row)
    options = {name: option for name, option in base.options.items() if name != "precision"}
    task = Task("coupled", base.net, base.batch, loss=losses.over_batch(Centred()), options=options)
    report = check(row.examples[0], laws=LAWS, tasks=[task], max_examples=1)
    assert not report.refused
    for outcome in report.outcomes:
        assert outcome.status in (Status.KEPT, Status.SKIPPED), f"{outcome.reason}\n{outcome.details}"


# Buffers that must not be averaged, and parts in evaluation mode


class Normalised(nn.Module):
    """A network after a backbone with running statistics, dropout and the vectors of a spectral norm."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.backbone = nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.mix, self.net = nn.Linear(4, 4), net

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.net(inputs)
        features = inputs.to(outputs).flatten(1).mean(1, keepdim=True).expand(-1, 4)
        shift = self.mix(self.backbone(features)).mean(1)
        return outputs + shift.reshape(-1, *[1] * (outputs.ndim - 1))


@pytest.mark.parametrize(
    "row", [SHIPPED[name] for name in ("ema", "swa", "lookahead", "schedule_free")], ids=lambda row: row.name
)
def test_averages_of_weights_leave_other_buffers_live(row: Row) -> None:
    task = with_network(TASKS["vectors"], Normalised)
    step, state = started(row, task, microbatches=1)
    state = run(step, state, task, 6)
    seen = step.fire("eval_start", state)
    live = state.buffers.keys() - matched(STATISTICS, tuple(state.buffers))
    assert any("weight" in name for name in live)
    assert not tree.diff({n: state.buffers[n] for n in live}, {n: seen.buffers[n] for n in live})


@each_method("label_smoothing", without=("ghost_batchnorm", *PER_EXAMPLE[:1]))
def test_parts_in_evaluation_mode_stay_there(row: Row) -> None:
    task = with_network(task_of(row), Normalised)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step, state = started(row, task, eval_mode=["backbone"])
        end = run(step, state, task)
    names = [name for name in state.buffers if name.startswith("backbone.1")]
    assert names and not tree.diff({n: state.buffers[n] for n in names}, {n: end.buffers[n] for n in names})
    modes = {name: module.training for name, module in end.model.skeleton(True).module.named_modules()}
    assert not any(mode for name, mode in modes.items() if name.startswith("backbone"))
    assert any(modes.values())
