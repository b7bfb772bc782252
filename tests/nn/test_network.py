"""One forward pass: forbidden writes, random draws, and results."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import purecompose as pc
from purecompose import Event, State, compose, loop_events
from purecompose.errors import TraceError
from tests.helpers import assert_same, changing, copied, make_batch, make_batches, make_mlp, make_state, run_steps


class Net(nn.Module):
    """A network whose subclasses change what `forward` does."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.register_buffer("on", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)


# Parameters


class Clamping(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


class ThroughData(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.last.weight.data[0].mul_(0.5)
        return super().forward(x)


class Momentum(Net):
    """A momentum encoder as in MoCo's code."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(4, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.slow.weight.data = 0.9 * self.slow.weight.data + 0.1 * self.last.weight.data
        return self.last(x) + self.slow(x)


class Replacing(Net):
    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        self.last.weight = nn.Parameter(0.5 * self.last.weight.detach())
        return outputs


class Freezing(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.last.weight.requires_grad_(not self.last.weight.requires_grad)
        return super().forward(x)


WRITING = [
    (Clamping, "last.weight"),
    (ThroughData, "last.weight"),
    (Momentum, "slow.weight"),
    (Replacing, "last.weight"),
    (Freezing, "last.weight"),
]


@pytest.mark.parametrize("run", [lambda s, b: compose(loop_events)(s, b), lambda s, b: pc.evaluate(s, [b])])
@pytest.mark.parametrize("factory, name", WRITING)
def test_a_write_into_a_parameter_is_stopped_before_it_does_harm(factory, name, run):
    state, batch = make_state(factory()), make_batch()
    before = copied(state.params)
    with pytest.raises(RuntimeError, match=f"forward wrote into the parameter '{name}'"):
        run(state, batch)
    assert_same(state.params, before)
    assert not any(param.requires_grad for param in state.params.values())


@pytest.mark.parametrize("factory", [Momentum, Replacing])
def test_a_write_into_a_parameter_is_stopped_while_compiling(factory):
    step = pc.compile(compose(loop_events), backend="eager", quiet=True)
    with pytest.raises(RuntimeError, match="forward wrote into the parameter"):
        step(make_state(factory()), make_batch())


class Counting(Net):
    """A network that assigns to the `.data` of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count.data = self.count.data + 1
        return super().forward(x) * self.count


def test_an_assignment_to_the_data_of_a_buffer_counts_in_eager_and_is_not_compiled():
    net, batches = Counting(), make_batches(3)
    end = run_steps(compose(loop_events), make_state(net), batches)
    assert torch.equal(end.buffers["count"], torch.full((3,), 3.0))
    step = pc.compile(compose(loop_events), backend="eager", quiet=True)
    with pytest.raises(TraceError, match=r"`.data` of a fake tensor.*self.count.data = .*in the layer Counting"):
        step(make_state(net), batches[0])


# Attributes of torch's layers


def doubled(module: nn.Module, args: Any, outputs: Tensor) -> Tensor:
    return 2 * outputs


class Shifting(Net):
    """A network that writes into the attributes of layers in the way `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.drop, self.rnn, self.how = nn.Dropout(0.5), nn.LSTM(4, 4), how
        self.blocks = nn.ModuleList([nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        if self.how == "new":
            self.last.calls = getattr(self.last, "calls", 0) + 1  # pyright: ignore
            return outputs * self.last.calls
        if self.how == "old":
            self.drop.p *= 0.8
            return outputs * self.drop.p
        if self.how == "recurrent":
            self.rnn.dropout += 0.1
            return outputs * self.rnn.dropout
        if self.how == "modules":
            self.blocks.append(nn.Identity())
            return outputs * len(self.blocks)
        self.last.register_forward_hook(doubled)
        return outputs


@pytest.mark.parametrize(
    "how, name",
    [
        ("new", "last.calls"),
        ("old", "drop.p"),
        ("recurrent", "rnn.dropout"),
        ("modules", "blocks.1"),
        ("hook", "last._forward_hooks"),
    ],
)
def test_attributes_that_forward_writes_into_torchs_layers_are_restored(how, name):
    state, x = make_state(Shifting(how)), make_batch()[0]
    with pytest.warns(UserWarning, match=f"forward changed {name}.*, which is neither"):
        first = state.forward(x, train=True)
    for _ in range(2):  # these passes are not checked
        assert torch.equal(state.forward(x, train=True), first)


# Hooks of modules


def tripled(module: nn.Module, *args: Any) -> tuple[Tensor, ...]:
    """Return three times the first element of the last argument: inputs, or gradients of inputs or outputs."""
    (first, *_) = args[0]
    return (3 * first,)


HOOKS: list[tuple[str, Any]] = [
    ("register_forward_pre_hook", tripled),
    ("register_forward_hook", doubled),
    ("register_full_backward_pre_hook", tripled),
    ("register_full_backward_hook", tripled),
]


@pytest.mark.parametrize("register, hook", HOOKS)
@pytest.mark.parametrize("transform", [lambda step: step, lambda s: pc.compile(s, backend="eager", quiet=True)])
def test_hooks_of_modules_act_as_in_torch(register, hook, transform):
    net, batches = make_mlp(), make_batches(3)
    getattr(net[3], register)(hook)
    end = run_steps(transform(compose(loop_events)), make_state(net, optimizer=pc.optim.sgd(0.1)), batches)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
    for name, param in net.named_parameters():
        torch.testing.assert_close(end.params[name], param.detach())


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: torch.vmap(f)])
def test_a_write_into_a_parameter_is_stopped_under_transforms(transform):
    state, (x, _) = make_state(Clamping()), make_batch()
    before = copied(state.params)
    weight = state.params["last.weight"]

    def loss(weight: Tensor) -> Tensor:
        return state.replace(params={**state.params, "last.weight": weight}).forward(x).sum()

    is_vmap = transform is not torch.func.grad
    with pytest.raises(RuntimeError, match="forward wrote into the parameter 'last.weight'"):
        transform(loss)(weight[None] if is_vmap else weight)
    assert_same(state.params, before)


def test_a_write_in_a_later_pass_is_reported():
    class Late(Net):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 4:
                with torch.no_grad():
                    self.last.weight.clamp_(-0.05, 0.05)
            return super().forward(x)

    step, state = compose(loop_events), make_state(Late())
    state = step(state, make_batch(0, 4))
    with pytest.raises(RuntimeError, match="'last.weight', so the tensor of the caller's state has changed"):
        state.forward(make_batch(0, 8)[0], train=True)


# Draws


class ByShape(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(x, 0.5) if len(x) > 4 else x)


class ByBuffer(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(x, 0.5) if self.on else x)


def switched(state: State) -> State:
    return state.replace(buffers={"on": torch.ones((), dtype=torch.bool)})


@pytest.mark.parametrize("factory", [ByShape, ByBuffer])
def test_a_network_that_only_sometimes_draws_is_checked_in_every_pass(factory):
    state, twin = make_state(factory()), make_state(factory())
    quiet, loud, generator = make_batch(0, 4), make_batch(1, 8), torch.get_rng_state()

    def last(state: State) -> State:
        return switched(state) if factory is ByBuffer else state

    fresh = pc.compose(loop_events)(last(twin.replace(params=state.params)), loud)
    step = compose(loop_events)
    step(state, quiet)  # checked, and recorded as a pass that draws nothing
    again = last(state)
    assert torch.equal(again.forward(loud[0], train=True), again.forward(loud[0], train=True))
    step(state, quiet)
    for _ in range(2):
        assert_same(step(again, loud).params, fresh.params)
    assert torch.equal(state.forward(quiet[0], train=True), F.linear(quiet[0], *state.params.values()))
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_network_that_draws_at_times_is_keyed_under_transforms():
    state, generator = make_state(ByShape()), torch.get_rng_state()
    quiet, loud = make_batch(0, 4)[0], make_batch(1, 8)[0]
    state.forward(quiet, train=True)
    expected = state.forward(loud, train=True)
    state.forward(quiet, train=True)
    found = torch.vmap(lambda p: state.replace(params=p).forward(loud, train=True), (0,))(
        {name: param[None] for name, param in state.params.items()}
    )
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_swallowed_error_does_not_hide_a_draw():
    class Swallowing(Net):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.last(F.dropout(x, 0.5))
            except RuntimeError:
                return self.last(x)

    state, x = make_state(Swallowing()), torch.ones(8, 4)
    outputs = state.forward(x, train=True)
    assert not torch.equal(outputs, F.linear(x, *state.params.values()))
    assert torch.equal(outputs, state.forward(x, train=True))


def test_the_first_pass_computes_the_same_bits_as_all_others():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        net = nn.Sequential(encoder, nn.Flatten(), nn.Linear(24, 3))
    state, x = make_state(net), torch.linspace(-2, 2, 192).sin().reshape(8, 3, 8)
    with torch.no_grad():
        plain = net.eval()(x)
        for _ in range(2):
            assert torch.equal(state.forward(x), plain)


# Buffers and recomputation


class Normed(nn.Module):
    """A block with batch norm, and one that reads a buffer it has written; recomputed if requested."""

    def __init__(self, around: Any) -> None:
        super().__init__()
        self.block, self.last, self.around = make_mlp(1), nn.Linear(3, 3), around
        self.block.append(nn.BatchNorm1d(3))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(3))
        with torch.no_grad():
            self.last.weight.copy_(torch.linspace(-1, 1, 9).reshape(3, 3))
            self.last.bias.zero_()

    def shifted(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return (x - self.mean).tanh() * x

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.around(self.shifted, self.around(self.block, x))
        return self.last(self.around(self.shifted, hidden))


def plainly(fn: Any, *args: Any) -> Any:
    return fn(*args)


@pytest.mark.filterwarnings("ignore:the network's outputs for an example depend:UserWarning")  # by its running mean
@pytest.mark.parametrize("k", [1, 2])
def test_recomputation_repeats_the_pass_without_changing_its_buffers(k):
    step = compose(loop_events, microbatches=k)
    plain, recomputed = (
        run_steps(step, make_state(Normed(f)), make_batches(3)) for f in (plainly, pc.nn.layers.checkpoint)
    )
    assert_same(recomputed.buffers, plain.buffers)
    assert_same(recomputed.params, plain.params)
    assert recomputed.buffers["block.4.num_batches_tracked"] == 3 * k


def test_recomputation_after_the_pass_sees_the_tensors_of_the_pass():
    gradients = []
    for around in (plainly, pc.nn.layers.checkpoint):
        state = make_state(Normed(around))
        leaves = {name: param.clone().requires_grad_() for name, param in state.params.items()}
        loss = state.replace(params=leaves).forward(make_batch()[0], train=True).square().sum()
        gradients.append(torch.autograd.grad(loss, list(leaves.values())))
    assert all(map(torch.equal, *gradients))


def test_torchs_own_checkpoint_may_not_write_a_second_time():
    def around(fn: Any, *args: Any) -> Any:
        return torch_checkpoint(fn, *args, use_reentrant=False)

    with pytest.raises(RuntimeError, match=r"into the buffer '.*' a second time.*purecompose.nn.layers.checkpoint"):
        compose(loop_events)(make_state(Normed(around)), make_batch())


def test_a_second_pass_in_a_gradient_does_not_lend_its_parameters_to_the_first():
    def teach(state: State) -> State:
        teacher = state.replace(params={name: 2 * param for name, param in state.params.items()})
        return state.replace(outputs=state.outputs + teacher.call(state.inputs)[0].detach())

    states = []
    for around in (plainly, pc.nn.layers.checkpoint):
        step = compose(loop_events, [changing("teach", Event.AFTER_FORWARD, teach)])
        states.append(run_steps(step, make_state(Normed(around)), make_batches(2)))
    assert_same(states[0].params, states[1].params)
    assert_same(states[0].buffers, states[1].buffers)


def test_a_buffer_bound_to_a_view_of_the_batch_is_a_copy():
    class Viewing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = x[0]
            return super().forward(x)

    batch = make_batch()
    end = compose(loop_events)(make_state(Viewing()), batch)
    expected = batch[0][0].clone()
    batch[0].zero_()
    assert torch.equal(end.buffers["seen"], expected)


# Precision


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_autocast_around_the_pass_has_no_effect(precision):
    state, x = make_state(precision=precision), make_batch()[0]
    expected = state.forward(x)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(state.forward(x), expected)
        assert torch.is_autocast_enabled("cpu")


class TakesBatch(nn.Module):
    """A network whose argument is the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, batch):
        return self.head(batch["x"] * batch["scale"])


def test_a_network_may_take_the_whole_batch_as_one_argument():
    torch.manual_seed(0)
    net, batch = TakesBatch(), {"x": torch.randn(6, 4), "scale": torch.rand(6, 1), "y": torch.arange(6) % 3}
    options = {"loss": pc.losses.cross_entropy, "optimizer": pc.optim.sgd(0.1), "target_field": "y"}
    state = pc.State.create(net, input_field=pc.batch.AS_ARGUMENT, **options)
    end = pc.compose(pc.loop_events, microbatches=2)(state, batch)
    loss = pc.losses.cross_entropy(net(batch), batch["y"])
    expected = net.head.weight - 0.1 * torch.autograd.grad(loss, net.head.weight)[0]
    torch.testing.assert_close(end.params["head.weight"], expected.detach())
    wrong = pc.State.create(net, input_field=pc.batch.WHOLE, **options)
    with pytest.raises(TypeError) as error:
        pc.compose(pc.loop_events)(wrong, batch)
    assert any("batch.AS_ARGUMENT for forward(self, batch)" in note for note in error.value.__notes__)


class Drawing(nn.Module):
    """A network that draws without a key in batches of fewer than `most` examples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.linear, self.most = nn.Linear(4, 3), most

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.linear(inputs)
        return outputs + torch.poisson(torch.ones(outputs.shape)) if len(inputs) < self.most else outputs


def test_draws_without_a_key_are_refused_in_every_pass() -> None:
    state = make_state(Drawing(99))
    for _ in range(2):
        with pytest.raises(pc.errors.UnkeyedRandomError, match="poisson"):
            state.forward(make_batch()[0])
    step, state = compose(loop_events), make_state(Drawing(6))
    state = step(state, make_batch())
    for _ in range(2):  # it draws in smaller batches only
        with pytest.raises(pc.errors.UnkeyedRandomError, match="poisson"):
            step(state, make_batch(size=4))
