"""Recorders for tracking services, against fakes with the interfaces of the real ones."""

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from purecompose import Evaluator, Event, compose, fit, loop_events, metrics, population
from purecompose.observers import History, MLflow, TensorBoard, WandB, learning_rate
from purecompose.observers.trackers import _Table
from tests.observers.observer_helpers import at, make_batches, make_population, make_state


def run(observer: Any) -> list[dict[str, Any]]:
    """Run with the observer, and return the expected records."""
    history = History()
    evaluator = Evaluator(make_batches(), {"accuracy": metrics.accuracy})
    fit(compose(loop_events), make_state(), make_batches(), evaluate=evaluator, observers=[observer, history])
    return history.records


def triples(records: list[dict[str, Any]]) -> list[tuple[str, float, int]]:
    """Return (name, value, step) of all numbers except the counters."""
    return [
        (name, value, record["batch"])
        for record in records
        for name, value in record.items()
        if name not in ("batch", "epoch")
    ]


class FakeWriter:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.flushes = 0

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None:
        self.flushes += 1


def test_tensorboard_has_a_scalar_for_each_number() -> None:
    writer = FakeWriter()
    expected = run(TensorBoard(writer=writer))
    plain = [entry for entry in writer.scalars if entry[0] not in ("epoch", "time/sample")]
    assert plain == triples(expected)
    assert ("epoch", 1, 4) in writer.scalars and ("time/sample", 32, 4) in writer.scalars
    assert writer.flushes > 0


def test_members_have_their_own_scalars() -> None:
    writer = FakeWriter()
    step = population(compose(loop_events), 2)
    end = fit(step, make_population(2), make_batches(), observers=TensorBoard(writer=writer, every="12ba"))
    assert end.loss is not None
    first, second = end.loss.tolist()
    assert ("loss/0", first, 12) in writer.scalars and ("loss/1", second, 12) in writer.scalars


def test_tensorboards_files_contain_the_run_and_hide_repeated_batches(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoard(tmp_path) as board:
        run(board)
    with TensorBoard(tmp_path) as board:  # continues from a checkpoint after batch 8
        board(Event.FIT_START, at(make_state(), 8))
        board(Event.BATCH_END, at(make_state(), 9, loss=torch.tensor(7.0)))
    found = EventAccumulator(str(tmp_path)).Reload()
    losses = [(event.step, event.value) for event in found.Scalars("loss")]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert losses[-1] == (9, 7.0)


class FakeRun:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.is_finished = False

    def log(self, numbers: dict[str, Any], step: int) -> None:
        self.rows.append((step, numbers))

    def finish(self) -> None:
        self.is_finished = True


def test_wandb_logs_records_at_their_batch() -> None:
    fake = FakeRun()
    observer = WandB(fake, monitors=learning_rate())
    expected = run(observer)
    observer.close()
    assert [step for step, _ in fake.rows] == [record["batch"] for record in expected]
    assert [row["loss"] for _, row in fake.rows if "loss" in row] == [r["loss"] for r in expected if "loss" in r]
    assert fake.rows[0][1] == {"epoch": 0, "time/sample": 8, "loss": expected[0]["loss"], "lr": 0.5}
    assert not fake.is_finished  # it belongs to the caller


def test_wandb_makes_a_run_and_finishes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, settings = FakeRun(), []
    module = types.SimpleNamespace(init=lambda **given: (settings.append(given), fake)[1])
    monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]
    with WandB(settings={"project": "digits"}) as observer:
        assert settings == []
        run(observer)
        assert not fake.is_finished
    assert settings == [{"project": "digits"}] and fake.is_finished and len(fake.rows) == 15
    with pytest.raises(TypeError, match="not both"):
        WandB(fake, settings={})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'purecompose\[wandb\]'"):
        WandB()


@dataclasses.dataclass
class Metric:
    key: str
    value: float
    timestamp: int
    step: int


class MlflowException(Exception):
    pass


class FakeClient:
    def __init__(self) -> None:
        self.requests: list[tuple[str, list[Metric]]] = []
        self.is_down = False

    def log_batch(self, run_id: str, metrics: list[Metric]) -> None:
        if self.is_down:
            raise MlflowException("no answer")
        self.requests.append((run_id, list(metrics)))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    client = FakeClient()
    fake = types.SimpleNamespace(
        client=client,
        ended=0,
        MlflowClient=lambda: client,
        active_run=lambda: None,
        start_run=lambda: types.SimpleNamespace(info=types.SimpleNamespace(run_id="new")),
        entities=types.SimpleNamespace(Metric=Metric),
        exceptions=types.SimpleNamespace(MlflowException=MlflowException),
    )
    fake.end_run = lambda: setattr(fake, "ended", fake.ended + 1)
    monkeypatch.setitem(sys.modules, "mlflow", fake)  # type: ignore[arg-type]
    return fake


def test_mlflow_gets_batches_of_metrics(mlflow: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purecompose.observers.trackers._MlflowRun.most", 5)
    client = mlflow.client
    expected = run(MLflow("run-1"))
    assert {run_id for run_id, _ in client.requests} == {"run-1"}
    assert all(len(sent) <= 5 for _, sent in client.requests)
    sent = [(one.key, one.value, one.step) for _, request in client.requests for one in request]
    assert [entry for entry in sent if entry[0] not in ("epoch", "time/sample")] == triples(expected)
    assert mlflow.ended == 0


def test_mlflow_makes_a_run_where_none_is_active(mlflow: types.SimpleNamespace) -> None:
    with MLflow(monitors=lambda state: {"lr/*.bias": 0.5}) as observer:
        run(observer)
    assert {run_id for run_id, _ in mlflow.client.requests} == {"new"} and mlflow.ended == 1
    assert {one.key for _, request in mlflow.client.requests for one in request} >= {"lr/_.bias", "loss"}
    mlflow.active_run = lambda: types.SimpleNamespace(info=types.SimpleNamespace(run_id="active"))
    with MLflow() as observer:
        run(observer)
    assert mlflow.client.requests[-1][0] == "active" and mlflow.ended == 1


def test_a_server_that_is_down_is_tried_again(mlflow: types.SimpleNamespace) -> None:
    observer = MLflow("run-1")
    mlflow.client.is_down = True
    with pytest.warns(RuntimeWarning, match="MLflow: no answer") as warned:
        expected = run(observer)
    assert len(warned) == 1
    mlflow.client.is_down = False
    observer.close()
    sent = [(one.key, one.value, one.step) for _, request in mlflow.client.requests for one in request]
    assert [entry for entry in sent if entry[0] not in ("epoch", "time/sample")] == triples(expected)


def test_a_table_gets_new_columns_and_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.csv"
    sink: Any = _Table(path)
    sink.begin(0)
    sink.write([{"batch": 1, "epoch": 0, "loss": 0.5}, {"batch": 2, "epoch": 0, "eval/accuracy": [0.25, 1.0]}])
    assert path.read_text().splitlines() == [
        "batch,epoch,loss,eval/accuracy/0,eval/accuracy/1",
        "1,0,0.5,,",
        "2,0,,0.25,1.0",
    ]
    again: Any = _Table(path)
    again.begin(1)
    again.write([{"batch": 2, "epoch": 0, "loss": 0.25, "note": 'a, "b"'}])
    assert path.read_text().splitlines()[1:] == ["1,0,0.5,,,", '2,0,0.25,,,"a, ""b"""']
    again.begin(0)
    assert path.read_text().splitlines() == ["batch"]
