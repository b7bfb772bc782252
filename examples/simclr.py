"""SimCLR on scikit-learn's digits: two views of each image are to be alike, and unlike those of all other images.

`losses.InfoNCE` compares examples, so that microbatches are computed from the outputs for the whole batch. Its
temperature is learned.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import Algorithm, Event, State, Step, compose, data, loop_events, losses, on, optim


class Encoder(nn.Sequential):
    """Views (N, V, 1, 8, 8) -> projections (N, V, 32)."""

    def __init__(self) -> None:
        features = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
        super().__init__(*features, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(0, 1)).unflatten(0, input.shape[:2])


def shifted(images: Tensor, shifts: Tensor) -> Tensor:
    """Shift each image twice, by up to one pixel: (N, 1, 8, 8), and 0 to 2 in (N, 2, 2) -> (N, 2, 1, 8, 8)."""
    rows, columns = (shifts[..., None] + torch.arange(8)).unbind(2)  # (N, 2, 8) each
    padded, example = F.pad(images[:, 0], (1, 1, 1, 1)), torch.arange(len(images)).view(-1, 1, 1, 1)
    return padded[example, rows[..., :, None], columns[..., None, :]][:, :, None]


def two_views(event: Event, state: State) -> State:
    n, dtype = state.num_examples, state.inputs.dtype
    shifts = pc.random.randint(state.example_rng("shifts"), (n, 2, 2), 0, 3)
    noise = pc.random.normal(state.example_rng("noise"), (n, 2, 1, 8, 8), dtype=dtype)
    return state.replace(inputs=shifted(state.inputs, shifts) + 0.3 * noise)


def make(dtype: torch.dtype = torch.float32) -> tuple[Step, State, data.Arrays]:
    torch.manual_seed(0)  # for the initial weights; views are drawn by the state's key
    loss, images = losses.InfoNCE(0.5, learned=True).to(dtype), data.load("digits").train_inputs.to(dtype)
    state = State.create(Encoder().to(dtype), loss=loss, optimizer=optim.adam(2e-3), target_field=None)
    step = compose(loop_events, [Algorithm("two_views", on(Event.AFTER_DATALOADER), two_views)])
    return step, state, data.arrays(images, batch_size=64, drop_last=True)


def accuracy(state: State) -> float:
    """The share of test images whose most similar one among 100 labelled images is of their class."""
    digits = data.load("digits")
    images = torch.cat([digits.train_inputs[:100], digits.test_inputs])
    known, found = F.normalize(state.forward(images[:, None])[:, 0], dim=1).tensor_split([100])
    return (digits.train_targets[(found @ known.T).argmax(1)] == digits.test_targets).float().mean().item()


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, start, batches = make()
    end = pc.fit(step, start, batches, duration=duration)
    print(f"accuracy {accuracy(start):.3f} -> {accuracy(end):.3f}, temperature {end.metrics['loss/temperature']:.3f}")


if __name__ == "__main__":
    main("100ba" if "--short" in sys.argv else "600ba")
