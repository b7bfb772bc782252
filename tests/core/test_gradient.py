"""The two engines against each other, second gradients inside a step, and gradients through whole steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import (
    Event,
    State,
    compose,
    hparam,
    loop_events,
    losses,
    optim,
    population,
    stack_states,
    unstack_states,
)
from purecompose.core.gradient import wants_outer_gradient
from purecompose.core.scopes import Grad, Microbatches
from purecompose.loop import advance, update
from tests.helpers import (
    assert_close,
    assert_same,
    changing,
    counter,
    make_batch,
    make_cnn,
    make_mlp,
    make_state,
    noise,
)
from tests.transforms.compilation.compile_helpers import compiled


def required(state):
    """Return the state with parameters that require an outer gradient, which selects the functorch engine."""
    return state.replace(params={name: param.clone().requires_grad_() for name, param in state.params.items()})


# The two engines


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("net", "shape"), [(make_mlp(dropout=0.4), (4,)), (make_cnn(), (2, 6, 6))], ids=["mlp", "cnn"])
def test_the_engines_agree(net, shape, k):
    state, batch = make_state(net), make_batch(shape=shape)
    step = compose(loop_events, [noise()], microbatches=k)
    first, second = step(state, batch), step(required(state), batch)
    assert all(param.grad_fn is not None for param in second.params.values())
    assert not any(param.requires_grad for param in first.params.values())
    assert_close(first.params, second.params, rtol=1e-6, atol=1e-7)
    assert_close(first.buffers, second.buffers, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(first.loss, second.loss, rtol=1e-6, atol=0)


def test_an_outer_gradient_is_wanted_if_any_tensor_requires_one():
    state, (inputs, targets) = make_state(), make_batch()
    assert not wants_outer_gradient(state, (inputs, targets))
    assert wants_outer_gradient(required(state), (inputs, targets))
    wanted = inputs.clone().requires_grad_()
    for batch in ((wanted, targets), {"x": wanted, "y": targets}):
        assert wants_outer_gradient(state, batch)
        assert not wants_outer_gradient(state.replace(slots={"a": torch.zeros(2)}), (inputs, targets))
    assert wants_outer_gradient(state.replace(slots={"a": wanted}), (inputs, targets))
    assert wants_outer_gradient(state.replace(slots={"a": (wanted, targets)}), (inputs, targets))
    momentum = {**state.opt_state["momentum"], "3.bias": torch.zeros(3, requires_grad=True)}
    for opt_state in ({"momentum": momentum}, (momentum,), momentum["3.bias"], {"a": {"b": [momentum["3.bias"]]}}):
        assert wants_outer_gradient(state.replace(opt_state=opt_state), (inputs, targets))
    with torch.no_grad():
        assert not wants_outer_gradient(required(state), (wanted, targets))
    torch.vmap(lambda x: (x, wants_outer_gradient(state, ()) or pytest.fail("a transform is active"))[0])(inputs)


def per_example_loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    del reduction
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_a_loss_that_is_not_a_scalar_is_named():
    for prepare in (lambda s: s, required):
        state = prepare(make_state(loss=per_example_loss))
        with pytest.raises(ValueError, match=r"scalar loss, got a tensor of shape \(8,\): .*mean over the batch"):
            compose(loop_events)(state, make_batch())


def test_changes_of_params_inside_stay_inside():
    shrink = changing(
        "shrink", Event.BEFORE_FORWARD, lambda s: s.replace(params={n: 0.5 * p for n, p in s.params.items()})
    )
    state = make_state(optimizer=optim.sgd(0.1))
    end = compose(loop_events, [shrink])(state, make_batch())

    net = make_mlp()
    inputs, targets = make_batch()
    halves = {name: 0.5 * param for name, param in net.named_parameters()}
    loss = nn.functional.cross_entropy(torch.func.functional_call(net, halves, inputs), targets)
    # The loss is differentiated with respect to the parameters before the change.
    names, params = zip(*net.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, params)
    expected = {n: param - 0.1 * grad for n, param, grad in zip(names, params, grads, strict=True)}
    assert_close(end.params, expected)


@pytest.mark.parametrize("prepare", [lambda state: state, required], ids=["autograd", "functorch"])
def test_changes_of_the_batch_inside_stay_inside(prepare):
    seen = []

    def look(state):
        seen.append(state.batch)
        return state

    zero = changing("zero", Event.BEFORE_FORWARD, lambda s: s.replace(inputs=0 * s.inputs))
    step = compose(loop_events, [zero, changing("look", Event.AFTER_BACKWARD, look)])
    step(prepare(make_state()), make_batch())
    assert_same(seen, [make_batch()])


def set_everything(state):
    """Write values that depend on the graph into every field that a body can replace."""
    loss = state.loss
    momentum = {name: value + loss for name, value in state.opt_state["momentum"].items()}
    return state.replace(
        hparams={"lr": state.hparams["lr"] + 0 * loss},
        opt_state={"momentum": momentum},
        metrics={"seen": 2 * loss},
        slots={"memory": {"losses": [loss + 1]}},
        key=state.key + (0 * loss).long(),
    )


@pytest.mark.parametrize("k", [1, 2])
def test_nothing_that_the_body_sets_carries_a_graph_out(k):
    state = make_state(optimizer=optim.sgd(hparam("lr", 0.1), momentum=0.9))
    state = state.replace(slots={"memory": {"losses": [torch.zeros(())]}})
    step = compose(loop_events, [changing("set", Event.AFTER_LOSS, set_everything)], microbatches=k)
    end = step(state, make_batch())
    assert not [path for path, leaf in pc.tree.leaves_with_paths(end).items() if getattr(leaf, "requires_grad", False)]

    # The other engine, mapped, returns the same values, without wrappers of a finished transform.
    stacked = pc.tree.map(lambda leaf: torch.stack([leaf, leaf]), state)
    mapped = torch.vmap(step, in_dims=(0, None))(stacked, make_batch())
    for path, leaf in pc.tree.leaves_with_paths(mapped).items():
        torch.testing.assert_close(leaf[1], pc.tree.leaves_with_paths(end)[path], msg=path)
    outer = step(required(state), make_batch())
    assert_close(outer.hparams, end.hparams)
    assert_close(outer.opt_state["momentum"], end.opt_state["momentum"])
    assert outer.opt_state["momentum"]["3.bias"].requires_grad


def test_clock_values_read_inside_a_step_are_not_wrapper_tensors_afterwards():
    seen = []

    def read(state):
        seen.append(state.clock.values)
        return state

    step = compose(loop_events, [changing(f"read {e}", e, read) for e in (Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH)])
    step(required(make_state()), make_batch())
    assert len(seen) == 2
    assert not any(torch._C._functorch.is_gradtrackingtensor(values) for values in seen)  # pyright: ignore


@pytest.mark.parametrize("k", [1, 2])
def test_the_body_starts_without_a_loss(k):
    stale = make_state().replace(loss=torch.tensor(1.0, requires_grad=True))
    program = [Microbatches(Grad(pc.loop.forward)), update]
    with pytest.raises(ValueError, match="scalar loss, got None"):
        compose(program, microbatches=k)(stale, make_batch())


def test_inference_mode_is_named():
    state, batch = make_state(), make_batch()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="within torch.inference_mode.*no_grad"):
        compose(loop_events)(state, batch)
    with torch.no_grad():
        assert_same(compose(loop_events)(state, batch), compose(loop_events)(state, batch))


def test_states_made_in_inference_mode_train():
    step, batch = compose(loop_events, [counter()]), make_batch()
    expected = step(step.init(make_state()), batch)
    with torch.inference_mode():
        state = step.init(make_state())
        frozen_in_time = state.replace(params={name: param.clone() for name, param in state.params.items()})
    assert_same(step(state, batch), expected)
    with pytest.raises(RuntimeError, match=r"made within torch.inference_mode.*state.copy\(\)"):
        step(frozen_in_time, batch)
    assert_same(step(frozen_in_time.copy(), batch), expected)


# state.gradient


def second_gradients(found, at=lambda state: state.params):
    def look(state):
        found["first"] = dict(state.grads), state.loss
        found["second"] = state.gradient(at(state))
        found["state"] = state
        return state

    return changing("look", Event.AFTER_TRAIN_BATCH, look)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("prepare", [lambda state: state, required], ids=["autograd", "functorch"])
def test_the_second_gradient_at_the_same_place_is_the_first(k, prepare):
    found = {}
    step = compose(loop_events, [noise(), second_gradients(found)], microbatches=k)
    step(prepare(make_state(make_mlp(dropout=0.5))), make_batch())
    assert_same(tuple(found["first"]), tuple(found["second"]))


@pytest.mark.parametrize("k", [1, 2])
def test_the_second_gradient_equals_finite_differences(k):
    found = {}
    batch = make_batch(dtype=torch.float64)

    def moved(state):
        return {name: param + 0.01 for name, param in state.params.items()}

    step = compose(loop_events, [second_gradients(found, moved)], microbatches=k)
    step(make_state(make_mlp(dropout=0.5, dtype=torch.float64)), batch)
    grads, loss = found["second"]
    state, params, eps = found["state"], moved(found["state"]), 1e-6
    assert torch.equal(loss, state.gradient(params)[1])
    for name in ("0.weight", "3.bias"):
        bump = torch.zeros_like(params[name])
        bump.view(-1)[2] = eps
        up = state.gradient({**params, name: params[name] + bump})[1]
        down = state.gradient({**params, name: params[name] - bump})[1]
        torch.testing.assert_close(grads[name].view(-1)[2], (up - down) / (2 * eps), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("k", [1, 2])
def test_the_second_gradient_leaks_nothing(k):
    found = {}
    count = changing(
        "count", Event.BEFORE_FORWARD, lambda s: s.replace(slots={**s.slots, "counter": s.slots["counter"] + 10})
    )
    batch, state = make_batch(size=9, shape=(2, 6, 6)), make_state(make_cnn())
    plain, with_second = (
        compose(loop_events, [counter(), count, *more], microbatches=k) for more in ([], [second_gradients(found)])
    )
    state = plain.init(state)
    assert_same(plain(state, batch), with_second(with_second.init(state), batch))
    assert found["second"][1] == found["first"][1]


def test_a_program_without_microbatches_has_a_second_gradient_too():
    found = {}
    program = [Grad(pc.loop.forward, pc.loop.loss), Event.AFTER_TRAIN_BATCH, update, advance]
    compose(program, [second_gradients(found)])(make_state(), make_batch())
    assert_same(tuple(found["first"]), tuple(found["second"]))


def test_no_second_gradient_before_the_first():
    early = changing("early", Event.BATCH_START, lambda s: s.replace(grads=s.gradient(s.params)[0]))
    with pytest.raises(RuntimeError, match="at events after its gradient") as caught:
        compose(loop_events, [early])(make_state(), make_batch())
    assert caught.value.__notes__ == ["in early at Event.BATCH_START"]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_no_second_gradient_within_slices_though_an_earlier_part_has_one(microbatches: int):
    late = changing("late", Event.AFTER_TRAIN_BATCH, lambda s: s.replace(grads=s.gradient(s.params)[0]))
    part = Grad(pc.loop.forward, pc.loop.loss)
    program = [Microbatches(part), update, Microbatches(part, Event.AFTER_TRAIN_BATCH), update, advance]
    with pytest.raises(RuntimeError, match="at events after its gradient"):
        compose(program, [late], microbatches=microbatches)(make_state(), make_batch())


# Gradients through steps

FOUR = [make_batch(seed, dtype=torch.float64) for seed in range(4)]


def test_the_gradient_in_the_batch():
    step, state = compose(loop_events), make_state(make_mlp(dtype=torch.float64))
    inputs, targets = FOUR[0]

    def total(inputs: Tensor) -> Tensor:
        return pc.tree.global_norm(step(state, (inputs, targets)).params)

    leaf = inputs.clone().requires_grad_()
    (found,) = torch.autograd.grad(total(leaf), leaf)
    bump = torch.zeros_like(inputs)
    bump[1, 2] = eps = 1e-5
    expected = (total(inputs + bump) - total(inputs - bump)) / (2 * eps)
    torch.testing.assert_close(found[1, 2], expected, rtol=1e-5, atol=1e-10)


# vmap over states


class Table(nn.Module):
    """Rows of a table, by a layer or by a function."""

    def __init__(self, by_layer: bool) -> None:
        super().__init__()
        self.layer, self.by_layer = nn.Embedding(7, 3, sparse=True), by_layer

    def forward(self, ids: Tensor) -> Tensor:
        return (self.layer(ids) if self.by_layer else F.embedding(ids, self.layer.weight, sparse=True)).mean(1)


@pytest.mark.parametrize("by_layer", [True, False])
def test_sparse_gradients_become_dense_and_train_as_in_torch(by_layer: bool):
    net, batch = Table(by_layer), (torch.tensor([[1, 1, 2], [5, 1, 0]]), torch.ones(2, 3))
    state = State.create(net, loss=losses.mse, optimizer=optim.sgd(0.1), key=0)
    ends = [compose(loop_events)(state, batch)]
    if by_layer:  # sparse tensors cannot be traced or mapped
        ends += [compiled(compose(loop_events))(state, batch)]
        ends += [unstack_states(population(compose(loop_events), 2)(stack_states([state] * 2), batch))[0]]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses.mse(net(batch[0]), batch[1]).backward()
    optimizer.step()
    for end in ends:
        torch.testing.assert_close(end.params["layer.weight"], net.layer.weight.detach())
