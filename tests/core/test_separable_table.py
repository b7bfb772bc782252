"""Tables of losses and stages that are means over examples, and of such that are not: all are told apart."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, compose, loop, loop_events, losses, optim
from purecompose.batch import map_tensors, tensors
from purecompose.testing import check_loss


N, C, T = 12, 5, 6
WEIGHTS = torch.rand(C, generator=torch.Generator().manual_seed(0))


class Case(NamedTuple):
    """A loss or stage, its network and its batches."""

    loss: Any = losses.mse
    net: Callable[[], nn.Module] = lambda: nn.Linear(4, C)
    batch: Callable[[int], Any] = lambda seed: (rand(seed, N, 4), rand(seed + 1, N, C))
    stage: Any = None
    options: Any = None


def rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(seed: int, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def labels(seed: int) -> tuple[Tensor, Tensor]:
    return rand(seed, N, 4), ints(seed, C, N)


def padded(seed: int, lengths: Any = None) -> tuple[Tensor, Tensor]:
    """Return sequences, and targets of which those beyond each length are -100."""
    lengths = ints(seed, T - 1, N) + 1 if lengths is None else lengths
    targets = ints(seed, C, N, T)
    return rand(seed, N, T, 4), targets.masked_fill(torch.arange(T) >= lengths[:, None], -100)


def equal_at_first(seed: int) -> tuple[Tensor, Tensor]:
    """Return batches whose sequences have equal lengths within the first three batches."""
    return padded(seed, torch.full((N,), 3) if seed < 3 else None)


class Changed(nn.Module):
    """A linear layer with a function of its outputs, and of its inputs before it."""

    def __init__(self, after: Callable[[Tensor], Any], before: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.linear, self.after, self.before = nn.Linear(4, C), after, before

    def forward(self, inputs: Tensor) -> Any:
        return self.after(self.linear(self.before(inputs)))


def logits_of_tokens() -> nn.Module:
    """Return a network with outputs (N, C, T)."""
    return Changed(lambda outputs: outputs.transpose(1, 2))


def time_first() -> nn.Module:
    """Return a network with outputs (T, N, C) of sequences (N, T, 4)."""
    return Changed(lambda outputs: outputs, lambda inputs: inputs.transpose(0, 1))


def spread() -> nn.Module:
    """Return a network whose outputs are distributions, objects that keep their size."""
    return Changed(lambda outputs: torch.distributions.Normal(outputs, 1.0))


class With(nn.Module):
    """Outputs of a linear layer, and a function of it and them."""

    def __init__(self, second: Callable[..., Any], width: int = C) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(4, width), second

    def forward(self, inputs: Tensor) -> Any:
        outputs = self.linear(inputs)
        return outputs, self.second(self.linear, outputs)


def balance(scores: Tensor) -> Tensor:
    """Return the load balancing loss of a mixture of experts."""
    share = scores.softmax(1)
    chosen = F.one_hot(scores.argmax(1), scores.shape[1]).to(scores)
    return scores.shape[1] * (share.mean(0) * chosen.mean(0)).sum()


def plus(weight: float, term: Callable[[Tensor], Tensor], base: Any = F.mse_loss) -> Callable[..., Tensor]:
    return lambda outputs, targets: base(outputs, targets) + weight * term(outputs)


def info_nce(outputs: Tensor, targets: Tensor) -> Tensor:
    scores = F.normalize(outputs, dim=1) @ F.normalize(targets, dim=1).T
    return F.cross_entropy(scores * 5, torch.arange(len(scores)))


def masked(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, ignore_index=-100, reduction="sum") / (targets >= 0).sum()


def in_single(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda outputs, targets: loss(outputs.float(), targets)


def with_parts(weight: float, other: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def loss(outputs: Tensor, targets: Tensor) -> Any:
        fit, term = F.mse_loss(outputs, targets), other(outputs)
        return fit + weight * term, {"fit": fit, "term": term}

    return loss


def stage_of(loss: Callable[..., Tensor]) -> Callable[[State], State]:
    def own(state: State) -> State:
        inputs, targets = state.batch
        outputs, state = state.call(inputs)
        return state.replace(loss=loss(outputs, targets))

    return own


def two_passes(
    before: Callable[[Tensor], Tensor] = lambda x: x, between: Callable[[Tensor], Tensor] = lambda o: o
) -> Callable[[State], State]:
    """Return a stage that runs the network on its own outputs, as recurrent networks and players do."""

    def stage(state: State) -> State:
        inputs, targets = state.batch
        outputs, state = state.call(before(inputs))
        outputs, state = state.call(between(outputs)[:, :4])
        return state.replace(loss=F.mse_loss(outputs, targets))

    return stage


def noise_of_batch(state: State) -> State:
    noise = pc.random.normal(state.rng("noise"), (state.num_examples, 4))
    outputs, state = state.call(state.batch[0] + noise)
    return state.replace(loss=F.mse_loss(outputs, state.batch[1]))


def with_gradient_penalty(penalty: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
    def stage(state: State) -> State:
        inputs = state.batch[0].requires_grad_()
        outputs, state = state.call(inputs)
        (found,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
        return state.replace(loss=F.mse_loss(outputs, state.batch[1]) + 0.1 * penalty(found))

    return stage


def by_functional_call(loss: Callable[..., Tensor]) -> Callable[[State], State]:
    linear = nn.Linear(4, C)

    def stage(state: State) -> State:
        outputs = torch.func.functional_call(linear, dict(state.params), (state.batch[0],))
        return state.replace(loss=loss(outputs, state.batch[1]))

    return stage


def in_both_ways(term: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
    linear = nn.Linear(4, C)

    def stage(state: State) -> State:
        outputs, state = state.call(state.batch[0])
        others = torch.func.functional_call(linear, dict(state.params), (0.9 * state.batch[0],))
        return state.replace(loss=F.mse_loss(outputs, others) + F.mse_loss(outputs, state.batch[1]) + term(others))

    return stage


def penalised(penalty: Callable[[State], Tensor]) -> Callable[[State], State]:
    def stage(state: State) -> State:
        outputs, state = state.call(state.batch[0])
        return state.replace(loss=F.mse_loss(outputs, state.batch[1]) + 1e-3 * penalty(state))

    return stage


def adapted(state: State) -> State:
    """Take a step on the batch, and return the loss after it, as meta-learning does."""
    inputs, targets = state.batch
    params = state.params
    outputs, _ = state.call(inputs)
    grads = torch.autograd.grad(F.mse_loss(outputs, targets), [*params.values()], create_graph=True)
    inner = {name: param - 0.1 * grad for (name, param), grad in zip(params.items(), grads, strict=True)}
    outputs, _ = state.replace(params=inner).call(inputs)
    return state.replace(loss=F.mse_loss(outputs, targets))


def own_denominators(count: Callable[[Tensor], Tensor], *, is_used: bool = True) -> Any:
    """Return a stage that adds two means, of which one is over some targets."""

    def stage(state: State) -> State:
        outputs, state = state.call(state.batch[0])
        chosen = F.cross_entropy(outputs, state.batch[1], ignore_index=0, reduction="sum")
        chosen = chosen / (state.denominators if is_used else count(state.batch[1]))
        return state.replace(loss=chosen + 0.1 * outputs.square().mean())

    stage.denominators = lambda state: count(state.batch[1])  # pyright: ignore[reportFunctionMemberAccess]
    return stage


def up_to_the_longest(change: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
    """Return a stage whose network has sequences that are cut to the longest of the batch."""

    def stage(state: State) -> State:
        inputs, lengths = state.batch
        longest = int(lengths.max())
        outputs, state = state.call(change(inputs[:, :longest]))
        is_inside = torch.arange(longest) < lengths[:, None]
        return state.replace(loss=((outputs.square().mean(2) * is_inside).sum(1) / lengths).mean())

    return stage


def two_views(term: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
    """Return a stage that gives the network two views of each example at once."""

    def stage(state: State) -> State:
        inputs, targets = state.batch
        outputs, state = state.call(torch.cat([inputs, 0.9 * inputs]))
        return state.replace(loss=F.mse_loss(outputs, targets.repeat(2, 1)) + 0.1 * term(outputs))

    return stage


def ranked(state: State) -> State:
    """Give the network the places of the examples in the batch, integers."""
    outputs, state = state.call(state.batch[1][:, 0].argsort().argsort())
    return state.replace(loss=F.mse_loss(outputs, state.batch[1]))


def batch_before_forward(change: Callable[[Tensor], Tensor]) -> Any:
    """Return a program's stages, of which the first changes the inputs."""

    def augment(state: State) -> State:
        return state.replace(batch=(change(state.batch[0]), state.batch[1]))

    return augment, loop.forward, loop.loss


def weeks(seed: int) -> tuple[Tensor, Tensor]:
    """Return sequences as long as the number of examples that the check takes."""
    return rand(seed, N, 7, 4), rand(seed + 1, N, 7, C)


def lengths(seed: int) -> tuple[Tensor, Tensor]:
    return rand(seed, N, T, 4), torch.arange(N) % T + 1


class Samples(nn.Module):
    """Seven outputs of each example, (7, N, C), as many as examples are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, C), nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.stack([self.dropout(self.linear(inputs)) for _ in range(7)])


def of_samples(weight: float) -> Callable[..., Tensor]:
    """Return a bound of several samples, plus a term of the batch."""
    return lambda o, t: -(t - o).square().sum(2).neg().logsumexp(0).mean() + weight * o.std(1).mean()


class Named(nn.Module):
    def forward(self, outputs: Tensor) -> dict[str, Tensor]:
        return {"a": outputs[:, :2], "b": outputs[:, 2:]}


class Learned(nn.Module):
    """A loss with a learned scale, of which the penalty is a mean or a sum over examples."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.log_scale, self.reduction = nn.Parameter(torch.zeros(C)), reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        penalty = (self.log_scale * outputs).square()
        penalty = penalty.sum() if self.reduction == "sum" else penalty.mean()
        return F.mse_loss(outputs * self.log_scale.exp(), targets) + 0.1 * penalty


def two_means(weight: float) -> Callable[..., Tensor]:
    """Return the sum of two means, of which one ignores targets."""
    return lambda outputs, targets: F.cross_entropy(outputs, targets, ignore_index=0) + weight * outputs.square().mean()


class Miscounted:
    """A masked mean that reports a wrong number of terms."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return masked(outputs, targets)

    def num_terms(self, outputs: Tensor, targets: Tensor) -> int:
        return 7


COUPLED: dict[str, Case] = {
    **{f"balance {w}": Case(plus(w, balance)) for w in (1.0, 1e-4)},
    "balance in float32": Case(in_single(plus(1e-4, balance))),
    "balance as a part": Case(with_parts(1e-4, balance)),
    "square of the mean": Case(plus(1e-4, lambda o: o.mean().square())),
    "contrastive": Case(info_nce),
    "centred": Case(lambda o, t: F.cross_entropy(o - o.mean(0), t), batch=labels),
    "root of a mean": Case(lambda o, t: F.mse_loss(o, t).sqrt()),
    "maximum": Case(lambda o, t: (o - t).abs().max()),
    "sum": Case(lambda o, t: F.mse_loss(o, t, reduction="sum")),
    "detached number": Case(lambda o, t: F.mse_loss(o, t) + (o.mean().square() * 0.5).detach()),
    "masked mean": Case(masked, logits_of_tokens, padded),
    "masked mean, later": Case(masked, logits_of_tokens, equal_at_first),
    "wrong number of terms": Case(Miscounted(), logits_of_tokens, padded),
    **{f"two means {w}": Case(two_means(w), batch=labels) for w in (1.0, 1e-4)},
    "sum for its parameter": Case(Learned("sum")),
    "scalar of the batch": Case(
        lambda o, t: F.mse_loss(o[0], t) + 1e-3 * o[1], lambda: With(lambda linear, outputs: balance(outputs))
    ),
    "sum of shared weights": Case(
        lambda o, t: F.mse_loss(o[0], t) + 1e-3 * len(t) * o[1].square().sum(),
        lambda: With(lambda linear, o: linear.weight),
    ),
    "own stage, masked, later": Case(stage=stage_of(masked), net=logits_of_tokens, batch=equal_at_first),
    "own stage, denominators of the slice": Case(
        stage=own_denominators(lambda targets: (targets > 0).sum(), is_used=False), batch=labels
    ),
    "own stage, slightly mixed inputs": Case(stage=two_passes(lambda x: x + 1e-4 * x.mean(0))),
    "own stage, outputs centred in between": Case(stage=two_passes(between=lambda o: o - o.mean(0))),
    "own stage, noise of the batch": Case(stage=noise_of_batch),
    "own stage, penalty of the batch's gradient": Case(stage=with_gradient_penalty(lambda found: found.norm())),
    "own stage, weights penalised per example": Case(
        stage=penalised(lambda state: state.num_examples * state.params["weight"].square().sum())
    ),
    "own stage, adapted to the batch": Case(stage=adapted),
    "own stage, two views": Case(stage=two_views(lambda o: o.std(0).mean())),
    "own stage, cut to the longest and centred": Case(
        stage=up_to_the_longest(lambda inputs: inputs - inputs.mean(0)), batch=lengths
    ),
    "own stage, places in the batch": Case(stage=ranked, net=lambda: nn.Embedding(N, C)),
    "inputs normalised before forward": Case(stage=batch_before_forward(lambda x: x / x.std(0))),
    "inputs normalised before a declared loss": Case(
        losses.over_batch(info_nce), stage=batch_before_forward(lambda x: x / x.std(0))
    ),
    "time first": Case(
        lambda o, t: F.mse_loss(o.transpose(0, 1), t) + 0.1 * o.std(1).mean(), net=time_first, batch=weeks
    ),
    "distributions": Case(lambda o, t: -o.log_prob(t).mean() + 0.1 * o.mean.std(0).mean(), net=spread),
    "own stage, network called as a function": Case(stage=by_functional_call(plus(1e-4, balance))),
    "own stage, network called in both ways": Case(stage=in_both_ways(lambda o: 1e-4 * o.std(0).mean())),
    "samples": Case(of_samples(1e-2), Samples),
}


class Counted:
    """A masked mean that reports its number of terms."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return masked(outputs, targets)

    def num_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets >= 0).sum()


class Weighted:
    """A mean weighted by a constant in single precision."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights = WEIGHTS[targets]
        return (F.cross_entropy(outputs, targets, reduction="none") * weights).sum() / weights.sum()

    def num_terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return WEIGHTS[targets].sum()


class TwoMeans:
    """The sum of two means, by their denominators."""

    def denominators(self, targets: Tensor) -> Any:
        return {"chosen": (targets > 0).sum(), "all": len(targets)}

    def __call__(self, outputs: Tensor, targets: Tensor, denominators: Any) -> Any:
        chosen = F.cross_entropy(outputs, targets, ignore_index=0, reduction="sum") / denominators["chosen"]
        size = outputs.square().sum() / denominators["all"]
        return chosen + 0.1 * size, {"chosen": chosen, "size": size}


def own_counted() -> Any:
    stage = stage_of(masked)
    stage.num_terms = lambda state: (state.batch[1] >= 0).sum()  # pyright: ignore[reportFunctionMemberAccess]
    return stage


def noisy(state: State) -> State:
    noise = pc.random.normal(state.example_rng("noise"), (state.num_examples, 4))
    outputs, state = state.call(state.batch[0] + 0.1 * noise)
    return state.replace(loss=F.mse_loss(outputs, state.batch[1]))


def vae(outputs: Tensor, targets: Tensor) -> Any:
    mean, log_var = outputs[:, :2], outputs[:, 2:4].clamp(-3, 3)
    fit, kl = (mean - targets[:, :2]).square().sum(1).mean(), (mean**2 + log_var.exp() - log_var).sum(1).mean()
    return fit + 0.1 * kl, {"kl": kl, "largest": outputs.max(), "spread": outputs.std().detach()}


def half(dtype: torch.dtype, loss: Callable[..., Tensor]) -> Case:
    return Case(loss, lambda: nn.Linear(4, C).to(dtype), lambda seed: (rand(seed, N, 4).to(dtype), ints(seed, C, N)))


MLP = functools.partial(lambda *middle: nn.Sequential(nn.Linear(4, 8), *middle, nn.ReLU(), nn.Linear(8, C)))

SEPARABLE: dict[str, Case] = {
    "mse": Case(),
    "cross entropy": Case(losses.cross_entropy, batch=labels),
    "class weights": Case(losses.CrossEntropy(weight=list(range(1, C + 1))), batch=labels),
    "closure weights": Case(Weighted(), batch=labels),
    "tokens": Case(losses.cross_entropy, logits_of_tokens, padded),
    "tokens, counted": Case(Counted(), logits_of_tokens, padded),
    "tokens, later": Case(Counted(), logits_of_tokens, equal_at_first),
    "tokens, mean of each example": Case(
        lambda o, t: (F.cross_entropy(o, t, reduction="none").sum(1) / (t >= 0).sum(1).clamp(min=1)).mean(),
        logits_of_tokens,
        padded,
    ),
    "tokens in float32": Case(in_single(Counted()), logits_of_tokens, lambda seed: padded(seed, torch.full((N,), T))),
    "stable by the batch's maximum": Case(
        lambda o, t: ((o - o.max()).exp().sum(1).log() + o.max() - o.gather(1, t[:, None])[:, 0]).mean(), batch=labels
    ),
    "difference of large numbers": Case(lambda o, t: (1e4 + o[:, 0]).mean() - (1e4 + o[:, 1]).mean()),
    "partly in float32": Case(lambda o, t: F.mse_loss(o, t) + 0.1 * o.float().log_softmax(1).square().mean()),
    "parts that are logged": Case(vae),
    "two means": Case(TwoMeans(), batch=labels),
    "tasks": Case(
        lambda o, t: F.mse_loss(o["a"], t["a"]) + 0.1 * F.cross_entropy(o["b"], t["b"]),
        lambda: nn.Sequential(nn.Linear(4, C), Named()),
        lambda seed: (rand(seed, N, 4), {"a": rand(seed, N, 2), "b": ints(seed, 3, N)}),
    ),
    "learned scale": Case(Learned("mean")),
    "bfloat16": half(torch.bfloat16, losses.cross_entropy),
    "bfloat16 in its precision": half(torch.bfloat16, lambda o, t: F.cross_entropy(o.bfloat16(), t)),
    "autocast": Case(losses.cross_entropy, batch=labels, options={"precision": "bf16"}),
    "batch norm in the network": Case(net=lambda: MLP(nn.BatchNorm1d(8))),
    "dropout": Case(net=lambda: MLP(nn.Dropout(0.3))),
    "shared weights": Case(
        lambda o, t: F.mse_loss(o[0], t) + 1e-3 * o[1].square().sum(), lambda: With(lambda linear, o: linear.weight)
    ),
    "shared weights, as many as examples are taken": Case(
        lambda o, t: F.mse_loss(o[0][:, :C], t) + 1e-3 * o[1].norm(),
        lambda: With(lambda linear, outputs: linear.weight, 7),
    ),
    "shared negatives": Case(
        lambda o, t: F.mse_loss(o[0], t) + (o[0] @ o[1]).logsumexp(1).mean(),
        lambda: With(lambda linear, o: linear.weight),
    ),
    "mean of the batch": Case(
        lambda o, t: F.mse_loss(o[0], t) + 0.01 * o[1], lambda: With(lambda linear, o: o.square().mean())
    ),
    "own stage, counted": Case(stage=own_counted(), net=logits_of_tokens, batch=padded),
    "own stage, two means": Case(stage=own_denominators(lambda targets: (targets > 0).sum()), batch=labels),
    "own stage, noise": Case(stage=noisy),
    "own stage, two passes": Case(stage=two_passes()),
    "own stage, gradient penalty": Case(
        stage=with_gradient_penalty(lambda found: (found.norm(dim=1) - 1).square().mean())
    ),
    "own stage, network as a function": Case(stage=by_functional_call(F.mse_loss)),
    "own stage, network called in both ways": Case(stage=in_both_ways(lambda o: o.square().mean())),
    "samples": Case(of_samples(0), Samples),
    "own stage, weight penalty": Case(stage=penalised(lambda state: state.params["weight"].square().sum())),
    "own stage, mean of the batch beside rows": Case(
        stage=stage_of(lambda o, t: F.mse_loss(o[0], t) + 0.01 * o[1]),
        net=lambda: With(lambda linear, o: o.square().mean()),
    ),
    "own stage, two views with dropout": Case(
        stage=two_views(lambda o: o.square().mean()), net=lambda: MLP(nn.Dropout(0.3))
    ),
    "own stage, cut to the longest": Case(stage=up_to_the_longest(lambda inputs: inputs), batch=lengths),
    "inputs changed before forward": Case(stage=batch_before_forward(lambda x: x - x.mean(1, keepdim=True))),
    "time first": Case(
        lambda o, t: F.mse_loss(o.transpose(0, 1), t) + 0.1 * o.diff(dim=0).square().mean(), time_first, weeks
    ),
    "distributions": Case(lambda o, t: -o.log_prob(t).mean(), spread),
    "own stage, declared": Case(stage=losses.over_batch(stage_of(info_nce))),
    "declared": Case(losses.over_batch(info_nce)),
    "nothing counts": Case(losses.CrossEntropy(), batch=lambda seed: (rand(seed, N, 4), torch.full((N,), -100))),
    "one example counts": Case(
        losses.CrossEntropy(), batch=lambda seed: (rand(seed, N, 4), torch.arange(N) // 11 * 103 - 100)
    ),
    "perfect": Case(batch=lambda seed: (torch.zeros(N, 4), torch.zeros(N, C)), net=lambda: nn.Linear(4, C, bias=False)),
    "complex": Case(lambda o, t: (torch.complex(o[:, :2], o[:, 2:4]).abs() - 1).square().mean()),
}


def take_steps(case: Case, num: int = 4) -> None:
    torch.manual_seed(0)
    state = State.create(case.net(), loss=case.loss, optimizer=optim.sgd(0.01), key=0, **(case.options or {}))
    program: Any = loop_events
    if case.stage is not None:
        stages = case.stage if isinstance(case.stage, tuple) else (case.stage,)
        program = (loop.Microbatches(loop.Grad(*stages)), loop.update, loop.advance)
    step = compose(program, microbatches=3)
    for seed in range(num):
        state = step(state, case.batch(seed))


@pytest.mark.parametrize("name", COUPLED)
def test_none_that_is_coupled_or_summed_passes(name: str) -> None:
    mixed = r"examples together, but|depend on the other examples of the batch, .* stages before it"
    with pytest.raises((ValueError, UserWarning), match=mixed):
        take_steps(COUPLED[name])


@pytest.mark.parametrize("name", SEPARABLE)
def test_none_that_is_a_mean_over_examples_is_refused(name: str) -> None:
    take_steps(SEPARABLE[name])


def check_alone(case: Case) -> bool:
    """Check a loss with outputs of its network of several sizes, without a step; return whether all were compared."""
    torch.manual_seed(0)
    net, (inputs, targets) = case.net(), case.batch(5)
    with torch.no_grad():
        outputs = net(inputs)
    return all(
        check_loss(case.loss, map_tensors(lambda one, scale=scale: (one * scale).to(one.dtype), outputs), targets)
        for scale in (1.0, 0.7, 0.5, 0.3)
    )


def can_be_alone(case: Case) -> bool:
    """Return whether a loss depends on outputs with a row for each example, and on nothing else."""
    if (
        case.stage is not None or case.net is spread or case is COUPLED["sum for its parameter"]
    ):  # without gradient at first
        return False
    with torch.no_grad():
        return all(one.shape[:1] == (N,) for one in tensors(case.net()(case.batch(5)[0])))


@pytest.mark.parametrize("name", [name for name, case in COUPLED.items() if can_be_alone(case)])
def test_a_coupled_loss_is_found_by_itself(name: str) -> None:
    with pytest.raises(ValueError, match="examples together, but"):
        check_alone(COUPLED[name])


@pytest.mark.parametrize("name", [name for name, case in SEPARABLE.items() if can_be_alone(case)])
def test_a_mean_over_examples_is_accepted_by_itself(name: str) -> None:
    assert check_alone(SEPARABLE[name]) == (name not in ("declared", "nothing counts"))
