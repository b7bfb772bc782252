"""Helpers for the tests: small networks, batches, states and algorithms, all made from seeds."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import Algorithm, Event, State, on, optim
from purecompose.core.scopes import Scope
from purecompose.time.predicates import Predicate


Batch = tuple[Tensor, Tensor]


class Routed(nn.Module):
    """A network that sends each example through one of two branches, by its sign, with an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        is_positive, hidden = inputs.sum(1) > 0, inputs.new_zeros(len(inputs), 4)
        for branch, rows in ((self.positive, is_positive), (self.negative, ~is_positive)):
            if rows.any():
                hidden = hidden.index_put((rows,), branch(inputs[rows]))
        return self.head(hidden)


def make_mlp(seed: int = 0, *, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a network 4 -> 8 -> 3 with weights from the seed."""
    layers: list[nn.Module] = [nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return _reset(nn.Sequential(*layers).to(dtype), seed)


def make_cnn(seed: int = 0) -> nn.Sequential:
    """Return two convolutions with BatchNorm for 2x6x6 images and 3 classes; no biases that BatchNorm would cancel."""
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return _reset(net, seed)


def make_batch(seed: int = 0, size: int = 8, shape: Sequence[int] = (4,), dtype: torch.dtype = torch.float32) -> Batch:
    """Return inputs (size, *shape) and class indices (size,) of three classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, *shape, generator=generator, dtype=dtype)
    return inputs, torch.randint(3, (size,), generator=generator)


def make_batches(num: int = 5, size: int = 8, **options: Any) -> list[Batch]:
    """Return different batches."""
    return [make_batch(seed, size, **options) for seed in range(num)]


class Unsized:
    """Batches of unknown number."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def make_state(net: nn.Module | None = None, **options: Any) -> State:
    """Return a state for classification, by default with SGD with momentum."""
    options = {"loss": pc.losses.cross_entropy, "optimizer": optim.sgd(0.1, momentum=0.9), "duration": "2ep", **options}
    return State.create(make_mlp() if net is None else net, **options)


def run_steps(step: Any, state: State, batches: Sequence[Any]) -> State:
    """Apply the step to all batches."""
    for batch in batches:
        state = step(state, batch)
    return state


def changing(
    name: str, event: Event, fn: Callable[[State], State], *, when: Predicate | None = None, **options: Any
) -> Algorithm:
    """Return an algorithm that applies `fn` at one event."""
    match = on(event) if when is None else on(event) & when
    return Algorithm(name, match, lambda _, state: fn(state), **options)


def noise(name: str = "noise", scale: float = 0.1, **options: Any) -> Algorithm:
    """Return an algorithm that adds keyed noise, drawn per example, to the inputs."""

    def add(state: State) -> State:
        draws = pc.random.normal(state.example_rng(name), tuple(state.inputs.shape))
        return state.replace(inputs=state.inputs + scale * draws)

    return changing(name, Event.AFTER_DATALOADER, add, **options)


def loss_of(state: State) -> Tensor:
    """Return the loss that a step has set."""
    assert state.loss is not None
    return state.loss


def counter(name: str = "counter") -> Algorithm:
    """Return an algorithm that counts the batches in its slot."""

    def apply(event: Event, state: State) -> State:
        count = torch.zeros(()) if event is Event.INIT else state.slots[name] + 1
        return state.replace(slots={**state.slots, name: count})

    return Algorithm(name, on(Event.INIT, Event.BATCH_END), apply)


def decay(name: str = "decay", factor: float = 0.99, **options: Any) -> Algorithm:
    """Return an algorithm that shrinks the parameters after the update."""

    def shrink(state: State) -> State:
        return state.replace(params={key: param * factor for key, param in state.params.items()})

    return changing(name, Event.BATCH_END, shrink, **options)


def recorder(log: list[Any], name: str = "recorder", *events: Event, **options: Any) -> Algorithm:
    """Return an algorithm that appends (name, event) to a list at these events, by default at all."""

    def apply(event: Event, state: State) -> State:
        log.append((name, event))
        return state

    return Algorithm(name, on(*(events or tuple(Event))), apply, **options)


def assert_same(first: Any, second: Any) -> None:
    """Assert bit for bit equality, with a description of the differences."""
    differences = pc.tree.diff(first, second)
    assert not differences, "\n".join(differences)


def assert_close(first: Any, second: Any, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Assert that two mappings of tensors are equal within a tolerance."""
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name].detach(), second[name].detach(), rtol=rtol, atol=atol, msg=name)


def without(program: Sequence[Any], name: str) -> tuple[Any, ...]:
    """Return a program without a pair of events, such as BATCH_START and BATCH_END for "batch"."""
    kept = [node for node in program if not (isinstance(node, Event) and node.canonical_name == name)]
    return tuple(type(node)(*without(node.body, name)) if isinstance(node, Scope) else node for node in kept)


def assert_near(found: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """Assert that two trees are equal within a share of each leaf's largest magnitude, with the differing places."""
    near = pc.tree.differences(found, expected, tolerance=lambda _: pc.tree.Tolerance(rtol, atol))
    assert list(map(str, near)) == []


def trained_by_torch(net: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batches: Any) -> dict[str, Tensor]:
    """Return the parameters of a network after a step of SGD with rate 0.1 on each batch."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def nt_xent(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a contrastive loss, in which examples with the same target are alike; it couples examples."""
    outputs = F.normalize(outputs, dim=1)
    similarities = (outputs @ outputs.T / 0.5).masked_fill(torch.eye(len(outputs), dtype=torch.bool), -1e9)
    is_pair = (targets[:, None] == targets).fill_diagonal_(False) | torch.eye(len(outputs), dtype=torch.bool)
    return -(similarities.log_softmax(1) * is_pair).clamp(min=-50).sum() / len(outputs)


@dataclasses.dataclass(frozen=True)
class SumOfMeans:
    """A mean over examples whose target counts, and a weighted mean over all examples."""

    weight: Any = 0.5

    def denominators(self, targets: Tensor) -> dict[str, Any]:
        return {"labelled": (targets != -100).sum(), "all": len(targets)}

    def __call__(self, outputs: Tensor, targets: Tensor, denominators: Any) -> tuple[Tensor, dict[str, Tensor]]:
        labelled = F.cross_entropy(outputs, targets, reduction="sum") / denominators["labelled"]
        size = outputs.square().sum() / denominators["all"]
        return labelled + self.weight * size, {"labelled": labelled, "size": size}


def copied(tree: Any) -> Any:
    """Return the same tree with copies of its tensors."""
    return pc.tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def errors_of(attempts: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Return the errors of attempts that fail, by their names."""
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (TypeError, ValueError, RuntimeError, OSError) as error:
            found[name] = str(error)
    return found


def _reset(net: nn.Sequential, seed: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(0.3 * torch.randn(param.shape, generator=generator, dtype=param.dtype))
    return net
