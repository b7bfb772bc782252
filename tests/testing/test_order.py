"""Pairs with a known answer: whether they commute, their difference if not, and which rule decides their order."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from purecompose import DEFAULT_PASSES, compose, loop_events
from purecompose.algorithms import label_smoothing, mixup, selective_backprop
from purecompose.core.algorithm import Algorithm, identity
from purecompose.core.state import State
from purecompose.errors import OrderError
from purecompose.testing.case import bystander, noise, shrink
from purecompose.testing.law import Broken
from purecompose.testing.order import Commutation, Conflicts, commutes, conflicts, meeting_events
from purecompose.testing.tasks import TASKS
from purecompose.time.event import Event
from purecompose.time.predicates import after, before, every, on


FEW: dict[str, Any] = {"max_examples": 3, "tasks": ["vectors"]}
ON_LOADED = Event.AFTER_DATALOADER


def edit(name: str, change: Callable[[State], State], *events: Event, **options: Any) -> Algorithm:
    return Algorithm(name, on(*events), lambda event, state: change(state), **options)


def scale(*events: Event, factor: float = 3.0, name: str = "scale", **options: Any) -> Algorithm:
    """Return an algorithm that multiplies the parameters."""

    def change(state: State) -> State:
        return state.replace(params={key: factor * param for key, param in state.params.items()})

    return edit(name, change, *(events or (Event.BATCH_END,)), **options)


def shift(*events: Event, by: float = 2.0, name: str = "shift", **options: Any) -> Algorithm:
    """Return an algorithm that adds to the parameters."""

    def change(state: State) -> State:
        return state.replace(params={key: param + by for key, param in state.params.items()})

    return edit(name, change, *(events or (Event.BATCH_END,)), **options)


def failing(state: State) -> State:
    raise OSError("no disk")


def difference_of(answer: Commutation) -> Broken:
    assert answer.difference is not None
    return answer.difference


def whole_sb() -> Algorithm:
    return selective_backprop(start=0, end=1.0, keep=0.5, full_every=0)


# commutes


@pytest.mark.parametrize(
    ("a", "b", "event", "text"),
    [
        (shrink(), noise(), None, "noise and shrink commute: they never both act at the same event"),
        (shrink(), noise(), "batch_end", "noise and shrink commute: they never both act at BATCH_END"),
        (noise("one"), noise("two"), None, "one and two commute at AFTER_DATALOADER, in 3 cases"),
        (mixup(0.2), label_smoothing(0.1), None, "label_smoothing and mixup commute at INIT, in 3 cases"),
        # Each restores the target at AFTER_LOSS; at other events than the tested one the pair stays nested.
        (
            label_smoothing(0.1),
            label_smoothing(0.2, name="other"),
            "after_loss",
            "label_smoothing and other commute at AFTER_LOSS, in 3 cases",
        ),
        (shift(Event.INIT), shift(Event.INIT, name="z"), None, "shift and z commute at INIT, in 3 cases"),
        (bystander("one"), bystander("two"), "batch_end", "one and two commute at BATCH_END, in 3 cases"),
        (scale(), identity(), None, "identity and scale commute: they never both act at the same event"),
    ],
)
def test_pairs_that_commute(a: Algorithm, b: Algorithm, event: Any, text: str) -> None:
    answer = commutes(a, b, event, **FEW)
    assert answer and str(answer) == text and answer.counterexample is None


def test_scaling_and_adding_do_not_commute_by_the_closed_form() -> None:
    answer = commutes(scale(factor=3.0), shift(by=2.0), max_examples=5)
    assert (
        answer.commutes is False
        and answer.events == (Event.BATCH_END,)
        and difference_of(answer).path.startswith("params[")
    )
    case = answer.counterexample
    assert case is not None and (case.num_batches, case.others, case.task) == (1, (), TASKS["vectors"])
    # 3 (x + 2) - (3 x + 2) = 4 for every x.
    added_first, scaled_first = (
        difference_of(answer).values[order] for order in ("shift before scale", "scale before shift")
    )
    assert added_first - scaled_first == pytest.approx(4.0, abs=1e-12)
    plain = case.step()(case.step().init(case.state(dtype=torch.float64)), case.batch(0, torch.float64))
    assert scaled_first == pytest.approx(3 * plain.params["0.weight"].flatten()[0].item() + 2, abs=1e-12)
    assert "scale and shift do not commute at BATCH_END" in str(answer) and repr(case) in str(answer)
    assert commutes(shift(by=2.0), scale(factor=3.0), max_examples=5) == answer


@pytest.mark.parametrize(
    "event", [Event.INIT, Event.EPOCH_END, Event.EVAL_START, Event.EVAL_BATCH_START, Event.PREDICT_START]
)
def test_events_outside_the_step(event: Event) -> None:
    answer = commutes(scale(event), shift(event), **FEW)
    assert (answer.commutes, answer.events) == (False, (event,))
    assert commutes(scale(event), scale(event, name="again"), **FEW)


def test_an_evaluation_is_judged_by_its_outputs() -> None:
    pair = [
        edit("scaled", lambda state: state.replace(outputs=2 * state.outputs), Event.EVAL_AFTER_FORWARD),
        edit("shifted", lambda state: state.replace(outputs=state.outputs + 1), Event.EVAL_AFTER_FORWARD),
    ]
    answer = commutes(pair[0], pair[1], **FEW)
    assert answer.commutes is False and difference_of(answer).path.startswith("outputs")
    assert abs(
        difference_of(answer).values["shifted before scaled"] - difference_of(answer).values["scaled before shifted"]
    ) == pytest.approx(1)


def test_an_error_in_only_one_order_is_a_conflict() -> None:
    def flag(event: Event, state: State) -> State:
        slots = {key: value for key, value in state.slots.items() if key != "flag"}
        return state.replace(slots={**slots, **({"flag": torch.zeros(())} if event is Event.AFTER_LOSS else {})})

    reader = edit("reader", lambda state: state.replace(loss=state.loss + state.slots["flag"]), Event.AFTER_LOSS)
    answer = commutes(reader, Algorithm("flag", on(Event.AFTER_LOSS, Event.BEFORE_BACKWARD), flag), **FEW)
    assert answer.commutes is False and difference_of(answer).values == {}
    assert difference_of(answer).what == "fails with reader before flag alone, with KeyError: 'flag'"


def idle(name: str, *events: Event) -> Algorithm:
    return edit(name, lambda state: state, *events)


def lose(state: State) -> State:
    if "companion.bystander" not in state.slots:
        raise OSError("nobody here")
    return state.replace(slots={})


@pytest.mark.parametrize(
    ("a", "b", "reasons"),
    [
        (edit("broken", failing, Event.BATCH_START), idle("fine", Event.BATCH_START), ["OSError: no disk"]),
        (
            edit("lose", lose, Event.BEFORE_TRAIN_BATCH),
            idle("fine", Event.BEFORE_TRAIN_BATCH),
            ["OSError: nobody here"],
        ),
        (
            dataclasses.replace(scale(), match=on(Event.EPOCH_END) & every(2)),
            dataclasses.replace(shift(), match=on(Event.EPOCH_END) & ~every(2)),
            ["did both act there", "give tasks"],
        ),
    ],
)
def test_without_a_case_that_runs_a_pair_is_undecided(a: Algorithm, b: Algorithm, reasons: list[str]) -> None:
    answer = commutes(a, b, **FEW)
    assert answer.commutes is None and answer.num_cases == 0
    assert all(reason in str(answer) for reason in reasons)


def test_phases_and_plain_functions_are_found_where_they_meet() -> None:
    late, early = (dataclasses.replace(scale(), match=on(Event.BATCH_END) & when) for when in (after(0.9), before(0.4)))
    assert commutes(late, shift(), **FEW).commutes is False
    assert meeting_events(early, dataclasses.replace(late, name="late")) == ()
    one, two = (
        dataclasses.replace(of, match=lambda event, state: event is Event.BATCH_END) for of in (scale(), shift())
    )
    assert meeting_events(one, two) == (Event.BATCH_END,)
    assert commutes(one, two, **FEW).commutes is False


# conflicts


def decided(answer: Conflicts) -> list[tuple[Event, tuple[str, str], str | None]]:
    return [(meeting.event, meeting.order, meeting.decided_by) for meeting in answer.conflicting]


def test_conflicts_of_shipped_algorithms() -> None:
    answer = conflicts([mixup(0.2), label_smoothing(0.1), whole_sb()], max_examples=3)
    order = ("selective_backprop", "mixup")
    assert decided(answer) == [(ON_LOADED, order, "sort_selective_backprop_first")]
    assert answer.undecided == answer.unknown == ()
    assert "selective_backprop and mixup do not commute at AFTER_DATALOADER\n  leaf " in str(answer)


@pytest.mark.parametrize(
    ("given", "order"), [({"runs_before": "shift"}, ("scale", "shift")), ({"runs_after": "shift"}, ("shift", "scale"))]
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
        assert decided(answer) == [(event, order, None)] and len(answer.undecided) == 1
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
    dropped = conflicts(pair, passes=[lambda algorithms, event: algorithms[:1]], **FEW)
    assert dropped.meetings == ()


def test_pairs_without_an_answer_are_listed_and_a_rule_may_decide_at_some_events_only() -> None:
    answer = conflicts([edit("broken", failing, Event.BATCH_END), shift(), noise()], **FEW)
    assert [meeting.order for meeting in answer.unknown] == [("broken", "shift")]
    assert "OSError: no disk" in str(answer) and "they all commute" not in str(answer)
    events = (Event.BATCH_START, Event.BATCH_END)
    first = lambda algorithms, event: shift_first(algorithms, event) if event is events[0] else algorithms  # noqa: E731
    found = conflicts([scale(*events), shift(*events)], passes=[first], **FEW)
    assert [decided_by is None for _, _, decided_by in decided(found)] == [False, True]


def test_impossible_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="two algorithms called 'noise'"):
        commutes(noise(), noise())
    with pytest.raises(ValueError, match="did you mean 'vectors'"):
        commutes(scale(), shift(), tasks=["vector"])
    with pytest.raises(ValueError, match="'noise' is used twice"):
        conflicts([noise(), noise()])
    with pytest.raises(OrderError, match="before"):
        conflicts([scale(runs_before="shift"), shift(runs_before="scale")], **FEW)
    assert "they all commute" in str(conflicts([mixup(0.2)]))
