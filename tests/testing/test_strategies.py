"""Strategies: their examples are valid, varied enough, and shrink to the simplest one."""

import time
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings, strategies as st

import purecompose as pc
from purecompose import Event, after, algorithms as alg, between, compose, every, loop_events, on
from purecompose.core.loop import advance, update
from purecompose.core.operation import walk
from purecompose.core.scopes import Grad, Microbatches
from purecompose.testing import strategies as strategy
from purecompose.testing.case import Case
from purecompose.testing.record import run
from purecompose.testing.shipped import SHIPPED
from purecompose.testing.subject import Subject
from purecompose.testing.tasks import KINDS, TASKS, make_task
from purecompose.time import RunLength, Timestamp
from purecompose.time.predicates import Predicate, epoch_ends


def smallest(drawn: st.SearchStrategy[Any], condition=lambda value: True) -> Any:
    quick = settings(max_examples=500, database=None, phases=[Phase.generate, Phase.shrink], derandomize=True)
    return find(drawn, condition, settings=quick)


def sample(drawn: st.SearchStrategy[Any], count: int = 100) -> list[Any]:
    """Return drawn examples, the same in every run."""
    found = []

    @settings(max_examples=count, database=None, derandomize=True, phases=[Phase.generate])
    @given(drawn)
    def collect(value):
        found.append(value)

    collect()
    return found


def acts(name: str, when: Predicate) -> pc.Algorithm:
    return pc.Algorithm(name, when, lambda event, state: state)


# Events and time


def test_kinds_of_events_are_all_events_and_do_not_overlap():
    kinds = ["training", "evaluation", "prediction", "outer"]
    found = {kind: set(sample(strategy.events(kind=kind), 400)) for kind in kinds}
    assert set().union(*found.values()) == set(Event)
    assert sum(map(len, found.values())) == len(Event)
    assert found["training"] == set(compose(loop_events).events)
    assert {Event.INIT, Event.EPOCH_END} < found["outer"]
    assert smallest(strategy.events()) is Event.INIT
    assert smallest(strategy.events(kind="training")) is Event.AFTER_DATALOADER
    with pytest.raises(ValueError, match="kind='eval'.*'evaluation'"):
        strategy.events(kind="eval")


@given(strategy.timestamps())
def test_counters_fit_each_other(point):
    length = point.run.batches_per_epoch
    assert point.batch_in_epoch <= point.batch and point.sample_in_epoch <= point.sample
    assert length is None or (point.epoch, point.batch_in_epoch) == divmod(point.batch, length)
    if point.run.iteration_length is None:
        assert point.iteration == 0 and point.epoch_in_iteration == point.epoch


def test_timestamps_shrink_to_the_start_and_cover_the_run():
    assert smallest(strategy.timestamps()) == Timestamp(run=RunLength("1ep"))
    run_length = RunLength("2ep", batches_per_epoch=4)
    assert smallest(strategy.timestamps(run_length), lambda point: point.epoch == 1).batch == 4
    point = smallest(strategy.timestamps(RunLength(None)), lambda point: point.epoch > 0 and point.batch_in_epoch > 0)
    assert (point.epoch, point.batch, point.batch_in_epoch, point.sample) == (1, 2, 1, 0)
    assert smallest(strategy.timestamps(), lambda point: point.iteration > 0).run.iteration_length is not None
    assert smallest(strategy.timestamps(), Timestamp.is_finished).batch <= 1


def test_runs_are_counted_in_any_unit():
    assert smallest(strategy.runs()) == RunLength("1ep")
    for unit in ("ep", "ba", "sp", "tok", "iter"):
        found = smallest(strategy.runs(), lambda run, unit=unit: run.duration.unit.value == unit)
        assert found.duration.value == 1 and (unit == "iter") == (found.iteration_length is not None)
    assert smallest(strategy.runs(units=[None])).duration is None


@given(st.data())
def test_predicates_have_an_answer_in_their_run(data):
    run_length = data.draw(strategy.runs(units=("ep", "ba", "sp", "tok", "iter", "sec", None)))
    predicate = data.draw(strategy.predicates(run_length))
    point = data.draw(strategy.timestamps(run_length))
    for event in compose(loop_events).events:
        assert predicate(event, point_state(point)) in (True, False)


def point_state(point: Timestamp) -> Any:
    return type("Moment", (), {"timestamp": point})


def test_predicates_cover_all_forms():
    assert smallest(strategy.predicates()) == on(Event.AFTER_DATALOADER)
    drawn = [repr(predicate) for predicate in sample(strategy.predicates(), 300)]
    for part in ("after(", "before(", "every(", "epoch_ends", "in_epoch", " & ", " | ", "~"):
        assert any(part in text for text in drawn)
    assert smallest(strategy.predicates(RunLength()), lambda p: "every" in repr(p)) == every(1)


# Networks and data


@given(st.data(), st.sampled_from(KINDS))
def test_models_take_the_batches_of_their_kind(data, kind):
    before = torch.get_rng_state()
    net, batch = data.draw(strategy.models(kind)), data.draw(strategy.batches(kind, form="tuple", targets="soft"))
    inputs, targets = batch
    assert torch.equal(before, torch.get_rng_state())
    assert net.eval()(inputs).shape == targets.shape


def test_models_vary_and_shrink():
    plain = smallest(strategy.models())
    assert isinstance(plain[0], torch.nn.Linear) and not has_dropout(plain)
    tied = smallest(strategy.models(), lambda net: hasattr(net, "head") and net.head.weight is net.embedding.weight)
    assert not has_dropout(tied)
    for kind in KINDS:
        assert has_dropout(smallest(strategy.models(kind), has_dropout))


def has_dropout(net: torch.nn.Module) -> bool:
    return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in net.modules())


def test_batches_vary_and_shrink():
    inputs, targets = smallest(strategy.batches())
    assert inputs.shape == (1, 4) and targets.dtype == torch.int64
    tokens = smallest(strategy.batches(), lambda batch: isinstance(batch, dict) and "input_ids" in batch)
    assert tokens["input_ids"].shape == (1, 5)
    images, soft = smallest(strategy.batches("images", targets="soft", form="tuple", min_size=3, dtype=torch.float64))
    assert images.shape == (3, 2, 6, 6) and images.dtype == soft.dtype == torch.float64


def test_tasks_shrink_to_the_first():
    assert smallest(strategy.tasks()) == TASKS["vectors"]
    assert smallest(strategy.tasks(), lambda task: task.name not in TASKS) == make_task()
    found = smallest(strategy.tasks(), lambda t: t.name not in TASKS and t.kind == "images" and "dict" in t.name)
    assert found == make_task("images", form="dict")


@given(st.data(), strategy.tasks())
def test_states_take_a_step(data, task):
    state = data.draw(strategy.states(task))
    end = compose(loop_events)(state, task.make_batch(0, 3))
    assert end.loss is not None and torch.isfinite(end.loss)
    assert end.timestamp.batch == state.timestamp.batch + 1


def test_states_vary_and_shrink():
    plain = smallest(strategy.states())
    assert plain.timestamp.batch == 0 and plain.params.keys() == TASKS["vectors"].make_state(0).params.keys()
    assert not plain.opt_state.get("momentum")
    for key in ("exp_avg", "momentum"):
        assert key in smallest(strategy.states(), lambda state, key=key: bool(state.opt_state.get(key))).opt_state
    late = smallest(strategy.states(TASKS["soft"]), lambda state: state.timestamp.batch > 1)
    assert late.timestamp.batch == 2


def test_states_contain_the_slots_of_algorithms():
    counter = pc.Algorithm(
        "counter",
        on(Event.INIT),
        lambda event, state: state.replace(slots={**state.slots, "counter": torch.zeros(())}),
    )
    assert "counter" in smallest(strategy.states(algorithms=[counter])).slots


# Algorithms and programs


@pytest.mark.filterwarnings("ignore:.*replaces the gradients", "ignore:gradient_accumulation. the run has ended within")
@given(strategy.algorithm_lists(), st.integers(1, 2))
def test_lists_of_algorithms_compose(algorithms, k):
    case = Case(num_batches=2, microbatches=k)
    end = run(case.step(*algorithms), case.state(), case.batches()).states[-1]
    assert end.loss is not None and torch.isfinite(end.loss)


def test_an_algorithm_shrinks_to_common_settings():
    assert repr(smallest(strategy.algorithms("mixup"))) == "mixup(alpha=0.2, interpolate_loss=False)"


def test_drawn_algorithms_are_accepted_by_the_task():
    drawn = {algorithm.name for algorithm in sample(strategy.algorithms(task=TASKS["tokens"]), 300)}
    assert drawn == {name for name, row in SHIPPED.items() if row.accepts(TASKS["tokens"])} >= {"label_smoothing"}
    assert "mixup" not in drawn
    with pytest.raises(ValueError, match="name='mixupp'.*mixup"):
        strategy.algorithms("mixupp")
    lists = strategy.algorithm_lists()
    assert smallest(lists) == []
    assert {a.name for a in smallest(lists, lambda found: len(found) == 3)} <= SHIPPED.keys()


@pytest.mark.filterwarnings("ignore:.* which the program does not have", "ignore:the step trains nothing")
@given(strategy.programs(), st.integers(1, 3))
def test_programs_compose_and_run(program, k):
    case = Case(microbatches=k, others=("bystander",))
    step = case.step(microbatches=k, program=program)
    end = step(step.init(case.state()), case.batch(0))
    trains = any(node is update for node in walk(program))
    assert (end.timestamp.batch == 1) == any(node is advance for node in walk(program))
    assert trains == any(not torch.equal(p, case.state().params[n]) for n, p in end.params.items())


@given(strategy.programs(trains=True))
def test_halves_of_a_pair_stay_together(program):
    kept = {node for node in walk(program) if isinstance(node, Event)}
    for event in compose(loop_events).events:
        twins = {e for e in compose(loop_events).events if e.canonical_name == event.canonical_name}
        assert twins <= kept or not twins & kept


def test_programs_vary_and_shrink():
    def is_sliced(program):
        return any(isinstance(node, Microbatches) for node in walk(program))

    assert smallest(strategy.programs()) == loop_events
    assert is_sliced(loop_events)
    bare = smallest(strategy.programs(trains=True), lambda program: not is_sliced(program))
    assert sum(isinstance(node, Grad) for node in bare) == 1
    assert set(walk(bare)) & set(Event) == set(compose(loop_events).events)
    fixed = [node for node in walk(smallest(strategy.programs(), has_own_k)) if isinstance(node, Microbatches)]
    assert [node.microbatches for node in fixed] == [1]
    assert smallest(strategy.programs(trains=False)) == ()
    assert smallest(strategy.programs(), lambda program: not any(node is update for node in program)) == ()


def has_own_k(program):
    return any(isinstance(node, Microbatches) and node.microbatches for node in walk(program))


# Cases


def test_cases_shrink_to_the_simplest():
    assert smallest(strategy.cases()) == Case(batch_size=2, num_batches=1, batches_per_epoch=1, epochs=3)
    found = smallest(strategy.cases(), lambda case: case.microbatches > 1 and case.others)
    expected = Case(microbatches=2, others=("bystander",), batch_size=2, batches_per_epoch=1, epochs=3)
    assert found == expected
    found = smallest(strategy.cases([TASKS["images"]]), lambda case: case.start > 0)
    assert (found.start, found.batches_per_epoch * found.epochs, found.task.name) == (1, 4, "images")


@given(strategy.cases())
def test_cases_leave_room_for_the_further_steps_of_laws(case):
    assert case.start + 2 * case.num_batches + 1 <= case.epochs * case.batches_per_epoch


LOADED = on(Event.AFTER_DATALOADER)


@pytest.mark.parametrize(
    "algorithm",
    [
        alg.selective_backprop(start=0.5, end=0.9),
        alg.selective_backprop(start=0.5, end=0.9, full_every=0),
        "selective_backprop(0.9, 1.0, full_every=3)",
        acts("late", LOADED & after("1000ba")),
        acts("window", LOADED & between("10ep", "12ep")),
        acts("rare", LOADED & every("3ep")),
        acts("rare_end", on(Event.BATCH_END) & every(10)),
        acts("ends", LOADED & epoch_ends()),
        acts("samples", LOADED & after("100sp")),
        acts("plain", lambda event, state: event is Event.BATCH_END),  # pyright: ignore[reportArgumentType]
        acts("start", on(Event.BATCH_START) | (LOADED & between("50ba", "52ba"))),
    ],
    ids=lambda given: given if isinstance(given, str) else repr(given.match),
)
def test_most_cases_let_the_algorithm_act(algorithm):
    cases = sample(strategy.cases([TASKS["vectors"]], algorithm=algorithm), 60)
    subject = Subject.of(algorithm).algorithm
    for case in cases:
        left = case.epochs * case.batches_per_epoch - case.start
        assert case.start >= 0 and (left > 2 * case.num_batches or (left >= 1 and case.num_batches == 1))
    assert sum(fires(subject, case) for case in cases) >= 0.5 * len(cases)
    shrunk = smallest(strategy.cases(algorithm=algorithm))
    assert fires(subject, shrunk)
    assert (shrunk.batch_size, shrunk.num_batches, shrunk.microbatches, shrunk.others) == (2, 1, 1, ())


def fires(algorithm: pc.Algorithm, case: Case) -> bool:
    """Return whether it acts at its rarest event in the case's steps, according to the matcher."""
    rarest = Event.BATCH_END if algorithm.name in ("rare_end", "plain") else Event.AFTER_DATALOADER
    step, now = case.step(algorithm), case.state().timestamp
    for _ in range(case.num_batches):
        bits = step.matcher.schedule(case.state(), case.batch(0), now, now.advance(case.batch_size))
        if algorithm.name in {a.name for a in step.matcher.matched(bits, rarest, step.algorithms)}:
            return True
        now = now.advance(case.batch_size)
    return False


def test_some_cases_begin_near_a_change_but_do_not_act():
    late = acts("late", LOADED & after("1000ba"))
    case = smallest(strategy.cases(algorithm=late), lambda case: case.start == 999)
    assert not fires(late, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cases", "states", "tasks", "batches", "models", "programs", "predicates"])
def test_an_example_takes_a_few_milliseconds(name):
    drawn = getattr(strategy, name)()
    begun = time.process_time()
    count = len(sample(drawn))
    assert (time.process_time() - begun) / count < 0.3  # a hundred times the duration on an idle machine
