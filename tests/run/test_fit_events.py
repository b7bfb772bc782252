"""The order and the number of the events of a fit, and when its evaluators run."""

from collections import Counter

import pytest
import torch

import purecompose as pc
from purecompose import Evaluator, Event, compose, evaluate, fit, loop_events, optim
from tests.helpers import Unsized, make_batch, make_batches, make_state, recorder


def names(text: str) -> list[Event]:
    return [Event(name) for name in text.split()]


def events_of(num_batches, duration, *, k=1, evaluators=0, every="1ep", state=None, data=None):
    """Return the events of a fit seen by observers and a recording algorithm, in one list."""
    log = []
    inner = compose(loop_events).events
    eval_inner = names("EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD")
    recording = recorder(log, "inner", *[e for e in inner if e is not Event.BATCH_END], *eval_inner)

    def observer(event, state):
        del state
        log.append(("outer", event))

    data = make_batches(num_batches, size=4) if data is None else data
    state = make_state(batches_per_epoch=None) if state is None else state
    fit(
        compose(loop_events, [recording], microbatches=k),
        state,
        data,
        duration=duration,
        evaluate=[Evaluator(make_batches(1), every=every, label=str(i)) for i in range(evaluators)],
        observers=[observer],
    )
    return [event for _, event in log]


SLICE = "BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD "


def batch_events(k=1):
    return (
        "BEFORE_DATALOADER AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH "
        + SLICE * k
        + "AFTER_TRAIN_BATCH BATCH_END "
    )


EVALUATED = "EVAL_START EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END "
ROUND = "EVAL_BEFORE_ALL " + EVALUATED + "EVAL_AFTER_ALL "


# Events


@pytest.mark.parametrize("is_sized", [True, False])
def test_the_sequence_of_one_epoch(is_sized):
    data = make_batches(2, size=4)
    found = events_of(2, "1ep", k=2, evaluators=1, data=data if is_sized else Unsized(data))
    expected = "FIT_START EPOCH_START "
    expected += (batch_events(2) + "BATCH_CHECKPOINT ") * 2
    expected += "BEFORE_DATALOADER EPOCH_END " + ROUND + "EPOCH_CHECKPOINT FIT_END"
    assert found == names(expected)


def test_the_sequence_with_evaluations_at_batches():
    found = events_of(2, "2ba", evaluators=2, every="2ba")
    expected = "FIT_START EPOCH_START " + batch_events() + "BATCH_CHECKPOINT "
    expected += batch_events() + "EVAL_BEFORE_ALL " + EVALUATED * 2 + "EVAL_AFTER_ALL BATCH_CHECKPOINT "
    # The run stops at the epoch's last batch: the epoch ends, but no further batch is requested.
    expected += "EPOCH_END EPOCH_CHECKPOINT FIT_END"
    assert found == names(expected)


def test_the_final_evaluation_comes_after_fit_end():
    found = events_of(4, "3ba", evaluators=1, every="2ba")
    assert found[-len(names(ROUND)) - 1 :] == names("FIT_END " + ROUND)
    assert Counter(found)[Event.EVAL_START] == 2
    assert Event.EPOCH_END not in found and Event.EPOCH_CHECKPOINT not in found


@pytest.mark.parametrize("is_sized", [True, False])
@pytest.mark.parametrize(("num_batches", "epochs", "k"), [(1, 1, 1), (3, 1, 2), (2, 3, 1)])
def test_the_numbers_of_events(num_batches, epochs, k, is_sized):
    data = make_batches(num_batches, size=4)
    data = data if is_sized else Unsized(data)
    found = Counter(events_of(num_batches, f"{epochs}ep", k=k, evaluators=2, data=data))
    steps = num_batches * epochs
    expected = dict.fromkeys(names("FIT_START FIT_END"), 1)
    expected |= dict.fromkeys(names("EPOCH_START EPOCH_END EPOCH_CHECKPOINT"), epochs)
    expected |= dict.fromkeys(
        names("AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT"), steps
    )
    expected |= dict.fromkeys(names(SLICE), steps * k)
    expected |= {Event.BEFORE_DATALOADER: steps + epochs}
    expected |= dict.fromkeys(names("EVAL_BEFORE_ALL EVAL_AFTER_ALL"), epochs)
    expected |= dict.fromkeys(names(EVALUATED), 2 * epochs)
    assert found == expected


class Embedder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(5, 3)

    def forward(self, ids):
        return self.table(ids).mean(1)


def token_setting(**options):
    """Return a state and batches of 12 tokens each."""
    batch = {"input_ids": torch.arange(12).reshape(4, 3) % 5, "labels": torch.tensor([0, 1, 2, 0])}
    return make_state(Embedder(), input_field="input_ids", target_field="labels", **options), [batch] * 4


@pytest.mark.parametrize(("duration", "num_batches"), [("1tok", 1), ("12tok", 1), ("25tok", 3), ("60tok", 5)])
def test_durations_in_tokens(duration, num_batches):
    state, data = token_setting()
    end = fit(compose(loop_events), state, data, duration=duration)
    assert (end.timestamp.batch, end.timestamp.token) == (num_batches, 12 * num_batches)


# Intervals of evaluation, the final one included


@pytest.mark.parametrize(
    ("every", "duration", "expected"),
    [
        ("1ep", "5ep", 5),
        ("2ep", "8ep", 4),
        ("10ba", "8ep", 4),
        ("0.25dur", "4ep", 4),
        ("1ep", "4ep", 4),
        ("5ba", "4ep", 4),
        ("5ba", "10ba", 2),
        ("0.35dur", "4ep", 3),
        ("0.01dur", "100ba", 100),
        ("0.1dur", "70sp", 10),
        ("0.05dur", "80sp", 20),
        ("1sp", "10sp", 5),
        ("4sp", "3ep", 8),
        ("3sp", "1ep", 3),
        ("100ba", "1ep", 1),
        (lambda now: now.batch in (1, 3, 10), "2ep", 3),
        (lambda now: now.batch_in_epoch == 0 and now.epoch in (1, 3), "4ep", 3),
    ],
)
@pytest.mark.parametrize("is_sized", [True, False])
def test_number_of_evaluations_by_interval(every, duration, expected, is_sized):
    """Ten samples in batches of two; the parameters are those of the reference's table, and a few more."""
    log = []
    data = make_batches(5, size=2)
    state = make_state(optimizer=optim.sgd(0.01))
    fit(
        compose(loop_events),
        state,
        data if is_sized else Unsized(data),
        duration=duration,
        evaluate=Evaluator([make_batch()], every=every),
        observers=[lambda event, state: log.append(state.timestamp) if event is Event.EVAL_START else None],
    )
    assert len(log) == expected
    assert len(set(log)) == expected


@pytest.mark.parametrize("is_sized", [True, False])
def test_a_function_as_interval_is_called_once_for_a_point_in_time(is_sized):
    asked, data = [], make_batches(3)
    evaluator = Evaluator([make_batch()], every=lambda now: bool(asked.append(now)))
    fit(compose(loop_events), make_state(), data if is_sized else Unsized(data), duration="2ep", evaluate=evaluator)
    assert len(asked) == len(set(asked)) == (6 if is_sized else 8)


def test_a_function_as_interval_must_return_a_bool():
    evaluator = Evaluator([], every=lambda now: now.batch)  # pyright: ignore
    with pytest.raises(TypeError, match="expected a function Timestamp -> bool, got 1 from it"):
        fit(compose(loop_events), make_state(), make_batches(2), duration="1ep", evaluate=evaluator)


def test_a_fraction_needs_a_duration():
    with pytest.raises(ValueError, match="fractions of the run need a run with a duration"):
        fit(
            compose(loop_events),
            make_state(duration=None),
            make_batches(2),
            duration="60sec",
            evaluate=Evaluator([make_batch()], every="0.5dur"),
        )


def test_each_evaluator_has_its_own_interval_and_numbers():
    found = {"a": [], "b": []}
    tests = {"a": make_batches(1), "b": make_batches(2, size=3)}
    current = []

    def observer(event, state):
        if event is Event.BATCH_END:
            current[:] = [state]
        if event is Event.EVAL_END:
            ((full_name, value),) = state.metrics.items()
            label, name = full_name.split("/")
            expected = evaluate(current[0], tests[label], {name: pc.metrics.accuracy})[name]
            found[label].append((state.timestamp.batch, value.item() == expected))

    fit(
        compose(loop_events),
        make_state(),
        make_batches(3),
        duration="4ba",
        evaluate=[
            Evaluator(tests["a"], {"accuracy": pc.metrics.accuracy}, "2ba", label="a"),
            Evaluator(tests["b"], {"accuracy": pc.metrics.accuracy}, "3ba", label="b"),
        ],
        observers=[observer],
    )
    assert found == {"a": [(2, True), (4, True)], "b": [(3, True), (4, True)]}


# Loading


def noting(log: list) -> pc.Algorithm:
    """Return an algorithm that logs the batch and the run's length when it acts, and counts loads in its slot."""

    def apply(event, state):
        log.append((event, state.timestamp.batch, str(state.timestamp.run.duration)))
        if event is Event.AFTER_LOAD:
            return state.replace(slots={**state.slots, "loads": state.slots["loads"] + 1})
        return state.replace(slots={**state.slots, "loads": torch.tensor(0)}) if event is Event.INIT else state

    return pc.Algorithm("loads", pc.on(Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD), apply, host=True)


@pytest.mark.parametrize("is_auto", [True, False])
def test_a_resumed_run_fires_the_events_of_loading_for_its_algorithms(tmp_path, is_auto):
    seen, told = [], []
    step, start = compose(loop_events, [noting(seen)]), make_state(batches_per_epoch=3)
    checkpoints = pc.Checkpoints(tmp_path, background=False)

    def run(duration, resume):
        def observer(event, state):
            told.append((event, state.timestamp.batch))

        settings = {"checkpoints": checkpoints, "resume": resume, "observers": observer}
        return fit(step, start, make_batches(3), duration=duration, **settings)

    run("1ep", "auto")
    assert [event for event, *_ in seen] == [Event.INIT] and told[0] == (Event.FIT_START, 0)  # nothing was loaded
    seen.clear()
    told.clear()
    end = run("2ep", "auto" if is_auto else pc.saving.newest(tmp_path))
    assert seen == [(Event.INIT, 0, "2ep"), (Event.BEFORE_LOAD, 0, "2ep"), (Event.AFTER_LOAD, 3, "2ep")]
    assert told[0] == (Event.FIT_START, 3)  # observers start here, as they would mistake the template for the run
    assert end.slots["loads"] == 1


def test_load_fires_its_events_for_the_algorithms_of_the_step(tmp_path):
    seen = []
    step = compose(loop_events, [noting(seen)])
    state = step(step.init(make_state()), make_batch())
    pc.save(state, tmp_path / "one", step=step)
    like = step.init(make_state())
    assert pc.load(tmp_path / "one", like).slots["loads"] == 0
    seen.clear()
    assert pc.load(tmp_path / "one", like, step=step).slots["loads"] == 1
    assert [(event, batch) for event, batch, _ in seen] == [(Event.BEFORE_LOAD, 0), (Event.AFTER_LOAD, 1)]
