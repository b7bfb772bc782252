"""What does each shipped algorithm cost on top of the plain step, eager and compiled?

    python benchmarks/algorithms_cost.py [--algorithm mixup] [--all]

Every row of `tests.shipped` is measured with its first example (`--all`: with each), at the start of a
run: on an MLP, on a small convolutional network, and on a small transformer where it takes token ids only. A method
that looks for certain layers is measured on a network that has them, a ResNet-20 or a GPT, with settings for its size.
The step with the algorithm and the plain one take turns in blocks; ratios are medians over blocks. Where it cannot be
compiled, the error's name stands for the ratio.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from _subjects import Subject, cnn, going_on, gpt, mlp, new_state, resnet20
from _timing import Row, arguments, median_us, paired, parse, ratio, save

import purecompose as pc
from purecompose import State, Step, compose, loop_events, testing


sys.path.append(str(pathlib.Path(__file__).parents[1]))  # for the table of methods

from tests.shipped import SHIPPED, Row as ShippedRow  # noqa: E402


Task = Callable[[], tuple[State, Any]]


def _of(make: Callable[[], Subject]) -> Task:
    def task() -> tuple[State, Any]:
        subject = make()
        return new_state(subject), (subject.inputs, subject.targets)

    return task


def _tokens() -> tuple[State, Any]:
    task = testing.TASKS["tokens"]
    return task.make_state(0, duration="100000ba", batches_per_epoch=100), task.make_batch(0, 64)


def _language(precision: str) -> Task:
    def task() -> tuple[State, Any]:
        subject = gpt()
        return new_state(subject, precision=precision), (subject.inputs, subject.targets)

    return task


TASKS: dict[str, tuple[str, Task]] = {
    "vectors": ("MLP 64-128-128-10", _of(mlp)),
    "images": ("CNN, 16x16", _of(cnn)),
    "tokens": ("transformer, 5 tokens", _tokens),
    "dropout": ("MLP 64-128-128-10 with dropout", _of(lambda: mlp(dropout=0.5))),
    "residual": ("ResNet-20, 16x16", _of(resnet20)),
    "language": ("GPT of 2 blocks, 64 tokens", _language("fp32")),
    "language in bf16": ("GPT of 2 blocks, 64 tokens, bf16", _language("bf16")),
}
"""By the kind of inputs, or what a method looks for in a network."""

LOOKS_FOR = {
    "gyro_dropout(0.5, 4, 2)": "dropout",
    "blurpool()": "residual",
    "channels_last()": "residual",
    "pool_first()": "images",
    "factorize(min_channels=32, latent_channels=0.25)": "residual",
    "ghost_batchnorm(16)": "residual",
    "squeeze_excite(0.25, 16)": "residual",
    "stochastic_depth()": "residual",
    "stochastic_depth('sample')": "residual",
    "weight_standardization()": "residual",
    "activation()": "language",
    "alibi(1)": "language",
    "gated_linear_units()": "language",
    "logit_softcap()": "language",
    "qk_norm()": "language",
    "value_embeddings()": "language",
    "low_precision_layernorm()": "language in bf16",
}
"""Methods that look for certain layers: how, and on what, they are measured."""

SPECIAL = {example.partition("(")[0] for example in LOOKS_FOR}
FROM_THE_START = {"swa": "swa(0.0, 1.0, '1ba')"}
"""Settings for a method whose first example does nothing yet at the start of a run."""
NOTHING_TO_MEASURE = {
    "no_op_model",
    "fused_layernorm",
    "low_precision_groupnorm",
    "layer_freezing",
    "test_time_averaging",
    "initialize",
}
"""One trains nothing, one is another's name, no network here has the third one's layers, one has a benchmark of its
own, `layer_freezing.py`, and the last two do nothing in a training step."""


def measured(row: ShippedRow, is_all: bool) -> list[tuple[str, str]]:
    """Examples of an algorithm, and on what: where it finds what it looks for; token ids if it takes nothing else."""
    if row.name in SPECIAL:
        return [(example, kind) for example, kind in LOOKS_FOR.items() if example.startswith(f"{row.name}(")]
    if row.name in NOTHING_TO_MEASURE:
        return []
    taken = {testing.TASKS[name].kind for name in row.tasks}
    kinds = [kind for kind in TASKS if kind in taken and (kind != "tokens" or taken == {"tokens"})]
    examples = row.examples if is_all else (FROM_THE_START.get(row.name, row.examples[0]),)
    return [(example, kind) for example in examples for kind in kinds]


def measure(example: str, kind: str, args: argparse.Namespace) -> Row:
    """One row: the step with the algorithm against the plain one, eager and compiled."""
    network, task = TASKS[kind]
    steps = {"plain": compose(loop_events), "with": compose(loop_events, [testing.Subject.of(example).algorithm])}
    row: Row = {"algorithm": example, "network": network}
    for mode, make in (("eager", lambda step: step), ("compiled", lambda step: pc.compile(step, backend=args.backend))):
        try:
            seconds = _seconds(steps, make, task, args)
        except Exception as error:
            print(f"{example} on {network}, {mode}: {error}", file=sys.stderr)
            row |= dict.fromkeys((f"{mode} plain us", f"{mode} us", f"{mode} quartiles"), "")
            row[f"{mode} ratio"] = type(error).__name__
            continue
        low, middle, high = ratio(seconds, "with", "plain")
        row[f"{mode} plain us"] = round(median_us(seconds["plain"]))
        row[f"{mode} us"] = round(median_us(seconds["with"]))
        row[f"{mode} ratio"] = round(middle, 3)
        row[f"{mode} quartiles"] = f"{low:.3f} {high:.3f}"
    return row


def _seconds(
    steps: dict[str, Step], make: Callable[[Step], Any], task: Task, args: argparse.Namespace
) -> dict[str, list[float]]:
    fns = {name: going_on(make(step), *task()) for name, step in steps.items()}
    return paired(fns, calls=args.calls, blocks=args.blocks)


def main() -> None:
    parser = arguments(__doc__, blocks=30)
    parser.add_argument("--algorithm", action="append", choices=list(SHIPPED), help="only this; repeatable")
    parser.add_argument("--all", action="store_true", help="every example of an algorithm, not only its first")
    args = parse(parser)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in args.algorithm or SHIPPED:
        rows += [measure(example, kind, args) for example, kind in measured(SHIPPED[name], args.all)]
    save("algorithms_cost", rows, args.out)


if __name__ == "__main__":
    main()
