"""The settings that define a run, from the command line, a file and the defaults."""

import argparse
import dataclasses
import difflib
import shlex
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from purecompose import losses
from purecompose._support import specs
from purecompose._support.files import read_whole
from purecompose.algorithms.recipes import RECIPES, recipe
from purecompose.nn.models import MODELS, check_options


__all__ = [
    "LOSSES",
    "SETTINGS",
    "Setting",
    "UsageError",
    "add_allow_imports",
    "add_settings",
    "check_target",
    "chosen",
    "command_of",
    "named",
    "read_config",
    "settings_of",
    "whole",
    "with_arguments",
]


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
        Setting(
            "tiered",
            str,
            "WHEN",
            "with --compile: train uncompiled at first, while another process compiles: until that is ready with auto "
            "(bits then depend on timing), or until a fixed time such as 500ba (default: wait for the compilation)",
        ),
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


def chosen(options: argparse.Namespace, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings that were chosen by `--set`, by an option or by a file. Defaults are left out."""
    found = dict(config or {})
    if options.config is not None:
        found |= read_config(Path(options.config))
    found |= {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    if options.recipe is not None:
        if options.algorithms is not None:
            raise UsageError(
                "--recipe: a recipe is a list of algorithms, as is --algorithms; give one of the two "
                "(docs/algorithms.md lists the recipes' methods)"
            )
        of_recipe = _settings_of(options.recipe)
        found |= {name: value for name, value in of_recipe.items() if getattr(options, name) is None}
    within: dict[str, dict[str, Any]] = {}
    for text in options.set:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set: {text}: expected KEY=VALUE, such as duration=5ep")
        name, dot, argument = key.strip().replace("-", "_").partition(".")
        if dot:
            within.setdefault(name, {})[argument] = _value(value)
        else:
            found[name] = _checked(name, _value(value), "--set")
    return found | ({"within": within} if within else {})


def _settings_of(name: str) -> dict[str, Any]:
    """Return the settings that a recipe determines."""
    made = recipe(name)
    found: dict[str, Any] = {
        "algorithms": ", ".join(map(repr, made.methods)) or "none",
        "loss": next(text for text, loss in LOSSES.items() if loss == made.loss),
        "duration": made.duration,
        "batch_size": made.batch_size,
        "precision": made.precision,
    }
    if made.optimizer is not None:
        found |= {"optimizer": f"recipe({name!r})", "schedule": "constant"}
    return {setting: value for setting, value in found.items() if value is not None}


def with_arguments(
    settings: dict[str, Any], factories: Mapping[str, Mapping[str, Callable[..., Any]]]
) -> dict[str, Any]:
    """Return the settings with the arguments of `--set NAME.ARGUMENT=VALUE` put into the calls.

    Args:
        settings: Complete settings, with the arguments to change under "within".
        factories: For the settings "algorithms", "optimizer" and "schedule", functions by name, whose signatures name
            positional arguments.
    """
    settings = dict(settings)
    for name, arguments in settings.pop("within", {}).items():
        try:
            if name in ("optimizer", "schedule", "model"):
                settings[name] = str(_set(name, specs.parse_one(settings[name]), arguments, factories.get(name, {})))
                continue
            calls = specs.parse(settings["algorithms"])
        except specs.SpecError as error:
            raise UsageError(f"--set: {name}: {error}") from error
        if name not in [call.name for call in calls]:
            known = ", ".join(["optimizer", "schedule", "model", *[call.name for call in calls]])
            raise UsageError(
                f"--set: {name}.{next(iter(arguments))}: there is no {name} in this run; there are {known}"
            )
        known = factories["algorithms"]
        changed = [_set(name, call, arguments, known) if call.name == name else call for call in calls]
        settings["algorithms"] = ", ".join(map(str, changed))
    return settings


def settings_of(run: Path) -> dict[str, Any]:
    """Return the settings in the folder of a run."""
    config = run / "config.toml"
    if not config.exists():
        why = "it has no config.toml" if run.exists() else "it does not exist"
        raise UsageError(f"{run} is not a run's folder: {why}; create one with train --out FOLDER")
    return read_config(config, option="")


def check_target(option: str, path: str) -> None:
    """Check, before the work begins, that its result can be written to a path."""
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{option}: {path} is a folder; expected a file's name")
    if not target.parent.is_dir():
        raise UsageError(f"{option}: {path}: there is no folder {target.parent}; create it, or choose another")


def read_config(path: Path, *, option: str = "--config: ") -> dict[str, Any]:
    """Return the settings in a TOML file, at the top level or in a table [train].

    Args:
        path: The file.
        option: Beginning of the messages. If it is empty, the file is from a run's folder, which another person may
            have prepared: only a regular file of limited size is read.
    """
    try:
        content = tomllib.loads(path.read_text("utf-8") if option else read_whole(path, 2**20).decode("utf-8"))
    except OSError as error:
        raise UsageError(f"{option}{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{option}{path} is not valid TOML: {error}") from error
    content = content.get("train", content)
    if not isinstance(content, dict):
        raise UsageError(f"{option}{path}: expected settings such as duration = '5ep'")
    pairs = ((name.replace("-", "_"), value) for name, value in content.items())
    return {name: _checked(name, value, f"{option}{path}") for name, value in pairs}


def command_of(settings: Mapping[str, Any], out: str | None) -> str:
    """Return the command that repeats a run."""
    words = ["python", "-m", "purecompose", "train"]
    for name, value in settings.items():
        if name in SETTINGS and value is not None and value != SETTINGS[name].default:
            words += [SETTINGS[name].option] if value is True else [SETTINGS[name].option, str(value)]
    return shlex.join(words + ([] if out is None else ["--out", out]))


def _checked(name: str, value: Any, where: str) -> Any:
    """Return a setting's value converted to its kind."""
    if name not in SETTINGS:
        close = difflib.get_close_matches(name, SETTINGS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(SETTINGS)}"
        raise UsageError(f"{where}: there is no setting {name!r}; {hint}")
    kind = SETTINGS[name].kind
    if kind is str and name == "algorithms" and isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise UsageError(f"{where}: {name}: expected {_KINDS[kind]}, got {value!r}")
    return value


_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_READ: dict[type, Callable[[str], Any]] = {int: whole, float: lambda text: _read(float, text), str: str}


def _read(kind: type[Any], text: str) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {_KINDS[kind]}, got {text!r}") from error


def _value(text: str) -> Any:
    """Return the TOML value of a text, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _set(
    name: str, call: specs.Call, arguments: Mapping[str, Any], factories: Mapping[str, Callable[..., Any]]
) -> specs.Call:
    """Return a call with arguments of `--set`."""
    named = specs.by_name(call, factories)
    changed = dataclasses.replace(named, kwargs={**named.kwargs, **arguments})
    try:
        if name == "model" and call.name in MODELS:
            check_options(call.name, arguments)
        elif call.name in factories:
            specs.build(changed, factories, name)
    except (specs.SpecError, TypeError) as error:
        if name == "model" or _can_be_built(call, factories):  # otherwise the call's own option reports the error
            where = ", ".join(f"{name}.{argument}" for argument in arguments)
            raise UsageError(f"--set: {where}: {error}") from error
    return changed


def _can_be_built(call: specs.Call, factories: Mapping[str, Callable[..., Any]]) -> bool:
    try:
        specs.build(call, factories, "call")
    except specs.SpecError:
        return False
    return True
