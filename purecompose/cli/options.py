"""Command lines from functions: the signature of a command gives its arguments, its docstring their help.

    def replay(run: Run, *, at: Time, out: Folder | None = None) -> None:
        '''Compute the state of a run at any batch, from its checkpoints.

        Args:
            run: Folder of a run.
            at: Point of the run: 1234ba, 3ep, 0.5dur.
            out: Save the state there, as a checkpoint.

        Examples:
            python -m purecompose replay runs/a --at 1234ba
        '''

Keyword-only parameters become options, `--at`; others are positional. A `bool` is a flag, a `Literal` a choice, and a
`list` may be repeated. A parameter that is a dataclass is replaced by the dataclass's fields; if it is a
`dict` annotated with a dataclass, it holds the fields that the command line gives.

Settings may name the user's own algorithms, networks and data, `my_module:name`. Importing a module runs its code, so
a name in a file, such as a run's `config.toml`, is imported only if the command line names it too, or has
`--allow-imports`.
"""

import argparse
import dataclasses
import importlib
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

from purecompose import time
from purecompose._support import specs
from purecompose._support.specs import did_you_mean
from purecompose.algorithms import BY_NAME
from purecompose.core.algorithm import Algorithm


class UsageError(Exception):
    """An invalid option; the message is one line."""


class Parser(argparse.ArgumentParser):
    """A parser that reports a usage error in one line, without the whole usage that argparse prints first."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help shows the options)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names, option = list(map(str, action.choices)), (action.option_strings or [action.dest])[0]
            wrong = f"no {option} is called {value!r}" if option == "command" else f"{option}: got {value!r}"
            raise UsageError(f"{wrong};{did_you_mean(value, names)} there are {', '.join(names)}")

    def check_options(self, words: Sequence[str], meant: Callable[[str], str]) -> None:
        """Raise a `UsageError` for an option, among the words after a command, that does not exist.

        `meant` returns a hint for the name of a setting.
        """
        known = self._option_string_actions
        for word in itertools.takewhile(lambda word: word != "--", words):
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known and " " not in word:
                options = {one[2:]: one for one in known if one.startswith("--")}
                options |= {"logger": "--tracker"} if "--tracker" in known else {}
                hint = meant(option[2:].replace("-", "_")) if "--set" in known else ""
                hint = hint or (" the command prints its result;" if option == "--out" else "")
                hint = hint or did_you_mean(option[2:], options, shown=options)
                raise UsageError(f"there is no option {option};{hint} --help shows the options")


@contextmanager
def reported_as(option: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn an error, by default of values and files, into a `UsageError` of one line that begins with the option."""
    wrong = kinds or (TypeError, ValueError, OSError)
    try:
        yield
    except wrong as error:
        raise UsageError(f"{option}: {one_line(error)}" if option else one_line(error)) from error


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks."""
    return " ".join(str(error).split())


def check_target(option: str, path: str) -> None:
    """Check, before the work begins, that its result can be written to a path."""
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{option}: {path} is a folder; expected a file's name")
    if not target.parent.is_dir():
        raise UsageError(f"{option}: {path}: there is no folder {target.parent}; create it, or choose another")


class Shown(NamedTuple):
    """How a value is written in the help, and what a shell may complete it to."""

    metavar: str | None = None
    names: tuple[str, ...] = ()
    """Names that the help lists and a shell completes; other values are possible."""
    bare: str | None = None
    """The value of an option that is given without one."""


Number = Annotated[int, Shown("N")]
Real = Annotated[float, Shown("NUMBER")]
List = Annotated[str, Shown("LIST")]
Time = Annotated[str, Shown("TIME")]
Run = Annotated[str, Shown("RUN")]
File = Annotated[str, Shown("FILE")]
Folder = Annotated[str, Shown("FOLDER")]

KINDS: Mapping[type, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
"""What messages call the types of values."""


def parts_of(hint: Any) -> tuple[Any, Any]:
    """Return the type of a parameter, without `None`, and its annotation: a `Shown` or a dataclass."""
    if NoneType in get_args(hint):
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
    if get_origin(hint) is Annotated:
        kind, note, *_ = get_args(hint)
        return kind, note
    return hint, Shown()


def option_of(name: str) -> str:
    """Return the option for a parameter, such as "--batch-size"."""
    return f"--{name.replace('_', '-')}"


def add_options(parser: Any, owner: Callable[..., Any], *, if_given: bool = False) -> None:
    """Add the parameters of a function, or the fields of a dataclass, to a parser or to one of its groups.

    With `if_given`, options that the command line does not give are absent from the result of parsing.
    """
    hints, words = get_type_hints(owner, include_extras=True), _documented(owner)
    for name, parameter in inspect.signature(owner).parameters.items():
        kind, note = parts_of(hints[name])
        if isinstance(note, type):
            add_options(parser.add_argument_group(words[name].rstrip(".")), note, if_given=True)
        elif dataclasses.is_dataclass(kind):
            add_options(parser, kind)  # pyright: ignore[reportArgumentType]
        else:
            _add_option(parser, parameter, kind, note, words[name], if_given=if_given)


def _add_option(
    parser: Any, parameter: inspect.Parameter, kind: Any, note: Shown, words: str, *, if_given: bool
) -> None:
    name, default = parameter.name, parameter.default
    is_required, is_option = default is parameter.empty, parameter.kind is parameter.KEYWORD_ONLY
    given: dict[str, Any] = {"default": argparse.SUPPRESS if if_given else None if is_required else default}
    if kind is bool:
        given |= {"action": "store_true"}
    else:
        is_list = get_origin(kind) is list
        value, note = parts_of(get_args(kind)[0]) if is_list else (kind, note)
        given |= {"action": "append", "default": []} if is_list and is_option else {"nargs": "+"} if is_list else {}
        if get_origin(value) is Literal:
            given["choices"] = get_args(value)
        else:
            given |= {"type": _reader(value, note), "metavar": note.metavar}
        if note.bare is not None:
            given |= {"nargs": "?", "const": note.bare}
    words, by_default, its_default = words.rstrip(".").partition(" (default: ")
    if note.names:
        words += f": {', '.join(note.names)}"
    if type(default) in (int, float, str):
        by_default, its_default = " (default: ", f"{default})"
    words += by_default + its_default
    if is_option:
        given |= {"dest": name, "required": is_required}
    elif not is_required:
        given.setdefault("nargs", "?")
    action = parser.add_argument(option_of(name) if is_option else name, help=words.replace("%", "%%"), **given)
    action.names = note.names


def _reader(kind: type, note: Shown) -> Callable[[str], Any]:
    """Return the function that converts the text of an argument."""

    def read(text: str) -> Any:
        if not text and note.metavar in ("FILE", "FOLDER", "RUN"):  # as from an unset shell variable
            raise argparse.ArgumentTypeError("expected a name, got an empty string")
        if note.metavar == "TIME" and not text.isdecimal():  # of batches, where a command takes these
            try:
                time.Time.of(text)
            except ValueError as error:
                raise argparse.ArgumentTypeError(one_line(error)) from error
        try:
            return kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected {KINDS[kind]}, got {text!r}") from error

    return read


def arguments_of(owner: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function or a dataclass, from the values of all options."""
    hints, found = get_type_hints(owner, include_extras=True), {}
    for name in inspect.signature(owner).parameters:
        kind, note = parts_of(hints[name])
        if isinstance(note, type):
            found[name] = {field.name: given[field.name] for field in dataclasses.fields(note) if field.name in given}
        else:
            is_group = isinstance(kind, type) and dataclasses.is_dataclass(kind)
            found[name] = kind(**arguments_of(kind, given)) if is_group else given[name]
    return found


def summary_of(command: Callable[..., Any]) -> str:
    """Return the first line of a command's docstring, without its full stop."""
    return (inspect.getdoc(command) or "").partition("\n")[0].rstrip(".")


def examples_of(command: Callable[..., Any]) -> str | None:
    _, found, examples = (inspect.getdoc(command) or "").partition("\nExamples:\n")
    return f"examples:\n{examples}" if found else None


def _documented(owner: Callable[..., Any]) -> dict[str, str]:
    """Return the words for each argument in a docstring."""
    *_, text = re.split(r"^(Args|Attributes):\n", f"{inspect.getdoc(owner)}\n", maxsplit=1, flags=re.M)
    entries = re.findall(r"^    (\w+): (.+\n(?:        .+\n)*)", text.partition("\nExamples:")[0], re.M)
    return {name: " ".join(words.split()) for name, words in entries}


_WITH_CODE = ("algorithms", "model", "data")


def is_own(name: str) -> bool:
    """Return whether a name refers to the user's own code, `my_module:name`."""
    return specs.OWN_NAME.fullmatch(name) is not None


def imported(name: str) -> Any:
    """Import `my_module:name`, also from the current folder."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:  # the console script does not search the current folder
        sys.path.insert(0, os.getcwd())
    if module.endswith(".py"):
        stem = PurePath(module).stem
        raise specs.SpecError(f"{name}: expected a module's name, not a file's, such as {stem}:{attribute}")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(f"{error.name}."):
            raise specs.SpecError(f"{name}: {module} cannot be imported: {type(error).__name__}: {error}") from error
        missing = f"there is no module {error.name!r} in {os.getcwd()}, and none is installed"
        raise specs.SpecError(f"{name}: {missing}") from error
    if not hasattr(found, attribute):
        raise specs.SpecError(f"{name}: the module {module} has no {attribute!r}")
    return getattr(found, attribute)


class _OwnToo(dict[str, Callable[..., Any]]):
    """Factories by name, including the user's own ones, which are imported on access."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_own(name))

    def __missing__(self, name: str) -> Callable[..., Any]:
        found = imported(name)
        return (lambda: found) if isinstance(found, Algorithm) else found


ALGORITHMS: Mapping[str, Callable[..., Any]] = _OwnToo(BY_NAME)
"""The factories of algorithms by name, those in modules of the user among them."""


def allowed_by(given: Mapping[str, Any], allow_imports: bool) -> Collection[str] | None:
    """Return the names that may be imported: those in the settings on the command line; `None` for all."""
    return None if allow_imports else _names(given)


def check_imports(settings: Mapping[str, Any], allowed: Collection[str] | None) -> None:
    """Raise if settings name code that may not be imported, since only a file names it; `None` allows all."""
    foreign = [] if allowed is None else sorted(_names(settings) - set(allowed))
    if foreign:
        raise UsageError(
            f"the settings in a file name code to import, {', '.join(foreign)}: if you trust the file, add "
            "--allow-imports (in Python allow_imports=True), or give the code on the command line too"
        )


def _names(settings: Mapping[str, Any]) -> set[str]:
    """Return the names of the user's own code in settings."""
    found = set()
    for name in _WITH_CODE:
        text = settings.get(name) or ""
        try:
            found |= {text} if name == "data" else set[str]().union(*(call.names for call in specs.parse(text)))
        except specs.SpecError:
            pass  # raises again, with a message, when the setting is used
    return {name for name in found if is_own(name)}
