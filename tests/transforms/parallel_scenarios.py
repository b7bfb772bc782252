"""Runs of a few steps for one process or several."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import purecompose as pc
from purecompose import Event, State, algorithms as alg, compose, loop_events, optim
from purecompose.core import ranks as core_ranks
from tests.helpers import (
    SumOfMeans,
    changing,
    errors_of,
    make_batch,
    make_batches,
    make_cnn,
    make_mlp,
    make_state,
    noise,
    nt_xent,
)


class WithEmpty(nn.Module):
    """A network with a parameter and buffers of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.empty = make_mlp(), nn.Parameter(torch.zeros(0, 3))
        self.count: Tensor
        self.register_buffer("count", torch.zeros(0, dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.net(inputs) + self.empty.sum()


class Scenario(NamedTuple):
    """The algorithms, network and batches of a run."""

    algorithms: Callable[[], list[Any]] = list
    net: Callable[[], nn.Module] = make_mlp
    batches: Callable[[], list[Any]] = make_batches
    options: dict[str, Any] = {}
    microbatches: int = 1
    is_compiled: bool = False


def ragged() -> list[Any]:
    """Return batches that do not divide evenly; one of them has an example for one process only."""
    return [make_batch(0, 8), make_batch(1, 7), make_batch(2, 1), make_batch(3, 5)]


def images() -> list[Any]:
    return make_batches(3, 6, shape=(2, 6, 6))


def ragged_images() -> list[Any]:
    """Return batches in float64 that do not divide evenly; in one, the targets of the first process do not count."""
    batches = [make_batch(seed, size, shape=(2, 6, 6)) for seed, size in enumerate((6, 5, 7, 1, 8))]
    batches[2][1][:4] = -100
    return [(inputs.double(), targets) for inputs, targets in batches if len(targets) > 1]


def partly_ignored() -> list[Any]:
    """Return batches in which most targets of the first half are ignored, in the last batch all of them."""
    inputs, targets = make_batch(0, 8)
    ignored, gone = targets.clone(), targets.clone()
    ignored[:3], gone[:4] = -100, -100
    return [(inputs, ignored), (inputs, gone), (inputs, targets)]


def broken() -> list[Any]:
    """Return batches of which the second has a NaN in its last example."""
    batches = make_batches(4)
    batches[1][0][-1] = torch.nan
    return batches


SCENARIOS = {
    "plain": Scenario(),
    "ragged": Scenario(batches=ragged),
    "microbatches": Scenario(batches=ragged, microbatches=3),
    "terms": Scenario(batches=partly_ignored),
    "draws": Scenario(lambda: [alg.mixup(1.0), noise(), alg.label_smoothing(0.1)], lambda: make_mlp(dropout=0.5)),
    "ema and clipping": Scenario(lambda: [alg.ema("2ba"), alg.gradient_clipping("norm", 0.1)]),
    "selective_backprop": Scenario(
        lambda: [alg.selective_backprop(0.0, 1.0, 0.5, full_every=0)], lambda: make_mlp(dropout=0.5), ragged
    ),
    "selective_backprop, compiled": Scenario(
        lambda: [alg.selective_backprop(0.0, 1.0, 0.5, full_every=0)],
        lambda: make_cnn().double(),
        lambda: [(inputs.double(), targets) for inputs, targets in images()],
        is_compiled=True,
    ),
    "sam": Scenario(lambda: [alg.sam(0.5)], batches=ragged),
    "sam per rank": Scenario(lambda: [alg.sam(0.5, per_rank=True)]),
    "accumulation": Scenario(lambda: [alg.gradient_accumulation(2)], batches=partly_ignored),
    "loss_scaling": Scenario(lambda: [alg.loss_scaling(8.0, growth_interval=2)], batches=broken),
    "skip_nonfinite": Scenario(lambda: [alg.skip_nonfinite()], batches=broken),
    "training_metrics": Scenario(lambda: [alg.training_metrics(("accuracy",))], batches=ragged),
    "noise scale": Scenario(lambda: [alg.gradient_noise_scale()], microbatches=2),
    "per_example_clipping": Scenario(lambda: [alg.per_example_clipping(0.5, 0.1)], is_compiled=True),
    "per_example_clipping in chunks": Scenario(
        lambda: [alg.per_example_clipping(0.5, 0.1, chunk_size=2)], lambda: make_mlp(dropout=0.5), ragged
    ),
    "batch norm": Scenario(net=lambda: make_cnn().double(), batches=ragged_images),
    "batch norm, compiled": Scenario(
        lambda: [alg.sam(0.1, every=2)], lambda: make_cnn().double(), ragged_images, is_compiled=True
    ),
    "batch norm in slices": Scenario(net=make_cnn, batches=images, microbatches=2),
    "ghost_batchnorm": Scenario(lambda: [alg.ghost_batchnorm(3)], make_cnn, images),
    "no elements": Scenario(net=WithEmpty),
    "coupled": Scenario(options={"loss": pc.losses.over_batch(nt_xent)}, batches=ragged, microbatches=2),
    "denominators": Scenario(options={"loss": SumOfMeans()}, batches=partly_ignored, microbatches=2, is_compiled=True),
    "compiled": Scenario(lambda: [alg.mixup(1.0), alg.sam(0.5, every=2)], batches=ragged, is_compiled=True),
}


def run(scenario: Scenario, transform: Callable[[Any], Any] = lambda step: step) -> list[State]:
    """Return the states after each step; the transform divides the step among processes."""
    step = transform(compose(loop_events, scenario.algorithms(), microbatches=scenario.microbatches))
    if scenario.is_compiled:
        step = pc.compile(step, backend="eager", quiet=True)
    state = step.init(make_state(scenario.net(), duration="100ba", batches_per_epoch=10, **scenario.options))
    states = []
    for batch in scenario.batches():
        state = step(state, batch)
        states.append(state.copy())
    return states


def told(state: State) -> dict[str, Tensor]:
    """Return a state's tensors by their paths."""
    return {path: leaf for path, leaf in pc.tree.leaves_with_paths(state).items() if isinstance(leaf, Tensor)}


@dataclasses.dataclass(frozen=True)
class Settled:
    """A loss whose printed form differs between processes, by its device and the order of a set."""

    device: torch.device
    ignored: frozenset[str] = frozenset(f"class {number}" for number in range(20))

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return pc.losses.cross_entropy(outputs, targets)


def refusals() -> dict[str, str]:
    """Return the errors of processes that do not fit together, and of some that do."""
    step, (inputs, targets) = compose(loop_events), make_batch()
    rank = dist.get_rank()

    def report(state: State) -> State:
        own = {"later": state.loss} if state.first_example else {}
        return state.replace(metrics={**state.metrics, **own})

    reporting = compose(loop_events, [changing("reporting", Event.AFTER_LOSS, report)])
    reused = pc.data_parallel(step)
    reused(reused(make_state(), (inputs, targets)), (inputs, targets))
    attempts: dict[str, Callable[[], Any]] = {
        "batch": lambda: pc.data_parallel(step)(make_state(), (inputs + rank, targets)),
        "order": lambda: pc.data_parallel(step)(make_state(), (inputs.roll(rank, 0), targets.roll(rank, 0))),
        "rate": lambda: pc.data_parallel(step)(make_state(optimizer=optim.sgd(0.1 + rank)), (inputs, targets)),
        "frozen": lambda: pc.data_parallel(step)(make_state().replace(frozen=("3.bias",)[:rank]), (inputs, targets)),
        "modes": lambda: pc.data_parallel(step)(make_state(eval_mode=["1"] * rank), (inputs, targets)),
        "loss": lambda: pc.data_parallel(step)(make_state(loss=[pc.losses.mse, nt_xent][rank > 0]), (inputs, targets)),
        "no refusal": lambda: pc.data_parallel(step)(
            make_state(loss=Settled(torch.device("cuda", rank))), (inputs, targets)
        ),
        "network": lambda: pc.data_parallel(step)(make_state(make_mlp(0, dropout=0.1 * rank)), (inputs, targets)),
        "program": lambda: pc.data_parallel(step.replace(program=loop_events[rank > 0 :]))(
            make_state(), (inputs, targets)
        ),
        "fields": lambda: pc.data_parallel(step)(make_state(target_field=[1, -1][rank > 0]), (inputs, targets)),
        "metrics": lambda: pc.data_parallel(reporting)(make_state(), (inputs, targets)),
        "params": lambda: pc.data_parallel(step)(make_state(make_mlp(rank)), (inputs, targets)),
        "second run": lambda: reused(make_state(make_mlp(rank)), (inputs, targets)),
        "key": lambda: pc.data_parallel(step)(make_state(key=rank), (inputs, targets)),
        "coupled": lambda: pc.data_parallel(step)(make_state(loss=nt_xent), (inputs, targets)),
        "auto": lambda: pc.fit(pc.data_parallel(step), make_state(), [(inputs, targets)], microbatches="auto"),
        "seconds": lambda: pc.fit(pc.data_parallel(step), make_state(), [(inputs, targets)], duration="9s"),
    }
    return errors_of(attempts)


def trained(transform: Callable[[Any], Any] = lambda step: step) -> State:
    """Return the result of two epochs of `fit` with a shuffling loader."""
    data = torch.utils.data.TensorDataset(*make_batch(size=20))
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
    return pc.fit(transform(compose(loop_events)), make_state(), loader, duration="2ep")


class Walk:
    """An environment that remembers a position outside of the state."""

    def __init__(self) -> None:
        self.position = torch.zeros(4)

    def __call__(self, state: State) -> tuple[Tensor, Tensor]:
        self.position = self.position + pc.random.normal(state.rng("walk"), (4,))
        return self.position + make_batch(size=8)[0], make_batch(size=8)[1]

    def state_dict(self) -> dict[str, Tensor]:
        return {"position": self.position}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        self.position = saved["position"]


def resumed(folder: str) -> list[dict[str, Tensor]]:
    """Return the results of a whole run in an environment, and of one that is resumed half-way."""

    def end(name: str, duration: str) -> dict[str, Tensor]:
        walk, step = Walk(), pc.data_parallel(compose(loop_events))
        saved = pc.Checkpoints(f"{folder}/{name}", every="60s", extra=walk)
        state = pc.fit(step, make_state(), pc.data.stream(walk), duration=duration, checkpoints=saved, resume="auto")
        return {**told(state), "walk": walk.position}

    end("half", "2ba")
    return [end("whole", "4ba"), end("half", "4ba")]


METRICS = {
    "loss": pc.metrics.mean_loss(),
    "accuracy": pc.metrics.accuracy,
    "iou": pc.metrics.iou(3),
    "margin": lambda outputs, targets: outputs.max(1).values - outputs.gather(1, targets[:, None]).squeeze(1),
}
"""Metrics that are sums over examples."""


def evaluated(
    metrics: dict[str, Any], transform: Callable[[Any], Any] = lambda step: step, *, data: Sequence[Any] | None = None
) -> tuple[dict[str, float], list[int]]:
    """Return the metrics of a noisy evaluation, and the numbers of examples that went through the network together."""
    passes: list[int] = []

    def with_noise(state: State) -> State:
        passes.append(state.num_examples)
        draws = pc.random.normal(state.example_rng("noise"), tuple(state.inputs.shape))
        return state.replace(inputs=state.inputs + draws)

    step = transform(compose(loop_events, [changing("noise", Event.EVAL_BEFORE_FORWARD, with_noise)]))
    data = ragged() if data is None else data
    return pc.evaluate(make_state(), data, metrics, step=step), passes


def evaluations() -> dict[str, Any]:
    """Return results of evaluations of which each process computes a part."""
    differing = [make_batch(dist.get_rank())]
    longer = ragged()[: dist.get_rank() + 1]
    own = pc.metrics.Metric(pc.metrics.accuracy.init, pc.metrics.accuracy.update, pc.metrics.accuracy.compute)
    divided = {"all": evaluated(METRICS, pc.data_parallel), "not a sum": evaluated({"own": own}, pc.data_parallel)}
    return divided | errors_of(
        {
            "differing": lambda: evaluated(METRICS, pc.data_parallel, data=differing),
            "longer": lambda: evaluated(METRICS, pc.data_parallel, data=longer),
        }
    )


def results(mesh: Any, folder: str) -> dict[str, Any]:
    """Return the results of all scenarios in one of several processes."""
    del mesh
    core_ranks._BUCKET = 256  # so that these small networks are sent in several buckets
    return {
        ".refusals": refusals(),
        **{name: [told(state) for state in run(one, pc.data_parallel)] for name, one in SCENARIOS.items()},
        ".fit": [told(trained(pc.data_parallel))],
        ".resumed": resumed(folder),
        ".evaluations": evaluations(),
    }
