"""Schedule-free training against the authors' algorithm, written out in float64."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop_events, optim, schedule
from purecompose.algorithms._around_updates import schedule_free, schedule_free_step
from purecompose.algorithms._batch_sizes import gradient_accumulation
from tests.algorithms.averaging_checks import BATCHES, averages_of, cnn_state, states_after
from tests.helpers import assert_close, assert_same, make_batches, make_mlp, make_state, run_steps


Params = list[Tensor]
Move = Callable[[Params, Params, int], Params]
DOUBLE = make_batches(8, dtype=torch.float64)


def sgd_move(rate: Callable[[int], float], weight_decay: float = 0.0) -> Move:
    """Return the update of plain gradient descent, with weight decay at the point of the gradient."""
    return lambda y, grads, at: [-rate(at) * (g + weight_decay * p) for p, g in zip(y, grads, strict=True)]


def adamw_move(rate: Callable[[int], float], beta2: float, weight_decay: float, eps: float = 1e-8) -> Move:
    """Return AdamW's update without a first moment: g over the root of the corrected mean square, and decay at y."""
    squares: dict[int, Tensor] = {}

    def move(y: Params, grads: Params, at: int) -> Params:
        moves = []
        for index, (p, g) in enumerate(zip(y, grads, strict=True)):
            squares[index] = beta2 * squares.get(index, torch.zeros_like(g)) + (1 - beta2) * g * g
            root = (squares[index] / (1 - beta2 ** (at + 1))).sqrt() + eps
            moves.append(-rate(at) * (g / root + weight_decay * p))
        return moves

    return move


def by_hand(beta: float, move: Move, rate: Callable[[int], float]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return y and x after the batches, by the paper's three lines, weighted by the squared largest rate so far."""
    net = make_mlp(dtype=torch.float64)
    names = [name for name, _ in net.named_parameters()]
    z = [param.detach().clone() for param in net.parameters()]
    x, total, greatest = [value.clone() for value in z], 0.0, 0.0
    for at, (inputs, targets) in enumerate(DOUBLE):
        y = [(1 - beta) * a + beta * b for a, b in zip(z, x, strict=True)]
        leaves = {name: value.clone().requires_grad_() for name, value in zip(names, y, strict=True)}
        loss = nn.functional.cross_entropy(torch.func.functional_call(net, leaves, (inputs,)), targets)
        grads = list(torch.autograd.grad(loss, list(leaves.values())))
        z = [a + step for a, step in zip(z, move(y, grads, at), strict=True)]
        greatest = max(greatest, rate(at))
        total += greatest**2
        c = greatest**2 / total if total else 0.0
        x = [(1 - c) * b + c * a for a, b in zip(z, x, strict=True)]
    y = [(1 - beta) * a + beta * b for a, b in zip(z, x, strict=True)]
    return dict(zip(names, y, strict=True)), dict(zip(names, x, strict=True))


def double_state(optimizer: object, **options: object) -> State:
    return make_state(make_mlp(dtype=torch.float64), optimizer=optimizer, **{"batches_per_epoch": 4, **options})


def warm(peak: float, batches: int = 4) -> Callable[[int], float]:
    """Return a schedule that rises from 0 to the peak."""
    return lambda at: peak * min(1.0, at / batches)


# The algorithm


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.98])
def test_the_core_is_three_lines_of_the_paper(beta):
    generator = torch.Generator().manual_seed(0)
    z, x, move = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3))
    moved = (1 - beta) * z + beta * x + move
    for share in (0.0, 0.3, 1.0, torch.tensor(0.3)):
        new_z, new_x, new_y = (
            found["a"] for found in schedule_free_step({"a": z}, {"a": x}, {"a": moved}, beta, share)
        )
        torch.testing.assert_close(new_z, z + move)
        torch.testing.assert_close(new_x, (1 - float(share)) * x + float(share) * (z + move), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(new_y, (1 - beta) * new_z + beta * new_x)


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_gradient_descent_equals_the_written_out_algorithm(beta, weight_decay):
    state = double_state(optim.sgd(0.3, weight_decay=weight_decay))
    end = states_after(schedule_free(beta), state, DOUBLE)[-1]
    y, x = by_hand(beta, sgd_move(lambda at: 0.3, weight_decay), lambda at: 0.3)
    assert_close(end.params, y, rtol=1e-10, atol=1e-12)
    assert_close(averages_of(end, "schedule_free"), x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_with_a_warm_up_equals_the_written_out_algorithm(weight_decay):
    rate = warm(0.05)
    rising = schedule.constant(warmup="4ba")
    assert [0.05 * rising(pc.time.Timestamp(batch=at)) for at in range(6)] == pytest.approx(
        [rate(at) for at in range(6)]
    )
    optimizer = optim.adamw(0.05 * rising, betas=(0.0, 0.99), weight_decay=weight_decay)
    end = states_after(schedule_free(0.9), double_state(optimizer), DOUBLE)[-1]
    y, x = by_hand(0.9, adamw_move(rate, 0.99, weight_decay), rate)
    assert_close(end.params, y, rtol=1e-9, atol=1e-11)
    assert_close(averages_of(end, "schedule_free"), x, rtol=1e-9, atol=1e-11)


def test_weights_of_a_falling_rate_are_those_of_the_largest_rate():
    rates = [0.4, 0.2, 0.3, 0.0, 0.1, 0.5, 0.1, 0.1]
    falling = schedule.scheduled(lambda timestamp: rates[timestamp.batch] if timestamp.batch < 8 else 0.0)
    end = states_after(schedule_free(0.5), double_state(optim.sgd(falling)), DOUBLE)[-1]
    y, x = by_hand(0.5, sgd_move(rates.__getitem__), rates.__getitem__)
    assert_close(end.params, y, rtol=1e-10, atol=1e-12)
    assert_close(averages_of(end, "schedule_free"), x, rtol=1e-10, atol=1e-12)


def test_with_beta_0_training_is_the_plain_one():
    """z then trains as under the plain optimizer; averages only add rounding errors."""
    plain = states_after([], double_state(optim.sgd(0.3)), DOUBLE)[-1]
    ours = states_after(schedule_free(0.0), double_state(optim.sgd(0.3)), DOUBLE)[-1]
    assert_close(ours.params, plain.params, rtol=1e-12, atol=1e-14)


def test_a_rate_of_zero_moves_nothing():
    states = states_after(schedule_free(), make_state(optimizer=optim.sgd(0.0), batches_per_epoch=4), make_batches(3))
    assert_same(states[-1].params, states[0].params)
    assert_same(pc.surgery.with_weights(states[-1], "schedule_free").params, states[0].params)


@dataclasses.dataclass(frozen=True)
class Rateless:
    """An optimizer without a learning rate."""

    def init(self, params):
        return {}

    def update(self, grads, opt_state, params, value):
        return {name: param - 0.3 * grads[name] for name, param in params.items()}, opt_state


def test_an_optimizer_without_a_rate_has_plain_means():
    end = states_after(schedule_free(0.9), double_state(Rateless()), DOUBLE)[-1]
    y, x = by_hand(0.9, sgd_move(lambda at: 0.3), lambda at: 1.0)
    assert_close(end.params, y, rtol=1e-10, atol=1e-12)
    assert_close(averages_of(end, "schedule_free"), x, rtol=1e-10, atol=1e-12)


# Other methods, and other ways to run


def test_evaluation_sees_the_average_and_does_not_change_training():
    method = schedule_free()
    state = states_after(method, cnn_state(optimizer=optim.sgd(0.1)), BATCHES)[-1]
    before, step = state.copy(), compose(loop_events, [method])
    averaged = pc.surgery.with_weights(state, "schedule_free")
    assert_same(averaged.params, state.slots["schedule_free"].averages.params)
    assert (
        pc.evaluate(state, BATCHES[:2], step=step)
        == pc.evaluate(averaged, BATCHES[:2])
        != pc.evaluate(state, BATCHES[:2])
    )
    assert_same(pc.predict(state, BATCHES[:2], step=step), pc.predict(averaged, BATCHES[:2]))
    assert_same(state, before)


@pytest.mark.parametrize(
    "methods", [[schedule_free(), gradient_accumulation(2)], [gradient_accumulation(2), schedule_free()]]
)
def test_steps_whose_gradients_are_kept_for_later_do_not_count(methods):
    found = states_after(methods, double_state(optim.sgd(0.3)), DOUBLE)
    pairs = [tuple(map(torch.cat, zip(*DOUBLE[i : i + 2], strict=True))) for i in range(0, 8, 2)]
    whole = states_after(schedule_free(), double_state(optim.sgd(0.3)), pairs)
    assert_same(found[1].params, found[0].params)
    assert found[-1].slots["schedule_free"].averages.num.item() == 4
    assert_close(found[-1].params, whole[-1].params, rtol=1e-10, atol=1e-12)
    assert_close(
        averages_of(found[-1], "schedule_free"), averages_of(whole[-1], "schedule_free"), rtol=1e-10, atol=1e-12
    )


def test_weights_replaced_after_init_are_the_new_starting_point():
    """z follows every other change of y, and the first x is z."""
    step = compose(loop_events, [schedule_free()])
    loaded = make_mlp(seed=5, dtype=torch.float64)
    begun = step.init(double_state(optim.sgd(0.3)))
    late = begun.replace(params={name: param.detach().clone() for name, param in loaded.named_parameters()})
    early = step.init(double_state(optim.sgd(0.3)).replace(params=late.params))
    for batch in DOUBLE[:3]:
        late, early = step(late, batch), step(early, batch)
    assert_close(late.params, early.params, rtol=1e-10, atol=1e-12)


def test_in_half_precision_z_and_x_are_float32():
    """Changes of x that bfloat16 would round away are kept."""
    state = make_state(make_mlp(dtype=torch.bfloat16), optimizer=optim.sgd(0.1))
    states = states_after(schedule_free(), state, make_batches(8, dtype=torch.bfloat16))
    own = states[-1].slots["schedule_free"]
    assert {value.dtype for value in (*own.base.values(), *own.averages.params.values())} == {torch.float32}
    assert {param.dtype for param in states[-1].params.values()} == {torch.bfloat16}
    bases = [state.slots["schedule_free"].base for state in states[1:]]
    means = {name: torch.stack([base[name] for base in bases]).mean(0) for name in bases[0]}
    assert_close(own.averages.params, means, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("guard", [alg.skip_nonfinite, alg.loss_scaling])
def test_a_step_that_is_skipped_changes_nothing_of_it(guard):
    step = compose(loop_events, [guard(), schedule_free()])
    state = run_steps(step, step.init(cnn_state(optimizer=optim.sgd(0.1))), BATCHES[:3])
    inputs, targets = BATCHES[3]
    after = step(state, (inputs * torch.nan, targets))
    assert_same(after.params, state.params)
    before, now = state.slots["schedule_free"], after.slots["schedule_free"]
    assert pc.tree.equal(now, before)
    assert not torch.equal(step(state, BATCHES[3]).params["0.weight"], state.params["0.weight"])


@pytest.mark.parametrize("turn", [1, -1])
def test_other_averages_come_after_it(turn):
    step = compose(loop_events, [alg.ema(smoothing=0.0), schedule_free()][::turn])
    state = run_steps(step, step.init(cnn_state(optimizer=optim.sgd(0.1))), BATCHES[:3])
    assert_same(pc.surgery.with_weights(state, "ema").params, state.params)


# Settings


@pytest.mark.parametrize(
    "optimizer",
    [
        optim.sgd(0.1, momentum=0.9),
        optim.sgd(0.1, momentum=pc.hparam("momentum", 0.0)),
        optim.sgd(0.1, groups={"*.bias": {"momentum": 0.9}}),
        optim.adamw(0.1),
        optim.adamw(0.1, betas=(0.0, 0.9), groups={"*.bias": {"betas": (0.9, 0.9)}}),
    ],
)
@pytest.mark.filterwarnings("default")
def test_momentum_is_warned_about_once_at_init(optimizer):
    for algorithms in ([schedule_free()], [alg.loss_scaling(), schedule_free()]):
        with pytest.warns(
            UserWarning, match="schedule_free: beta takes the place of momentum, but .*(sgd|adamw)"
        ) as seen:
            compose(loop_events, algorithms).init(make_state(optimizer=optimizer))
        assert len(seen) == 1
