"""The laws of numbers and parts: their reports, the smallest errors they detect, and no false alarms."""

from typing import Any

import pytest
import torch
from torch import nn

from purecompose import Algorithm, Event, algorithms as alg, between, compose, loop_events, on, random
from purecompose.core.algorithm import identity
from purecompose.testing.case import Case
from purecompose.testing.law import LawViolation
from purecompose.testing.suite.numbers import gradient_exact, vmap_agrees
from purecompose.testing.suite.parts import microbatches_agree, ranks_agree
from purecompose.testing.tasks import TASKS, Task, make_task


LAWS = (microbatches_agree, ranks_agree, vmap_agrees, gradient_exact)


def at(event, fn, name="subject", **options):
    """Return an algorithm that applies `fn` at one event."""
    return Algorithm(name, on(event), lambda _, state: fn(state), **options)


def scaled_grads(factor):
    """Return an algorithm that multiplies the gradients by `factor(state)`."""
    return at(
        Event.AFTER_TRAIN_BATCH,
        lambda state: state.replace(grads={key: factor(state) * grad for key, grad in state.grads.items()}),
    )


def scaled_params(factor):
    """Return an algorithm that multiplies the params by `factor(state)` after the update."""
    return at(
        Event.BATCH_END,
        lambda state: state.replace(params={key: factor(state) * param for key, param in state.params.items()}),
    )


def values_of(violation: LawViolation) -> Any:
    """Return the two values that a violation shows."""
    first, second = violation.values.values()
    return first, second


# What is not an algorithm's fault


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_neutral_settings_are_exempt_and_inactive_algorithms_are_not_judged(law):
    assert law.exempt(alg.mixup(0)) == "its settings are neutral: it never acts"
    assert law.exempt(alg.mixup(0.2)) is None
    assert law(identity(), Case()) is False
    late = Algorithm("late", on(Event.BATCH_START) & between(0.9, 1), lambda event, state: state)
    assert law(late, Case(batches_per_epoch=3, epochs=9)) is False
    assert law(late, Case(batches_per_epoch=1, epochs=10, start=9)) is True


@pytest.mark.parametrize("law", [vmap_agrees, gradient_exact], ids=repr)
def test_host_algorithms_may_read_values(law):
    reading = at(Event.BATCH_START, lambda state: state, host=True)
    assert "reads values" in law.exempt(reading)
    assert microbatches_agree.exempt(reading) is None


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_an_error_of_the_plain_step_is_not_a_violation(law):
    def fail(state):
        raise KeyError("a mistake of another kind")

    with pytest.raises(KeyError, match="another kind"):
        law(at(Event.BATCH_START, fail), Case())


class Mixing(nn.Module):
    """A network for which no law of numbers holds: its outputs use the whole batch, a value, and no derivative."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs):
        factor = inputs.sum().item() if inputs.sum() > 0 else 1.0
        return factor * self.layer(inputs) * self.layer.weight.sum().detach()


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_the_network_is_not_the_algorithms_fault(law):
    task = Task("mixing", lambda seed: Mixing(), TASKS["vectors"].batch)
    assert law(alg.label_smoothing(0.1), Case(task=task)) is False


# float64

LAWS_IN_FLOAT32 = [(microbatches_agree, True), (ranks_agree, True), (vmap_agrees, True), (gradient_exact, False)]


@pytest.mark.parametrize("law, has_verdict", LAWS_IN_FLOAT32)
def test_an_algorithm_that_takes_no_float64_is_tried_in_float32(law, has_verdict):
    def check(state):
        assert state.inputs.dtype is torch.float32
        return state

    assert law(at(Event.BATCH_START, check), Case()) is has_verdict


def test_a_broken_law_is_found_in_float32_too():
    def check(state):
        assert state.inputs.dtype is torch.float32
        return state.replace(inputs=state.inputs - state.inputs.mean(0))

    with pytest.raises(LawViolation, match="with 2 microbatches"):
        microbatches_agree(at(Event.BEFORE_FORWARD, check), Case())


# vmap_agrees


def test_torchs_own_error_is_the_cause():
    with pytest.raises(LawViolation, match="calling .item") as caught:
        vmap_agrees(scaled_grads(lambda state: state.loss.item()), Case())
    assert "vmap" in str(caught.value.__cause__)


def test_draws_and_integers_of_members_agree():
    def draw(state):
        noise = random.normal(state.rng("subject"), tuple(state.inputs.shape)).to(state.inputs)
        metrics = {"index": random.randint(state.rng("subject"), (3,), 0, 1000)}
        return state.replace(inputs=state.inputs + noise, metrics={**state.metrics, **metrics})

    for seed in range(4):
        assert vmap_agrees(at(Event.AFTER_DATALOADER, draw), Case(seed=seed))


# gradient_exact


@pytest.mark.parametrize(
    "factor",
    [
        pytest.param(lambda state: 1 / (1 + state.loss), id="smooth"),
        pytest.param(lambda state: torch.where(state.loss > 0, state.loss, 1), id="chosen"),
        pytest.param(lambda state: state.params["0.weight"].square().sum().add(1e-6).sqrt(), id="norm"),
    ],
)
def test_lawful_factors_of_the_gradients_pass(factor):
    for seed in range(3):
        assert gradient_exact(scaled_grads(factor), Case(seed=seed))


def lr_kink(state):
    """Return a factor with a kink at the initial rate, 0.1 in float32, where torch takes a one-sided derivative."""
    return 1 - 0.1 * (state.hparams["lr"] - torch.tensor(0.1)).relu()


def lr_jump(state):
    return torch.where(state.hparams["lr"] > torch.tensor(0.1), 0.9, 1.0)


def lr_kink_beside(state):
    return 1 - 0.1 * (state.hparams["lr"] - 2e-6 - torch.tensor(0.1)).relu()


def lr_in_float32(state):
    return (1 + state.hparams["lr"].float()).double()


@pytest.mark.parametrize("factor", [lr_kink, lr_jump, lr_kink_beside, lr_in_float32], ids=lambda f: f.__name__)
def test_gradients_that_finite_differences_cannot_resolve_are_not_judged(factor):
    assert gradient_exact(scaled_params(factor), Case()) is False


def test_a_small_error_is_seen():
    slightly = scaled_params(lambda state: 1 - 1e-3 * state.params["0.weight"].detach().square().sum())
    with pytest.raises(LawViolation) as caught:
        gradient_exact(slightly, Case())
    first, second = values_of(caught.value)
    assert abs(first / second - 1) < 0.1


def test_the_leaf_of_a_wrong_gradient_is_named():
    def decay(state):
        bias = state.params["3.bias"]
        return state.replace(params={**state.params, "3.bias": bias - 0.1 * bias.detach()})

    # With rate 0 the loss only depends on the first params, so the rate's gradient is right.
    def still(state):
        return state.replace(grads={key: 0 * grad for key, grad in state.grads.items()})

    def apply(event, state):
        return decay(state) if event is Event.BATCH_END else still(state)

    with pytest.raises(LawViolation) as caught:
        gradient_exact(Algorithm("subject", on(Event.AFTER_TRAIN_BATCH, Event.BATCH_END), apply), Case())
    assert caught.value.path == "params['3.bias']"
    assert caught.value.event is Event.BATCH_END
    by_grad, by_difference = values_of(caught.value)
    assert by_difference == pytest.approx(0.9**2 * by_grad, rel=1e-6)


def test_a_loss_that_is_not_finite_is_not_judged():
    assert gradient_exact(scaled_params(lambda state: float("inf")), Case()) is False


def test_an_error_only_under_grad_breaks_the_law():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * ctx.saved_tensors[0] * grad

    squared = scaled_grads(lambda state: Square.apply(state.loss))
    compose(loop_events, [squared])(Case().state(), Case().batch(0))
    with pytest.raises(LawViolation, match="raised only where a gradient is taken through the step") as caught:
        gradient_exact(squared, Case())
    assert caught.value.event is Event.AFTER_TRAIN_BATCH


# Half precision


def wrong_by(inputs_of, *, is_for_half=True):
    """Return an algorithm that replaces inputs at BEFORE_FORWARD, either in half precision or otherwise."""
    return at(
        Event.BEFORE_FORWARD,
        lambda s: s.replace(inputs=inputs_of(s.inputs)) if (s.context.precision == "bf16") == is_for_half else s,
    )


@pytest.mark.parametrize("kind", ["vectors", "images"])
def test_slices_are_compared_in_the_precision_of_the_task(kind):
    half, full = (Case(make_task(kind, precision=precision), microbatches=2) for precision in ("bf16", "fp32"))
    centred = wrong_by(lambda inputs: inputs - inputs.mean(0))
    with pytest.raises(LawViolation) as caught:
        microbatches_agree(centred, half)
    assert caught.value.path.startswith("grads")
    assert microbatches_agree(centred, full) is True
    assert microbatches_agree(wrong_by(lambda inputs: 2 * inputs), half) is True


def test_mapped_steps_are_compared_in_the_precision_of_the_task():
    case = Case(make_task("vectors", precision="bf16"))
    assert vmap_agrees(wrong_by(lambda inputs: 2 * inputs), case) is True
    with pytest.raises(LawViolation, match="raised only under vmap"):
        vmap_agrees(wrong_by(lambda inputs: inputs * float(inputs.mean() > 0)), case)


def test_laws_undecidable_in_half_precision_are_skipped_with_the_reason():
    tokens, full = TASKS["bf16_tokens"], TASKS["tokens"]
    assert gradient_exact.unsuited(tokens) == "differences are lost in the rounding of half precision"
    assert gradient_exact.unsuited(full) is None
    assert gradient_exact(scaled_grads(lambda state: 0.5), Case(tokens)) is False


def test_a_choice_that_half_precision_flips_under_vmap_is_not_judged():
    """It ranks examples by losses, two of which differ by no more than the rounding under vmap."""
    case = Case(TASKS["bf16_tokens"], batch_size=6, num_batches=3, batches_per_epoch=1, epochs=7)
    assert vmap_agrees("selective_backprop(0, 1.0, full_every=0)", case) is True
