"""How does a step compare with JAX, Lightning, Accelerate and ignite, for the same arithmetic?

    pip install -c constraints.txt ".[bench]"
    python benchmarks/peers.py [--blocks 20] [--network MLP] [--side ours --side JAX]

An MLP 64-128-128-10, a ResNet-8, a GPT and a vision transformer of two blocks (_subjects.py), with SGD with momentum;
plain, and with MixUp and label smoothing, written by hand in each loop but ours (for the GPT label smoothing only:
tokens cannot be mixed). Each side is a process of its own with one thread, all pinned to the same core; they take turns
in blocks of 50 steps, 5 for the larger networks. Each runs the loop that its library's users write (_loops.py), over
batches that come in blocks. All start from the same weights, and before anything plain is timed the losses after 20
steps must agree to 1e-3; with methods the draws differ. What is not installed is left out. A run in full also draws
`docs/images/peers.svg` (_peers_picture.py).
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from importlib import metadata
from typing import Any

from _peers_picture import PICTURE, draw
from _timing import Row, against, arguments, in_turn, median_us, parse, save


# Set before torch and JAX are imported: later they have their threads.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}
SIDES: dict[str, tuple[str, ...]] = {
    "by hand": (),
    "by hand + torch.compile": (),
    "by hand, network compiled": (),
    "ours eager": (),
    "ours compiled": (),
    "ours donated": (),
    "JAX jit, donated": ("jax", "optax"),
    "Lightning Fabric": ("lightning",),
    "Lightning Trainer": ("lightning",),
    "Accelerate": ("accelerate",),
    "ignite": ("pytorch-ignite",),
}
"""The sides with the packages that they need beside torch."""
NETWORKS = {"MLP": 1, "ResNet-8": 10, "GPT": 10, "ViT": 10}
"""The networks, with how many times fewer steps are in a block."""
TOLERANCE = 1e-3


class Side:
    """A loop in a process of its own, which stands still between blocks."""

    def __init__(self, name: str, network: str, mix: bool, backend: str, core: int | None) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        script = pathlib.Path(__file__).with_name("_loops.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), name, network, backend, *(["--mix"] if mix else [])],
            env={**os.environ, **ONE_THREAD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})

    def block(self, calls: int) -> dict[str, float]:
        """Seconds a step over so many steps, and the last one's loss."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(calls, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            raise SystemExit(f"{self.name} failed:\n{self._errors.read()}")
        return json.loads(answer)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def main() -> None:
    parser = arguments(__doc__, blocks=20)
    parser.add_argument("--side", action="append", default=[], help="only sides whose name begins so; may be repeated")
    parser.add_argument("--network", action="append", default=[], choices=NETWORKS, help="only this; may be repeated")
    args = parse(parser)
    names = [name for name in SIDES if _is_installed(name) and name.startswith(tuple(args.side) or "")]
    rows: list[Row] = []
    for network in args.network or NETWORKS:
        for mix in (False, True):
            seconds = measure(names, network, mix, args)
            rows += [{"network": network, "methods": mix} | _row(name, seconds) for name in names]
    save("peers", rows, args.out, *sorted({package for name in names for package in SIDES[name]}))
    if not args.short and not args.side and not args.network:
        draw(rows, PICTURE)


def measure(names: list[str], network: str, mix: bool, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds a step of each side, block by block."""
    # Where a system cannot pin, the sides are where it puts them.
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else None
    calls = max(1, args.calls // NETWORKS[network])
    sides: dict[str, Side] = {}
    try:
        for name in names:  # one at a time: what they compile must not slow the others
            sides[name] = Side(name, network, mix, args.backend, core)
            sides[name].block(1)
        losses = {name: side.block(19)["loss"] for name, side in sides.items()}
        if not mix:
            _check_same(losses)
        seconds = in_turn(names, lambda name: sides[name].block(calls)["seconds"], args.blocks + 1)
    finally:
        for side in sides.values():
            side.close()
    # The first round warms what 20 steps have not.
    return {name: values[1:] for name, values in seconds.items()}


def _is_installed(name: str) -> bool:
    try:
        return all(metadata.version(package) for package in SIDES[name])
    except metadata.PackageNotFoundError as error:
        print(f"{name}: left out, {error.name} is not installed", file=sys.stderr)
        return False


def _check_same(losses: dict[str, float]) -> None:
    first = next(iter(losses.values()))
    if any(abs(loss - first) > TOLERANCE * abs(first) for loss in losses.values()):
        raise SystemExit(f"the sides do not compute the same; losses after 20 steps: {losses}")


def _row(name: str, seconds: dict[str, list[float]]) -> Row:
    row: dict[str, Any] = {"side": name, "us a step": round(median_us(seconds[name]), 1)}
    for base in ("by hand", "JAX jit, donated", "ours donated"):
        if base in seconds:
            middle, quartiles = against(seconds, name, base).values()
            row |= {f"of {base}": middle, f"quartiles of {base}": quartiles}
    return row


if __name__ == "__main__":
    main()
