"""SimCLR on scikit-learn's digits: two views of each image are to be alike, and unlike those of all other images.

`losses.over_batch` declares that NT-Xent compares examples, so microbatches are exact. Its temperature is learned.
"""

import argparse
import math
from collections.abc import Iterable

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


class NTXent(nn.Module):
    """The loss, a module whose temperature is trained with the network."""

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(0.5).log())

    def forward(self, outputs: Tensor, targets: None) -> tuple[Tensor, dict[str, Tensor]]:
        z, n = F.normalize(torch.cat(outputs.unbind(1)), dim=1), len(outputs)
        similarities = (z @ z.T / self.log_temperature.exp()).fill_diagonal_(-math.inf)
        loss = F.cross_entropy(similarities, torch.arange(2 * n, device=z.device).roll(n))
        return loss, {"temperature": self.log_temperature.exp()}


def two_views(event: Event, state: State) -> State:
    """Shift each image by up to one pixel, and add noise, twice: (N, 1, 8, 8) -> (N, 2, 1, 8, 8)."""
    images, n = state.inputs, state.num_examples
    shifts = pc.random.randint(state.example_rng("shifts"), (n, 2, 2), 0, 3)
    rows, columns = (shifts[..., None] + torch.arange(8)).unbind(2)  # (N, 2, 8) each
    padded, example = F.pad(images[:, 0], (1, 1, 1, 1)), torch.arange(n).view(n, 1, 1, 1)
    views = padded[example, rows[..., :, None], columns[..., None, :]]
    noise = pc.random.normal(state.example_rng("noise"), (n, 2, 8, 8), dtype=views.dtype)
    return state.replace(inputs=(views + 0.3 * noise)[:, :, None])


def make(num_batches: int = 600, dtype: torch.dtype = torch.float32) -> tuple[Step, State, Iterable[Tensor]]:
    torch.manual_seed(0)  # for the initial weights; views are drawn by the state's key
    loss, length = losses.over_batch(NTXent().to(dtype)), f"{num_batches}ba"
    state = State.create(Encoder().to(dtype), loss=loss, optimizer=optim.adam(2e-3), duration=length, target_field=None)
    step = compose(loop_events, [Algorithm("two_views", on(Event.AFTER_DATALOADER), two_views)])
    return step, step.init(state), data.arrays(data.load("digits").train_inputs.to(dtype), None, 64, drop_last=True)


def accuracy(state: State) -> float:
    """The share of test images whose most similar one among 100 labelled images is of their class."""
    digits = data.load("digits")
    images = torch.cat([digits.train_inputs[:100], digits.test_inputs])
    known, found = F.normalize(state.forward(images[:, None])[:, 0], dim=1).tensor_split([100])
    return (digits.train_targets[(found @ known.T).argmax(1)] == digits.test_targets).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="100 batches instead of 600")
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, state, batches = make(100 if parser.parse_args().short else 600)
    end = pc.fit(step, state, batches)
    print(f"accuracy {accuracy(state):.3f} -> {accuracy(end):.3f}, temperature {end.metrics['loss/temperature']:.3f}")


if __name__ == "__main__":
    main()
