"""A network of timm learns the digits in grey, 32 x 32, with MixUp, squeeze-and-excitation and averaged weights.

Nothing is downloaded: with `pretrained=True` the same program fine-tunes; then give `optim.layerwise` lower rates to
the first layers, as examples/huggingface.py does.
"""

import importlib
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop_events, optim, schedule


def library() -> Any:
    """Return timm, or `None` if it does not import; its torchvision must be the one for this torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("timm")
        except (ImportError, RuntimeError) as error:
            return print(f"skipped: timm does not import: {error}")


def enlarged(images: Tensor) -> Tensor:
    return torch.nn.functional.interpolate(images, size=(32, 32))


def main(duration: str, name: str = "test_efficientnet") -> None:
    timm = library()
    if timm is None:
        return
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    digits = pc.data.load("digits")
    train = pc.data.arrays(enlarged(digits.train_inputs), digits.train_targets, batch_size=64)
    test = pc.data.arrays(enlarged(digits.test_inputs), digits.test_targets, batch_size=128)

    torch.manual_seed(0)  # for the initial weights
    net = timm.create_model(name, pretrained=False, num_classes=10, in_chans=1)
    optimizer = optim.adamw(3e-3 * schedule.cosine(warmup="0.1dur"), weight_decay=0.05)
    state = State.create(net, loss=pc.losses.cross_entropy, optimizer=optimizer, key=0, duration=duration)
    step = compose(loop_events, [alg.mixup(0.2), alg.squeeze_excite(0.25, min_channels=32), alg.ema("5ba")])
    state = pc.fit(step, state, train)

    accuracy = pc.evaluate(state, test, ["accuracy"], step=step)["accuracy"]
    trained = pc.to_module(state, weights="ema")  # a network of timm again, with the modules of the methods
    print(f"{name}: accuracy {accuracy:.3f}, {sum(param.numel() for param in trained.parameters()):,} weights")


if __name__ == "__main__":
    main("2ep" if "--short" in sys.argv else "10ep")
