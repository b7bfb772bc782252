"""The model of benchmarks/scaling.py: its limits, and its bytes compared with those of traced steps."""

import dataclasses
import importlib
import pathlib
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from purecompose.transforms.compilation.updates import messages


FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("_scale_model")


@pytest.fixture
def tracing(model: Any) -> Any:
    del model  # it is found in the same folder
    return importlib.import_module("_counts")


def small(tracing: Any, network: str) -> Any:
    task = tracing.gpt(64, 16, 1, 2, 8) if network == "gpt" else tracing.resnet50(32, 4, 16)
    return task._replace(num_examples=(2, 4))


@pytest.mark.parametrize(
    ("network", "mode", "sizes"),
    [
        pytest.param("gpt", "data_parallel", (2, 4), marks=pytest.mark.slow),
        ("gpt", "step", (2, 4, 3)),  # 3 processes fill up rows
        pytest.param("gpt", "layer", (2, 4), marks=pytest.mark.slow),
        pytest.param("resnet", "data_parallel", (2, 4), marks=pytest.mark.slow),
    ],
)
def test_bytes_and_messages_are_those_of_steps_traced_for_other_numbers_of_processes(
    model: Any, tracing: Any, network: str, mode: str, sizes: tuple[int, ...]
) -> None:
    task = small(tracing, network)
    counts = tracing.counts(task, mode)
    for size in sizes:
        sent = model.sent(counts, model.Plan(mode, size, size, 2 * size))
        expected = sum(model.ring_bytes(one.kind, one.num_bytes, size) for one in sent)
        found, num = 0.0, 0
        with tracing.fake_processes(size):
            graph = tracing._traced(task, mode, init_device_mesh("cpu", (size,)), 2 * size).graph
            for node in messages(graph):
                (own,) = node.all_input_nodes
                name, num_bytes = str(node.target), own.meta["val"].nbytes
                whole = num_bytes * (size if "all_gather" in name else 1)
                found += (2 if "all_reduce" in name else 1) * whole * (size - 1) / size
                num += 1
        assert (num, found) == (len(sent), pytest.approx(expected, rel=1e-12))


def test_counts_are_those_of_formulas(tracing: Any) -> None:
    width, depth, length, vocabulary = 16, 2, 320, 64  # too long for `short_attention`, as the counted networks are
    task = tracing.gpt(vocabulary, width, depth, 2, length)._replace(num_examples=(2, 4))
    counts = tracing.counts(task, "data_parallel")
    products = length * (depth * 12 * width**2 + vocabulary * width)
    scores = depth * length**2 * width
    assert counts.forward_flops == 2 * products + 4 * scores
    # Backward: two products for each; attention has four, and computes the scores again.
    assert counts.flops == 3 * 2 * products + (4 + 10) * scores
    num_params = sum(param.numel() for param in task.make_net().parameters())
    assert counts.param_bytes == 4 * num_params
    assert counts.divided_bytes == 3 * counts.param_bytes + 4 * len(counts.rows)  # Adam's moments, and a count for each
    assert counts.batch_bytes == 2 * 8 * length
    gradients = [one for one in counts.messages if one.role == "all"]
    assert sum(one.num_bytes for one in gradients) == counts.param_bytes + 4 + 8  # the loss and the weight, too
    again = tracing.read(tracing.written({"gpt": {"data_parallel": counts}}))
    assert again == {"gpt": {"data_parallel": dataclasses.replace(counts)}}
