"""data_parallel: several processes compute what one would."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import parallel_scenarios
import pytest
import torch
import torch.distributed as dist
from helpers import make_batch, make_state
from parallel_scenarios import SCENARIOS, run, told
from torch.distributed.device_mesh import init_device_mesh

import purecompose as pc
from purecompose import Event, Grad, compose, forward, loop_events, loss, tree, update
from purecompose.algorithms.sam import perturb_params
from purecompose.ranks import Ranks


ONLY_ITS_OWN = ("batch norm", "sam per rank", "noise scale")
"""What depends on how a batch is divided."""

SIZES = [pytest.param(2, id="2 ranks"), pytest.param(3, id="3 ranks", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of several processes got."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    program = [sys.executable, parallel_scenarios.__file__, str(folder / "store")]
    here = Path(parallel_scenarios.__file__).parent
    processes = [
        subprocess.Popen([*program, str(rank), str(request.param), str(folder)], cwd=here, env=environment)
        for rank in range(request.param)
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0] * request.param
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_have_the_same_state(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert isinstance(found.get(name), list), found.get(name)
        assert tree.equal(found[name], ranks[0][name])


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in ONLY_ITS_OWN])
def test_it_is_the_state_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    for ours, theirs in zip(ranks[0][name], map(told, run(SCENARIOS[name])), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_ranks_weigh_their_statistics_by_examples(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["batch norm"]
    inputs, targets = SCENARIOS["batch norm"].batches()[0]
    step, size = compose(loop_events), len(inputs) // len(ranks)
    start = make_state(SCENARIOS["batch norm"].net(), duration="100ba", batches_per_epoch=10)
    parts = [step(start, (inputs[i : i + size], targets[i : i + size])) for i in range(0, len(inputs), size)]
    for name, buffer in parts[0].buffers.items():
        own = torch.stack([part.buffers[name] for part in parts])
        torch.testing.assert_close(found[0][f".buffers['{name}']"], own.double().mean(0).to(buffer.dtype))
    assert found[-1][".buffers['1.num_batches_tracked']"] == 3


def test_sam_per_rank_moves_each_part_by_its_own_gradient(ranks: list[dict[str, Any]]) -> None:
    inputs, targets = SCENARIOS["sam per rank"].batches()[0]
    net, cross_entropy = SCENARIOS["sam per rank"].net(), torch.nn.functional.cross_entropy
    params = {name: param.detach() for name, param in net.named_parameters()}

    def gradient(params: dict[str, torch.Tensor], part: slice) -> dict[str, torch.Tensor]:
        def mean_loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
            return cross_entropy(torch.func.functional_call(net, params, (inputs[part],)), targets[part])

        return torch.func.grad(mean_loss)(params)

    bounds = {2: (0, 4, 8), 3: (0, 3, 6, 8)}[len(ranks)]
    parts = [slice(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
    there = [gradient(perturb_params(params, gradient(params, part), 0.5), part) for part in parts]
    for name, param in params.items():
        mean = sum(grads[name] * (part.stop - part.start) for grads, part in zip(there, parts, strict=True)) / 8
        torch.testing.assert_close(ranks[0]["sam per rank"][0][f".params['{name}']"], param - 0.1 * mean)


def test_what_does_not_fit_together_is_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        refusals = found[".refusals"]
        assert "differ in their batch: give each the whole batch" in refusals["batch"]
        assert "differ in their params: all must begin with the same state" in refusals["params"]
        assert "differ in their key" in refusals["key"]
        assert "a number" in refusals["auto"]
        assert "clocks differ" in refusals["seconds"]


def test_shares_are_consecutive_and_nearly_equal() -> None:
    batch = make_batch(size=7)
    shares = [Ranks("", rank, 3).share(batch, None) for rank in range(3)]
    assert [(share.first_example, share.num_examples) for share in shares] == [(0, 3), (3, 2), (5, 2)]
    assert torch.equal(torch.cat([share.batch[0] for share in shares]), batch[0])
    idle = Ranks("", 2, 3).share(make_batch(size=2), None)
    assert (idle.num_examples, len(idle.batch[0])) == (0, 1)


def test_without_a_process_group_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="torchrun"):
        pc.data_parallel(compose(loop_events))


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_process_computes_the_step_itself(alone: Any) -> None:
    state, batch = make_state(), make_batch()
    step = pc.data_parallel(compose(loop_events, [pc.algorithms.mixup()]), alone)
    assert tree.equal(step(step.init(state), batch), step.step(step.init(state), batch))
    assert repr(step).endswith(", 1 ranks)") and step.replace(microbatches=2).microbatches == 2


def test_it_takes_a_mesh_of_one_dimension(alone: Any) -> None:
    mesh = init_device_mesh("cpu", (1,))
    assert pc.data_parallel(compose(loop_events), mesh).ranks is None
    with pytest.raises(ValueError, match="one dimension"):
        pc.data_parallel(compose(loop_events), init_device_mesh("cpu", (1, 1)))
    with pytest.raises(TypeError, match="DeviceMesh"):
        pc.data_parallel(compose(loop_events), 2)


def test_it_goes_around_a_composed_step(alone: Any) -> None:
    del alone
    with pytest.raises(TypeError, match="compiled afterwards"):
        pc.data_parallel(pc.compile(compose(loop_events)))  # type: ignore[arg-type]
    whole = compose([Grad(forward, loss), update, Event.BATCH_END])
    with pytest.raises(ValueError, match="Put Microbatches around it"):
        pc.data_parallel(whole)
    with pytest.raises(ValueError, match="nothing to divide"):
        pc.data_parallel(compose(pc.eval_events))


def test_an_evaluation_is_each_process_alone(ranks: list[dict[str, Any]]) -> None:
    assert [".accuracy" in found for found in ranks] == [True, *[False] * (len(ranks) - 1)]  # it waited for nobody
    state = run(SCENARIOS["plain"])[-1]
    assert ranks[0][".accuracy"] == pc.evaluate(state, [make_batch()], {"accuracy": pc.metrics.accuracy})["accuracy"]
