"""Stochastic depth: outputs of a block, frequencies, rates, and modules that surgery does not change."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import purecompose as pc
from purecompose import compose, loop_events
from purecompose.algorithms import stochastic_depth
from purecompose.nn import models
from purecompose.nn.layers import ClassesSecond, StochasticDepth, residuals
from tests.algorithms.surgery_checks import applied, hooked, patched
from tests.helpers import assert_same


METHODS = ["block", "sample"]
SEEDS = st.integers(0, 2**31)


class Bottleneck(nn.Module):
    """A block with torchvision's names and order, and activations that work in place."""

    def __init__(self, channels: int = 4, *, stride: int = 1, convs: int = 3) -> None:
        super().__init__()
        for place in range(1, convs + 1):
            step = stride if place == 1 else 1
            setattr(self, f"conv{place}", nn.Conv2d(channels, channels, 3, step, 1, bias=False))
            setattr(self, f"bn{place}", nn.BatchNorm2d(channels))
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(channels, channels, 1, stride, bias=False) if stride > 1 else None
        self.convs = convs

    def branch(self, input: Tensor) -> Tensor:
        for place in range(1, self.convs + 1):
            input = self.get_submodule(f"bn{place}")(self.get_submodule(f"conv{place}")(input))
            input = input if place == self.convs else self.relu(input)
        return input

    def by_pass(self, input: Tensor) -> Tensor:
        return input if self.downsample is None else self.downsample(input)

    def forward(self, input: Tensor) -> Tensor:
        return self.relu(self.branch(input) + self.by_pass(input))


class PreActivated(nn.Module):
    """x + conv2(relu(bn2(conv1(relu(bn1(x)))))), with the names of torchvision's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, 1, 1)
        self.bn2, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, 1, 1)
        self.relu, self.downsample = nn.ReLU(), None


class InPlace(nn.Module):
    """branch(x) + shortcut(x), where the branch begins with an activation that works in place."""

    def __init__(self, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, 1, 1)), shortcut

    def forward(self, input: Tensor) -> Tensor:
        return self.branch(input) + self.shortcut(input)


BLOCKS = {
    "ours": lambda stride: models.ResidualBlock(4, 4, stride=stride),
    "bottleneck": lambda stride: Bottleneck(stride=stride),
    "basic": lambda stride: Bottleneck(stride=stride, convs=2),
}
blocks = st.sampled_from(sorted(BLOCKS))


def make_block(kind: str, stride: int = 1, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return BLOCKS[kind](stride)


def make_images(num: int = 6, seed: int = 0) -> Tensor:
    """Return non-negative images, as after a ReLU."""
    return torch.randn(num, 4, 6, 6, generator=torch.Generator().manual_seed(seed)).relu()


def parts(block: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return F(x) and S(x), computed by a copy of the block."""
    mine = copy.deepcopy(block)
    if isinstance(mine, Bottleneck):
        return mine.branch(images), mine.by_pass(images)
    return mine.branch(images), mine.shortcut(images)  # pyright: ignore[reportCallIssue]


def make_state(*, width: int = 4, seed: int = 0, **options: Any) -> pc.State:
    net = models.build("resnet8", in_shape=(3, 8, 8), num_classes=5, seed=seed, width=width)
    given = {"optimizer": pc.optim.adam(0.01), "duration": "8ba", "key": 3, **options}
    return pc.State.create(net, loss=pc.losses.cross_entropy, **given)


def make_batch(seed: int = 0, num: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 3, 8, 8, generator=generator), torch.randint(5, (num,), generator=generator)


def rates_of(state: pc.State) -> list[float]:
    return [float(buffer) for name, buffer in state.buffers.items() if name.endswith("drop_rate")]


# A block


@given(blocks, st.sampled_from([1, 2]), st.sampled_from(METHODS), st.booleans(), SEEDS)
@settings(max_examples=25)
def test_at_rate_0_a_block_is_unchanged(kind: str, stride: int, method: Any, train: bool, seed: int) -> None:
    block, images = make_block(kind, stride), make_images(seed=seed)
    wrapped = StochasticDepth(copy.deepcopy(block), method, 0.0)
    assert torch.equal(wrapped.train(train)(images), block.train(train)(images))


@pytest.mark.parametrize("make_shortcut", [nn.Identity, lambda: nn.Conv2d(4, 4, 1)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("train", [True, False])
def test_at_rate_0_a_branch_that_works_in_place_has_the_same_gradients(
    make_shortcut: Any, method: Any, train: bool
) -> None:
    torch.manual_seed(0)
    block, images = InPlace(make_shortcut()), (make_images() - 0.5).requires_grad_()
    wrapped = StochasticDepth(copy.deepcopy(block), method, 0.0)
    results = []
    for module in (block, wrapped):
        output = module.train(train)(2 * images)
        results.append([output, *torch.autograd.grad(output.square().sum(), [images, *module.parameters()])])
    torch.testing.assert_close(results[1], results[0])


@given(blocks, st.sampled_from([1, 2]), st.sampled_from(METHODS), SEEDS)
@settings(max_examples=25)
def test_at_rate_1_only_the_shortcut_is_left(kind: str, stride: int, method: Any, seed: int) -> None:
    block, images = make_block(kind, stride), make_images(seed=seed) - 0.5  # below zero as well
    wrapped = StochasticDepth(copy.deepcopy(block), method, 1.0)
    _, by_pass = parts(block, images)
    is_identity = method == "block" and stride == 1
    assert torch.equal(wrapped(images), images if is_identity else by_pass.relu())


@pytest.mark.parametrize("make", [lambda: make_block("ours"), lambda: make_block("bottleneck"), lambda: Affine(6)])
def test_at_rate_1_the_input_comes_out_bit_for_bit_whatever_the_branch_gives(make: Any) -> None:
    images = make_images() - 0.5
    images[0, 0, 0] = torch.tensor([-0.0, 0.0, 1e-45, torch.nan, torch.inf, -torch.inf])  # branches turn them into NaN
    output = StochasticDepth(make(), "block", 1.0)(images)
    assert torch.equal(output.view(torch.int32), images.view(torch.int32))


@given(blocks, st.sampled_from([1, 2]), st.sampled_from(METHODS), st.floats(0, 1), SEEDS)
@settings(max_examples=25)
def test_evaluation_takes_the_branch_as_often_as_it_is_kept(
    kind: str, stride: int, method: Any, rate: float, seed: int
) -> None:
    block, images = make_block(kind, stride).double(), make_images(seed=seed).double()
    block.eval()
    branch, by_pass = parts(block, images)
    wrapped = StochasticDepth(block, method, rate).eval()
    torch.testing.assert_close(wrapped(images), ((1 - rate) * branch + by_pass).relu(), rtol=1e-6, atol=1e-7)


@given(blocks, st.sampled_from([1, 2]), SEEDS)
@settings(max_examples=25)
def test_each_example_is_either_kept_or_dropped(kind: str, stride: int, seed: int) -> None:
    block, images = make_block(kind, stride), make_images(8, seed=seed)
    branch, by_pass = parts(block, images)
    torch.manual_seed(seed)
    found = StochasticDepth(block, "sample", 0.5)(images)
    kept, dropped = (branch + by_pass).relu(), by_pass.relu()
    for row in range(8):
        assert torch.equal(found[row], kept[row]) or torch.equal(found[row], dropped[row])


@pytest.mark.parametrize("method", METHODS)
def test_the_kept_fraction_is_one_minus_the_rate(method: Any) -> None:
    block, images = make_block("ours", 2).requires_grad_(False), make_images(1)
    wrapped = StochasticDepth(block.eval(), method, 0.3)
    wrapped.training = True  # batch norm stays in evaluation
    torch.manual_seed(0)
    shortcut = block.shortcut(images).relu()  # pyright: ignore[reportCallIssue]
    kept = sum(not torch.equal(wrapped(images), shortcut) for _ in range(1000))
    assert 0.66 < kept / 1000 < 0.74  # 0.7, by 2.8 standard deviations


@given(blocks, SEEDS)
@settings(max_examples=15)
def test_a_branch_that_is_left_out_leaves_nothing_behind(kind: str, seed: int) -> None:
    block, images = make_block(kind), make_images(seed=seed)
    before = copy.deepcopy(block.state_dict())
    wrapped = StochasticDepth(block, "block", 1.0)
    (gradient, *rest) = torch.autograd.grad(
        wrapped(images.requires_grad_()).sum(), [images, *wrapped.parameters()], materialize_grads=True
    )
    assert torch.equal(gradient, torch.ones_like(images))
    assert all(not grad.any() for grad in rest)
    after = wrapped.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_branch_that_is_kept_counts_the_batch() -> None:
    block, images = make_block("ours"), make_images()
    expected = copy.deepcopy(block)
    expected(images)
    wrapped = StochasticDepth(block, "block", 0.0)
    wrapped(images)
    assert_same({n: v for n, v in wrapped.state_dict().items() if n != "drop_rate"}, dict(expected.state_dict()))


def test_other_modules_are_not_blocks() -> None:
    block = Bottleneck()
    block.extra = nn.ReLU()  # its effect is unknown
    assert not residuals(block)
    scaled, counted, gated = Bottleneck(), make_block("ours"), make_block("basic")
    scaled.alpha = nn.Parameter(torch.tensor(0.1))
    counted.register_buffer("count", torch.zeros(()))
    gated.register_parameter("gate", None)
    assert not residuals(scaled) and not residuals(counted) and len(residuals(gated)) == 1
    assert not residuals(hooked(make_block("ours"))) and not residuals(patched(make_block("basic")))
    assert not residuals(PreActivated())
    assert not residuals(nn.Linear(2, 2))


# A block of a transformer


class Affine(nn.Module):
    """x + attention(norm1(x)), then with norm2 and feed_forward, all affine, and so is the mean over draws."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm1, self.attention = nn.Identity(), nn.Linear(width, width)
        self.norm2, self.feed_forward = nn.Identity(), nn.Linear(width, width)

    def forward(self, input: Tensor) -> Tensor:
        attended = input + self.attention(self.norm1(input))
        return attended + self.feed_forward(self.norm2(attended))


class NormedAfter(nn.Module):
    """norm1(x + attention(x)), then with norm2 and feed_forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm1 = nn.Linear(4, 4), nn.LayerNorm(4)
        self.feed_forward, self.norm2 = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, input: Tensor) -> Tensor:
        attended = self.norm1(input + self.attention(input))
        return self.norm2(attended + self.feed_forward(attended))


class Masked(Affine):
    """A block whose forward also takes a mask."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(input if mask is None else input * mask)


class Several(Affine):
    """A block whose forward takes any number of arguments."""

    def forward(self, *inputs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(sum(inputs[1:], inputs[0]))


class ByName(Affine):
    """A block whose forward takes keyword-only arguments."""

    def forward(self, **inputs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(inputs["input"])


class ByPlace(Affine):
    """A block whose forward takes a positional-only argument."""

    def forward(self, input: Tensor, /) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(input)


NETS = {
    "vit": lambda dropout: models.vit((1, 4, 4), 3, patch_size=2, width=8, depth=2, num_heads=2, dropout=dropout),
    "gpt": lambda dropout: ClassesSecond(models.gpt(7, 6, width=8, depth=2, num_heads=2, dropout=dropout)),
}
nets = st.sampled_from(sorted(NETS))


def make_transformer(name: str, *, dropout: float = 0.0, **options: Any) -> pc.State:
    torch.manual_seed(0)
    given = {"optimizer": pc.optim.adam(0.01), "duration": "8ba", "key": 3, **options}
    return pc.State.create(NETS[name](dropout), loss=pc.losses.cross_entropy, **given)


def batch_for(name: str, seed: int = 0, num: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return torch.randn(num, 1, 4, 4, generator=generator), torch.randint(3, (num,), generator=generator)
    tokens = torch.randint(7, (num, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def with_drops(state: pc.State, method: Any, rate: float, distribution: Any = "uniform") -> nn.Module:
    """Return the network of a state, with its blocks replaced."""
    return pc.to_module(with_rate(state, method, rate, distribution))


def with_rate(state: pc.State, *settings: Any) -> Any:
    """Return the state after INIT of the method, which with a rate of 0 would not act."""
    return stochastic_depth(*settings).apply(pc.Event.INIT, state)


def make_transformer_block(dropout: float = 0.0, *, seed: int = 0, is_causal: bool = True) -> models.TransformerBlock:
    """Return a block in double precision, with branches about as large as their shortcuts."""
    torch.manual_seed(seed)
    return models.TransformerBlock(8, 2, is_causal=is_causal, dropout=dropout).double()


def make_places(num: int = 6, seed: int = 0) -> Tensor:
    """Return inputs (N, L, d)."""
    return torch.randn(num, 5, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outcomes(block: models.TransformerBlock, places: Tensor) -> Tensor:
    """Return the outputs (4, N, L, d) with neither branch, only the second, only the first, and both."""
    found = []
    for attends in (0, 1):
        attended = places + attends * block.attention(block.norm1(places))
        found += [attended + feeds * block.feed_forward(block.norm2(attended)) for feeds in (0, 1)]
    return torch.stack(found)


def which(output: Tensor, expected: Tensor) -> Tensor:
    """Return the index of each example's outcome, (N,) int64; each example has exactly one."""
    is_one = (output - expected).abs().amax((2, 3)) < 1e-9
    assert torch.equal(is_one.sum(0), torch.ones(len(output), dtype=torch.int64))
    return is_one.int().argmax(0)


@given(nets, st.sampled_from(METHODS), st.booleans(), SEEDS)
def test_at_rate_0_a_transformer_is_unchanged(name: str, method: Any, train: bool, seed: int) -> None:
    state, (inputs, _) = make_transformer(name), batch_for(name, seed)
    expected = pc.to_module(state).train(train)(inputs)
    assert torch.equal(with_drops(state, method, 0.0).train(train)(inputs), expected)


@given(st.sampled_from(METHODS), st.sampled_from([0.0, 0.3]), st.booleans(), SEEDS)
def test_at_rate_1_a_transformers_block_is_the_identity(
    method: Any, dropout: float, is_causal: bool, seed: int
) -> None:
    places = make_places(seed=seed).requires_grad_()
    wrapped = StochasticDepth(make_transformer_block(dropout, seed=seed, is_causal=is_causal), method, 1.0)
    output = wrapped(places)
    assert torch.equal(output, places)
    gradient, *rest = torch.autograd.grad(output.sum(), [places, *wrapped.parameters()], materialize_grads=True)
    assert torch.equal(gradient, torch.ones_like(places)) and not any(grad.any() for grad in rest)


@pytest.mark.parametrize("name", sorted(NETS))
@pytest.mark.parametrize("method", METHODS)
def test_at_rate_1_a_transformer_consists_of_the_layers_around_its_blocks(name: str, method: Any) -> None:
    state, (inputs, _) = make_transformer(name), batch_for(name)
    without = pc.to_module(state)
    for inner in without.modules():
        if isinstance(inner, models.VisionTransformer | models.GPT):
            inner.blocks = nn.Sequential()
    assert torch.equal(with_drops(state, method, 1.0)(inputs), without(inputs))


@given(st.sampled_from(METHODS), st.floats(0, 1), st.sampled_from([0.0, 0.3]), SEEDS)
def test_evaluation_takes_both_branches_as_often_as_they_are_kept(
    method: Any, rate: float, dropout: float, seed: int
) -> None:
    block, places = make_transformer_block(dropout, seed=seed).eval(), make_places(seed=seed)
    attended = places + (1 - rate) * block.attention(block.norm1(places))
    expected = attended + (1 - rate) * block.feed_forward(block.norm2(attended))
    wrapped = StochasticDepth(block, method, rate).eval()
    torch.testing.assert_close(wrapped(places), expected, rtol=1e-6, atol=1e-6)  # the rate is float32


@pytest.mark.parametrize("method", METHODS)
def test_the_branches_of_a_transformers_block_are_dropped_independently(method: Any) -> None:
    """Each is dropped in 0.3 of all draws, both in 0.09; counts of 1000 agree within 3.5 standard deviations."""
    block, places, rate = make_transformer_block(), make_places(4), 0.3
    wrapped, expected = StochasticDepth(block, method, rate), outcomes(block, places)
    torch.manual_seed(0)
    drawn = torch.stack([which(wrapped(places), expected) for _ in range(1000 if method == "block" else 250)])
    is_same = (drawn == drawn[:, :1]).all(1)  # for the whole batch
    assert is_same.all() if method == "block" else is_same.float().mean() < 0.3
    counts = torch.bincount(drawn[:, 0] if method == "block" else drawn.flatten(), minlength=4)
    shares = [rate**2, rate * (1 - rate), rate * (1 - rate), (1 - rate) ** 2]
    for count, share in zip(counts.tolist(), shares, strict=True):
        assert abs(count - 1000 * share) < 3.5 * (1000 * share * (1 - share)) ** 0.5


def test_a_transformers_block_is_known_by_names_order_and_arguments() -> None:
    assert len(residuals(models.TransformerBlock(4, 2))) == len(residuals(Affine())) == 2
    steps = residuals(models.TransformerBlock(4, 2, dropout=0.5))
    assert [[type(part).__name__ for part in step.branch] for step in steps] == [
        ["LayerNorm", "SelfAttention", "Dropout"],
        ["LayerNorm", "FeedForward", "Dropout"],
    ]
    extra, scaled, several, partial = Affine(), Affine(), Affine(), Affine()
    extra.scale = nn.Identity()
    scaled.gain = nn.Parameter(torch.ones(4))
    several.attention = nn.MultiheadAttention(4, 2)  # pyright: ignore[reportAttributeAccessIssue]
    del partial.norm2
    for block in (extra, scaled, several, partial, NormedAfter(), Masked(), hooked(Affine()), patched(Affine())):
        assert residuals(block) == ()
    assert residuals(Several()) == residuals(ByName()) == () and len(residuals(ByPlace())) == 2
    assert residuals(nn.TransformerEncoderLayer(4, 2)) == ()


# Rates


@pytest.mark.parametrize(("distribution", "rates"), [("linear", [0.2, 0.4, 0.6]), ("uniform", [0.6, 0.6, 0.6])])
def test_the_network_has_the_rates_of_its_blocks(distribution: Any, rates: list[float]) -> None:
    state = compose(loop_events, [stochastic_depth("block", 0.6, distribution)]).init(make_state())
    assert rates_of(state) == pytest.approx(rates)


def test_blocks_inside_a_replaced_block_are_not_replaced() -> None:
    outer: Any = models.ResidualBlock(4, 4)
    outer.branch = nn.Sequential(models.ResidualBlock(4, 4))
    net = nn.Sequential(models.ResidualBlock(4, 4), StochasticDepth(outer, "block", 0.9), models.ResidualBlock(4, 4))
    state = pc.State.create(net, loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1), duration="4ba")
    after, report = applied(state, stochastic_depth("block", 0.3))
    assert report.replaced == ("0", "2")
    assert rates_of(after) == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize(("warmup", "batches"), [(0.5, 4), ("0.25dur", 2), ("3ba", 3), ("1ep", 2)])
def test_the_warmup_ends_at_the_rate(warmup: Any, batches: int) -> None:
    step = compose(loop_events, [stochastic_depth("sample", 0.6, drop_warmup=warmup)])
    state = step.init(make_state(batches_per_epoch=2))
    assert rates_of(state) == [0, 0, 0]
    for number in range(6):
        state = step(state, make_batch(number))
        share = min(number / batches, 1)
        assert rates_of(state) == pytest.approx([share * 0.2, share * 0.4, share * 0.6])
        assert float(state.metrics["stochastic_depth/drop_rate"]) == pytest.approx(share * 0.6)


# In a run


@pytest.mark.parametrize("method", METHODS)
def test_parameters_keep_names_values_and_momentum(method: Any) -> None:
    plain = compose(loop_events, [])
    state = plain.init(make_state())
    for number in range(3):
        state = plain(state, make_batch(number))
    changed, report = applied(state, stochastic_depth(method, 0.5))
    assert all(changed.params[name] is param for name, param in state.params.items())
    assert_same(changed.opt_state, state.opt_state)
    assert report.made == tuple(f"{name}.drop_rate" for name in report.replaced)
    assert len(report.replaced) == 3
    assert not applied(changed, stochastic_depth(method, 0.5))[1].replaced


def test_a_network_without_blocks_is_warned_about() -> None:
    state = pc.State.create(nn.Linear(2, 2), loss=pc.losses.cross_entropy, optimizer=pc.optim.sgd(0.1), duration="4ba")
    with pytest.warns(UserWarning, match="looked for residual blocks and found none in a network of Linear"):
        compose(loop_events, [stochastic_depth()]).init(state)


def test_blocks_of_the_other_method_are_refused() -> None:
    first = compose(loop_events, [stochastic_depth("block", 0.4)]).init(make_state())
    with pytest.raises(
        ValueError, match="b: expected blocks with method 'sample', got 'block' in '.*', from an earlier"
    ):
        compose(loop_events, [stochastic_depth("sample", 0.1, name="b")]).init(first)
