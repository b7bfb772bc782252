"""What does a step of each program in docs/gallery.md cost beside its plain PyTorch loop, and do they agree?

    python benchmarks/gallery.py [--blocks 30] [--program vae --program ppo]

A program's step, its compiled step and the plain loop of tests/examples/plain_loops.py take turns in blocks, all on the
same batch; each program has a process of its own, with one thread. The plain loop draws by torch's generator, the steps
by the state's key. PPO is timed without its rollouts: eight updates on one of them.

"difference" is the largest one between a parameter after eight batches of the step and of the plain loop, in float64
and with the same draws. A run in full also writes the table in docs/gallery.md. LoRA needs transformers, and is left
out where it is not installed.
"""

import argparse
import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from typing import Any

import torch
from _subjects import going_on
from _timing import RESULTS, Row, against, arguments, median_us, paired, parse, save

import purecompose as pc


ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT))  # for the examples and their tests

from tests.examples.plain_loops import LOOPS, batch_of, make, run, weights_of  # noqa: E402


DOCS = ROOT / "docs" / "gallery.md"
NUM_BATCHES = 8
"""Of the runs in float64."""


def difference(name: str) -> float:
    """The largest one between the step's parameters and the plain loop's."""
    step, start, batches = make(name, torch.float64)
    found = weights_of(pc.fit(step, start, batches, duration=f"{NUM_BATCHES}ba"))
    expected = run(name, NUM_BATCHES)
    return max((found[key] - expected[key]).abs().max().item() for key in found)


def measure(name: str, args: argparse.Namespace) -> Row:
    """The row of a program."""
    torch.set_num_threads(1)
    step, start, batches = make(name, torch.float32)
    batch = batch_of(batches, start)
    plain = LOOPS[name](pc.to_module(start), itertools.repeat(batch))
    fns = {
        "plain": lambda: next(plain),
        "eager": going_on(step, start, batch),
        "compiled": going_on(pc.compile(step, backend=args.backend, quiet=True), start, batch),
    }
    seconds = paired(fns, calls=args.calls, blocks=args.blocks)
    row: Row = {
        "program": name,
        "difference": f"{difference(name):.0e}",
        "plain us": round(median_us(seconds["plain"])),
    }
    for side in ("eager", "compiled"):
        middle, quartiles = against(seconds, side, "plain").values()
        row |= {f"{side} of plain": middle, f"{side} quartiles": quartiles}
    return row


def in_child(name: str) -> Row:
    """The same in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        target = pathlib.Path(folder) / "row.json"
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--row", name, str(target)], check=True)
        return json.loads(target.read_text())


def table(results: dict[str, Any]) -> str:
    """The table in the docs, from the JSON of a run in full."""
    lines = [
        f"Measured on one thread of an {results['processor']}, with torch {results['torch']}:",
        "",
        "| program | difference | eager step | compiled step |",
        "| --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        ratios = []
        for side in ("eager", "compiled"):
            low, high = map(float, row[f"{side} quartiles"].split())
            ratios.append(f"{row[f'{side} of plain']:.2f} ({low:.2f} to {high:.2f})")
        lines.append(
            f"| [{row['program']}](../examples/{row['program']}.py) | {row['difference']} | {' | '.join(ratios)} |"
        )
    return "\n".join(lines) + "\n"


def write_docs() -> None:
    """Put the table of the last run in full into the docs."""
    made = table(json.loads((RESULTS / "gallery.json").read_text()))
    DOCS.write_text(re.sub(r"Measured on .*\n\n(\|.*\n)+", lambda _: made, DOCS.read_text()))


def main() -> None:
    parser = arguments(__doc__, blocks=30, calls=10)
    parser.add_argument("--program", action="append", choices=list(LOOPS), help="only this; repeatable")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    args = parse(parser)
    if args.row:
        name, target = args.row
        pathlib.Path(target).write_text(json.dumps(measure(name, args)))
        return
    names = [name for name in args.program or LOOPS if name != "lora" or find_spec("transformers")]
    rows = [measure(name, args) for name in names[:1]] if args.short else [in_child(name) for name in names]
    torch.set_num_threads(1)
    save("gallery", rows, args.out, *(["transformers"] if "lora" in names else []))
    if args.out == RESULTS and not args.program:
        write_docs()


if __name__ == "__main__":
    main()
