"""Loss scaling against torch's GradScaler, and with slices, clipping, second gradients and populations."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import purecompose as pc
from purecompose import Algorithm, Event, State, Trait, compose, loop_events, losses, on, optim, tree
from purecompose.algorithms._overflow import LossScale, loss_scaling, next_scale
from tests.algorithms import method_helpers as helpers


BATCH = helpers.make_batch()
SCHEDULE = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}


def broken(batch: tuple[Tensor, Tensor] = BATCH, value: float = torch.inf, row: int = 0) -> tuple[Tensor, Tensor]:
    """Return a batch with one example whose loss and gradients are not finite."""
    inputs = batch[0].clone()
    inputs[row, 0] = value
    return inputs, batch[1]


def made(*algorithms: Algorithm, **options):
    return compose(loop_events, algorithms, **options)


def momentum_state(net: nn.Module | None = None, **options) -> State:
    return helpers.make_state(net, **options).replace(optimizer=optim.sgd(0.3, momentum=0.9))


def started(step, state: State) -> State:
    """Return the initialised state, with the optimizer's state for momentum."""
    return step.init(state.replace(opt_state=state.optimizer.init(state.params)))


def scale_of(state: State) -> float:
    return state.slots["loss_scaling"].scale.item()


def edit(name: str, fn, event: Event = Event.AFTER_TRAIN_BATCH, **options) -> Algorithm:
    return Algorithm(name, on(event), lambda _, state: fn(state), **options)


# The schedule


@given(
    outcomes=st.lists(st.booleans(), max_size=30),
    growth=st.sampled_from([2.0, 4.0, 1.5]),
    backoff=st.sampled_from([0.5, 0.25]),
    interval=st.integers(1, 5),
)
def test_scales_are_those_of_grad_scaler(outcomes, growth, backoff, interval):
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**10, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    weight = nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight], lr=0.0)
    scale, good_steps = torch.tensor(2.0**10), torch.tensor(0, dtype=torch.int32)
    for is_good in outcomes:
        scaler.scale((weight * (1.0 if is_good else torch.inf)).sum()).backward()
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()
        scale, good_steps = next_scale(
            scale,
            good_steps,
            torch.tensor(is_good),
            growth_factor=growth,
            backoff_factor=backoff,
            growth_interval=interval,
        )
        assert scale.item() == scaler.get_scale()
        assert (scale.dtype, good_steps.dtype) == (torch.float32, torch.int32)


def test_the_scale_stays_finite_and_has_a_finite_inverse():
    good, bad, count = torch.tensor(True), torch.tensor(False), torch.tensor(0)
    highest = torch.tensor(2.0**127)
    assert next_scale(highest, count, good, growth_interval=1) == (highest, 0)
    low = torch.tensor(2.0**-125)
    for _ in range(5):
        low, _ = next_scale(low, count, bad)
    assert low.item() == 2.0**-126 and torch.isfinite(1 / low)


def test_training_equals_grad_scalers():
    """Every third batch is broken; scales, weights and momentum equal those of torch's loop."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    step = made(loss_scaling(2.0**8, **{**SCHEDULE, "growth_interval": 2}))
    state = started(step, momentum_state(net))
    sgd = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, **{**SCHEDULE, "growth_interval": 2})
    for number in range(9):
        inputs, targets = batch = broken() if number % 3 == 2 else BATCH
        used = scaler.get_scale()
        scaler.scale(nn.functional.cross_entropy(net(inputs), targets)).backward()
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()
        state = step(state, batch)
        assert (state.metrics["loss_scaling/scale"].item(), scale_of(state)) == (used, scaler.get_scale())
        assert state.metrics["loss_scaling/skipped"].item() == (number % 3 == 2)
        for name, param in net.named_parameters():
            torch.testing.assert_close(state.params[name], param.detach(), rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(state.opt_state["momentum"][name], sgd.state[param]["momentum_buffer"])


# A single step


@pytest.mark.parametrize("microbatches", [1, 3])
def test_powers_of_two_change_no_bit(microbatches):
    plain, scaled = made(microbatches=microbatches), made(loss_scaling(**SCHEDULE), microbatches=microbatches)
    first, second = started(plain, momentum_state()), started(scaled, momentum_state())
    for seed in range(5):
        batch = BATCH[0] * (seed + 1), BATCH[1]
        first, second = plain(first, batch), scaled(second, batch)
        assert tree.equal((first.params, first.opt_state, first.loss), (second.params, second.opt_state, second.loss))
    assert scale_of(second) == 2.0**17


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_step_that_overflows_only_changes_the_time_and_the_scale(value):
    step = made(loss_scaling(**SCHEDULE))
    before = step(started(step, momentum_state()), BATCH)
    after = step(before, broken(value=value))
    assert tree.equal((before.params, before.opt_state), (after.params, after.opt_state))
    assert after.timestamp.batch == 2
    expected = LossScale(
        torch.tensor(2.0**15), torch.tensor(0, dtype=torch.int32), torch.tensor(True), torch.tensor(False)
    )
    assert tree.equal(after.slots["loss_scaling"], expected)


def test_batch_norm_counts_a_skipped_batch_as_with_torch():
    net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 4))
    step = made(loss_scaling(2.0**127))  # a regular batch, with a scale that is far too large
    before = step.init(helpers.make_state(net, loss=lambda o, t, reduction="mean": 1e3 * losses.cross_entropy(o, t)))
    after = step(before, BATCH)
    assert after.metrics["loss_scaling/skipped"].item() == 1 and tree.equal(before.params, after.params)
    assert after.buffers["1.num_batches_tracked"].item() == 1
    assert after.loss is not None and after.loss.isfinite()  # the scaled one was not


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_loss_that_others_see_and_edit_is_scaled_once_all_is_added(place):
    """At any place in the list: a term added at BEFORE_BACKWARD is scaled, and AFTER_BACKWARD sees true gradients."""
    seen = {}

    def penalise(state: State) -> State:
        assert state.loss is not None
        return state.replace(loss=state.loss + sum(p.square().sum() for p in state.params.values()))

    def look(state: State) -> State:
        seen[len(seen)] = dict(state.grads or {}), state.loss
        return state

    others = [edit("penalty", penalise, Event.BEFORE_BACKWARD), edit("look", look, Event.AFTER_BACKWARD)]
    plain, scaled = made(*others), made(*others[:place], loss_scaling(), *others[place:])
    plain(helpers.make_state(), BATCH)
    scaled.fold(scaled.init(helpers.make_state()), BATCH)
    assert tree.equal(seen[0], seen[len(seen) - 1])


# With other methods


def test_a_single_slice_that_overflows_skips_the_step():
    step = made(loss_scaling(), microbatches=5)
    before = started(step, momentum_state())
    after = step(before, broken(row=9))
    assert after.metrics["loss_scaling/skipped"].item() == 1
    assert tree.equal((before.params, before.opt_state), (after.params, after.opt_state))
    assert step(after, BATCH).metrics["loss_scaling/skipped"].item() == 0


@pytest.mark.parametrize("clip_first", [True, False])
def test_clipping_sees_true_gradients_and_hides_no_overflow(clip_first):
    def clip(state: State) -> State:
        return state.replace(grads={k: g.clamp(-0.01, 0.01) for k, g in (state.grads or {}).items()})

    clipping = edit("clip", clip, Event.AFTER_BACKWARD, traits=frozenset({Trait.CLIPS_GRADIENTS}))
    both = [clipping, loss_scaling()] if clip_first else [loss_scaling(), clipping]
    step = made(*both)
    before = step.init(helpers.make_state())
    assert tree.equal(step(before, BATCH).params, made(clipping)(helpers.make_state(), BATCH).params)
    after = step(before, broken())
    assert after.metrics["loss_scaling/skipped"].item() == 1 and tree.equal(before.params, after.params)


def climb(state: State) -> State:
    """Take a second gradient, at a point so far away that it overflows if the batch requests it."""
    far = torch.where(state.inputs.amax() > 50, torch.inf, 0.05)
    grads = state.grads or {}
    new, loss = state.gradient({k: p + far * grads[k] for k, p in state.params.items()})
    return state.replace(grads=new, metrics={**state.metrics, "there": loss})


def test_second_gradients_are_true_ones_and_their_overflow_skips():
    sam, steps = edit("sam", climb), {}
    for name, algorithms in {"plain": [sam], "scaled": [sam, loss_scaling()]}.items():
        steps[name] = made(*algorithms)
    before = steps["scaled"].init(helpers.make_state())
    expected, found = steps["plain"](helpers.make_state(), BATCH), steps["scaled"](before, BATCH)
    assert tree.equal((expected.params, expected.metrics["there"]), (found.params, found.metrics["there"]))
    inputs = BATCH[0].clone()
    inputs[0, 0] = 60.0
    after = steps["scaled"](before, (inputs, BATCH[1]))
    assert after.metrics["loss_scaling/skipped"].item() == 1 and tree.equal(before.params, after.params)
    assert scale_of(after) == 2.0**15


def test_overflow_in_gradients_that_were_already_used_counts_too():
    """The first of two players overflows: its update is skipped, the other's is not, and the scale falls."""
    twice = (
        pc.loop.Grad(pc.loop.forward, pc.loop.loss, Event.BEFORE_BACKWARD, wrt="0.*"),
        Event.AFTER_BACKWARD,
        pc.loop.update(wrt="0.*"),
        lambda state: state.replace(inputs=torch.nan_to_num(state.inputs, posinf=0.0)),
        pc.loop.Grad(pc.loop.forward, pc.loop.loss, Event.BEFORE_BACKWARD, wrt="2.*"),
        Event.AFTER_BACKWARD,
        pc.loop.update(wrt="2.*"),
        pc.loop.advance,
        Event.BATCH_END,
    )
    step = compose(twice, [loss_scaling()])
    before = step.init(helpers.make_state())
    after = step(before, broken())
    changed = {name for name, param in after.params.items() if not torch.equal(param, before.params[name])}
    assert changed == {"2.weight", "2.bias"}
    assert after.metrics["loss_scaling/skipped"].item() == 1 and scale_of(after) == 2.0**15


# Half precision


def small_loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return a loss so small that its gradient vanishes in float16."""
    return 1e-7 * losses.cross_entropy(outputs, targets, reduction=reduction)


def test_fp16_alone_loses_small_gradients_and_scaling_keeps_them():
    def gradients(precision: str, *algorithms: Algorithm) -> dict[str, Tensor]:
        step = made(*algorithms)
        state = step.init(helpers.make_state(loss=small_loss, precision=precision))
        grads = step.fold(state, BATCH).grads
        assert grads is not None
        return grads

    exact, lost, kept = gradients("fp32"), gradients("fp16"), gradients("fp16", loss_scaling())
    assert not any(grad.any() for grad in lost.values())
    for name, grad in exact.items():
        torch.testing.assert_close(kept[name], grad, rtol=2e-2, atol=2e-2 * grad.abs().max().item())


# Settings and INIT


def test_an_optimizer_put_in_after_init_is_refused():
    step = made(loss_scaling())
    state = step.init(helpers.make_state()).replace(optimizer=optim.sgd(0.1))
    with pytest.raises(RuntimeError, match=r"expected the optimizer that INIT has wrapped.* got sgd"):
        step(state, BATCH)


@pytest.mark.filterwarnings("ignore:loss_scaling acts at .*, which the program does not have")
def test_a_program_that_scales_no_loss_reports_no_scale():
    program = (pc.loop.Grad(pc.loop.forward, pc.loop.loss), pc.loop.update, pc.loop.advance, Event.BATCH_END)
    step = compose(program, [loss_scaling()])
    state = step(step.init(helpers.make_state(precision="fp16")), BATCH)
    assert state.metrics["loss_scaling/scale"] == 1


@pytest.mark.filterwarnings("ignore:loss_scaling acts at .*, which the program does not have")
def test_a_program_without_an_unscaling_event_is_refused():
    program = (pc.loop.Grad(pc.loop.forward, pc.loop.loss, Event.BEFORE_BACKWARD), pc.loop.update, pc.loop.advance)
    step = compose(program, [loss_scaling()])
    with pytest.raises(pc.errors.ContractError, match="slots"):
        step(step.init(helpers.make_state()), BATCH)
