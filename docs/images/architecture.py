"""Draws the picture of docs/architecture.md: the path of a batch, with the files of the functions that it passes.

    python docs/images/architecture.py [FOLDER]

Writes architecture.svg beside this file unless a folder is given. Each row names a function or module of the code, and
the picture shows the file in which it is, so a function that moves changes the picture.
"""

import pathlib
import sys
from types import ModuleType
from typing import Any, NamedTuple

from explained import FOLDER, Drawing

import purecompose as pc
from purecompose import losses
from purecompose.core.application import Matcher, application
from purecompose.core.clock import Clock
from purecompose.core.contract import Contract
from purecompose.core.gradient import differentiate
from purecompose.core.operation import in_order
from purecompose.core.passes import compose_passes
from purecompose.core.repeated import in_slices
from purecompose.core.scopes import Scope
from purecompose.data import loaders
from purecompose.nn import network
from purecompose.optim.base import ByGroup
from purecompose.run.evaluation import evaluate
from purecompose.run.outer import Run
from purecompose.transforms.compilation.execution import execute
from purecompose.transforms.data_parallel import Shared
from purecompose.transforms.population import Stacked


WIDTH = 400
PACKAGE = pathlib.Path(pc.__file__).parent


class Row(NamedTuple):
    """A line of a box: what happens, the code that does it, and how far the line is indented."""

    text: str
    code: Any
    depth: int = 0
    kind: str = "ink"


class Box(NamedTuple):
    """A part of the path, and what leads out of it."""

    title: str
    rows: tuple[Row, ...]
    leads_to: str


BOXES = (
    Box(
        "fit: the loop around steps",
        (
            Row("the next batch, in keyed order", loaders),
            Row("events outside of steps", Run.states),
            Row("evaluation, checkpoints", evaluate),
        ),
        "step(state, batch)",
    ),
    Box(
        "1  Prepare, on the host",
        (
            Row("which methods act: the schedule", Matcher.schedule),
            Row("the time, as a small tensor", Clock.of),
            Row("batch and clock enter the state", pc.Step.prepare),
        ),
        "schedule",
    ),
    Box(
        "2  Look up its operations, or lower the program",
        (
            Row("scopes lower their bodies", Scope.lower),
            Row("the order of methods at each event", compose_passes),
            Row("a method at an event", application),
            Row("data_parallel: Shared", Shared, 0, "four"),
        ),
        "operations",
    ),
    Box(
        "3  Fold the state over them",
        (
            Row("AFTER_DATALOADER: mixup", pc.algorithms.mixup),
            Row("Microbatches: slices, means", in_slices),
            Row("Grad: differentiates its body", differentiate, 1),
            Row("forward: the network", network, 2),
            Row("loss: targets that mix", losses.evaluate_parts, 2),
            Row("AFTER_TRAIN_BATCH: sam", pc.algorithms.sam),
            Row("update: the optimizer", ByGroup),
            Row("advance: the time", Clock.advanced),
            Row("BATCH_END: ema", pc.algorithms.ema),
            Row("composed: one by one", in_order, 0, "four"),
            Row("population: under vmap", Stacked, 0, "four"),
            Row("compile: graphs", execute, 0, "four"),
        ),
        "last state",
    ),
    Box(
        "4  Finish",
        (Row("a first run has been checked", Contract.check), Row("temporary fields go, time is new", pc.Step.finish)),
        "new state",
    ),
)


def path_of(code: Any) -> str:
    """Return the file of a function, class or module, relative to the package."""
    name = code.__name__ if isinstance(code, ModuleType) else code.__module__
    return pathlib.Path(sys.modules[name].__file__ or "").relative_to(PACKAGE).as_posix()


def picture() -> str:
    """Draw the boxes from top to bottom, with an arrow from each to the next."""
    drawing, y = Drawing("The path of a batch through fit, a step's decisions, the fold and the end", WIDTH), 12
    for box in BOXES:
        height = 34 + 21 * len(box.rows)
        drawing.box(10, y, WIDTH - 20, height, "frame")
        drawing.text(22, y + 22, box.title, "strong")
        for i, row in enumerate(box.rows):
            line = y + 44 + 21 * i
            if i and row.kind != box.rows[i - 1].kind:  # above the ways of executing
                drawing.line(22, line - 15, WIDTH - 22, line - 15)
            drawing.text(22 + 14 * row.depth, line, row.text, row.kind)
            drawing.text(WIDTH - 22, line, path_of(row.code), "small", "end")
        y += height
        drawing.line(40, y, 40, y + 22)
        drawing.elements.append(f'<path d="M36 {y + 17}l4 7l4-7z" class="faint"/>')
        drawing.text(54, y + 17, box.leads_to, "faint")
        y += 26
    drawing.height = y - 8
    return drawing.svg()


if __name__ == "__main__":
    (pathlib.Path(*sys.argv[1:]) if sys.argv[1:] else FOLDER).joinpath("architecture.svg").write_text(picture())
