"""LoRA on a GPT-2 of `transformers`: narrow matrices beside frozen projections learn another kind of sequence.

The optimizer keeps memory for the adapters only, and a checkpoint of `parts="trainable"` holds nothing else.
"""

import argparse
import tempfile
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, compose, loop_events, losses, optim


SIZE = 32  # of the vocabulary


class LoRA(nn.Module):
    """A frozen projection (in, out) of GPT-2, plus the product of two trained matrices (in, rank) and (rank, out)."""

    def __init__(self, base: Any, rank: int = 4) -> None:
        super().__init__()
        self.base, (rows, columns) = base, base.weight.shape
        self.down, self.up = nn.Parameter(torch.randn(rows, rank) / rows**0.5), nn.Parameter(torch.zeros(rank, columns))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + 2 * (inputs @ self.down @ self.up)


def with_adapters(net: Any) -> Any:
    torch.manual_seed(1)  # for the adapters
    for block in net.requires_grad_(False).transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn)
    return net


def texts(seed: int, increment: int, number: int = 32) -> dict[str, Tensor]:
    """Sequences that count by `increment`, of different lengths; what is padding is neither read nor predicted."""
    first, length = pc.random.randint(pc.random.key(seed), (2, number, 1), 0, SIZE)
    tokens, is_text = (first + increment * torch.arange(16)) % SIZE, torch.arange(16) < 6 + length % 11
    return {"input_ids": tokens, "attention_mask": is_text.long(), "labels": torch.where(is_text, tokens, -100)}


def make_base() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)  # for the initial weights
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=SIZE, n_positions=16, n_embd=64, n_layer=2, n_head=4, **options))


def make(dtype: torch.dtype = torch.float32, *, microbatches: int = 1, base: nn.Module | None = None) -> Any:
    """Return the step, the state before it, and the batches."""
    net, optimizer = with_adapters(base or make_base()).to(dtype), optim.adamw(0.02)
    state = State.create(net, loss=losses.model_loss, optimizer=optimizer, duration="300ba")
    return compose(loop_events, microbatches=microbatches), state, [texts(i, 3) for i in range(100, 108)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="80 batches instead of 300")
    duration = "80ba" if parser.parse_args().short else "300ba"
    if find_spec("transformers") is None:
        return print("skipped: transformers is not installed")
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    base = State.create(make_base(), loss=losses.model_loss, optimizer=optim.adamw(3e-3))  # as if pretrained
    base = pc.fit(compose(loop_events), base, [texts(i, 1) for i in range(8)], duration=duration)
    step, state, batches = make(base=pc.to_module(base))
    trained = pc.fit(step, state, batches, duration=duration)
    with tempfile.TemporaryDirectory() as folder:  # the adapters of the file, and the base of the template
        again = pc.load(pc.save(trained, f"{folder}/adapters", parts="trainable"), like=state)
    before, after = (pc.evaluate(one, [texts(999, 3)])["loss"] for one in (state, again))
    print(f"loss {before:.2f} -> {after:.2f}, by {len(state.context.trainable)} narrow matrices")


if __name__ == "__main__":
    main()
