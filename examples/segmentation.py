"""A U-Net finds squares and discs in noise; pixels at their outlines have no class.

The class that does not count is declared once, by the loss. An augmentation moves the masks with the images.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import Algorithm, Event, State, Step, compose, loop_events, losses, metrics, on, optim


SIDE, BORDER = 32, 255


def scenes(seed: int, dtype: torch.dtype, number: int = 16) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 32, 32) of a square and a disc each, and masks (N, 32, 32) with 0, 1, 2 and 255."""
    places, noise = pc.random.split(pc.random.key(seed))
    x, y = SIDE * pc.random.uniform(places, (2, 2, number, 1, 1))
    rows, columns = torch.arange(SIDE)[:, None] - y, torch.arange(SIDE) - x
    square = torch.maximum(rows[0].abs(), columns[0].abs()) - 6  # the distance from the outline, negative inside
    disc = (rows[1].square() + columns[1].square()).sqrt() - 6
    masks = torch.where(disc < 0, 2, torch.where(square < 0, 1, 0))
    images = masks + 0.7 * pc.random.normal(noise, masks.shape)
    return images[:, None].to(dtype), masks.masked_fill(torch.minimum(square.abs(), disc.abs()) < 0.5, BORDER)


def flipped(images: Tensor, masks: Tensor, is_flipped: Tensor) -> tuple[Tensor, Tensor]:
    """Return the images with some of them mirrored, with their masks."""
    masks = torch.where(is_flipped[:, None, None], masks.flip(-1), masks)
    return torch.where(is_flipped[:, None, None, None], images.flip(-1), images), masks


def flip(event: Event, state: State) -> State:
    is_flipped = pc.random.bernoulli(state.example_rng("flip"), 0.5, (state.num_examples,))
    images, masks = state.batch
    return state.replace(batch=flipped(images, masks, is_flipped))


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


def make(dtype: torch.dtype = torch.float32) -> tuple[Step, State, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)  # for the initial weights; flips are drawn from the state's key
    loss = losses.CrossEntropy(ignore_index=BORDER)
    state = State.create(UNet().to(dtype), loss=loss, optimizer=optim.adam(0.01))
    step = compose(loop_events, [Algorithm("flip", on(Event.AFTER_DATALOADER), flip)])
    return step, state, [scenes(seed, dtype) for seed in range(30)]


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, start, batches = make()
    end, test = pc.fit(step, start, batches, duration=duration), [scenes(99, torch.float32, number=64)]
    before, after = (pc.evaluate(state, test, {"iou": metrics.iou(3)})["iou"] for state in (start, end))
    print(f"iou {before:.3f} -> {after:.3f}, the mean of three classes")


if __name__ == "__main__":
    main("60ba" if "--short" in sys.argv else "600ba")
