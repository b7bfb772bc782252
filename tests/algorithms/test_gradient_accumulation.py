"""Gradient accumulation against the whole batch and torch's loop; weights of batches, and steps between updates."""

import contextlib
from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import Event, State, algorithms as alg, compose, loop_events, optim, tree
from purecompose.algorithms._around_updates import sam
from purecompose.algorithms._batch_sizes import AccumulatedGradients, gradient_accumulation
from purecompose.algorithms._optimizer_settings import gradient_clipping
from purecompose.core.scopes import Grad
from purecompose.loop import advance, update
from tests.algorithms import method_helpers as helpers


Batch = tuple[Tensor, Tensor]
OPTIMIZERS = [optim.sgd(0.3, momentum=0.9, weight_decay=0.01), optim.adam(0.02)]
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adam"])


def wide_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def groups(num: int = 3, size: int = 12) -> list[Batch]:
    """Return whole batches in float64."""
    inputs, targets = helpers.make_batch(num=num * size)
    return list(zip(inputs.double().split(size), targets.split(size), strict=True))


def parts(batch: Batch, sizes: list[int]) -> list[Batch]:
    return list(zip(batch[0].split(sizes), batch[1].split(sizes), strict=True))


def started(step, state: State, optimizer=OPTIMIZERS[0]) -> State:
    return step.init(state.replace(optimizer=optimizer, opt_state=optimizer.init(state.params)))


def slot_of(state: State) -> AccumulatedGradients:
    return state.slots["gradient_accumulation"]


def is_empty(state: State) -> bool:
    slot = slot_of(state)
    return not any(total.any() for total in slot.sums.values()) and slot.num_terms.item() == 0


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol=1e-9, atol=1e-12) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=atol)


def assert_as_whole(sizes: list[int], *others, optimizer=OPTIMIZERS[0], make_state=None, **options) -> State:
    """Check that groups of batches of these sizes train like whole batches; return the last state."""
    make_state = make_state or (lambda: helpers.make_state(wide_net()))
    whole = compose(loop_events, others)
    step = compose(loop_events, [gradient_accumulation(len(sizes)), *others], **options)
    first, second = started(whole, make_state(), optimizer), started(step, make_state(), optimizer)
    for batch in groups(size=sum(sizes)):
        first = whole(first, batch)
        for part in parts(batch, sizes):
            second = step(second, part)
        assert_close(second.params, first.params)
        assert_close(tree.leaves_with_paths(second.opt_state), tree.leaves_with_paths(first.opt_state))
        assert is_empty(second)
    return second


# One batch in parts


@each_optimizer
@pytest.mark.parametrize("sizes", [[6, 6], [4, 4, 4], [1, 11], [7, 2, 3], [5, 1, 4, 2]], ids=str)
def test_batches_weigh_their_examples_and_train_as_the_whole(sizes, optimizer):
    assert_as_whole(sizes, optimizer=optimizer)


def test_it_is_torchs_loop():
    """Losses are divided by the number of batches; one backward pass each, one optimizer step for all."""
    net, num = wide_net(), 3
    step = compose(loop_events, [gradient_accumulation(num)])
    state = started(step, helpers.make_state(net), optim.adamw(0.02))
    optimizer = torch.optim.AdamW(net.parameters(), 0.02)
    for batch in groups():
        optimizer.zero_grad()
        for inputs, targets in parts(batch, [4, 4, 4]):
            (F.cross_entropy(net(inputs), targets) / num).backward()
            state = step(state, (inputs, targets))
        optimizer.step()
        assert_close(state.params, {name: param.detach() for name, param in net.named_parameters()})


# Some parameters wait, the others do not


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_it_is_a_plain_loop_with_two_optimizers(is_compiled):
    """One optimizer steps after every second backward pass, with the mean gradient; the other one after each."""
    net = wide_net()
    step = compose(loop_events, [gradient_accumulation(2, where="0.weight")])
    step = pc.compile(step, backend="eager", quiet=True) if is_compiled else step
    optimizer = optim.by_pattern({"0.weight": optim.sgd(0.3, momentum=0.9)}, optim.adamw(0.02))
    state = started(step, helpers.make_state(net), optimizer)
    assert list(slot_of(state).sums) == ["0.weight"] and state.timestamp.run.batches_per_update == 1
    names = dict(net.named_parameters())
    second = torch.optim.SGD([names["0.weight"]], 0.3, momentum=0.9)
    each = torch.optim.AdamW([own for name, own in names.items() if name != "0.weight"], 0.02)
    for number, (inputs, targets) in enumerate(groups(5, 6)):
        F.cross_entropy(net(inputs), targets).backward()
        each.step()
        each.zero_grad()
        if number % 2:
            assert names["0.weight"].grad is not None
            names["0.weight"].grad /= 2
            second.step()
            second.zero_grad()
        before, state = state, step(state, (inputs, targets))
        assert_close(state.params, {name: param.detach() for name, param in names.items()})
        assert torch.equal(before.params["0.weight"], state.params["0.weight"]) == (number % 2 == 0)


def test_those_that_wait_are_clipped_with_the_others_when_they_move():
    step = compose(loop_events, [gradient_accumulation(2, where="0.*"), gradient_clipping("norm", 0.05)])
    state = started(step, helpers.make_state(wide_net()), optim.sgd(1.0))
    for number, batch in enumerate(groups(2)):
        before, state = state, step(state, batch)
        moves = {name: state.params[name] - before.params[name] for name in state.params}
        torch.testing.assert_close(tree.global_norm(list(moves.values())).item(), 0.05, rtol=1e-4, atol=0)
        assert moves["0.weight"].any() == moves["0.bias"].any() == (number == 1)


def test_a_bad_step_moves_none_and_those_that_wait_go_on_waiting():
    """A batch that is not finite is left out: as if it were not there for the sums, and no step for the others."""
    step = compose(loop_events, [gradient_accumulation(2, where="0.weight"), alg.skip_nonfinite()])
    plain = compose(loop_events, [gradient_accumulation(2, where="0.weight")])
    first, second, third = groups(3)
    bad = (first[0] * torch.inf, first[1])
    state = started(step, helpers.make_state(wide_net()), optim.sgd(0.3))
    expected = started(plain, helpers.make_state(wide_net()), optim.sgd(0.3))
    state, expected = step(step(state, first), bad), plain(expected, first)
    assert_close(state.params, expected.params)
    state, expected = step(state, second), plain(expected.replace(timestamp=state.timestamp), second)
    assert_close(state.params, expected.params)
    assert not is_empty(state)
    state, expected = step(state, third), plain(expected, third)
    assert_close(state.params, expected.params)
    assert is_empty(state)


def test_a_pattern_that_matches_nothing_is_an_error():
    step = compose(loop_events, [gradient_accumulation(2, where=("0.weight", "blocks.*"))])
    with pytest.raises(ValueError, match=r"where: 'blocks\.\*' matches no trainable parameter"):
        step.init(helpers.make_state())


# Weights of batches


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.double()

    def forward(self, ids):
        return self.head(self.embedding(ids)).transpose(1, 2)


def sentences(lengths: list[int]) -> Batch:
    """Return ids of sentences of these lengths; positions beyond them do not count."""
    ids = torch.randint(5, (len(lengths), 6), generator=torch.Generator().manual_seed(1))
    return ids, torch.where(torch.arange(6) < torch.tensor(lengths)[:, None], ids, -100)


LENGTHS = [6, 5, 1, 0, 0, 0, 3, 2]


@pytest.mark.parametrize("methods", [(), (alg.label_smoothing(0.1),)], ids=["plain", "smoothed"])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("sizes", [[4, 4], [1, 7], [3, 2, 3]], ids=str)
def test_batches_of_sentences_weigh_their_tokens(sizes, k, methods):
    """Only counted tokens matter; a batch without any, whose loss is NaN, has weight 0."""
    batch, whole = sentences(LENGTHS), compose(loop_events, methods)
    step = compose(loop_events, [gradient_accumulation(len(sizes)), *methods], microbatches=k)
    expected = whole(started(whole, helpers.make_state(Words())), batch)
    state = started(step, helpers.make_state(Words()))
    for part in parts(batch, sizes):
        state = step(state, part)
    assert_close(state.params, expected.params, rtol=1e-7, atol=1e-10)


class Counting(nn.Module):
    """A model that computes its loss over the labels that count."""

    def __init__(self):
        super().__init__()
        self.net = Words()

    def forward(self, ids, labels):
        return {"loss": F.cross_entropy(self.net(ids), labels)}


def test_a_models_own_loss_weighs_its_labels():
    ids, labels = sentences(LENGTHS[:3] + LENGTHS[6:])
    step = compose(loop_events, [gradient_accumulation(2)])
    state = started(step, helpers.make_state(Counting(), loss=pc.losses.ModelLoss(labels="labels")))
    whole = started(compose(loop_events), helpers.make_state(Counting(), loss=pc.losses.model_loss))
    expected = compose(loop_events)(whole, {"ids": ids, "labels": labels})
    for part in parts((ids, labels), [2, 3]):
        state = step(state, dict(zip(("ids", "labels"), part, strict=True)))
    assert_close(state.params, expected.params)


def test_a_group_without_counted_tokens_makes_no_update():
    step = compose(loop_events, [gradient_accumulation(2)])
    state = start = started(step, helpers.make_state(Words()), optim.sgd(0.1, momentum=0.9))
    for part in parts(sentences([0, 0, 0, 0]), [2, 2]):
        state = step(state, part)
    assert tree.equal(state.params, start.params) and is_empty(state)


@pytest.mark.parametrize("nothing", [torch.nan, 0.0])
def test_an_empty_mean_whose_gradient_is_nan_is_left_out(nothing):
    params = {"w": torch.ones(2)}
    slot = AccumulatedGradients.empty(params).counted(4).added({"w": torch.tensor([2.0, 4.0])}, 7)
    slot = slot.counted(0).added({"w": torch.full((2,), nothing)}, 3)
    assert slot.num_terms.item() == 4 and slot.current.item() == 0 and not slot.is_counted
    torch.testing.assert_close(slot.mean(params), {"w": torch.tensor([2.0, 4.0])})


def test_without_an_event_that_counts_terms_batches_weigh_their_examples():
    program = (Event.BEFORE_TRAIN_BATCH, Grad(pc.loop.forward, pc.loop.loss), Event.AFTER_TRAIN_BATCH, update, advance)
    (batch,) = groups(1)
    with pytest.warns(UserWarning, match="gradient_accumulation acts at AFTER_LOSS, which the program does not have"):
        step = compose(program, [gradient_accumulation(2)])
    whole = compose(program)
    state = started(step, helpers.make_state(wide_net()))
    expected = whole(started(whole, helpers.make_state(wide_net())), batch)
    for part in parts(batch, [3, 9]):
        state = step(state, part)
    assert_close(state.params, expected.params)


# Between updates


@each_optimizer
def test_between_updates_weights_and_optimizer_are_the_same_bits(optimizer):
    step = compose(loop_events, [gradient_accumulation(3)])
    state = started(step, helpers.make_state(wide_net()), optimizer)
    for batch in groups():
        for number, part in enumerate(parts(batch, [4, 4, 4]), start=1):
            before, state = state, step(state, part)
            is_same = tree.equal((before.params, before.opt_state), (state.params, state.opt_state))
            assert is_same == (number < 3) and is_empty(state) == (number == 3)
            assert state.timestamp.batch == before.timestamp.batch + 1
            assert state.loss is not None and state.loss.isfinite() and not tree.equal(state.loss, before.loss)


def test_weight_decay_and_schedules_act_only_in_updates_at_their_time():
    """The learning rate is that of the update's batch."""
    rate = 0.4 * pc.schedule.linear(1.0, 0.0, "4ba")
    step = compose(loop_events, [gradient_accumulation(2)])
    state = start = started(step, helpers.make_state(wide_net()), optim.sgd(rate))
    (batch,) = groups(1)
    for part in parts(batch, [6, 6]):
        state = step(state, part)
    module = pc.to_module(start)
    F.cross_entropy(module(batch[0]), batch[1]).backward()
    for name, param in module.named_parameters():
        assert param.grad is not None
        expected = start.params[name] - 0.4 * 0.75 * param.grad
        torch.testing.assert_close(state.params[name], expected, rtol=1e-6, atol=1e-9)


# With other methods


@pytest.mark.parametrize("is_first", [True, False])
def test_the_mean_gradient_is_clipped(is_first):
    both = [gradient_accumulation(2), gradient_clipping("norm", 0.05)]
    whole, step = compose(loop_events, both[1:]), compose(loop_events, both if is_first else both[::-1])
    (batch,) = groups(1)
    start = started(step, helpers.make_state(wide_net()))
    assert step.plan(start).order(Event.AFTER_TRAIN_BATCH) == ("gradient_accumulation", "gradient_clipping")
    expected, state = whole(started(whole, helpers.make_state(wide_net())), batch), start
    for part in parts(batch, [5, 7]):
        state = step(state, part)
    assert_close(state.params, expected.params)


@pytest.mark.parametrize("is_first", [True, False])
def test_with_sam_each_batch_has_its_own_point_nearby(is_first):
    both = [gradient_accumulation(2), sam(0.3)]
    step = compose(loop_events, both if is_first else both[::-1])
    state = start = started(step, helpers.make_state(wide_net()), optim.sgd(0.3))
    (batch,) = groups(1)
    total = {name: torch.zeros_like(param) for name, param in start.params.items()}
    for part in parts(batch, [5, 7]):
        alone = compose(loop_events, [sam(0.3)])
        after = alone(started(alone, helpers.make_state(wide_net()), optim.sgd(0.3)), part)
        total = {name: sum_ + len(part[1]) * (after.params[name] - start.params[name]) for name, sum_ in total.items()}
        state = step(state, part)
    assert_close(state.params, {name: param + total[name] / 12 for name, param in start.params.items()})


def test_only_a_batch_that_overflows_is_left_out_of_its_group():
    step = compose(loop_events, [gradient_accumulation(2), alg.loss_scaling(2.0**8)])
    state = start = started(step, helpers.make_state())
    good, skipped = helpers.make_batch(), []
    bad = (good[0] * torch.inf, good[1])
    for batch in (bad, bad, bad, good):
        state = step(state, batch)
        skipped.append(state.metrics["loss_scaling/skipped"].item())
        if len(skipped) == 2:  # a group without a good batch
            assert tree.equal((state.params, state.opt_state), (start.params, start.opt_state)) and is_empty(state)
    assert skipped == [1, 1, 1, 0] and state.slots["loss_scaling"].scale.item() == 2.0**5
    plain = compose(loop_events)
    expected = plain(started(plain, helpers.make_state()), good)
    assert_close(state.params, expected.params, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:gradient_accumulation acts at AFTER_LOSS")
@pytest.mark.parametrize("is_together", [True, False])
def test_of_two_players_those_with_gradients_before_the_event_wait(is_together):
    """Both players' gradients come before it, or only the second's; then the first one updates in every step."""
    first, second = Grad(pc.loop.forward, pc.loop.loss, wrt="0.*"), Grad(pc.loop.forward, pc.loop.loss, wrt="2.*")
    start, end = Event.BEFORE_TRAIN_BATCH, (Event.AFTER_TRAIN_BATCH, update(wrt="2.*"), advance)
    if is_together:
        program = (start, first, second, Event.AFTER_TRAIN_BATCH, update(wrt="0.*"), update(wrt="2.*"), advance)
    else:
        program = (start, first, update(wrt="0.*"), second, *end)
    step = compose(program, [gradient_accumulation(2)])
    state = started(step, helpers.make_state(wide_net()), optim.sgd(0.3))
    (batch,) = groups(1)

    def gradients(params: dict[str, Tensor], part: Batch) -> dict[str, Tensor]:
        net = wide_net()
        net.load_state_dict(params)
        F.cross_entropy(net(part[0]), part[1]).backward()
        return {name: param.grad for name, param in net.named_parameters() if param.grad is not None}

    params, sums = dict(state.params), dict.fromkeys(state.params, 0.0)
    waiting = list(params) if is_together else ["2.weight", "2.bias"]
    for part in parts(batch, [5, 7]):
        state = step(state, part)
        own = gradients(params, part)
        params = {n: p if n in waiting else p - 0.3 * own[n] for n, p in params.items()}
        own = gradients(params, part)
        sums = {name: total + len(part[1]) * own[name] for name, total in sums.items()}
    expected = {n: p - 0.3 * sums[n] / 12 if n in waiting else p for n, p in params.items()}
    assert_close(state.params, expected)


# The slot


def test_sums_of_half_precision_are_float32():
    grad = {"w": torch.full((2,), 3e4, dtype=torch.float16)}
    slot = AccumulatedGradients.empty({"w": torch.zeros(2, dtype=torch.float16)})
    for _ in range(3):
        slot = slot.added(grad, 256)
    assert slot.sums["w"].dtype is torch.float32 and tree.equal(slot.mean(grad), grad)


def test_params_may_be_frozen_later_but_thawing_them_is_an_error():
    step = compose(loop_events, [gradient_accumulation(2)])
    (batch,) = groups(1)
    first, second = parts(batch, [6, 6])
    state = step(started(step, helpers.make_state(wide_net())), first)
    after = step(state.replace(frozen=("0.weight",)), second)
    assert torch.equal(after.params["0.weight"], state.params["0.weight"]) and is_empty(after)
    assert not torch.equal(after.params["0.bias"], state.params["0.bias"])
    state = started(step, helpers.make_state(wide_net()).replace(frozen=("0.weight",)))
    with pytest.raises(
        RuntimeError, match=r"expected gradients of the parameters that were trainable at INIT, got one of 0\.weight"
    ):
        step(state.replace(frozen=()), first)


def test_all_that_wait_may_be_frozen_later():
    """From then on the others train as by a step for which nothing waits."""
    frozen = ("0.weight", "0.bias")
    step, plain = compose(loop_events, [gradient_accumulation(2, where="0.*")]), compose(loop_events)
    state = started(step, helpers.make_state(wide_net())).replace(frozen=frozen)
    for batch in groups(3):
        before, state = state, step(state, batch)
        assert_close(state.params, plain(before, batch).params, rtol=0, atol=0)
        assert all(torch.equal(state.params[name], before.params[name]) for name in frozen)


def test_parameters_may_wait_for_several_times():
    """Three optimizers of a plain loop step after each, every second and every third backward pass."""
    net = wide_net()
    names = dict(net.named_parameters())
    methods = [gradient_accumulation(2, where="0.*"), gradient_accumulation(3, where="2.weight", name="third")]
    step = compose(loop_events, methods)
    state = started(step, helpers.make_state(net), optim.adamw(0.02))
    periods = {"0.weight": 2, "0.bias": 2, "2.weight": 3, "2.bias": 1}
    optimizers = {name: torch.optim.AdamW([names[name]], 0.02) for name in names}
    for number, (inputs, targets) in enumerate(groups(6, 6), 1):
        F.cross_entropy(net(inputs), targets).backward()
        for name, period in periods.items():
            if number % period == 0:
                grad = names[name].grad
                assert grad is not None
                grad /= period
                optimizers[name].step()
                optimizers[name].zero_grad()
        state = step(state, (inputs, targets))
        assert_close(state.params, {name: param.detach() for name, param in names.items()})


# Transforms and programs


def test_a_program_with_two_gradients_to_collect_is_refused():
    """The second player's gradients would be mistaken for those of another batch, and never used."""
    turn = (Grad(pc.loop.forward, pc.loop.loss), Event.AFTER_TRAIN_BATCH, update)
    program = (Event.BEFORE_TRAIN_BATCH, *turn, *turn, advance)
    with pytest.raises(ValueError, match=r"^gradient_accumulation adds up .*fire Event.AFTER_TRAIN_BATCH once"):
        compose(program, [gradient_accumulation(2)])
    compose(program, [gradient_accumulation(1)])


# Settings and programs


@pytest.mark.filterwarnings("ignore:gradient_accumulation acts at AFTER_LOSS")
def test_a_program_without_a_gradient_before_the_event_is_still_an_error():
    program = (Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH, update, advance)
    step = compose(program, [gradient_accumulation(2)])
    with pytest.raises(RuntimeError, match="comes before any Grad"):
        step(step.init(helpers.make_state()), helpers.make_batch())


@pytest.mark.parametrize("options", [{"duration": "2ep", "batches_per_epoch": 3}, {"duration": "6ba"}, {}])
def test_the_last_batches_of_a_run_of_known_length_are_applied(options) -> None:
    batches = [part for group in groups(2) for part in parts(group, [4, 4, 4])]
    whole, step = compose(loop_events), compose(loop_events, [gradient_accumulation(4)])
    expected = started(whole, helpers.make_state(wide_net()))
    found = started(step, helpers.make_state(wide_net()))
    time = State.create(wide_net(), loss=pc.losses.mse, optimizer=OPTIMIZERS[0], **options).timestamp
    found = found.replace(timestamp=time)
    for batch in batches:
        found = step(found, batch)
    for group in (batches[:4], batches[4:]) if options else (batches[:4],):
        expected = whole(expected, tuple(map(torch.cat, zip(*group, strict=True))))
    assert_close(found.params, expected.params)
    assert is_empty(found) == bool(options)


def test_a_sum_is_found_although_no_batch_is_cut() -> None:
    step = compose(loop_events, [gradient_accumulation(2)])
    state = helpers.make_state(wide_net(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets).sqrt())
    with pytest.raises(ValueError, match="examples together, but .* gradient_accumulation"):
        step(step.init(state), groups(1)[0])


def test_groups_go_on_after_the_length_of_a_run() -> None:
    step = compose(loop_events, [gradient_accumulation(2)])
    state = step.init(helpers.make_state(wide_net(), duration="3ba"))
    changed = []
    for _ in range(8):
        before, state = state.params, step(state, groups(1)[0])
        changed.append(state.params is not before)
    assert changed == [False, True, True, True, False, True, False, True]


@pytest.mark.parametrize("num", [4, 8, 5])
def test_a_run_that_ends_within_a_group_warns(num: int) -> None:
    given, step = groups(5), compose(loop_events, [gradient_accumulation(num)])
    state = State.create(wide_net(), loss=pc.losses.cross_entropy, optimizer=OPTIMIZERS[0], duration="1ep")
    with pytest.warns(UserWarning, match=f"within a group of {num}") if num != 5 else contextlib.nullcontext():
        pc.fit(step, state, Unsized(given))
    pc.fit(step, state, given)  # of known length


class Unsized:
    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


# Time in updates


def test_time_may_be_counted_in_updates():
    """With k batches per update, a run, a schedule and an interval in updates are those of k times as many batches."""
    seen = []

    def look(event, state):
        seen.append(state.timestamp.batch)
        return state

    every_second = pc.Algorithm("look", pc.on(Event.BATCH_END) & pc.every("2up"), look, host=True)
    averages = alg.ema("2up", every="1up", start="1up")
    rate = 0.3 * pc.schedule.linear(1.0, 0.0, "4up")
    step = compose(loop_events, [gradient_accumulation(3), every_second, averages])
    state = started(step, helpers.make_state(duration="4up"), optim.sgd(rate))
    assert state.timestamp.run.total_batches == 12
    batch, counts = helpers.make_batch(), []
    while not state.timestamp.is_finished():
        state = step(state, batch)
        counts.append(state.timestamp.get("up"))
    assert counts == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert seen == [6, 12]
    assert state.slots["ema"].num == 4
    other = compose(loop_events, [gradient_accumulation(3), alg.ema("6ba", every="3ba", start="3ba")])
    rate = 0.3 * pc.schedule.linear(1.0, 0.0, "12ba")
    in_batches = started(other, helpers.make_state(duration="12ba"), optim.sgd(rate))
    for _ in range(12):
        in_batches = other(in_batches, batch)
    assert not tree.diff(state.params, in_batches.params)
    assert not tree.diff(state.slots["ema"], in_batches.slots["ema"])


def test_without_accumulation_an_update_is_a_batch(tmp_path):
    run = pc.time.RunLength("4up", batches_per_epoch=3)
    assert run.total_batches == 4
    state = compose(loop_events, [gradient_accumulation(3)]).init(helpers.make_state(duration="4up"))
    pc.save(state, tmp_path / "state")
    loaded = pc.load(tmp_path / "state", state.replace(timestamp=pc.time.Timestamp()))
    assert loaded.timestamp == state.timestamp and loaded.timestamp.run.batches_per_update == 3


def test_methods_read_the_length_of_a_run_in_updates_before_accumulation_is_initialised():
    """Gyro dropout, which replaces layers and therefore comes first at INIT, keeps masks for a share of the run."""
    periods = []
    for duration in ("8up", "32ba"):
        step = compose(loop_events, [alg.gyro_dropout(0.5, 4, 2), gradient_accumulation(4)])
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
        state = pc.State.create(net, loss=pc.losses.cross_entropy, optimizer=optim.sgd(0.1), duration=duration)
        periods.append(step.init(state).slots["gyro_dropout"].period_length.item())
    assert periods == [16, 16]


def test_the_unit_of_updates_is_that_of_the_step_that_trains():
    """A run that continues without accumulation, or over fewer batches, counts in its own updates from there on."""
    state, batches = helpers.make_state(duration="2up"), [helpers.make_batch()] * 10
    state = pc.fit(compose(loop_events, [gradient_accumulation(4)]), state, batches)
    assert state.timestamp.batch == 8 and state.timestamp.update == 2
    other = pc.fit(compose(loop_events, [gradient_accumulation(2)]), state, batches, duration="6up")
    assert other.timestamp.batch == 12 and other.timestamp.update == 6
    without = pc.fit(compose(loop_events), state, batches, duration="10up")
    assert without.timestamp.batch == 10 == without.timestamp.update
