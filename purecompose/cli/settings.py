"""The settings that define a run, and their sources: options, a recipe, a file, and a run's folder."""

import dataclasses
import inspect
import re
import shlex
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from purecompose import losses, optim, schedule
from purecompose._support import specs
from purecompose._support.device import PRECISIONS
from purecompose._support.files import read_whole
from purecompose._support.messages import required
from purecompose._support.other_names import instead_of_setting
from purecompose.algorithms import FACTORIES
from purecompose.algorithms.recipes import RECIPES, recipe
from purecompose.cli.options import (
    KINDS,
    File,
    List,
    Number,
    Shown,
    Time,
    UsageError,
    allowed_by,
    one_line,
    option_of,
    parts_of,
    reported_as,
)
from purecompose.nn.models import MODELS, check_options


def _of_recipe(name: str) -> Any:
    if (found := recipe(name).optimizer) is None:
        raise ValueError(f"the recipe {name!r} leaves the optimizer to you")
    return found


LOSSES = {
    "cross_entropy": losses.cross_entropy,
    "binary_cross_entropy": losses.BinaryCrossEntropy(mean_over="examples"),
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adafactor": optim.adafactor,
    "adagrad": optim.adagrad,
    "adam": optim.adam,
    "adamw": optim.adamw,
    "decoupled_adamw": optim.decoupled_adamw,
    "decoupled_sgdw": optim.decoupled_sgdw,
    "lion": optim.lion,
    "recipe": _of_recipe,
    "rmsprop": optim.rmsprop,
    "sgd": optim.sgd,
}
SCHEDULES: dict[str, Callable[..., Any]] = {
    "constant": schedule.constant,
    "cosine": schedule.cosine,
    "cosine_warm_restarts": schedule.cosine_warm_restarts,
    "exponential": schedule.exponential,
    "linear": schedule.linear,
    "multi_step": schedule.multi_step,
    "polynomial": schedule.polynomial,
    "step": schedule.step,
}


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Together they determine its result, bit for bit.

    Attributes:
        data: Training and test data: digits, an MNIST-like .npz file, a folder of images by class, a
            text file *.txt, or my_module:my_data.
        length: For text: characters per window, which is one example (default: 128).
        vocabulary: For text: the characters in the order of their numbers (default: the file's, sorted).
        model: Network, with options: cnn(width=8); also my_module:my_net(...) (default: cnn; gpt for text).
        algorithms: Names or calls, separated by commas, also my_module:my_algorithm; or none; the command algorithms
            lists the names (default: mixup,label_smoothing,selective_backprop; none for text).
        loss: Loss for images; another one needs a program.
        optimizer: Optimizer, such as sgd(lr=0.1, momentum=0.9) (default: depends on the data).
        schedule: Factor of the learning rate, such as cosine(warmup=0.1dur) (default: depends on the data).
        duration: Length of the run: 20ep, 500ba, 10000sp, or for text 1e6tok (default: depends on the data).
        scale_schedule: Ratio by which duration and schedules are scaled, such as 0.5 for half the time.
        batch_size: Examples per batch (default: depends on the data).
        microbatches: Slices of a batch, to save memory; auto doubles them until a batch fits.
        seed: Seed of weights, data order and all draws.
        seeds: Train N networks at once, a population with this seed and the next ones.
        precision: Precision of the forward pass.
        compile: Compile the step; pays off on a GPU and for long runs.
        device: Device of the tensors.
        threads: CPU threads; another number rounds differently (default: depends on the data).
        eval_every: How often to evaluate: 1ep, 100ba, 0.1dur.
        validation: Share of the training data to set aside for --patience and the best checkpoint.
        patience: Stop when the loss has not improved for this time: 3ep (default: never).
        checkpoint_every: With --out: how often to write a checkpoint: 1ep, 500ba, 10m.
        keep: With --out: keep the N newest checkpoints, or with log some of the whole run, and the best.
        keep_best: With --out: keep the N best checkpoints.
    """

    _: KW_ONLY
    data: str = "digits"
    length: Number | None = None
    vocabulary: Annotated[str, Shown("CHARACTERS")] | None = None
    model: Annotated[str, Shown("MODEL", tuple(MODELS))] | None = None
    algorithms: List | None = None
    loss: Annotated[str, Shown("LOSS", tuple(LOSSES))] = "cross_entropy"
    optimizer: Annotated[str, Shown("CALL", tuple(OPTIMIZERS))] | None = None
    schedule: Annotated[str, Shown("CALL", tuple(SCHEDULES))] | None = None
    duration: Time | None = None
    scale_schedule: Annotated[float, Shown("RATIO")] = 1.0
    batch_size: Number | None = None
    microbatches: Annotated[str, Shown("N")] = "1"
    seed: Number = 0
    seeds: Number = 1
    precision: Annotated[str, Shown("PRECISION", tuple(PRECISIONS))] = "fp32"
    compile: bool = False
    device: Annotated[str, Shown("DEVICE", ("cpu", "cuda", "mps"))] = "cpu"
    threads: Number | None = None
    eval_every: Time = "1ep"
    validation: Annotated[float, Shown("SHARE")] = 0.0
    patience: Time | None = None
    checkpoint_every: Time = "1ep"
    keep: Annotated[str, Shown("N")] = "3"
    keep_best: Number = 1


SETTINGS = {
    name: parts_of(hint)[0] for name, hint in get_type_hints(Settings, include_extras=True).items() if name != "_"
}
"""The type of each setting."""


@dataclass(frozen=True)
class Given:
    """The settings on the command line, and the sources of others.

    Attributes:
        values: Settings of the run (defaults in brackets).
        recipe: Use the methods and the other settings of a recipe, unless an option says otherwise; hot leaves out the
            published one's BlurPool, channels last and EMA. With the digits: --recipe hot --model resnet20.
        config: File of settings, *.toml or *.yaml; options given here override it.
        set: One setting, or one argument in it: duration=5ep, optimizer.lr=0.01, mixup.alpha=0.4; overrides all others.
        allow_imports: Import code (my_module:name) that the settings of a run or of a --config file name.
    """

    _: KW_ONLY
    values: Annotated[dict[str, Any], Settings]
    recipe: Annotated[str, Shown("RECIPE", tuple(RECIPES))] | None = None
    config: File | None = None
    set: list[Annotated[str, Shown("KEY=VALUE")]] = dataclasses.field(default_factory=list)
    allow_imports: bool = False

    @property
    def allowed(self) -> Collection[str] | None:
        """The names of code that may be imported; `None` for all."""
        pairs = (text.partition("=") for text in self.set)
        return allowed_by(self.values | {key: value for key, _, value in pairs}, self.allow_imports)

    def names(self, setting: str) -> bool:
        """Return whether the command line itself gives a setting, and not only a file or a recipe."""
        return setting in self.values or any(text.partition("=")[0] == setting for text in self.set)

    def chosen(self, earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the settings that `--set`, an option, a recipe, a file or an earlier run determine, without defaults.

        Arguments of calls, as in `--set mixup.alpha=0.4`, are under "within".
        """
        found = dict(earlier or {})
        if self.config is not None:
            found |= read_config(Path(self.config))
        if self.recipe is not None:
            if "algorithms" in self.values:
                raise UsageError(
                    "--recipe: a recipe is a list of algorithms, as is --algorithms; give one of the two "
                    "(the page algorithms of the documentation lists the recipes' methods)"
                )
            found |= _recipe_settings(self.recipe)
        values, within = _set_values(self.set)
        return found | self.values | values | ({"within": within} if within else {})


def with_arguments(
    settings: dict[str, Any], algorithms: Mapping[str, Callable[..., Any]], option: str = "--set"
) -> dict[str, Any]:
    """Return complete settings with the arguments under "within", which `option` has given, put into the calls."""
    settings, factories = dict(settings), {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "model": MODELS}
    for name, arguments in settings.pop("within", {}).items():
        where = ", ".join(f"{name}.{argument}" for argument in arguments)
        try:
            if name in factories:
                settings[name] = str(_set(specs.parse_one(settings[name]), arguments, factories[name], name))
                continue
            calls = specs.parse(settings["algorithms"])
            names = sorted(set[str]().union(*(call.names for call in calls)))
            if name not in names:
                known = [*factories, *names]
                what = f"there is no {name} in this run;{specs.did_you_mean(name, known)} there are {', '.join(known)}"
                raise UsageError(f"{option}: {where}: {what}")
            changed = [_set_inside(call, name, arguments, algorithms) for call in calls]
            settings["algorithms"] = ", ".join(map(str, changed))
        except (specs.SpecError, TypeError) as error:
            raise UsageError(f"{option}: {where}: {error}") from error
    return settings


def _set_inside(value: Any, name: str, arguments: Mapping[str, Any], factories: Mapping[str, Any]) -> Any:
    """Return a call of an algorithm with other arguments for the one of a name, itself or among its arguments."""
    if not isinstance(value, specs.Call):
        return value
    if value.name == name:
        return _set(value, arguments, factories, "algorithm")
    args = tuple(_set_inside(one, name, arguments, factories) for one in value.args)
    kwargs = {key: _set_inside(one, name, arguments, factories) for key, one in value.kwargs.items()}
    return specs.Call(value.name, args, kwargs)


def _set(call: specs.Call, arguments: Mapping[str, Any], factories: Mapping[str, Any], kind: str) -> specs.Call:
    """Return a call with other arguments; raise if these are wrong."""
    if kind == "model":
        if call.name in factories:
            check_options(call.name, arguments)
        return dataclasses.replace(call, kwargs={**call.kwargs, **arguments})
    named = specs.by_name(call, factories)
    changed = dataclasses.replace(named, kwargs={**named.kwargs, **arguments})
    specs.build(changed, factories, kind)
    return changed


def settings_of(run: Path) -> dict[str, Any]:
    config = run / "config.toml"
    if not config.exists():
        why = "it has no config.toml" if run.exists() else "it does not exist"
        raise UsageError(f"{run} is not a run's folder: {why}; create one with train --out FOLDER")
    return read_config(config, option="")


def read_config(path: Path, *, option: str = "--config: ") -> dict[str, Any]:
    """Return the settings in a TOML or YAML file, at the top level or in a table [train].

    Messages begin with `option`. If it is empty, the file is from a run's folder and may come from another person: only
    a regular file of limited size is read.
    """
    kind = "YAML" if path.suffix.lower() in (".yaml", ".yml") else "TOML"
    try:
        text = path.read_text("utf-8") if option else read_whole(path, 2**20).decode("utf-8")
        content = _from_yaml(text) if kind == "YAML" else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{option}{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option}{path} is not valid {kind}: {one_line(error)}") from error
    content = content.get("train", content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UsageError(f"{option}{path}: expected settings such as duration = '5ep'")
    pairs = ((name.replace("-", "_"), value) for name, value in content.items())
    return {name: _checked(name, value, f"{option}{path}") for name, value in pairs}


def _from_yaml(text: str) -> Any:
    """Return the content of a YAML file; an empty one is without settings."""
    yaml = required("a YAML file", "'purecompose[yaml]'", "yaml")

    class Loader(yaml.SafeLoader):
        """YAML 1.1, but `1e-3` is a number, as in YAML 1.2."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )
    try:
        return yaml.load(text, Loader) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


_CALLS = ("algorithms", "model", "optimizer", "schedule")
"""Settings that are calls, which a file may give as tables."""


def _as_call(value: Any) -> Any:
    """Return the call that a table stands for, such as {name: sgd, lr: 0.1}, and other values unchanged."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return specs.Call(value["name"], kwargs={name: _as_call(one) for name, one in value.items() if name != "name"})
    return value


def command_of(settings: Settings, out: str | None) -> str:
    words = ["python", "-m", "purecompose", "train"]
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is not None and value != field.default:
            words += [option_of(field.name)] if value is True else [option_of(field.name), str(value)]
    return shlex.join(words + ([] if out is None else ["--out", out]))


def _recipe_settings(name: str) -> dict[str, Any]:
    with reported_as("--recipe"):
        made = recipe(name)
    found: dict[str, Any] = {
        "algorithms": ", ".join(map(repr, made.methods)) or "none",
        "loss": next(text for text, loss in LOSSES.items() if loss == made.loss),
        "duration": made.duration,
        "batch_size": made.batch_size,
        "microbatches": None if made.microbatches == 1 else str(made.microbatches),
        "precision": made.precision,
    }
    if made.optimizer is not None:
        found |= {"optimizer": f"recipe({name!r})", "schedule": "constant"}
    return {setting: value for setting, value in found.items() if value is not None}


def _checked(name: str, value: Any, where: str) -> Any:
    if name not in SETTINGS:
        hint = meant_setting(name) or specs.did_you_mean(name, SETTINGS) or f" there are {', '.join(SETTINGS)}"
        raise UsageError(f"{where}: there is no setting {name!r};{hint}")
    kind = SETTINGS[name]
    call = _as_call(value) if name in _CALLS else None
    value = str(call) if isinstance(call, specs.Call) else value
    if name == "algorithms" and isinstance(value, list):
        return ", ".join(str(_as_call(one)) for one in value) or "none"
    if kind is str and type(value) in (int, float) or kind is float and type(value) is int:
        return kind(value)
    if type(value) is not kind:
        raise UsageError(f"{where}: {name}: expected {KINDS[kind]}, got {value!r}")
    return value


_ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "lr_scheduler": "schedule",
    "dataset": "data",
    "network": "model",
    "methods": "algorithms",
    "amp": "precision",
    "eval_interval": "eval_every",
    "save_interval": "checkpoint_every",
}
"""What other libraries call a setting, where the table of their names has another answer for Python."""


def meant_setting(name: str, form: Callable[[str], str] = str) -> str:
    """Return the start of a hint if a setting has another name here, or is an argument in a setting, else "".

    `form` writes a setting, or an argument such as "optimizer.lr".
    """
    methods = {method: {method: factory} for method, factory in FACTORIES.items()}
    owners = {"optimizer": OPTIMIZERS, "model": MODELS, **methods, "schedule": SCHEDULES}
    found = [
        f"{owner}.{name}"
        for owner, factories in owners.items()
        if any(name in inspect.signature(factory).parameters for factory in factories.values())
    ]
    answer = re.match(r" write (\w+)=", instead_of_setting("train", name, SETTINGS))
    found = [_ELSEWHERE[name]] if name in _ELSEWHERE else found[:5] or ([answer[1]] if answer else [])
    return f" did you mean {' or '.join(map(repr, map(form, found)))}?" if found else ""


def _set_values(texts: Sequence[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the settings of `--set`, and the arguments of calls, by the call's name."""
    found: dict[str, Any] = {}
    within: dict[str, dict[str, Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set: {text}: expected KEY=VALUE, such as duration=5ep")
        name, dot, argument = key.strip().replace("-", "_").partition(".")
        if dot:
            within.setdefault(name, {})[argument] = _value(value)
        else:
            found[name] = _checked(name, _value(value), "--set")
    return found, within


def _value(text: str) -> Any:
    """Return the TOML value of a text, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()
