"""`evaluate`, `predict` and `plot`: commands for existing runs. With a prompt, `predict` continues a text."""

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from purecompose import batch as batches, random
from purecompose._support.device import AUTOCAST, arithmetic
from purecompose._support.messages import say
from purecompose._support.urls import with_urls
from purecompose.cli.kinds import TEXT, load as load_data
from purecompose.cli.loading import Trained, index_of, settings_for, trained
from purecompose.cli.own import allowed_by
from purecompose.cli.settings import UsageError, check_target
from purecompose.cli.setup import Setup, completed, fixed_arithmetic, plain_warnings, reported_as
from purecompose.core.compose import Step
from purecompose.core.loop import predict_events
from purecompose.core.state import State
from purecompose.data import Arrays, CharacterVocabulary, TextData
from purecompose.losses import metrics
from purecompose.records import draw_curves, read_run
from purecompose.run.evaluation import evaluate, predict
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


def show_evaluation(options: argparse.Namespace) -> None:
    """Print the metrics of a checkpoint on the test data."""
    settings, data = completed(settings_for(options.run, options.data), allowed=allowed_by(options))
    with fixed_arithmetic(settings["threads"]), plain_warnings():
        run = trained(options.run, options.checkpoint, settings, data)
        tested = _tested(options, settings, run.setup)
        wanted = {**run.setup.kind.metrics, "top_5": metrics.top_k(5), "loss": metrics.mean_loss()}
        if data.num_classes < 5:
            del wanted["top_5"]
        with nullcontext() if options.length is None else reported_as("--length"):
            found = evaluate(run.state, tested, wanted, step=run.setup.plain_step)
    reported = {"checkpoint": with_urls(run.checkpoint), "batch": run.state.timestamp.batch, **found}
    if options.json:
        say(json.dumps(reported))
        return
    width = max(map(len, reported))
    for name, value in reported.items():
        say(f"{name:<{width}}  {_shown(value)}")


def show_predictions(options: argparse.Namespace) -> None:
    """Write the predicted class of each test image, or each next character of a text, with its probability, as CSV.

    With a prompt, write the prompt and its continuation by a language model instead.
    """
    if options.out is not None:
        check_target("--out", options.out)
    settings = settings_for(options.run, options.data)
    if settings.get("seeds", 1) > 1:
        raise UsageError(f"{options.run} trained a population; predictions are those of a single network")
    prompt = prompt_of(options, settings)
    if prompt is not None:
        _write_text(options, settings, prompt)
        return
    settings, data = completed(settings, allowed=allowed_by(options))
    with fixed_arithmetic(settings["threads"]), plain_warnings():
        run = trained(options.run, options.checkpoint, settings, data)
        rows = list(_predicted(run))
    with _opened(options.out) as file:
        writer = csv.writer(file)
        writer.writerow(["index", "class", "probability", "target"])
        writer.writerows([index, found, f"{share:.6f}", target] for index, (found, share, target) in enumerate(rows))
    if options.out is not None:
        say(f"{len(rows):,} predictions of {with_urls(run.checkpoint)} in {options.out}")


def _write_text(options: argparse.Namespace, settings: Mapping[str, Any], prompt: Prompt) -> None:
    """Write the continuation of a prompt by a language model, character by character."""
    # The run's text itself is not needed: the network depends on its shape, the schedules on the number of batches.
    num = index_of(options.run, options.checkpoint, TEXT).time["batches_per_epoch"] * settings["batch_size"]
    blank = torch.zeros(1, prompt.window, dtype=torch.int64).expand(num, -1)
    data = TextData(blank, blank, blank, blank, prompt.vocabulary, num_dropped=0)
    settings, _ = completed({**settings, "validation": 0.0, "limit_batches": None}, data, allowed=allowed_by(options))
    with fixed_arithmetic(settings["threads"]), plain_warnings():
        run = trained(options.run, options.checkpoint, settings, data)
        with _opened(options.out) as file:
            for text in continued(run.state, prompt, run.setup.plain_step):
                say(text, end="", file=file, flush=True)
            say(file=file)


def _tested(options: argparse.Namespace, settings: Mapping[str, Any], setup: Setup) -> Arrays:
    """Return the test data; a text is divided into windows of the length in the options, if given."""
    if options.length is None:
        return setup.test_data
    if setup.kind is not TEXT:
        raise UsageError("--length is for text, but the run trained a network for images")
    with reported_as("--length"):
        data, _ = load_data({**settings, "length": options.length})
    return setup.kind.stored(data.test_inputs, data.test_targets).to(setup.state.device)


def _predicted(run: Trained) -> Iterator[tuple[Any, float, Any]]:
    """Yield class, probability and target of each example, or of each position of a text, as characters."""
    data = run.setup.data
    named = data.vocabulary.characters if isinstance(data, TextData) else range(data.num_classes)
    # Batch by batch, because each character of a text has as many probabilities as the vocabulary has characters.
    for batch in run.setup.test_data:
        (outputs,) = predict(run.state, [batch], step=run.setup.plain_step)
        shares, classes = (found.flatten().tolist() for found in outputs.softmax(1).max(1))
        targets = batches.get(batch, run.state.context.target_field).flatten().tolist()
        yield from zip([named[one] for one in classes], shares, [named[one] for one in targets], strict=True)


@contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    """Open a file to write to, or return standard output."""
    if path is None:
        yield sys.stdout
        return
    try:
        file = Path(path).open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out: {path} cannot be written: {error.strerror}") from error
    with file:
        yield file


def show_plot(options: argparse.Namespace) -> None:
    """Draw the curves of runs into one picture."""
    check_target("--out", options.out)
    try:
        runs = [read_run(Path(path)) for path in options.runs]
        draw_curves(runs, Path(options.out), x=options.x)
    except (OSError, ValueError) as error:
        message = " ".join(str(error).split())
        raise UsageError(message.removeprefix("read_run: ").removeprefix("draw_curves: ")) from error
    say(f"the curves of {len(runs)} run{'s' * (len(runs) > 1)} in {options.out}")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


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
