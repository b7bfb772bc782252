"""Nasty networks against manual loops, under the laws, and refused ones."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import purecompose as pc
from purecompose import Algorithm, State, algorithms, compose, evaluate, loop_events, tree
from purecompose.errors import UnkeyedRandomError
from purecompose.testing import suite
from purecompose.testing.case import Case, noise, shrink
from purecompose.testing.law import Law
from purecompose.testing.tasks import Task
from tests.helpers import assert_close, assert_same
from tests.nn.nasty_networks import NETWORKS, Around, RunningMean, vectors
from tests.sampling import one_in


# The library's warnings about them, once per network.
WARNED = {
    "tensors in lists": "neither parameter nor buffer: it becomes a buffer",
    "cache in an attribute": "forward changed .*table, which is neither",
    "cache in a dictionary": "forward changed .*tables, which is neither",
    "activations left behind": "forward changed .*calls.*which is neither",
}
STATISTICS = "takes statistics over the examples of a slice"
NOT_IN_SLICES = {
    "buffer in place": STATISTICS,
    "buffer rebound": STATISTICS,
    "buffer by setattr": STATISTICS,
    "ring of integers and flags": STATISTICS,
    "checkpointing": STATISTICS,
    "batch norm, cumulative": STATISTICS,
    "batch norm, untracked": STATISTICS,
    "batch norm, bare": STATISTICS,
    "tensors in lists": "changes a buffer in each pass, and computes with it",
    "draws now and then": "decides by the number of passes whether it draws",
    "spectral norm": "takes a power iteration in each pass",
}
NOT_MAPPED = {
    "draws now and then": "reads a value back (.item()) to decide",
}
NO_FLOAT_INPUT = {"lstm", "gru of layers", "attention", "encoder", "encoder with a mask"}
NOT_MIXED = NO_FLOAT_INPUT | {"keyword inputs", "dataclass output"}


@pytest.fixture(params=NETWORKS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@contextlib.contextmanager
def warning_of(name: str) -> Iterator[None]:
    """Expect the warnings of a network that has some; for others every warning is an error."""
    with pytest.warns(UserWarning, match=WARNED[name]) if name in WARNED else contextlib.nullcontext():
        yield


def run(step: Any, state: State, batches: Sequence[Any]) -> State:
    for batch in batches:
        state = step(state, batch)
    return state


def by_hand(task: Task, net: nn.Module, batches: Sequence[Any]) -> None:
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1, momentum=0.9)
    for inputs, targets in batches:
        optimizer.zero_grad()
        outputs = net(**inputs) if isinstance(inputs, dict) else net(inputs)
        task.loss(outputs, targets).backward()
        optimizer.step()


def test_three_steps_equal_a_manual_loop_or_their_repetition(name):
    task = NETWORKS[name]
    batches = [task.make_batch(seed, 5) for seed in range(3)]
    net, step = task.make_net(3), compose(loop_events)
    with warning_of(name):
        state = task.make_state(3)
        end = run(step, state, batches)
    before = copy.deepcopy(task.make_net(3).state_dict())
    assert_same(dict(net.state_dict()), dict(before))
    if end.model.skeleton(True).draws:
        torch.manual_seed(7)
        assert_same(run(step, state, batches), end)
        other = run(step, state.replace(key=pc.random.key(99)), batches)
        assert any(not torch.equal(other.params[key], end.params[key]) for key in end.params)
    else:
        by_hand(task, net, batches)
        assert_close(end.params, dict(net.named_parameters()))
        registered = dict(net.named_buffers())
        assert_close({key: end.buffers[key] for key in registered}, registered)
    for key, old in state.params.items():
        assert end.params[key].dtype == old.dtype
        assert key not in end.context.frozen or torch.equal(end.params[key], old)


def test_evaluation_equals_the_modules_and_does_not_change_the_state(name):
    task = NETWORKS[name]
    batches = [task.make_batch(seed, 4) for seed in range(2)]
    with warning_of(name):
        state = run(compose(loop_events), task.make_state(3), batches)
        before = tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state)
        found = evaluate(state, batches)["loss"]
        assert evaluate(state, batches)["loss"] == found
        assert_same(state, before)
        net = pc.to_module(state).eval()
    with torch.no_grad():
        losses = [task.loss(net(**x) if isinstance(x, dict) else net(x), y).item() for x, y in batches]
    assert found == pytest.approx(sum(losses) / 2, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*neither:UserWarning")
def test_slices_give_the_whole_batch(name):
    task = NETWORKS[name]
    is_single = name in ("mixed dtypes", "complex weights")
    dtype = torch.float32 if is_single else torch.float64
    state, batch = task.make_state(3, dtype=dtype), task.make_batch(0, 6, dtype)
    is_reported = NOT_IN_SLICES.get(name) == STATISTICS and not name.startswith("batch norm")
    whole = compose(loop_events)(state, batch)
    with pytest.warns(UserWarning, match="depend on the other examples") if is_reported else contextlib.nullcontext():
        sliced = compose(loop_events, microbatches=3)(state, batch)
    if name in NOT_IN_SLICES:
        assert any(
            not torch.allclose(whole.params[key], sliced.params[key], rtol=1e-6, atol=1e-8) for key in whole.params
        )
    else:
        # bfloat16 has three digits; the slices' shares are float32 numbers.
        assert_close(whole.params, sliced.params, rtol=1e-2 if is_single else 1e-6, atol=1e-6 if is_single else 1e-8)


@pytest.mark.filterwarnings("ignore:.*neither:UserWarning", "ignore:There is a performance drop:UserWarning")
def test_mapped_states_equal_single_states(name):
    task, step = NETWORKS[name], compose(loop_events)
    first, second = task.make_state(1, key=9), task.make_state(2, key=9)
    members = [first, second.replace(static=first.static)]
    stacked = tree.map(lambda *leaves: torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *members)
    batch = task.make_batch(0, 4)
    mapped = torch.func.vmap(step, in_dims=(0, None))
    if name in NOT_MAPPED:
        with pytest.raises(RuntimeError, match="vmap|Batching rule"):
            mapped(stacked, batch)
        return
    together = mapped(mapped(stacked, batch), batch)
    for i, member in enumerate(members):
        alone = run(step, member, [batch, batch])
        for ours, theirs in ((together.params, alone.params), (together.buffers, alone.buffers)):
            assert_close({key: leaf[i] for key, leaf in ours.items()}, theirs, rtol=1e-4, atol=1e-5)


# The laws

PURE = (suite.input_untouched, suite.deterministic, suite.global_state_kept)
OTHERS = (
    suite.structure_kept,
    suite.buffers_kept,
    suite.absent_when_unmatched,
    suite.draws_independent,
    suite.microbatches_agree,
    suite.vmap_agrees,
    suite.resume_exact,
)


def subjects(name: str) -> list[Algorithm]:
    found = [shrink()]
    if name != "keyword inputs":  # noise expects a tensor
        found.append(noise())
    if name not in NOT_MIXED:
        found.append(algorithms.mixup(0.2))
    return found


def case_of(name: str, **changes: Any) -> Case:
    others = ("bystander",) if name == "keyword inputs" else ("bystander", "noise")
    return Case(task=NETWORKS[name], others=others, **changes)


@pytest.mark.parametrize("name", one_in(4, NETWORKS), indirect=True)
@pytest.mark.filterwarnings("ignore:.*neither:UserWarning")
def test_the_laws_of_purity(name):
    subject = dataclasses.replace(subjects(name)[-1], name="subject") if name in NOT_MIXED else subjects(name)[-1]
    for law in PURE:
        assert law(subject, case_of(name, batch_size=3)) or name in NO_FLOAT_INPUT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*neither:UserWarning", "ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("law", [*PURE, *OTHERS], ids=repr)
def test_all_laws(name, law: Law):
    for i, subject in enumerate(subjects(name)):
        subject = dataclasses.replace(subject, name="subject")
        case = case_of(name, seed=i, num_batches=2, batch_size=4, microbatches=1 + i % 2, start=i)
        law(subject, case)


# Refused


class HiddenTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = Around(), (torch.ones(1),)


class Clamping(Around):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.enter.weight.clamp_(-1, 1)
        return super().forward(x)


class Removing(Around):
    def __init__(self) -> None:
        super().__init__(RunningMean("in place"))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        del self.inner.mean
        return y


class OwnGenerator(Around):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(x.shape, generator=torch.Generator()))


class TorchCheckpoint(Around):
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.dropped, x, use_reentrant=False)  # pyright: ignore

    def dropped(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.LSTM(1, 3, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x.unsqueeze(2), torch.full((len(x),), 4), batch_first=True)
        return self.core(packed)[1][0][-1]


class ShapedByTheBatch(Around):
    """A network that keeps its last input in a buffer of the batch's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        return super().forward(x)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3))


def on_meta() -> nn.Module:
    return nn.Linear(4, 3, device="meta")


def with_a_closure() -> nn.Module:
    net = Around()
    net.register_forward_hook(lambda module, args, output: net.leave(output))
    return net


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lazy, ValueError, r"0\.weight has no shape yet \(a lazy module\): run the module once on a batch first"),
        (on_meta, ValueError, "weight is on the meta device and has no values: give it values first"),
        (HiddenTensor, ValueError, "HiddenTensor holds 1 tensors in tuples or objects.*, in scale. Keep them in lists"),
        (with_a_closure, ValueError, "_forward_hooks has a function that keeps the module .*Make it a method"),
        (Clamping, RuntimeError, r"forward wrote into the parameter 'enter\.weight'.*weight\.clamp\(\) for"),
        (Removing, RuntimeError, r"forward removed the buffer 'inner\.mean'"),
        (OwnGenerator, UnkeyedRandomError, r"torch\.randn` in OwnGenerator\.forward .*Leave `generator` out"),
        (TorchCheckpoint, UnkeyedRandomError, r"Use `purecompose\.nn\.layers\.checkpoint\(fn, \*args\)` in its place"),
        (Packed, UnkeyedRandomError, "no keyed dropout for packed sequences. Pass padded sequences"),
        (ShapedByTheBatch, pc.errors.ContractError, r"last"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_errors_of_refused_networks_give_the_reason(make, error, message):
    task = Task("refused", lambda _: make(), vectors)
    with pytest.raises(error, match=message):
        compose(loop_events)(task.make_state(0), task.make_batch(0, 5))
