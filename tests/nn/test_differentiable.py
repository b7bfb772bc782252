"""Derivatives through three steps of SGD, of first and second order, for layers and losses, in float64.

Each is compared with finite differences: the first derivative with those of the loss, the second with those of the
first. A form of differentiation that torch lacks for an operation may raise an error, but never give a wrong number.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, rnn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, hparam, loop_events, optim, population, stack_states
from purecompose.loop import Grad, Stage, advance, update
from purecompose.nn import differentiable


FLOAT = torch.float64
NUM, STEPS, RATE = 4, 3, 0.02
Make = Callable[[], nn.Module]

# The first use of forward mode in a process makes torch script its own formulas with a deprecated function.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script", "ignore:There is a performance drop")


class Around(nn.Module):
    """A layer between learned factors of its inputs, (N, *shape), and a learned sum of its outputs, (N,)."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(1)
        self.factor = nn.Parameter(torch.rand(shape, generator=gen, dtype=FLOAT) + 0.5)
        self.shift = nn.Parameter(torch.randn(shape, generator=gen, dtype=FLOAT) * 0.3)
        self.layer = layer
        with torch.no_grad():
            outputs = self.rows(torch.randn(NUM, *shape, generator=gen, dtype=FLOAT))
        scale = 0.6 / outputs.norm(dim=1).mean()
        self.weight = nn.Parameter(torch.randn(outputs.shape[1], generator=gen, dtype=FLOAT) * scale)

    def rows(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs * self.factor + self.shift)
        while not isinstance(outputs, Tensor):
            outputs = outputs[0]
        return outputs.reshape(NUM, -1)

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.rows(inputs) @ self.weight).tanh() * 2


class Of(nn.Module):
    """A function of the inputs and of layers."""

    def __init__(self, fn: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.fn, self.layers = fn, nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> Any:
        return self.fn(inputs, *self.layers)


def of(fn: Callable[..., Any], *layers: Make) -> Make:
    return lambda: Of(fn, *(make() for make in layers))


def make(name: str, *args: Any, **options: Any) -> Make:
    return lambda: getattr(nn, name)(*args, **options)


def frozen(make: Make) -> Make:
    return lambda: make().eval()


def looked_up(inputs: Tensor, table: nn.Module, num_words: int) -> Tensor:
    """Return rows of a table of nine for fixed words, (N, num_words), weighted by the inputs."""
    words = torch.arange(NUM * num_words).view(NUM, num_words) % 9
    found = table(words)
    return found * inputs.mean((1, 2)).view(NUM, *[1] * (found.ndim - 1))


CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
LAYERS: dict[str, tuple[Make, tuple[int, ...]]] = {
    **{
        name: (layer, (6, 5))
        for name, layer in {
            "Linear": make("Linear", 5, 3),
            "Hardsigmoid": make("Hardsigmoid"),
            "LayerNorm": make("LayerNorm", 5),
            "LayerNorm plain": make("LayerNorm", (6, 5), elementwise_affine=False),
            "LayerNorm without bias": make("LayerNorm", 5, bias=False),
            "RMSNorm": make("RMSNorm", 5),
        }.items()
    },
    **{
        name: (layer, (5, 4))
        for name, layer in {
            "LSTM deep": make("LSTM", 4, 3, num_layers=2, bidirectional=True, batch_first=True),
            "LSTM dropout": make("LSTM", 4, 3, num_layers=2, dropout=0.3, batch_first=True),
            "GRUCell": of(lambda x, f: f(x[:, 0], f(x[:, 1])), make("GRUCell", 4, 3)),
            "GRU packed": of(
                lambda x, f: f(rnn.pack_padded_sequence(x, torch.tensor([5, 4, 3, 2]), True))[1].movedim(1, 0),
                make("GRU", 4, 3, batch_first=True),
            ),
            "MultiheadAttention dropout": of(
                lambda x, f: f(x, x, x)[0], make("MultiheadAttention", 4, 2, dropout=0.3, batch_first=True)
            ),
            "MultiheadAttention fused": of(
                lambda x, f: f(x, x, x, need_weights=False, attn_mask=CAUSAL, is_causal=True)[0],
                make("MultiheadAttention", 4, 2, batch_first=True),
            ),
            "TransformerEncoderLayer": make("TransformerEncoderLayer", 4, 2, 8, batch_first=True),
            "attention biased": of(lambda x: F.scaled_dot_product_attention(x, x, x, x @ x.mT)),
            "EmbeddingBag": of(lambda x, f: looked_up(x, f, 4), make("EmbeddingBag", 9, 3)),
            "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
            "weight_norm columns": lambda: parametrizations.weight_norm(nn.Linear(4, 3), dim=1),
            "weight_norm whole": lambda: parametrizations.weight_norm(nn.Linear(4, 3), dim=None),  # type: ignore[arg-type]
            "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
            "spectral_norm frozen": frozen(lambda: parametrizations.spectral_norm(nn.Linear(4, 3))),
            "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="householder"),
            "cdist": of(lambda x: torch.cdist(x, x.flip(-1) * 2)),
            "cdist 1": of(lambda x: torch.cdist(x, x.flip(-1) * 2, p=1)),
            "pdist": of(lambda x: F.pdist(x.flatten(1)).repeat(4, 1)),
            "normalize": of(lambda x: F.normalize(x, dim=-1)),
            "solve": of(lambda x: torch.linalg.solve(x[:, :4] + 3 * torch.eye(4, dtype=FLOAT), x[:, 4])),
        }.items()
    },
    **{
        name: (layer, shape)
        for d, shape in ((1, (4, 6)), (2, (4, 5, 4)), (3, (4, 4, 4, 3)))
        for name, layer in {
            f"BatchNorm{d}d": make(f"BatchNorm{d}d", 4),
            f"BatchNorm{d}d frozen": frozen(make(f"BatchNorm{d}d", 4)),
            f"BatchNorm{d}d plain": make(f"BatchNorm{d}d", 4, affine=False, track_running_stats=False),
            f"InstanceNorm{d}d": make(f"InstanceNorm{d}d", 4),
            f"InstanceNorm{d}d affine": make(f"InstanceNorm{d}d", 4, affine=True, track_running_stats=True),
            f"InstanceNorm{d}d frozen": frozen(make(f"InstanceNorm{d}d", 4, affine=True, track_running_stats=True)),
            f"GroupNorm {d}": make("GroupNorm", 2, 4),
        }.items()
    },
}
"""Layers that the library replaces, refuses, or runs in another way where a step is differentiated."""

GEN = torch.Generator().manual_seed(7)
REAL = torch.randn(STEPS, NUM, 6, generator=GEN, dtype=FLOAT)
SHARES = torch.rand(STEPS, NUM, 6, generator=GEN, dtype=FLOAT)
CLASSES = torch.randint(0, 6, (STEPS, NUM), generator=GEN)
EYE = 1.3 * torch.eye(6, dtype=FLOAT)


def ctc(outputs: Tensor, targets: Tensor) -> Tensor:
    scores = torch.stack([outputs, outputs * 2, outputs.sin()]).log_softmax(-1)
    return F.ctc_loss(scores, targets[:, None].clamp(min=1), torch.full((NUM,), 3), torch.full((NUM,), 1))


def linear_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    return F.linear_cross_entropy(outputs, EYE * (1 + outputs.mean()), targets, options=options)


LOSSES: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "MSELoss": (nn.MSELoss(), REAL),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), SHARES),
    "CTCLoss": (ctc, CLASSES),
    "ctc": (lambda o, t: pc.losses.ctc(torch.stack([o, o * 2, o.sin()], 1), t[:, None].clamp(min=1)), CLASSES),
    **({"LinearCrossEntropyLoss": (linear_cross_entropy, CLASSES)} if hasattr(F, "linear_cross_entropy") else {}),
}

REFUSED = {  # in reverse mode
    "EmbeddingBag": "_embedding_bag_backward' is not implemented",
    "pdist": "_pdist_backward' is not implemented",
    "spectral_norm": "spectral_norm is part .*torch.func.jacfwd",
    "CTCLoss": "_ctc_loss_backward is not implemented",
}

QUICK = {
    "LayerNorm",
    "BatchNorm1d",
    "InstanceNorm1d",
    "weight_norm",
    "TransformerEncoderLayer",
    "MultiheadAttention fused",
    "Hardsigmoid",
    "GRU packed",
    "EmbeddingBag",
    "spectral_norm",
    "spectral_norm frozen",
    "solve",
    "MSELoss",
    "CTCLoss",
    "LinearCrossEntropyLoss",
}


def outer_loss(name: str) -> Callable[[Tensor], Tensor]:
    """Return the loss after three steps as a function of the learning rate."""
    gen = torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    if name in LAYERS:
        layer, shape = LAYERS[name]
        net = Around(layer().double(), shape)
        loss: Callable[..., Tensor] = lambda outputs, targets: (outputs - targets).square().mean()  # noqa: E731
        targets = torch.randn(STEPS, NUM, generator=gen, dtype=FLOAT)
    else:
        loss, targets = LOSSES[name]
        net, shape = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 6)).double(), (5,)
    data = [(torch.randn(NUM, *shape, generator=gen, dtype=FLOAT), target) for target in targets]
    valid, wanted = data[0][0].flip(-1) + 0.1, torch.randn(NUM, generator=gen, dtype=FLOAT)
    step = compose(loop_events)
    state = State.create(net, loss=loss, optimizer=optim.sgd(hparam("lr", RATE)), key=0, duration="9ba")
    start = step.init(state)

    def outer(rate: Tensor) -> Tensor:
        state = start.replace(hparams={"lr": rate})
        for batch in data:
            state = step(state, batch)
        outputs, _ = state.call(valid)
        return (outputs.flatten()[:NUM] - wanted).square().mean()

    return outer


def by_autograd(fn: Callable[[Tensor], Tensor], order: int) -> Callable[[Tensor], Tensor]:
    def derivative(rate: Tensor) -> Tensor:
        rate = rate.clone().requires_grad_()
        value = fn(rate)
        for left in reversed(range(order)):
            (value,) = torch.autograd.grad(value, rate, create_graph=left > 0)
        return value.detach()

    return derivative


def difference(fn: Callable[[Tensor], Tensor], rate: Tensor) -> Tensor:
    def quotient(size: Tensor) -> Tensor:
        return (fn(rate + size) - fn(rate - size)) / (2 * size)

    size = 3e-4 * rate
    return (4 * quotient(size / 2) - quotient(size)) / 3


def assert_equal(forms: dict[str, Any], rate: Tensor, expected: Tensor, rtol: float) -> set[str]:
    """Require that each form gives the expected number, or an error of torch's or ours; return the former ones."""
    found = set()
    for form, derivative in forms.items():
        try:
            value = derivative(rate)
        except RuntimeError:
            continue
        torch.testing.assert_close(value, expected, rtol=rtol, atol=1e-8, msg=lambda said, form=form: f"{form}: {said}")
        found.add(form)
    return found


func = torch.func


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*LAYERS, *LOSSES)]
)
def test_derivatives_through_steps_equal_differences(name: str) -> None:
    outer, rate = outer_loss(name), torch.tensor(RATE, dtype=FLOAT)
    expected = difference(outer, rate)
    assert expected.abs() > 1e-5
    first = {"grad": func.grad(outer), "leaves": by_autograd(outer, 1), "forward": func.jacfwd(outer)}
    found = assert_equal(first, rate, expected, 1e-5)
    refused = REFUSED.get(name, REFUSED.get(name.partition(" ")[0]))
    if refused is not None and name != "spectral_norm frozen":
        for form in ("grad", "leaves"):
            with pytest.raises(RuntimeError, match=refused):
                first[form](rate)
    else:
        assert "leaves" in found and ("grad" in found or "packed" in name)
    second = {
        "grad of grad": func.grad(func.grad(outer)),
        "hessian": func.hessian(outer),
        "leaves twice": by_autograd(outer, 2),
        "reverse over forward": func.grad(lambda rate: func.jacfwd(outer)(rate)),
        "mapped": lambda rate: func.vmap(func.grad(func.grad(outer)))(torch.stack([rate, 2 * rate]))[0],
    }
    if found:
        expected = difference(first[min(found)], rate)
        assert ("leaves twice" in assert_equal(second, rate, expected, 1e-4)) == ("leaves" in found)


# Within a step, and in methods


class PlainNorm(nn.LayerNorm):
    """Layer normalisation written out."""

    def forward(self, input: Tensor) -> Tensor:
        centred = input - input.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


def normalised(norm: type[nn.LayerNorm], dtype: torch.dtype = FLOAT) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), norm(5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0))
    return net.to(dtype)


INPUTS, TARGETS = (torch.randn(NUM, *shape, generator=GEN, dtype=FLOAT) for shape in ((3,), ()))


def make_state(norm: type[nn.LayerNorm], **options: Any) -> State:
    optimizer = optim.sgd(hparam("lr", 0.1))
    state = State.create(normalised(norm), loss=pc.losses.mse, optimizer=optimizer, key=0, duration="9ba", **options)
    return state.replace(hparams={"lr": torch.tensor(0.1, dtype=FLOAT)})


METHODS = {
    "sam": lambda: alg.sam(0.1),
    "per_example_clipping": lambda: alg.per_example_clipping(0.3),
    "gradient_clipping": lambda: alg.gradient_clipping("norm", 0.3),
}


@pytest.mark.parametrize("form", [lambda fn: func.hessian(fn), lambda fn: by_autograd(fn, 2)], ids=["func", "leaves"])
@pytest.mark.parametrize("method", METHODS)
def test_second_derivatives_through_methods_equal_those_of_plain_layers(method: str, form: Any) -> None:
    found = []
    for norm in (nn.LayerNorm, PlainNorm):
        step = compose(loop_events, [METHODS[method]()])
        start = step.init(make_state(norm))

        def outer(rate: Tensor, step: Any = step, start: State = start) -> Tensor:
            state = start.replace(hparams={"lr": rate})
            for _ in range(STEPS):
                state = step(state, (INPUTS, TARGETS))
            return (state.forward(INPUTS.flip(0)) - TARGETS).square().mean()

        outer(start.hparams["lr"])
        found.append(form(outer)(start.hparams["lr"]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=0)


def test_products_with_hessians_in_a_method_equal_those_of_plain_layers() -> None:
    found = []

    def apply(event: Any, state: State) -> State:
        del event
        along = {name: torch.ones_like(param) for name, param in state.params.items()}
        found.append(func.jvp(lambda params: state.gradient(params)[0], (state.params,), (along,))[1])
        return state

    method = pc.Algorithm("products", pc.on(pc.Event.AFTER_TRAIN_BATCH), apply)
    for norm in (nn.LayerNorm, PlainNorm):
        compose(loop_events, [method])(make_state(norm), (INPUTS, TARGETS))
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[-1][name], rtol=1e-9, atol=1e-12)


def test_a_population_and_a_single_step_use_torchs_kernels() -> None:
    seen: list[bool] = []

    class Seeing(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(differentiable.replaces_functions())
            return super().forward(input)

    step, state = compose(loop_events), make_state(Seeing)
    step(state, (INPUTS, TARGETS))
    population(step, 2)(stack_states([state, state]), (INPUTS, TARGETS))
    compose(loop_events, [alg.per_example_clipping(0.3)])(state, (INPUTS, TARGETS))
    state.forward(INPUTS)
    assert seen and not any(seen)
    func.grad(lambda rate: step(state.replace(hparams={"lr": rate}), (INPUTS, TARGETS)).params["3.bias"].sum())(
        state.hparams["lr"]
    )
    assert seen[-1]


def test_third_derivatives_by_transforms_in_a_stage_equal_those_of_plain_layers() -> None:
    def curvature(state: State) -> State:
        sums = func.grad(func.grad(lambda size: state.forward(INPUTS + size * INPUTS.cos()).sum()))
        return state.replace(loss=sums(INPUTS.new_zeros(())).square())

    step = compose([Grad(Stage("curvature", curvature)), update, advance])
    after = [step(make_state(norm), (INPUTS, TARGETS)).params for norm in (nn.LayerNorm, PlainNorm)]
    torch.testing.assert_close(after[0], after[1], rtol=1e-9, atol=1e-12)


# Derivatives that a network, a loss or a stage takes itself

NORMS: dict[str, Make] = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "BatchNorm": lambda: nn.BatchNorm1d(8),
    "InstanceNorm": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2), nn.Flatten()),
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        of(lambda x, f: f(x, x, x, need_weights=False)[0], make("MultiheadAttention", 4, 2, batch_first=True))(),
        nn.Flatten(),
    ),
}


def curvature(u: Tensor, x: Tensor) -> Tensor:
    """Return second derivatives of values, times the first ones."""
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return torch.autograd.grad(slope[:, 0].square().sum(), x, create_graph=True)[0]


class Physics(nn.Module):
    """A network of which a loss needs second derivatives by the inputs; it returns them, or what they need."""

    def __init__(self, norm: Make, returns: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.returns = nn.Sequential(nn.Linear(3, 8), norm(), nn.Tanh(), nn.Linear(8, 1)), returns

    def forward(self, x: Tensor) -> Any:
        if self.returns == "values":
            return self.net(x)
        x = x.requires_grad_()
        u = self.net(x)
        if self.returns == "third":
            return torch.autograd.grad(curvature(u, x).square().sum(), x)[0]
        return curvature(u, x) if self.returns == "curvature" else (u, x)


def physics(norm: str, place: str) -> tuple[Any, State]:
    """Return a program that minimises the curvature, computed in a place, and a state."""
    program, loss = loop_events, lambda outputs, targets: (outputs.sum(1) - targets).square().mean()
    if place == "loss":
        loss = lambda outputs, targets: (curvature(*outputs).sum(1) - targets).square().mean()  # noqa: E731

    def stage(state: State) -> State:
        x = state.inputs.requires_grad_()
        return state.replace(loss=(curvature(state.forward(x, train=True), x).sum(1) - state.targets).square().mean())

    if place == "stage":
        program = [Grad(Stage("physics", stage)), update, advance]
    returns = {"network": "curvature", "loss": "both", "stage": "values"}.get(place, place)
    net = Physics(NORMS[norm], returns).to(FLOAT)
    return program, State.create(net, loss=loss, optimizer=optim.sgd(1.0), key=0, duration="9ba")


def curvature_of(norm: str, weight: Tensor, inputs: Tensor) -> Tensor:
    """Return the curvature in training, a second derivative, which torch computes correctly."""
    net = Physics(NORMS[norm], "curvature").to(FLOAT)
    net.load_state_dict({"net.0.weight": weight}, strict=False)
    with sdpa_kernel(SDPBackend.MATH):
        return net(inputs.clone()).detach()


ONE = torch.ones((), dtype=FLOAT)


@pytest.mark.parametrize("place", ["network", "loss", "stage"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.filterwarnings("ignore:.*dropped what the network wrote")
def test_gradients_of_second_derivatives_equal_differences(norm: str, place: str) -> None:
    program, state = physics(norm, place)
    step, weight = compose(program), state.params["net.0.weight"]
    first, later = (weight - step(state, (INPUTS, TARGETS)).params["net.0.weight"] for _ in range(2))
    assert torch.equal(first, later)
    along = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=FLOAT)

    def loss(at: Tensor) -> Tensor:
        return (curvature_of(norm, weight + (at - 1) * along, INPUTS).sum(1) - TARGETS).square().mean()

    torch.testing.assert_close((first * along).sum(), difference(loss, ONE), rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm", ["LayerNorm", "attention"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_slices_and_compiled_steps_take_the_same_derivatives(norm: str, is_compiled: bool) -> None:
    program, state = physics(norm, "network")
    other = pc.compile(compose(program)) if is_compiled else compose(program, microbatches=2)
    found = [step(state, (INPUTS, TARGETS)).params for step in (compose(program), other)]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_third_derivatives_outside_of_steps_equal_differences(norm: str) -> None:
    _, state = physics(norm, "values")
    x = INPUTS.clone().requires_grad_()
    (found,) = torch.autograd.grad(curvature(state.call(x)[0], x).square().sum(), x)
    of_network, weight = physics(norm, "third")[1], state.params["net.0.weight"]
    expected = difference(lambda at: curvature_of(norm, weight, at * INPUTS).square().sum(), ONE)
    with torch.no_grad():
        inside = of_network.call(INPUTS)[0]
    for third in (found, inside, of_network.call(INPUTS)[0]):
        torch.testing.assert_close((third * INPUTS).sum(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm", NORMS)
def test_a_population_takes_the_same_derivatives_or_none(norm: str) -> None:
    program, state = physics(norm, "network")
    step, pair = population(compose(program), 2), stack_states([state, state])
    if norm not in ("GroupNorm", "attention"):
        with pytest.raises(RuntimeError, match="torch.func.grad, or step"):
            step(pair, (INPUTS, TARGETS))
        return
    found, wanted = step(pair, (INPUTS, TARGETS)).params, compose(program)(state, (INPUTS, TARGETS)).params
    torch.testing.assert_close({name: param[1] for name, param in found.items()}, wanted, rtol=1e-9, atol=1e-12)
