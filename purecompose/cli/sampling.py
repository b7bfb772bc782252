"""`predict --prompt`: the text with which a language model goes on."""

import argparse
from typing import NamedTuple

import torch
from torch import Tensor

from purecompose import random
from purecompose.cli.kinds import TEXT, Data
from purecompose.cli.settings import UsageError
from purecompose.data import TextData
from purecompose.evaluation import predict
from purecompose.state import State


__all__ = ["Prompt", "continued", "prompt_of"]

_LENGTH = 200


class Prompt(NamedTuple):
    """What to go on with, and how."""

    tokens: Tensor
    """int64, `(num,)`."""
    length: int
    """How many characters to draw."""
    key: Tensor
    data: TextData


def prompt_of(options: argparse.Namespace, data: Data) -> Prompt | None:
    """What the options of `predict` ask to go on with; `None` where they ask for predictions.

    Raises:
        UsageError: A prompt for a network of images, an empty one, characters that the network does not know, or what
            belongs to a prompt without one.
    """
    if options.prompt is None:
        for name in ("length", "seed"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} is for --prompt TEXT, with which a language model goes on")
        return None
    if not isinstance(data, TextData):
        raise UsageError("--prompt: the run trained a network for images; a prompt is for one of text")
    length = _LENGTH if options.length is None else options.length
    if not options.prompt or length < 1:
        raise UsageError(f"--{'length' if options.prompt else 'prompt'}: expected at least one character")
    try:
        return Prompt(data.vocabulary.encode(options.prompt), length, random.key(options.seed or 0), data)
    except ValueError as error:
        raise UsageError(f"--prompt: {error}") from error


def continued(state: State, prompt: Prompt) -> str:
    """The prompt and what follows, character by character drawn with the network's probabilities.

    The network sees as many characters before one as its windows have. The same seed gives the same text, and a
    longer text begins as a shorter one does.
    """
    assert TEXT.keys is not None
    tokens, window = prompt.tokens.to(state.device), prompt.data.in_shape[0]
    draws = random.uniform(prompt.key, (prompt.length,)).tolist()
    for draw in draws:
        seen = tokens[None, -window:]
        (outputs,) = predict(state, [dict.fromkeys(TEXT.keys, seen)])
        shares = outputs[0, :, -1].double().softmax(0).cumsum(0)
        # Rounding may leave the sum a little below the draw.
        token = torch.searchsorted(shares, draw).clamp(max=len(shares) - 1)
        tokens = torch.cat([tokens, token[None]])
    return prompt.data.vocabulary.decode(tokens)
