"""The contract that a step checks of its algorithms, INIT, and the outer events."""

import random

import pytest
import torch

import purecompose as pc
from purecompose import Algorithm, Event, State, compose, hparam, loop_events, on, optim, schedule
from purecompose.errors import ContractError
from tests.helpers import (
    assert_close,
    assert_same,
    changing,
    counter,
    decay,
    loss_of,
    make_batch,
    make_batches,
    make_mlp,
    make_state,
    noise,
    recorder,
    run_steps,
)


# What an algorithm must keep


@pytest.mark.parametrize(
    ("fn", "path"),
    [
        (lambda s: s.replace(params={**s.params, "3.bias": s.params["3.bias"].double()}), "params['3.bias']"),
        (lambda s: s.replace(buffers={"new": torch.zeros(1)}), "buffers['new']"),
        (lambda s: s.replace(slots={**s.slots, "late": torch.zeros(1)}), "slots['late']"),
        (lambda s: s.replace(slots={"counter": s.slots["counter"].expand(2)}), "slots['counter']"),
        (lambda s: s.replace(hparams={"lr": torch.tensor(0.1)}), "hparams['lr']"),
        (lambda s: s.replace(opt_state={}), "opt_state['momentum']"),
    ],
)
def test_a_change_of_a_lasting_field_is_named_by_algorithm_and_path(fn, path):
    broken = changing("broken", Event.BATCH_END, fn)
    step = compose(loop_events, [counter(), decay(), broken, noise()])
    state = step.init(make_state())
    with pytest.raises(ContractError) as caught:
        step(state, make_batch())
    assert str(caught.value).startswith(f"broken at Event.BATCH_END changed state.{path}")


class Growing(torch.nn.Module):
    """A model whose first forward pass gives a buffer its shape."""

    def __init__(self):
        super().__init__()
        self.net = make_mlp()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        self.seen = x.detach().amax(0)
        return self.net(x)


def test_a_buffer_that_forward_gives_a_shape_is_named_with_a_remedy():
    with pytest.raises(ContractError, match=r"state.buffers\['seen'\] from float32\[0\].*run the network once"):
        compose(loop_events)(make_state(Growing()), make_batch())


def test_a_broken_step_is_refused_every_time():
    step = compose(loop_events, [changing("broken", Event.BATCH_END, lambda s: s.replace(slots={"x": s.loss}))])
    for _ in range(2):
        with pytest.raises(ContractError, match=r"slots\['x'\] from absent"):
            step(make_state(), make_batch())


def test_temporary_fields_may_change_freely():
    end = compose(
        loop_events,
        [
            changing("report", Event.AFTER_LOSS, lambda s: s.replace(metrics={"doubled": 2 * loss_of(s)})),
            changing("mess", Event.BATCH_END, lambda s: s.replace(batch=None, outputs=3, grads=None)),
        ],
    )(make_state(), make_batch())
    assert end.loss is not None
    assert end.metrics["doubled"] == 2 * end.loss
    assert (end.batch, end.outputs, end.grads, end.regrad, end.first_example) == (None,) * 5


def test_a_missing_return_statement_is_an_error():
    for event in (Event.BATCH_START, Event.INIT):
        step = compose(loop_events, [Algorithm("forgetful", on(event), lambda event, state: None)])  # pyright: ignore
        with pytest.raises(ContractError, match="forgetful: apply at .*return statement missing") as caught:
            step(step.init(make_state()), make_batch())
        assert caught.value.__notes__ == [f"in forgetful at {event}"]


@pytest.mark.parametrize("result", [3, (1, 2), "state"])
def test_a_result_of_a_wrong_type_is_an_error(result):
    step = compose(loop_events, [changing("odd", Event.BATCH_START, lambda state: result)])
    with pytest.raises(ContractError, match="must return a State or"):
        step(make_state(), make_batch())


@pytest.mark.parametrize(
    ("result", "hint"), [(torch.zeros(2), "got Tensor; return"), (None, "return statement missing")]
)
def test_a_stage_that_returns_no_state_is_named(result, hint):
    def noisy(state):
        return result

    step = compose([noisy, *loop_events])
    with pytest.raises(ContractError, match=rf"the stage noisy must return a State, .*{hint}"):
        step(make_state(), make_batch())


def test_only_init_and_host_algorithms_change_the_static_part():
    freeze = changing("freeze", Event.BATCH_END, lambda s: s.replace(frozen=frozenset({"0.weight"})))
    with pytest.raises(ContractError, match="freeze at Event.BATCH_END changed the static part"):
        compose(loop_events, [freeze])(make_state(), make_batch())


def test_errors_name_the_algorithm_and_event():
    def fail(state):
        raise KeyError("missing")

    for event in (Event.AFTER_LOSS, Event.INIT, Event.EPOCH_END):
        step = compose(loop_events, [changing("failing", event, fail)])
        with pytest.raises(KeyError, match="missing") as caught:
            step.fire(Event.EPOCH_END, step(step.init(make_state()), make_batch()))
        assert caught.value.__notes__ == [f"in failing at {event}"]


# init


def test_init_twice_is_init_once():
    log = []
    step = compose(loop_events, [counter(), recorder(log, "a", Event.INIT)])
    once = step.init(make_state())
    twice = step.init(once)
    assert_same(once, twice)
    assert once.context == twice.context
    assert log == [("a", Event.INIT)]
    moved = step(once, make_batch())
    assert_same(step.init(moved), moved)


def test_init_with_a_further_algorithm_only_initialises_that_one():
    log = []
    state = compose(loop_events, [recorder(log, "a", Event.INIT)]).init(make_state())
    step = compose(loop_events, [recorder(log, "a", Event.INIT), recorder(log, "b", Event.INIT)])
    state = step.init(state)
    assert log == [("a", Event.INIT), ("b", Event.INIT)]
    assert state.context.initialised == ("a", "b")


def test_a_missing_init_of_a_plain_match_is_explained():
    plain = Algorithm("plain", lambda event, state: event is Event.BATCH_END, lambda event, state: state)
    with pytest.raises(RuntimeError, match=r"step\.init.* \(match of plain is a plain function.* true at INIT"):
        compose(loop_events, [plain])(make_state(), make_batch())


def test_an_algorithm_that_reads_what_is_not_there_yet_is_told_from_where_it_is():
    def early(state: State) -> State:
        return state.replace(grads=dict(state.grads.items()))  # pyright: ignore[reportOptionalMemberAccess]

    with pytest.raises(AttributeError) as caught:
        compose(loop_events, [changing("early", Event.BEFORE_FORWARD, early)])(make_state(), make_batch())
    assert caught.value.__notes__[:2] == [
        "in early at Event.BEFORE_FORWARD",
        "there state.outputs, state.grads are None: a step has its batch from the start, outputs from AFTER_FORWARD "
        "on, and grads from AFTER_BACKWARD on",
    ]


def test_a_slot_that_was_not_made_and_an_assignment_are_explained():
    def assigning(state: State) -> State:
        state.loss = torch.zeros(())  # pyright: ignore[reportAttributeAccessIssue]
        return state

    for change, said in (
        (lambda state: state.replace(metrics={"mean": state.slots["early"]}), "it has no slot: match Event.INIT too"),
        (assigning, "a state is immutable: return state.replace"),
    ):
        with pytest.raises((KeyError, AttributeError)) as caught:
            compose(loop_events, [changing("early", Event.BATCH_END, change)])(make_state(), make_batch())
        assert caught.value.__notes__[1].startswith(said)


def test_without_init_events_no_init_is_needed():
    step, state = compose(loop_events, [noise()]), make_state()
    assert_same(step(state, make_batch()), step(step.init(state), make_batch()))


def scaling(name, scale):
    def apply(state: State) -> State:
        return state.replace(inputs=state.inputs * state.scalar(scale))

    return changing(name, Event.BATCH_START, apply, config={"scale": scale})


def test_hparams_and_schedules_of_algorithms_are_registered_at_init():
    ramp = schedule.linear(1.0, 0.0, t_max="4ba")
    algorithms = [scaling("a", hparam("scale", 0.5)), scaling("b", ramp), scaling("c", hparam("scale", 0.5))]
    step = compose(loop_events, algorithms)
    with pytest.raises(RuntimeError, match="a, b, c: not initialised"):
        step(make_state(), make_batch())
    state = step.init(make_state())
    assert {name: value.item() for name, value in state.hparams.items()} == {"scale": 0.5}

    inputs, targets = make_batch()
    later = state.replace(timestamp=state.timestamp.replace(batch=1))
    end = step(later, (inputs, targets))
    expected = compose(loop_events)(make_state(), (inputs * 0.25 * 0.75, targets))
    assert_close(end.params, expected.params)


# fire


def test_outer_events_fire_in_order_with_a_clock():
    log = []

    def apply(event, state):
        log.append((event, state.clock.batch.item()))
        return state.replace(params={name: param + 1 for name, param in state.params.items()})

    step = compose(loop_events, [Algorithm("outer", on(Event.EPOCH_END, Event.EVAL_START), apply)])
    state = run_steps(step, make_state(), make_batches(2))
    moved = step.fire("epoch_end", state)
    assert log == [(Event.EPOCH_END, 2)]
    assert_close(moved.params, {name: param + 1 for name, param in state.params.items()})
    assert (moved.timestamp, moved.clock) == (state.timestamp, None)
    assert step.fire(Event.FIT_END, state) is state


@pytest.mark.parametrize("event", [Event.INIT, Event.BATCH_END, Event.AFTER_LOSS])
def test_inner_events_are_not_fired_from_outside(event):
    with pytest.raises(ValueError, match="fires inside the step"):
        compose(loop_events).fire(event, make_state())


def changed_in_place(state: State) -> State:
    state.params["0.weight"].mul_(0.5)
    return state


def changed_in_a_dictionary(state: State) -> State:
    state.params["0.weight"] = state.params["0.weight"] * 0.5
    return state


def changed_in_the_batch(state: State) -> State:
    state.inputs.zero_()
    return state


def changed_through_data(state: State) -> State:
    state.inputs.data = 2 * state.inputs
    return state


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (changed_in_place, r"rude at Event.BATCH_START wrote in place into state.params\['0.weight'\]"),
        (changed_in_a_dictionary, "rude at Event.BATCH_START replaced an entry of a dictionary or list"),
        (changed_in_the_batch, "rude at Event.BATCH_START wrote in place into state.batch"),
        (changed_through_data, "rude at Event.BATCH_START wrote in place into state.batch"),
    ],
)
def test_writing_into_the_arguments_of_a_step_is_caught(fn, said):
    step = compose(loop_events, [changing("rude", Event.BATCH_START, fn)])
    with pytest.raises(ContractError, match=said):
        step(make_state(), make_batch())


def test_a_layer_that_works_in_place_on_the_batch_is_caught():
    net = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(4, 3))
    for algorithms in ([], [changing("innocent", Event.AFTER_FORWARD, lambda s: s)]):
        with pytest.raises(ContractError, match="the stage forward wrote in place into state.batch.*inplace=False"):
            compose(loop_events, algorithms)(make_state(net), make_batch())


def test_draws_from_global_generators_in_an_algorithm_are_caught():
    torchs = changing("torchs", Event.BATCH_START, lambda s: s.replace(inputs=s.inputs + torch.rand(())))
    with pytest.raises(pc.errors.UnkeyedRandomError, match=r"^`torch.rand` in <lambda> .*state.example_rng"):
        compose(loop_events, [torchs])(make_state(), make_batch())
    pythons = changing("pythons", Event.BATCH_START, lambda s: s.replace(inputs=s.inputs + random.random()))
    with pytest.raises(ContractError, match="pythons at Event.BATCH_START drew from the global generator"):
        compose(loop_events, [pythons])(make_state(), make_batch())


@pytest.mark.parametrize(
    "draw, named",
    [
        (lambda x: torch.rand_like(x), "`torch.rand(_like)?`"),
        (lambda x: torch.nn.functional.dropout(x), "`torch.nn.functional.dropout`, by `torch.Tensor.bernoulli_`,"),
        (lambda x: torch.distributions.Normal(x, 1.0).rsample(), "`torch.distributions.normal.Normal.rsample`.*"),
    ],
)
@pytest.mark.parametrize("transform", [lambda step: step, lambda s: pc.compile(s, backend="eager", quiet=True)])
def test_a_draw_in_a_loss_is_named_with_its_place(draw, named, transform):
    def noisy_loss(outputs, targets, reduction="mean"):
        return torch.nn.functional.cross_entropy(draw(outputs), targets, reduction=reduction)

    said = f"^{named} in <lambda> .*test_step_contract.py.*state.example_rng.*A loss has no key"
    with pytest.raises(pc.errors.UnkeyedRandomError, match=said):
        transform(compose(loop_events))(make_state(loss=noisy_loss), make_batch())


def test_slots_hold_tensors():
    counts = changing("counts", Event.INIT, lambda s: s.replace(slots={"counts": {"n": 0}}))
    with pytest.raises(ContractError, match=r"state.slots\['counts'\]\['n'\] is 0 \(int\): slots hold tensors"):
        compose(loop_events, [counts]).init(make_state())


@pytest.mark.parametrize("event", [Event.AFTER_LOSS, Event.BATCH_END, Event.EPOCH_END])
def test_metrics_are_tensors(event):
    """Observers read them long after the step."""
    number = changing("m", event, lambda s: s.replace(metrics={**s.metrics, "m": 3.0}))
    other = changing("other", event, lambda s: s.replace(metrics={**s.metrics, "tensor": torch.zeros(())}))
    step = compose(loop_events, [other, number, noise()])
    with pytest.raises(ContractError, match=rf"metrics\['m'\]: expected a tensor, got 3.0 \(float\) from m at {event}"):
        step.fire(Event.EPOCH_END, step(make_state(), make_batch()))

    def stage(state: State) -> State:
        return state.replace(metrics={"m": 3})

    staged = compose([*loop_events, stage])
    with pytest.raises(ContractError, match=r"metrics\['m'\]: .* got 3 \(int\) from a stage of the program"):
        staged(make_state(), make_batch())


def test_a_batch_of_another_size_is_checked_too():
    def keep(state: State) -> State:
        return state.replace(slots={"rows": state.inputs[:, 0]})

    start = Algorithm(
        "rows",
        on(Event.INIT, Event.BATCH_END),
        lambda event, state: keep(state) if event is Event.BATCH_END else state.replace(slots={"rows": torch.zeros(8)}),
    )
    step = compose(loop_events, [start])
    state = step(step.init(make_state()), make_batch(size=8))
    with pytest.raises(ContractError, match=r"rows at Event.BATCH_END changed state.slots\['rows'\].*\[8\].*\[3\]:"):
        step(state, make_batch(size=3))


def test_an_impossible_order_is_an_error_in_compose():
    late = on(Event.BATCH_END) & pc.after(0.5)
    chosen = [
        Algorithm("a", late, lambda e, s: s, runs_before=("b",)),
        Algorithm("b", late, lambda e, s: s, runs_before=("a",)),
    ]
    with pytest.raises(pc.errors.OrderError, match="a before b before a|b before a before b"):
        compose(loop_events, chosen)


@pytest.mark.parametrize("optimizer", [optim.sgd(0.1 * schedule.linear()), optim.sgd(hparam("lr", 0.1))])
def test_a_second_phase_brings_its_schedules_and_hparams(optimizer):
    step = compose(loop_events)
    state = make_state(batches_per_epoch=4).replace(optimizer=optimizer, opt_state={})
    end = step(step.init(state), make_batch())
    assert not torch.equal(end.params["0.weight"], state.params["0.weight"])


def test_a_schedule_of_an_algorithm_whose_init_is_over_is_evaluated():
    state = compose(loop_events, [scaling("a", hparam("scale", 0.5))]).init(make_state(batches_per_epoch=4))
    second = compose(loop_events, [scaling("a", schedule.linear())])
    second(second.init(state), make_batch())


def test_draws_do_not_repeat_from_step_to_step_or_in_evaluation():
    seen: dict[str, float] = {}

    def look(event: Event, state: State) -> State:
        draw = pc.random.uniform(state.rng("look"), ()).item()
        assert seen.setdefault(f"{event.name} {len(seen)}", draw) == draw
        return state

    events = (Event.AFTER_DATALOADER, Event.BATCH_END, Event.EVAL_BATCH_START)
    step = compose(loop_events, [Algorithm("look", on(*events), look)])
    # A step's events share its draws; watching runs nothing twice.
    state = make_state(batches_per_epoch=2)
    for batch in (make_batch(0), make_batch(1)):
        state = step(state, batch)
    pc.evaluate(state, [make_batch(0), make_batch(1)], step=step)
    values = list(seen.values())
    assert values[0] == values[1] and values[2] == values[3]  # one step, one place
    assert len(set(values)) == 4  # two steps and two evaluation batches
