"""SAM against closed forms and torch's optimizers, and with draws, slices, statistics, loss scales, resuming."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import Event, State, algorithms as alg, compose, hparam, loop_events, optim, tree
from purecompose.algorithms._around_updates import perturb_params, sam
from purecompose.algorithms._optimizer_settings import gradient_clipping
from purecompose.core.scopes import Grad
from purecompose.loop import advance, update
from tests.algorithms import method_helpers as helpers


BATCH = helpers.make_batch()
RHO = 0.3


def wide_batch() -> tuple[Tensor, Tensor]:
    return BATCH[0].double(), BATCH[1]


def wide_net(**options) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(options.get("dropout", 0.0)), nn.Linear(8, 4)).double()


def started(step, state: State, optimizer=None) -> State:
    """Return the initialised state with this optimizer, by default SGD with momentum."""
    optimizer = optimizer or optim.sgd(0.3, momentum=0.9)
    return step.init(state.replace(optimizer=optimizer, opt_state=optimizer.init(state.params)))


class OfWeights(nn.Module):
    """A network whose outputs are a loss that only depends on the weights."""

    def __init__(self, start, fn):
        super().__init__()
        self.w, self.fn = nn.Parameter(torch.tensor(start, dtype=torch.float64)), fn

    def forward(self, inputs):
        del inputs
        return self.fn(self.w)


def loss_itself(outputs, targets, reduction="mean"):
    del targets, reduction
    return outputs


def state_of(fn, start=(1.0, -2.0, 0.5), **options) -> State:
    return helpers.make_state(OfWeights(list(start), fn), loss=loss_itself, **options)


def moved(grads: dict[str, Tensor], rho: float = RHO, epsilon: float = 1e-12) -> dict[str, Tensor]:
    """Return the perturbation of the weights, computed manually."""
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
    return {name: rho * grad / (norm + epsilon) for name, grad in grads.items()}


def gradients(loss_of, params: dict[str, Tensor], names=None) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients, computed only by torch."""
    leaves = {name: param.detach().clone().requires_grad_() for name, param in params.items()}
    loss = loss_of(leaves)
    chosen = list(leaves) if names is None else list(names)
    found = torch.autograd.grad(loss, [leaves[name] for name in chosen])
    return dict(zip(chosen, found, strict=True)), loss.detach()


def two_gradients(loss_of, params: dict[str, Tensor], rho: float = RHO, names=None):
    """Return the manually computed second gradient, and the loss at both points."""
    first, loss = gradients(loss_of, params, names)
    away = moved(first, rho)
    there = {name: param + away.get(name, 0) for name, param in params.items()}
    second, loss_there = gradients(loss_of, there, names)
    return second, loss, loss_there


def plain_loss(net: nn.Module):
    """Return the batch's loss as a function of the parameters."""
    inputs, targets = wide_batch()
    return lambda params: F.cross_entropy(torch.func.functional_call(net, params, (inputs,)), targets)


# The formula


def test_on_a_quadratic_it_is_the_closed_form():
    """The gradient is A w, so each step uses A (w + rho A w / |A w|), which momentum accumulates."""
    matrix = torch.tensor([[3.0, 1.0, 0.0], [1.0, 2.0, -1.0], [0.0, -1.0, 4.0]], dtype=torch.float64)
    step = compose(loop_events, [sam(RHO)])
    state = started(step, state_of(lambda w: w @ matrix @ w / 2), optim.sgd(0.05, momentum=0.9))
    w, velocity = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for _ in range(8):
        there = w + RHO * (matrix @ w) / (matrix @ w).norm()
        sharpness = (there @ matrix @ there - w @ matrix @ w) / 2
        loss = w @ matrix @ w / 2
        velocity = 0.9 * velocity + matrix @ there
        w = w - 0.05 * velocity
        state = step(state, BATCH)
        torch.testing.assert_close(state.params["w"], w, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state.opt_state["momentum"]["w"], velocity, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close((state.loss, state.metrics["sam/sharpness"]), (loss, sharpness), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("mine", "torchs"),
    [
        (optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.01), torch.optim.SGD),
        (optim.adam(0.01), torch.optim.Adam),
        (optim.adamw(0.01, weight_decay=0.1), torch.optim.AdamW),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_it_equals_torchs_optimizer_on_second_gradients(mine, torchs):
    settings = {
        torch.optim.SGD: {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        torch.optim.Adam: {"lr": 0.01},
        torch.optim.AdamW: {"lr": 0.01, "weight_decay": 0.1},
    }
    net, step = wide_net(), compose(loop_events, [sam(RHO)])
    state = started(step, helpers.make_state(net), mine)
    optimizer = torchs(net.parameters(), **settings[torchs])
    for _ in range(5):
        grads, loss, _ = two_gradients(plain_loss(net), dict(net.named_parameters()))
        for name, param in net.named_parameters():
            param.grad = grads[name]
        optimizer.step()
        state = step(state, wide_batch())
        torch.testing.assert_close(state.loss, loss, rtol=1e-12, atol=0)
        for name, param in net.named_parameters():
            torch.testing.assert_close(state.params[name], param.detach(), rtol=1e-9, atol=1e-12)


def test_the_move_is_along_the_gradient_and_rho_long():
    grads = {"a": torch.randn(3, 4, dtype=torch.float64), "b": torch.randn(5, dtype=torch.float64)}
    params = {"a": torch.ones(3, 4, dtype=torch.float64), "other": torch.ones(2), "b": torch.zeros(5).double()}
    there = perturb_params(params, grads, 0.7)
    assert list(there) == list(params) and there["other"] is params["other"]
    away = torch.cat([(there[name] - params[name]).flatten() for name in grads])
    along = torch.cat([grad.flatten() for grad in grads.values()])
    assert away.norm().item() == pytest.approx(0.7, rel=1e-9)
    assert F.cosine_similarity(away, along, dim=0).item() == pytest.approx(1, rel=1e-12)


def test_the_norm_has_epsilon_added():
    grads = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    there = perturb_params({"w": torch.zeros(2, dtype=torch.float64)}, grads, 1.0, epsilon=5.0)
    torch.testing.assert_close(there["w"], torch.tensor([0.3, 0.4], dtype=torch.float64))


def test_half_precision_weights_keep_their_dtype_and_their_norm_its_range():
    grads = {"w": torch.full((100,), 6e4, dtype=torch.float16)}  # their norm exceeds float16
    there = perturb_params({"w": torch.zeros(100, dtype=torch.float16)}, grads, 1.0)["w"]
    assert there.dtype is torch.float16
    torch.testing.assert_close(there, torch.full((100,), 0.1, dtype=torch.float16))


def test_a_loss_linear_in_the_weights_gives_the_plain_step():
    """Also under a schedule of the learning rate, which applies to the only optimizer."""
    slope = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    optimizer = optim.adam(0.1 * pc.schedule.linear())
    plain, second = compose(loop_events), compose(loop_events, [sam(10.0)])
    first = plain.init(started(plain, state_of(lambda w: slope @ w), optimizer))
    state = started(second, state_of(lambda w: slope @ w), optimizer)
    for _ in range(4):
        first, state = plain(first, BATCH), second(state, BATCH)
        assert tree.equal((first.params, first.opt_state, first.loss), (state.params, state.opt_state, state.loss))


def test_a_gradient_of_zeros_moves_nothing():
    step = compose(loop_events, [sam(1e3, epsilon=1e-30)])
    before = started(step, state_of(lambda w: 0 * w.sum()))
    after = step(before, BATCH)
    assert tree.equal(before.params, after.params) and after.metrics["sam/sharpness"].item() == 0


def test_a_loss_of_exactly_zero_is_a_loss():
    """At the minimum the gradient and the loss are 0; weight decay still acts."""
    step = compose(loop_events, [sam(RHO)])
    state = started(step, state_of(lambda w: (w - w.detach()).square().sum()), optim.sgd(0.1, weight_decay=0.5))
    after = step(state, BATCH)
    assert after.loss is not None and after.loss.item() == 0
    torch.testing.assert_close(after.params["w"], 0.95 * state.params["w"])


# Intervals


def test_every_kth_step_is_different_and_the_first_is_the_kth():
    state = second = helpers.make_state()
    plain, step = compose(loop_events), compose(loop_events, [sam(0.5, every=3)])
    for number in range(1, 8):
        state = second  # from the same weights
        state, second = plain(state, BATCH), step(second, BATCH)
        is_sam = number % 3 == 0
        assert tree.equal(state.params, second.params) != is_sam
        assert ("sam/sharpness" in second.metrics) == is_sam


# The same batch, the same draws


MASKS: list[Tensor] = []


class Noisy(nn.Module):
    """A network that drops inputs and records which."""

    def __init__(self):
        super().__init__()
        self.net = wide_net()

    def forward(self, inputs):
        mask = F.dropout(torch.ones_like(inputs), 0.4, training=self.training)
        MASKS.append(mask.detach().clone())
        return self.net(inputs * mask)


def test_both_gradients_are_of_one_mixture_with_one_dropout():
    """The reference is computed from the draws: the mixture and the dropped inputs."""
    MASKS.clear()
    seen: list = []
    step = compose(loop_events, [sam(RHO), alg.mixup(0.5), helpers.spy(seen, Event.BEFORE_FORWARD)])
    state = step.init(helpers.make_state(Noisy()))
    after = step(state, wide_batch())
    (inputs, mixture), (inputs_again, mixture_again) = seen
    assert tree.equal((inputs, mixture, MASKS[0]), (inputs_again, mixture_again, MASKS[1]))
    assert not torch.equal(inputs, wide_batch()[0]) and MASKS[0].unique().numel() == 2

    def loss_of(params: dict[str, Tensor]) -> Tensor:
        own = {name.removeprefix("net."): param for name, param in params.items()}
        outputs = torch.func.functional_call(wide_net(), own, (inputs * MASKS[0],))
        terms = zip(mixture.targets, mixture.weights, strict=True)
        return sum((w * F.cross_entropy(outputs, t, reduction="none")).mean() for t, w in terms)  # pyright: ignore

    grads, loss, loss_there = two_gradients(loss_of, state.params)
    torch.testing.assert_close(after.loss, loss)
    torch.testing.assert_close(after.metrics["sam/sharpness"], loss_there - loss, rtol=1e-5, atol=1e-8)
    for name, param in state.params.items():
        # The mixture's weights are float32.
        torch.testing.assert_close(after.params[name], param - helpers.LR * grads[name], rtol=1e-6, atol=1e-8)


def test_batch_statistics_count_the_batch_once():
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    plain, step = compose(loop_events), compose(loop_events, [sam(0.5)])
    first, second = plain(helpers.make_state(net), BATCH), step(helpers.make_state(net), BATCH)
    assert tree.equal(first.buffers, second.buffers) and not tree.equal(first.params, second.params)
    assert second.buffers["1.num_batches_tracked"].item() == 1


def test_the_loss_is_that_at_the_weights_and_others_see_the_second_gradient():
    net = wide_net()
    step = compose(loop_events, [alg.gradient_norm(), sam(RHO)])
    after = step(step.init(helpers.make_state(net)), wide_batch())
    grads, loss, _ = two_gradients(plain_loss(net), dict(net.named_parameters()))
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
    torch.testing.assert_close((after.loss, after.metrics["gradient_norm"]), (loss, norm))


# With other methods


@pytest.mark.parametrize("is_first", [True, False])
def test_clipping_bounds_only_the_second_gradient(is_first):
    net, bound = wide_net(), 0.05
    both = [gradient_clipping("norm", bound), sam(RHO)]
    step = compose(loop_events, both if is_first else both[::-1])
    state = step.init(helpers.make_state(net))
    assert step.plan(state).order(Event.AFTER_TRAIN_BATCH) == ("sam", "gradient_clipping")
    grads, _, _ = two_gradients(plain_loss(net), dict(net.named_parameters()))
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
    assert norm > bound
    after = step(state, wide_batch())
    for name, param in state.params.items():
        expected = param - helpers.LR * bound / (norm + 1e-6) * grads[name]
        torch.testing.assert_close(after.params[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_step_in_which_only_the_second_gradient_overflows_is_skipped(is_first):
    """In float16, at a point so far away that the outputs are not finite."""
    both = [alg.loss_scaling(2.0**8), sam(hparam("rho", 0.05))]
    step = compose(loop_events, both if is_first else both[::-1])
    state = step(started(step, helpers.make_state(precision="fp16")), BATCH)
    assert state.metrics["loss_scaling/skipped"].item() == 0
    far = state.replace(hparams={**state.hparams, "rho": 1e7})
    alone = compose(loop_events, [alg.loss_scaling(2.0**8)])
    assert alone(far.replace(initialised=("loss_scaling",)), BATCH).metrics["loss_scaling/skipped"].item() == 0
    after = step(far, BATCH)
    assert after.metrics["loss_scaling/skipped"].item() == 1 and not after.metrics["sam/sharpness"].isfinite()
    assert tree.equal((after.params, after.opt_state), (far.params, far.opt_state))
    assert after.slots["loss_scaling"].scale.item() == 2.0**7
    assert (
        step(after.replace(hparams={**state.hparams, "rho": 0.05}), BATCH).metrics["loss_scaling/skipped"].item() == 0
    )


def test_a_step_of_which_the_first_gradient_overflows_is_skipped():
    step = compose(loop_events, [alg.loss_scaling(2.0**8), sam(RHO)])
    state = step(started(step, helpers.make_state()), BATCH)
    after = step(state, (BATCH[0] * torch.inf, BATCH[1]))
    assert after.metrics["loss_scaling/skipped"].item() == 1
    assert tree.equal((after.params, after.opt_state), (state.params, state.opt_state))


def test_loss_scaling_changes_no_bit_of_a_good_step():
    plain, scaled = compose(loop_events, [sam(0.5)]), compose(loop_events, [sam(0.5), alg.loss_scaling()])
    first, second = started(plain, helpers.make_state()), started(scaled, helpers.make_state())
    for _ in range(3):
        first, second = plain(first, BATCH), scaled(second, BATCH)
    assert tree.equal((first.params, first.opt_state), (second.params, second.opt_state))


def test_of_two_players_the_last_one_before_the_event_is_perturbed():
    """The other player's gradients are already used by then, and have no effect."""
    net = wide_net()
    body = (pc.loop.forward, pc.loop.loss)
    program = (
        Grad(*body, wrt="0.*"), update(wrt="0.*"), Grad(*body, wrt="3.*"), Event.AFTER_TRAIN_BATCH, update(wrt="3.*"),
        advance,
    )  # fmt: skip
    state = helpers.make_state(net)
    after = compose(program, [sam(RHO)])(state, wide_batch())
    params = state.params
    for names, rho in (("0.weight", "0.bias"), 0.0), (("3.weight", "3.bias"), RHO):
        grads, _, _ = two_gradients(plain_loss(net), params, rho, names)
        params = {name: param - helpers.LR * grads.get(name, 0) for name, param in params.items()}
    for name, param in params.items():
        torch.testing.assert_close(after.params[name], param, rtol=1e-9, atol=1e-12)


class Counting(nn.Module):
    """A model that computes its loss and returns it in a dictionary."""

    def __init__(self):
        super().__init__()
        self.net = wide_net()

    def forward(self, inputs, labels):
        return {"loss": F.cross_entropy(self.net(inputs), labels)}


def test_a_model_may_compute_its_loss_and_batches_may_be_dictionaries():
    net, (inputs, labels) = Counting(), wide_batch()
    step = compose(loop_events, [sam(RHO)])
    after = step(step.init(helpers.make_state(net, loss=pc.losses.model_loss)), {"inputs": inputs, "labels": labels})
    grads, _, _ = two_gradients(plain_loss(net.net), dict(net.net.named_parameters()))
    for name, param in net.net.named_parameters():
        expected = param.detach() - helpers.LR * grads[name]
        torch.testing.assert_close(after.params[f"net.{name}"], expected, rtol=1e-12, atol=1e-12)
