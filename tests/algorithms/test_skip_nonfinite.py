"""Skipping: fields that a bad step keeps, combinations with other methods, and good steps equal the plain step."""

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import Algorithm, Event, State, Trait, compose, loop_events, losses, on, optim, tree
from purecompose.algorithms._around_updates import sam
from purecompose.algorithms._batch_sizes import gradient_accumulation
from purecompose.algorithms._optimizer_settings import gradient_clipping
from purecompose.algorithms._overflow import loss_scaling, skip_nonfinite
from purecompose.optim.wrapping import Guarded
from tests.algorithms import method_helpers as helpers


BATCH = helpers.make_batch()
OTHER = BATCH[0] + 1, BATCH[1]
LASTING = ("params", "buffers", "opt_state", "hparams")


def broken(value: float = torch.inf, row: int = 0) -> tuple[Tensor, Tensor]:
    """Return a batch with one example whose loss and gradients are not finite."""
    inputs = BATCH[0].clone()
    inputs[row, 0] = value
    return inputs, BATCH[1]


def net(norm: bool = True) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if norm else nn.GroupNorm(2, 8)
    return nn.Sequential(nn.Linear(6, 8, bias=False), middle, nn.Tanh(), nn.Linear(8, 4))


def made(*algorithms: Algorithm, **options):
    return compose(loop_events, algorithms, **options)


def fresh(step, **options) -> State:
    """Return an initialised state with momentum and weight decay, so that a step changes all optimizer state."""
    optimizer = optim.sgd(0.3, momentum=0.9, weight_decay=0.01)
    state = helpers.make_state(options.pop("net", None) or net(), **options).replace(optimizer=optimizer)
    return step.init(state.replace(opt_state=optimizer.init(state.params)))


def lasting(state: State) -> dict[str, object]:
    return {name: getattr(state, name) for name in LASTING}


def count_of(state: State) -> int:
    return int(state.slots["skip_nonfinite"].skipped)


def edit(name: str, fn, event: Event = Event.AFTER_TRAIN_BATCH, **options) -> Algorithm:
    return Algorithm(name, on(event), lambda _, state: fn(state), **options)


def check_skipped(before: State, after: State) -> None:
    assert tree.diff(lasting(before), lasting(after)) == []
    assert after.timestamp.batch == before.timestamp.batch + 1
    assert after.metrics["skip_nonfinite/skipped"].item() == 1
    assert count_of(after) == count_of(before) + 1


# A single step


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_bad_step_only_advances_time(value, microbatches):
    step = made(skip_nonfinite(), microbatches=microbatches)
    before = step(fresh(step), BATCH)
    after = step(before, broken(value, row=9))
    check_skipped(before, after)
    assert after.loss is not None and not after.loss.isfinite()  # reported unchanged


@pytest.mark.parametrize("microbatches", [1, 3])
def test_good_steps_are_the_plain_ones(microbatches):
    plain, step = made(microbatches=microbatches), made(skip_nonfinite(), microbatches=microbatches)
    first, second = fresh(plain), fresh(step)
    for batch in (BATCH, OTHER, BATCH):
        first, second = plain(first, batch), step(second, batch)
        assert tree.diff((lasting(first), first.loss), (lasting(second), second.loss)) == []
        assert second.metrics["skip_nonfinite/skipped"].item() == 0
    assert count_of(second) == 0


def test_training_continues_as_if_bad_batches_had_not_occurred():
    plain, step = made(), made(skip_nonfinite())
    first, second = fresh(plain), fresh(step)
    for batch in (BATCH, broken(), OTHER, broken(torch.nan), broken(row=3), BATCH):
        second = step(second, batch)
        if batch[0].isfinite().all():
            first = plain(first, batch)
    assert tree.diff(lasting(first), lasting(second)) == []
    assert count_of(second) == 3 and (first.timestamp.batch, second.timestamp.batch) == (3, 6)


def test_a_loss_that_is_not_finite_is_enough():
    """The gradient of a constant is 0, whatever the constant."""

    def infinite(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        loss = losses.cross_entropy(outputs, targets, reduction=reduction)
        return loss + torch.where(outputs.detach().sum() > 1e3, torch.inf, 0.0)

    step = made(skip_nonfinite())
    before = step(fresh(step, loss=infinite, net=net(norm=False)), BATCH)
    large = before.replace(params={**before.params, "3.bias": before.params["3.bias"] + 1e4})
    grads = made().fold(large, BATCH).grads
    assert grads is not None and all(grad.isfinite().all() for grad in grads.values())
    check_skipped(large, step(large, BATCH))


def test_an_optimizer_that_was_replaced_is_refused():
    step = made(skip_nonfinite())
    state = fresh(step)
    assert isinstance(state.optimizer, Guarded) and step.init(state).optimizer == state.optimizer
    with pytest.raises(RuntimeError, match="skip_nonfinite: expected the optimizer that INIT has wrapped"):
        step(state.replace(optimizer=optim.sgd(0.1, momentum=0.9)), BATCH)


# With other methods


def moving_average(name: str = "average", *, field: str = "params") -> Algorithm:
    """Return an average of weights or statistics, updated in each batch; a non-finite value would stay forever."""

    def apply(event: Event, state: State) -> State:
        found = {key: value.double() for key, value in getattr(state, field).items()}
        if event is Event.BATCH_END:
            found = {key: 0.5 * state.slots[name][key] + 0.5 * value for key, value in found.items()}
        return state.replace(slots={**state.slots, name: found})

    return Algorithm(name, on(Event.INIT, Event.BATCH_END), apply)


@pytest.mark.parametrize("field", ["params", "buffers"])
@pytest.mark.parametrize("place", [0, 1])
def test_averages_use_the_kept_weights_wherever_they_are_listed(place, field):
    others = [moving_average(field=field)]
    step = made(*others[:place], skip_nonfinite(), *others[place:])
    before = step(fresh(step), BATCH)
    after = step(before, broken())
    check_skipped(before, after)
    stayed = getattr(before, field)
    expected = {key: 0.5 * mean + 0.5 * stayed[key].double() for key, mean in before.slots["average"].items()}
    assert tree.equal(after.slots["average"], expected)


@pytest.mark.parametrize("skip_first", [True, False])
def test_clipping_by_value_hides_nothing(skip_first):
    both = [skip_nonfinite(), gradient_clipping("value", 0.01)]
    step = made(*(both if skip_first else both[::-1]))
    before = step(fresh(step), BATCH)

    # Only one gradient is infinite, and clipping would turn it into 0.01.
    def with_infinity(state: State) -> State:
        grads = state.grads or {}
        return state.replace(grads={**grads, "3.bias": grads["3.bias"] + torch.inf})

    explode = edit("explode", with_infinity, traits=frozenset({Trait.RENEWS_GRADIENTS}))
    worse = step.replace(algorithms=[explode, *step.algorithms])
    assert worse.plan(before).order(Event.AFTER_TRAIN_BATCH) == ("explode", "skip_nonfinite", "gradient_clipping")
    check_skipped(before, worse(before, BATCH))


@pytest.mark.parametrize("skip_first", [True, False])
def test_a_second_gradient_that_overflows_is_detected(skip_first):
    def climb(state: State) -> State:
        there = {key: param + torch.inf for key, param in state.params.items()}
        return state.replace(grads=state.gradient(there)[0])

    second = edit("climb", climb, traits=sam(0.1).traits)
    step = made(*([skip_nonfinite(), second] if skip_first else [second, skip_nonfinite()]))
    before = fresh(step)
    assert step.plan(before).order(Event.AFTER_TRAIN_BATCH) == ("climb", "skip_nonfinite")
    after = step(before, BATCH)
    check_skipped(before, after)
    assert after.loss is not None and after.loss.isfinite()


@pytest.mark.parametrize("turn", [1, -1])
def test_the_bad_batch_of_a_group_is_left_out(turn):
    step = made(*[gradient_accumulation(2), skip_nonfinite()][::turn])
    first = fresh(step)
    good = step(step(first, BATCH), BATCH)
    skipped, states = [], [first]
    for batch in (broken(), BATCH):
        states.append(step(states[-1], batch))
        skipped.append(states[-1].metrics["skip_nonfinite/skipped"].item())
    assert skipped == [1, 0] and count_of(states[-1]) == 1
    assert tree.diff(lasting(first), lasting(states[1])) == []  # the bad batch changed no buffer either
    # The mean of only the good batch equals that of the good batch twice.
    torch.testing.assert_close(states[-1].params, good.params)
    assert int(states[-1].buffers["1.num_batches_tracked"]) == 1
    worst = step(step(first, broken()), broken())
    assert tree.diff(lasting(first), lasting(worst)) == []
    late = step(step(first, BATCH), broken())
    torch.testing.assert_close(late.params, good.params)
    assert late.metrics["skip_nonfinite/skipped"].item() == 1


def test_gradients_that_go_bad_later_are_skipped_with_their_buffers():
    def to_infinity(state: State) -> State:
        return state.replace(grads={key: grad + torch.inf for key, grad in (state.grads or {}).items()})

    late = edit("late", to_infinity, runs_after=("skip_nonfinite",))
    step = made(skip_nonfinite(), late)
    before = fresh(step)
    check_skipped(before, step(before, BATCH))


@pytest.mark.parametrize("skip_first", [True, False])
def test_with_loss_scaling_both_skip_and_buffers_go_back(skip_first):
    both = [skip_nonfinite(), loss_scaling()]
    step = made(*(both if skip_first else both[::-1]), microbatches=2)
    before = step(fresh(step), BATCH)
    assert before.slots["loss_scaling"].scale.item() == 2.0**16 and count_of(before) == 0
    after = step(before, broken())
    check_skipped(before, after)
    assert after.metrics["loss_scaling/skipped"].item() == 1 and after.slots["loss_scaling"].scale.item() == 2.0**15
    assert count_of(step(after, BATCH)) == 1


@pytest.mark.filterwarnings("ignore:skip_nonfinite acts at .*, which the program does not have")
def test_in_a_program_without_its_other_events_updates_are_guarded():
    short = (pc.loop.Grad(pc.loop.forward, pc.loop.loss), pc.loop.update, pc.loop.advance, Event.BATCH_END)
    step = compose(short, [skip_nonfinite()])
    before = step(fresh(step, net=net(norm=False)), BATCH)
    check_skipped(before, step(before, broken()))
