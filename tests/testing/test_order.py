"""Pairs with a known answer: whether they commute, their difference if not, and which rule decides their order."""

import dataclasses
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from purecompose import DEFAULT_PASSES, compose, loop_events
from purecompose.algorithms import label_smoothing, mixup, selective_backprop
from purecompose.core.algorithm import Algorithm, identity
from purecompose.core.state import State
from purecompose.errors import OrderError
from purecompose.testing.companions import bystander, noise, shrink
from purecompose.testing.conflicts import Conflicts, OrderWarning, conflicts, warn_of_conflicts
from purecompose.testing.order import Commutation, commutes, meeting_events
from purecompose.testing.tasks import TASKS
from purecompose.time.event import Event
from purecompose.time.predicates import after, before, every, on
from tests.sampling import one_in


FEW: dict[str, Any] = {"max_examples": 3, "tasks": [TASKS["vectors"]]}
ON_LOADED = Event.AFTER_DATALOADER


def edit(name: str, change: Callable[[State], State], *events: Event, **options: object) -> Algorithm:
    return Algorithm(name, on(*events), lambda event, state: change(state), **options)  # pyright: ignore


def scale(*events: Event, name: str = "scale", factor: float = 3.0, **options: object) -> Algorithm:
    """Return an algorithm that multiplies the parameters."""

    def change(state: State) -> State:
        return state.replace(params={key: factor * param for key, param in state.params.items()})

    return edit(name, change, *(events or (Event.BATCH_END,)), **options)


def shift(*events: Event, name: str = "shift", by: float = 2.0, **options: object) -> Algorithm:
    """Return an algorithm that adds to the parameters."""

    def change(state: State) -> State:
        return state.replace(params={key: param + by for key, param in state.params.items()})

    return edit(name, change, *(events or (Event.BATCH_END,)), **options)


def whole_sb() -> Algorithm:
    return selective_backprop(start=0, end=1.0, keep=0.5, full_every=0)


# commutes


def test_different_events_never_meet() -> None:
    answer = commutes(shrink(), noise())
    assert answer and answer.commutes is True
    assert (answer.events, answer.num_cases, answer.event) == ((), 0, None)
    assert str(answer) == "noise and shrink commute: they never both act at the same event"
    assert "never both act at BATCH_END" in str(commutes(shrink(), noise(), "batch_end"))


def test_additive_noises_commute() -> None:
    answer = commutes(noise("one"), noise("two"), **FEW)
    assert answer
    assert (answer.events, answer.num_cases, answer.counterexample) == ((ON_LOADED,), 3, None)
    assert str(answer) == "one and two commute at AFTER_DATALOADER, in 3 cases"


def test_scaling_and_adding_do_not_commute_by_the_closed_form() -> None:
    answer = commutes(scale(factor=3.0), shift(by=2.0), max_examples=5)
    assert not answer and answer.commutes is False
    assert answer.event is Event.BATCH_END
    assert answer.path.startswith("params[") and "elements differ" in answer.what
    case = answer.counterexample
    assert case is not None and (case.num_batches, case.others, case.task) == (1, (), TASKS["vectors"])
    # 3 (x + 2) - (3 x + 2) = 4 for every x.
    added_first, scaled_first = (answer.values[order] for order in ("shift before scale", "scale before shift"))
    assert added_first - scaled_first == pytest.approx(4.0, abs=1e-12)
    plain = case.step()(case.step().init(case.state(dtype=torch.float64)), case.batch(0, torch.float64))
    assert scaled_first == pytest.approx(3 * plain.params["0.weight"].flatten()[0].item() + 2, abs=1e-12)
    text = str(answer)
    assert "scale and shift do not commute at BATCH_END" in text
    assert repr(case) in text and answer.path in text


@pytest.mark.slow
def test_the_counterexample_shows_the_difference_again() -> None:
    ours, theirs = mixup(0.2), noise(scale=5.0)
    answer = commutes(ours, theirs, **FEW)
    case = answer.counterexample
    assert case is not None and answer.event is ON_LOADED
    (path, name), ends = (answer.path, answer.path.split("'")[1]), {}
    for algorithms in ([theirs, ours], [ours, theirs]):  # reversed at AFTER events
        step = compose(loop_events, case.listed(*algorithms), microbatches=case.microbatches)
        state = step.init(case.state(dtype=torch.float64))
        for batch in case.batches(torch.float64):
            state = step(state, batch)
        ends[f"{algorithms[1].name} before {algorithms[0].name}"] = state.params[name].flatten()
    assert path == f"params['{name}']"
    for order, value in answer.values.items():
        assert (ends[order] - value).abs().min() < 1e-9


def test_a_small_difference_is_within_the_tolerance() -> None:
    ours, theirs = scale(factor=1.0 + 1e-9), shift(by=1.0)
    assert commutes(ours, theirs, **FEW)
    assert not commutes(ours, theirs, tolerance=1e-13, **FEW)


@pytest.mark.slow
def test_the_order_of_slots_and_metrics_is_ignored() -> None:
    assert commutes(bystander("one"), bystander("two"), **FEW)


def test_label_smoothing_and_mixup_commute() -> None:
    assert meeting_events(mixup(0.2), label_smoothing(0.1)) == (Event.INIT,)
    answer = commutes(mixup(0.2), label_smoothing(0.1), max_examples=4)
    assert answer and answer.events == (Event.INIT,)


def test_two_algorithms_that_restore_their_changes_are_nested() -> None:
    """Each restores the target at AFTER_LOSS; at events other than the tested one the pair stays nested."""
    answer = commutes(label_smoothing(0.1), label_smoothing(0.2, name="other"), "after_loss", **FEW)
    assert answer.commutes is True  # inside Grad, edits of the batch are local: nothing reads the target again
    assert commutes(label_smoothing(0.1), label_smoothing(0.2, name="other"), "before_loss", **FEW).num_cases == 3


def test_init_in_both_orders() -> None:
    answer = commutes(scale(Event.INIT), shift(Event.INIT), **FEW)
    assert (answer.commutes, answer.event) == (False, Event.INIT)
    assert sorted(answer.values) == ["scale before shift", "shift before scale"]
    added_first, scaled_first = (answer.values[order] for order in ("shift before scale", "scale before shift"))
    assert added_first - scaled_first == pytest.approx(4.0, abs=1e-12)
    assert commutes(shift(Event.INIT), shift(Event.INIT, name="more"), **FEW)


@pytest.mark.parametrize("event", [Event.EPOCH_END, Event.EVAL_START, Event.EVAL_BATCH_START, Event.PREDICT_START])
def test_events_outside_the_step(event: Event) -> None:
    answer = commutes(scale(event), shift(event), **FEW)
    assert (answer.commutes, answer.event) == (False, event)
    assert commutes(scale(event), scale(event, name="again"), **FEW)


def test_an_evaluation_is_judged_by_its_outputs() -> None:
    def scaled(state: State) -> State:
        return state.replace(outputs=2 * state.outputs)

    def shifted(state: State) -> State:
        return state.replace(outputs=state.outputs + 1)

    pair = [edit(f.__name__, f, Event.EVAL_AFTER_FORWARD) for f in (scaled, shifted)]
    answer = commutes(pair[0], pair[1], **FEW)
    assert answer.commutes is False and answer.path.startswith("outputs")
    assert abs(answer.values["shifted before scaled"] - answer.values["scaled before shifted"]) == pytest.approx(1)


def needs_flag() -> Algorithm:
    """Return an algorithm that reads the slot that `flag` makes at the same event."""
    return edit("reader", lambda state: state.replace(loss=state.loss + state.slots["flag"]), Event.AFTER_LOSS)


def flag() -> Algorithm:
    def apply(event: Event, state: State) -> State:
        if event is Event.BEFORE_BACKWARD:
            return state.replace(slots={key: value for key, value in state.slots.items() if key != "flag"})
        return state.replace(slots={**state.slots, "flag": torch.zeros(())})

    return Algorithm("flag", on(Event.AFTER_LOSS, Event.BEFORE_BACKWARD), apply)


def test_an_error_in_only_one_order_is_a_conflict() -> None:
    answer = commutes(needs_flag(), flag(), **FEW)
    assert answer.commutes is False and answer.counterexample is not None
    assert answer.what == "fails with reader before flag alone, with KeyError: 'flag'"
    assert answer.values == {}
    assert "fails with reader before flag alone" in str(answer)


def test_an_error_in_both_orders_leaves_the_pair_undecided() -> None:
    def fail(state: State) -> State:
        raise OSError("no disk")

    answer = commutes(edit("broken", fail, Event.BATCH_START), edit("fine", lambda s: s, Event.BATCH_START), **FEW)
    assert answer.commutes is None and not answer
    assert answer.num_cases == 0
    assert "undecided at BATCH_START: both orders failed" in str(answer) and "OSError: no disk" in str(answer)


@pytest.mark.slow
def test_a_pair_that_always_fails_alike_is_given_up_without_blaming_a_companion() -> None:
    def flatten(state: State) -> State:
        return state.replace(inputs=state.inputs[:, :1])

    pair = edit("flat", flatten, ON_LOADED), edit("fine", lambda state: state, ON_LOADED)
    answer = commutes(*pair, tasks=["vectors"])
    assert answer.commutes is None and "in 3 of 3 cases" in answer.reason
    calls: list[int] = []

    def cut(state: State) -> State:
        calls.append(1)
        return state.replace(params={})

    answer = commutes(edit("cut", cut, Event.BATCH_START), edit("fine", lambda s: s, Event.BATCH_START))
    assert answer.commutes is None and len(calls) < 9 * len(TASKS)


def test_an_error_in_a_companion_is_attributed_to_the_pair() -> None:
    def lose(state: State) -> State:
        if "companion.bystander" not in state.slots:
            raise OSError("nobody here")
        return state.replace(slots={})

    pair = edit("lose", lose, Event.BEFORE_TRAIN_BATCH), edit("fine", lambda s: s, Event.BEFORE_TRAIN_BATCH)
    reason = commutes(*pair, tasks=["vectors"]).reason
    assert "the first with OSError: nobody here; the pair broke its company: the companion bystander fails" in reason


def test_tasks_are_given_by_name() -> None:
    assert commutes(noise("one"), noise("two"), tasks=["vectors"], max_examples=2).num_cases == 2
    assert conflicts([scale(), shift()], tasks=["vectors"], max_examples=2).undecided
    with pytest.raises(ValueError, match="did you mean 'vectors'"):
        commutes(scale(), shift(), tasks=["vector"])


def test_a_task_that_one_refuses_gives_no_answer() -> None:
    answer = commutes(mixup(0.2), noise(), ON_LOADED, max_examples=5, tasks=[TASKS["tokens"]])
    assert answer.commutes is None and "both orders failed" in answer.reason and "embedding" in answer.reason


def test_a_pair_that_never_meets_outside_the_step_is_undecided() -> None:
    even = dataclasses.replace(scale(), match=on(Event.EPOCH_END) & every(2))
    odd = dataclasses.replace(shift(), match=on(Event.EPOCH_END) & ~every(2))
    answer = commutes(even, odd, **FEW)
    assert answer.commutes is None and answer.num_cases == 0
    assert "did both act there" in str(answer) and "give tasks" in str(answer)


def test_a_phase_late_in_the_run_is_found() -> None:
    late = dataclasses.replace(scale(), match=on(Event.BATCH_END) & after(0.9))
    assert commutes(late, shift(), **FEW).commutes is False


def test_plain_functions_match_everywhere_in_principle() -> None:
    def plain(algorithm: Algorithm) -> Algorithm:
        return dataclasses.replace(algorithm, match=lambda event, state: event is Event.BATCH_END)

    answer = commutes(plain(scale()), plain(shift()), "batch_end", **FEW)
    assert answer.commutes is False
    nothing = commutes(plain(scale()), plain(shift()), "epoch_end", **FEW)
    assert nothing.commutes and nothing.reason == "they never both act at EPOCH_END"


def test_one_name_is_refused() -> None:
    with pytest.raises(ValueError, match="two algorithms called 'noise'"):
        commutes(noise(), noise())


def test_texts_name_algorithms() -> None:
    assert commutes("mixup(0)", "label_smoothing(0.1)").reason.startswith("they never both act")


def test_nothing_is_printed_or_warned_and_global_generators_are_unchanged(capfd: pytest.CaptureFixture[str]) -> None:
    def warn(state: State) -> State:
        warnings.warn("careful", stacklevel=1)
        return state

    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        commutes(edit("loud", warn, Event.BATCH_END), scale(), **FEW)
        commutes(scale(), shift(), **FEW)
    assert capfd.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), before)


_MAKERS: Sequence[Callable[[], Algorithm]] = (
    scale, shift, shrink, noise, bystander, needs_flag, flag, whole_sb, lambda: mixup(0.3), lambda: label_smoothing(0.1)
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow, HealthCheck.nested_given])
@given(st.tuples(st.sampled_from(_MAKERS), st.sampled_from(_MAKERS)), st.integers(0, 3))
def test_the_answer_does_not_depend_on_the_order_of_arguments(pair, seed: int) -> None:
    a, b = (make() for make in pair)
    if a.name == b.name:
        b = dataclasses.replace(b, name="other")  # some pairs then fail in any order, which is symmetric, too
    given: dict = {"max_examples": 2, "tasks": [TASKS["vectors"]], "seed": seed}
    first, second = commutes(a, b, **given), commutes(b, a, **given)
    assert first == second and str(first) == str(second)
    assert first == commutes(a, b, **given)


@pytest.mark.parametrize("make", one_in(10, _MAKERS))
def test_everything_commutes_with_identity(make: Callable[[], Algorithm]) -> None:
    assert commutes(make(), identity())
    watcher = Algorithm("watcher", lambda event, state: True, lambda event, state: state)
    for event in make().events:
        answer = commutes(make(), watcher, event, max_examples=2, tasks=[TASKS["vectors"]])
        assert answer.commutes is not False
        assert answer or make is needs_flag  # it only works together with `flag`


# conflicts


def decided(answer: Conflicts) -> list[tuple[Event, tuple[str, str], str | None]]:
    return [(meeting.event, meeting.order, meeting.decided_by) for meeting in answer.conflicting]


@pytest.mark.slow
def test_conflicts_of_shipped_algorithms() -> None:
    answer = conflicts([mixup(0.2), label_smoothing(0.1), whole_sb()], max_examples=3)
    order = ("selective_backprop", "mixup")
    assert decided(answer) == [(ON_LOADED, order, "sort_selective_backprop_first")]
    assert answer.undecided == answer.unknown == ()
    assert answer.cell("mixup", "selective_backprop") == ">" and answer.cell("selective_backprop", "mixup") == "<"
    assert answer.cell("mixup", "label_smoothing") == "."
    text = str(answer)
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "mixup", ".", ">"] in rows and ["3", "selective_backprop", "<", "."] in rows
    assert "selective_backprop < mixup  sort_selective_backprop_first" in text
    assert (
        "selective_backprop and mixup do not commute at AFTER_DATALOADER\n  leaf " in text
        and "row acts before column" in text
    )


@pytest.mark.parametrize(
    ("given", "order"),
    [({"runs_before": "shift"}, ("scale", "shift")), ({"runs_after": "shift"}, ("shift", "scale"))],
)
@pytest.mark.parametrize("event", [Event.BATCH_END, Event.AFTER_TRAIN_BATCH])
def test_a_constraint_decides_the_order(given: dict, order: tuple[str, str], event: Event) -> None:
    pair = [scale(event, **given), shift(event)]
    for listed in (pair, pair[::-1]):
        answer = conflicts(listed, **FEW)
        assert decided(answer) == [(event, order, f"constraint: {order[0]} before {order[1]}")]
        assert answer.undecided == ()


def test_without_a_rule_the_list_decides_reversed_at_after_events() -> None:
    for event, order in ((Event.BATCH_END, ("scale", "shift")), (Event.AFTER_TRAIN_BATCH, ("shift", "scale"))):
        answer = conflicts([scale(event), shift(event)], **FEW)
        assert decided(answer) == [(event, order, None)]
        assert [meeting.order for meeting in answer.undecided] == [order]
        assert answer.cell("scale", "shift") == answer.cell("shift", "scale") == "!"
        assert ("listed, reversed" if event.is_reversed else "listed so") in str(answer)
        step = compose(loop_events, [scale(event), shift(event)])
        assert tuple(algorithm.name for algorithm in step.order(step.algorithms, event)) == order


def shift_first(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    del event
    return sorted(algorithms, key=lambda algorithm: algorithm.name != "shift")


def flip(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
    del event
    return algorithms[::-1]


def test_the_pass_that_decides_is_named() -> None:
    pair = [scale(), shift()]
    by_pass = conflicts(pair, passes=(*DEFAULT_PASSES, shift_first), **FEW)
    assert decided(by_pass) == [(Event.BATCH_END, ("shift", "scale"), "shift_first")]
    # A later pass that reverses the order leaves it decided, the other way round.
    turned = conflicts(pair, passes=(shift_first, flip), **FEW)
    assert decided(turned) == [(Event.BATCH_END, ("scale", "shift"), "shift_first")]
    assert decided(conflicts(pair, passes=(flip,), **FEW)) == [(Event.BATCH_END, ("shift", "scale"), None)]


def test_algorithms_that_a_pass_drops_do_not_meet() -> None:
    answer = conflicts([scale(), shift()], passes=[lambda algorithms, event: algorithms[:1]], **FEW)
    assert answer.meetings == () and answer.cell("scale", "shift") == "-"


def test_cells_of_pairs_that_never_meet_or_are_unknown() -> None:
    def fail(state: State) -> State:
        raise OSError("no disk")

    answer = conflicts([edit("broken", fail, Event.BATCH_END), shift(), noise()], **FEW)
    assert answer.cell("broken", "shift") == "?" and answer.cell("shift", "noise") == "-"
    assert answer.cell("shift", "shift") == ""
    assert [meeting.event for meeting in answer.unknown] == [Event.BATCH_END]
    assert "OSError: no disk" in answer.text(200) and "they all commute" not in str(answer)


def test_two_events_give_two_marks() -> None:
    events = (Event.BATCH_START, Event.BATCH_END)

    def shift_first_at_start(algorithms: Sequence[Algorithm], event: Event) -> Sequence[Algorithm]:
        return shift_first(algorithms, event) if event is Event.BATCH_START else algorithms

    answer = conflicts([scale(*events), shift(*events)], passes=[shift_first_at_start], **FEW)
    assert answer.cell("scale", "shift") == "!>"


def test_impossible_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="'noise' is used twice"):
        conflicts([noise(), noise()])
    with pytest.raises(OrderError, match="before"):
        conflicts([scale(runs_before="shift"), shift(runs_before="scale")], **FEW)
    assert str(conflicts([])) == "no algorithms"
    assert "they all commute" in str(conflicts([mixup(0.2)]))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_differences_are_printed_below_and_fit_the_terminal(width: int) -> None:
    answer = conflicts([scale(), shift()], **FEW)
    below = answer.text(width).partition("decided by")[2]
    assert all(len(line) <= width for line in answer.text(width).splitlines())
    assert "scale and shift do not commute at BATCH_END" in below and "scale before shift" in below


def test_rich_prints_the_same() -> None:
    rich_console = pytest.importorskip("rich.console")
    answer = conflicts([scale(), shift()], **FEW)
    console = rich_console.Console(width=200, record=True, file=io.StringIO())
    console.print(answer)
    text = console.export_text()
    assert "scale < shift" in text and "only the list (listed so)" in text
    assert "only the order of the list decides" in text


# warn_of_conflicts


def test_a_step_is_returned_after_a_warning_for_each_open_pair() -> None:
    step = compose(loop_events, [scale(), shift(), noise()])
    with pytest.warns(OrderWarning) as caught:
        assert warn_of_conflicts(step, **FEW) is step
    (warning,) = caught
    text = str(warning.message)
    for part in ("scale and shift", "BATCH_END", "params[", "runs_before=('shift',)", "runs_after", "pass"):
        assert part in text
    assert warning.filename == __file__


@pytest.mark.filterwarnings("ignore:.* which the program does not have")
def test_decided_pairs_and_the_passes_of_the_step_are_silent() -> None:
    pair = [scale(), shift()]
    warn_of_conflicts([scale(runs_before="shift"), shift()], **FEW)
    warn_of_conflicts(compose(loop_events, pair, passes=[shift_first]), **FEW)
    warn_of_conflicts(compose([Event.BATCH_START], pair), **FEW)  # its program lacks the event
    with pytest.warns(OrderWarning, match="scale and shift"):
        assert warn_of_conflicts(pair, **FEW) is pair


def test_answers_are_values() -> None:
    answer = commutes(scale(), shift(), **FEW)
    assert isinstance(answer, Commutation)
    with pytest.raises(dataclasses.FrozenInstanceError):
        answer.commutes = True  # pyright: ignore
    assert hash(answer) == hash(commutes(shift(), scale(), **FEW))


@pytest.mark.slow
def test_pairs_that_act_at_different_times_are_recognised_without_a_run():
    def apply(event: Event, state: State) -> State:
        del event
        return state

    early = Algorithm("early", on(Event.BATCH_END) & before(0.4), apply)
    late = Algorithm("late", on(Event.BATCH_END) & after(0.6), apply)
    assert meeting_events(early, late) == ()
    assert commutes(early, late).reason == "they never both act at the same event"
    one, two = (Algorithm(name, lambda event, state: event is Event.BATCH_END, apply) for name in ("one", "two"))
    assert meeting_events(one, two) == (Event.BATCH_END,)
    assert commutes(one, two, tasks=["vectors"], max_examples=3)
