"""Commands about methods: `algorithms`, `plan`, and `check`, which tries the laws on them."""

import importlib
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import environ
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from purecompose._support import specs
from purecompose._support.messages import say
from purecompose.algorithms import BY_NAME, COMBINED, FACTORIES, GROUPS
from purecompose.cli.options import List, Number, Run, Shown, Time, UsageError, one_line, reported_as
from purecompose.cli.own import imported
from purecompose.cli.settings import Given, settings_of
from purecompose.cli.setup import TEXT, Setup, arithmetic_of, completed, prepare
from purecompose.core.state import State


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
    return setup.state.replace(timestamp=now.advance_by(int(batches), samples, samples * _tokens(setup)))


def _tokens(setup: Setup) -> int:
    """Return the number of tokens per example, 0 for images."""
    return setup.data.in_shape[0] if setup.kind is TEXT else 0


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
    testing = _testing()
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


def _testing() -> Any:
    """Return `purecompose.testing`, which needs Hypothesis and which other commands do not import."""
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        raise ImportError('check needs hypothesis; install it with `pip install "purecompose[testing]"`') from error
    return importlib.import_module("purecompose.testing")


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
