"""What does the eager step cost beside the loop people write by hand, for the same arithmetic?

    python benchmarks/step_overhead.py [--blocks 40] [--threads 1]

Alternating blocks in one process; ratios are medians over blocks of (step / imperative loop). The methods' rows
compare with a hand-written loop that does the same mixing and smoothing with `torch.rand`'s global generator.

Everything is measured twice. glibc's malloc gives the memory of large activations back to the system after a
step and takes page faults for it in the next, in one loop or the other as chance lays out the heap: up to a
fifth of a convolutional network's step. "keeps" tells it to keep the memory, which leaves the arithmetic.
"""

import argparse
import json
import os
import subprocess
import sys

import torch
from _timing import median_us, paired, ratio, save
from torch import nn
from torch.nn import functional as F

from purecompose import State, algorithms as alg, compose, loop_events, losses, models, optim


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return net, torch.randn(64, 64), torch.randint(10, (64,))


def resnet8() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    net = models.build("resnet8", in_shape=(3, 32, 32), num_classes=10, seed=0)
    return net, torch.randn(64, 3, 32, 32), torch.randint(10, (64,))


class Imperative:
    """The loop by hand: `zero_grad`, forward, loss, backward, `step`."""

    def __init__(self, net: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, mix: bool) -> None:
        self.net, self.inputs, self.targets, self.mix = net.train(), inputs, targets, mix
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        self.beta = torch.distributions.Beta(0.2, 0.2)

    def __call__(self) -> torch.Tensor:
        inputs, targets = self.inputs, self.targets
        if self.mix:
            inputs, targets = self._mixed(inputs, targets)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.net(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss

    def _mixed(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = self.beta.sample()
        share = torch.minimum(share, 1 - share)
        order = torch.rand(len(inputs)).argsort()
        inputs = (1 - share) * inputs + share * inputs[order]
        dense = F.one_hot(targets, 10).float()
        return inputs, ((1 - share) * dense + share * dense[order]) * 0.9 + 0.01


class Ours:
    """The same with a composed step."""

    def __init__(self, net: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, mix: bool) -> None:
        methods = [alg.mixup(alpha=0.2), alg.label_smoothing(0.1)] if mix else []
        self.step = compose(loop_events, methods)
        self.batch = (inputs, targets)
        self.state = self.step.init(
            State.create(
                net,
                loss=losses.cross_entropy,
                optimizer=optim.sgd(0.01, momentum=0.9),
                duration="100000ba",
                batches_per_epoch=100,
            )
        )

    def __call__(self) -> None:
        self.state = self.step(self.state, self.batch)


KEEP = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=4294967296:glibc.malloc.mmap_threshold=4294967296"}


def measure(blocks: int, malloc: str) -> list[dict[str, object]]:
    """One row for each network, without and with methods."""
    torch.manual_seed(0)
    rows = []
    for name, make, calls in (("MLP 64-128-128-10", mlp, 100), ("ResNet-8, 32x32", resnet8, 1)):
        for mix in (False, True):
            net, inputs, targets = make()
            seconds = paired(
                {"ours": Ours(net, inputs, targets, mix=mix), "by hand": Imperative(net, inputs, targets, mix=mix)},
                calls=calls,
                blocks=blocks,
            )
            low, middle, high = ratio(seconds, "ours", "by hand")
            rows.append(
                {
                    "network": name,
                    "methods": "mixup + label smoothing" if mix else "none",
                    "malloc": malloc,
                    "by hand us": round(median_us(seconds["by hand"])),
                    "ours us": round(median_us(seconds["ours"])),
                    "ratio": round(middle, 3),
                    "quartiles": f"{low:.3f} {high:.3f}",
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of the eager step.")
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--malloc", choices=["default", "keeps"], help="measure this alone, and print it as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.malloc:
        print(json.dumps(measure(args.blocks, args.malloc)))
        return
    rows: list[dict[str, object]] = []
    for malloc, settings in (("default", {}), ("keeps", KEEP)):
        command = [sys.executable, __file__, *sys.argv[1:], "--malloc", malloc]
        child = subprocess.run(command, env={**os.environ, **settings}, check=True, stdout=subprocess.PIPE)
        rows += json.loads(child.stdout)
    save("step_overhead", sorted(rows, key=lambda row: (row["network"], row["methods"] != "none")))  # pyright: ignore


if __name__ == "__main__":
    main()
