"""fully_sharded: several processes, each with some rows of every parameter, compute the same as a single one."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from purecompose.testing.shipped import SHIPPED
from tests.transforms import sharded_scenarios
from tests.transforms.processes import run_processes
from tests.transforms.sharded_scenarios import SHARDED, run, told


BY_PARTS = ("batch norm in slices", "ghost_batchnorm", "noise scale")
"""Scenarios whose result depends on how a batch is divided."""
MESHES = ["2", pytest.param("4", marks=pytest.mark.slow), pytest.param("2x2", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=MESHES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each of several processes."""
    return _results(request.param, tmp_path_factory.mktemp("ranks"))


def _results(mesh: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    size = math.prod(map(int, mesh.split("x")))
    return run_processes(sharded_scenarios.__name__, folder, size, mesh, *options)


@pytest.mark.parametrize("name", SHARDED)
def test_the_state_equals_that_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert isinstance(found.get(name), list), found.get(name)
    for states in zip(*(found[name] for found in ranks), strict=True):
        for other in states[1:]:
            torch.testing.assert_close(other, states[0], rtol=0, atol=0, equal_nan=True)
    if name not in BY_PARTS:
        for ours, theirs in zip(ranks[0][name], map(told, run(SHARDED[name], None)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_each_process_holds_its_part(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        whole, own, num_owners = found[".bytes"]
        assert own <= whole / num_owners + 4  # Adam's count of steps is not divided


def test_compiled_steps_have_the_bits_of_the_step_as_composed(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found[".compiled bits"] == []


WORDS = {
    "per rank": "use data_parallel",
    "twice": "divided already",
    "no mesh": "expected a DeviceMesh",
    "population": "train in one process",
    "placements": "Partial",
    "in one process": "train by fully_sharded",
    "data_parallel": "fully_sharded(step, mesh) takes such a state",
    "played": "fully_sharded(step, mesh) takes such a state",
    "not divided": "call pc.shard",
    "stacked": "train in one process",
    "module": "pc.whole(state)",
    "mapped": "no gradient or map",
    "second order": "no gradient or map",
    "gradients through it": "neither differentiated nor mapped",
}


@pytest.mark.parametrize("name", WORDS)
def test_wrong_uses_are_refused(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert WORDS[name] in found[".refusals"].get(name, "")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2", "4"])
def test_shipped_methods_equal_data_parallel(tmp_path: Path, mesh: str) -> None:
    results = _results(mesh, tmp_path, "--shipped")
    texts = [text for row in SHIPPED.values() for text in row.examples]
    for text in texts:
        for found in results:
            assert isinstance(found.get(text), tuple), (text, found.get(text))
        ours, theirs = results[0][text]
        torch.testing.assert_close(
            ours, theirs, rtol=1e-5, atol=2e-6, equal_nan=True, msg=lambda m, t=text: f"{t}: {m}"
        )
