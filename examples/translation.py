"""Sequence to sequence: an encoder and a decoder with attention learn to reverse words, by teacher forcing.

What is padding is declared once, by the loss: metrics leave it out, and slices of a batch are weighted by what counts.
"""

import sys

import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, Step, compose, loop_events, losses, optim


PADDING, START, END, SIZE, LONGEST = 0, 1, 2, 20, 8  # three marks; marks and letters; letters of a word


def words(seed: int, number: int = 64) -> dict[str, Tensor]:
    """Return words (N, L), their reversals shifted right (N, L + 1), and the reversals with an end mark (N, L + 1)."""
    letters, lengths = pc.random.split(pc.random.key(seed))
    length = pc.random.randint(lengths, (number, 1), 3, LONGEST + 1)
    position = torch.arange(LONGEST + 1)
    word = torch.where(position < length, pc.random.randint(letters, (number, LONGEST + 1), 3, SIZE), PADDING)
    word_reversed = word.gather(1, (length - 1 - position).clamp(min=0))
    labels = torch.where(position < length, word_reversed, torch.where(position == length, END, PADDING))
    given = torch.cat([torch.full((number, 1), START), torch.where(labels == END, PADDING, labels)[:, :-1]], 1)
    return {"word": word[:, :-1], "given": given, "labels": labels}


class Translator(nn.Module):
    """Logits (N, SIZE, L + 1) of the next letters, given the word and the letters before (teacher forcing)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(SIZE, width), nn.Embedding(LONGEST + 1, width)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoderLayer(width, 2, 2 * width, **options)
        self.decoder = nn.TransformerDecoderLayer(width, 2, 2 * width, **options)
        self.head = nn.Linear(width, SIZE)

    def forward(self, word: Tensor, given: Tensor) -> Tensor:
        embedded = [self.letters(ids) + self.places.weight[: ids.shape[1]] for ids in (word, given)]
        memory = self.encoder(embedded[0], src_key_padding_mask=word == PADDING)
        is_later = torch.ones(given.shape[1], given.shape[1], dtype=torch.bool, device=given.device).triu(1)
        hidden = self.decoder(embedded[1], memory, tgt_mask=is_later, memory_key_padding_mask=word == PADDING)
        return self.head(hidden).transpose(1, 2)


def make(dtype: torch.dtype = torch.float32) -> tuple[Step, State, list[dict[str, Tensor]]]:
    torch.manual_seed(0)  # for the initial weights
    loss = losses.CrossEntropy(ignore_index=PADDING)
    fields = {"input_field": ["word", "given"], "target_field": "labels"}
    state = State.create(Translator().to(dtype), loss=loss, optimizer=optim.adam(3e-3), **fields)
    return compose(loop_events), state, [words(seed) for seed in range(50)]


def translated(state: State, word: Tensor) -> Tensor:
    """Return translations by the network's own letters, one after the other."""
    given = torch.full((len(word), 1), START)
    for _ in range(LONGEST + 1):
        given = torch.cat([given, state.forward([word, given]).argmax(1)[:, -1:]], 1)
    return given[:, 1:]


def main(duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    step, start, batches = make()
    end, test = pc.fit(step, start, batches, duration=duration), words(99)
    before, after = (pc.evaluate(one, [test], ["accuracy"])["accuracy"] for one in (start, end))
    right = ((translated(end, test["word"]) == test["labels"]) | (test["labels"] == PADDING)).all(1).float().mean()
    print(f"accuracy {before:.3f} -> {after:.3f} of letters given those before; {right:.3f} of words")


if __name__ == "__main__":
    main("150ba" if "--short" in sys.argv else "1500ba")
