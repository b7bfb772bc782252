"""A checkpoint leaves settings to the user's code, and what `ignore` matches to the template."""

import dataclasses
import functools
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import Checkpoints, State, Step, Trait, algorithms, compose, loop_events, optim
from purecompose.run.saving import folder
from purecompose.run.saving.checkpoint import assembled, snapshot
from purecompose.run.saving.comparison import describe, differences
from purecompose.run.saving.files import to_json
from purecompose.testing.tasks import TASKS
from purecompose.transforms.population import stack_states
from tests.helpers import assert_same, make_batches, make_state
from tests.shipped import SHIPPED


pytestmark = pytest.mark.filterwarnings("ignore:.*it becomes a buffer")
TRAIN = make_batches(4)


class Counting(nn.Module):
    """A network with a constant, a table that is not persistent, and a memory that is not persistent either."""

    table: Tensor
    memory: Tensor

    def __init__(self, scale: float = 5.0, table: int = 4, memory: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3)
        self.scale = torch.tensor(scale)
        self.register_buffer("table", torch.ones(table), persistent=False)
        self.register_buffer("memory", torch.full((3,), memory), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.head(inputs) * self.scale * self.table.mean() + self.memory
        if self.training:
            self.memory = 0.5 * self.memory + 0.1
        return outputs


class Centered(nn.Module):
    """A loss with class weights, which no step changes, and a centre, which each step moves."""

    weight: Tensor
    center: Tensor

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, weight, 1.0]))
        self.register_buffer("center", torch.zeros(()))

    def forward(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        if self.training:
            self.center = self.center + 1
        loss = nn.functional.cross_entropy(outputs + 0.1 * self.center, targets, self.weight, reduction="none")
        return loss.mean() if reduction == "mean" else loss


WEIGHTED: dict[str, Any] = {
    "torch's": lambda weight: nn.CrossEntropyLoss(weight=weight),
    "positive": lambda weight: nn.BCEWithLogitsLoss(pos_weight=weight),
    "this library's": lambda weight: pc.losses.CrossEntropy(weight=weight.tolist()),
}


def targets_for(kind: str, batches: list[Any]) -> list[Any]:
    if kind != "positive":
        return batches
    return [(inputs, nn.functional.one_hot(targets, 3).float()) for inputs, targets in batches]


@pytest.mark.parametrize("kind", WEIGHTED)
def test_class_weights_come_from_the_code_with_a_warning(kind: str, tmp_path: pathlib.Path) -> None:
    one, other = (
        make_state(loss=WEIGHTED[kind](torch.tensor(values))) for values in ([1.0, 2.0, 3.0], [9.0, 2.0, 3.0])
    )
    train, step = targets_for(kind, TRAIN), compose(loop_events)
    pc.fit(step, one, train, duration="1ep", checkpoints=Checkpoints(tmp_path))
    with pytest.warns(pc.errors.CheckpointWarning, match=r"\(1.*, 2.*, 3.*in the checkpoint.*\(9.*, 2.*, 3.* here"):
        loaded = pc.load(pc.saving.newest(tmp_path), like=other)  # pyright: ignore[reportArgumentType]
    assert_same(loaded.buffers, other.buffers)
    with pytest.warns(pc.errors.CheckpointWarning, match="here"):
        resumed = pc.fit(step, other, train, duration="2ep", checkpoints=Checkpoints(tmp_path), resume="auto")
    assert_same(resumed.buffers, other.buffers)
    assert_same(resumed.params, pc.fit(step, loaded, train, duration="2ep").params)
    assert len(differences(describe(one), describe(other))) == 1  # replays and comparisons of runs name it, too


def test_tensors_that_are_not_in_a_state_dict_come_from_the_code(tmp_path: pathlib.Path) -> None:
    old, new = make_state(Counting(scale=0.0, table=4)), make_state(Counting(scale=5.0, table=6))
    trained = pc.fit(compose(loop_events), old, TRAIN, duration="1ep")
    pc.save(trained, tmp_path / "one")
    with pytest.warns(pc.errors.CheckpointWarning) as caught:
        found = pc.load(tmp_path / "one", like=new)
    text = str(caught[0].message)
    assert "scale: float32[] (0) #" in text and "table: float32[4] (1, 1, 1, ...) #" in text and "memory" not in text
    assert found.buffers["scale"] == 5 and found.buffers["table"].shape == (6,)
    assert_same(found.buffers["memory"], trained.buffers["memory"])
    assert found.buffers["memory"][0] > 0


@pytest.mark.parametrize("how", ["eager", "population"])
def test_what_training_has_written_is_resumed_to_the_bit(how: str, tmp_path: pathlib.Path) -> None:
    def start(memory: float = 0.0) -> State:
        state = make_state(Counting(memory=memory), loss=Centered(2.0))
        return state if how == "eager" else stack_states([state, make_state(Counting(), loss=Centered(2.0), key=1)])

    step = compose(loop_events) if how == "eager" else pc.population(compose(loop_events), 2)
    whole = pc.fit(step, start(), TRAIN, duration="2ep")
    pc.fit(step, start(), TRAIN, duration="1ep", checkpoints=Checkpoints(tmp_path))
    for other in (start(), start(memory=1.0)):  # a start from another value changes nothing later
        resumed = pc.fit(step, other, TRAIN, duration="2ep", checkpoints=Checkpoints(tmp_path), resume="auto")
        assert_same(resumed.buffers, whole.buffers)
        assert_same(resumed.params, whole.params)


def test_the_settings_of_methods_in_buffers_are_those_of_the_code(tmp_path: pathlib.Path) -> None:
    plain = TASKS["images"].make_state(0, duration="4ep", batches_per_epoch=2)
    old, new = (compose(loop_events, [pc.algorithms.stochastic_depth(drop_rate=rate)]) for rate in (0.1, 0.5))
    pc.save(old.init(plain), tmp_path / "one", step=old)
    with pytest.warns(pc.errors.CheckpointWarning, match="5.drop_rate: .*0.1.* in the checkpoint, .*0.5.* here"):
        found = pc.load(tmp_path / "one", like=new.init(plain), step=new)
    assert found.buffers["5.drop_rate"] == 0.5
    assert "5.drop_rate" not in pc.to_module(found).state_dict()


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_network_put_in_by_replace_brings_its_own_settings(how: str) -> None:
    step = compose(loop_events) if how == "eager" else pc.compile(compose(loop_events), backend="eager")
    state, other = step(make_state(Counting(scale=2.0)), TRAIN[0]), make_state(Counting(scale=5.0))
    buffers = {**state.buffers, "scale": other.buffers["scale"]}
    settings = state.replace(model=other.model, buffers=buffers).context.settings
    assert settings == {**state.context.settings, "scale": other.context.settings["scale"]}


def test_settings_that_surgery_has_renamed_are_resumed_to_the_bit(tmp_path: pathlib.Path) -> None:
    def renamed(state: State) -> State:
        return pc.surgery.operate(state, {Counting: lambda net, site: nn.Sequential(net)}, name="wrap")[0]

    first, step = make_state(Counting()), compose(loop_events)
    later = step(renamed(step(first, TRAIN[0])), TRAIN[1])
    pc.save(later, tmp_path / "one")
    pc.save(renamed(step(first, TRAIN[0])), tmp_path / "two")
    assert_same(pc.load(tmp_path / "one", like=renamed(first)), later)
    assert_same(pc.load(tmp_path / "two", like=renamed(first)).buffers["0.memory"], torch.full((3,), 0.1))


def test_a_state_in_the_middle_of_a_run_is_a_template_too(tmp_path: pathlib.Path) -> None:
    first = make_state(Counting())
    pc.save(first, tmp_path / "one")
    later = pc.fit(compose(loop_events), first, TRAIN, duration="1ep")
    assert_same(pc.load(tmp_path / "one", like=later).buffers, first.buffers)


def test_checkpoints_without_a_list_of_settings_are_loaded_whole() -> None:
    old, new = make_state(Counting(scale=0.0)), make_state(Counting(scale=5.0))
    taken = snapshot(old)
    description = {key: value for key, value in taken.index.description.items() if key != "settings"}
    index = dataclasses.replace(taken.index, description=description)
    assert_same(assembled(index, taken.tensors, new).buffers, old.buffers)


def adam(net: nn.Module, **options: Any) -> State:
    return make_state(net, optimizer=optim.adam(pc.hparam("lr", 0.01)), duration="4ep", batches_per_epoch=4, **options)


def test_patterns_leave_parts_of_a_checkpoint_to_the_template(tmp_path: pathlib.Path) -> None:
    net = functools.partial(nn.Sequential, nn.Linear(4, 3))
    trained, like = pc.fit(compose(loop_events), adam(net(nn.Linear(3, 3))), TRAIN), adam(net(nn.Linear(3, 5)))
    pc.save(trained, tmp_path / "one")
    with pytest.raises(pc.errors.MismatchError, match=r"params\['1.weight'\]"):
        pc.load(tmp_path / "one", like)
    like = like.replace(hparams={"lr": 0.5})
    ignore = ["*.1.*", "timestamp", "hparams.lr"]
    with pytest.warns(pc.errors.CheckpointWarning, match="out_features=3") as caught:
        found = pc.load(tmp_path / "one", like, ignore=ignore)
    assert "hparam" not in str(caught[0].message)
    assert_same(found.params["0.weight"], trained.params["0.weight"])
    assert_same(found.params["1.weight"], like.params["1.weight"])
    assert_same(found.opt_state["exp_avg"]["0.bias"], trained.opt_state["exp_avg"]["0.bias"])
    assert found.timestamp.batch == 0 and found.hparams["lr"] == 0.5
    with pytest.raises(ValueError, match=r"load: ignore: 'state/\*' matches no part of a checkpoint; the names are"):
        pc.load(tmp_path / "one", like, ignore="state/*")


def test_a_part_of_the_state_without_tensors_can_be_left_out(tmp_path: pathlib.Path) -> None:
    plain = make_state(nn.Linear(4, 3), optimizer=optim.sgd(0.1))
    pc.save(plain, tmp_path / "one")
    assert_same(pc.load(tmp_path / "one", plain, ignore=["opt_state.*", "slots.*"]).params, plain.params)
    for wrong in ("opt_state", "opt_state.exp_avg.*", "optimizer.*"):
        with pytest.raises(ValueError, match="matches no part of a checkpoint"):
            pc.load(tmp_path / "one", plain, ignore=wrong)


def test_a_run_continues_from_a_loaded_part(tmp_path: pathlib.Path) -> None:
    step, first = compose(loop_events), adam(nn.Linear(4, 3))
    for state in pc.training(step, first, TRAIN):
        if state.timestamp.batch == 6:
            pc.save(state, tmp_path / "one")
    loaded = pc.load(tmp_path / "one", first, step=step, ignore=["hparams.lr"])
    assert_same(pc.fit(step, loaded, TRAIN).params, pc.fit(step, first, TRAIN).params)


def test_load_without_a_template_says_what_it_needs(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TypeError, match=r"expected a State for `like`, got NoneType.*like=step.init\(State.create"):
        pc.load(tmp_path / "x.ckpt")


def test_an_index_whose_settings_are_not_texts_is_damaged(tmp_path: pathlib.Path) -> None:
    path = pc.save(make_state(Counting()), tmp_path / "one")
    index = folder.read_index(path)
    index.description["settings"] = {"table": 3}
    (path / "index.json").write_text(to_json(index))
    with pytest.raises(pc.errors.DamagedError, match="no valid description"):
        pc.load(path, make_state(Counting()))


def operated(name: str) -> tuple[Step, State, State]:
    """Return a step with a method that operates on the network, and a state before and after its INIT."""
    row = SHIPPED[name]
    step = compose(loop_events, [eval(row.examples[0], dict(vars(algorithms)))])
    for task in row.accepted:
        plain = TASKS[task].make_state(0, duration="4ep", batches_per_epoch=2)
        changed = step.init(plain)
        if changed.model != plain.model:
            return step, plain, changed
    raise AssertionError(f"{name} changes no task's network")


SURGERY = [
    name
    for name, row in SHIPPED.items()
    if any(Trait.REQUIRED_ON_LOAD in eval(example, dict(vars(algorithms))).traits for example in row.examples)
]


@pytest.mark.parametrize("name", SURGERY)
def test_the_weights_of_operated_networks_are_refused_by_plain_ones_and_the_reverse(
    name: str, tmp_path: pathlib.Path
) -> None:
    step, plain, changed = operated(name)
    for saved, like in ((changed, plain), (plain, changed)):
        path = pc.saving.save_weights(saved, tmp_path / "net.safetensors")
        with pytest.raises(pc.errors.MismatchError, match=r"model: \S+: .* in the file, .* here"):
            pc.saving.load_weights(path, like)
        pc.save(saved, tmp_path / "one")
        for loading in (None, step):
            with pytest.raises(pc.errors.MismatchError, match=r"model: \S+: .* in the checkpoint, .* here"):
                pc.load(tmp_path / "one", like, step=loading)
    pc.save(changed, tmp_path / "one")
    with pytest.raises(pc.errors.MismatchError, match=f"{name}: changed the model of the checkpoint"):
        pc.load(tmp_path / "one", plain, strict=False)
    assert pc.tree.equal(pc.load(tmp_path / "one", changed), changed)
    assert pc.tree.equal(
        pc.saving.load_weights(pc.saving.save_weights(changed, tmp_path / "net"), changed).params, changed.params
    )


@pytest.mark.parametrize("name", SURGERY)
def test_a_state_knows_how_many_modules_a_method_has_replaced(name: str) -> None:
    step, plain, changed = operated(name)
    there, here = (dict(state.model.module.named_modules()) for state in (plain, changed))
    found = changed.context.replaced[name]
    assert found and all(repr(there[one]) != repr(here[one]) for one in found)
    assert step.init(changed).context.replaced == changed.context.replaced


def test_standardized_filters_can_be_loaded_into_a_plain_network_on_request(tmp_path: pathlib.Path) -> None:
    _, plain, changed = operated("weight_standardization")
    path = pc.saving.save_weights(changed, tmp_path / "net.safetensors")
    with pytest.warns(pc.errors.CheckpointWarning, match=r"0: StandardizedConv2d\(.*\) in the file, Conv2d\(.*\) here"):
        found = pc.saving.load_weights(path, plain, strict=False)
    inputs = torch.ones(2, 2, 6, 6)
    assert not torch.allclose(found.forward(inputs), changed.forward(inputs))


def test_a_replaced_module_is_one_difference_whatever_it_contains(tmp_path: pathlib.Path) -> None:
    pc.save(make_state(nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))), tmp_path / "one")
    with pytest.raises(pc.errors.MismatchError) as caught:
        pc.load(tmp_path / "one", make_state(nn.Sequential(nn.Linear(4, 3))))
    assert caught.value.differences[0].startswith("model: 0: Sequential() in the checkpoint, Linear(")
    assert sum(line.startswith("model: ") for line in caught.value.differences) == 1
