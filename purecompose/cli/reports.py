"""Commands that train nothing: `algorithms`, `plan`, `check`, which tries laws on methods, `report` and `runs`."""

import importlib
import inspect
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from json import dumps
from os import environ
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from purecompose._support import specs
from purecompose._support.files import to_json
from purecompose._support.messages import required, say, table, warn
from purecompose.algorithms import BY_NAME, COMBINED, FACTORIES, GROUPS
from purecompose.cli.options import (
    File,
    Folder,
    List,
    Number,
    Run,
    Shown,
    Time,
    UsageError,
    check_target,
    imported,
    one_line,
    reported_as,
)
from purecompose.cli.results import KeptRun, Which, at_checkpoint, predictions_of
from purecompose.cli.settings import Given, settings_of
from purecompose.cli.setup import TEXT, Setup, arithmetic_of, completed, prepare
from purecompose.core.state import State
from purecompose.errors import CheckpointError
from purecompose.observers.progress import describe_seconds
from purecompose.records import Predictions, list_runs, read_run, write_report
from purecompose.records.listing import differing
from purecompose.records.report import number


Algorithm = Annotated[str, Shown("ALGORITHM")]


def algorithms(name: Algorithm | None = None) -> None:
    """List the algorithms, or show the card of one.

    Args:
        name: The algorithm to show.

    Examples:
        python -m purecompose algorithms mixup
    """
    if name is not None:
        with reported_as("ALGORITHM"):
            specs.check_name(name, BY_NAME, "algorithm")
        factory = BY_NAME[name]
        say(textwrap.fill(specs.describe(name, inspect.signature(factory)), 100))
        for text in (inspect.getdoc(factory), inspect.getdoc(sys.modules[factory.__module__])):
            say(f"\n{re.sub(r' +# doctest: .*', '', text or '')}")
        page = f"algorithms/{name}" if name in FACTORIES else "algorithms"
        say(f"\nMore, with an example: the page {page} of the documentation.")
        return
    width = max(map(len, BY_NAME))
    for group, factories in {**GROUPS, "Made of methods": tuple(COMBINED.values())}.items():
        say(group)
        for factory in factories:
            summary = (inspect.getdoc(factory) or "").partition("\n")[0].partition("; see")[0].rstrip(".")
            say(f"  {factory.__name__:<{width}}  {summary}")
        say()
    say("`python -m purecompose algorithms NAME` prints the details of one.")


def plan(run: Run | None = None, *, given: Given, at: Time = "0ba") -> None:
    """Show which algorithms would act at which events, in what order and why.

    Args:
        run: Folder of a run whose settings to use.
        given: The settings of the run.
        at: Point of the run: 0.6dur, 5ep, ...

    Examples:
        python -m purecompose plan --algorithms mixup,cutmix --at 0.6dur
        python -m purecompose plan runs/a
    """
    found = given.chosen({} if run is None else settings_of(Path(run)))
    settings, data = completed(found, allowed=given.allowed)
    with arithmetic_of(settings):
        setup = prepare(settings, data)
        with reported_as("--at"):
            state = _moved(setup, at)
        say(setup.step.plan(state, next(iter(setup.train_data))))


def _moved(setup: Setup, at: str) -> State:
    """Return the state with the counters of a point of its run; nothing else changes."""
    now, samples = setup.state.timestamp, setup.train_data.batch_size
    batches = now.run.in_batches(at)
    if batches is None or batches < 0:
        raise ValueError(f"{at}: expected a point of the run in epochs or batches, such as 5ep or 100ba")
    if now.run.total_batches is not None and batches > now.run.total_batches:
        raise ValueError(f"{at}: the run ends earlier, after {now.run.total_batches:g} batches")
    tokens = samples * setup.data.in_shape[0] if setup.kind is TEXT else 0
    return setup.state.replace(timestamp=now.advance_by(int(batches), samples, tokens))


def check(
    algorithms: list[Algorithm],
    *,
    neutral: Algorithm | None = None,
    tasks: List | None = None,
    laws: List | None = None,
    max_examples: Number = 25,
    seed: Number = 0,
) -> int:
    """Test your own algorithm against the laws that every algorithm keeps.

    Args:
        algorithms: Your own, my_module:my_algorithm, or a call of a shipped one such as "mixup(0.2)".
        neutral: The same algorithm with settings that should change nothing.
        tasks: Names of tasks, separated by commas (default: all that the algorithm accepts).
        laws: Names of laws, separated by commas (default: all that apply).
        max_examples: Cases for each law, on all tasks; 25 take minutes, and 3 are enough for a first look.
        seed: Seed of the cases.

    Examples:
        python -m purecompose check my_module:my_algorithm
        python -m purecompose check "mixup(0.2)" --laws draws_keyed,compiled_agrees

    A case takes one to three steps at a point of a run of one to four epochs with one to three batches each, or of a
    longer run if the algorithm acts only later.
    """
    required("check", "'purecompose[testing]'", "hypothesis")
    testing = importlib.import_module("purecompose.testing")  # which other commands do not need
    texts = list(dict.fromkeys(algorithms))
    if neutral is not None and len(texts) > 1:
        raise UsageError(f"--neutral: expected one algorithm, got {len(texts)}: {', '.join(texts)}")
    with _notes_elsewhere():
        prepared = []
        for text in texts:
            with reported_as(""):
                prepared.append(
                    testing.checking.Trials(
                        _subject(text, testing),
                        neutral=None if neutral is None else _subject(neutral, testing),
                        tasks=_listed(tasks),
                        laws=_listed(laws),
                        max_examples=max_examples,
                        seed=seed,
                    )
                )
        reports = [_tried(one) for one in prepared]
    if len(reports) > 1:
        for report in reports:
            failed = ", ".join(outcome.law for outcome in report.failed)
            say(f"{report.algorithm}: {report.summary}{': ' if failed else ''}{failed}", flush=True)
    return 0 if all(report.ok for report in reports) else 1


def _tried(prepared: Any) -> Any:
    """Try the laws on one algorithm and print the outcome; a terminal shows the current law meanwhile."""
    from rich.console import Console
    from rich.text import Text

    name = repr(prepared.subject.algorithm)
    with Console(stderr=True).status("") as status, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(renamed|its_twin) ")  # copies of the method, which repeat its warnings
        report = prepared.report(lambda law, i, total: status.update(Text(f"[{i}/{total}] {law}  {name}")))
    say(f"{report}\n", flush=True)
    return report


def _subject(text: str, testing: Any) -> Any:
    """Return the algorithm that a text names: `my_module:my_algorithm`, or a shipped one as a call."""
    name = text.partition("(")[0]
    is_own = ":" in name
    try:
        if is_own:
            imported(text)  # its errors are more precise
        return testing.Subject.of(text)
    except (specs.SpecError, ValueError) as error:
        is_unknown = not is_own and name not in BY_NAME
        raise ValueError(f"{error}{'; write your own as my_module:my_algorithm' if is_unknown else ''}") from error
    except Exception as error:  # of the user's function
        raise ValueError(f"{text}: {type(error).__name__}: {one_line(error)}") from error


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [entry.strip() for entry in text.split(",") if entry.strip()]


@contextmanager
def _notes_elsewhere() -> Iterator[None]:
    """Let Hypothesis store its notes on modules in a temporary folder instead of the user's, unless one is set."""
    from hypothesis import configuration

    with TemporaryDirectory() as folder:
        is_set = "HYPOTHESIS_STORAGE_DIRECTORY" in environ
        configuration.set_hypothesis_home_dir(None if is_set else folder)
        try:
            yield
        finally:
            configuration.set_hypothesis_home_dir(None)


def report(
    runs: list[Run],
    *,
    out: File = "report.html",
    checkpoint: Which = "newest",
    curves_only: bool = False,
    allow_imports: bool = False,
) -> None:
    """Write a page about one or several runs: curves, settings that differ, mistakes.

    Args:
        runs: Folders of runs.
        out: HTML file.
        checkpoint: Name of the checkpoint whose predictions are shown, or one of these.
        curves_only: Leave out the confusion matrix and the worst examples, which need the data and a checkpoint.
        allow_imports: Import code (my_module:name) that the settings of a run name.

    Examples:
        python -m purecompose report runs/a runs/b --out report.html
    """
    check_target("--out", out)
    with _reported():
        found = [read_run(Path(path)) for path in runs]
        shown = [] if curves_only else [_predictions(path, checkpoint, allow_imports) for path in runs]
        write_report(found, Path(out), predictions=shown)
    say(f"the report of {len(runs)} run{'s' * (len(runs) > 1)} in {out}")


def _predictions(run: str, checkpoint: str, allow_imports: bool) -> Predictions | None:
    """Return what a run predicts for its test images; `None`, with a warning, if it cannot be loaded."""
    kept = KeptRun(run, data=None, allow_imports=allow_imports)
    try:
        settings, data = kept.completed()
        with arithmetic_of(settings):
            setup, state, _ = at_checkpoint(run, checkpoint, settings, data)
            return predictions_of(setup, state)
    except (UsageError, CheckpointError, ImportError, OSError, TypeError) as error:
        warn(f"{run}: without confusion matrix and worst examples: {one_line(error)}")
        return None


@contextmanager
def _reported() -> Iterator[None]:
    """Turn an error about runs or files into a `UsageError` of one line."""
    try:
        yield
    except (OSError, ValueError) as error:
        text = one_line(error)
        for prefix in ("read_run: ", "write_report: ", "list_runs: "):
            text = text.removeprefix(prefix)
        raise UsageError(text) from error


def runs(folder: Folder = "runs", *, sort: Annotated[str, Shown("NAME")] | None = None, json: bool = False) -> None:
    """List the runs in a folder: their progress, metrics and the settings that differ.

    Args:
        folder: The folder; its subfolders are searched.
        sort: Metric, from the best to the worst, or setting; -NAME reverses it (default: the newest first).
        json: Print one line of JSON per run.

    Examples:
        python -m purecompose runs runs --sort eval/accuracy
    """
    with _reported():
        rows = list_runs(folder, sort=sort)
    if json:
        for row in rows:
            say(dumps(to_json(row)))
        return
    if not rows:
        say(f"no runs in {folder}")
        return
    metrics = list(dict.fromkeys(name for row in rows for name in row["best"]))
    head = ["run", "status", "done", *(f"{name} (best)" for name in metrics), "time", "started", "settings that differ"]
    width = shutil.get_terminal_size((110, 24)).columns  # a wide one has room for the settings
    say(table(head, [_cells(row, metrics, one) for row, one in zip(rows, differing(rows), strict=True)], width=width))


def _cells(row: Mapping[str, Any], metrics: Sequence[str], settings: Mapping[str, str]) -> list[str]:
    known = [name for name in metrics if name in row["best"]]
    values = {name: f"{number(row['metrics'].get(name), name)} ({number(row['best'][name], name)})" for name in known}
    own = "; ".join(f"{name}={text if len(text) <= 80 else f'{text[:77]}...'}" for name, text in settings.items())
    done = "-" if row["progress"] is None else f"{row['progress']:.0%}"
    return [
        *(row["name"], row["status"], done),
        *(values.get(name, "-") for name in metrics),
        *(describe_seconds(row["seconds"]), row["started"][:16].replace("T", " "), own),
    ]
