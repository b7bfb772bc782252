"""A trace records what every algorithm did and does not change the result."""

import math

import pytest
from hypothesis import given, settings, strategies as st

import purecompose as pc
from purecompose import Algorithm, Event, compose, loop_events, on, traced
from tests.helpers import (
    assert_same,
    changing,
    counter,
    decay,
    make_batch,
    make_cnn,
    make_mlp,
    make_state,
    noise,
    recorder,
)


def trace_of(algorithms, *, k=1, state=None, batch=None, **options):
    step = compose(loop_events, algorithms, microbatches=k, **options)
    return traced(step)(step.init(make_state() if state is None else state), batch or make_batch())[1]


def test_an_entry_for_every_algorithm_and_event():
    trace = trace_of([noise(), counter(), pc.identity()])
    events = compose(loop_events).events
    assert len(trace) == 3 * len(events)
    assert {(e.algorithm, e.event) for e in trace} == {
        (name, event) for name in ("noise", "counter", "identity") for event in events
    }
    ran = {(e.algorithm, e.event): e.runs for e in trace if e.ran}
    assert ran == {("noise", Event.AFTER_DATALOADER): 1, ("counter", Event.BATCH_END): 1}
    idle = trace["identity", "batch_start"]
    assert idle == ("identity", Event.BATCH_START, None, False, 0, None, (), {})


def test_a_trace_names_the_changed_leaves():
    trace = trace_of([noise(), counter(), decay()])
    assert trace["noise", Event.AFTER_DATALOADER].changed == ("batch[0]",)
    assert trace["counter", Event.BATCH_END].changed == ("slots['counter']",)
    assert set(trace["decay", Event.BATCH_END].changed) == {
        f"params['{name}']" for name in ("0.weight", "0.bias", "3.weight", "3.bias")
    }


def test_a_leaf_replaced_by_the_same_bits_has_not_changed():
    same = changing("same", Event.BATCH_START, lambda s: s.replace(inputs=s.inputs.clone()))
    entry = trace_of([same])["same", Event.BATCH_START]
    assert (entry.ran, entry.changed) == (True, ())


def test_runs_count_microbatches_and_changes_come_together():
    zero = changing(
        "zero", Event.BEFORE_FORWARD, lambda s: s.replace(inputs=s.inputs.clamp(min=0)) if s.first_example else s
    )
    entry = trace_of([zero], k=3)["zero", Event.BEFORE_FORWARD]
    assert (entry.runs, entry.changed) == (3, ("batch[0]",))


def test_amounts_are_relative_and_the_largest_of_the_runs():
    scale = changing(
        "scale", Event.BEFORE_FORWARD, lambda s: s.replace(inputs=s.inputs * (1.5 if s.first_example else 1.25))
    )
    assert trace_of([scale], k=2)["scale", Event.BEFORE_FORWARD].amounts == {"batch[0]": pytest.approx(0.5)}
    assert trace_of([decay(factor=0.9)])["decay", Event.BATCH_END].amounts["params['0.weight']"] == pytest.approx(0.1)
    # A leaf that is new, of another shape or of integers has no amount.
    assert trace_of([counter()])["counter", Event.BATCH_END].amounts == {"slots['counter']": pytest.approx(math.inf)}
    drop = changing("drop", Event.AFTER_DATALOADER, lambda s: s.replace(inputs=s.inputs[:2], targets=s.targets[:2]))
    entry = trace_of([drop])["drop", Event.AFTER_DATALOADER]
    assert (entry.changed, entry.amounts) == (("batch[0]", "batch[1]"), {})


def test_exit_codes():
    log = []

    def apply(event, state):
        log.append(event)
        return state, len(log)

    trace = trace_of([Algorithm("coded", on(Event.BATCH_START, Event.BEFORE_LOSS), apply), noise()], k=2)
    assert trace["coded", Event.BATCH_START].exit_code == 1
    assert trace["coded", Event.BEFORE_LOSS].exit_code == 3
    assert trace["noise", Event.AFTER_DATALOADER].exit_code is None


def test_an_algorithm_that_a_pass_adds_has_entries():
    log = []

    def with_extra(algorithms, event):
        return [extra, *algorithms] if event is Event.BATCH_START else algorithms

    def scaled(event, state):
        log.append(event)
        return state.replace(inputs=2 * state.inputs), 7

    extra = Algorithm("extra", on(Event.BATCH_START), scaled)
    trace = trace_of([recorder([], "a", Event.BATCH_START)], passes=[with_extra])
    assert log == [Event.BATCH_START]
    entry = trace["extra", Event.BATCH_START]
    assert entry == ("extra", Event.BATCH_START, 0, True, 1, 7, ("batch[0]",), {"batch[0]": pytest.approx(1.0)})
    assert trace["a", Event.BATCH_START].order == 1
    assert not trace["extra", Event.AFTER_LOSS].ran and len(trace) == 2 * len(compose(loop_events).events)


def test_an_unknown_entry():
    trace = trace_of([noise()])
    with pytest.raises(KeyError, match="no algorithm 'mixup'"):
        trace["mixup", Event.BATCH_START]
    with pytest.raises(KeyError, match="no event Event.EPOCH_END"):
        trace["noise", Event.EPOCH_END]


def test_a_printed_trace_shows_calls_and_names_inactive_algorithms():
    text = str(trace_of([noise(), counter(), pc.identity(), noise("late", when=pc.after(1.0))], state=finite()))
    lines = text.splitlines()
    assert lines[0].split() == ["event", "order", "algorithm", "runs", "exit", "changed"]
    assert any(line.split()[:-1] == ["AFTER_DATALOADER", "0", "noise", "1", "None", "batch[0]"] for line in lines)
    assert lines[-1] == "did not run: identity, late"
    assert str(trace_of([pc.identity()])).splitlines()[0] == "nothing ran"


def finite():
    return make_state(duration="9ba")


@settings(max_examples=8)
@given(names=st.lists(st.sampled_from(["noise", "decay", "counter"]), unique=True), k=st.integers(1, 3))
def test_the_traced_state_is_the_same_bit_for_bit(names, k):
    makers = {"noise": noise, "decay": decay, "counter": counter}
    for net, shape in ((make_mlp(dropout=0.5), (4,)), (make_cnn(), (2, 6, 6))):
        step = compose(loop_events, [makers[name]() for name in names], microbatches=k)
        plain = look = step.init(make_state(net))
        for seed in range(2):
            plain = step(plain, make_batch(seed, shape=shape))
            look, _ = traced(step)(look, make_batch(seed, shape=shape))
        assert_same(look, plain)
        assert look.timestamp == plain.timestamp
