"""Sharded runs of a few steps."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import purecompose as pc
from purecompose import Event, State, algorithms as alg, compose, loop_events, optim
from purecompose._support.device import local
from purecompose.algorithms import FACTORIES
from purecompose.testing.process import played
from purecompose.testing.tasks import TASKS, make_task
from tests.helpers import changing, errors_of, make_batch, make_batches, make_mlp, make_state
from tests.shipped import SHIPPED
from tests.transforms.parallel_scenarios import SCENARIOS, Scenario, ragged, told


# The others differ in nothing that a division of the parameters could change.
OF_DATA_PARALLEL = (
    "ragged", "microbatches", "terms", "draws", "ema and clipping", "selective_backprop", "sam", "accumulation",
    "loss_scaling", "noise scale", "per_example_clipping", "batch norm", "ghost_batchnorm", "no elements", "coupled",
    "denominators", "compiled",
)  # fmt: skip
SHARDED = {name: SCENARIOS[name] for name in OF_DATA_PARALLEL} | {
    "adam": Scenario(options={"optimizer": optim.adamw(0.01)}),
    "adafactor": Scenario(options={"optimizer": optim.adafactor(0.01)}, batches=ragged),
    "muon": Scenario(options={"optimizer": optim.by_pattern({"*": optim.muon(0.02)}, optim.adamw(3e-4))}),
    "from_torch": Scenario(options={"optimizer": optim.from_torch(torch.optim.NAdam, lr=0.01)}),
    "tied, and fewer examples than processes": Scenario(
        lambda: [alg.sam(0.5), alg.ema("2ba"), alg.lookahead(0.5, every=2)],
        lambda: make_task("tokens", tied=True).make_net(0),
        lambda: [make_task("tokens").make_batch(seed, size) for seed, size in enumerate((2, 5, 1))],
        microbatches=3,
    ),
    "frozen and clipped, compiled": Scenario(
        lambda: [alg.layer_freezing(0.0, num_stages=2), alg.gradient_clipping("adaptive", 0.01)], is_compiled=True
    ),
}


GATHERS: Any = ("step", "layer")
NEEDS_PARTS = ("noise scale", "per_example_clipping")
"""Scenarios with methods that need the gradients of parts of the batch."""


def run(scenario: Scenario, mesh: Any, gather: Any = "step") -> list[State]:
    """Return the states after each step, put together; without a mesh those of one process."""
    step = compose(loop_events, scenario.algorithms(), microbatches=scenario.microbatches)
    state = step.init(make_state(scenario.net(), duration="100ba", batches_per_epoch=10, **scenario.options))
    if mesh is not None:
        step, state = pc.fully_sharded(step, mesh, gather), pc.shard(state, mesh)
    if scenario.is_compiled:
        step = pc.compile(step, backend="eager", quiet=True)
    found = []
    for batch in scenario.batches():
        state = step(state, batch)
        found.append(pc.whole(state.copy()))
    return found


def of_shipped(
    text: str,
    transform: Callable[[Any], Any] = lambda step: step,
    place: Callable[[State], State] = lambda state: state,
) -> State:
    """Return the state after twenty steps with a shipped algorithm, given as its call, in float64."""
    name = text.partition("(")[0]
    task = TASKS[SHIPPED[name].tasks[0]]
    step = compose(loop_events, [eval(text, dict(FACTORIES))])
    state = place(step.init(task.make_state(0, dtype=torch.float64, duration="25ba", batches_per_epoch=10)))
    step = transform(step)
    for number in range(20):
        state = step(state, task.make_batch(number, 7, torch.float64))
    return pc.whole(state)


def shipped(mesh: Any, text: str) -> list[Any]:
    """Return results of a shipped algorithm in one process, under `data_parallel` and sharded, or why it is refused."""

    def sharded(gather: Any) -> Any:
        try:
            step = lambda step: pc.fully_sharded(step, mesh, gather)  # noqa: E731
            return told(of_shipped(text, step, lambda state: pc.shard(state, mesh)))
        except ValueError as error:
            return str(error)

    return [told(of_shipped(text)), told(of_shipped(text, pc.data_parallel)), *map(sharded, GATHERS)]


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
        "gather": lambda: pc.fully_sharded(step, mesh, "block"),  # pyright: ignore[reportArgumentType]
        "parts": lambda: pc.fully_sharded(compose(loop_events, [alg.gradient_noise_scale()]), mesh, "layer"),
        "nothing sets": lambda: pc.materialized(Halves().to("meta"), mesh),
        "values": lambda: pc.materialized(torch.nn.Linear(2, 2), mesh),
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
    return errors_of(attempts)


def compiled_bits(mesh: Any) -> list[str]:
    """Return the differences between compiled steps, also with donation, and the step as composed."""
    cases: Any = (("step", False, 2), ("layer", True, 2), ("layer", True, 1))
    found = []
    for gather, donate, microbatches in cases:
        one = compose(loop_events, [alg.sam(0.5), alg.ema("2ba")], microbatches=microbatches)
        state = one.init(make_state(make_mlp(dropout=0.5), duration="100ba", batches_per_epoch=10))
        step, theirs = pc.fully_sharded(one, mesh, gather), pc.shard(state, mesh)
        compiled, ours = pc.compile(step, backend="eager", quiet=True, donate=donate), theirs.copy()
        for batch in make_batches(2):
            ours, theirs = compiled(ours, batch), step(theirs, batch)
        found += pc.tree.diff(ours.copy(), theirs)
        num_graphs = sum(variant.hits for variant in compiled.variants() if variant.segment == 0) // 2
        if microbatches == 1 and num_graphs > 1:
            found.append(f"{num_graphs} graphs for passes and update")
    return found


class _Sent(TorchDispatchMode):
    """Mode that counts the bytes that a process sends by its messages, if they travel around a ring."""

    num_bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.namespace == "_c10d_functional" and func is not torch.ops._c10d_functional.wait_tensor.default:
            size = dist.get_world_size()
            turns = 2 if func is torch.ops._c10d_functional.all_reduce.default else 1
            self.num_bytes += turns * max(result.nbytes, args[0].nbytes) * (size - 1) / size
        return result


def sent(mesh: Any) -> dict[str, float]:
    """Return the bytes sent in a step, divided by those of summing as many gradients as there are parameters."""
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    state, size = pc.shard(make_state(net), mesh), mesh.size()
    wanted = 2 * sum(param.nbytes for param in net.parameters()) * (size - 1) / size
    found, batch = {}, make_batch(shape=(64,))
    for gather, microbatches in itertools.product(GATHERS, (1, 2)):
        step = pc.fully_sharded(compose(loop_events, microbatches=microbatches), mesh, gather)
        later = step(step(state, batch), batch)  # the next batch is none of those in which the loss is checked
        with _Sent() as mode:
            step(later, batch)
        found[f"{gather} {microbatches}"] = mode.num_bytes / wanted
    return found


class Halves(torch.nn.Module):
    """A network with a tied weight, one that its parent initialises, and a buffer that is made with values."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.net[0].weight = self.attention.out_proj.weight
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.arange(4.0, device="cpu"))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = (inputs * self.scale)[:, None]
        return self.net(self.attention(rows, rows, rows)[0][:, 0])


def created(mesh: Any) -> list[State]:
    """Return states of a network made without values, at the start and after steps, put together."""
    with torch.device("meta"):
        net = Halves()
    step = compose(loop_events, [alg.ema("1ba")])
    own = pc.materialized(net, mesh, key=3, init=lambda module: _filled(module) if hasattr(module, "scale") else None)
    found = [step.init(make_state(own, duration="9ba", batches_per_epoch=9))]
    for batch in ragged()[:2]:
        found.append(pc.fully_sharded(step, mesh, "layer")(found[-1], batch))
    return [pc.whole(state) for state in found]


def _filled(module: Any) -> None:
    torch.nn.init.constant_(module.net[2].bias, 2.0)


def bytes_held(mesh: Any) -> tuple[int, int, int]:
    """Return the bytes of parameters and Adam's memory in one process and here, and how many processes share them."""
    state = make_state(torch.nn.Linear(64, 64, bias=False), loss=pc.losses.mse, optimizer=optim.adam(0.1))

    def count(state: State) -> int:
        return sum(local(leaf).nbytes for leaf in pc.tree.leaves((state.params, state.opt_state)))

    return count(state), count(pc.shard(state, mesh)), mesh.size(mesh.ndim - 1)


def results(mesh: Any, shape: tuple[int, ...], gather: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the states of all scenarios that can be gathered so, in one of several processes."""
    mesh = init_device_mesh("cpu", shape)
    names = [name for name in SHARDED if gather == "step" or name not in NEEDS_PARTS]
    return {f"{name} {gather}": [told(state) for state in run(SHARDED[name], mesh, gather)] for name in names}


def facts(mesh: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what else is known of one of several processes."""
    # On the second mesh each process holds all rows.
    meshes = init_device_mesh("cpu", shape), init_device_mesh("cpu", (mesh.size(), 1))
    return {
        ".refusals": refusals(meshes[0]),
        ".bytes": bytes_held(meshes[0]),
        ".compiled bits": compiled_bits(meshes[0]),
        ".sent": sent(meshes[0]),
        ".created": [[told(state) for state in created(one)] for one in meshes],
    }
