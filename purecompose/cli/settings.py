"""The settings that define a run, and their options on the command line."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from purecompose import losses
from purecompose.algorithms.recipes import RECIPES
from purecompose.nn.models import MODELS


class UsageError(Exception):
    """An invalid option; the message is one line."""


class Setting(NamedTuple):
    """A setting of a run. Together they define the bits of its result."""

    name: str
    kind: type
    """int, float, str or bool."""
    metavar: str | None
    help: str
    default: Any = None
    """The default; `None` if it depends on the data, or if the setting is off."""

    @property
    def option(self) -> str:
        """The option on the command line, such as "--batch-size"."""
        return f"--{self.name.replace('_', '-')}"


LOSSES = {
    "cross_entropy": losses.cross_entropy,
    "binary_cross_entropy": losses.BinaryCrossEntropy(mean_over="examples"),
}
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            "data",
            str,
            None,
            "digits, an MNIST-like .npz file, a folder of IDX files or of images by class, a text file *.txt, or "
            "my_module:my_data (default: digits)",
            "digits",
        ),
        Setting("length", int, "N", "for text: characters per window, which is one example (default: 128)"),
        Setting(
            "vocabulary",
            str,
            "CHARACTERS",
            "for text: the characters in the order of their numbers (default: the file's, sorted)",
        ),
        Setting(
            "model",
            str,
            None,
            f"{', '.join(MODELS)}, with options: cnn(width=8); timm:NAME, transformers:CLASS(...) "
            "or my_module:my_net(...) (default: cnn; gpt for text)",
        ),
        Setting(
            "algorithms",
            str,
            "LIST",
            "names or calls, also my_module:my_algorithm, separated by commas, or none "
            "(default: mixup,label_smoothing,selective_backprop; none for text)",
        ),
        Setting(
            "loss",
            str,
            None,
            f"{' or '.join(LOSSES)}, for images (default: cross_entropy; binary_cross_entropy with --recipe)",
            "cross_entropy",
        ),
        Setting(
            "optimizer",
            str,
            "CALL",
            "sgd, adam, adamw, decoupled_sgdw, decoupled_adamw, rmsprop, adafactor or lion, such as "
            "sgd(lr=0.1, momentum=0.9), or that of a recipe (default: depends on the data)",
        ),
        Setting(
            "schedule",
            str,
            "CALL",
            "factor of the learning rate: constant, linear, cosine, cosine_warm_restarts, polynomial, exponential, "
            "step or multi_step, such as cosine(warmup=0.1dur) (default: depends on the data)",
        ),
        Setting(
            "duration",
            str,
            "TIME",
            "length of the run: 20ep, 500ba, 10000sp, or for text 1e6tok (default: depends on the data)",
        ),
        Setting(
            "scale_schedule", float, "RATIO", "scale duration and schedules: 0.5 for half the time (default: 1)", 1.0
        ),
        Setting("batch_size", int, "N", "examples per batch (default: depends on the data)"),
        Setting(
            "limit_batches", str, "N", "at most N batches per epoch and evaluation; 0.1 for a tenth (default: all)"
        ),
        Setting(
            "microbatches",
            str,
            "N",
            "slices of a batch, to save memory; auto doubles them until a batch fits (default: 1)",
            "1",
        ),
        Setting("seed", int, "N", "seed of weights, data order and all draws (default: 0)", 0),
        Setting(
            "seeds", int, "N", "train N networks at once, a population with this seed and the next ones (default: 1)", 1
        ),
        Setting("precision", str, None, "fp32, tf32, bf16 or fp16 (default: fp32)", "fp32"),
        Setting("compile", bool, None, "compile the step; pays off on a GPU and for long runs", False),
        Setting("device", str, None, "cpu, cuda, mps, ... (default: cpu)", "cpu"),
        Setting("threads", int, "N", "CPU threads; other numbers give other bits (default: depends on the data)"),
        Setting("eval_every", str, "TIME", "how often to evaluate: 1ep, 100ba, 0.1dur (default: 1ep)", "1ep"),
        Setting(
            "validation",
            float,
            "SHARE",
            "share of the training data to set aside for --patience and the best checkpoint (default: 0)",
            0.0,
        ),
        Setting("patience", str, "TIME", "stop when the loss has not improved for this time: 3ep (default: never)"),
        Setting(
            "checkpoint_every",
            str,
            "TIME",
            "with --out: how often to write a checkpoint: 1ep, 500ba, 10m (default: 1ep)",
            "1ep",
        ),
        Setting(
            "keep",
            str,
            "N",
            "with --out: keep the N newest checkpoints, or with log some of the whole run, and the best (default: 3)",
            "3",
        ),
    )
}


def add_allow_imports(command: argparse.ArgumentParser) -> None:
    """Add the option that allows importing code that a file names."""
    command.add_argument(
        "--allow-imports",
        action="store_true",
        help="import code (my_module:name) that the settings of a run or of a --config file name",
    )


def add_settings(command: argparse.ArgumentParser) -> None:
    """Add options for all settings, and for other sources of settings."""
    add_allow_imports(command)
    group = command.add_argument_group("settings of the run (defaults in brackets)")
    for setting in SETTINGS.values():
        if setting.kind is bool:
            group.add_argument(setting.option, action="store_const", const=True, help=setting.help)
        else:
            group.add_argument(setting.option, type=_READ[setting.kind], metavar=setting.metavar, help=setting.help)
    group.add_argument(
        "--recipe",
        choices=tuple(RECIPES),
        help="use the methods and the other settings of a recipe, unless an option says otherwise; hot leaves out the "
        "published one's BlurPool, channels last and EMA. With the digits: --recipe hot --model resnet20",
    )
    group.add_argument("--config", metavar="FILE", help="a TOML file of settings; options given here override it")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one setting, or one argument in it: duration=5ep, optimizer.lr=0.01, mixup.alpha=0.4; overrides "
        "all others",
    )


def named(text: str) -> str:
    """Return the name of a file or folder in an option; raise if it is empty, as from an unset shell variable."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got an empty string")
    return text


def whole(text: str) -> int:
    """Return a whole number in an option, or raise with a message for users."""
    return _read(int, text)


def check_target(option: str, path: str) -> None:
    """Check, before the work begins, that its result can be written to a path."""
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{option}: {path} is a folder; expected a file's name")
    if not target.parent.is_dir():
        raise UsageError(f"{option}: {path}: there is no folder {target.parent}; create it, or choose another")


KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
"""The kinds of settings, as error messages name them."""

_READ: dict[type, Callable[[str], Any]] = {int: whole, float: lambda text: _read(float, text), str: str}


def _read(kind: type[Any], text: str) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {KINDS[kind]}, got {text!r}") from error
