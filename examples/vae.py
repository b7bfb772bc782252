"""A variational autoencoder on scikit-learn's digits, whose KL term grows by a schedule.

The loss returns its parts, which are logged in training and evaluation; `torch.randn_like` in the network draws from
the run's key, so that a resumed run continues with the same noise.
"""

import functools
import sys

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


def make(dtype: torch.dtype = torch.float32) -> tuple[Step, State, data.Arrays]:
    torch.manual_seed(0)  # for the initial weights; training draws from the state's key
    images = data.load("digits").train_inputs.to(dtype)
    images = (images - images.min()) / (images.max() - images.min())
    loss = functools.partial(negative_elbo, beta=schedule.linear(0.0, 1.0, "1000ba"))
    state = State.create(VAE().to(dtype), loss=loss, optimizer=optim.adam(2e-3), target_field=0)  # the images
    return compose(loop_events), state, data.arrays(images, batch_size=64, drop_last=True)


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, start, batches = make()
    end = pc.fit(step, start, batches, duration=duration)
    before, after = (pc.evaluate(state, batches) for state in (start, end))
    errors = f"{before['loss/reconstruction']:.2f} -> {after['loss/reconstruction']:.2f}"
    print(f"loss {errors} nats of reconstruction per image, and {after['loss/kl']:.2f} of the code")


if __name__ == "__main__":
    main("300ba" if "--short" in sys.argv else "2000ba")
