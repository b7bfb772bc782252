"""Compiled steps of several processes."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import purecompose as pc
from purecompose import Event, State, compose, loop_events, optim
from purecompose.core import ranks as core_ranks
from purecompose.transforms.compilation import building
from tests.helpers import changing, errors_of, make_batch, make_batches, make_cnn, make_state
from tests.transforms.parallel_scenarios import SCENARIOS, Scenario, run, told


SAME_BITS = ("terms", "ema and clipping", "sam", "batch norm", "microbatches")
"""Scenarios that are run composed and compiled."""


class Watched(TorchDispatchMode):
    """Records the operations that send and those that multiply matrices, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "all_reduce" in name:
            self.found.append(f"send {args[0].numel()}")
        elif name.startswith(("aten.mm", "aten.addmm", "mkldnn")):
            self.found.append("product")
        return func(*args, **kwargs or {})


def order(backend: str, algorithms: tuple[Any, ...] = ()) -> list[str]:
    """Return the products of a step of four layers, and the messages that it sends."""
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64, bias=False), nn.ReLU())])
    step = pc.compile(pc.data_parallel(compose(loop_events, algorithms)), backend=backend, quiet=True)
    state, batch = make_state(net, loss=pc.losses.mse, optimizer=optim.sgd(0.1)), (torch.ones(8, 64),) * 2
    state = step(step(step.init(state), batch), batch)  # the loss is checked in the first two batches
    with Watched() as watched:
        step(state, batch)
    return watched.found


def refusals() -> dict[str, str]:
    """Return the errors of processes with different graphs."""

    def report(state: State) -> State:
        own = {"later": state.loss} if state.first_example else {}
        return state.replace(metrics={**state.metrics, **own})

    reporting = changing("reporting", Event.AFTER_LOSS, report)
    attempts: dict[str, Callable[[], Any]] = {
        "messages": lambda: _compiled([reporting])(make_state(), make_batch()),
        "coupled": lambda: _compiled([])(make_state(loss=_squared_mean), make_batch()),
    }
    return errors_of(attempts)


def _squared_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    del targets
    return outputs.mean().square()


def _compiled(algorithms: list[Any]) -> Any:
    return pc.compile(pc.data_parallel(compose(loop_events, algorithms)), backend="eager", quiet=True)


def of_all_sizes() -> list[list[dict[str, Tensor]]]:
    """Return the states of a step with batch normalisation, as composed and compiled for batches of all sizes."""
    batches = [make_batch(seed, size, shape=(2, 6, 6)) for seed, size in enumerate((7, 6, 5))]
    scenario = Scenario(net=lambda: make_cnn().double(), batches=lambda: [(x.double(), y) for x, y in batches])
    options: dict[str, Any] = {"backend": "eager", "quiet": True, "dynamic": True}
    ways = [pc.data_parallel, lambda step: pc.compile(pc.data_parallel(step), **options)]
    return [[told(state) for state in run(scenario, way)] for way in ways]


def failures() -> dict[str, Any]:
    """Return what happens in steps of which the last process fails to compile a part."""
    is_last, original = dist.get_rank() == dist.get_world_size() - 1, building.compile_graph

    def compile_graph(*args: Any) -> Any:
        if is_last:
            raise pc.errors.TraceError("no kernel")
        return original(*args)

    def warned(**options: Any) -> tuple[list[str], bool]:
        step = pc.compile(pc.data_parallel(compose(loop_events)), backend="eager", quiet=True, **options)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            states = [make_state(duration="9ba")]
            for batch in make_batches(3):
                states.append(step(states[-1], batch))
        composed = list(run(Scenario(lambda: [], batches=lambda: make_batches(3)), pc.data_parallel))
        return [str(one.message) for one in found], pc.tree.equal(states[-1].params, composed[-1].params)

    building.compile_graph = compile_graph
    try:
        return {
            "fallback": warned(fallback=True),
            **errors_of({"no fallback": lambda: _compiled([])(make_state(), make_batch())}),
        }
    finally:
        building.compile_graph = original


def has_read() -> bool:
    """Return whether a step reads a state that is in its own buffers, for which it would copy the state's tensors."""
    step, state = _compiled([]), make_state()
    for _ in range(2):
        state = step(state, make_batch())
    step(state, make_batch())
    return state.lease is None or state.lease.is_read


def results(mesh: Any, backend: str) -> dict[str, Any]:
    """Return the results of one of several processes."""
    del mesh
    core_ranks._BUCKET = 4 * 64 * 64
    found: dict[str, Any] = {
        "order": order(backend),
        "clipping": order(backend, (pc.algorithms.per_example_clipping(1.0),)),
    }
    if backend == "eager":
        core_ranks._BUCKET = 256
        found["refusals"] = refusals()
        found["has read"] = has_read()
        found["all sizes"] = of_all_sizes()
        found["failures"] = failures()
        for name in SAME_BITS:
            ways = [SCENARIOS[name]._replace(is_compiled=is_compiled) for is_compiled in (False, True)]
            found[name] = [[told(state) for state in run(way, pc.data_parallel)] for way in ways]
    return found
