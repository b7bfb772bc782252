"""What does a step cost beside the loop people write by hand, for the same arithmetic?

    python benchmarks/step_overhead.py [--blocks 40] [--network MLP] [--threads 1]

Six sides take turns in blocks of 50 steps: the loop by hand, the same under `torch.compile`, our step eager,
compiled, compiled with donation, and within `torch.compile`. Ratios are medians over blocks. The rows with methods
compare with a loop that does the same mixing and smoothing by hand; "of plain" is the side with methods over the same
side without.

Each network has a process of its own: the MLP one thread, the ResNet two. Compiled steps let malloc keep the memory of
activations, for all sides of the process; `peers.py`, where each side has its own, compares the loops as they are.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from _subjects import METHODS, NETWORKS, sides
from _timing import Row, arguments, median_us, paired, parse, ratio, save


THREADS = {"MLP 64-128-128-10": 1, "ResNet-8, 32x32": 2}
# A step of the ResNet takes a hundred times as long as one of the MLP: fewer blocks settle its ratio.
BLOCKS = {"MLP 64-128-128-10": 40, "ResNet-8, 32x32": 10}


def measure(network: str, args: argparse.Namespace) -> list[Row]:
    """One row for each side, without and with methods."""
    threads = args.threads or THREADS[network]
    torch.set_num_threads(threads)
    subject = NETWORKS[network]()
    plain = sides(subject, mix=False, backend=args.backend)
    mixed = sides(subject, mix=True, backend=args.backend)
    fns = {**{f"{side}, none": fn for side, fn in plain.items()}, **{f"{side}, mix": fn for side, fn in mixed.items()}}
    seconds = paired(fns, calls=args.calls, blocks=args.blocks or BLOCKS[network])
    rows: list[Row] = []
    for kind, methods in (("none", "none"), ("mix", METHODS)):
        for side in plain:
            name = f"{side}, {kind}"
            low, middle, high = ratio(seconds, name, f"by hand, {kind}")
            rows.append(
                {
                    "network": network,
                    "threads": threads,
                    "methods": methods,
                    "side": side,
                    "us a step": round(median_us(seconds[name])),
                    "of by hand": round(middle, 3),
                    "quartiles": f"{low:.3f} {high:.3f}",
                    "of plain": round(ratio(seconds, name, f"{side}, none")[1], 3) if kind == "mix" else "",
                }
            )
    return rows


def in_child(network: str, args: argparse.Namespace) -> list[Row]:
    """The same in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        target = pathlib.Path(folder) / "rows.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--network", network, "--rows", str(target)]
        subprocess.run(command, check=True)
        return json.loads(target.read_text())


def main() -> None:
    parser = arguments(__doc__, blocks=0)
    parser.add_argument("--network", default="", help="only networks whose name begins so")
    parser.add_argument("--threads", type=int, help="for all networks (default: 1 for the MLP, 2 for the ResNet)")
    parser.add_argument("--rows", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parse(parser)
    chosen = [network for network in NETWORKS if network.startswith(args.network)]
    if args.rows:
        args.rows.write_text(json.dumps(measure(chosen[0], args)))
        return
    if args.short:
        save("step_overhead", measure(chosen[0], args), args.out)
        return
    save("step_overhead", [row for network in chosen for row in in_child(network, args)], args.out)


if __name__ == "__main__":
    main()
