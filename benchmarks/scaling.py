"""What would a step cost on 8 to 4,096 GPUs: time, messages, memory, and which mode is best? No timing: a model.

    python benchmarks/scaling.py [--gpus 64] [--network gpt] [--batch 4 | --global-batch 512]
    python benchmarks/scaling.py --count

ResNet-50 and a GPT of 1.3 billion parameters, in bfloat16, compiled, by `data_parallel` and `fully_sharded`.
Operations, bytes, messages with their order, and memory are counted in the graphs of steps that are traced without
running (`_counts.py`; `--count` counts again, which takes a quarter of an hour). Speeds of GPUs and links are assumed
(`Machine` in `_scale_model.py`), and nothing was measured on GPUs. docs/scaling.md has the formulas and sources.

"as if" is empty for the library as it is; with `--as-if`, it names what would be otherwise (`CHANGES` in
`_scale_model.py`). "exposed" is the time in which a GPU waits for messages, and "efficiency" the time of the same
examples on independent GPUs over the time of the step. "sent" are the bytes that a GPU sends in a step. Shards are the
processes that hold the rows of a parameter: all of them, or those of a host.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from _counts import MODES, Counts, Task, counts, gpt, read, resnet50, written
from _scale_model import CHANGES, Estimate, Machine, Plan, as_if, estimate
from _timing import RESULTS, Row, arguments, parse, save


COUNTS = RESULTS / "scaling_counts.json"


class Case(NamedTuple):
    """A network of the model."""

    task: Task
    small: Task
    """The same in a small form, for `--short`."""
    utilisation: float
    """The share of a GPU's peak that its step is assumed to reach."""
    batch: int
    """Examples of a GPU, if they are the same for all numbers of GPUs."""
    global_batch: int
    """Examples of all GPUs together, if they are."""
    example: str


CASES = {
    "resnet": Case(resnet50(), resnet50(32, 8, 10)._replace(num_examples=(4, 8)), 0.1, 256, 8192, "images"),
    "gpt": Case(gpt(), gpt(64, 16, 1, 2, 8)._replace(num_examples=(4, 8)), 0.4, 4, 512, "sequences of 2,048 tokens"),
}
_NAMES = {"data_parallel": "data_parallel", "step": "fully_sharded, step", "layer": "fully_sharded, layer"}


def plans(num_gpus: int, batch_size: int, per_host: int, *, has_whole_batch: bool = True) -> list[Plan]:
    """The ways to divide a step: each mode, with parameters divided among all processes or among those of a host."""
    found = [Plan("data_parallel", num_gpus, 1, batch_size, has_whole_batch)]
    all_shards = [num_gpus] + ([per_host] if num_gpus > per_host and num_gpus % per_host == 0 else [])
    for mode in MODES[1:]:
        found += [Plan(mode, num_gpus, shards, batch_size, has_whole_batch) for shards in all_shards]
    return found


def row(network: str, plan: Plan, found: Estimate, changes: Sequence[str] = ()) -> Row:
    """The estimate of a plan in the units of the table."""
    return {
        "network": network,
        "GPUs": plan.num_gpus,
        "mode": _NAMES[plan.mode],
        "shards": "" if plan.mode == "data_parallel" else plan.num_shards,
        "examples": plan.batch_size,
        "as if": " ".join(changes),
        "microbatches": found.microbatches,
        "compute ms": round(found.compute * 1e3, 1),
        "exposed ms": round(found.exposed * 1e3, 1),
        "batch to GPU ms": round(found.input * 1e3, 1),
        "step ms": round(found.step * 1e3, 1),
        "efficiency %": round(found.efficiency * 100, 1),
        "messages": found.num_messages,
        "sent MB": round(found.sent_bytes / 1e6),
        "memory GB": round(found.memory / 1e9, 1),
        "limit": found.limit,
    }


def counted(args: argparse.Namespace) -> dict[str, dict[str, Counts]]:
    """The counts of all modes: as in the file, or, for the small networks and with `--count`, counted here."""
    if not args.short and not args.count:
        return read(COUNTS.read_text())
    found: dict[str, dict[str, Counts]] = {}
    for network, case in CASES.items():
        if network in args.network:
            task = case.small if args.short else case.task
            found[network] = {mode: counts(task, mode) for mode in MODES}
    return found


def rows_of(args: argparse.Namespace, network: str, found: dict[str, Counts], changes: Sequence[str]) -> list[Row]:
    """The rows of a network, for each number of GPUs and each way to divide the batch."""
    case = CASES[network]
    machine = Machine(utilisation=args.utilisation or case.utilisation)
    rows = []
    for num_gpus in args.gpus:
        sizes = [args.global_batch] if args.global_batch else [num_gpus * (args.batch or case.batch)]
        if not args.global_batch and not args.batch:
            sizes.append(case.global_batch)
        for size in dict.fromkeys(sizes):
            for plan in plans(num_gpus, size, machine.per_host, has_whole_batch="part" not in changes):
                rows.append(row(network, plan, estimate(as_if(found[plan.mode], *changes), plan, machine), changes))
    return rows


def main() -> None:
    parser = arguments(__doc__, blocks=1, calls=1)
    positive: Any = {"type": _positive, "metavar": "N"}
    parser.add_argument("--gpus", nargs="+", default=[8, 64, 512, 4096], help="numbers of GPUs", **positive)
    parser.add_argument("--network", nargs="+", choices=CASES, default=[*CASES], help="only these networks")
    parser.add_argument("--batch", help="examples of a GPU (default: resnet 256, gpt 4)", **positive)
    parser.add_argument("--global-batch", help="examples of all GPUs (default: also resnet 8192, gpt 512)", **positive)
    parser.add_argument("--utilisation", type=float, help="share of the GPU's peak (default: resnet 0.1, gpt 0.4)")
    words = "; ".join(f"{name}: {text}" for name, text in CHANGES.items())
    parser.add_argument("--as-if", nargs="+", choices=CHANGES, default=[], help=words)
    parser.add_argument("--count", action="store_true", help="count again, and write the counts")
    args = parse(parser)
    if args.batch and args.global_batch:
        parser.error("--batch is for each GPU, --global-batch for all together: give one of them")
    if args.utilisation is not None and not 0 < args.utilisation <= 1:
        parser.error(f"--utilisation {args.utilisation}: expected a number in (0, 1]")
    is_default = all(getattr(args, name) == parser.get_default(name) for name in _CHOICES)
    if not is_default and args.out == RESULTS:
        args.out = None  # the file holds the table of all networks
    torch.set_num_threads(1)
    found = counted(args)
    if args.count and not args.short:
        COUNTS.write_text(written(read(COUNTS.read_text()) | found if COUNTS.exists() else found))
    rows = [
        one
        for network in CASES
        if network in args.network
        for changes in (_SHOWN[network] if is_default else [args.as_if])
        for one in rows_of(args, network, found[network], changes)
    ]
    save("scaling", rows, args.out)
    for network in args.network:
        print(f"{network}: examples are {CASES[network].example}")
    print("A model: counted operations, bytes and messages; assumed speeds. Nothing was measured on GPUs.")


_CHOICES = ("gpus", "network", "batch", "global_batch", "utilisation", "as_if")
_SHOWN: dict[str, list[list[str]]] = {"resnet": [[], ["part"]], "gpt": [[], ["overlap"]]}
"""What is otherwise in the table that is written."""


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text}")
    return int(text)


if __name__ == "__main__":
    main()
