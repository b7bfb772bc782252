"""check, and laws as pytest tests: every law that applies to an algorithm, tried on generated cases."""

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import torch

from purecompose import optim
from purecompose._support.specs import check_whole, did_you_mean
from purecompose.core.algorithm import Algorithm
from purecompose.core.separable import check_outputs
from purecompose.core.state import State
from purecompose.testing.attempt import NEUTRAL, Attempt, Refusal, refusal, search
from purecompose.testing.case import COMPANY, Subject
from purecompose.testing.law import Law
from purecompose.testing.report import Outcome, Report, Status
from purecompose.testing.strategies import cases
from purecompose.testing.suite import LAWS
from purecompose.testing.tasks import TASKS, Task


Named = TypeVar("Named", Law, Task)


def chosen(kind: str, given: Iterable[Any], known: Mapping[str, Named], wanted: type[Named]) -> tuple[Named, ...]:
    """Return the chosen laws or tasks, given as names or objects, in order, without duplicates."""
    given = (given,) if isinstance(given, (str, wanted)) else tuple(given)
    if not given:
        raise ValueError(f"no {kind} given: expected at least one of {', '.join(known)}")
    found = tuple(dict.fromkeys(_named(kind, item, known, wanted) for item in given))
    twice = [name for name, count in Counter(item.name for item in found).items() if count > 1]
    if twice:
        raise ValueError(f"two different {kind}s are called {twice[0]!r}: give one of them another name")
    return found


def _named(kind: str, item: Any, known: Mapping[str, Named], wanted: type[Named]) -> Named:
    if isinstance(item, wanted):
        return item
    if not isinstance(item, str):
        raise TypeError(f"{item!r} ({type(item).__name__}): expected a {wanted.__name__} or the name of a {kind}")
    if item not in known:
        hint = did_you_mean(item, known)
        raise ValueError(f"no {kind} is called {item!r};{hint} {'K' if hint else 'k'}nown: {', '.join(known)}")
    return known[item]


_NO_NEUTRAL = "no neutral settings given, such as neutral=mixup(0.0) in Python or --neutral 'mixup(0.0)'"

Progress = Callable[[str, int, int], None]
"""A function that is called with the name of each law before it is tried, its number from 1, and the total."""


def check(
    algorithm: Algorithm | Subject | str,
    *,
    neutral: Algorithm | Subject | str | None = None,
    tasks: Iterable[Task | str] | None = None,
    laws: Iterable[Law | str] | None = None,
    max_examples: int = 25,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Try every law that applies on an algorithm.

    Nothing is printed; Hypothesis keeps its own notes in a folder `.hypothesis`. In the same program, the same seed
    produces the same cases. The work runs on one thread, which is faster for networks of this size.

    Args:
        algorithm: The algorithm, or a text: `"my_module:my_algorithm"`, `"mixup(0.2)"`. With a text, laws that need
            a new process apply as well.
        neutral: The same algorithm with settings that should change nothing, such as `mixup(0.0)`.
        tasks: The tasks, or their names in `TASKS`; by default all that the algorithm accepts.
        laws: The laws, or their names in `LAWS`; by default all. Create your own laws with `define_law`.
        max_examples: Number of cases for each law.
        seed: Seed of the cases.
        progress: Function that is called with the name of each law before it is tried, its number from 1, and the
            total.

    Returns:
        The report; `report.ok` is true if all laws are kept, and `print(report)` shows the details.

    Example:
        >>> report = check("label_smoothing(0.1)", laws=["deterministic"], tasks=["vectors"], max_examples=3)
        >>> report.ok, report["deterministic"].status.value
        (True, 'kept')
    """
    trials = Trials(algorithm, neutral=neutral, tasks=tasks, laws=laws, max_examples=max_examples, seed=seed)
    return trials.report(progress)


class Trials:
    """An algorithm, and the laws to try on it; the arguments are those of `check`."""

    def __init__(
        self,
        algorithm: Algorithm | Subject | str,
        *,
        neutral: Algorithm | Subject | str | None = None,
        tasks: Iterable[Task | str] | None = None,
        laws: Iterable[Law | str] | None = None,
        max_examples: int = 25,
        seed: int = 0,
    ) -> None:
        self.max_examples, self.seed = check_whole(max_examples, "check: max_examples", 1), seed
        self.subject = Subject.of(algorithm)
        if self.subject.name.startswith(COMPANY):
            raise ValueError(
                f"{self.subject.name!r}: names that begin with {COMPANY!r} are those of the laws' companions"
            )
        self.neutral = None if neutral is None else Subject.of(neutral)
        self.laws = chosen("law", LAWS if laws is None else laws, {law.name: law for law in LAWS}, Law)
        self.candidates = chosen("task", TASKS.values() if tasks is None else tasks, TASKS, Task)
        self.tasks_were_named = tasks is not None

    @cached_property
    def refusals(self) -> Mapping[Task, Refusal]:
        """The reasons why the algorithm does not accept a task."""
        with _one_thread():
            found = {task: refusal(task, self.subject.algorithm, self._owner_of) for task in self.candidates}
        return {task: why for task, why in found.items() if why is not None}

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that the algorithm accepts."""
        return tuple(task for task in self.candidates if task not in self.refusals)

    @property
    def refused(self) -> Mapping[str, str]:
        """The reasons why it does not accept the other tasks, by task name."""
        return {task.name: refused.reason for task, refused in self.refusals.items()}

    @property
    def failed_tasks(self) -> tuple[str, ...]:
        """The tasks whose refusal is a failure: all if the user chose them or none is left, else unintended ones."""
        is_any = self.tasks_were_named or not self.tasks
        return tuple(task.name for task, refused in self.refusals.items() if is_any or not refused.is_meant)

    def report(self, progress: Progress | None = None) -> Report:
        """Try all laws, if there is a task to try them on."""
        start, outcomes = time.perf_counter(), []
        for index, law in enumerate(self.laws if self.tasks else (), 1):
            if progress is not None:
                progress(law.name, index, len(self.laws))
            outcomes.append(self.judge(law))
        return Report(
            algorithm=repr(self.subject.algorithm),
            outcomes=tuple(outcomes),
            tasks=tuple(task.name for task in self.tasks),
            refused=self.refused,
            failed_tasks=self.failed_tasks,
            max_examples=self.max_examples,
            seed=self.seed,
            seconds=time.perf_counter() - start,
        )

    def judge(self, law: Law) -> Outcome:
        subject = self.neutral if law.name == NEUTRAL else self.subject
        unsuited = {task: why for task in self.tasks if (why := law.unsuited(task)) is not None}
        skipped = _NO_NEUTRAL if subject is None else law.exempt(subject.algorithm)
        if skipped is None and len(unsuited) == len(self.tasks):
            skipped = f"on no task: {'; '.join(dict.fromkeys(unsuited.values()))}"
        if subject is None or skipped is not None:
            return Outcome(law=law.name, promise=law.promise, status=Status.SKIPPED, reason=skipped or "")
        start, attempt = time.perf_counter(), Attempt(law, subject, self._owner_of)
        suited = [task for task in self.tasks if task not in unsuited]
        with _one_thread():
            num = min(self.max_examples, law.most_cases or self.max_examples)
            found = search(cases(suited, self.subject.algorithm), attempt, max_examples=num, seed=self.seed)
            return attempt.outcome(found, start)

    def _owner_of(self, error: Exception) -> Law | None:
        """Return the law that an error of the library indicates; laws under trial come first."""
        return next((law for law in (*self.laws, *LAWS) if law.owns and isinstance(error, law.owns)), None)


def check_loss(loss: Callable[..., Any], outputs: Any, targets: Any) -> bool:
    """Check that a loss is the mean over examples, as microbatches, processes and evaluations assume.

    This is what a step checks in its first batches, in double precision where the loss permits it. In a test, draw
    outputs and targets with Hypothesis.

    Args:
        loss: A loss, as for `State.create`.
        outputs: Outputs of a network, a pytree of tensors with a row for each example; at least two examples.
        targets: Targets, likewise.

    Returns:
        True; or False if it cannot be checked: the loss draws by key, writes into buffers, is not a single finite
        number, has no gradient with respect to the outputs, or is declared by `losses.over_batch`.

    Raises:
        ValueError: It is not the mean over examples, weighted by its `num_terms` or divided by its `denominators`.

    Example:
        >>> outputs, targets = torch.randn(6, 3), torch.randn(6, 3)
        >>> check_loss(torch.nn.functional.mse_loss, outputs, targets)
        True
    """
    state = State.create(torch.nn.Linear(1, 1), loss=loss, optimizer=optim.sgd(0.0))
    return check_outputs(state.replace(batch=(outputs, targets), outputs=outputs))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use a single thread: small networks gain nothing from more, and bits depend on the number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class LawTest:
    """A function that tries a law on an algorithm, within one test; afterwards it has the outcome."""

    def __init__(self, trials: Trials, law: Law) -> None:
        self._trials, self._law = trials, law
        self.outcome: Outcome | None = None

    def __call__(self) -> Outcome:
        """Try the law; a second call repeats the result of the first one."""
        __tracebackhide__ = True
        import pytest

        if self._trials.failed_tasks:
            said = [f"  {name}: {why}" for name, why in self._trials.refused.items()]
            pytest.fail("\n".join([f"{self._trials.subject.algorithm!r} does not work on", *said]), pytrace=False)
        self.outcome = outcome = self.outcome or self._trials.judge(self._law)
        if outcome.status is Status.SKIPPED:
            pytest.skip(outcome.reason)
        if outcome.status is Status.BROKEN and outcome.error is not None:
            # Without the frames of Hypothesis and of the law, which are not the author's code.
            raise outcome.error.with_traceback(None) from None
        if not outcome.status.is_ok:
            pytest.fail(outcome.details or f"{outcome.status.value}: {outcome.reason}", pytrace=False)
        return outcome


def laws(algorithm: Algorithm | Subject | str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Return a decorator that turns a function into one pytest test for each law.

        @laws(my_algorithm, neutral=my_neutral_algorithm)
        def test_my_algorithm(law):
            law()

    The body may call `law()` itself, for example after its own preparations. If it does not, the law is tried after the
    body, so an empty body is enough. Other parameters of the decorated function are fixtures, as in any test.

    Args:
        algorithm: As in `check`.
        options: As in `check`: `neutral`, `tasks`, `laws`, `max_examples` and `seed`. Wrong ones are errors when the
            test module is imported.
    """
    trials = Trials(algorithm, **options)

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        import pytest

        @functools.wraps(test)
        def tried(*args: Any, law: Law, **kwargs: Any) -> None:
            __tracebackhide__ = True
            one = LawTest(trials, law)  # a new one each time, because a test may be run again
            test(*args, law=one, **kwargs)
            if one.outcome is None:
                one()

        return pytest.mark.parametrize("law", trials.laws, ids=[law.name for law in trials.laws])(tried)

    return decorate
