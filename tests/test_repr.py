"""What a notebook or a prompt prints of values."""

from pathlib import Path

import torch

import purecompose as pc
from purecompose.observers import History
from purecompose.records import Predictions
from tests.markup import parsed
from tests.records.run_helpers import STEP, at, made_up, make_batches, make_state


def test_tables_are_printed_as_tables() -> None:
    state = make_state()
    plan, summary = STEP.plan(state), pc.surgery.summary(state, make_batches(1)[0])
    _, trace = pc.traced(STEP)(STEP.init(state), make_batches(1)[0])
    for value in (plan, summary, trace):
        assert repr(value) == str(value) and len(str(value).splitlines()) > 2
    page = parsed(summary._repr_html_())
    assert "float32[8, 3]" in page.text and "15 parameters, 15 trainable, 60 bytes" in page.text


def test_a_history_tells_its_last_values() -> None:
    history = History()
    assert repr(history) == "History(0 records, the last of batch 0)"
    evaluator = pc.Evaluator(make_batches(1), {"accuracy": pc.metrics.accuracy})
    pc.fit(STEP, make_state(), make_batches(), observers=history, evaluate=evaluator)
    losses, (accuracy, *_) = history.series("loss")[1], reversed(history.series("eval/accuracy")[1])
    last = f"loss={losses[-1]:.4g}, eval/accuracy={accuracy:.4g}"
    assert repr(history) == f"History(15 records, the last of batch 12: {last})"
    page = parsed(history._repr_html_())
    assert f"loss12{losses[-1]:.4g}{min(losses):.4g}{max(losses):.4g}" in page.text


def test_the_history_of_a_population_has_ranges() -> None:
    history = History()
    history._records = [{"batch": 1, "epoch": 0, "loss": [1.0, 3.0, 2.0]}, {"batch": 2, "epoch": 0, "loss": [4.0, 1.5]}]
    assert repr(history) == "History(2 records, the last of batch 2: loss=1.5 to 4)"


def test_data_are_printed_without_their_numbers() -> None:
    inputs, targets = torch.zeros(6, 3), torch.arange(6)
    assert repr(pc.data.split(inputs, targets, 2, seed=0)) == (
        "Split(train_inputs=float32[4, 3], train_targets=int64[4], test_inputs=float32[2, 3], test_targets=int64[2])"
    )
    images = pc.data.ImageData(inputs, targets, inputs, targets, 6)
    assert repr(images).startswith("ImageData(train_inputs=float32[6, 3], ") and repr(images).endswith("num_classes=6)")
    loader = pc.data.loader([(inputs[i], i) for i in range(6)], batch_size=4)
    assert repr(loader) == "Loader(6 of list, batch_size=4, shuffle=True, drop_last=False)"
    assert "outputs=float32[6, 3], targets=int64[6], inputs=None" in repr(Predictions(inputs, targets))


def test_records_of_a_run_are_printed_in_a_line() -> None:
    run = made_up("runs/a", starts=(at(0, outcome="finished"),))
    assert repr(run) == f"RunRecords({str(Path('runs/a'))!r}, finished, 44 records)"
    assert repr(made_up("b", count=0)) == "RunRecords('b', not started, 0 records)"
