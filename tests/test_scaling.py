"""The model of benchmarks/scaling.py: its limits, and its bytes compared with those of traced steps."""

import dataclasses
import importlib
import pathlib
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from purecompose.transforms.compilation.messages import messages


FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("_scale_model")


@pytest.fixture
def tracing(model: Any) -> Any:
    del model  # it is found in the same folder
    return importlib.import_module("_counts")


def made(model: Any, messages: list[Any] | None = None, **changes: Any) -> Any:
    """Counts of a network of two parameters of 8 rows, with one message that overlaps and one that does not."""
    if messages is None:
        messages = [("all_reduce", "all", 8_000_000, 0.5, 1.0), ("all_reduce", "all", 8_000_000, 1.0, 1.0)]
    given: dict[str, Any] = {
        "flops": 10**12,
        "forward_flops": 10**12 // 3,
        "param_bytes": 16_000_000,
        "rows": [[8, 1_000_000], [8, 1_000_000]],
        "divided_bytes": 48_000_000,
        "other_bytes": 1_000,
        "batch_bytes": 1_000,
        "example_bytes": 10**9,
        "step_bytes": 10**8,
        "update_bytes": 10**6,
        "messages": [model.Message(*message) for message in messages],
    }
    return model.Counts(**given | changes)


def test_a_message_is_exposed_by_what_compute_does_not_hide(model: Any) -> None:
    sent = [model.Message("all_reduce", "all", 3, 0.5, 1.0), model.Message("all_reduce", "all", 1, 0.75, 1.0)]
    # Pass of 4 s: the first message takes from 2 to 5, the second from 5 to 6.
    assert model.with_messages(sent, 4.0, lambda message: float(message.num_bytes)) == 6.0
    # A message that is waited for at once holds up all that follows.
    blocking = model.Message("all_gather", "shard", 2, 0.25, 0.25)
    assert model.with_messages([blocking, *sent], 4.0, lambda message: float(message.num_bytes)) == 8.0
    assert model.with_messages([blocking], 4.0, lambda message: float(message.num_bytes)) == 6.0


def test_times_of_messages_follow_ring_and_tree(model: Any) -> None:
    machine = model.Machine(achieved=1.0, launch=0.0, nvlink_latency=1.0, network_latency=10.0)
    # Small: 8 processes in a host have 7 hops, 16 in two hosts cross the network twice; a tree has log2(n) levels.
    assert model.message_seconds("all_gather", 0, 8, 8, machine) == 7
    assert model.message_seconds("all_gather", 0, 16, 8, machine) == 13 + 20
    assert model.message_seconds("all_reduce", 0, 16, 8, machine) == 2 * (3 + 10)
    # Large: 7/8 of the bytes by NVLink; among hosts by the network of all 8 GPUs, or of one.
    machine = model.Machine(achieved=1.0, launch=0.0, nvlink_latency=0.0, network_latency=0.0)
    assert model.message_seconds("reduce_scatter", 8e9, 8, 8, machine) == pytest.approx(7e9 / 450e9)
    assert model.message_seconds("all_reduce", 8e9, 64, 8, machine) == pytest.approx(2 * 8e9 * 63 / 64 / 400e9)
    assert model.message_seconds("all_reduce", 1e9, 8, 1, machine) == pytest.approx(2 * 1e9 * 7 / 8 / 50e9)


def test_memory_of_shards_and_of_the_batch(model: Any) -> None:
    counts = made(model)
    whole = model.memory_bytes(counts, model.Plan("data_parallel", 4, 1, 8), 2)
    assert whole == 48_000_000 + 1_000 + 8 * 1_000 + 10**8 + 2 * 10**9
    assert model.memory_bytes(counts, model.Plan("step", 4, 4, 8), 2) == whole - 36_000_000
    cut = model.memory_bytes(counts, model.Plan("data_parallel", 4, 1, 8), 2, is_cut=True)
    assert cut == whole + 16_000_000  # the mean gradients of the slices before
    # 8 rows on 16 processes are filled up to 16.
    assert model.memory_bytes(counts, model.Plan("step", 16, 16, 8), 2) == whole - 42_000_000
    assert model.memory_bytes(counts, model.Plan("data_parallel", 4, 1, 8, False), 2) == whole - 6 * 1_000


def test_examples_that_do_not_fit_are_cut_into_microbatches(model: Any) -> None:
    counts, machine = made(model), model.Machine()
    found = model.estimate(counts, model.Plan("data_parallel", 8, 1, 8 * 100), machine)
    assert found.microbatches == 2 and found.memory <= 72e9
    # They send after the last one, once: nothing overlaps.
    alone = model.message_seconds("all_reduce", 8_000_000, 8, 8, machine)
    assert found.num_messages == 2 and found.exposed == pytest.approx(2 * alone)
    by_layer = model.estimate(counts, model.Plan("layer", 8, 8, 8 * 100), machine)
    assert by_layer.num_messages == 4 and by_layer.sent_bytes == 2 * found.sent_bytes
    huge = model.estimate(made(model, step_bytes=10**12), model.Plan("step", 8, 8, 16), machine)
    assert huge.limit == "memory: does not fit" and huge.microbatches == 1


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
