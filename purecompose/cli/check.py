"""`check` and `plan --conflicts`: try the laws on algorithms, and the order of pairs.

Imported only when one of them runs, because it needs Hypothesis.
"""

import argparse
import json
import pathlib
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout

from purecompose._support.messages import say
from purecompose.cli.own import allowed_by
from purecompose.cli.resolve import listed, notes_elsewhere, one_line, subject
from purecompose.cli.settings import UsageError, check_target
from purecompose.cli.setup import completed, fixed_arithmetic, reported_as
from purecompose.cli.sources import chosen, settings_of
from purecompose.testing.checking import Trials, trials
from purecompose.testing.order import conflicts
from purecompose.testing.report import Report
from purecompose.testing.shipped import SHIPPED


def check(options: argparse.Namespace) -> int:
    """Try the laws and print a report for each algorithm.

    Returns:
        The exit status: 0 if all laws are kept, otherwise 1.

    Raises:
        UsageError: There is no such module, algorithm, task or law, or an option is invalid.
    """
    if options.json not in (None, "-"):
        check_target("--json", options.json)
    # The output of an algorithm's module must not mix with the JSON on standard output.
    with notes_elsewhere(), redirect_stdout(sys.stderr) if options.json == "-" else nullcontext():
        prepared = [_prepared(text, neutral, options) for text, neutral in _expanded(options)]
        reports = [_reported(one, options) for one in prepared]
    is_ok = all(report.ok for report in reports)
    if options.json is not None:
        text = json.dumps({"ok": is_ok, "reports": [report.to_dict() for report in reports]}, indent=2)
        if options.json == "-":
            say(text)
        else:
            pathlib.Path(options.json).write_text(text + "\n", encoding="utf-8")
    if len(reports) > 1 and options.json != "-" and not options.quiet:
        for report in reports:
            _print_line(report)
    return 0 if is_ok else 1


def _expanded(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """Return the algorithms as texts, each with the text of its neutral settings, if any."""
    shipped = [example for row in SHIPPED.values() for example in row.examples]
    texts = [text for given in options.algorithms for text in (shipped if given == "all" else [given])]
    texts = list(dict.fromkeys(texts))
    if options.neutral is not None and len(texts) > 1:
        raise UsageError(f"--neutral: expected one algorithm, got {len(texts)}: {', '.join(texts)}")
    rows = {text: SHIPPED.get(text.partition("(")[0]) for text in texts}
    return [(text, options.neutral or (row.neutral if row else None)) for text, row in rows.items()]


def _prepared(text: str, neutral: str | None, options: argparse.Namespace) -> Trials:
    """Return the trials of one algorithm; every error in the options is raised here."""
    algorithm, idle = subject(text), None if neutral is None else subject(neutral)
    try:
        return trials(
            algorithm,
            neutral=idle,
            tasks=listed(options.tasks),
            laws=listed(options.laws),
            max_examples=options.max_examples,
            seed=options.seed,
        )
    except (TypeError, ValueError) as error:
        raise UsageError(one_line(error).replace("check: max_examples", "--max-examples")) from error


def _reported(prepared: Trials, options: argparse.Namespace) -> Report:
    """Try the laws on one algorithm and print the outcome."""
    with _Progress(repr(prepared.subject.algorithm)) as progress, _each_warning_once():
        report = prepared.report(progress)
    if options.json == "-":
        return report
    if options.quiet:
        _print_line(report)
    else:
        _print(report)
    return report


def _print_line(report: Report) -> None:
    failed = ", ".join(outcome.law for outcome in report.failed)
    say(f"{report.algorithm}: {report.summary}{': ' if failed else ''}{failed}", flush=True)


def _print(report: Report) -> None:
    """Print a report, in colours on a terminal, otherwise as plain text."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console(highlight=False).print(report, "", sep="\n")
            return
    say(f"{report}\n", flush=True)


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Show each warning only once, because a method is tried many times and would repeat it."""
    seen: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *_: object) -> None:
        text = f"{category.__name__}: {message}"
        if text not in seen:
            say(text, file=sys.stderr)
        seen.add(text)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


class _Progress:
    """A line on standard error with the current law, if standard error is a terminal."""

    def __init__(self, name: str) -> None:
        self._name, self._is_shown = name, sys.stderr.isatty()

    def __call__(self, law: str, index: int, total: int) -> None:
        """Show the law."""
        if self._is_shown:
            width = max(shutil.get_terminal_size().columns - 1, 20)
            print(f"\r\x1b[K{f'[{index}/{total}] {law}  {self._name}'[:width]}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def show_conflicts(options: argparse.Namespace) -> None:
    """Print the pairs of listed algorithms that do not commute, and the rule that decides their order."""
    found = chosen(options, {} if options.run is None else settings_of(pathlib.Path(options.run)))
    text = (
        options.algorithms
        if options.algorithms is not None
        else completed(found, allowed=allowed_by(options))[0]["algorithms"]
    )
    entries = [] if text.strip().lower() == "none" else listed(text) or []
    try:
        subjects = [subject(entry) for entry in entries]
    except UsageError as error:
        raise UsageError(f"--algorithms: {error}") from error
    threads = 1 if options.threads is None else options.threads
    with fixed_arithmetic(threads), notes_elsewhere(), reported_as("--algorithms"):
        say(conflicts(subjects))
