"""Samples in records: images and texts that the network makes."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from purecompose import compose, fit, loop_events
from purecompose.observers import (
    History,
    Image,
    MLflow,
    Recorder,
    Records,
    TensorBoard,
    WandB,
    image_samples,
    read_records,
    text_samples,
)
from tests.observers.observer_helpers import Kept, at, make_batches, make_state


def images_of(net: torch.nn.Module) -> torch.Tensor:
    """Return two images of 1 x 3 pixels: the network's mode, its first weight, and a draw."""
    first = next(net.parameters())[0, 0]
    values = torch.stack([torch.tensor(float(net.training)), first, torch.rand(())])
    return torch.stack([values, torch.tensor([0.0, 2.0, -1.0])]).reshape(2, 1, 1, 3)


def test_samples_are_of_the_networks_weights_at_their_time() -> None:
    kept, states = Kept(), {}
    monitors = [image_samples(images_of, num_columns=1), text_samples(lambda net: ["a", "b"], every="2ep", name="say")]
    start = make_state()
    torch.manual_seed(7)
    with Recorder(kept, every="2ba", monitors=monitors) as recorder:
        fit(
            compose(loop_events),
            start,
            make_batches(),
            observers=[recorder, lambda e, s: states.update({s.timestamp.batch: s})],
        )
    after = torch.rand(())
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(()))  # no draw of the run was consumed
    found = {record["batch"]: record for record in kept}
    assert [batch for batch, record in found.items() if "samples" in record] == [4, 8, 12]
    assert [(batch, record["say/1"]) for batch, record in found.items() if "say/1" in record] == [(8, "b")]
    for batch in (4, 8, 12):
        pixels = found[batch]["samples"].pixels
        assert pixels.shape == (1 + 2 + 1, 3, 3)
        weight = (states[batch].params["weight"][0, 0] * 255).round().clamp(0, 255)
        draw = (torch.rand((), generator=torch.Generator().manual_seed(batch)) * 255).round()
        assert pixels[0, :, 0].tolist() == [0, weight.item(), draw.item()]
        assert pixels[0, :, 1:].eq(pixels[0, :, :1]).all()  # grey
        assert pixels[1:3].eq(0).all() and pixels[3, :, 2].tolist() == [0, 255, 0]


def test_a_grid_has_rows_of_images() -> None:
    squares = torch.arange(1, 6, dtype=torch.uint8).reshape(5, 1, 1, 1).expand(5, 3, 2, 2)
    monitor = image_samples(lambda net: squares, every="1ba", num_columns=3)
    pixels = monitor(at(make_state(), 1))["samples"].pixels[..., 0]
    assert pixels.shape == (6, 10)
    assert pixels[::4, ::4].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert pixels[2:4].eq(0).all() and pixels[:, 2:4].eq(0).all()


def test_records_write_samples_to_files(tmp_path: Path) -> None:
    pil = pytest.importorskip("PIL.Image")
    path, history = tmp_path / "run.jsonl", History()

    def run(text: str) -> None:
        monitors = [image_samples(images_of, name="a/b"), text_samples(lambda net: text, name="say")]
        with Records(path, every="4ba", monitors=monitors) as records:
            fit(compose(loop_events), make_state(), make_batches(), observers=[records, history])

    run("ü")
    run("other")
    texts = [(tmp_path / f"run{n}.samples/ba00000004/say.txt").read_text(encoding="utf-8") for n in (".1", "")]
    assert texts == ["ü", "other"]
    assert sorted(file.name for file in (tmp_path / "run.samples/ba00000012").iterdir()) == ["a_b.png", "say.txt"]
    with pil.open(tmp_path / "run.samples/ba00000004/a_b.png") as image:
        assert image.size == (3 + 2 + 3, 1) and image.getpixel((6, 0)) == (255, 255, 255)
    assert [set(record) for record in read_records(path)] == [{"batch", "epoch", "time/sample", "loss"}] * 3


def test_tracking_services_get_texts_and_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method is called with the arguments that the service's own method takes."""
    calls: list[tuple[Any, ...]] = []

    def noting(name: str) -> Any:
        return lambda *args, **kwargs: calls.append((name, *args, *kwargs.items()))

    def fake(*names: str, **rest: Any) -> Any:
        return types.SimpleNamespace(**{name: noting(name) for name in names}, **rest)

    as_file = types.SimpleNamespace(Image=lambda x: ("png", x.shape))
    monkeypatch.setitem(sys.modules, "wandb", as_file)  # type: ignore[arg-type]
    mlflow = types.SimpleNamespace(
        MlflowClient=lambda: fake("log_batch", "log_text", "log_image"),
        entities=types.SimpleNamespace(Metric=lambda *args: args),
        exceptions=types.SimpleNamespace(MlflowException=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # type: ignore[arg-type]

    recorders = [TensorBoard(writer=fake("add_scalar", "add_text", "add_image")), WandB(fake("log")), MLflow("id")]
    image = Image(torch.zeros(2, 4, 3, dtype=torch.uint8))
    found = {}
    for recorder in recorders:
        recorder._outbox._sink.write([{"batch": 3, "loss": 0.5, "say": "hello", "see": image}])
        named = [(type(part).__name__ if hasattr(part, "shape") else part) for call in calls for part in call]
        found[type(recorder).__name__] = named
        calls.clear()
    assert found["TensorBoard"] == [
        *("add_scalar", "loss", 0.5, 3, "add_text", "say", "hello", 3),
        *("add_image", "see", "Tensor", 3, ("dataformats", "HWC")),
    ]
    assert found["WandB"] == ["log", {"loss": 0.5, "say": "hello", "see": ("png", (2, 4, 3))}, ("step", 3)]
    assert found["MLflow"][:8] == [
        *("log_text", "id", "hello", "say/ba00000003.txt"),
        *("log_image", "id", "ndarray", "see/ba00000003.png"),
    ]
