"""The loop program against manually written loops, and microbatches against whole batches."""

import weakref
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import Event, State, algorithms as alg, compose, loop_events, optim
from purecompose.core.operation import walk
from purecompose.core.program import events_in
from purecompose.core.scopes import Grad, Microbatches
from purecompose.loop import advance, update
from tests.helpers import (
    assert_close,
    assert_same,
    changing,
    make_batch,
    make_batches,
    make_cnn,
    make_mlp,
    make_state,
    run_steps,
)


def train_by_hand(net, optimizer, batches, loss_fn=F.cross_entropy):
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = loss_fn(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# Against torch.optim


@pytest.mark.parametrize("shape", [(4,), (2, 6, 6)], ids=["mlp", "cnn"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optim.sgd(0.05, momentum=0.9), lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
        (optim.adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
    ],
    ids=["sgd", "adam"],
)
def test_twenty_steps_equal_the_imperative_loop(shape, ours, theirs):
    make_net = make_mlp if shape == (4,) else make_cnn
    batches = [make_batch(seed, 16, shape) for seed in range(20)]
    step, state = compose(loop_events), make_state(make_net(), optimizer=ours)
    losses = []
    for batch in batches:
        state = step(state, batch)
        assert state.loss is not None
        losses.append(state.loss.item())

    net = make_net()
    expected = train_by_hand(net, theirs(net.parameters()), batches)

    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(state.params, dict(net.named_parameters()))
    assert_close(state.buffers, dict(net.named_buffers()))


# Frozen parameters and patterns


def grads_seen(seen):
    def look(state):
        seen.update(state.grads)
        return state

    return changing("look", Event.AFTER_TRAIN_BATCH, look)


def test_frozen_parameters_have_no_gradient_and_do_not_move():
    net = make_mlp()
    net[0].requires_grad_(False)
    state, seen = make_state(net, optimizer=optim.adam(0.1, weight_decay=0.1)), {}
    end = run_steps(compose(loop_events, [grads_seen(seen)]), state, make_batches(3))
    assert seen.keys() == {"3.weight", "3.bias"}
    for name in ("0.weight", "0.bias"):
        assert torch.equal(end.params[name], state.params[name])
    assert not torch.equal(end.params["3.weight"], state.params["3.weight"])


def test_all_frozen_is_an_error():
    net = make_mlp().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        compose(loop_events)(make_state(net), make_batch())


def with_wrt(grad_pattern, update_pattern=None):
    moved = update if update_pattern is None else update(wrt=update_pattern)
    return (Grad(pc.loop.forward, pc.loop.loss, wrt=grad_pattern), Event.AFTER_TRAIN_BATCH, moved, advance)


def test_wrt_picks_parameters_by_pattern():
    state, seen = make_state(), {}
    end = compose(with_wrt("3.*"), [grads_seen(seen)])(state, make_batch())
    whole = compose(loop_events)(state, make_batch())
    assert seen.keys() == {"3.weight", "3.bias"}
    assert torch.equal(end.params["0.weight"], state.params["0.weight"])
    assert torch.equal(end.params["3.weight"], whole.params["3.weight"])


def test_update_wrt_changes_only_matching_parameters():
    state = make_state()
    end = compose(with_wrt(None, "*.bias"))(state, make_batch())
    whole = compose(loop_events)(state, make_batch())
    for name in state.params:
        expected = whole if name.endswith("bias") else state
        assert torch.equal(end.params[name], expected.params[name])


def test_unknown_wrt_lists_the_names():
    for program in (with_wrt("generator.*"), with_wrt(None, "generator.*")):
        with pytest.raises(ValueError, match=r"wrt='generator\.\*' matches no trainable.*0\.weight"):
            compose(program)(make_state(), make_batch())


def test_update_before_any_grad_is_an_error():
    with pytest.raises(RuntimeError, match="before any Grad"):
        compose([update, advance])(make_state(), make_batch())
    with pytest.raises(RuntimeError, match="before any Grad"):
        compose([Microbatches(pc.loop.forward), update], microbatches=2)(make_state(), make_batch())


@pytest.mark.parametrize("k", [0, -1, True, 1.5])
def test_microbatches_must_be_positive_integers(k):
    with pytest.raises((TypeError, ValueError), match="Microbatches: microbatches: expected an int >= 1"):
        Microbatches(pc.loop.forward, microbatches=k)


def test_stages_and_scopes_print():
    assert repr((pc.loop.forward, update, update(wrt="a.*"))) == "(forward, update, update(wrt='a.*'))"
    assert "Grad(forward, loss, wrt='a.*')" == repr(Grad(pc.loop.forward, pc.loop.loss, wrt="a.*"))


# Two players


class Players(nn.Module):
    """A generator and a discriminator; the arguments determine which part runs."""

    def __init__(self):
        super().__init__()
        self.gen = make_mlp(1)
        self.disc = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
        with torch.no_grad():
            for i, param in enumerate(self.disc.parameters()):
                param.copy_(torch.linspace(-0.5, 0.4 + 0.1 * i, param.numel()).reshape(param.shape))

    def forward(self, noise: Tensor, real: Tensor | None = None):
        fake = self.gen(noise)
        if real is None:
            return self.disc(fake)
        return self.disc(fake.detach()), self.disc(real)


def judge(logits: Tensor, label: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


def disc_loss(state: State) -> State:
    noise, real = state.batch
    (fake, true), _ = state.run_model({"noise": noise, "real": real}, train=True)
    return state.replace(loss=judge(fake, 0.0) + judge(true, 1.0))


def gen_loss(state: State) -> State:
    logits, _ = state.run_model({"noise": state.batch[0]}, train=True)
    return state.replace(loss=judge(logits, 1.0))


def gan_batches(num: int):
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)) for _ in range(num)]


def train_gan_by_hand(batches):
    net = Players()
    gen = torch.optim.Adam(net.gen.parameters(), 0.02)
    disc = torch.optim.Adam(net.disc.parameters(), 0.005)
    for noise, real in batches:
        disc.zero_grad()
        fake, true = net(noise, real)
        (judge(fake, 0.0) + judge(true, 1.0)).backward()
        disc.step()
        gen.zero_grad()
        judge(net(noise), 1.0).backward()
        gen.step()
    return net


@pytest.mark.parametrize("k", [1, 2])
def test_two_players_equal_a_manual_loop(k):
    program = [
        Microbatches(Grad(disc_loss, wrt="disc.*")),
        update(wrt="disc.*"),
        Microbatches(Grad(gen_loss, wrt="gen.*")),
        update(wrt="gen.*"),
        advance,
    ]
    optimizer = optim.adam(0.02, groups={"disc.*": {"lr": 0.005}})
    state = make_state(Players(), optimizer=optimizer)
    batches = gan_batches(15)
    end = run_steps(compose(program, microbatches=k), state, batches)
    assert end.timestamp.batch == 15
    assert_close(end.params, dict(train_gan_by_hand(batches).named_parameters()))


def double_gradients(state):
    return state.replace(grads={name: 2 * grad for name, grad in state.grads.items()})


TWO_PLAYERS = (Grad(disc_loss, wrt="disc.*"), update(wrt="disc.*"), Grad(gen_loss, wrt="gen.*"))


@pytest.mark.parametrize("k", [1, 2])
def test_a_bare_update_after_a_second_grad_applies_the_new_gradients_alone(k):
    seen = {}

    def look(state):
        seen.update({name: grad for name, grad in state.grads.items() if grad is not None})
        return state

    def twice(last):
        first, move, second = TWO_PLAYERS
        return [
            Microbatches(first),
            move,
            Microbatches(second),
            Event.AFTER_TRAIN_BATCH,
            last,
            advance,
            Event.BATCH_END,
        ]

    # An algorithm that replaces every gradient, as clipping does.
    double = changing("double", Event.AFTER_TRAIN_BATCH, double_gradients)
    algorithms = [double, changing("look", Event.BATCH_END, look)]
    batch, state = gan_batches(1)[0], make_state(Players())
    bare = compose(twice(update), algorithms, microbatches=k)(state, batch)
    named = compose(twice(update(wrt="gen.*")), algorithms, microbatches=k)(state, batch)
    assert_same(bare, named)
    assert seen and all(name.startswith("gen.") for name in seen)


def test_gradients_last_until_an_update_uses_them():
    disc, move, gen = TWO_PLAYERS
    batch, state = gan_batches(1)[0], make_state(Players(), optimizer=optim.sgd(0.1))
    split = compose([disc, gen, move, update])(state, batch)
    together = compose([disc, gen, update])(state, batch)
    assert_same(split.params, together.params)
    # The second Grad keeps the gradients that the first update did not use.
    some = compose([disc, update(wrt="disc.0.*"), gen, update])(state, batch)
    for name in ("disc.2.weight", "disc.2.bias", "disc.0.weight"):
        assert torch.equal(some.params[name], together.params[name])


@dataclass(frozen=True)
class Watched:
    """An optimizer that notes whether gradients are held elsewhere when it has dropped them."""

    held: list[bool] = field(compare=False)

    def init(self, params):
        return {}

    def update(self, grads, opt_state, params, value=None):
        marks = [weakref.ref(grad) for grad in grads.values()]
        moved = {**params, **{name: params[name] - grad for name, grad in grads.items()}}
        del grads
        self.held.append(any(mark() is not None for mark in marks))
        return moved, opt_state


def test_gradients_that_nothing_reads_later_are_freed_during_the_update():
    held, norms = [], []
    state, batch = make_state(optimizer=Watched(held)), make_batch()
    clip = alg.gradient_clipping("norm", 0.1)
    step = compose(loop_events, [clip])
    step(step(state, batch), batch)
    assert held == [False, False]

    def look(state):
        norms.append(pc.tree.global_norm(state.grads))
        return state

    compose(loop_events, [clip, changing("look", Event.BATCH_END, look)])(state, batch)
    assert held[2:] == [True] and 0 < norms[0] <= 0.1001
    assert pc.tree.global_norm(step.fold(state, batch).grads) == norms[0]
    stage = compose([*loop_events, look], [clip])
    stage(state, batch)
    assert held[3:] == [True, True] and len(norms) == 2


PLAIN = Grad(pc.loop.forward, pc.loop.loss)


@pytest.mark.parametrize(
    "program",
    [
        [Microbatches(PLAIN, update), Event.AFTER_TRAIN_BATCH, update],
        [Microbatches(PLAIN, update, Event.AFTER_BACKWARD), Event.AFTER_TRAIN_BATCH, update(wrt="3.*")],
        [Microbatches(Microbatches(PLAIN, update, microbatches=2), microbatches=1), Event.AFTER_TRAIN_BATCH, update],
        [PLAIN, update, Event.AFTER_TRAIN_BATCH, update],
        [PLAIN, update, update(wrt="3.*"), Event.AFTER_TRAIN_BATCH],
    ],
    ids=repr,
)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.filterwarnings("ignore:.* which the program does not have")
def test_no_update_applies_a_gradient_twice_wherever_it_is_placed(program, k):
    # An edit replaces the tensors of the gradients but does not make them new gradients.
    doubled = changing("double", Event.AFTER_TRAIN_BATCH, double_gradients)
    with pytest.raises(RuntimeError, match=r"update.* has nothing to apply: an earlier update has used"):
        compose([*program, advance], [doubled], microbatches=k)(make_state(), make_batch())


def test_a_second_gradient_in_a_program_makes_a_second_step():
    again, one = compose([PLAIN, update, PLAIN, update]), compose([PLAIN, update])
    assert_same(again(make_state(), make_batch()).params, run_steps(one, make_state(), [make_batch()] * 2).params)


@pytest.mark.parametrize("k", [1, 2])
def test_a_slice_only_has_its_own_gradients(k):
    for inside in ([update], [update, PLAIN]):
        with pytest.raises(RuntimeError, match="before any Grad"):
            compose([PLAIN, Microbatches(*inside)], microbatches=k)(make_state(), make_batch())
    # An edit in a slice does not touch earlier gradients.
    double = changing("double", Event.AFTER_BACKWARD, double_gradients)
    disc, _, gen = TWO_PLAYERS
    seen: dict[str, Tensor] = {}
    program = [disc, Microbatches(gen, Event.AFTER_BACKWARD), Event.AFTER_TRAIN_BATCH]
    batch, state = gan_batches(1)[0], make_state(Players())
    compose(program, [double, grads_seen(seen)], microbatches=k)(state, batch)
    alone: dict[str, Tensor] = {}
    compose([disc, gen, Event.AFTER_TRAIN_BATCH], [grads_seen(alone)])(state, batch)
    assert_close(seen, {name: grad * (2 if name.startswith("gen") else 1) for name, grad in alone.items()})


def test_an_update_per_slice_is_a_step_per_slice():
    batch, state = make_batch(size=8), make_state()
    sliced = compose([Microbatches(PLAIN, update, microbatches=2)])(state, batch)
    halves = [tuple(member[part] for member in batch) for part in (slice(0, 4), slice(4, 8))]
    assert_same(sliced.params, run_steps(compose([PLAIN, update]), state, halves).params)
    # Whole batches continue after it.
    after = compose([Microbatches(PLAIN, update, microbatches=2), PLAIN, update])(state, batch)
    assert_same(after.params, run_steps(compose([PLAIN, update]), state, [*halves, batch]).params)


@pytest.mark.parametrize("k", [1, 2])
def test_gradients_left_over_by_a_scope_are_used_by_the_next_update(k):
    batch, state = gan_batches(1)[0], make_state(Players(), optimizer=optim.sgd(0.1))
    disc, move, gen = TWO_PLAYERS
    inside = compose([Microbatches(disc, move, gen), update], microbatches=k)(state, batch)
    seen = compose([Microbatches(disc, move, gen), update(wrt="gen.*")], microbatches=k)(state, batch)
    assert_same(inside.params, seen.params)
    if k == 1:
        assert_same(inside.params, compose([disc, move, gen, update])(state, batch).params)


def test_a_stage_may_make_new_gradients():
    def ones(state):
        return state.replace(grads={name: torch.ones_like(param) for name, param in state.params.items()})

    state = make_state(optimizer=optim.sgd(0.1))
    end = compose([ones, update, ones, update])(state, make_batch())
    assert_close(end.params, {name: param - 0.2 for name, param in state.params.items()})
    stage = compose([ones, update, pc.loop.Stage("ones", ones), update(wrt="3.*")])(state, make_batch())
    assert torch.equal(stage.params["3.bias"], end.params["3.bias"])
    assert torch.equal(stage.params["0.bias"], state.params["0.bias"] - 0.1)


def test_the_gradient_elsewhere_refuses_to_repeat_a_part_of_the_step():
    """SAM at other parameters would move half of the network by the gradient at the old ones."""
    parts = [Grad(pc.loop.forward, pc.loop.loss, wrt=part) for part in ("0.*", "3.*")]
    step = compose([*parts, Event.AFTER_TRAIN_BATCH, update, advance], [pc.algorithms.sam(0.5)])
    with pytest.raises(RuntimeError, match=r"gradients of 0.bias, 0.weight come from an earlier part"):
        step(make_state(), make_batch())


# Microbatches


@pytest.mark.parametrize("k", [2, 3, 5])
def test_microbatches_equal_the_whole_batch(k):
    batches, state = make_batches(4, size=8), make_state()
    whole = run_steps(compose(loop_events), state, batches)
    sliced = run_steps(compose(loop_events, microbatches=k), state, batches)
    assert_close(whole.params, sliced.params)
    torch.testing.assert_close(whole.loss, sliced.loss)


def token_batch(seed: int):
    """Return a batch with uneven padding and one example that is all padding."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(6, 5, 4, generator=generator)
    targets = torch.randint(3, (6, 5), generator=generator)
    lengths = torch.tensor([5, 1, 0, 2, 4, 3])
    return inputs, torch.where(torch.arange(5) < lengths[:, None], targets, -100)


class Tagger(nn.Module):
    """A model with logits of shape (batch, classes, positions)."""

    def __init__(self):
        super().__init__()
        self.net = make_mlp(2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs).transpose(1, 2)


@pytest.mark.parametrize("k", [2, 3, 5, 6])
def test_microbatches_weigh_by_tokens(k):
    batches, state = [token_batch(seed) for seed in range(3)], make_state(Tagger())
    whole = run_steps(compose(loop_events), state, batches)
    sliced = run_steps(compose(loop_events, microbatches=k), state, batches)
    assert_close(whole.params, sliced.params)
    torch.testing.assert_close(whole.loss, sliced.loss)


@pytest.mark.parametrize("loss_fn", [pc.losses.cross_entropy, pc.losses.ModelLoss(labels="labels")], ids=repr)
def test_without_any_target_the_loss_is_nan_and_the_gradient_zero_in_slices_too(loss_fn):
    inputs, targets = make_batch()
    batch = {"inputs": inputs, "labels": torch.full_like(targets, -100)}
    if loss_fn == pc.losses.cross_entropy:
        state = make_state(loss=loss_fn, input_field="inputs", target_field="labels")
    else:
        state = make_state(OwnLoss(), loss=loss_fn)
    for k in (1, 2, 4):
        seen = {}
        end = compose(loop_events, [grads_seen(seen)], microbatches=k)(state, batch)
        assert end.loss is not None and end.loss.isnan()
        assert seen.keys() == state.params.keys()
        assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in seen.values())


class OwnTokenLoss(nn.Module):
    """A causal language model's loss: the mean over the labels that are not padding, the first left out."""

    def __init__(self):
        super().__init__()
        self.net = make_mlp(3)

    def forward(self, inputs: Tensor, labels: Tensor):
        logits = self.net(inputs).transpose(1, 2)
        return {"loss": F.cross_entropy(logits[..., :-1], labels[..., 1:]), "logits": logits.transpose(1, 2)}


@pytest.mark.parametrize("k", [2, 3, 6])
def test_a_models_own_loss_weighs_by_its_labels(k):
    state = make_state(OwnTokenLoss(), loss=pc.losses.ModelLoss(labels="labels", shift=1))
    batch = dict(zip(("inputs", "labels"), token_batch(1), strict=True))
    whole, sliced = {}, {}
    end = compose(loop_events, [grads_seen(whole)])(state, batch)
    in_slices = compose(loop_events, [grads_seen(sliced)], microbatches=k)(state, batch)
    assert_close(whole, sliced)
    torch.testing.assert_close(end.loss, in_slices.loss)


def test_a_wrong_name_of_the_labels_is_found_in_the_first_step():
    state = make_state(OwnTokenLoss(), loss=pc.losses.ModelLoss(labels="label"))
    with pytest.raises(KeyError, match="no member 'label'"):
        compose(loop_events)(state, dict(zip(("inputs", "labels"), token_batch(1), strict=True)))


def test_a_wrong_shift_of_the_labels_is_found_in_the_first_step():
    batch = dict(zip(("inputs", "labels"), token_batch(1), strict=True))
    with pytest.raises(
        ValueError, match=r"mean over the labels without the first 1, .*use losses.ModelLoss\(shift=1\)"
    ):
        compose(loop_events)(make_state(OwnTokenLoss(), loss=pc.losses.model_loss), batch)


def fraction_loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    del reduction
    weights = 0.01 * (1 + targets)
    return (weights * F.cross_entropy(outputs, targets, reduction="none")).sum() / weights.sum()


def test_weights_of_less_than_one_average_too():
    state = make_state(loss=fraction_loss)
    whole = compose(loop_events)(state, make_batch())
    sliced = compose(loop_events, microbatches=3)(state, make_batch())
    assert_close(whole.params, sliced.params)


fraction_loss.num_terms = lambda outputs, targets: (0.01 * (1 + targets)).sum()  # pyright: ignore


@pytest.mark.parametrize("k", [1, 2, 3])
def test_numbers_among_metrics_are_means_over_slices(k):
    def measure(state):
        counted = (state.targets != -100).sum()
        metrics = {"loss": 3 * state.loss, "counted": counted, "rows": state.inputs.mean((1, 2))}
        return state.replace(metrics={**state.metrics, **metrics})

    before = changing("before", Event.BATCH_START, lambda s: s.replace(metrics={"before": torch.tensor(7.0)}))
    step = compose(loop_events, [before, changing("measure", Event.AFTER_LOSS, measure)], microbatches=k)
    batch = token_batch(0)
    end = step(make_state(Tagger()), batch)
    whole = compose(loop_events)(make_state(Tagger()), batch)
    assert whole.loss is not None
    torch.testing.assert_close(end.metrics["loss"], 3 * whole.loss)
    assert end.metrics["before"] == 7
    inputs, targets = (part.tensor_split(k)[-1] for part in batch)
    assert end.metrics["counted"] == (targets != -100).sum()
    assert torch.equal(end.metrics["rows"], inputs.mean((1, 2)))


def test_a_metric_of_some_slices_is_the_mean_over_these():
    def measure(state):
        is_short = state.num_examples == 2
        return state.replace(metrics={**state.metrics, "short": state.inputs.mean()}) if is_short else state

    step = compose(loop_events, [changing("measure", Event.AFTER_LOSS, measure)], microbatches=3)
    inputs, targets = make_batch(size=7)  # slices of 3, 2 and 2
    torch.testing.assert_close(step(make_state(), (inputs, targets)).metrics["short"], inputs[3:].mean())


class OwnLoss(nn.Module):
    """A model that computes its loss, as language models do."""

    def __init__(self):
        super().__init__()
        self.net = make_mlp(3)

    def forward(self, inputs: Tensor, labels: Tensor):
        logits = self.net(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_batch_norm_buffers_flow_from_slice_to_slice():
    inputs, targets = make_batch(0, 9, (2, 6, 6))
    end = compose(loop_events, microbatches=3)(make_state(make_cnn()), (inputs, targets))
    net = make_cnn()
    for part in inputs.tensor_split(3):
        net(part)
    assert_close(end.buffers, dict(net.named_buffers()))
    assert end.buffers["1.num_batches_tracked"] == 3


def test_a_batch_of_fewer_examples_than_slices_is_cut_into_single_ones():
    batch = make_batch(size=2)
    expected = compose(loop_events)(make_state(), batch)
    assert_close(compose(loop_events, microbatches=3)(make_state(), batch).params, expected.params)


def test_the_microbatches_of_a_scope_override_those_of_the_step():
    sizes = []

    def look(state):
        sizes.append(len(state.inputs))
        return state

    program = [Microbatches(Grad(Event.BEFORE_FORWARD, pc.loop.forward, pc.loop.loss), microbatches=4), update]
    compose(program, [changing("look", Event.BEFORE_FORWARD, look)], microbatches=2)(make_state(), make_batch())
    assert sizes == [2, 2, 2, 2]


def test_the_events_of_a_program_are_in_order_and_each_once():
    program = (Event.BATCH_START, Microbatches(Grad(Event.BEFORE_FORWARD, pc.loop.forward), Event.BATCH_START), update)
    assert events_in(program) == (Event.BATCH_START, Event.BEFORE_FORWARD)
    assert events_in(loop_events) == compose(loop_events).events
    assert list(walk(program[2:])) == [update] and len(list(walk(program))) == 7


def test_update_may_be_called_without_a_pattern() -> None:
    assert update() == update and repr(update()) == "update"
