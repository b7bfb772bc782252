"""check: every outcome a law can have, repeatability, and the text of the report."""

from typing import Any

import pytest
import torch
from hypothesis import assume

from purecompose import Algorithm, Event, State, after, algorithms as alg, between, identity, on
from purecompose.testing.case import Case, Subject
from purecompose.testing.checking import check
from purecompose.testing.law import Broken, Law, LawViolation, NotJudged
from purecompose.testing.report import Outcome, Report, Status
from purecompose.testing.suite import purity
from purecompose.testing.tasks import TASKS, Task, make_mlp
from tests.helpers import changing


PURITY = (purity.input_untouched, purity.deterministic, purity.global_state_kept)


def scaled(state: State, factor: Any) -> State:
    return state.replace(params={name: factor * param for name, param in state.params.items()})


def decay(event: Event, state: State) -> State:
    del event
    return scaled(state, 0.99)


LAWFUL = Algorithm("decay", on(Event.BATCH_END), decay)
IDLE = Algorithm("idle", lambda event, state: False, decay)


def make_growing() -> Algorithm:
    """Make an algorithm that remembers in a closure."""
    seen: list[Event] = []

    def apply(event: Event, state: State) -> State:
        seen.append(event)
        return scaled(state, 1 - 0.001 * len(seen))

    return Algorithm("growing", on(Event.BATCH_END), apply, config={"rate": 0.001})


def write_in_place(event: Event, state: State) -> State:
    del event
    next(iter(state.params.values())).mul_(0.5)
    return state


IN_PLACE = Algorithm("in_place", on(Event.AFTER_DATALOADER), write_in_place)


def images_alone(event: Event, state: State) -> State:
    del event
    if state.inputs.ndim != 4:
        raise ValueError("expected images\nof four dimensions")
    return state


IMAGES_ALONE = Algorithm("images_alone", on(Event.AFTER_DATALOADER), images_alone)


def law_of(judge: Any, **options: Any) -> Law:
    """Return a law from a function of a case."""
    return Law("a_law", "it holds", "nothing", lambda subject, case: judge(case), **options)


def outcome_of(algorithm: Algorithm, law: Law | str, **options: Any) -> Outcome:
    """Return the outcome of one law on a task."""
    options = {"tasks": ["vectors"], "laws": [law], **options}
    (outcome,) = check(algorithm, **options).outcomes
    return outcome


def test_a_lawful_algorithm_keeps_the_laws() -> None:
    report = check(LAWFUL, laws=PURITY, max_examples=5)
    assert report.ok and report.broken == () and report.refused == {} and report.tasks == tuple(TASKS)
    found = [(o.law, o.status, o.num_cases, o.num_acted) for o in report.outcomes]
    assert found == [(one.name, Status.KEPT, 5, 5) for one in PURITY]


def test_a_broken_law_is_shown_at_its_simplest_case_with_the_guilty_event() -> None:
    def small_batches(case: Case) -> bool:
        if case.batch_size > 3 and case.num_batches > 1:
            raise Broken("too large", where="batch")
        return True

    outcome = outcome_of(LAWFUL, law_of(small_batches), tasks=["vectors", "soft"], max_examples=50)
    assert isinstance(outcome.error, LawViolation)
    case = outcome.error.case
    assert (case.batch_size, case.num_batches, case.task, case.others) == (4, 2, TASKS["vectors"], ())
    assert "to do" in outcome.details and repr(case) in outcome.details
    growing = outcome_of(make_growing(), "deterministic")
    assert (growing.status, growing.reason) == (Status.BROKEN, "at BATCH_END: params['0.weight']")


def test_a_failure_that_happens_only_once_is_reported_as_it_was_seen() -> None:
    calls: list[Case] = []

    def third_time(case: Case) -> bool:
        calls.append(case)
        if len(calls) == 3:
            raise Broken("the third time", where="count")
        return True

    outcome = outcome_of(LAWFUL, law_of(third_time), max_examples=10)
    assert outcome.status is Status.BROKEN and outcome.num_cases == 3
    assert isinstance(outcome.error, LawViolation) and outcome.error.case == calls[2]


def test_cases_that_a_law_cannot_judge_are_reported_with_the_reason() -> None:
    def judged(bound: int) -> Law:
        def judge(case: Case) -> bool:
            if case.batch_size > bound:
                raise NotJudged("the batch is too large")
            return True

        return law_of(judge)

    outcome = outcome_of(LAWFUL, judged(3), max_examples=20)
    assert outcome.status is Status.KEPT and 0 < outcome.num_acted < outcome.num_cases == 20
    num = outcome.num_cases - outcome.num_acted
    assert outcome.reason == f"not judged in {num} of 20 cases: the batch is too large"
    none = outcome_of(LAWFUL, judged(0), max_examples=3)
    assert (none.status, none.reason) == (Status.SKIPPED, "not judged in 3 of 3 cases: the batch is too large")


def test_a_law_is_blocked_by_the_law_that_owns_the_error() -> None:
    report = check(IN_PLACE, laws=["deterministic", "input_untouched"], tasks=["vectors"], max_examples=5)
    assert report["input_untouched"].status is Status.BROKEN
    blocked = report["deterministic"]
    assert blocked.status is Status.ERROR and "breaks input_untouched first" in blocked.reason
    assert blocked.num_acted == 0 and not report.ok
    # Also if that law was not requested; its remedy is shown.
    alone = check(IN_PLACE, laws=["deterministic"], tasks=["vectors"], max_examples=2)
    assert alone["deterministic"].reason == blocked.reason and "make new tensors" in str(alone)


def test_an_error_is_shown_once_with_the_authors_line_and_case() -> None:
    def refuse_three(event: Event, state: State) -> State:
        if state.num_examples == 3:
            raise KeyError("three")
        return state

    report = check(Algorithm("short", on(Event.AFTER_DATALOADER), refuse_three), laws=PURITY, tasks=["vectors"])
    assert [o.status for o in report.outcomes] == [Status.ERROR] * 3
    details = report["deterministic"].details
    assert "test_checking.py:" in details and 'raise KeyError("three")' in details and "batch_size=3" in details
    assert details.count("in short at Event.AFTER_DATALOADER") == 1
    assert "input_untouched, deterministic, global_state_kept could not be tried" in " ".join(str(report).split())


def acting(idle: str | None = None) -> Law:
    def judge(subject: Subject, case: Case) -> bool:
        step, seen = case.step(subject.algorithm), []
        state = step.init(case.state())
        step.fold(state, case.batch(0), lambda algorithm, *_: seen.append(algorithm.name))
        return subject.name in seen

    return Law("acting", "it acts", "act", judge, idle=idle)


@pytest.mark.parametrize(
    ("algorithm", "law", "status", "reason"),
    [
        (IDLE, acting(), Status.VACUOUS, "it never acted"),
        (IDLE, acting("it has no wish"), Status.SKIPPED, "it has no wish in 2 cases"),
        (Algorithm("surgery", on(Event.INIT), decay), acting(), Status.KEPT, ""),
        (
            Algorithm("outside", on(Event.EPOCH_END), decay),
            acting(),
            Status.SKIPPED,
            "it acts at EPOCH_END only, and at none of them in this law's cases",
        ),
        (identity(), acting(), Status.SKIPPED, "its settings are neutral: it never acts"),
        (identity(), "deterministic", Status.SKIPPED, "its settings are neutral: it never acts"),
    ],
)
def test_a_law_is_kept_only_if_the_algorithm_acted(algorithm: Algorithm, law: Any, status: Status, reason: str) -> None:
    outcome = outcome_of(algorithm, law, max_examples=2)
    assert (outcome.status, outcome.reason) == (status, reason)


def test_a_law_that_takes_long_is_tried_on_few_cases_and_may_discard_some() -> None:
    def picky(case: Case) -> bool:
        assume(case.batch_size % 2 == 0)
        return True

    outcome = outcome_of(LAWFUL, law_of(picky, most_cases=2))
    assert outcome.status is Status.KEPT and outcome.num_acted == outcome.num_cases == 2


def test_only_an_unintended_refusal_of_tasks_fails_the_report() -> None:
    def narrow(state: State) -> State:
        return state.replace(inputs=state.inputs.reshape(len(state.inputs), 4))  # torch's own error elsewhere

    def careful(state: State) -> State:
        if state.inputs.shape[1:] != (4,):
            raise ValueError("expected vectors of four")
        return state

    for apply, is_ok in ((narrow, False), (careful, True)):
        report = check(changing("narrow", Event.BATCH_START, apply), laws=["deterministic"], max_examples=2)
        assert report.ok is is_ok and f"refuses {len(report.refused)} of {len(TASKS)} tasks" in report.summary
        assert ("fails on images" in report.summary) is not is_ok


def test_the_neutral_law_runs_on_the_neutral_settings() -> None:
    skipped = outcome_of(alg.mixup(0.2), "neutral_setting", max_examples=2)
    assert skipped.status is Status.SKIPPED and "--neutral" in skipped.reason
    kept = outcome_of(alg.mixup(0.2), "neutral_setting", neutral="mixup(0)", max_examples=2)
    assert kept.status is Status.KEPT


@pytest.mark.parametrize("when", [None, between("0.5dur", "1dur"), after("30ep")], ids=repr)
def test_refused_tasks_are_left_out_with_the_reason(when: Any) -> None:
    match = on(Event.AFTER_DATALOADER) if when is None else on(Event.AFTER_DATALOADER) & when
    report = check(Algorithm("images_alone", match, images_alone), laws=["deterministic"], max_examples=2)
    assert report.ok and report.tasks == ("images", "bf16_images")
    assert set(report.refused) == set(TASKS) - {"images", "bf16_images"}
    why = report.refused["tokens"]
    assert why.startswith("ValueError: expected images (in images_alone at Event.AFTER_DATALOADER; test_checking.py:")
    assert f"not on {', '.join(report.refused)}: {why}" in " ".join(str(report).split())  # one line for all


def test_a_named_task_and_at_least_one_must_be_accepted() -> None:
    report = check(IMAGES_ALONE, laws=["deterministic"], tasks=["images", "tokens"], max_examples=2)
    assert not report.ok and "refuses 1 of 2 tasks, fails on tokens" in report.summary

    def fail(event: Event, state: State) -> State:
        raise TypeError(f"no {event.value}")

    none = check(Algorithm("fail", on(Event.EPOCH_END), fail))
    assert not none.ok and none.outcomes == () and tuple(none.refused) == none.failed_tasks == tuple(TASKS)
    assert not Report(algorithm="x()").ok


def test_a_task_that_does_not_work_at_all_is_an_error() -> None:
    def no_batch(seed: int, size: int) -> torch.Tensor:
        raise OSError(f"no data {seed} {size}")

    calls: list[int] = []

    def moving(seed: int, size: int) -> object:
        calls.append(seed)
        return TASKS["vectors"].batch(len(calls), size)

    for batch, message in (
        (no_batch, "does not work, without any algorithm: OSError: no data"),
        (lambda seed, size: TASKS["vectors"].batch(seed, 2), "made a batch of 2 examples, asked for 4"),
        (moving, "makes something else each time from the same seed"),
    ):
        with pytest.raises(ValueError, match=f"the task 'own' {message}"):
            check(LAWFUL, tasks=[Task("own", make_mlp, batch)])
    with pytest.raises(ValueError, match="two different tasks are called 'mlp'"):
        check(LAWFUL, tasks=[Task("mlp", make_mlp, TASKS[name].batch) for name in ("vectors", "soft")])


def test_a_task_may_draw_from_the_global_generator() -> None:
    task = Task("drawing", make_mlp, lambda seed, size: (torch.randn(size, 4), torch.randint(3, (size,))))
    assert check(LAWFUL, tasks=[task], laws=["deterministic", "resume_exact"], max_examples=3).ok


def test_an_algorithm_that_ends_the_program_is_reported() -> None:
    def leave(event: Event, state: State) -> State:
        raise SystemExit(0)

    report = check(Algorithm("leaving", on(Event.BATCH_END), leave), tasks=["vectors"], laws=["deterministic"])
    assert not report.ok and "it ended the program: SystemExit(0)" in str(report)


def test_the_same_seed_gives_the_same_cases() -> None:
    cases: list[Case] = []

    def drawn(seed: int) -> list[Case]:
        cases.clear()
        outcome_of(LAWFUL, law_of(lambda case: cases.append(case) is None), seed=seed, max_examples=12)
        return list(cases)

    assert drawn(0) == drawn(0) != drawn(1)


def test_nothing_is_printed_or_changed(capfd, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    check(make_growing(), laws=PURITY, max_examples=3, tasks=["vectors"])
    assert capfd.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), generator) and torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"laws": ["determinstic"]}, ValueError, "did you mean 'deterministic'"),
        ({"tasks": ["vector"]}, ValueError, "did you mean 'vectors'"),
        ({"laws": [3]}, TypeError, r"3 \(int\): expected a Law"),
        ({"tasks": []}, ValueError, "no task given"),
        ({"max_examples": 0}, ValueError, "max_examples: expected an int >= 1, got 0"),
        ({"neutral": 1}, TypeError, r"expected an Algorithm or a text .*, got 1 \(int\)$"),
        ({"neutral": alg.mixup}, TypeError, r"got mixup \(function\); call it, as in mixup\(\)$"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        check(LAWFUL, **arguments)


def test_a_report_is_wrapped() -> None:
    report = check(make_growing(), laws=["deterministic", "input_untouched"], tasks=["vectors"], max_examples=3)
    for width in (60, 120):
        text = report.text(width)
        assert all(len(line) <= width for line in text.splitlines())
        assert "BROKEN" in text and text.splitlines()[-1].startswith("NOT OK: 1 kept, 1 broken (")
