"""save and load: the same bits come back, and every kind of difference is reported."""

import collections
import dataclasses
import json
import math
import pathlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import Event, State, algorithms, compose, loop_events, losses, optim, schedule
from purecompose.run.saving.files import to_json
from purecompose.saving import read_index
from tests.helpers import assert_same, changing, counter, make_batch, make_cnn, make_mlp, make_state, noise, run_steps


OPTIMIZERS = {
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    "nesterov": optim.sgd(schedule.hparam("lr", 0.1), momentum=0.9, nesterov=True),
    "adam": optim.adam(0.05 * schedule.cosine(warmup="2ba")),
    "amsgrad": optim.adamw(schedule.linear(), amsgrad=True, groups={"*.bias": {"weight_decay": 0.0}}),
}


def there_and_back(state: State, folder: pathlib.Path, like: State, step: Any = None) -> State:
    pc.save(state, folder / "one", step=step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pc.load(folder / "one", like, step=step)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_state_comes_back_with_the_same_bits(optimizer: Any, tmp_path: pathlib.Path) -> None:
    step = compose(loop_events, [noise(), counter(), algorithms.mixup(0.2)])

    def start() -> State:
        return step.init(make_state(make_mlp(dropout=0.3), optimizer=optimizer, key=5, batches_per_epoch=4))

    state = run_steps(step, start(), [make_batch(i) for i in range(3)])
    found = there_and_back(state, tmp_path, start(), step)
    assert_same(found, state)
    assert found.timestamp == state.timestamp and found.context == state.context
    assert_same(step(found, make_batch(4)), step(state, make_batch(4)))


def test_tensors_begin_where_torch_lets_its_own_begin(tmp_path: pathlib.Path) -> None:
    """The last bits of a matrix product can depend on it, and with them those of a resumed run."""
    state = compose(loop_events, [counter()]).init(make_state(make_mlp()))
    found = there_and_back(state, tmp_path, state)
    tensors = [leaf for leaf in pc.tree.leaves(found) if isinstance(leaf, torch.Tensor) and leaf.numel()]
    assert len(tensors) > 4
    assert {tensor.data_ptr() % 64 for tensor in tensors} == {0}


def test_strides_dtypes_and_plain_values_come_back(tmp_path: pathlib.Path) -> None:
    kept = {
        "half": torch.arange(3, dtype=torch.float16),
        "narrow": torch.arange(3).to(torch.bfloat16),
        "complex": torch.tensor([1 + 2j, -0.0 - 1j]),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "view": torch.arange(10)[2:5],
        "wide": torch.zeros(1).expand(4),
        "first": torch.ones(1, 6, 7)[:, :1],  # the stride of a dimension of size 1 is any number
        "pair": (torch.ones(2), [torch.zeros(1)]),
        "it's": torch.tensor(math.nan),
        "count": 3,
        "share": 0.1,
        "none": None,
        "infinite": math.inf,
    }
    net = make_cnn().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    state = make_state(net).replace(
        slots={"kept": kept}, metrics={"z": torch.tensor(1.0), "it's": torch.tensor(2.0), "a": torch.tensor(3.0)}
    )
    blank = pc.tree.map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, Tensor) else None, kept)
    found = there_and_back(state, tmp_path, make_state(make_cnn()).replace(slots={"kept": blank}))
    assert_same(found, state)
    assert list(found.metrics) == ["z", "it's", "a"]
    weight = "0.weight"
    assert (
        found.params[weight].stride() == state.params[weight].stride() != make_state(make_cnn()).params[weight].stride()
    )


def test_ties_and_aliases_are_kept(tmp_path: pathlib.Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 3))
    net[1].weight = net[0].weight
    state = make_state(net)
    aliased = state.replace(slots={"average": dict(state.params), "part": state.params["2.weight"][0]})
    blank = pc.tree.map(torch.zeros_like, aliased.slots)
    assert_same(there_and_back(aliased, tmp_path, state.replace(slots=blank)), aliased)


def test_populations_and_compiled_states_come_back(tmp_path: pathlib.Path) -> None:
    step = compose(loop_events, [counter()])
    fast = pc.compile(step, backend="eager", quiet=True)
    start = step.init(make_state())
    state = fast(fast(start, make_batch()), make_batch(1))
    saved = there_and_back(state, tmp_path, start)
    assert_same(fast(saved, make_batch(2)), fast(state, make_batch(2)))
    members = [step.init(make_state(make_mlp(seed), key=seed)) for seed in range(3)]
    many = pc.population(step, 3)
    stacked = many(pc.stack_states(members), make_batch())
    assert_same(there_and_back(stacked, tmp_path, pc.stack_states(members)), stacked)


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: pathlib.Path) -> None:
    first, second = make_state(), make_state(make_mlp(1))
    pc.save(first, tmp_path / "one")
    pc.save(second, tmp_path / "one")
    assert_same(pc.load(tmp_path / "one", first), second)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_the_index_is_json_for_people(tmp_path: pathlib.Path) -> None:
    step = compose(loop_events, [algorithms.mixup(0.2)])
    state = step(step.init(make_state()), make_batch())
    pc.save(state, tmp_path / "one", step=step)
    told = json.loads((tmp_path / "one" / "index.json").read_text())
    assert told["time"]["batch"] == 1 and told["time"]["duration"] == "2ep"
    assert told["description"]["algorithms"] == {"mixup": "mixup(alpha=0.2, interpolate_loss=False, per_example=False)"}
    assert told["tensors"]["params['0.weight']"] == "float32[8, 4]"
    assert told["environment"]["torch"] == torch.__version__
    assert read_index(tmp_path / "one").batch == 1


class Odd:
    """A class that is not a registered pytree."""


def test_values_that_cannot_be_saved_are_named(tmp_path: pathlib.Path) -> None:
    state = make_state()
    with pytest.raises(TypeError, match=r"state.slots\['odd'\] holds Odd, which no checkpoint can"):
        pc.save(state.replace(slots={"odd": Odd()}), tmp_path / "one")
    sparse = state.replace(slots={"s": torch.eye(2).to_sparse()})
    with pytest.raises(TypeError, match="dense"):
        pc.save(sparse, tmp_path / "one")
    assert not list(tmp_path.iterdir())

    def inside(state: State) -> State:
        pc.save(state, tmp_path / "one")
        return state

    with pytest.raises(pc.errors.CheckpointError, match="inside a step"):
        compose(loop_events, [changing("inside", Event.BATCH_END, inside)])(state, make_batch())


# Mismatches


def test_another_model_is_reported_layer_by_layer(tmp_path: pathlib.Path) -> None:
    pc.save(make_state(), tmp_path / "one")
    wider = make_state(nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Dropout(0.0), nn.Linear(9, 3)))
    with pytest.raises(pc.errors.MismatchError) as caught:
        pc.load(tmp_path / "one", wider)
    text = str(caught.value)
    assert "out_features=8" in text and "out_features=9" in text
    assert "state.params['0.weight']: float32[8, 4] in the checkpoint, float32[9, 4] here" in text
    assert "strict=False" in text


def test_matching_tensors_are_loaded_on_request(tmp_path: pathlib.Path) -> None:
    state = make_state()
    pc.save(state, tmp_path / "one")
    other = make_state(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 5)))
    with pytest.warns(pc.errors.CheckpointWarning, match=r"params\['3.weight'\]: float32\[3, 8\] in the checkpoint"):
        found = pc.load(tmp_path / "one", other, strict=False)
    assert_same(found.params["0.weight"], state.params["0.weight"])
    assert_same(found.params["3.weight"], other.params["3.weight"])


def test_another_optimizer_with_a_different_state_is_a_mismatch(tmp_path: pathlib.Path) -> None:
    pc.save(make_state(), tmp_path / "one")
    with pytest.raises(pc.errors.MismatchError, match="optimizer: sgd"):
        pc.load(tmp_path / "one", make_state(optimizer=optim.adam(0.1)))


def test_different_settings_are_reported_and_taken_over(tmp_path: pathlib.Path) -> None:
    step, other = (compose(loop_events, [algorithms.mixup(alpha)]) for alpha in (0.2, 0.4))
    state = step.init(make_state())
    pc.save(state, tmp_path / "one", step=step)
    with pytest.warns(pc.errors.CheckpointWarning) as caught:
        found = pc.load(tmp_path / "one", make_state(optimizer=optim.sgd(0.2, momentum=0.9)), step=other)
    text = str(caught[0].message)
    assert "lr=0.1" in text and "lr=0.2" in text and "mixup(alpha=0.4" in text
    assert_same(found.params, state.params)


def test_an_algorithm_that_is_missing_is_named(tmp_path: pathlib.Path) -> None:
    step = compose(loop_events, [counter("steps"), algorithms.mixup(0.2)])
    pc.save(step.init(make_state()), tmp_path / "one", step=step)
    plain = compose(loop_events, [algorithms.mixup(0.2)])
    with pytest.raises(
        pc.errors.MismatchError, match=r"algorithm steps: steps\(\) in the checkpoint, nothing here"
    ) as caught:
        pc.load(tmp_path / "one", plain.init(make_state()), step=plain)
    assert any(line.startswith("state.slots['steps']") for line in caught.value.differences)


def test_the_algorithm_that_changed_the_model_must_be_present(tmp_path: pathlib.Path) -> None:
    surgery = pc.Algorithm(
        "surgery", pc.on(Event.INIT), lambda event, state: state, traits=frozenset({pc.Trait.REQUIRED_ON_LOAD})
    )
    step = compose(loop_events, [surgery])
    pc.save(step.init(make_state()), tmp_path / "one", step=step)
    with pytest.raises(pc.errors.MismatchError, match="surgery: changed the model of the checkpoint"):
        pc.load(tmp_path / "one", make_state(), step=compose(loop_events), strict=False)


def test_frozen_parameters_that_the_checkpoint_trains_are_reported(tmp_path: pathlib.Path) -> None:
    pc.save(make_state(), tmp_path / "one")
    with pytest.warns(pc.errors.CheckpointWarning, match=r"frozen: 0.bias, 0.weight here, not in the checkpoint"):
        loaded = pc.load(tmp_path / "one", make_state().replace(frozen=["0.*"]))
    assert not loaded.context.frozen


def test_parameters_that_the_checkpoint_lacks_stay_frozen(tmp_path: pathlib.Path) -> None:
    class Counting(nn.Sequential):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__(*layers)
            self.order = nn.Parameter(torch.arange(3), requires_grad=False)

    pc.save(make_state(nn.Sequential(nn.Linear(4, 3))), tmp_path / "one")
    with pytest.warns(pc.errors.CheckpointWarning, match="order"):
        loaded = pc.load(tmp_path / "one", make_state(Counting(nn.Linear(4, 3))), strict=False)
    assert loaded.context.frozen == {"order"}


def test_another_number_of_threads_is_reported(tmp_path: pathlib.Path) -> None:
    pc.save(make_state(), tmp_path / "one")
    torch.set_num_threads(2)
    try:
        with pytest.warns(pc.errors.CheckpointWarning, match="threads: 1 in the checkpoint, 2 here"):
            pc.load(tmp_path / "one", make_state())
    finally:
        torch.set_num_threads(1)


def test_losses_and_functions_are_compared_without_addresses(tmp_path: pathlib.Path) -> None:
    def start() -> State:
        return make_state(loss=lambda outputs, targets, reduction="mean": losses.cross_entropy(outputs, targets))

    assert_same(there_and_back(start(), tmp_path, start()), start())


# Damage


def test_missing_truncated_and_foreign_files_are_named(tmp_path: pathlib.Path) -> None:
    state, one = make_state(), tmp_path / "one"
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        pc.load(one, state)
    one.mkdir()
    with pytest.raises(pc.errors.DamagedError, match="index.json cannot be read"):
        pc.load(one, state)
    (one / "index.json").write_text('{"format": "another"}')
    with pytest.raises(pc.errors.DamagedError, match="of another program"):
        pc.load(one, state)
    pc.save(state, one)
    content = (one / "state.safetensors").read_bytes()
    (one / "state.safetensors").write_bytes(content[:-1])
    with pytest.raises(pc.errors.DamagedError, match="not whole"):
        pc.load(one, state)
    (one / "state.safetensors").unlink()
    with pytest.raises(pc.errors.DamagedError, match="state.safetensors cannot be read"):
        pc.load(one, state)


def test_the_tensors_of_another_checkpoint_are_refused(tmp_path: pathlib.Path) -> None:
    for name, seed in (("one", 0), ("two", 1)):
        pc.save(make_state(make_mlp(seed)), tmp_path / name)
    (tmp_path / "two" / "state.safetensors").rename(tmp_path / "one" / "state.safetensors")
    with pytest.raises(pc.errors.DamagedError, match="checksum"):
        pc.load(tmp_path / "one", make_state())


def test_a_later_format_is_named(tmp_path: pathlib.Path) -> None:
    pc.save(make_state(), tmp_path / "one")
    index = tmp_path / "one" / "index.json"
    index.write_text(index.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(pc.errors.CheckpointError, match="format is version 2, and this purecompose reads 1"):
        pc.load(tmp_path / "one", make_state())


def adapted(seed: int = 0, first: str = "first") -> State:
    """Return a state of a frozen base with a small part that trains."""
    torch.manual_seed(seed)
    base = {first: nn.Linear(4, 64), "act": nn.Tanh(), "second": nn.Linear(64, 64), "norm": nn.BatchNorm1d(64)}
    net = nn.Sequential(collections.OrderedDict({**base, "head": nn.Linear(64, 3)}))
    net[:4].requires_grad_(False)
    return make_state(net, optimizer=optim.adam(0.01))


@pytest.mark.parametrize("num_members", [None, 2])
def test_the_trainable_part_is_loaded_into_a_base(num_members: int | None, tmp_path: pathlib.Path) -> None:
    plain, start = compose(loop_events), adapted()
    step = plain if num_members is None else pc.population(plain, num_members)
    start = start if num_members is None else pc.stack_states([start.replace(key=pc.random.key(i)) for i in range(2)])
    state = run_steps(step, start, [make_batch(i) for i in range(3)])
    pc.save(state, tmp_path / "all")
    pc.save(state, tmp_path / "small", parts="trainable")
    assert not any("params['second" in name for name in read_index(tmp_path / "small").tensors)
    sizes = [(tmp_path / name / "state.safetensors").stat().st_size for name in ("small", "all")]
    assert sizes[0] < sizes[1] / 2
    loaded = pc.load(tmp_path / "small", start)
    assert_same(loaded, state)
    assert loaded.context == state.context
    # A base in which everything trains, as a network is before its adapters are chosen.
    fresh = adapted().replace(frozen=[])
    if num_members is None:
        assert_same(step(pc.load(tmp_path / "small", fresh), make_batch(4)), step(state, make_batch(4)))


def test_another_base_is_refused(tmp_path: pathlib.Path) -> None:
    pc.save(adapted(), tmp_path / "one", parts="trainable")
    with pytest.raises(
        pc.errors.MismatchError, match=r"params\['first.bias'\]: float32\[64\].*, frozen .* float32\[64\].*here"
    ):
        pc.load(tmp_path / "one", adapted(seed=1))
    with pytest.raises(
        pc.errors.MismatchError, match=r"params\['first.weight'\]: .*, frozen and left out .*, nothing here"
    ):
        pc.load(tmp_path / "one", adapted(first="other"))
    with pytest.warns(pc.errors.CheckpointWarning, match="same base network"):
        loaded = pc.load(tmp_path / "one", adapted(seed=1), strict=False)
    assert torch.equal(loaded.params["first.weight"], adapted(seed=1).params["first.weight"])
    with pytest.raises(ValueError, match="parts='adapters': expected 'all' or 'trainable'"):
        pc.save(adapted(), tmp_path / "one", parts="adapters")  # pyright: ignore[reportArgumentType]


def test_the_trainable_part_from_an_earlier_version_is_refused_and_not_put_aside(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ep0001-ba00000001"
    pc.save(adapted(), path, parts="trainable")
    index = read_index(path)
    earlier = {**index.description, "base": "0" * 64}  # one checksum of all frozen parameters
    (path / "index.json").write_text(to_json(dataclasses.replace(index, description=earlier)))
    step, kept = compose(loop_events), pc.Checkpoints(tmp_path)
    for resume in (path, "auto"):
        with pytest.raises(pc.errors.CheckpointError, match="an earlier purecompose wrote it") as caught:
            pc.fit(step, adapted(), [make_batch()], duration="2ep", checkpoints=kept, resume=resume)
        assert not isinstance(caught.value, pc.errors.DamagedError) and path.exists()
