"""The state: made from a network, stepped, mapped, differentiated, and never edited."""

import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

from purecompose import losses, optim, random, schedule, tree
from purecompose.core.algorithm import Algorithm
from purecompose.core.clock import Clock
from purecompose.core.compose import compose
from purecompose.core.state import State
from purecompose.loop import loop_events
from purecompose.surgery.weights import to_module
from purecompose.time import RunLength, Timestamp
from purecompose.time.event import Event
from purecompose.time.predicates import on
from purecompose.transforms.population import stack_states


class Net(nn.Module):
    """Linear, batch norm, linear with the first one's weight, dropout, linear."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second, self.drop, self.head = nn.Linear(4, 4), nn.Dropout(dropout), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.second(F.relu(self.norm(self.first(x))))))


class Linear(nn.Module):
    """One layer of three classes whose output is `make(logits, loss)`: a model with its own loss."""

    def __init__(self, make: Any = None) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 3), make

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layer(x)
        return logits if labels is None else self.make(logits, F.cross_entropy(logits, labels))


@dataclass
class Output:
    logits: Tensor
    loss: Tensor


def seeded(factory: Any = Net, seed: int = 0) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return factory()


def start(net: nn.Module | None = None, **settings: Any) -> State:
    settings = {"loss": losses.cross_entropy, "optimizer": optim.sgd(0.1, momentum=0.9), **settings}
    return State.create(seeded() if net is None else net, **settings)


def batch(seed: int = 0, size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)


step = compose(loop_events)


def imperative(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> nn.Module:
    """Train a copy of the network with the usual imperative loop."""
    net = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


# Training


def test_steps_equal_the_imperative_loop_with_ties_and_batch_statistics():
    net, batches = seeded(), [batch(seed) for seed in range(4)]
    state = start(net)
    assert "second.weight" not in state.params and set(state.opt_state["momentum"]) == set(state.params)
    for one in batches:
        state = step(state, one)
    expected = imperative(net, batches)
    exported: Any = to_module(state)
    assert exported.first.weight is exported.second.weight and exported.training
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(exported.state_dict()[name], value, rtol=1e-6, atol=1e-7, msg=name)
    assert state.buffers["norm.num_batches_tracked"] == 4


def test_buffers_that_forward_rebinds_enter_the_new_state():
    class Running(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running", torch.zeros(4))

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            self.running = 0.5 * self.running + x.detach().mean(0)
            return super().forward(x, labels) + self.running.sum()

    (x, y), state = batch(), start(seeded(Running))
    after = step(step(state, (x, y)), (2 * x, y))
    torch.testing.assert_close(after.buffers["running"], 2.5 * x.mean(0))
    with pytest.warns(UserWarning, match="outputs for an example depend on the other examples"):
        sliced = step.replace(microbatches=2)(state, (x, y))
    torch.testing.assert_close(sliced.buffers["running"], 0.5 * x[:3].mean(0) + x[3:].mean(0))
    assert not state.buffers["running"].any()


def test_a_network_in_eval_mode_trains_in_training_mode():
    net = seeded()
    training, evaluating = start(net), start(net.eval())
    assert tree.equal(step(training, batch()), step(evaluating, batch()))
    state = start(net, eval_mode=["norm"])
    assert tree.equal(step(state, batch()).buffers, state.buffers)


def test_bf16_runs_and_keeps_parameters_and_loss_in_float32():
    state = start(seeded(Linear), precision="bf16")
    after, reference = step(state, batch()), step(start(seeded(Linear)), batch())
    assert {t.dtype for t in after.params.values()} == {torch.float32}
    outputs = state.forward(batch()[0])
    assert outputs.dtype == torch.float32 and torch.equal(outputs, outputs.bfloat16().float()), "no autocast"
    assert after.loss is not None and after.loss.dtype == torch.float32
    assert not torch.equal(after.params["layer.weight"], reference.params["layer.weight"])
    torch.testing.assert_close(after.params, reference.params, rtol=0.05, atol=0.01)


# Immutable, and replaced


def test_a_state_cannot_be_assigned_to():
    state = start()
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.params = {}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.context.precision = "bf16"  # pyright: ignore[reportAttributeAccessIssue]


def test_replace_shares_the_rest_and_knows_its_names():
    state = start()
    slots = {"mine": torch.ones(1)}
    after = state.replace(slots=slots, timestamp=Timestamp(batch=3), precision="bf16")
    assert after.slots is slots and after.params is state.params and after.model is state.model
    assert after.timestamp.batch == 3 and after.context.precision == "bf16"
    assert (state.slots, state.timestamp.batch, state.context.precision) == ({}, 0, "fp32")
    with pytest.raises(TypeError, match="no field 'parms'; it has .*inputs.*params.*timestamp"):
        state.replace(parms={})


def test_replace_of_inputs_and_targets_goes_by_the_states_keys():
    x, y = batch()
    state = start(input_field="x", target_field="y").replace(batch={"x": x, "y": y, "rest": 1})
    assert state.inputs is x and state.targets is y and state.num_examples == 6
    after = state.replace(inputs=2 * x, targets=y + 1, loss=torch.ones(()))
    assert torch.equal(after.inputs, 2 * x) and torch.equal(after.targets, y + 1) and after.loss == 1
    assert after.batch["rest"] == 1 and state.inputs is x and state.loss is not None and state.loss.isnan()
    both = state.replace(batch={"x": y, "y": x}, inputs=x)
    assert both.inputs is x and both.targets is x
    with pytest.raises(KeyError, match="input_field"):
        start().replace(inputs=x)


def test_frozen_names_may_come_in_any_collection_but_not_as_one_string():
    state = start()
    assert state.replace(frozen=["head.bias"]).context == state.replace(frozen=frozenset({"head.bias"})).context
    for wrong in ("head.bias", None):
        with pytest.raises(TypeError, match="frozen: expected a collection of names or patterns"):
            state.replace(frozen=wrong)


@pytest.mark.parametrize("which", ["frozen", "paused"])
def test_frozen_names_may_be_patterns_each_of_which_matches_something(which):
    state = start()
    named = state.replace(**{which: ["head.bias", *[name for name in state.params if name.endswith(".weight")]]})
    assert state.replace(**{which: ["head.bias", "*.weight"]}).context == named.context
    for given in (["haed.*"], ["head.*", "head.bais"]):
        with pytest.raises(ValueError, match=rf"{which}: '{given[-1].replace('*', '.')}.*' matches no parameter"):
            state.replace(**{which: given})


def test_frozen_names_may_be_replaced_together_with_the_model():
    state, other = start(), State.create(nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1))
    after = state.replace(frozen=["weight"], model=other.model, params=other.params, buffers={}, opt_state={})
    assert after.context.trainable == ("bias",)


def test_a_thawed_parameter_trains_as_in_torch():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    state, reference = State.create(net, loss=losses.mse, optimizer=optim.sgd(0.1, momentum=0.9)), copy.deepcopy(net)
    inputs, targets = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.ones(8, 3)
    sgd_of_torch = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    run = compose(loop_events)
    for frozen in (["0.*"], [], ["*.bias"]):
        state = state.replace(frozen=frozen)
        for name, param in reference.named_parameters():
            param.requires_grad_(name in state.context.trainable)
        for _ in range(2):
            state = run(state, (inputs, targets))
            sgd_of_torch.zero_grad()
            torch.nn.functional.mse_loss(reference(inputs), targets).backward()
            sgd_of_torch.step()
    for name, param in reference.named_parameters():
        torch.testing.assert_close(state.params[name], param.detach())


# A pytree


def test_both_pytrees_give_the_same_leaves_in_the_same_order():
    state = step(start(key=3), batch())
    slots = {"z": (torch.ones(1), {"b": torch.ones(2), "a": torch.ones(3)})}
    state = state.replace(slots=slots, batch=batch())
    ours, (theirs, spec) = tree.leaves(state), torch_pytree.tree_flatten(state)
    assert len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
    assert all(isinstance(leaf, Tensor) for leaf in ours)
    for again in (torch_pytree.tree_unflatten(theirs, spec), tree.unflatten(tree.structure(state), ours)):
        assert type(again) is State and tree.equal(again, state)
        assert again.static is state.static and again.outputs is None and again.timestamp.batch == 1
    assert ".params['head.bias']" in tree.leaves_with_paths(state)


def test_states_of_other_times_and_seeds_map_and_subtract():
    first = start(key=0, duration="2ep", batches_per_epoch=3)
    second = start(seeded(seed=1), key=5, duration="4ep", batches_per_epoch=7)
    first, second = step(first, batch()), step(step(second, batch()), batch(1))
    assert first.timestamp != second.timestamp and first.static == second.static
    assert hash(first.static) == hash(second.static)
    difference = tree.map(torch.sub, first, second)
    assert torch.equal(difference.params["head.bias"], first.params["head.bias"] - second.params["head.bias"])
    same = torch_pytree.tree_map(torch.sub, first, second)
    assert tree.equal(same, difference)


@pytest.mark.parametrize(
    "other",
    [
        {"net": Linear()},
        {"loss": losses.mse},
        {"loss": F.cross_entropy},
        {"optimizer": optim.sgd(0.2, momentum=0.9)},
        {"precision": "bf16"},
        {"target_field": 2},
    ],
    ids=lambda other: next(iter(other)),
)
def test_states_of_different_configurations_have_different_static_parts(other):
    assert start().static == start().static
    assert start().static != start(**other).static
    with pytest.raises(ValueError):
        tree.map(torch.add, start(), start(**other))


def test_to_shares_what_is_already_there():
    state = start()
    assert state.device == torch.device("cpu")
    assert all(a is b for a, b in zip(tree.leaves(state.to("cpu")), tree.leaves(state), strict=True))
    assert start(device="cpu").key.device.type == "cpu"


# Time


def with_algorithm(apply: Any, event: Event = Event.BATCH_START, k: int = 1, **settings: Any) -> Any:
    """A step of k microbatches with one algorithm, which applies `apply` at the event."""
    probe = Algorithm("probe", on(event), lambda event, state: apply(state), **settings)
    run = compose(loop_events, [probe], microbatches=k)
    return lambda state, one: run(run.init(state), one)


@pytest.mark.parametrize("name, remedy", [("batch", "state.clock.batch"), ("elapsed", "state.clock.elapsed")])
def test_the_timestamp_is_sealed_inside_a_step(name, remedy):
    run = with_algorithm(lambda state: state.replace(loss=torch.tensor(getattr(state.timestamp, name))))
    state = start()
    with pytest.raises(RuntimeError, match=f"timestamp.{name} was read inside a step.*{remedy}.*host=True"):
        run(state, batch())
    assert state.timestamp.batch == 0


def test_the_clock_holds_the_timestamp_as_tensors():
    halving = schedule.scheduled(lambda timestamp: 0.5**timestamp.epoch)
    run = RunLength("4ep", batches_per_epoch=5)
    now = Timestamp(epoch=2, batch=13, batch_in_epoch=3, sample=2**40 + 1, token=9, run=run)
    later = now.advance(samples=8)
    clock = Clock.of(now, later, (halving,), torch.device("cpu"))
    for one, time in ((clock, now), (clock.advanced(), later)):
        for name in ("batch", "epoch", "batch_in_epoch", "sample", "token"):
            value = getattr(one, name)
            assert value.dtype == torch.int64 and value.ndim == 0
            assert value.item() == getattr(time, name), name
        assert one.elapsed.item() == time.elapsed() and one.scheduled(halving).item() == 0.25
    key = random.key(3)
    for one in (clock, clock.advanced(), tree.map(torch.clone, clock)):
        assert torch.equal(one.key_of_draws(key), random.fold_in(key, 13))
    endless = Clock.of(Timestamp(), Timestamp(), (), torch.device("cpu"))
    assert math.isnan(endless.elapsed.item())
    with pytest.raises(KeyError, match="not evaluated in this step"):
        clock.scheduled(schedule.linear())
    doubled = tree.map(lambda table: table * 2, clock)
    assert (doubled.batch, doubled.advanced().batch, doubled.schedules) == (26, 28, (halving,))
    assert torch_pytree.tree_leaves(clock) == [clock.advanced().table]


# Randomness


def test_draws_depend_only_on_name_batch_and_key():
    state = start(key=1)

    def draw(state: State, name: str) -> Tensor:
        return random.uniform(state.rng(name), (8,))

    base = draw(state, "mixup")
    assert torch.equal(draw(start(seeded(seed=4), key=1), "mixup"), base)
    others = [
        draw(state, "cutmix"),
        draw(state.replace(timestamp=Timestamp(batch=1)), "mixup"),
        draw(start(key=2), "mixup"),
    ]
    assert not any(torch.equal(other, base) for other in others)
    expected = random.Rng(random.fold_in(random.key(1), 0), random.salt("mixup"))
    assert torch.equal(random.uniform(expected, (8,)), base)


def test_dropout_draws_by_key_batch_and_example():
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3)))
    state, (x, _) = start(net), batch()
    first = state.forward(x, train=True)
    assert torch.equal(state.forward(x, train=True), first)
    assert not torch.equal(start(net, key=1).forward(x, train=True), first)
    assert not torch.equal(state.replace(timestamp=Timestamp(batch=1)).forward(x, train=True), first)
    parts = [step.replace(microbatches=k)(state, batch()) for k in (1, 2, 3)]
    for other in parts[1:]:
        torch.testing.assert_close(other.params, parts[0].params)


# Forward, scalars, gradient


def test_forward_runs_in_evaluation_mode_by_default_and_keeps_the_buffers():
    net, (x, _) = seeded(lambda: Net(dropout=0.5)), batch()
    state = start(net)
    kept = {name: value.clone() for name, value in state.buffers.items()}
    evaluated = state.forward(x)
    assert torch.equal(evaluated, copy.deepcopy(net).eval()(x))
    assert not torch.equal(state.forward(x, train=True), evaluated)
    assert tree.equal(state.buffers, kept)
    outputs, buffers = state.run_model(x, train=True)
    assert outputs.shape == (6, 3) and buffers["norm.num_batches_tracked"] == 1


@pytest.mark.parametrize("arguments", [lambda x, y: [x, y], lambda x, y: {"labels": y, "x": x}])
def test_forward_takes_lists_as_arguments_and_mappings_as_keywords(arguments):
    state = start(seeded(lambda: Linear(Output)))
    assert torch.equal(state.forward(arguments(*batch())).logits, state.forward(batch()[0]))


def test_hparams_start_with_their_defaults_and_are_read_in_place_of_constants():
    rate = schedule.hparam("lr", 0.1)
    state = start(optimizer=optim.sgd(rate, momentum=0.9))
    assert list(state.hparams) == ["lr"] and state.hparams["lr"].dtype == torch.float32
    assert state.scalar(rate) is state.hparams["lr"] and state.scalar(0.5) == 0.5
    torch.testing.assert_close(step(state, batch()).params, step(start(), batch()).params)
    still = state.replace(hparams={"lr": torch.zeros(())})
    assert tree.equal(step(still, batch()).params, state.params)
    kept = still.with_hparams([rate, schedule.hparam("alpha", 2.0)])
    assert {name: value.item() for name, value in kept.hparams.items()} == {"lr": 0.0, "alpha": 2.0}
    assert kept.with_hparams([rate]) is kept
    with pytest.raises(ValueError, match="'lr' has two defaults: 0.1 and 0.2"):
        state.with_hparams([rate, schedule.hparam("lr", 0.2)])
    with pytest.raises(KeyError, match="missing"):
        state.scalar(schedule.hparam("missing", 1.0))


def test_numbers_among_hparams_become_tensors():
    state = start(optimizer=optim.sgd(schedule.hparam("lr", 0.1))).replace(hparams={"lr": 0.5})
    assert state.hparams["lr"].dtype == torch.float32 and state.hparams["lr"].shape == ()
    assert step(state, batch()).hparams["lr"].item() == 0.5
    for value, shown in (
        ([0.1, 0.2], r"\[0.1, 0.2\]"),
        (torch.tensor([0.1, 0.2]), r"a torch.float32 tensor of shape \(2,\)"),
        ({"0.weight": torch.tensor(0.1)}, r"\{.*\}.*For one of each parameter, name several .*groups"),
    ):
        with pytest.raises(TypeError, match=rf"hparams\['lr'\]: expected a number or a 0-d tensor, got {shown}"):
            state.replace(hparams={"lr": value})
    two = stack_states([state, state])
    assert two.replace(hparams={"lr": torch.tensor([0.1, 0.2])}).hparams["lr"].shape == (2,)


def test_schedules_and_gradients_outside_a_step_are_an_error():
    state = start(optimizer=optim.sgd(0.1 * schedule.linear()), duration="4ba")
    with pytest.raises(RuntimeError, match="inside a step"):
        state.scalar(schedule.linear())
    with pytest.raises(RuntimeError, match="inside a step"):
        state.gradient(state.params)


# Creating


def test_create_takes_a_seed_or_a_key_and_the_runs_length():
    state = start(key=random.key(7), duration="2ep", batches_per_epoch=3)
    assert torch.equal(state.key, start(key=7).key)
    for seed in range(6):
        assert not state.timestamp.is_finished()
        state = step(state, batch(seed))
    assert state.timestamp.is_finished()
    assert (state.timestamp.batch, state.timestamp.epoch) == (6, 2)
    assert repr(state).startswith("State(Model(Net, 7 parameters), 47 weights, at batch 6 (100.0% of the run), ")


@pytest.mark.parametrize(
    "name, said",
    [
        ("parameters", r"it is not a module: to_module\(state\) returns one"),
        ("epoch", "its time is state.timestamp.epoch"),
        ("weights", r"its fields are params, buffers, .*, grads$"),
    ],
)
def test_an_attribute_that_a_state_lacks_is_an_error_that_says_what_it_has(name, said):
    with pytest.raises(AttributeError, match=f"^a state has no attribute '{name}'; {said}"):
        getattr(start(), name)


@pytest.mark.parametrize(
    "settings, error, said",
    [
        ({"net": nn.LazyLinear(3)}, ValueError, "run the module once"),
        ({"net": "resnet"}, TypeError, "expected an nn.Module, got 'resnet'"),
        ({"loss": nn.CrossEntropyLoss}, TypeError, "CrossEntropyLoss.*make an instance"),
        ({"loss": "cross_entropy"}, TypeError, "expected a loss.*'cross_entropy'"),
        ({"optimizer": optim.sgd}, TypeError, "expected a pure optimizer with init and update.*got sgd"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)], lr=0.1)}, TypeError, "expected a pure optimizer .*from_torch"),
        ({"key": -1}, ValueError, "seed in"),
        ({"key": 1.5}, TypeError, "1.5"),
        ({"key": torch.ones(2)}, TypeError, r"State.create: expected a key, an int64 tensor of shape \(2,\)"),
        ({"precision": "fp8"}, ValueError, "precision='fp8': expected one of fp32, tf32, bf16"),
        ({"input_field": 1.5}, TypeError, "input_field=1.5"),
        ({"target_field": 1.5}, TypeError, "target_field=1.5"),
        ({"duration": "20 parsecs"}, ValueError, "parsecs"),
        ({"duration": "0.5dur"}, ValueError, "fraction of itself"),
        ({"duration": "0ep"}, ValueError, "duration: expected a time > 0"),
        ({"batches_per_epoch": 0}, ValueError, "batches_per_epoch: expected an int"),
        ({"batches_per_epoch": 2.5}, TypeError, "batches_per_epoch"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.filterwarnings("ignore:.*Lazy modules:UserWarning")
def test_bad_arguments_are_named_at_creation(settings, error, said):
    with pytest.raises(error, match=said):
        start(**settings)


def test_parameters_are_replaced_under_the_same_names():
    state = State.create(nn.Linear(2, 1), loss=losses.mse, optimizer=optim.sgd(0.1))
    with pytest.raises(ValueError, match=r"replace\(params=...\): missing bias. Pass all"):
        state.replace(params={"weight": state.params["weight"]})
    with pytest.raises(ValueError, match="unknown other"):
        state.replace(params={**state.params, "other": torch.zeros(1)})
    with pytest.raises(ValueError, match="missing bias and unknown bia. Pass"):
        state.replace(params={"weight": state.params["weight"], "bia": state.params["bias"]})
    with pytest.raises(TypeError, match="expected tensors by name, got Linear"):
        state.replace(params=nn.Linear(2, 1))


def test_whole_numbers_stay_frozen():
    net = nn.Linear(2, 1)
    net.steps = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    state = State.create(net, loss=losses.mse, optimizer=optim.sgd(0.1))
    with pytest.raises(ValueError, match="leaves out steps, of torch.int64.*freeze it too"):
        state.replace(frozen=[])
    assert state.replace(frozen=["steps"]).context.trainable == ("weight", "bias")
