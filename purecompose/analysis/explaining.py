"""`explain`: what a step did with a batch: methods, losses of examples, gradients of layers."""

import base64
import contextlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import batch as batches, losses, tree
from purecompose._support.checks import shown
from purecompose._support.device import arithmetic
from purecompose._support.tables import table
from purecompose.algorithms._parts.model_losses import model_losses
from purecompose.analysis.replaying import RecordedRun, point, states_from
from purecompose.core.compose import Step
from purecompose.core.state import State, check_single
from purecompose.core.trace import Trace, traced_fold
from purecompose.data import Arrays
from purecompose.records.report import write_page
from purecompose.time import TimeLike
from purecompose.transforms.compilation import CompiledStep


_MOST_EXAMPLES, _MOST_WORDS, _MOST_NUMBERS = 8, 200, 8
_OUTLIER = 100.0
"""An example is noted if its largest value is more than this many times that of the median example."""


class Shown(NamedTuple):
    """An input or target in a report."""

    words: str
    """Text, numbers, or dtype and shape."""
    picture: str = ""
    """A PNG as a data URL, if it is an image."""


class Layer(NamedTuple):
    """The norms of a layer in a step."""

    name: str
    """Name of the module that holds the parameters."""
    weights: float
    """Norm of the parameters before the step."""
    gradient: float | None
    """Norm of the gradients that the optimizer received; `None` if the layer has no gradient, or if a program with
    several updates has already applied it."""
    update: float
    """Norm of the change of the parameters."""


@dataclass(frozen=True)
class Example:
    """An example of a batch."""

    index: int
    """Its index in the batch."""
    dataset_index: int | None
    """Its index in the data set, if the order of the data is known, as for `data.arrays`."""
    loss: float | None
    """Its loss; `None` if it is not known."""
    notes: tuple[str, ...]
    """Remarks on unusual values, such as "targets are not finite"."""
    inputs: Shown
    """Its input, as shown in reports."""
    target: str
    """Its target, as text."""

    @property
    def name(self) -> str:
        """The indices in words."""
        in_data = "" if self.dataset_index is None else f" (number {self.dataset_index} of the data)"
        return f"example {self.index}{in_data}"


@dataclass(frozen=True)
class Explanation:
    """The report of a step: `print` shows it as tables, `write` as a page."""

    batch: int
    """Number of the batch: the step led from `batch - 1` to `batch`."""
    epoch: int
    """Number of the epoch."""
    loss: float
    """The step's loss."""
    trace: Trace
    """Which algorithm changed which leaves, and by how much."""
    layers: tuple[Layer, ...]
    """The norms of each layer."""
    examples: tuple[Example, ...]
    """Examples of the batch: first those with values that are not finite or unusually large, then by loss."""
    num_examples: int
    """Number of examples in the batch."""
    losses: Tensor | None
    """Loss of each example, floating, shape (N,). Computed before the step and before any algorithm changes the batch,
    with the network in evaluation mode, so that it does not depend on other examples. `None` if it is not known."""
    unknown: str = ""
    """The reason why `losses` is `None`."""
    title: str = ""
    """The folder of the run, if there is one."""
    state: State | None = field(default=None, repr=False, compare=False)
    """The state after the step."""

    def __str__(self) -> str:
        head = f"batch {self.batch} (epoch {self.epoch}): loss {self.loss:.6g}, {self.num_examples} examples"
        parts = [head if not self.title else f"{self.title}\n{head}"]
        parts.append(f"methods\n{self.trace}")
        parts.append(f"layers\n{table(LAYER_COLUMNS, layer_rows(self.layers))}")
        if self.examples:
            parts.append(f"examples\n{table(EXAMPLE_COLUMNS, example_rows(self.examples))}")
        if self.unknown:
            parts.append(f"the losses of single examples are not known: {self.unknown}")
        return "\n\n".join(parts)

    def write(self, path: Path | str) -> Path:
        """Write the report as a page: a single file of HTML without scripts, for light and dark screens."""
        ran = [entry for entry in self.trace if entry.ran]
        rows = [[entry.algorithm, entry.event.name, str(entry.runs), ", ".join(entry.words)] for entry in ran]
        idle = sorted({entry.algorithm for entry in self.trace} - {entry.algorithm for entry in ran})
        values = {
            "name": f"Batch {self.batch:,}",
            "report": self,
            "methods": (("method", "event", "runs", "changed"), rows),
            "idle": ", ".join(idle),
            "layers": (LAYER_COLUMNS, layer_rows(self.layers)),
        }
        return write_page(path, "explanation.html.jinja", values, package="purecompose.analysis")


LAYER_COLUMNS = ("layer", "weights", "gradient", "update", "update / weights")
EXAMPLE_COLUMNS = ("example", "in data", "loss", "target", "input", "notes")


def layer_rows(layers: Sequence[Layer]) -> list[list[str]]:
    """Return the rows of a table of layers."""
    return [
        [
            one.name,
            f"{one.weights:.4g}",
            "" if one.gradient is None else f"{one.gradient:.4g}",
            f"{one.update:.4g}",
            f"{one.update / one.weights:.2g}" if one.weights else "",
        ]
        for one in layers
    ]


def example_rows(examples: Sequence[Example]) -> list[list[str]]:
    """Return the rows of a table of examples."""
    return [
        [
            str(one.index),
            "" if one.dataset_index is None else str(one.dataset_index),
            "" if one.loss is None else f"{one.loss:.4g}",
            one.target,
            one.inputs.words,
            "; ".join(one.notes),
        ]
        for one in examples
    ]


class LastBatch:
    """An observer that keeps the newest batch, and the state before it."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.batch: Any = None

    def __call__(self, event: Any, state: State) -> None:
        del event, state

    def see_batch(self, state: State, batch: Any) -> None:
        """Keep a state and a batch. A state that the step will overwrite is copied."""
        self.state, self.batch = (state if state.lease is None else state.copy()), batch


def explain(run: RecordedRun, at: TimeLike | int) -> Explanation:
    """Return what the step of a run did at a batch, after a replay up to there.

    Args:
        run: The run.
        at: The batch: 1234 is the one that leads to the state at batch 1234. For a time such as "3ep", the batch that
            reaches it.

    Raises:
        TypeError: `run` is not a `RecordedRun`.
        ValueError: `at` is the start of the run or outside the recorded part, or the run trains a population.
        MismatchError: See `replay`.

    Example::

        print(explain(RecordedRun("runs/first", step, state, data), at="22ba"))
    """
    if not isinstance(run, RecordedRun):
        raise TypeError(f"explain: expected a RecordedRun(path, step, state, data), got {shown(run)}")
    at, last = point(at, "explain: at"), LastBatch()
    if at.value == 0:
        raise ValueError(f"explain: at={at}: no batch led there; the first one is 1")
    check_single(run.start, "explain", "its members share each batch, and explain_batch explains one of them")
    found, length = run.before(at, strictly=True)
    with contextlib.closing(states_from(run, run.load(found), length, (last,))) as states:
        for state in states:
            if state.timestamp.reached(at):
                break
    if last.state is None:
        raise ValueError(f"explain: at={at}: {run.path} has no batch before it")
    return explain_last(run, last)


def explain_last(run: RecordedRun, last: LastBatch) -> Explanation:
    """Return the explanation of the batch that a replay has seen last."""
    assert last.state is not None
    found = explain_batch(run.plain_step, last.state, last.batch, decode=run.decode)
    places = _places(run.data, last.state)
    examples = tuple(replace(one, dataset_index=places[one.index] if places else None) for one in found.examples)
    return replace(found, examples=examples, title=str(run.path))


def explain_batch(
    step: Step,
    state: State,
    batch: Any,
    *,
    num_examples: int = _MOST_EXAMPLES,
    decode: Callable[[Any], str] | None = None,
) -> Explanation:
    """Return what a step does with a batch, for a state in memory; the state and the batch are not changed.

    Args:
        step: The step; a compiled one runs uncompiled here.
        state: A single state, between steps.
        batch: The batch.
        num_examples: Number of examples in the report.
        decode: Function that returns the input of an example as text.

    Raises:
        ValueError: The state is a population's.

    Example::

        print(explain_batch(step, state, batch))
    """
    check_single(state, "explain_batch", "unstack_states(state) gives each of them, for the step before population")
    plain = step.step if isinstance(step, CompiledStep) else step
    end, trace = traced_fold(plain, state, batch)
    after = plain.finish(end)
    values, unknown = _example_losses(plain, state, batch)
    num = plain.num_examples(state, batch)
    now = after.timestamp
    return Explanation(
        batch=now.batch,
        epoch=state.timestamp.epoch,
        loss=math.nan if after.loss is None else float(after.loss),
        trace=trace,
        layers=_layers(state, after, end.grads or {}),
        examples=_examples(state, batch, num, num_examples, values, decode),
        num_examples=num,
        losses=values,
        unknown=unknown,
        state=after,
    )


def _layers(before: State, after: State, grads: dict[str, Tensor]) -> tuple[Layer, ...]:
    names: dict[str, list[str]] = {}
    for name in before.params:
        names.setdefault(name.rpartition(".")[0] or "(root)", []).append(name)
    found = []
    for layer, members in names.items():
        own = [grads[name] for name in members if name in grads]
        moved = [after.params[name] - before.params[name] for name in members if name in after.params]
        found.append(
            Layer(
                layer,
                float(tree.global_norm([before.params[name] for name in members])),
                float(tree.global_norm(own)) if own else None,
                float(tree.global_norm(moved)),
            )
        )
    return tuple(found)


def _example_losses(step: Step, state: State, batch: Any) -> tuple[Tensor | None, str]:
    """Return the loss of each example, or the reason why it is not known."""
    inside = step.prepare(state, batch).start()
    num = step.num_examples(state, batch)
    try:
        with torch.no_grad(), arithmetic(state.context.precision, state.device):
            try:
                return _losses(inside), ""
            except (TypeError, ValueError):  # the loss gives one number for a batch
                rows = (batches.take(batch, torch.tensor([i], device=state.device), num) for i in range(num))
                return torch.stack([_loss_of(inside.replace(batch=row)) for row in rows]), ""
    except Exception as error:  # a program or loss of another form; the rest of the report is worth having
        return None, f"{type(error).__name__}: {error}".partition("\n")[0]


def _losses(state: State) -> Tensor:
    outputs, loss = state.forward(state.inputs), state.context.loss
    if not isinstance(loss, losses.ModelLoss):
        return state.call_loss(lambda fn: losses.per_example(fn, outputs, state.targets), train=False)[0]
    if loss.labels is None:
        raise TypeError("the labels of the model's loss are not named")
    return model_losses("explain", loss, outputs, state.batch)


def _loss_of(state: State) -> Tensor:
    outputs, loss = state.forward(state.inputs), state.context.loss
    if isinstance(loss, losses.ModelLoss):
        return loss(outputs, state.batch).float()
    found = state.call_loss(lambda fn: fn(outputs, state.targets), train=False)[0]
    return found[0] if isinstance(found, tuple) else found


def _examples(
    state: State, batch: Any, num: int, most: int, values: Tensor | None, decode: Callable[[Any], str] | None
) -> tuple[Example, ...]:
    """Return the examples of a batch, those with notes first."""
    fields = {"inputs": state.context.input_field, "targets": state.context.target_field}
    members = {name: _member(batch, field, state.context.batch_dim) for name, field in fields.items()}
    notes: list[list[str]] = [[] for _ in range(num)]
    for name, member in members.items():
        if isinstance(member, Tensor) and member.is_floating_point() and member.ndim and len(member) == num:
            _note(notes, name, member.detach().reshape(num, -1))
    known = [None] * num if values is None else values.tolist()
    for note, loss in zip(notes, known, strict=True):
        if loss is not None and not math.isfinite(loss):
            note.append("the loss is not finite")

    def rank(i: int) -> tuple[int, float]:
        loss = known[i]
        return -len(notes[i]), -math.inf if loss is None or math.isnan(loss) else -loss

    order = sorted(range(num), key=rank)[:most]
    return tuple(
        Example(
            i,
            None,
            known[i],
            tuple(notes[i]),
            shown_as(_row(members["inputs"], i, num), decode),
            _target(members["targets"], i, num),
        )
        for i in order
    )


def _member(batch: Any, field: Any, dim: int) -> Any:
    """Return a member of a batch, with the examples first; `None` if the program reads the batch in its own way."""
    try:
        found = batches.get(batch, field)
    except (KeyError, TypeError):
        return None
    return found.movedim(dim, 0) if isinstance(found, Tensor) and found.ndim > dim else found


def _note(notes: list[list[str]], name: str, rows: Tensor) -> None:
    is_finite = rows.isfinite().all(1).tolist()
    sizes = rows.abs().nan_to_num(0.0, 0.0, 0.0).amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
    typical = float(sizes.median())
    for i, (finite, size) in enumerate(zip(is_finite, sizes.tolist(), strict=True)):
        if not finite:
            notes[i].append(f"{name} are not finite")
        elif typical > 0 and size > _OUTLIER * typical:
            notes[i].append(f"{name} reach {size:.3g}, {size / typical:,.0f} times the typical")


def _row(member: Any, i: int, num: int) -> Any:
    return member[i] if isinstance(member, Tensor) and member.ndim and len(member) == num else None


def _target(member: Any, i: int, num: int) -> str:
    row = _row(member, i, num)
    if row is None:
        return ""
    return shown_as(row if row.ndim else row.reshape(1), None).words


def _places(data: Any, state: State) -> list[int] | None:
    """Return the places in the data of the examples of the batch after a state, for data in memory."""
    if not isinstance(data, Arrays):
        return None
    now = state.timestamp
    start, end = (batch * data.batch_size for batch in (now.batch_in_epoch, now.batch_in_epoch + 1))
    return data.order(state.key, now.epoch)[start:end].tolist() if data.shuffle else list(range(start, end))


def shown_as(value: Any, decode: Callable[[Any], str] | None) -> Shown:
    """Return an input of one example for a report: images (C, H, W) with one or three channels as pictures.

    Args:
        value: The input, or `None`.
        decode: Function that returns it as text.
    """
    if decode is not None and value is not None:
        words = decode(value)
        return Shown(words if len(words) <= _MOST_WORDS else f"{words[: _MOST_WORDS - 3]}...")
    if not isinstance(value, Tensor):
        return Shown("")
    value = value.detach().cpu()
    if value.ndim == 3 and value.shape[0] in (1, 3) and value.numel() and not value.is_complex():
        return Shown(f"{tree.describe(value)}{_range(value)}", _png(_as_bytes(value)))
    if value.numel() <= _MOST_NUMBERS:
        return Shown(", ".join(f"{number:.4g}" for number in value.flatten().tolist()))
    if not value.is_floating_point() and value.ndim == 1:
        numbers = " ".join(map(str, value.tolist()))
        return Shown(numbers if len(numbers) <= _MOST_WORDS else f"{numbers[: _MOST_WORDS - 3]}...")
    return Shown(f"{tree.describe(value)}{_range(value)}")


def _range(value: Tensor) -> str:
    low, high = (float(one) for one in (value.min(), value.max()))
    return f" from {low:.3g} to {high:.3g}"


def _as_bytes(image: Tensor) -> Tensor:
    """Return an image (C, H, W) as (H, W, C), uint8, from its darkest to its brightest finite value."""
    if image.dtype is not torch.uint8:
        image = image.double()
        finite = image[image.isfinite()]
        low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
        image = (image.nan_to_num(low, high, low) - low) * (255 / (high - low) if high > low else 0)
        image = image.round().clamp(0, 255).to(torch.uint8)
    return image.permute(1, 2, 0).contiguous()


def _png(pixels: Tensor) -> str:
    """Return a PNG of gray or RGB pixels (H, W, C) as a data URL; empty if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        return ""
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(2).numpy()).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
