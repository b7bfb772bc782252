"""Commands about methods: `algorithms`, `plan`, and `check`, which tries the laws on them."""

import importlib
import inspect
import json as json_format
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from os import environ
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from purecompose._support import specs
from purecompose._support.messages import say
from purecompose.algorithms import FACTORIES, GROUPS
from purecompose.cli.data import TEXT
from purecompose.cli.options import List, Number, Run, Shown, Time, UsageError, check_target, one_line, reported_as
from purecompose.cli.own import imported
from purecompose.cli.settings import Given, Settings, settings_of
from purecompose.cli.setup import Setup, arithmetic_of, completed, prepare
from purecompose.core.state import State
from purecompose.time import Time as Moment, TimeUnit
from purecompose.time.units import snapped


Algorithm = Annotated[str, Shown("ALGORITHM", tuple(sorted(FACTORIES)))]


def algorithms(name: Annotated[str, Shown("NAME", tuple(sorted(FACTORIES)))] | None = None) -> None:
    """List the algorithms, or show the card of one.

    Args:
        name: The algorithm to show.

    Examples:
        python -m purecompose algorithms mixup
    """
    if name is not None:
        with reported_as("NAME"):
            specs.check_name(name, FACTORIES, "algorithm")
        factory = FACTORIES[name]
        say(textwrap.fill(specs.describe(name, inspect.signature(factory)), 100))
        for text in (inspect.getdoc(factory), inspect.getdoc(sys.modules[factory.__module__])):
            say(f"\n{re.sub(r' +# doctest: .*', '', text or '')}")
        say(f"\nMore, with an example: docs/algorithms/{name}.md in the repository.")
        return
    width = max(map(len, FACTORIES))
    for group, factories in GROUPS.items():
        say(group)
        for factory in factories:
            summary = (inspect.getdoc(factory) or "").partition("\n")[0].partition("; see")[0].rstrip(".")
            say(f"  {factory.__name__:<{width}}  {summary}")
        say()
    say("`python -m purecompose algorithms NAME` prints the details of one.")


def plan(run: Run | None = None, *, given: Given, at: Time = "0ba", conflicts: bool = False) -> None:
    """Show which algorithms would act at which events, in what order and why.

    Args:
        run: Folder of a run whose settings to use.
        given: The settings of the run.
        at: Point of the run: 0.6dur, 5ep, ...
        conflicts: Show instead which pairs of --algorithms (also my_module:my_algorithm) do not commute, and what
            decides their order.

    Examples:
        python -m purecompose plan --algorithms mixup,cutmix --at 0.6dur
        python -m purecompose plan runs/a
        python -m purecompose plan --conflicts --algorithms mixup,label_smoothing
    """
    found = given.chosen({} if run is None else settings_of(Path(run)))
    if conflicts:
        _show_conflicts(found["algorithms"] if "algorithms" in given.values else None, found, given)
        return
    settings, data = completed(found, allowed=given.allowed)
    with arithmetic_of(settings):
        setup = prepare(settings, data)
        with reported_as("--at"):
            state = _moved(setup, at)
        say(setup.step.plan(state, next(iter(setup.train_data))))


def _moved(setup: Setup, at: str) -> State:
    """Return the state with the counters of a point of its run; nothing else changes."""
    state = setup.state
    batches, length = _in_batches(setup, Moment.of(at)), _in_batches(setup, state.timestamp.run.duration)
    if batches is None or batches < 0:
        raise ValueError(f"{at}: expected a point of the run, such as 0.6dur, 5ep or 100ba")
    if length is not None and batches > length:
        raise ValueError(f"{at}: the run ends earlier, after {length:g} batches")
    samples = setup.train_data.batch_size
    return state.replace(timestamp=state.timestamp.advance_by(int(batches), samples, samples * _tokens(setup)))


def _in_batches(setup: Setup, time: Moment | None) -> float | None:
    """Return a time as a number of batches of the loader's size; None if that is not known."""
    run, samples = setup.state.timestamp.run, setup.train_data.batch_size
    if time is None or (time.unit is TimeUnit.TOKEN and not _tokens(setup)):
        return None
    if time.unit is TimeUnit.DURATION:
        length = _in_batches(setup, run.duration)
        return None if length is None else snapped(time.value * length)
    sizes = {TimeUnit.SAMPLE: samples, TimeUnit.TOKEN: samples * _tokens(setup)}
    return time.value / sizes[time.unit] if time.unit in sizes else run.in_batches(time)


def _tokens(setup: Setup) -> int:
    """Return the number of tokens per example, 0 for images."""
    return setup.data.in_shape[0] if setup.kind is TEXT else 0


def check(
    algorithms: list[Annotated[str, Shown("ALGORITHM", ("all", *sorted(FACTORIES)))]],
    *,
    neutral: Algorithm | None = None,
    tasks: List | None = None,
    laws: List | None = None,
    max_examples: Number = 25,
    seed: Number = 0,
    json: Annotated[str, Shown("FILE")] | None = None,
    quiet: bool = False,
) -> int:
    """Test your own algorithm against the laws that every algorithm keeps.

    Args:
        algorithms: Your own, my_module:my_algorithm, a call of a shipped one such as "mixup(0.2)", or all for all
            shipped ones.
        neutral: The same algorithm with settings that should change nothing.
        tasks: Names of tasks, separated by commas (default: all that the algorithm accepts).
        laws: Names of laws, separated by commas (default: all that apply).
        max_examples: Cases for each law.
        seed: Seed of the cases.
        json: Write the reports to this file as JSON; - for standard output, instead of tables.
        quiet: Print one line for each algorithm.

    Examples:
        python -m purecompose check my_module:my_algorithm
        python -m purecompose check "mixup(0.2)" --laws draws_keyed,compiled_agrees
    """
    if json not in (None, "-"):
        check_target("--json", json)
    testing = _testing("check")
    shipped = [example for row in testing.shipped.SHIPPED.values() for example in row.examples]
    texts = list(dict.fromkeys(text for given in algorithms for text in (shipped if given == "all" else [given])))
    if neutral is not None and len(texts) > 1:
        raise UsageError(f"--neutral: expected one algorithm, got {len(texts)}: {', '.join(texts)}")
    # The output of an algorithm's module must not mix with the JSON on standard output.
    with _notes_elsewhere(), redirect_stdout(sys.stderr) if json == "-" else nullcontext():
        prepared = []
        for text in texts:
            row = testing.shipped.SHIPPED.get(text.partition("(")[0])
            idle = neutral or (row.neutral if row else None)
            with reported_as(""):
                prepared.append(
                    testing.checking.Trials(
                        _subject(text, testing),
                        neutral=None if idle is None else _subject(idle, testing),
                        tasks=_listed(tasks),
                        laws=_listed(laws),
                        max_examples=max_examples,
                        seed=seed,
                    )
                )
        reports = [_tried(one, is_shown=json != "-", quiet=quiet) for one in prepared]
    is_ok = all(report.ok for report in reports)
    if json is not None:
        written = {"ok": is_ok, "reports": [report.to_dict() for report in reports]}
        text = json_format.dumps(written, indent=2)
        if json == "-":
            say(text)
        else:
            Path(json).write_text(text + "\n", encoding="utf-8")
    if len(reports) > 1 and json != "-" and not quiet:
        for report in reports:
            _print_line(report)
    return 0 if is_ok else 1


def _tried(prepared: Any, *, is_shown: bool, quiet: bool) -> Any:
    """Try the laws on one algorithm and print the outcome; a terminal shows the current law meanwhile."""
    from rich.console import Console
    from rich.text import Text

    name = repr(prepared.subject.algorithm)
    with Console(stderr=True).status("") as status, warnings.catch_warnings():
        warnings.simplefilter("once")  # a method is tried many times and would repeat its warnings
        report = prepared.report(lambda law, i, total: status.update(Text(f"[{i}/{total}] {law}  {name}")))
    if is_shown and quiet:
        _print_line(report)
    elif is_shown:
        say(f"{report}\n", flush=True)
    return report


def _print_line(report: Any) -> None:
    failed = ", ".join(outcome.law for outcome in report.failed)
    say(f"{report.algorithm}: {report.summary}{': ' if failed else ''}{failed}", flush=True)


def _show_conflicts(text: str | None, found: dict[str, Any], given: Given) -> None:
    """Print the pairs of listed algorithms that do not commute, and the rule that decides their order."""
    testing = _testing("plan --conflicts")
    text = completed(found, allowed=given.allowed)[0].algorithms if text is None else text
    threads = Settings(threads=given.values.get("threads", 1))
    with arithmetic_of(threads), reported_as("--algorithms"), _notes_elsewhere():
        calls = specs.parse(text or "")
        subjects = [_subject(str(call) if call.args or call.kwargs else call.name, testing) for call in calls]
        say(testing.conflicts(subjects))


def _testing(command: str) -> Any:
    """Return `purecompose.testing`, which needs Hypothesis and which other commands do not import."""
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f'{command} needs hypothesis; install it with `pip install "purecompose[testing]"`'
        ) from error
    return importlib.import_module("purecompose.testing")


def _subject(text: str, testing: Any) -> Any:
    """Return the algorithm that a text names: `my_module:my_algorithm`, or a shipped one as a call."""
    is_own = ":" in text.partition("(")[0]
    try:
        if is_own:
            imported(text)  # its errors are more precise
        return testing.subject.Subject.of(text)
    except (specs.SpecError, ValueError) as error:
        is_unknown = not is_own and text.partition("(")[0] not in FACTORIES
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
