"""A variational autoencoder on scikit-learn's digits, whose KL term grows by a schedule.

The loss returns its parts, which are logged in training and evaluation; `torch.randn_like` in the network draws from
the run's key, so that a resumed run continues with the same noise.
"""

import argparse
import functools
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, Step, compose, data, loop_events, optim, schedule


class VAE(nn.Module):
    """Pixels -> logits of pixels, and mean and log-variance of the code."""

    def __init__(self, code: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * code))
        self.decoder = nn.Sequential(nn.Linear(code, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(images).chunk(2, dim=1)
        code = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        return self.decoder(code), mean, log_var


def negative_elbo(outputs: tuple[Tensor, Tensor, Tensor], images: Tensor, beta) -> tuple[Tensor, dict]:
    """The bound in nats per image, and its two parts."""
    logits, mean, log_var = outputs
    reconstruction = F.binary_cross_entropy_with_logits(logits, images.flatten(1), reduction="none").sum(1).mean()
    kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
    return reconstruction + beta * kl, {"reconstruction": reconstruction, "kl": kl}


def make(num_batches: int = 2000, dtype: torch.dtype = torch.float32) -> tuple[Step, State, Iterable[Tensor]]:
    torch.manual_seed(0)  # for the initial weights; training draws from the state's key
    images = data.load("digits").train_inputs.to(dtype)
    images = (images - images.min()) / (images.max() - images.min())
    state = State.create(
        VAE().to(dtype),
        loss=functools.partial(negative_elbo, beta=schedule.linear(0.0, 1.0, "0.5dur")),
        optimizer=optim.adam(2e-3),
        duration=f"{num_batches}ba",
        target_field=0,  # the images themselves
    )
    step = compose(loop_events)
    return step, step.init(state), data.arrays(images, None, 64, drop_last=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="300 batches instead of 2000")
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, state, batches = make(300 if parser.parse_args().short else 2000)
    for when in ("before", "after"):
        parts = pc.evaluate(state, batches, {"negative ELBO": pc.metrics.mean_loss()})
        print(f"{when} training: {', '.join(f'{name} {value:.2f}' for name, value in parts.items())}")
        if when == "before":
            state = pc.fit(step, state, batches)


if __name__ == "__main__":
    main()
