"""LoRA on a GPT-2 of `transformers`: narrow matrices beside frozen projections learn another kind of sequence.

The optimizer keeps memory for the adapters only, and a checkpoint of `parts="trainable"` holds nothing else.
"""

import sys
import tempfile
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, Step, compose, loop_events, losses, optim


SIZE = 32  # of the vocabulary


class LoRA(nn.Module):
    """A frozen projection (in, out) of GPT-2, plus the product of two trained matrices (in, rank) and (rank, out)."""

    def __init__(self, base: Any, rank: int = 4) -> None:
        super().__init__()
        self.base, (rows, columns) = base, base.weight.shape
        self.down, self.up = nn.Parameter(torch.randn(rows, rank) / rows**0.5), nn.Parameter(torch.zeros(rank, columns))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + 2 * (inputs @ self.down @ self.up)


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


def with_adapters(base: Any, dtype: torch.dtype = torch.float32) -> State:
    torch.manual_seed(1)  # for the adapters
    for block in base.requires_grad_(False).transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn)
    return State.create(base.to(dtype), loss=losses.model_loss, optimizer=optim.adamw(0.02))


def make(dtype: torch.dtype = torch.float32) -> tuple[Step, State, list[dict[str, Tensor]]]:
    return compose(loop_events), with_adapters(make_base(), dtype), [texts(seed, 3) for seed in range(100, 108)]


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    if find_spec("transformers") is None:
        return print("skipped: transformers is not installed")
    step, _, batches = make()
    base = State.create(make_base(), loss=losses.model_loss, optimizer=optim.adamw(3e-3))  # as if pretrained
    base = pc.fit(step, base, [texts(seed, 1) for seed in range(8)], duration=duration)
    start = with_adapters(pc.to_module(base))
    end = pc.fit(step, start, batches, duration=duration)
    with tempfile.TemporaryDirectory() as folder:  # the adapters of the file, and the base of the template
        end = pc.load(pc.save(end, f"{folder}/adapters", parts="trainable"), like=start)
    before, after = (pc.evaluate(state, [texts(99, 3)])["loss"] for state in (start, end))
    print(f"loss {before:.2f} -> {after:.2f}, by {len(start.context.trainable)} narrow matrices")


if __name__ == "__main__":
    main("80ba" if "--short" in sys.argv else "300ba")
