"""Draws the pictures of docs/explained.md from what a step itself reports: its trace, schedules, parts and draws.

    python docs/images/explained.py [FOLDER]

Writes explained_NAME.svg for each name in PICTURES, beside this file unless a folder is given. The site puts them into
its page as they are, so that their text can be selected and they follow its theme; elsewhere they are pictures that
follow the theme of the system.
"""

import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape

import torch

import purecompose as pc
from purecompose import algorithms as alg, loop
from purecompose.transforms.compilation.graph_cache import Segments


FOLDER = pathlib.Path(__file__).parent
WIDTH = 480
NUM_BATCHES, BATCHES_PER_EPOCH = 20, 5
# Light and dark. A renderer that does not know light-dark() ignores the second declaration.
COLORS = {
    "paper": ("#ffffff", "#1e2129"),
    "ink": ("#1c2733", "#e3e6ec"),
    "faint": ("#5b6876", "#a3adba"),
    "box": ("#eef2f7", "#2c313d"),
    "one": ("#c2410c", "#fb923c"),
    "two": ("#0f766e", "#2dd4bf"),
    "three": ("#1d4ed8", "#93b4fd"),
    "four": ("#7e22ce", "#d8a4fb"),
}
STAGES = {"forward": "outputs, buffers", "loss": "loss", "update": "params, opt_state", "advance": "clock"}
SCOPES = {"Microbatches": "once for each slice of the batch", "Grad": "its loss is differentiated"}


class Drawing:
    """Elements of a picture, and its height so far."""

    def __init__(self, label: str, width: int = WIDTH) -> None:
        self.label, self.width, self.elements, self.height = label, width, [], 0

    def text(self, x: float, y: float, text: str, kind: str = "ink", anchor: str = "start") -> None:
        self.elements.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        self.elements.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>')
        self.height = max(self.height, round(y + height))

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.elements.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="line"/>')

    def svg(self) -> str:
        size = f'viewBox="0 0 {self.width} {self.height + 12}" width="{self.width}" height="{self.height + 12}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} class="drawn" role="img" aria-label="{self.label}">'
        paper = '<rect width="100%" height="100%" rx="6" class="paper"/>'
        return "\n".join([head, f"<style>\n{_style()}</style>", paper, *self.elements, "</svg>\n"])


def _style() -> str:
    rules = [
        "svg:root { color-scheme: light dark; }",
        ".drawn { max-width: 100%; height: auto; }",
        '.drawn text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }',
        ".drawn .event, .drawn .small { font: 12px ui-monospace, Menlo, Consolas, monospace; }",
        ".drawn .small { font-size: 11px; }",
        ".drawn .strong { font-weight: 600; }",
        *(_colored(name, "ink") for name in ("event", "small", "strong")),
        *(_colored(name, name) for name in COLORS),
        _colored("on", "paper"),
        ".drawn .line, .drawn .frame { fill: none; stroke: #8794a3; }",
    ]
    return "".join(f"{rule}\n" for rule in rules)


def _colored(name: str, color: str) -> str:
    light, dark = COLORS[color]
    return f".drawn .{name} {{ fill: {light}; fill: light-dark({light}, {dark}); }}"


def a_state(methods: Sequence[pc.Algorithm], microbatches: int = 1) -> tuple[pc.Step, pc.State]:
    """Return a step with these methods, and its first state."""
    step = pc.compose(pc.loop_events, methods, microbatches=microbatches)
    torch.manual_seed(0)  # for the weights
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    duration = {"duration": f"{NUM_BATCHES}ba", "batches_per_epoch": BATCHES_PER_EPOCH}
    state = pc.State.create(net, loss=pc.losses.cross_entropy, optimizer=pc.optim.adam(0.01), key=0, **duration)
    return step, step.init(state)


BATCH = torch.linspace(-1, 1, 32).view(8, 4), torch.arange(8) % 3


def fold() -> str:
    """Draw the program of a step from top to bottom, and what each node of it changes."""
    step, state = a_state(
        [alg.mixup(0.2), alg.label_smoothing(0.1), alg.gradient_clipping("norm", 0.01), alg.ema("20ba")]
    )
    _, trace = pc.traced(step)(state, BATCH)
    changes: dict[pc.Event, list[tuple[str, str]]] = {}
    for entry in trace:
        if entry.changed:
            fields = dict.fromkeys(path.partition("[")[0].partition(".")[0] for path in entry.changed)
            changes.setdefault(entry.event, []).append((entry.algorithm, ", ".join(fields)))
    drawing = Drawing("The nodes of a step in order, and which fields of the state each changes")
    y, second = 40, 196  # of the next row; of the column of changes

    def next_row(height: int = 25) -> int:
        nonlocal y
        y += height
        return y - height

    def put(node: object, x: int) -> None:
        if isinstance(node, loop.Scope):
            top, name = next_row(27), type(node).__name__
            drawing.text(x, top + 19, name, "strong")
            drawing.text(second, top + 19, SCOPES[name], "faint")
            for inner in node.body:
                put(inner, x + 14)
            if name == "Grad":
                stage(x + 14, "backward", "grads")
            drawing.box(x - 10, top, WIDTH - 2 * (x - 10), next_row(10) + 2 - top, "frame")
        elif isinstance(node, pc.Event):
            line = next_row() + 17
            drawing.text(x, line, node.name, "event")
            if acting := changes.get(node):
                drawing.text(second, line, "; ".join(f"{name} changes {fields}" for name, fields in acting), "one")
        else:
            name = getattr(node, "name", "update")
            stage(x, name, STAGES[name])

    def stage(x: int, name: str, fields: str) -> None:
        top = next_row()
        drawing.box(x - 6, top + 2, 90, 20)
        drawing.text(x, top + 17, name)
        drawing.text(second, top + 17, f"sets {fields}", "faint")

    drawing.text(24, 26, "state and batch", "strong")
    for node in step.program:
        put(node, 24)
    drawing.text(24, y + 19, "new state", "strong")
    drawing.line(8, 20, 8, y + 15)
    drawing.height = y + 20
    return drawing.svg()


SCHEDULED = [
    alg.mixup(0.2),
    alg.selective_backprop(start=0.5, end=0.9, keep=0.5, full_every=0),
    alg.sam(0.05, every=5),
    alg.ema("4ba", every="2ba"),
]
KINDS = ("one", "two", "three", "four")


def schedules() -> tuple[pc.Step, list[int]]:
    """Return a step, and its schedule in each batch of a run."""
    step, state = a_state(SCHEDULED)
    bits = []
    for _ in range(NUM_BATCHES):
        bits.append(step.prepare(state, BATCH).bits)
        state = step(state, BATCH)
    return step, bits


def _acting(step: pc.Step, bits: int) -> list[str]:
    """Return the methods whose answer, among those that vary, is yes."""
    questions = enumerate(step.matcher.questions)
    return list(dict.fromkeys(one.algorithm.name for i, one in questions if bits >> i & 1))


def _grid(drawing: Drawing, y: float, label: str, cells: Iterable[tuple[str, str]]) -> None:
    """Draw a row of one cell for each batch: its kind, empty for none, and its letter."""
    drawing.text(12, y + 12, label)
    for i, (kind, letter) in enumerate(cells):
        x = 150 + 16 * i
        drawing.box(x, y, 14, 16, kind or "box")
        if letter:
            drawing.text(x + 7, y + 12, letter, "small on" if kind else "small", "middle")


def _numbered(drawing: Drawing, y: float) -> None:
    drawing.text(12, y, "batch", "faint")
    for i in range(0, NUM_BATCHES, BATCHES_PER_EPOCH):
        drawing.text(150 + 16 * i + 7, y, str(i), "faint", "middle")


def schedule() -> str:
    """Draw which methods act in which batch of a run, and a letter for each schedule."""
    step, bits = schedules()
    drawing = Drawing("Which of four methods act in each of 20 batches, and the schedule that results")
    _numbered(drawing, 22)
    varying = {question.algorithm.name for question in step.matcher.questions}
    for row, (method, kind) in enumerate(zip(step.algorithms, KINDS, strict=True)):
        acts = [method.name not in varying or method.name in _acting(step, one) for one in bits]
        _grid(drawing, 32 + 22 * row, method.name, [(kind if act else "", "") for act in acts])
    letters = dict(zip(dict.fromkeys(bits), "ABCDEFGHIJ", strict=False))
    _grid(drawing, 132, "schedule", [("", letters[one]) for one in bits])
    return drawing.svg()


def parts() -> str:
    """Draw the parts of a compiled step, the graphs of each, and which of them each batch runs."""
    step, bits = schedules()
    segments = Segments(step)
    of_batch = [segments.stretches(step.lowered(one), one) for one in bits]
    drawing = Drawing("The three parts of a step, the graphs of each, and which graph of each part a batch runs")
    width = (WIDTH - 24) / segments.num
    _numbered(drawing, 182)
    for part in range(segments.num):
        # A part in which nothing acts has no graph.
        own = [next((one for one in stretches if one.segment == part), None) for stretches in of_batch]
        nodes = sorted({lowered.node for stretch in own if stretch for lowered in stretch.lowered})
        x, kind = 12 + part * width, KINDS[part]
        drawing.text(x, 22, f"part {part}", "strong")
        for line, node in enumerate(_name(step.program[number]) for number in nodes):
            drawing.text(x, 40 + 15 * line, node, "small")
        variants = dict(zip(sorted({stretch.bits for stretch in own if stretch}), ("a", "b", "c"), strict=False))
        kinds = {variant: kind if variant else "faint" for variant in variants}
        for row, (variant, letter) in enumerate(variants.items()):
            drawing.box(x, 106 + 26 * row, width - 4, 21)
            drawing.box(x, 106 + 26 * row, 20, 21, kinds[variant])
            drawing.text(x + 10, 121 + 26 * row, letter, "small on", "middle")
            drawing.text(x + 26, 121 + 26 * row, ", ".join(_acting(step, variant)) or "without", "small")
        cells = [(kinds[stretch.bits], variants[stretch.bits]) if stretch else ("", "") for stretch in own]
        _grid(drawing, 192 + 22 * part, f"graph of part {part}", cells)
    return drawing.svg()


def _name(node: object) -> str:
    if isinstance(node, pc.Event):
        return node.name
    return "forward, backward" if isinstance(node, loop.Scope) else getattr(node, "name", "update")


def draws() -> str:
    """Draw the numbers that examples get: in a whole batch, in slices, beside another method, in the next batch."""
    runs = {
        "batch 0": _drawn([], 1)[0],
        "in two slices": _drawn([], 2)[0],
        "beside mixup": _drawn([alg.mixup(0.2)], 1)[0],
        "batch 1": _drawn([], 1)[1],
    }
    drawing = Drawing("The numbers that a method draws for eight examples: the same in slices and beside other methods")
    chain = ("key", "batch", "name", "example", "numbers")
    for i, word in enumerate(chain):
        drawing.box(12 + 94 * i, 12, 80, 24, "one" if i == len(chain) - 1 else "box")
        drawing.text(52 + 94 * i, 28, word, "on" if i == len(chain) - 1 else "ink", "middle")
        if i:
            drawing.line(94 * i - 2, 24, 12 + 94 * i, 24)
    drawing.text(12, 66, "example", "faint")
    for i in range(8):
        drawing.text(140 + 42 * i, 66, str(i), "faint", "middle")
    for row, (label, numbers) in enumerate(runs.items()):
        y = 76 + 28 * row
        drawing.text(12, y + 15, label)
        for start, stop in ((0, 4), (4, 8)) if "slices" in label else ((0, 8),):
            drawing.box(121 + 42 * start, y, 42 * (stop - start) - 4, 22)
        for i, number in enumerate(numbers.tolist()):
            kind = "small" if number == runs["batch 0"][i] else "small one"
            drawing.text(140 + 42 * i, y + 15, f"{number:.2f}", kind, "middle")
    return drawing.svg()


def _drawn(others: Sequence[pc.Algorithm], microbatches: int) -> list[torch.Tensor]:
    """Return the numbers of each example in two batches, drawn in a step by a method called "noise"."""
    seen: list[torch.Tensor] = []

    def look(event: pc.Event, state: pc.State) -> pc.State:
        seen.append(pc.random.normal(state.example_rng("noise"), (state.num_examples,)))
        return state

    noise = pc.Algorithm("noise", pc.on(pc.Event.BEFORE_FORWARD), look)
    step, state = a_state([*others, noise], microbatches)
    for _ in range(2):
        state = step(state, BATCH)
    return list(torch.cat(seen).split(8))


PICTURES: dict[str, Callable[[], str]] = {"fold": fold, "schedule": schedule, "parts": parts, "draws": draws}


def main(folder: pathlib.Path) -> None:
    """Write all pictures into a folder."""
    for name, picture in PICTURES.items():
        (folder / f"explained_{name}.svg").write_text(picture())


if __name__ == "__main__":
    main(pathlib.Path(*sys.argv[1:]) if sys.argv[1:] else FOLDER)
