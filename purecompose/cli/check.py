"""`check`: the laws, tried on algorithms from the shell."""

import argparse
import difflib
import importlib
import json
import os
import pathlib
import pkgutil
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from purecompose.algorithms import FACTORIES
from purecompose.cli.setup import UsageError


__all__ = ["add_check_options", "check"]

_INSTALL = 'check needs hypothesis; install it with `pip install "purecompose[testing]"`'


def add_check_options(command: argparse.ArgumentParser) -> None:
    """The arguments of `check`."""
    add = command.add_argument
    add(
        "algorithms",
        nargs="+",
        metavar="ALGORITHM",
        help='my_module:my_algorithm, a shipped one as a call such as "mixup(0.2)", or all for all shipped ones',
    )
    add("--neutral", metavar="ALGORITHM", help="the same with settings that should change nothing")
    add("--tasks", metavar="LIST", help="names of tasks, separated by commas (all that the algorithm accepts)")
    add("--laws", metavar="LIST", help="names of laws, separated by commas (all that apply)")
    add("--examples", type=int, default=25, metavar="N", help="cases for each law (25)")
    add("--seed", type=int, default=0, metavar="N", help="of the cases (0)")
    add("--json", metavar="PATH", help="write the reports there as JSON; - for standard output, instead of tables")
    add("--quiet", action="store_true", help="print one line for each algorithm")


def check(options: argparse.Namespace) -> int:
    """Tries the laws and prints a report for each algorithm.

    Returns:
        The exit status: 0 where all laws are kept, else 1.

    Raises:
        UsageError: No such module, algorithm, task or law, or an option that cannot be.
        ImportError: hypothesis is missing.
    """
    if options.json not in (None, "-"):
        _check_writable(options.json)
    testing = _testing()
    given = _expanded(options)
    prepared = [_prepared(testing, text, neutral, options) for text, neutral in given]
    with _clean_folder():
        reports = [_reported(trials, options) for trials in prepared]
    is_ok = all(report.ok for report in reports)
    if options.json is not None:
        text = json.dumps({"ok": is_ok, "reports": [report.to_dict() for report in reports]}, indent=2)
        if options.json == "-":
            print(text)
        else:
            pathlib.Path(options.json).write_text(text + "\n", encoding="utf-8")
    if len(reports) > 1 and options.json != "-" and not options.quiet:
        for report in reports:
            _print_line(report)
    return 0 if is_ok else 1


def _testing() -> ModuleType:
    """The part of the library that needs hypothesis, which the other commands run without.

    Raises:
        ImportError: hypothesis is missing.
    """
    try:
        importlib.import_module("hypothesis")
    except ImportError as error:
        raise ImportError(_INSTALL) from error
    return importlib.import_module("purecompose.testing.checking")


@contextmanager
def _clean_folder() -> Iterator[None]:
    """Hypothesis keeps notes on the modules that it has seen: not in the user's folder, unless it is told where."""
    if "HYPOTHESIS_STORAGE_DIRECTORY" in os.environ:
        yield
        return
    configuration = importlib.import_module("hypothesis.configuration")
    with tempfile.TemporaryDirectory() as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            configuration.set_hypothesis_home_dir(None)


def _expanded(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """The algorithms' texts, each with the text of its neutral settings."""
    shipped = importlib.import_module("purecompose.testing.shipped").SHIPPED
    texts = [text for given in options.algorithms for text in (_all_of(shipped) if given == "all" else [given])]
    texts = list(dict.fromkeys(texts))
    if options.neutral is not None and len(texts) > 1:
        raise UsageError(f"--neutral: goes with one algorithm, got {len(texts)}: {', '.join(texts)}")
    if os.getcwd() not in sys.path and "" not in sys.path:  # where the console script was called, not `python -m`
        sys.path.insert(0, os.getcwd())
    rows = {text: shipped.get(text.partition("(")[0]) for text in texts}
    return [(text, options.neutral or (row.neutral if row else None)) for text, row in rows.items()]


def _all_of(shipped: Any) -> list[str]:
    return [example for row in shipped.values() for example in row.examples]


def _prepared(testing: ModuleType, text: str, neutral: str | None, options: argparse.Namespace) -> Any:
    """What is to be tried; all that options can get wrong is found here."""
    subject = _subject(text)
    try:
        return testing.trials(
            subject,
            neutral=None if neutral is None else _subject(neutral),
            tasks=_listed(options.tasks),
            laws=_listed(options.laws),
            max_examples=options.examples,
            seed=options.seed,
        )
    except (TypeError, ValueError) as error:
        message = _one_line(error).replace("max_examples=", "--examples: ")
        raise UsageError(message) from error


def _subject(text: str) -> Any:
    """The algorithm that a text names; what cannot be imported is a usage error, whatever its code raises."""
    module = text.partition(":")[0] if ":" in text.partition("(")[0] else None
    try:
        return importlib.import_module("purecompose.testing.subject").Subject.of(text)
    except ModuleNotFoundError as error:
        if module is None or error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UsageError(f"{text}: {_one_line(error)}{_place(error)}") from error
        raise UsageError(f"{text}: there is no module {error.name!r} here;{_module_hint(module)}") from error
    except Exception as error:
        if module is None:
            hint = "" if text.partition("(")[0] in FACTORIES else "; one of your own is written my_module:my_algorithm"
            raise UsageError(f"{_one_line(error)}{hint}") from error
        if isinstance(error, ValueError) and isinstance(error.__cause__, AttributeError):
            raise UsageError(f"{_one_line(error)}{_attribute_hint(module, text.partition(':')[2])}") from error
        kind = "" if isinstance(error, ValueError) and _one_line(error).startswith(text) else f"{text}: "
        name = "" if not kind else f"{type(error).__name__}: "
        raise UsageError(f"{kind}{name}{_one_line(error)}{_place(error)}") from error


def _module_hint(module: str) -> str:
    if module.endswith(".py") or "/" in module or "\\" in module:
        stem = module.removesuffix(".py").replace("\\", "/").strip("./").replace("/", ".")
        return f" expected a module's name, not a file's, such as {stem}:my_algorithm"
    here = [found.name for found in pkgutil.iter_modules([os.getcwd()])]
    return _did_you_mean(module, here) or f" expected one that can be imported from {os.getcwd()}"


def _attribute_hint(module: str, attribute: str) -> str:
    found = sys.modules[module]
    names = [
        name for name, value in vars(found).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    ]
    hint = _did_you_mean(attribute, names)
    return f";{hint}" if hint else ""


def _did_you_mean(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, 1)
    return f" did you mean {close[0]!r}?" if close else ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _place(error: BaseException) -> str:
    """Where in the user's code an error was raised; empty where it was not raised there."""
    ours = str(pathlib.Path(__file__).parents[1])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((ours, "<frozen"))]
    frames = [frame for frame in frames if frame.filename != importlib.__file__]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _check_writable(path: str) -> None:
    """Finds out before the work whether its result can be kept."""
    target = pathlib.Path(path)
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise UsageError(f"--json: {path}: expected a file in a folder that exists, or -")


def _reported(prepared: Any, options: argparse.Namespace) -> Any:
    """Tries the laws on one algorithm and prints what came out."""
    name = repr(prepared.subject.algorithm)
    with _Progress(name) as progress:
        report = prepared.report(progress)
    if options.json == "-":
        return report
    if options.quiet:
        _print_line(report)
    else:
        _print(report)
    return report


def _print_line(report: Any) -> None:
    failed = [outcome.law for outcome in report.outcomes if not outcome.status.is_ok]
    print(f"{report.algorithm}: {report.summary}{': ' if failed else ''}{', '.join(failed)}", flush=True)


def _print(report: Any) -> None:
    """In colours where they can be seen, else as plain text."""
    if sys.stdout.isatty():
        try:
            console = importlib.import_module("rich.console").Console(highlight=False)
        except ImportError:
            pass
        else:
            console.print(report)
            console.print()
            return
    print(f"{report}\n", flush=True)


class _Progress:
    """One line on standard error that says which law is tried, if a person may be looking."""

    def __init__(self, name: str) -> None:
        self._name, self._is_shown = name, sys.stderr.isatty()

    def __call__(self, law: str, index: int, total: int) -> None:
        """Shows the law."""
        if self._is_shown:
            width = max(shutil.get_terminal_size().columns - 1, 20)
            print(f"\r\x1b[K{f'[{index}/{total}] {law}  {self._name}'[:width]}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
