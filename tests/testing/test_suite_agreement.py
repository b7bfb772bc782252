"""The laws of agreement: what they compare and report, the smallest errors they detect, and no false alarms."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose import Algorithm, Event, State, algorithms as alg, compose, loop_events, on
from purecompose.testing.case import Case
from purecompose.testing.law import LawViolation, NotJudged
from purecompose.testing.suite import agreement, compiled_agrees
from purecompose.testing.suite.agreement import microbatches_agree, ranks_agree, shards_agree, stays_finite, vmap_agrees
from purecompose.testing.suite.loss import gradient_exact
from purecompose.testing.tasks import TASKS, Task, make_task
from tests.helpers import changing
from tests.testing.mutants import MUTANTS


LAWS = (microbatches_agree, ranks_agree, vmap_agrees, gradient_exact)


def at(events, fn, name="subject", **options):
    """Return an algorithm that applies `fn` at an event, or where a predicate holds."""
    match = on(events) if isinstance(events, Event) else events
    return Algorithm(name, match, lambda _, state: fn(state), **options)


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


# gradient_exact


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


def test_a_choice_that_half_precision_flips_under_vmap_is_not_judged():
    """It ranks examples by losses, two of which differ by no more than the rounding under vmap."""
    case = Case(TASKS["bf16_tokens"], batch_size=6, num_batches=3, batches_per_epoch=1, epochs=7)
    assert vmap_agrees("selective_backprop(0, 1.0, full_every=0)", case) is True


# microbatches_agree


def test_an_error_only_in_slices_breaks_the_law():
    weights = torch.linspace(0, 1, 4)[:, None]
    weighted = changing("subject", Event.BEFORE_FORWARD, lambda state: state.replace(inputs=state.inputs * weights))
    with pytest.raises(LawViolation, match="raised only with 2 microbatches: RuntimeError") as caught:
        microbatches_agree(weighted, Case(batch_size=4))
    assert caught.value.event is Event.BEFORE_FORWARD
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_metrics_that_are_single_numbers_agree_and_others_may_differ():
    def report(state):
        return state.replace(metrics={**state.metrics, "loss": state.loss, "size": state.outputs[:1]})

    assert microbatches_agree(changing("subject", Event.AFTER_LOSS, report), Case())

    def square(state):
        return state.replace(metrics={**state.metrics, "square": state.loss**2})

    with pytest.raises(LawViolation) as caught:
        microbatches_agree(changing("subject", Event.AFTER_LOSS, square), Case())
    assert caught.value.path == "metrics['square']"


# ranks_agree


def test_processes_that_wait_for_each_other_are_reported():
    def report(state):
        own = {} if state.first_example == 0 else {"later": state.loss}
        return state.replace(metrics={**state.metrics, **own})

    with pytest.raises(LawViolation, match="raised only with 2 processes: RuntimeError: processes wait"):
        ranks_agree(changing("subject", Event.AFTER_LOSS, report), Case())


# shards_agree


def sizes_of_rows():
    """Return an algorithm that reports a sum over the rows that a process has, at EPOCH_END."""

    def report(state):
        weight = state.params["0.weight"]
        own = weight.to_local() if hasattr(weight, "to_local") else weight
        return state.replace(metrics={**state.metrics, "size": own.abs().sum()})

    return changing("subject", Event.EPOCH_END, report)


def fails_apart():
    """Return an algorithm that raises an error if parameters are divided."""

    def check(state):
        if hasattr(state.params["0.weight"], "to_local"):
            raise ValueError("too many values to unpack")
        return state

    return changing("subject", Event.BATCH_END, check)


def evaluates_norms():
    """Return an algorithm that asserts that BatchNorm uses running statistics only if microbatches cut the batch."""

    def check(state):
        assert state.model.evaluated_parts in ((), ("1",))
        return state.replace(metrics={**state.metrics, "frozen": state.loss * 0 + len(state.model.evaluated_parts)})

    return changing("subject", Event.BATCH_END, check)


def test_what_happens_between_steps_is_compared_after_each_batch() -> None:
    subject = f"{__name__}:sizes_of_rows"
    assert shards_agree(subject, Case(batches_per_epoch=3, num_batches=2)) is False
    with pytest.raises(LawViolation) as caught:
        shards_agree(subject, Case(batches_per_epoch=3, num_batches=3))
    assert (caught.value.event, caught.value.path) == (Event.EPOCH_END, "metrics['size']")


def test_what_cannot_be_divided_by_layer_or_sent_to_other_processes_is_not_judged() -> None:
    by_layer, by_step = Case(seed=1), Case(seed=2)
    with pytest.raises(NotJudged, match="use gather="):
        shards_agree("gradient_noise_scale()", by_layer)
    assert shards_agree("gradient_noise_scale()", by_step) is True
    with pytest.raises(NotJudged, match="other processes need a text"):
        shards_agree(sizes_of_rows(), Case(batches_per_epoch=1))


def test_an_error_that_is_not_a_refusal_breaks_the_law() -> None:
    with pytest.raises(LawViolation, match="raised only with 4 processes .*too many values"):
        shards_agree(f"{__name__}:fails_apart", Case(seed=1))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_batch_norm_sees_the_whole_batch_unless_microbatches_cut_it(microbatches: int) -> None:
    case = Case(TASKS["images"], batch_size=4, microbatches=microbatches)
    assert shards_agree(f"{__name__}:evaluates_norms", case) is True


MUTANT = {mutant.name: mutant for mutant in MUTANTS}


def scaled(state: State, factor: Any) -> State:
    return state.replace(params={name: factor * param for name, param in state.params.items()})


def by_clock(state):
    return scaled(state, 1 - 0.1 * state.clock.elapsed)


def by_value(state):
    return scaled(state, 0.99 if state.params["0.weight"].sum().item() > 0 else 0.9)


class Reading(nn.Module):
    """A network that cannot be traced."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.layer(inputs) * (2.0 if inputs.sum() > 0 else 1.0)


def test_a_network_that_cannot_be_traced_is_not_the_algorithms_fault():
    task = Task("reading", lambda seed: Reading(), TASKS["vectors"].batch)
    assert compiled_agrees(alg.label_smoothing(0.1), Case(task=task)) is False


def test_untraceable_code_is_reported_with_its_event_and_torchs_reason():
    with pytest.raises(LawViolation, match="raised only where the step is compiled: TraceError") as caught:
        compiled_agrees(at(Event.AFTER_TRAIN_BATCH, by_value), Case())
    assert caught.value.event is Event.AFTER_TRAIN_BATCH
    assert isinstance(caught.value.__cause__, pc.errors.TraceError)
    assert "test_suite_agreement.py" in caught.value.what


def test_integers_agree_exactly():
    calls = []

    def report(state):
        calls.append(state)
        value = torch.full((), 1000 + len(calls), dtype=torch.int64)
        return state.replace(metrics={**state.metrics, "value": value})

    with pytest.raises(LawViolation) as caught:
        compiled_agrees(at(Event.BATCH_END, report), Case())
    assert caught.value.path == "metrics['value']"


def test_values_left_in_a_closure_by_an_earlier_run_are_removed():
    cached = MUTANT["weights_in_a_cache"]
    algorithm = cached()
    case = Case(task=TASKS["images"])
    case.step(algorithm)(case.state(), case.batch(0))  # fills the cache with plain tensors
    assert compiled_agrees(algorithm, case) is True
    with pytest.raises(LawViolation):
        compiled_agrees(cached.source, case)


# Choices on the edge


def test_a_choice_that_rounding_flips_ends_the_comparison(monkeypatch):
    """The compiled run gets rounded params; choosing between them and the exact ones is not a fault."""
    plain = agreement.compile_step

    def rounding(step, **options):
        inner = plain(step, **options)

        class Rounding:
            init = inner.init

            def __call__(self, state, batch):
                moved = {name: param * (1 + 1e-12) for name, param in state.params.items()}
                return inner(state.replace(params=moved), batch)

        return Rounding()

    monkeypatch.setattr(agreement, "compile_step", rounding)
    first = Case().state(dtype=torch.float64).params["0.weight"]

    def tipped(state):
        is_above = (state.params["0.weight"].to(first) > first).any()
        return scaled(state, torch.where(is_above, 0.9, 1.0).to(first))

    # At the very first step the params are where the choice flips.
    assert compiled_agrees(at(Event.BATCH_START, tipped), Case()) is False
    assert compiled_agrees(at(Event.BATCH_END, by_clock), Case()) is True


def decay_by(factor: float) -> Algorithm:
    def apply(event: Event, state: State) -> State:
        del event
        return state.replace(params={name: factor * param for name, param in state.params.items()})

    return Algorithm("decay", on(Event.BATCH_END), apply)


def test_a_task_that_is_not_finite_by_itself_is_not_a_violation() -> None:
    plain = TASKS["vectors"]

    def batch(seed: int, size: int):
        inputs, targets = plain.make_batch(seed, size)
        return inputs * float("nan"), targets

    hopeless = dataclasses.replace(plain, name="hopeless", batch=batch)
    assert stays_finite(decay_by(0.99), Case(hopeless)) is True
