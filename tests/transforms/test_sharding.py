"""fully_sharded: several processes, each with some rows of every parameter, compute the same as a single one."""

import functools
import math
import operator
from typing import Any

import pytest
import torch

from purecompose.testing.process import in_process_group
from tests.shipped import SHIPPED
from tests.transforms.sharded_scenarios import GATHERS, NEEDS_PARTS, SHARDED, facts, results, run, shipped, told


BY_PARTS = ("ghost_batchnorm", "noise scale")
"""Scenarios whose result depends on how a batch is divided."""
DEPENDS_ON_PARTS = ("gradient_noise_scale", "ghost_batchnorm")
"""Beginnings of the calls of shipped methods whose result does."""
MESHES = [(2,), pytest.param((4,), marks=pytest.mark.slow), pytest.param((2, 2), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=MESHES, ids=str)
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the results of each of several processes."""
    shape = request.param
    size = math.prod(shape)
    parts = [in_process_group(results, size, shape, gather) for gather in GATHERS]
    parts.append(in_process_group(facts, size, shape))
    return [functools.reduce(operator.or_, of_rank) for of_rank in zip(*parts, strict=True)]


@pytest.mark.parametrize("gather", ["step", "layer"])
@pytest.mark.parametrize("name", SHARDED)
def test_the_state_equals_that_of_one_process(ranks: list[dict[str, Any]], name: str, gather: str) -> None:
    if gather == "layer" and name in NEEDS_PARTS:
        pytest.skip("needs the gradients of parts, and is refused")
    case = f"{name} {gather}"
    for states in zip(*(found[case] for found in ranks), strict=True):
        for other in states[1:]:
            torch.testing.assert_close(other, states[0], rtol=0, atol=0, equal_nan=True)
    if name not in BY_PARTS:
        for ours, theirs in zip(ranks[0][case], map(told, run(SHARDED[name], None)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_each_process_holds_its_part(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        whole, own, num_owners = found[".bytes"]
        assert own <= whole / num_owners + 4  # Adam's count of steps is not divided


def test_compiled_steps_have_the_bits_of_the_step_as_composed(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found[".compiled bits"] == []


def test_bytes_sent(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        if found[".bytes"][2] == len(ranks):  # processes with copies of the same rows send gradients in addition
            limits = {"step 1": 1.01, "step 2": 1.01, "layer 1": 1.53, "layer 2": 3.06}
            assert all(found[".sent"][name] <= limit for name, limit in limits.items()), found[".sent"]


def test_networks_made_without_values_do_not_depend_on_the_number_of_processes(ranks: list[dict[str, Any]]) -> None:
    (start, *later), (start_of_one, *later_of_one) = ranks[0][".created"]
    torch.testing.assert_close(start, start_of_one, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(later, later_of_one, rtol=1e-5, atol=1e-6)
    values = {name: start[f".params['{name}']"] for name in ("net.2.bias", "attention.out_proj.bias")}
    assert (values["net.2.bias"] == 2).all() and not values["attention.out_proj.bias"].any()
    assert start[".buffers['scale']"].tolist() == [0, 1, 2, 3]


WORDS = {
    "per rank": "use data_parallel",
    "twice": "divided already",
    "no mesh": "expected a DeviceMesh",
    "population": "train in one process",
    "gather": "expected 'step' or 'layer'",
    "parts": 'use gather="step"',
    "nothing sets": "nothing sets the values of scale",
    "values": "has values already",
    "placements": "Partial",
    "in one process": "no gradient or map goes through messages",
    "data_parallel": "fully_sharded(step, mesh) takes such a state",
    "played": "fully_sharded(step, mesh) takes such a state",
    "not divided": "call pc.shard",
    "stacked": "train in one process",
    "module": "pc.whole(state)",
    "mapped": "no gradient or map",
    "second order": "no gradient or map",
    "gradients through it": "no gradient or map",
}


@pytest.mark.parametrize("name", WORDS)
def test_wrong_uses_are_refused(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert WORDS[name] in found[".refusals"].get(name, "")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("text", [text for row in SHIPPED.values() for text in row.examples])
def test_shipped_methods_equal_one_process(text: str, size: int) -> None:
    alone, shared, *sharded = in_process_group(shipped, size, text)[0]
    if not text.startswith(DEPENDS_ON_PARTS):
        _assert_near(shared, alone, text)
    for gather, found in zip(GATHERS, sharded, strict=True):
        if isinstance(found, str):
            assert gather == "layer" and 'use gather="step"' in found, (text, found)
        else:
            _assert_near(found, shared, f"{text}, gather={gather}")


def _assert_near(found: dict[str, Any], expected: dict[str, Any], text: str) -> None:
    torch.testing.assert_close(
        found, expected, rtol=1e-6, atol=2e-6, equal_nan=True, msg=lambda message: f"{text}: {message}"
    )
