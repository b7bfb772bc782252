"""The plan of a step: what acts where, in what order, and why."""

import pytest
import torch

import purecompose as pc
from purecompose import Algorithm, Event, Trait, compose, loop_events
from tests.helpers import changing, counter, decay, make_batch, make_state, noise, recorder


def reasons(plan, event):
    return {row.algorithm: (row.order, row.reason) for row in plan.rows if row.event is event}


def test_orders_and_reasons():
    selecting = noise("selecting", traits={Trait.SELECTS_EXAMPLES})
    plan = compose(loop_events, [noise("a"), selecting, noise("b"), decay()]).plan(make_state())
    assert reasons(plan, Event.AFTER_DATALOADER) == {
        "selecting": (0, "sort_selective_backprop_first"),
        "b": (1, "listed order, reversed"),
        "a": (2, "listed order, reversed"),
    }
    assert plan.order("after_dataloader") == ("selecting", "b", "a")
    assert reasons(plan, Event.BATCH_END) == {"decay": (0, "no other acts there")}
    assert plan.order(Event.BATCH_START) == ()


def test_a_plan_gives_the_reason_why_an_algorithm_is_absent():
    step = compose(loop_events, [noise(when=pc.after(0.5))])
    state = make_state(duration="4ba")
    row = compose(loop_events, [noise(when=pc.after(0.5))]).plan(state).rows[0]
    assert (row.order, row.reason) == (None, "after('0.5dur') does not hold at batch 0 (0.0% of the run)")
    later = state.replace(timestamp=state.timestamp.replace(batch=3))
    assert reasons(step.plan(later), Event.AFTER_DATALOADER) == {"noise": (0, "no other acts there")}


def test_dropped_by_a_pass():
    def drop(algorithms, event):
        del event
        return [a for a in algorithms if a.name != "noise"]

    plan = compose(loop_events, [noise(), noise("b")], passes=[drop]).plan(make_state())
    found = reasons(plan, Event.AFTER_DATALOADER)
    assert found == {"b": (0, "no other acts there"), "noise": (None, "dropped by a pass")}


def test_the_plan_equals_the_calls_of_a_step():
    """The rows of acting algorithms, event by event, are the calls of a real step."""
    log = []
    events = (Event.BATCH_START, Event.AFTER_LOSS, Event.BATCH_END)
    chosen = [
        recorder(log, "a", *events),
        recorder(log, "b", *events, runs_before=("a",)),
        changing("rare", Event.BATCH_END, lambda s: s, when=pc.every(2)),
    ]
    step = compose(loop_events, chosen)
    state = make_state()
    for batch in range(2):
        log.clear()
        plan = step.plan(state)
        planned = [(r.algorithm, r.event) for r in plan.rows if r.order is not None and r.event in step.events]
        state = step(state, make_batch())
        assert [call for call in planned if call[0] != "rare"] == log
        assert (("rare", Event.BATCH_END) in planned) == (batch == 1)


def test_the_plan_uses_the_shapes_of_the_given_batch():
    small = Algorithm("small", lambda e, s: e is Event.BATCH_START and len(s.batch[0]) < 4, lambda e, s: s)
    step = compose(loop_events, [small])
    assert step.plan(make_state(), make_batch(size=2)).order(Event.BATCH_START) == ("small",)
    assert step.plan(make_state(), make_batch(size=5)).order(Event.BATCH_START) == ()


def test_warnings():
    neutral = Algorithm("neutral", pc.time.predicates.NEVER, lambda event, state: state, config={"alpha": 0})
    waiting = changing("waiting", Event.AFTER_LOSS, lambda state: state)
    program = [Event.BATCH_START, pc.loop.Grad(pc.loop.forward, pc.loop.loss), pc.loop.update]
    with pytest.warns(UserWarning, match="AFTER_LOSS|BATCH_END") as caught:
        step = compose(program, [neutral, waiting, counter()])
    assert [str(one.message).partition(":")[0] for one in caught] == [
        "waiting acts at AFTER_LOSS, which the program does not have",
        "counter acts at BATCH_END, which the program does not have",
    ]
    plan = step.plan(make_state())
    assert plan.warnings == (
        "neutral(alpha=0) never acts: its settings are neutral",
        "waiting acts at AFTER_LOSS, which the program does not have",
        "counter acts at BATCH_END, which the program does not have",
    )
    assert compose(loop_events, [noise(), counter()]).plan(make_state()).warnings == ()


def test_a_plan_prints_as_a_table():
    plan = compose(loop_events, [noise(), counter(), decay(when=pc.after(0.5))]).plan(make_state(batches_per_epoch=2))
    lines = str(plan).splitlines()
    assert lines[0].split() == ["event", "order", "algorithm", "why"]
    cells = [line.split()[:3] for line in lines]
    assert ["INIT", "0", "counter"] in cells
    assert ["AFTER_DATALOADER", "0", "noise"] in cells
    assert ["BATCH_END", "-", "decay"] in cells
    assert str(compose(loop_events).plan(make_state())) == "no algorithm acts anywhere"
    neutral = Algorithm("neutral", pc.time.predicates.NEVER, lambda event, state: state)
    text = str(compose(loop_events, [neutral]).plan(make_state()))
    assert text.endswith("warning: neutral() never acts: its settings are neutral")


def test_constraints_are_named_with_their_partners():
    chosen = [noise("a"), noise("b", runs_before=("c",)), noise("c")]
    plan = compose(loop_events, chosen).plan(make_state())
    assert reasons(plan, Event.AFTER_DATALOADER) == {
        "b": (0, "listed order, reversed, before c"),
        "c": (1, "listed order, reversed, after b"),
        "a": (2, "listed order, reversed"),
    }
    assert plan.warnings == ()


def test_a_constraint_that_names_nearly_an_algorithm_of_the_step_is_reported():
    plan = compose(loop_events, [noise("a", runs_after=("mixpu", "nobody")), noise("mixup")]).plan(make_state())
    assert plan.warnings == ("a is ordered by mixpu, which the step does not have; did you mean mixup?",)


def test_one_reason_for_many_events_is_one_line():
    curious = Algorithm("curious", lambda e, s: e is Event.BATCH_END, lambda e, s: s)
    text = str(compose(loop_events, [curious]).plan(make_state()))
    assert len(text.splitlines()) < 8 and "36 events" in text


def test_a_plan_says_what_methods_have_replaced():
    step = compose(loop_events, [pc.algorithms.blurpool(), pc.algorithms.squeeze_excite(min_channels=1)])
    net = torch.nn.Sequential(*[torch.nn.Conv2d(c, 2 * c, 3, stride=2) for c in (16, 32, 64, 128)])
    state = make_state(net)
    assert "replaced" not in str(step.plan(state))
    plan = step.plan(step.init(state))
    assert reasons(plan, Event.INIT) == {
        "blurpool": (0, "listed order; modules replaced: 4 (0, 1, 2 and 1 more)"),
        "squeeze_excite": (1, "listed order; modules replaced: 4 (0.conv, 1.conv, 2.conv and 1 more)"),
    }
