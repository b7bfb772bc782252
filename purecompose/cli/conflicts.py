"""`plan --conflicts`: find algorithms that do not commute. Imported only when it runs, because it needs Hypothesis."""

import argparse
from pathlib import Path

from purecompose._support.terminal import say
from purecompose.cli.own import allowed_by
from purecompose.cli.resolve import listed, notes_elsewhere, subject
from purecompose.cli.settings import UsageError
from purecompose.cli.setup import completed, fixed_arithmetic, reported_as
from purecompose.cli.sources import chosen, settings_of
from purecompose.testing.conflicts import conflicts


def show_conflicts(options: argparse.Namespace) -> None:
    """Print the pairs of listed algorithms that do not commute, and the rule that decides their order."""
    found = chosen(options, {} if options.run is None else settings_of(Path(options.run)))
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
