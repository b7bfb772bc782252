"""The tables of docs/matrix.md: what happens when a step with each shipped method trains each network.

`python -m tests.foreign.matrix` prints them; `--write` puts them into the page. The cells of libraries that are not
installed stay as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

import purecompose as pc
from purecompose import State, algorithms as alg, batch as batches, losses, tree
from purecompose._support import specs
from purecompose.algorithms import FACTORIES, GROUPS
from purecompose.core.algorithm import Algorithm
from purecompose.testing.tasks import TASKS
from tests.foreign.foreign_case import Case
from tests.foreign.foreign_modes import make_state
from tests.foreign.matrix_networks import COLUMNS, HEADS, MISSING, Logits
from tests.shipped import SHIPPED


PAGE = pathlib.Path(__file__).parents[2] / "docs" / "matrix.md"
MARK = "<!-- Written by `python -m tests.foreign.matrix --write`. -->"

WORKS, NOTHING, UNKNOWN = "✓", "–", "?"

SETTINGS = {
    "1": "with `alibi(1)`, which leaves the batch as it is",
    "2": 'with `input_field="pixel_values"` as an argument of the method',
    "3": 'with `losses.ModelLoss(labels="labels")`',
    "4": "in a [wrapper that returns its logits](models.md#methods-that-change-targets)",
}
"""Settings with which a method works that is refused without them, by the mark in the cell."""

REASONS = {
    "a": ("needs images (N, C, H, W)", r"expected images, one tensor"),
    "b": ("needs sequences (N, L) or (N, L, D)", r"expected sequences, token ids"),
    "c": ("mixes numbers; token ids cannot be mixed", r"token ids are, which cannot be mixed|mixes one tensor"),
    "d": ("needs examples in rows, which graphs are not", r"expected examples along dimension 0"),
    "e": ("the network takes images of one size", r"vit: expected images of|Input height \(|Input image size \("),
    "f": ("batch normalisation mixes the examples", r"layers that use statistics of the whole batch"),
}
"""Reasons of refusals in words, and the pattern of the error's message, by the mark in the cell."""

MEANINGS = {
    WORKS: "it works",
    **{f"{WORKS} {mark}": f"it works {words}" for mark, words in SETTINGS.items()},
    NOTHING: "it finds nothing to change, and warns",
    **{mark: f"refused: {words}" for mark, (words, _) in REASONS.items()},
    UNKNOWN: "not tried: the library was not installed",
}
PACKAGES = ("torch", "torchvision", "timm", "transformers", "torch_geometric")

# In place of an example that leaves one of four images, of which batch normalisation has no statistics.
CALLS = {"patch_whitening": "patch_whitening()", "batch_size_warmup": "batch_size_warmup(1.0, 0.5)"}


@dataclasses.dataclass(frozen=True)
class Way:
    """A method and a case with the settings of `mark` in `SETTINGS`."""

    algorithm: Algorithm
    case: Case
    mark: str = ""


@functools.cache
def variants(head: str) -> dict[str, Case]:
    """Return the cases of a column by the mark of their settings, that without settings first."""
    case = COLUMNS[head]
    if not isinstance(case.loss, losses.ModelLoss):
        return {"": case}
    named = dataclasses.replace(case, loss=losses.ModelLoss(labels="labels"))
    input_field = "pixel_values" if "pixel_values" in case.batches()[0] else batches.WHOLE
    options = {"input_field": input_field, "target_field": "labels"}
    wrapped = Case(case.name, lambda: Logits(case.make()), case.make_batch, options=options)
    return {"": case, "3": named, "4": wrapped}


def ways(method: str, head: str) -> Iterator[Way]:
    """Yield what to try one after the other, until the method is not refused."""
    call = specs.parse_one(CALLS.get(method, SHIPPED[method].examples[0]))
    is_vision = "pixel_values" in COLUMNS[head].batches()[0]
    for mark, case in variants(head).items():
        yield Way(specs.build(call, FACTORIES, "algorithm"), case, mark)
        if method == "alibi" and not mark:
            yield Way(alg.alibi(1), case, "1")
        if is_vision and not mark and "input_field" in inspect.signature(FACTORIES[method]).parameters:
            with_field = dataclasses.replace(call, kwargs={**call.kwargs, "input_field": "pixel_values"})
            yield Way(specs.build(with_field, FACTORIES, "algorithm"), case, "2")


class Wrong(Exception):
    """A step that did not do what its cell would say."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The state before and after INIT and after all batches, predictions for one of these, and what was warned of."""

    before: State
    start: State
    end: State
    outputs: Any
    warned: str

    @classmethod
    def of(cls, algorithms: Sequence[Algorithm], case: Case, precision: str) -> Run:
        """Train on two batches, and predict."""
        options = {**case.options, "duration": "4ba", "precision": precision}
        step = pc.compose(pc.loop_events, algorithms)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            before = make_state(dataclasses.replace(case, options=options), case.net())
            start = end = step.init(before)
            for batch in case.batches()[:2]:
                end = step(end, batch)
            outputs = pc.predict(end, case.batches()[:1], step=step)
        return cls(before, start, end, outputs, "\n".join(str(warning.message) for warning in warned))

    @property
    def replaced(self) -> bool:
        """True if INIT replaced modules, or stored filters in another layout."""
        first, second = (
            (repr(state.model.module), [param.stride() for param in state.params.values()])
            for state in (self.before, self.start)
        )
        return first != second

    def differs(self, other: Run) -> bool:
        """Return whether anything but the time differs in the end, or in predictions."""
        first, second = (
            (
                run.end.params,
                run.end.buffers,
                run.end.slots,
                run.end.metrics,
                run.end.loss,
                batches.tensors(run.outputs),
            )
            for run in (self, other)
        )
        return not tree.equal(first, second)


@functools.cache
def plain(head: str, mark: str, precision: str) -> Run:
    """Return the run of a column's network without a method, with the settings of a mark."""
    cases = variants(head)
    return Run.of([], cases.get(mark, cases[""]), precision)


def cell(method: str, head: str) -> str:
    """Return the text of a cell, or raise `Wrong`."""
    refusal = ""
    precision = "bf16" if all(TASKS[name].is_half for name in SHIPPED[method].tasks) else "fp32"
    for way in ways(method, head):
        try:
            run = Run.of([way.algorithm], way.case, precision)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # timm asserts the size of images
            refusal = f"{type(error).__name__}: {error}"
            continue
        return checked(method, run, plain(head, way.mark, precision)) + (f" {way.mark}" if way.mark else "")
    marks = [mark for mark, (_, pattern) in REASONS.items() if re.search(pattern, refusal)]
    if len(marks) != 1:
        raise Wrong(f"{method}, {head}: expected a refusal for one of the REASONS, got {marks} for {refusal}")
    return marks[0]


def checked(method: str, run: Run, without: Run) -> str:
    """Return whether a method has worked or done nothing, as its warning says; raise `Wrong` if both are false."""
    assert run.end.loss is not None
    if not run.end.loss.isfinite() or tree.equal(run.start.params, run.end.params):
        raise Wrong(f"{method}: expected a finite loss and new weights, got the loss {run.end.loss.item()}")
    is_idle = re.search(rf"{method} (changed nothing|has no effect)", run.warned) is not None
    acts = run.replaced if FACTORIES[method] in GROUPS["On the model"] else run.differs(without)
    if acts == is_idle or (is_idle and run.differs(without)):
        raise Wrong(f"{method}: it acts: {acts}, and differs: {run.differs(without)}; its warnings: {run.warned!r}")
    return NOTHING if is_idle else WORKS


Cells = Mapping[str, Mapping[str, str]]
"""The cells by method and head of the column."""


def on_the_page() -> Cells:
    """Return the cells of the page."""
    rows = [
        [part.strip() for part in line[1:-1].split("|")] for line in PAGE.read_text().splitlines() if line[:1] == "|"
    ]
    heads = rows[0][1:]
    listed = {re.sub(r"\[`?(\w+)`?\].*", r"\1", row[0]): dict(zip(heads, row[1:], strict=True)) for row in rows}
    return {method: cells for method, cells in listed.items() if method in SHIPPED}


def rendered(cells: Cells) -> str:
    """Return the part of the page below `MARK`."""
    used = {mark for row in cells.values() for mark in row.values()}
    lines = ["", *(f"* **{mark}** {words}" for mark, words in MEANINGS.items() if mark in used), ""]
    for group, factories in GROUPS.items():
        lines += [f"## {group}", "", f"| method | {' | '.join(HEADS)} |", f"| --- |{' :-: |' * len(HEADS)}"]
        for method in (factory.__name__ for factory in factories):
            lines.append(f"| [{method}](algorithms/{method}.md) | {' | '.join(cells[method].values())} |")
        lines.append("")
    kept = dict(re.findall(r"(\w+) (\d[\w.]*\w)", PAGE.read_text().rpartition("Made with")[2]))
    new = {name: version(name).partition("+")[0] for name in PACKAGES if name not in MISSING.values()}
    made = ", ".join(f"{name} {new.get(name) or kept[name]}" for name in PACKAGES)
    return "\n".join([*lines, f"Made with {made}.", ""])


def main(*options: str) -> None:
    """Print the tables or write them to the page."""
    torch.set_num_threads(1)
    page = on_the_page()

    def cell_of(method: str, head: str) -> str:
        return cell(method, head) if head in COLUMNS else page.get(method, {}).get(head, UNKNOWN)

    text = rendered({method: {head: cell_of(method, head) for head in HEADS} for method in SHIPPED})
    if "--write" in options:
        PAGE.write_text(PAGE.read_text().partition(MARK)[0] + MARK + "\n" + text)
    else:
        print(text)
    if MISSING:
        print(f"cells were kept, since these do not import here: {', '.join(sorted(set(MISSING.values())))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
