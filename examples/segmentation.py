"""A U-Net finds squares and discs in noise; pixels at their outlines have no class.

The class that does not count is declared once, by the loss. An augmentation moves the masks with the images.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import Algorithm, Event, State, compose, loop_events, losses, metrics, on, optim, random


SIDE, BORDER = 32, 255


def scenes(seed: int, dtype: torch.dtype, number: int = 16) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 32, 32) of a square and a disc each, and masks (N, 32, 32) with 0, 1, 2 and 255."""
    places, noise = random.split(random.key(seed))
    x, y = SIDE * random.uniform(places, (2, 2, number, 1, 1))
    rows, columns = torch.arange(SIDE)[:, None] - y, torch.arange(SIDE) - x
    square = torch.maximum(rows[0].abs(), columns[0].abs()) - 6  # the distance from the outline, negative inside
    disc = (rows[1].square() + columns[1].square()).sqrt() - 6
    masks = torch.where(disc < 0, 2, torch.where(square < 0, 1, 0))
    images = masks + 0.7 * random.normal(noise, masks.shape)
    return images[:, None].to(dtype), masks.masked_fill(torch.minimum(square.abs(), disc.abs()) < 0.5, BORDER)


def flipped(rng: random.Rng, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Return half of the images mirrored, with their masks."""
    is_flipped = random.bernoulli(rng, 0.5, (len(images),))
    masks = torch.where(is_flipped[:, None, None], masks.flip(-1), masks)
    return torch.where(is_flipped[:, None, None, None], images.flip(-1), images), masks


def flip(event: Event, state: State) -> State:
    return state.replace(batch=flipped(state.example_rng("flip"), *state.batch))


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = [(1, 1), (1, 2), (2, 4), (6, 2), (3, 1)]  # inputs and outputs of each block, in widths
        self.down, self.deeper, self.bottom, self.up, self.last = (
            nn.Sequential(nn.Conv2d(i * width, o * width, 3, padding=1), nn.ReLU()) for i, o in sizes
        )
        self.widen, self.head = nn.Conv2d(1, width, 1), nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down(self.widen(images))
        coarse = self.deeper(F.max_pool2d(fine, 2))
        coarse = self.up(torch.cat([F.interpolate(self.bottom(F.max_pool2d(coarse, 2)), scale_factor=2), coarse], 1))
        return self.head(self.last(torch.cat([F.interpolate(coarse, scale_factor=2), fine], 1)))


def make(dtype: torch.dtype = torch.float32, *, microbatches: int = 1) -> Any:
    """Return the step, the state before it, and the batches."""
    torch.manual_seed(0)  # for the initial weights
    loss, optimizer = losses.CrossEntropy(ignore_index=BORDER), optim.adam(0.01)
    state = State.create(UNet().to(dtype), loss=loss, optimizer=optimizer, key=0)
    step = compose(loop_events, [Algorithm("flip", on(Event.AFTER_DATALOADER), flip)], microbatches=microbatches)
    return step, state, [scenes(seed, dtype) for seed in range(30)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="60 batches instead of 600")
    duration = "60ba" if parser.parse_args().short else "600ba"
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, state, batches = make()
    trained, test = pc.fit(step, state, batches, duration=duration), [scenes(999, torch.float32, 64)]
    before, after = (pc.evaluate(one, test, {"iou": metrics.iou(3)})["iou"] for one in (state, trained))
    print(f"iou {before:.3f} -> {after:.3f}, the mean of three classes")


if __name__ == "__main__":
    main()
