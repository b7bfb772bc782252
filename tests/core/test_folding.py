"""Programs as functions: weights of slices that an algorithm changes, slices of slices, used gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import purecompose as pc
from purecompose import Event, compose, loop_events, losses, tree
from purecompose.core.scopes import Grad, Microbatches
from purecompose.loop import advance, update
from tests.helpers import assert_close, changing, make_batch, make_mlp, make_state


PLAIN = Grad(Event.BEFORE_FORWARD, pc.loop.forward, pc.loop.loss)


def of_first(num):
    """Return an algorithm that keeps the first `num` examples of each slice."""
    return changing("first", Event.BEFORE_FORWARD, lambda s: s.replace(batch=tuple(member[:num] for member in s.batch)))


@pytest.mark.parametrize("is_differentiated", [False, True])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_slice_is_weighted_by_the_examples_that_an_algorithm_leaves(k, is_differentiated):
    (inputs, targets), net = make_batch(size=7), make_mlp()
    step, state = compose(loop_events, [of_first(2)], microbatches=k), make_state(net)
    if is_differentiated:  # selects the other engine for gradients
        end = torch.func.vmap(step, in_dims=(None, 0))(state, (inputs[None], targets[None]))
        end = tree.map(lambda leaf: leaf[0], end)
    else:
        end = step(state, (inputs, targets))
    parts = zip(inputs.tensor_split(k), targets.tensor_split(k), strict=True)
    rows = [torch.cat(members) for members in zip(*[(x[:2], y[:2]) for x, y in parts], strict=True)]
    expected = compose(loop_events)(state, tuple(rows))
    assert end.loss is not None and end.loss.item() == pytest.approx(F.cross_entropy(net(rows[0]), rows[1]).item())
    assert_close(end.params, expected.params)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

    def forward(self, ids):
        return self.head(self.embedding(ids)).transpose(1, 2)


def make_tokens():
    ids = torch.randint(5, (7, 4), generator=torch.Generator().manual_seed(1))
    return ids, torch.where(torch.arange(4) < torch.arange(7)[:, None] % 4, ids, -100)


@pytest.mark.parametrize("inner", [1, 2, 3])
@pytest.mark.parametrize("outer", [1, 2, 3])
def test_slices_of_slices_equal_the_whole_batch(outer, inner):
    state, batch = make_state(Words()), make_tokens()
    nested = [Microbatches(Microbatches(PLAIN, microbatches=inner), microbatches=outer), update, advance]
    expected, found = compose([PLAIN, update, advance])(state, batch), compose(nested)(state, batch)
    torch.testing.assert_close(found.loss, expected.loss)
    assert_close(found.params, expected.params)


def test_slices_of_slices_use_the_random_numbers_of_the_whole_batch():
    state, batch = make_state(make_mlp(dropout=0.5)), make_batch(size=8)
    nested = compose([Microbatches(Microbatches(PLAIN, microbatches=2), microbatches=2), update, advance])
    assert_close(nested(state, batch).params, compose([PLAIN, update, advance])(state, batch).params)


def test_the_gradient_through_slices_of_tokens_equals_that_of_the_batch():
    ids, targets = make_tokens()
    state = make_state(Words())

    def loss_after(params, k):
        end = compose(loop_events, microbatches=k)(state.replace(params=params), (ids, targets))
        outputs = end.forward(ids)
        return losses.cross_entropy(outputs, targets)

    whole, sliced = (torch.func.grad(loss_after)(state.params, k) for k in (1, 3))
    assert_close(sliced, whole)


def test_an_update_of_used_gradients_after_another_grad_is_an_error():
    program = [
        Grad(pc.loop.forward, pc.loop.loss),
        update(wrt="3.*"),
        Grad(pc.loop.forward, pc.loop.loss, wrt="0.*"),
        update(wrt="3.*"),
    ]
    with pytest.raises(RuntimeError, match=r"update\(wrt='3\.\*'\).*an earlier update has used"):
        compose(program)(make_state(), make_batch())


def own_loss(state):
    return state.replace(loss=torch.nn.functional.cross_entropy(state.outputs, state.targets))


@pytest.mark.parametrize("loss", [pc.loop.loss, own_loss])
def test_an_update_that_finds_none_of_its_gradients_is_reported(loss):
    program = [Grad(pc.loop.forward, loss, wrt="0.*"), update(wrt="3.*")]
    with pytest.warns(UserWarning, match=r"update\(wrt='3\.\*'\) updates nothing: .* of 0\.weight, 0\.bias"):
        compose(program)(make_state(), make_batch())


def taken(*events):
    """Return algorithms that remove the gradients at `events`, so that nothing is left to apply."""
    return [changing(f"taken at {event.name}", event, lambda s: s.replace(grads={})) for event in events]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_whose_gradients_were_removed_only_advances_time(microbatches):
    step = compose(loop_events, taken(Event.AFTER_TRAIN_BATCH), microbatches=microbatches)
    state = compose(loop_events)(make_state(), make_batch())
    after = step(state, make_batch())
    assert tree.equal((after.params, after.opt_state), (state.params, state.opt_state))
    assert after.timestamp.batch == 2 and after.loss is not None and after.loss.isfinite()


def test_removed_gradients_skip_every_update_up_to_the_next_grad():
    """Both updates after the removal are skipped; the third one applies the gradients of another Grad."""
    program = [
        Grad(pc.loop.forward, pc.loop.loss), Event.AFTER_TRAIN_BATCH, update(wrt="0.*"), update(wrt="3.*"),
        Grad(pc.loop.forward, pc.loop.loss, wrt="3.*"), update, advance,
    ]  # fmt: skip
    state, batch = make_state(), make_batch()
    after = compose(program, taken(Event.AFTER_TRAIN_BATCH))(state, batch)
    expected = compose([Grad(pc.loop.forward, pc.loop.loss, wrt="3.*"), update, advance])(state, batch)
    assert tree.equal((after.params, after.opt_state), (expected.params, expected.opt_state))
    assert tree.equal(after.params["0.weight"], state.params["0.weight"])


def test_slices_after_removed_gradients_apply_only_their_own():
    """Slices after the removal compute their own gradients, and only these are applied."""
    sliced = Microbatches(Grad(pc.loop.forward, pc.loop.loss), microbatches=2)
    program = [Grad(pc.loop.forward, pc.loop.loss), Event.AFTER_TRAIN_BATCH, sliced, update, advance]
    after = compose(program, taken(Event.AFTER_TRAIN_BATCH))(make_state(), make_batch())
    assert_close(after.params, compose([PLAIN, update, advance])(make_state(), make_batch()).params)


def test_if_some_gradients_are_removed_the_others_are_applied():
    def keep(state):
        return state.replace(grads={"0.bias": state.grads["0.bias"]})

    kept = changing("kept", Event.AFTER_TRAIN_BATCH, keep)
    state = make_state()
    after, plain = compose(loop_events, [kept])(state, make_batch()), compose(loop_events)(state, make_batch())
    changed = {name for name, param in after.params.items() if not torch.equal(param, state.params[name])}
    assert changed == {"0.bias"} and torch.equal(after.params["0.bias"], plain.params["0.bias"])
