"""The history contains the numbers of the run, and reads none of them before they are requested."""

from typing import Any

import pytest
import torch

from purecompose import Evaluator, Event, compose, evaluate, fit, loop_events, metrics, stack_states
from purecompose.observers import History, Recorder
from tests.observers.observer_helpers import make_batches, make_state


def test_records_are_those_of_the_hand_written_loop() -> None:
    batches, step, history = make_batches(), compose(loop_events), History()
    end = fit(step, make_state(), batches, observers=[history])
    state, expected = make_state(), []
    for epoch in range(3):
        for index, batch in enumerate(batches):
            state = step(state, batch)
            assert state.loss is not None
            gone_by = epoch + (index == len(batches) - 1)
            expected.append({"batch": 4 * epoch + index + 1, "epoch": gone_by, "loss": state.loss.item()})
    assert history.records == expected
    assert len(history) == 12
    assert all(torch.equal(end.params[name], state.params[name]) for name in state.params)


def test_evaluations_have_records_under_their_label() -> None:
    batches, history = make_batches(), History()
    evaluators = [
        Evaluator(batches, {"accuracy": metrics.accuracy}),
        Evaluator(batches[:1], {"accuracy": metrics.accuracy}, every="2ep", label="small"),
    ]
    end = fit(compose(loop_events), make_state(), batches, evaluate=evaluators, observers=[history])
    assert history.series("eval/accuracy")[0] == [4, 8, 12]
    assert history.series("small/accuracy")[0] == [8, 12]  # the last one at FIT_END
    expected = evaluate(end, batches, {"accuracy": metrics.accuracy})["accuracy"]
    assert history.series("eval/accuracy")[1][-1] == expected
    [record] = [record for record in history.records if "small/accuracy" in record and record["batch"] == 8]
    assert list(record) == ["batch", "epoch", "small/accuracy"]


def test_unread_values_are_bounded_and_right() -> None:
    history, state = History(), make_state()
    for value in range(2500):
        history(Event.BATCH_END, state.replace(loss=torch.tensor(float(value))))
    unread = sum(isinstance(record["loss"], torch.Tensor) for record in history._records)
    assert unread <= 1000
    assert history.series("loss")[1] == [float(value) for value in range(2500)]


def test_records_do_not_follow_a_loss_that_is_written_over() -> None:
    history, loss = History(), torch.tensor(1.0)
    history(Event.BATCH_END, make_state().replace(loss=loss))
    loss.fill_(2.0)
    assert history.series("loss")[1] == [1.0]


def test_metrics_of_several_kinds_become_plain_numbers() -> None:
    history = History()
    state = make_state().replace(
        loss=None,
        metrics={"kept": torch.tensor(5), "norm": torch.tensor(0.5, dtype=torch.float64)},
    )
    history(Event.BATCH_END, state)
    history(Event.EPOCH_START, state)
    assert history.records == [{"batch": 0, "epoch": 0, "kept": 5, "norm": 0.5}]
    assert type(history.records[0]["kept"]) is int


class Nowhere:
    """A sink that keeps nothing."""

    def write(self, records: list[dict[str, Any]]) -> None:
        del records


@pytest.mark.parametrize("event", [Event.BATCH_END, Event.EVAL_END])
@pytest.mark.parametrize("num_members", [None, 2])
def test_a_metric_that_is_not_a_single_number_is_skipped_with_one_warning(
    event: Event, num_members: int | None
) -> None:
    state = make_state()
    if num_members is not None:
        state = stack_states([state] * num_members)
    members = state.key.shape[:-1]
    metrics = {"by_class": torch.zeros(*members, 3), "mean": torch.zeros(members)}
    state = state.replace(metrics=metrics, loss=None, timestamp=state.timestamp.advance(4))
    for observer in (History(), Recorder(Nowhere())):
        with pytest.warns(
            UserWarning, match=r"metric 'by_class' is left out .* got a tensor of shape \(3,\)"
        ) as caught:
            observer(event, state)
            observer(event, state)
        assert len(caught) == 1


def test_the_records_given_out_are_copies() -> None:
    history = History()
    history(Event.BATCH_END, make_state().replace(loss=torch.tensor(1.0)))
    history.records[0]["loss"] = 7.0
    assert history.records[0]["loss"] == 1.0
