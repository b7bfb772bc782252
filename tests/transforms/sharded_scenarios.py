"""Sharded runs of a few steps; as a program, this module is one of the processes.

python -m tests.transforms.sharded_scenarios STORE RANK MESH FOLDER [--shipped]
"""

import datetime
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import purecompose as pc
from purecompose import Event, State, algorithms as alg, compose, loop_events, optim
from purecompose._support.shards import local
from purecompose.algorithms import FACTORIES
from purecompose.testing.ranks import played
from purecompose.testing.shipped import SHIPPED
from purecompose.testing.tasks import TASKS
from tests.helpers import changing, make_batch, make_mlp, make_state
from tests.transforms.parallel_scenarios import SCENARIOS, Scenario, ragged, told


SHARDED = {name: scenario for name, scenario in SCENARIOS.items() if name != "sam per rank"} | {
    "lion": Scenario(options={"optimizer": optim.lion(0.01)}),
    "rmsprop": Scenario(options={"optimizer": optim.rmsprop(0.01)}),
    "adafactor": Scenario(options={"optimizer": optim.adafactor(0.01)}, batches=ragged),
    "muon": Scenario(options={"optimizer": optim.by_pattern({"*": optim.muon(0.02)}, optim.adamw(3e-4))}),
    "from_torch": Scenario(options={"optimizer": optim.from_torch(torch.optim.NAdam, lr=0.01)}),
    "frozen and clipped, compiled": Scenario(
        lambda: [alg.layer_freezing(0.0, num_stages=2), alg.gradient_clipping("adaptive", 0.01)], is_compiled=True
    ),
}


def run(scenario: Scenario, mesh: Any) -> list[State]:
    """Return the states after each step, put together; without a mesh those of one process."""
    step = compose(loop_events, scenario.algorithms(), microbatches=scenario.microbatches)
    state = step.init(make_state(scenario.net(), duration="100ba", batches_per_epoch=10, **scenario.options))
    if mesh is not None:
        step, state = pc.fully_sharded(step, mesh), pc.shard(state, mesh)
    if scenario.is_compiled:
        step = pc.compile(step, backend="eager", quiet=True)
    found = []
    for batch in scenario.batches():
        state = step(state, batch)
        found.append(pc.whole(state.copy()))
    return found


def of_shipped(text: str, transform: Callable[[Any], Any], place: Callable[[State], State]) -> State:
    """Return the state after some steps with a shipped algorithm, given as its call."""
    name = text.partition("(")[0]
    task = TASKS[SHIPPED[name].tasks[0]]
    step = compose(loop_events, [eval(text, dict(FACTORIES))])
    state = place(step.init(task.make_state(0, duration="20ba", batches_per_epoch=10)))
    step = transform(step)
    for number in range(4):
        state = step(state, task.make_batch(number, 7))
    return pc.whole(state)


def refusals(mesh: Any) -> dict[str, str]:
    """Return the errors of wrong uses."""
    step, state, batch = compose(loop_events), make_state(), make_batch()
    own, placed = compose(loop_events, [alg.sam(0.5, per_rank=True)]), pc.shard(state, mesh)

    def partial_params(state: State) -> State:
        from torch.distributed.tensor import DTensor, Partial

        params = {
            name: DTensor.from_local(torch.zeros(param.shape), mesh, [Partial()] * mesh.ndim, run_check=False)
            for name, param in state.params.items()
        }
        return state.replace(params=params)

    losing = compose(loop_events, [changing("losing", Event.BATCH_END, partial_params)])
    attempts: dict[str, Callable[[], Any]] = {
        "per rank": lambda: pc.fully_sharded(own, mesh)(pc.shard(own.init(state), mesh), batch),
        "twice": lambda: pc.shard(pc.shard(state, mesh), mesh),
        "no mesh": lambda: pc.shard(state, dist.group.WORLD),
        "population": lambda: pc.fully_sharded(pc.population(step, 2), mesh),
        "placements": lambda: pc.fully_sharded(losing, mesh)(pc.shard(losing.init(state), mesh), batch),
        "in one process": lambda: step(placed, batch),
        "data_parallel": lambda: pc.data_parallel(step)(placed, batch),
        "played": lambda: played(step, mesh.size())(lambda one: one(placed, batch)),
        "not divided": lambda: pc.fully_sharded(step, mesh)(state, batch),
        "stacked": lambda: pc.stack_states([placed, placed]),
        "module": lambda: pc.to_module(placed),
        "mapped": lambda: torch.vmap(lambda inputs: placed.forward(inputs[None])[0])(batch[0]),
        "second order": lambda: torch.func.grad(
            lambda params: step(placed.replace(params=params), batch).params["3.weight"].sum()
        )(placed.params),
        "gradients through it": lambda: torch.func.grad(
            lambda scale: pc.fully_sharded(step, mesh)(placed, (scale * batch[0], batch[1])).loss
        )(torch.tensor(1.0)),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (TypeError, ValueError, RuntimeError) as error:
            found[name] = str(error)
    return found


def compiled_bits(mesh: Any) -> list[str]:
    """Return the differences between compiled steps, also with donation, and the step as composed."""
    methods = [alg.mixup(1.0), alg.sam(0.5), alg.ema("2ba"), alg.gradient_clipping("norm", 0.1)]
    step = pc.fully_sharded(compose(loop_events, methods, microbatches=2), mesh)
    start = pc.shard(step.init(make_state(make_mlp(dropout=0.5), duration="100ba", batches_per_epoch=10)), mesh)
    found = []
    for donate in (False, True):
        compiled = pc.compile(step, backend="eager", quiet=True, donate=donate)
        ours, theirs = start.copy(), start
        for batch in ragged():
            ours, theirs = compiled(ours, batch), step(theirs, batch)
        found += pc.tree.diff(ours.copy(), theirs)
    return found


def bytes_held(mesh: Any) -> tuple[int, int, int]:
    """Return the bytes of parameters and Adam's memory in one process and here, and how many processes share them."""
    state = make_state(torch.nn.Linear(64, 64, bias=False), loss=pc.losses.mse, optimizer=optim.adam(0.1))

    def count(state: State) -> int:
        return sum(local(leaf).nbytes for leaf in pc.tree.leaves((state.params, state.opt_state)))

    return count(state), count(pc.shard(state, mesh)), mesh.size(mesh.ndim - 1)


def main(store: str, rank: int, shape: tuple[int, ...], folder: str, has_shipped: bool) -> None:
    """Run all scenarios as one of the processes, and save the results."""
    torch.set_num_threads(1)
    size, limit = torch.Size(shape).numel(), datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    mesh = init_device_mesh("cpu", shape)
    found: dict[str, Any] = {}
    found[".refusals"], found[".bytes"] = refusals(mesh), bytes_held(mesh)
    found[".compiled bits"] = compiled_bits(mesh)
    cases: dict[str, Callable[[], Any]] = {
        name: lambda scenario=scenario: [told(state) for state in run(scenario, mesh)]
        for name, scenario in SHARDED.items()
    }
    if has_shipped:
        divided = lambda step: pc.fully_sharded(step, mesh)  # noqa: E731
        placed = lambda state: pc.shard(state, mesh)  # noqa: E731
        cases = {
            text: lambda text=text: (
                told(of_shipped(text, pc.data_parallel, lambda state: state)),
                told(of_shipped(text, divided, placed)),
            )
            for row in SHIPPED.values()
            for text in row.examples
        }
    for name, case in cases.items():
        try:
            found[name] = case()
        except Exception:
            found[name] = traceback.format_exc()
            break  # the other processes wait at another place than this one
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    numbers = tuple(map(int, sys.argv[3].split("x")))
    main(sys.argv[1], int(sys.argv[2]), numbers, sys.argv[4], "--shipped" in sys.argv)
