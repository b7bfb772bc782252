"""Trained on a quarter of the length: what does a language model lose on the whole length, with and without ALiBi?

    python benchmarks/alibi_lengths.py --text tinyshakespeare.txt [--length 256] [--batches 1000] [--seeds 3]

A small GPT on the characters of a text. "alibi" is trained with `alibi(0.25)`: the windows are cut into four rows each.
"learned" is the same network with its learned positions, trained on the very same rows, and "learned, full length" on
whole windows, with as many tokens. All are evaluated on the text's last tenth in windows of several lengths, over the
same characters; the loss is the mean over characters, in nats.
"""

import pathlib
import tempfile
from collections.abc import Mapping

import torch
from _timing import Row, arguments, parse, save

from purecompose import (
    Algorithm,
    State,
    algorithms as alg,
    compose,
    data,
    evaluate,
    fit,
    loop_events,
    losses,
    optim,
    schedule,
)
from purecompose.nn import models
from purecompose.nn.layers import ClassesSecond


NAMES = ("input_ids", "labels")


def methods(length: int) -> Mapping[str, list[Algorithm]]:
    """What each network is trained with."""
    quarter = length // 4
    # A warm-up that stays where it begins: rows of a quarter, in which no token is lost.
    cut = alg.seq_length_warmup(1.0, quarter, quarter, 1, truncate=False)
    return {"alibi": [alg.alibi(0.25)], "learned": [cut], "learned, full length": []}


def trained(algorithms: list[Algorithm], text: data.TextData, options: Mapping[str, int], seed: int) -> State:
    """A network after its training."""
    net = models.build(
        "gpt", in_shape=text.in_shape, num_classes=text.num_classes, seed=seed, width=options["width"], depth=4
    )
    batches = data.arrays(text.train_inputs, text.train_targets, options["batch_size"], drop_last=True, names=NAMES)
    duration = f"{options['batches']}ba"
    state = State.create(
        ClassesSecond(net),
        loss=losses.cross_entropy,
        optimizer=optim.adamw(1e-3 * schedule.cosine(alpha_f=0.1, warmup="0.05dur"), weight_decay=0.1),
        duration=duration,
        batches_per_epoch=len(batches),
        key=seed,
        input_field=NAMES[0],
        target_field=NAMES[1],
    )
    return fit(compose(loop_events, algorithms), state, batches)


def load(path: pathlib.Path | None, length: int) -> data.TextData:
    """The text, or one of numbers that count up."""
    if path is not None:
        return data.load_text(path, length)
    with tempfile.TemporaryDirectory() as folder:
        made = pathlib.Path(folder) / "numbers.txt"
        made.write_text(" ".join(map(str, range(20_000))))
        return data.load_text(made, length)


def losses_at(state: State, text: data.TextData, lengths: list[int]) -> Row:
    """The loss on the text's end, in windows of each length; `None` where the network takes no such windows."""
    longest = max(lengths)
    tokens = torch.cat([text.test_inputs.flatten(), text.test_targets[-1, -1:]])
    tokens = tokens[: (len(tokens) - 1) // longest * longest + 1]  # the same characters at every length
    found: Row = {}
    for length in lengths:
        inputs, targets = data.text_windows(tokens, length)
        batches = data.arrays(inputs, targets, max(1, 2**14 // length), shuffle=False, names=NAMES)
        try:
            found[f"loss_at_{length}"] = round(evaluate(state, batches)["loss"], 4)
        except ValueError:  # longer than the positions that it has learned
            found[f"loss_at_{length}"] = None
    return found


def main() -> None:
    parser = arguments(__doc__, blocks=1)
    parser.add_argument("--text", type=pathlib.Path, help="a text (without one: numbers that count up)")
    parser.add_argument("--length", type=int, default=256, help="characters of a window (default %(default)s)")
    parser.add_argument("--batches", type=int, default=1000, help="of 16 windows, to train on (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="networks of each kind (default %(default)s)")
    args = parse(parser)
    torch.set_num_threads(2)
    if args.short:
        args.length, args.batches, args.seeds = 32, 4, 1
    text = load(args.text, args.length)
    options = {"width": 16 if args.short else 128, "batch_size": 16, "batches": args.batches}
    lengths = [args.length // 4, args.length // 2, args.length, 2 * args.length]
    rows: list[Row] = []
    for name, algorithms in methods(args.length).items():
        for seed in range(args.seeds):
            state = trained(algorithms, text, options, seed)
            rows.append({"positions": name, "seed": seed, **options, **losses_at(state, text, lengths)})
            print(rows[-1], flush=True)
    save("alibi_lengths", rows, args.out)


if __name__ == "__main__":
    main()
