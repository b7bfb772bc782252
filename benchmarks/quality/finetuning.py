"""What do methods save in fine-tuning a language model: time to the loss of plain fine-tuning, and loss in equal time?

    PURECOMPOSE_DATA=folder python benchmarks/quality/finetuning.py

The folder contains `tinyshakespeare.txt`. A GPT-2 of transformers (4 layers of width 128, 64 characters, from its
configuration) is trained on the documentation in Python's `pydoc_data.topics`, and then fine-tuned on Shakespeare:
plainly, with selective backprop, layer freezing and EMA, and with what composes of them. A seed determines the first
training, which all sides share, and the order of the batches. The loss is per character, on every 16th window of the
last tenth of the text. Seconds are processor time of training, on one thread, without compilation. The record of each
run is a line of `results/quality/finetuning.jsonl`, and is not computed again.
"""

import argparse
import functools
import json
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from pydoc_data.topics import topics
from statistics import fmean, median
from typing import Any

import torch
from _curve import Curve, Observer, Point
from _task import RECORDS, TUNING_SEEDS, commit, data_file, records
from _timing import RESULTS, Row, facts, quartiles, save
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

import purecompose as pc
from purecompose import Algorithm, State, algorithms as alg, analysis, compose, loop_events, losses, optim, schedule


LENGTH = 64
BATCH_SIZE = 12
FIRST = {"lr": 3e-3, "batches": 2000}
"""The first training."""
EVALUATED = [0.5, 0.6, 0.7, *(share / 40 for share in range(31, 41))]
"""The shares of a run after which it is evaluated."""
PLAIN: dict[str, Any] = {"lr": 2e-3, "last": 0.0, "batches": 150, "first": FIRST["batches"]}
"""`last` is the share of the learning rate at the end, to which it falls linearly; `first` tells records of runs after
other first trainings apart."""
SELECTIVE = {"start": 0.0, "end": 1.0, "keep": 0.5, "full_every": 0}
FREEZING = {"freeze_start": 0.0, "freeze_level": 0.5, "num_stages": 2}
"""A quarter of the layers from the middle of the run on."""
SIDES: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective backprop": {"selective": SELECTIVE, "batches": 165},
    "layer freezing": {"freezing": FREEZING, "batches": 155},
    "ema": {"ema": "20ba", "last": 1.0, "batches": 145},
    "all three": {"selective": SELECTIVE, "freezing": FREEZING, "ema": "20ba", "last": 1.0, "batches": 170},
    "plain, from scratch": {"is_pretrained": False},
}
TUNING: dict[str, list[dict[str, Any]]] = {
    "plain": [{"lr": lr} for lr in (5e-4, 1e-3, 2e-3, 4e-3)],
    "ema": [{"ema": half_life, "last": last} for half_life, last in (("8ba", 0.0), ("12ba", 0.3), ("20ba", 1.0))],
    "layer freezing": [{"freezing": {**FREEZING, "freeze_level": level}} for level in (0.5, 1.0)],
    "selective backprop": [{"selective": {**SELECTIVE, "keep": keep}} for keep in (0.5, 0.75)],
    "all three": [{}, {"ema": "12ba", "last": 0.3}, {"ema": "12ba", "last": 0.0}],
}


# --- texts and network -----------------------------------------------------------------------------------------------


@functools.cache
def texts(is_short: bool) -> dict[str, Tensor]:
    """Return windows, (N, LENGTH): of the first text, and of the training and the validation part of the second."""
    first, second = raw_texts(is_short)
    cut = len(second) * 9 // 10
    parts = {"first": first, "train": second[:cut], "validation": second[cut:]}
    known = vocabulary(is_short)
    found = {name: pc.data.text_windows(known.encode(text), LENGTH)[0] for name, text in parts.items()}
    return {**found, "validation": found["validation"][::16]}


def raw_texts(is_short: bool) -> tuple[str, str]:
    pages = list(topics.values())
    if is_short:
        return "".join(pages[::2]), "".join(pages[1::2])
    return "".join(pages), data_file("tinyshakespeare.txt").read_text()


@functools.cache
def vocabulary(is_short: bool) -> pc.data.CharacterVocabulary:
    """Return the characters of both texts, most of which occur in both."""
    return pc.data.CharacterVocabulary.of("".join(raw_texts(is_short)))


def batches(windows: Tensor) -> pc.data.Arrays:
    """Return the windows in batches for a network of transformers, which shifts the labels itself."""
    return pc.data.arrays(windows, windows, BATCH_SIZE, drop_last=True, names=("input_ids", "labels"))


def new_net(seed: int, is_short: bool) -> nn.Module:
    """Return the network with the initial weights of a seed, with an output layer of its own."""
    torch.manual_seed(seed)
    width, depth = (16, 2) if is_short else (128, 4)
    config = GPT2Config(
        vocab_size=len(vocabulary(is_short)),
        n_positions=LENGTH,
        n_embd=width,
        n_layer=depth,
        n_head=depth,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config.update({**rates, "use_cache": False})
    return GPT2LMHeadModel(config)


# The parts of a step are made once, so that all seeds use the same compiled code.


@functools.cache
def optimizer_of(lr: float, last: float) -> Any:
    curve = lr * schedule.linear(alpha_f=last, warmup="0.05dur")
    return optim.adamw(curve, betas=(0.9, 0.99), weight_decay=0.01)


@functools.cache
def step_of(methods: str, backend: str) -> Any:
    """Return the compiled step of methods, which are given as JSON by name."""
    given = json.loads(methods)
    made: list[Algorithm] = []
    if "selective" in given:
        made.append(alg.selective_backprop(**given["selective"]))
    if "freezing" in given:
        made.append(alg.layer_freezing(**given["freezing"]))
    if "ema" in given:
        made.append(alg.ema(given["ema"]))
    return pc.compile(compose(loop_events, made), backend=backend, quiet=True)


def new_state(net: nn.Module, seed: int, settings: Mapping[str, Any]) -> State:
    return State.create(
        net,
        loss=losses.ModelLoss(labels="labels", shift=1),
        optimizer=optimizer_of(settings["lr"], settings.get("last", 0.0)),
        key=seed,
        duration=f"{settings['batches']}ba",
    )


@functools.cache
def first_trained(seed: int, is_short: bool, backend: str) -> nn.Module:
    """Return the network after the first training."""
    settings = {**FIRST, "batches": 4} if is_short else FIRST
    state = new_state(new_net(seed, is_short), seed, settings)
    return pc.to_module(pc.fit(step_of("{}", backend), state, batches(texts(is_short)["first"])))


@functools.cache
def compile_seconds(methods: str, lr: float, last: float, is_short: bool, backend: str) -> float:
    """Compile all variants of a step, by a run of four batches, and return the seconds that this takes."""
    start = time.perf_counter()
    state = new_state(new_net(0, is_short), 0, {"lr": lr, "last": last, "batches": 4})
    pc.fit(step_of(methods, backend), state, batches(texts(is_short)["train"]))
    return time.perf_counter() - start


def run(side: str, seed: int, settings: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the record of a run."""
    found = {**PLAIN, **SIDES[side], **settings}
    if args.short:
        found["batches"] = 6
    is_pretrained = found.get("is_pretrained", True)
    net = first_trained(seed, args.short, args.backend) if is_pretrained else new_net(seed, args.short)
    methods = json.dumps({name: found[name] for name in ("selective", "freezing", "ema") if name in found})
    compiling = compile_seconds(methods, found["lr"], found["last"], args.short, args.backend)
    windows, num = texts(args.short), found["batches"]
    state, curve = new_state(net, seed, found), Curve()
    due = {round(share * num) for share in EVALUATED}
    evaluator = pc.Evaluator(batches(windows["validation"]), every=lambda now: now.batch in due)
    pc.fit(
        step_of(methods, args.backend),
        state,
        batches(windows["train"]),
        evaluate=evaluator,
        observers=Observer(curve, "eval/loss"),
    )
    return {
        "side": side,
        "seed": seed,
        "settings": found,
        "compiling": round(compiling, 1),
        **facts("transformers"),
        "commit": commit(),
        "points": [[point.batch, *(round(value, 5) for value in point[1:])] for point in curve.points],
    }


# --- results ---------------------------------------------------------------------------------------------------------


def rows_of(found: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each side; losses and times are compared with those of plain fine-tuning with the same seed."""
    runs = {(one["side"], one["seed"]): [Point(*point) for point in one["points"]] for one in found}
    ends = {key: points[-1] for key, points in runs.items()}
    compiling = {(one["side"], one["seed"]): one["compiling"] for one in found}
    rows: list[Row] = []
    for side in SIDES:
        seeds = sorted(seed for name, seed in runs if name == side and ("plain", seed) in runs)
        if not seeds:
            continue
        plain = [ends["plain", seed] for seed in seeds]
        own = [ends[side, seed] for seed in seeds]
        times = [
            next((one.cpu_seconds for one in runs[side, seed] if one.value <= base.value), math.inf) / base.cpu_seconds
            for seed, base in zip(seeds, plain, strict=True)
        ]
        ratios = [one.cpu_seconds / base.cpu_seconds for one, base in zip(own, plain, strict=True)]
        costs = [ratio * base.batch / one.batch for ratio, one, base in zip(ratios, own, plain, strict=True)]
        differences = [one.value - base.value for one, base in zip(own, plain, strict=True)]
        rows.append(
            {
                "side": side,
                "batches": own[0].batch,
                "loss at the end": f"{fmean(one.value for one in own):.4f}",
                "difference from plain": with_interval(differences) if side != "plain" else "",
                "seconds": f"{fmean(one.cpu_seconds for one in own):.1f}",
                "of plain": with_quartiles(ratios),
                "a batch, of plain": with_quartiles(costs),
                "reached plain's loss": f"{sum(map(math.isfinite, times))} of {len(times)}",
                "time to it, of plain": with_quartiles(times),
                "compilation, s": f"{max(compiling[side, seed] for seed in seeds):.0f}",
            }
        )
    return rows


def with_interval(values: list[float]) -> str:
    (one,) = analysis.simultaneous_intervals(torch.tensor([values], dtype=torch.float64))
    return f"{one.mean:+.4f} ({one.low:+.4f} to {one.high:+.4f})" if math.isfinite(one.low) else f"{one.mean:+.4f}"


def with_quartiles(values: list[float]) -> str:
    """Return the median with quartiles, or without them if a value is infinite; "-" if the median is infinite."""
    middle = median(values)
    if not math.isfinite(middle):
        return "-"
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return f"{middle:.2f}"
    low, _, high = quartiles(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default %(default)s)")
    parser.add_argument("--side", action="append", choices=list(SIDES), help="only this side; repeatable")
    parser.add_argument("--tune", action="store_true", help="try other settings, with another seed")
    parser.add_argument("--backend", default="inductor", help="what compiles (default %(default)s)")
    parser.add_argument("--short", action="store_true", help="a few batches of a tiny network, to see that it runs")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the JSON (default: results/, with --short none)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted = to_tune(args) if args.tune else to_report(args)
    path = RECORDS / f"finetuning{'_tuning' if args.tune else ''}.jsonl"
    found: list[dict[str, Any]] = [] if args.short else records(path)
    for side, seed, settings in wanted:
        complete = {**PLAIN, **SIDES[side], **settings}
        if any((one["side"], one["seed"], one["settings"]) == (side, seed, complete) for one in found):
            continue
        found.append(run(side, seed, settings, args))
        if not args.short:
            RECORDS.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
        end = Point(*found[-1]["points"][-1])
        print(
            f"{side} {settings} seed {seed}: {end.value:.4f} after {end.batch} batches, {end.cpu_seconds:.1f} s",
            flush=True,
        )
    if not args.tune:
        shown = [one for one in found if args.short or one["settings"] == {**PLAIN, **SIDES[one["side"]]}]
        save("quality_finetuning", rows_of(shown), args.out or (None if args.short else RESULTS), "transformers")


def to_report(args: argparse.Namespace) -> list[tuple[str, int, dict[str, Any]]]:
    """Return side, seed and settings of the runs to report; every second seed goes backwards through the sides."""
    sides = [side for side in SIDES if args.side is None or side in args.side]
    num_seeds = 1 if args.short else args.seeds
    return [(side, seed, {}) for seed in range(num_seeds) for side in (sides if seed % 2 == 0 else reversed(sides))]


def to_tune(args: argparse.Namespace) -> list[tuple[str, int, dict[str, Any]]]:
    sides = [side for side in TUNING if args.side is None or side in args.side]
    return [(side, TUNING_SEEDS, settings) for side in sides for settings in TUNING[side]]


if __name__ == "__main__":
    main()
