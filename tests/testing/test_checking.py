"""check: every outcome a law can have, repeatability, and the text of the report."""

import io
import json
import re
import time

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from purecompose import Algorithm, Event, State, after, algorithms as alg, between, identity, on
from purecompose.testing import search
from purecompose.testing.case import Case
from purecompose.testing.checking import check
from purecompose.testing.law import Broken, Law, LawViolation, NotJudged, define_law
from purecompose.testing.record import run
from purecompose.testing.report import Report, Status
from purecompose.testing.subject import Subject
from purecompose.testing.suite import purity
from purecompose.testing.tasks import TASKS, Task, make_mlp
from tests.sampling import one_in


PURITY = (purity.input_untouched, purity.deterministic, purity.global_state_kept)


def scaled(state: State, factor: float) -> State:
    return state.replace(params={name: factor * param for name, param in state.params.items()})


def decay(event: Event, state: State) -> State:
    del event
    return scaled(state, 0.99)


LAWFUL = Algorithm("decay", on(Event.BATCH_END), decay)


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


def refuse_three(event: Event, state: State) -> State:
    del event
    if state.num_examples == 3:
        raise KeyError("three")
    return state


def images_alone(event: Event, state: State) -> State:
    del event
    if state.inputs.ndim != 4:
        raise ValueError("expected images\nof four dimensions")
    return state


IMAGES_ALONE = Algorithm("images_alone", on(Event.AFTER_DATALOADER), images_alone)


@define_law("batches are small", "take fewer examples")
def small_batches(subject: Subject, case: Case) -> bool:
    """Break depending only on the case, so that the smallest broken case is known."""
    del subject
    if case.batch_size > 3 and case.num_batches > 1:
        raise Broken("too large", where="batch")
    return True


def test_a_lawful_algorithm_keeps_the_laws() -> None:
    report = check(LAWFUL, laws=PURITY, max_examples=5)
    assert report.ok and report.broken == () and report.refused == {}
    assert report.tasks == tuple(TASKS)
    assert [(o.law, o.status, o.num_cases, o.num_acted) for o in report.outcomes] == [
        (one.name, Status.KEPT, 5, 5) for one in PURITY
    ]


def test_a_broken_law_is_shown_at_its_simplest_case() -> None:
    report = check(LAWFUL, laws=[small_batches], tasks=["vectors", "soft"], max_examples=50)
    outcome = report["small_batches"]
    assert not report.ok and report.broken == (outcome,)
    assert isinstance(outcome.error, LawViolation)
    case = outcome.error.case
    assert (case.batch_size, case.num_batches, case.task, case.others) == (4, 2, TASKS["vectors"], ())
    assert outcome.reason.endswith("batch") and "to do" in outcome.details and repr(case) in outcome.details


def test_the_guilty_event_is_named() -> None:
    outcome = check(make_growing(), laws=["deterministic"], tasks=["vectors"])["deterministic"]
    assert outcome.status is Status.BROKEN
    assert outcome.reason == "at BATCH_END: params['0.weight']"
    assert "closure" in outcome.details  # the remedy


def test_a_failure_that_happens_only_once_is_reported_as_it_was_seen() -> None:
    calls: list[Case] = []

    @define_law("it holds", "nothing")
    def third_time(subject: Subject, case: Case) -> bool:
        del subject
        calls.append(case)
        if len(calls) == 3:
            raise Broken("the third time", where="count")
        return True

    outcome = check(LAWFUL, laws=[third_time], max_examples=10)["third_time"]
    assert outcome.status is Status.BROKEN and outcome.num_cases == 3
    assert isinstance(outcome.error, LawViolation) and outcome.error.case == calls[2]


def test_cases_that_a_law_cannot_judge_are_reported_with_the_reason() -> None:
    @define_law("it is judged in part", "nothing")
    def partly_judged(subject: Subject, case: Case) -> bool:
        if case.batch_size > 3:
            raise NotJudged("the batch is too large")
        return True

    outcome = check(LAWFUL, laws=[partly_judged], max_examples=20)["partly_judged"]
    assert outcome.status is Status.KEPT and 0 < outcome.num_acted < outcome.num_cases == 20
    num = outcome.num_cases - outcome.num_acted
    assert outcome.reason == f"not judged in {num} of 20 cases: the batch is too large"


def test_a_law_that_can_judge_no_case_is_skipped() -> None:
    @define_law("it is judged", "nothing")
    def never_judged(subject: Subject, case: Case) -> bool:
        raise NotJudged("a part is missing")

    outcome = check(LAWFUL, laws=[never_judged], max_examples=3)["never_judged"]
    assert (outcome.status, outcome.reason) == (Status.SKIPPED, "not judged in 3 of 3 cases: a part is missing")
    with pytest.raises(NotJudged, match="a part is missing"):
        never_judged(LAWFUL, Case())


def test_a_law_is_blocked_by_the_law_that_owns_the_error() -> None:
    report = check(IN_PLACE, laws=["deterministic", "input_untouched"], tasks=["vectors"], max_examples=5)
    assert report["input_untouched"].status is Status.BROKEN
    blocked = report["deterministic"]
    assert blocked.status is Status.BLOCKED and "breaks input_untouched first" in blocked.reason
    assert blocked.num_acted == 0 and not report.ok
    # Also if that law was not requested.
    alone = check(IN_PLACE, laws=["deterministic"], tasks=["vectors"], max_examples=2)["deterministic"]
    assert (alone.status, alone.reason) == (blocked.status, blocked.reason)


def test_a_draw_without_a_key_is_not_blamed_on_mixed_targets() -> None:
    def apply(event: Event, state: State) -> State:
        return state.replace(inputs=state.inputs + torch.randn_like(state.inputs))

    noise = Algorithm("noise", on(Event.BEFORE_FORWARD), apply)
    report = check(noise, laws=["deterministic", "mixtures_taken"], tasks=["vectors"], max_examples=2)
    assert report["mixtures_taken"].status is Status.BLOCKED
    # The line in the table names the place whole, and not the remedy.
    assert re.search(r"test_checking\.py:\d+\) would draw .* run's key$", report["deterministic"].reason)


def test_an_error_is_shown_with_the_authors_line_and_case() -> None:
    algorithm = Algorithm("refuse_three", on(Event.AFTER_DATALOADER), refuse_three)
    report = check(algorithm, laws=PURITY, tasks=["vectors"], max_examples=40)
    assert [o.status for o in report.outcomes] == [Status.ERROR] * 3
    details = report["deterministic"].details
    assert "test_checking.py:" in details and 'raise KeyError("three")' in details and "batch_size=3" in details
    assert details.count("in refuse_three at Event.AFTER_DATALOADER") == 1
    assert str(report).count("could not be tried") == 1  # the same for all three, so reported once
    assert "input_untouched, deterministic, global_state_kept could not be tried" in " ".join(str(report).split())


def lose_slots(event: Event, state: State) -> State:
    del event
    return state.replace(slots={})


def test_an_error_in_the_core_or_a_companion_names_its_place() -> None:
    def flatten(event: Event, state: State) -> State:
        return state.replace(inputs=state.inputs[:, :2]) if state.num_examples == 3 else state

    short = Algorithm("short", on(Event.AFTER_DATALOADER), flatten)
    outcome = check(short, laws=["deterministic"], tasks=["vectors"], max_examples=40)["deterministic"]
    assert outcome.status is Status.ERROR
    advice = "the plain step works on this case; look at what the algorithm returned at AFTER_DATALOADER"
    assert dict(outcome.rows)["to do"] == advice

    @define_law("it runs", "nothing")
    def running(subject: Subject, case: Case) -> bool:
        run(case.step(subject.algorithm), case.state(), case.batches())
        return True

    losing = Algorithm("losing", on(Event.BATCH_START), lose_slots)
    outcome = check(losing, laws=[running], tasks=["vectors"], max_examples=40)["running"]
    assert outcome.status is Status.ERROR and "bystander" in dict(outcome.rows)["case"]
    assert "broke its company: the companion bystander fails at" in dict(outcome.rows)["to do"]


def test_one_error_in_different_cases_is_reported_once() -> None:
    def judge(bound: int):
        def found(subject: Subject, case: Case) -> bool:
            if case.batch_size >= bound:
                run(case.step(subject.algorithm), case.state(), [case.task.make_batch(0, 3)])
            return True

        return found

    laws = [Law(f"from_{bound}", "it runs", "nothing", judge(bound)) for bound in (2, 4)]
    crashing = Algorithm("crashing", on(Event.AFTER_DATALOADER), refuse_three)
    report = check(crashing, laws=laws, tasks=["vectors"])
    first, second = (dict(outcome.rows)["case"] for outcome in report.outcomes)
    assert first != second and str(report).count("could not be tried") == 1
    assert "from_2, from_4 could not be tried" in str(report)


def test_a_law_without_an_acting_case_does_not_count_as_kept() -> None:
    never_matching = Algorithm("idle", lambda event, state: False, decay)
    report = check(never_matching, laws=["deterministic"], tasks=["vectors"], max_examples=3)
    assert report["deterministic"].status is Status.VACUOUS and not report.ok
    assert report["deterministic"].num_acted == 0


def test_advice_for_algorithms_that_never_acted_is_printed_once() -> None:
    never_matching = Algorithm("idle", lambda event, state: False, decay)
    report = check(never_matching, laws=PURITY, tasks=["vectors"], max_examples=2)
    assert [o.reason for o in report.outcomes] == ["it never acted"] * 3
    assert str(report).count("Does match say yes") == 1


def made_law(is_about_option: bool = False):
    @define_law("it acts", "act", is_about_option=is_about_option, idle="it has no wish")
    def acting(subject: Subject, case: Case) -> bool:
        step, seen = case.step(subject.algorithm), []
        state = step.init(case.state())
        step.fold(state, case.batch(0), lambda algorithm, *_: seen.append(algorithm.name))
        return subject.name in seen

    return acting


def test_a_law_about_an_unused_option_is_skipped() -> None:
    never_matching = Algorithm("idle", lambda event, state: False, decay)
    outcome = check(never_matching, laws=[made_law(is_about_option=True)], tasks=["vectors"], max_examples=2)["acting"]
    assert (outcome.status, outcome.reason) == (Status.SKIPPED, "it has no wish in 2 cases")


def test_an_algorithm_that_only_acts_at_init_counts_as_acting() -> None:
    surgery = Algorithm("surgery", on(Event.INIT), decay)
    assert check(surgery, laws=[made_law()], tasks=["vectors"], max_examples=2)["acting"].num_acted == 2


@pytest.mark.parametrize("event", [Event.EPOCH_END, Event.EVAL_START])
def test_no_law_counts_as_kept_if_no_event_was_fired(event: Event) -> None:
    outside = Algorithm("outside", on(event), decay)
    skipped = check(outside, laws=[made_law()], tasks=["vectors"], max_examples=2)["acting"]
    assert skipped.status is Status.SKIPPED and skipped.num_acted == 0
    assert skipped.reason == f"it acts at {event.name} only, and at none of them in this law's cases"


def test_a_law_that_takes_long_is_tried_on_few_cases() -> None:
    @define_law("it holds", "nothing", most_cases=2)
    def slow(subject: Subject, case: Case) -> bool:
        return True

    assert check(LAWFUL, laws=[slow], tasks=["vectors"])["slow"].num_cases == 2


def test_only_an_unintended_refusal_of_tasks_fails_the_report() -> None:
    def narrow(state: State) -> State:
        return state.replace(inputs=state.inputs.reshape(len(state.inputs), 4))  # torch's own error elsewhere

    def careful(state: State) -> State:
        if state.inputs.shape[1:] != (4,):
            raise ValueError("expected vectors of four")
        return state

    for apply, is_ok in ((narrow, False), (careful, True)):
        algorithm = Algorithm("narrow", on(Event.BATCH_START), lambda event, state, f=apply: f(state))
        report = check(algorithm, laws=["deterministic"], max_examples=2)
        assert report.ok is is_ok and f"refuses {len(report.refused)} of 10 tasks" in report.summary
        assert ("fails on images" in report.summary) is not is_ok


def test_a_plain_function_for_match_can_be_ok() -> None:
    plain = Algorithm("plain", lambda event, state: event is Event.BATCH_END, decay)
    report = check(plain, laws=["init_once", "pairs_undone", "deterministic"], tasks=["vectors"], max_examples=3)
    assert report.ok, report
    assert {report[name].status for name in ("init_once", "pairs_undone")} == {Status.SKIPPED}


def test_neutral_settings_do_not_fail_the_report() -> None:
    @define_law("it acts", "act")
    def without_exemption(subject: Subject, case: Case) -> bool:
        del subject, case
        return False

    report = check(identity(), laws=["deterministic", without_exemption], max_examples=2)
    assert report.ok and {o.status for o in report.outcomes} == {Status.SKIPPED}
    assert all("never acts" in o.reason for o in report.outcomes)


def test_the_neutral_law_runs_on_the_neutral_settings() -> None:
    tried: list[str] = []

    @define_law("neutral settings change nothing", "check the bounds")
    def neutral_setting(subject: Subject, case: Case) -> bool:
        del case
        tried.append(repr(subject.algorithm))
        return False

    skipped = check(alg.mixup(0.2), laws=[neutral_setting], tasks=["vectors"], max_examples=2)
    assert skipped["neutral_setting"].status is Status.SKIPPED and "--neutral" in skipped["neutral_setting"].reason
    assert skipped.ok and tried == []
    report = check("mixup(0.2)", neutral="mixup(0)", laws=[neutral_setting], tasks=["vectors"], max_examples=2)
    assert report["neutral_setting"].status is Status.KEPT and "never acts" in report["neutral_setting"].reason
    assert set(tried) == {repr(alg.mixup(0))}


def test_refused_tasks_are_left_out_with_the_reason() -> None:
    report = check(IMAGES_ALONE, laws=["deterministic"], max_examples=2)
    assert report.ok and report.tasks == ("images", "bf16_images")
    assert set(report.refused) == set(TASKS) - {"images", "bf16_images"}
    why = report.refused["tokens"]
    assert why.startswith("ValueError: expected images (in images_alone at Event.AFTER_DATALOADER; test_checking.py:")
    assert why.endswith(" in images_alone)")
    assert f"not on {', '.join(report.refused)}: {why}" in " ".join(str(report).split())  # one line for all


def test_a_named_task_must_be_accepted() -> None:
    report = check(IMAGES_ALONE, laws=["deterministic"], tasks=["images", "tokens"], max_examples=2)
    assert report["deterministic"].status is Status.KEPT
    assert not report.ok and "refuses 1 of 2 tasks, fails on tokens" in report.summary


def test_without_any_task_the_report_fails_with_every_reason() -> None:
    def fail(event: Event, state: State) -> State:
        del state
        raise TypeError(f"no {event.value}")

    report = check(Algorithm("fail", on(Event.BATCH_END), fail))
    assert not report.ok and report.outcomes == () and report.tasks == ()
    assert all(why.startswith("TypeError: no batch_end (in fail at ") for why in report.refused.values())
    assert tuple(report.refused) == report.failed_tasks == tuple(TASKS)
    assert str(report).count("TypeError: no batch_end") == 1


def test_a_broken_law_does_not_count_as_a_refusal_of_the_task() -> None:
    report = check(IN_PLACE, laws=["input_untouched"], max_examples=2)
    assert report.tasks == tuple(TASKS) and report.refused == {}


def test_an_algorithm_that_starts_late_is_probed_late() -> None:
    late = Algorithm("late", on(Event.AFTER_DATALOADER) & between("0.5dur", "1dur"), images_alone)
    assert check(late, laws=["deterministic"], max_examples=2).tasks == ("images", "bf16_images")


def test_a_task_is_probed_where_the_algorithm_acts_in_the_run_that_it_names() -> None:
    late = Algorithm("late", on(Event.AFTER_DATALOADER) & after("30ep"), images_alone)
    assert check(late, laws=["deterministic"], max_examples=2).tasks == ("images", "bf16_images")
    outside = Algorithm("outside", on(Event.EPOCH_END), refuse_vectors)
    assert "vectors" in check(outside, laws=["deterministic"], max_examples=1).refused


def refuse_vectors(event: Event, state: State) -> State:
    if state.model == TASKS["vectors"].make_state(0).model:
        raise TypeError("no MLP")
    return state


def test_a_task_that_does_not_work_at_all_is_an_error() -> None:
    def no_batch(seed: int, size: int) -> torch.Tensor:
        raise OSError(f"no data {seed} {size}")

    with pytest.raises(ValueError, match="the task 'empty' does not work, without any algorithm: OSError: no data"):
        check(LAWFUL, tasks=[Task("empty", make_mlp, no_batch)])
    with pytest.raises(ValueError, match="the task 'short' made a batch of 2 examples, asked for 4"):
        check(LAWFUL, tasks=[Task("short", make_mlp, lambda seed, size: TASKS["vectors"].batch(seed, 2))])
    calls: list[int] = []

    def moving(seed: int, size: int) -> object:
        calls.append(seed)
        return TASKS["vectors"].batch(len(calls), size)

    with pytest.raises(ValueError, match="the task 'moving' makes something else each time from the same seed"):
        check(LAWFUL, tasks=[Task("moving", make_mlp, moving)])
    with pytest.raises(ValueError, match="two different tasks are called 'mlp'"):
        check(LAWFUL, tasks=[Task("mlp", make_mlp, TASKS[name].batch) for name in ("vectors", "soft")])


def test_a_task_may_draw_from_the_global_generator() -> None:
    task = Task("drawing", make_mlp, lambda seed, size: (torch.randn(size, 4), torch.randint(3, (size,))))
    before = torch.get_rng_state()
    assert check(LAWFUL, tasks=[task], laws=["deterministic", "resume_exact"], max_examples=3).ok
    assert torch.equal(torch.get_rng_state(), before)


def test_an_algorithm_that_ends_the_program_is_reported() -> None:
    def leave(event: Event, state: State) -> State:
        raise SystemExit(0)

    report = check(Algorithm("leaving", on(Event.BATCH_END), leave), tasks=["vectors"], laws=["deterministic"])
    assert not report.ok and "it ended the program: SystemExit(0)" in str(report)


def test_a_blocked_law_gives_a_remedy_even_if_its_cause_was_not_tried() -> None:
    def draw(event: Event, state: State) -> State:
        return scaled(state, 1 + 0.01 * torch.rand(()).item())

    drawing = Algorithm("drawing", on(Event.BATCH_END), draw)
    report = check(drawing, tasks=["vectors"], laws=["global_state_kept"], max_examples=3)
    assert report["global_state_kept"].status is Status.BLOCKED
    text = str(report)
    assert "deterministic" in text and "state.rng(name)" in text
    assert "\n  case       Case(batch_size=" in text


@pytest.mark.slow
def test_the_same_seed_gives_the_same_cases() -> None:
    cases: list[Case] = []

    @define_law("it holds", "nothing")
    def collecting(subject: Subject, case: Case) -> bool:
        del subject
        cases.append(case)
        return True

    def drawn(seed: int) -> list[Case]:
        cases.clear()
        check(LAWFUL, laws=[collecting], seed=seed, max_examples=12)
        return list(cases)

    assert drawn(0) == drawn(0) != drawn(1)
    assert len(drawn(2)) == 12


def test_nothing_is_printed_or_changed(capfd, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator, threads = torch.get_rng_state(), torch.get_num_threads()
    check(make_growing(), laws=PURITY, max_examples=3, tasks=["vectors"])
    assert capfd.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), generator) and torch.get_num_threads() == threads


@pytest.mark.slow
def test_a_slow_law_is_not_shrunk_for_long(monkeypatch) -> None:
    monkeypatch.setattr(search, "SHRINK_SECONDS", 1.0)

    @define_law("it holds", "nothing")
    def slow_failure(subject: Subject, case: Case) -> bool:
        del subject
        time.sleep(0.3)
        if case.seed > 0:
            raise Broken(f"seed {case.seed}")
        return True

    start = time.perf_counter()
    assert check(LAWFUL, laws=[slow_failure], tasks=["vectors"])["slow_failure"].status is Status.BROKEN
    assert time.perf_counter() - start < 6


def test_a_law_may_discard_cases_by_assume() -> None:
    @define_law("it holds", "nothing")
    def picky(subject: Subject, case: Case) -> bool:
        del subject
        assume(case.batch_size % 2 == 0)
        return True

    outcome = check(LAWFUL, laws=[picky], max_examples=5)["picky"]
    assert outcome.status is Status.KEPT and outcome.num_acted == outcome.num_cases == 5


@settings(max_examples=2, suppress_health_check=[HealthCheck.nested_given])
@given(st.integers(0, 3))
def test_check_runs_within_a_hypothesis_property(seed: int) -> None:
    assert check(LAWFUL, laws=["deterministic"], tasks=["vectors"], max_examples=2, seed=seed)[
        "deterministic"
    ].num_acted


def test_progress_is_reported_after_each_law() -> None:
    told: list[tuple[str, int, int]] = []
    check(LAWFUL, laws=PURITY, tasks=["vectors"], max_examples=1, progress=lambda *news: told.append(news))
    assert told == [(one.name, index, 3) for index, one in enumerate(PURITY, 1)]


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


def test_the_report_can_be_read_as_data() -> None:
    report = check(make_growing(), laws=["deterministic", "input_untouched"], tasks=["vectors"], max_examples=3)
    data = json.loads(report.to_json())
    assert data["ok"] is False and data["tasks"] == ["vectors"] and data["algorithm"] == "growing(rate=0.001)"
    assert data["versions"]["torch"] == str(torch.__version__)
    broken, kept = data["laws"]
    assert (broken["status"], kept["status"], kept["num_acted"]) == ("broken", "kept", 3)
    violation = broken["violation"]
    assert violation["event"] == "BATCH_END" and violation["path"] == "params['0.weight']"
    assert len(violation["values"]) == 2 and violation["case"].startswith("Case(")
    assert "violation" not in kept


@pytest.mark.parametrize("width", one_in(3, [60, 80, 120]))
def test_the_text_fits_the_terminal(width: int) -> None:
    text = check(make_growing(), laws=PURITY, max_examples=3).text(width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "BROKEN" in text and text.splitlines()[-1].startswith("NOT OK: 2 kept, 1 broken (")


def test_rich_shows_the_same() -> None:
    console = pytest.importorskip("rich.console").Console(width=100, record=True, file=io.StringIO())
    report = check(make_growing(), laws=PURITY, tasks=["vectors"], max_examples=3)
    console.print(report)
    shown = " ".join(console.export_text().split())
    for part in ("deterministic BROKEN", "input_untouched kept 3/3", "at BATCH_END: params['0.weight']", "to do"):
        assert part in shown
    assert report.summary in shown


def test_a_report_without_laws_is_not_ok() -> None:
    assert not Report(algorithm="x()").ok
    with pytest.raises(KeyError):
        Report(algorithm="x()", tasks=("vectors",))["deterministic"]
