"""Monitors of samples: images and texts that the network generates."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from purecompose._support.checks import check_whole, shown
from purecompose.core.state import State
from purecompose.observers.due import Due
from purecompose.observers.recorder import Image, Monitor
from purecompose.surgery.weights import to_module
from purecompose.time import TimeLike
from purecompose.time.event import Event


__all__ = ["image_samples", "text_samples"]

# Pixels between the images of a grid.
_GAP = 2


def image_samples(
    make: Callable[[nn.Module], Tensor],
    *,
    every: TimeLike | int = "1ep",
    name: str = "samples",
    num_columns: int = 8,
) -> Monitor:
    """Put images that the network makes, arranged in a grid, into the records.

    `Records` writes them as PNG files, the recorders of tracking services log them as images. The run does not change:
    `make` is called without gradients, and what it draws from torch's generator, which is seeded by the number of
    batches, is the same in each run and leaves the generator as it was.

    Args:
        make: `(net) -> images`, given the network in evaluation mode with copies of the weights. Returns images
            (N, C, H, W) with C 1 or 3, uint8, or floating with values in [0, 1] (values outside are clipped).
        every: How often, as far as the recorder's own `every` has a record then: "1ep", "1000ba", ...
        name: The name in the records.
        num_columns: How many images there are in a row of the grid.

    Raises:
        TypeError, ValueError: An argument of the wrong kind; when called: `make` returned no such images, or the state
            is a population's.

    Example:
        >>> from purecompose import losses, optim
        >>> state = State.create(nn.Linear(2, 16), loss=losses.mse, optimizer=optim.sgd(0.1))
        >>> monitor = image_samples(lambda net: net(torch.ones(10, 2)).reshape(10, 1, 4, 4))
        >>> monitor(state.replace(timestamp=state.timestamp.advance().advance_epoch()))["samples"].pixels.shape
        torch.Size([10, 46, 3])
    """
    num_columns = check_whole(num_columns, "image_samples: num_columns", 1)

    def values(made: Any) -> dict[str, Image]:
        return {name: Image(_grid(_images(made), num_columns))}

    return _Samples("image_samples", make, values, every, name)


def text_samples(
    make: Callable[[nn.Module], str | Iterable[str]], *, every: TimeLike | int = "1ep", name: str = "samples"
) -> Monitor:
    """Put texts that the network makes, such as continuations of prompts, into the records.

    `Records` writes them as text files, the recorders of tracking services log them as texts. As for `image_samples`,
    the run does not change.

    Args:
        make: `(net) -> texts`, given the network in evaluation mode with copies of the weights. Returns a str, which
            is recorded under `name`, or several, under `name/0`, `name/1`, ...
        every: How often, as far as the recorder's own `every` has a record then: "1ep", "1000ba", ...
        name: The name in the records.

    Raises:
        TypeError: An argument of the wrong kind; when called: `make` returned something else.
        ValueError: When called: the state is a population's.

    Example:
        >>> from purecompose import losses, optim
        >>> state = State.create(nn.Linear(2, 3), loss=losses.mse, optimizer=optim.sgd(0.1))
        >>> monitor = text_samples(lambda net: ["abc"[i] for i in net(torch.zeros(2, 2)).argmax(1) * 0])
        >>> monitor(state.replace(timestamp=state.timestamp.advance().advance_epoch()))
        {'samples/0': 'a', 'samples/1': 'a'}
    """

    def values(made: Any) -> dict[str, str]:
        if isinstance(made, str):
            return {name: made}
        texts = list(made) if isinstance(made, Iterable) else [made]
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"text_samples: expected make(net) to return a str or several, got {shown(made)}")
        return {f"{name}/{i}": text for i, text in enumerate(texts)}

    return _Samples("text_samples", make, values, every, name)


class _Samples:
    """A monitor that is due less often than the recorder that calls it."""

    def __init__(
        self,
        where: str,
        make: Callable[[nn.Module], Any],
        values: Callable[[Any], Mapping[str, Any]],
        every: Any,
        name: Any,
    ) -> None:
        if not callable(make):
            raise TypeError(f"{where}: make: expected a function (net) -> samples, got {shown(make)}")
        if not isinstance(name, str):
            raise TypeError(f"{where}: name: expected a str, got {shown(name)}")
        self._make, self._values, self._due = make, values, Due(every, f"{where}: every")

    def observe(self, event: Event, state: State) -> None:
        if event is Event.FIT_START:
            self._due.start(state.timestamp)

    def __call__(self, state: State) -> Mapping[str, Any]:
        if not self._due(state.timestamp):
            return {}
        net = to_module(state).eval()
        gpus = [state.device] if state.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=gpus):
            for generator in (torch.default_generator, *(torch.cuda.default_generators[gpu.index] for gpu in gpus)):
                generator.manual_seed(state.timestamp.batch)
            return self._values(self._make(net))


def _images(made: Any) -> Tensor:
    """Return what `make` returned as (N, 3, H, W), uint8, on the CPU."""
    if not isinstance(made, Tensor) or not (made.dtype is torch.uint8 or made.is_floating_point()):
        raise TypeError(f"image_samples: expected make(net) to return a floating or uint8 tensor, got {shown(made)}")
    if made.ndim != 4 or made.shape[1] not in (1, 3) or not made.numel():
        raise ValueError(
            f"image_samples: expected make(net) to return images (N, C, H, W) with 1 or 3 channels, got the shape "
            f"{tuple(made.shape)}"
        )
    if made.is_floating_point():
        made = (made.float().nan_to_num() * 255).round().clamp(0, 255).to(torch.uint8)
    return made.expand(-1, 3, -1, -1).cpu()


def _grid(images: Tensor, num_columns: int) -> Tensor:
    """Arrange (N, 3, H, W) as (height, width, 3), row by row, with black gaps."""
    num_columns = min(num_columns, len(images))
    num_rows = math.ceil(len(images) / num_columns)
    height, width = images.shape[2] + _GAP, images.shape[3] + _GAP
    cells = images.new_zeros(num_rows * num_columns, 3, height, width)
    cells[: len(images), :, :-_GAP, :-_GAP] = images
    grid = cells.reshape(num_rows, num_columns, 3, height, width).permute(0, 3, 1, 4, 2)
    return grid.reshape(num_rows * height, num_columns * width, 3)[:-_GAP, :-_GAP].contiguous()
