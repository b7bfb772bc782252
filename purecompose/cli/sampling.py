"""`predict --prompt`: the continuation of a text by a language model."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purecompose import random
from purecompose._support.device import AUTOCAST, arithmetic
from purecompose.cli.settings import UsageError
from purecompose.cli.setup import reported_as
from purecompose.core.compose import Step
from purecompose.core.loop import predict_events
from purecompose.core.state import State
from purecompose.data import CharacterVocabulary
from purecompose.surgery.weights import to_module
from purecompose.time.event import Event


_LENGTH = 200


class Prompt(NamedTuple):
    """A text to continue, with the settings of its continuation."""

    tokens: Tensor
    """The prompt, int64, `(num,)`."""
    length: int
    """Number of characters to draw."""
    key: Tensor
    vocabulary: CharacterVocabulary
    window: int
    """Number of previous characters that the network sees."""


def prompt_of(options: argparse.Namespace, settings: Mapping[str, Any]) -> Prompt | None:
    """Return the prompt in the options of `predict`; `None` if it should write predictions.

    Args:
        options: The options of the command line.
        settings: The run's settings, with a text's vocabulary and window; the text itself is not needed.
    """
    if options.prompt is None:
        for name in ("length", "seed"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} needs --prompt TEXT, the text that a language model continues")
        return None
    if "vocabulary" not in settings:
        raise UsageError("--prompt: expected a run on text, got one that trained a network for images")
    if options.data is not None:
        raise UsageError("--data: a prompt is continued without data; leave it out")
    length = _LENGTH if options.length is None else options.length
    if not options.prompt or length < 1:
        raise UsageError(f"--{'length' if options.prompt else 'prompt'}: expected at least one character")
    with reported_as("--seed"):
        key = random.key(options.seed or 0)
    vocabulary = CharacterVocabulary(settings["vocabulary"])
    with reported_as("--prompt"):
        return Prompt(vocabulary.encode(options.prompt), length, key, vocabulary, settings["length"])


def continued(state: State, prompt: Prompt, step: Step) -> Iterator[str]:
    """Yield the prompt, and then each following character, drawn with the network's probabilities.

    The network sees as many previous characters as the run's windows have, and uses the weights that the step's methods
    predict with, such as averages. The same seed produces the same text, and a longer text begins with the shorter one.
    """
    yield prompt.vocabulary.decode(prompt.tokens)
    # The event fires once and the network is called as a plain module, because a step analyses each new batch shape,
    # and here each input is longer than the last.
    state = step.replace(program=predict_events).fire(Event.PREDICT_START, state)
    net, precision = to_module(state).eval(), state.context.precision
    narrow = AUTOCAST.get(precision)
    tokens = prompt.tokens.to(state.device)
    for draw in random.uniform(prompt.key, (prompt.length,)).tolist():
        with (
            torch.no_grad(),
            arithmetic(precision, state.device),
            torch.autocast(state.device.type, narrow, enabled=narrow is not None),
        ):
            outputs = net(tokens[None, -prompt.window :])
        shares = outputs[0, :, -1].double().softmax(0).cumsum(0)
        # Rounding may leave the sum a little below the draw.
        token = torch.searchsorted(shares, draw).clamp(max=len(shares) - 1)
        tokens = torch.cat([tokens, token[None]])
        yield prompt.vocabulary.decode(token[None])
