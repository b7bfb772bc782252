"""ALiBi: the surgery on a GPT and its invariants, longer sequences than before, and shorter ones for training."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import purecompose as pc
from purecompose import losses, optim
from purecompose.algorithms import alibi, seq_length_warmup
from purecompose.nn.layers import AlibiAttention, ClassesSecond, NoPositions, PositionEmbedding, SelfAttention
from purecompose.nn.models import gpt, vit
from tests.algorithms.surgery_checks import applied, hooked, patched


VOCABULARY, LENGTH = 7, 8
ATTENTION = ("net.blocks.0.attention", "net.blocks.1.attention")


def make_net(seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return ClassesSecond(gpt(VOCABULARY, LENGTH, width=8, depth=2, num_heads=2, **options))


def make_state(**options: Any) -> pc.State:
    options = {"optimizer": optim.sgd(0.1, momentum=0.9), "key": 3, "duration": "8ba", **options}
    return pc.State.create(make_net(), loss=losses.cross_entropy, **options)


def state_of(net: nn.Module) -> pc.State:
    return pc.State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), duration="1ba")


def make_batch(seed: int = 0, num: int = 4, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (num, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def trained(state: pc.State, *algorithms: pc.Algorithm, num: int = 2) -> pc.State:
    step = pc.compose(pc.loop_events, algorithms)
    state = step.init(state)
    for seed in range(num):
        state = step(state, make_batch(seed))
    return state


def seen_batch(batch: Any, *algorithms: pc.Algorithm, **options: Any) -> Any:
    """Return the batch that the model sees."""
    seen = []
    spy = pc.Algorithm("spy", pc.on("batch_start"), lambda _, state: seen.append(state.batch) or state)
    step = pc.compose(pc.loop_events, [*algorithms, spy])
    step(step.init(make_state(**options)), batch)
    return seen[0]


def test_positional_embeddings_are_removed_and_all_else_is_kept() -> None:
    before = trained(make_state())
    copied = before.copy()
    after, report = applied(before, alibi())
    assert sorted(report.replaced) == sorted(("net.positions", *ATTENTION))
    assert report.dropped == ("net.positions.weight",) and report.made == ()
    assert all(new == old for new, old in report.kept.items())
    assert after.params.keys() == before.params.keys() - {"net.positions.weight"}
    for name, param in after.params.items():
        assert param is before.params[name]
        assert after.opt_state["momentum"][name] is before.opt_state["momentum"][name]
    assert not pc.tree.diff(before, copied)
    kinds = [type(module) for module in after.model.module.modules()]
    assert kinds.count(AlibiAttention) == 2 and kinds.count(NoPositions) == 1
    assert SelfAttention not in kinds and PositionEmbedding not in kinds
    assert pc.compose(pc.loop_events)(after, make_batch(5)).timestamp.batch == 3


def test_a_network_without_attention_is_warned_about() -> None:
    state = state_of(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="looked for SelfAttention or PositionEmbedding or GPT2Model or GPT2Attention"):
        applied(state, alibi())
    state = state_of(nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7)))
    with pytest.warns(UserWarning, match="found none in a network of Embedding, Linear, Sequential"):
        applied(state, alibi())


def test_without_attention_batches_are_left_as_they_are() -> None:
    net = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
    state, batch = state_of(ClassesSecond(net)), make_batch()
    step = pc.compose(pc.loop_events, [alibi(0.5)])
    with pytest.warns(UserWarning, match="alibi changed nothing"):
        state = step.init(state)
    after, expected = step(state, batch), pc.compose(pc.loop_events)(state, batch)
    assert pc.tree.equal(after.params, expected.params)


def test_batches_that_cannot_be_cut_are_refused_with_the_setting_that_leaves_them() -> None:
    state = pc.State.create(vit((1, 4, 4), 3, width=8, depth=1), loss=losses.cross_entropy, optimizer=optim.sgd(0.1))
    images = torch.zeros(2, 1, 4, 4), torch.tensor([0, 1])
    step = pc.compose(pc.loop_events, [alibi(0.5)])
    with pytest.raises(TypeError, match="expected sequences") as caught:
        step(step.init(state), images)
    assert "train_sequence_length_scaling=1" in "".join(caught.value.__notes__)
    step = pc.compose(pc.loop_events, [alibi(1)])
    assert step(step.init(state), images).timestamp.batch == 1


class Unknown(nn.Module):
    """A network with positions and an attention layer that the method does not know."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 8), PositionEmbedding(LENGTH, 8)
        self.attention = attention

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.tokens(ids)
        return self.attention(embedded + self.positions(embedded))


class Scaled(SelfAttention):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Gated(SelfAttention):
    def __init__(self) -> None:
        super().__init__(8, 2)
        self.gate = nn.Parameter(torch.ones(8))


class Narrow(SelfAttention):
    """A subclass that only changes the constructor."""

    def __init__(self) -> None:
        super().__init__(8, 2)


def test_positions_stay_where_no_attention_is_known() -> None:
    state = state_of(Unknown(nn.Linear(8, 8)))
    with pytest.raises(ValueError, match=r"positions: expected a supported attention.* Linear"):
        alibi().apply(pc.Event.INIT, state)


@pytest.mark.parametrize("attention", [Scaled(8, 2), Gated()])
def test_attention_that_computes_otherwise_is_refused_by_name(attention: SelfAttention) -> None:
    state, kind = state_of(Unknown(attention)), type(attention)
    with pytest.raises(ValueError, match=f"alibi: attention: expected a SelfAttention, got a {kind.__name__}, which"):
        applied(state, alibi())
    _, report = applied(state_of(Unknown(Narrow())), alibi())
    assert report.replaced == ("positions", "attention")


@pytest.mark.parametrize("change", [hooked, patched])
def test_attention_with_which_something_else_is_called_is_refused(change: Any) -> None:
    state = state_of(Unknown(change(SelfAttention(8, 2))))
    with pytest.raises(ValueError, match="alibi: attention: expected a SelfAttention, got one with hooks or with a"):
        applied(state, alibi())


def test_sequences_may_be_longer_than_before() -> None:
    state, (ids, _) = trained(make_state(), alibi()), make_batch(length=3 * LENGTH)
    with pytest.raises(ValueError, match=r"at most 8 positions, got 24"):
        make_state().forward(ids)
    logits = state.forward(ids)
    assert logits.shape == (4, VOCABULARY, 3 * LENGTH) and bool(logits.isfinite().all())
    long = pc.evaluate(state, [make_batch(length=3 * LENGTH)], metrics={"accuracy": pc.metrics.accuracy})
    assert 0 <= long["accuracy"] <= 1
    # The context of a token does not depend on the number of later tokens.
    torch.testing.assert_close(state.forward(ids[:, :LENGTH]), logits[..., :LENGTH], rtol=1e-4, atol=1e-6)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 20), st.data())
def test_it_stays_causal(length: int, data: st.DataObject) -> None:
    state, (ids, _) = trained(make_state(), alibi(), num=0), make_batch(length, 2, length)
    place = data.draw(st.integers(0, length - 1))
    other = ids.clone()
    other[:, place] = (ids[:, place] + 1) % VOCABULARY
    before, after = state.forward(ids), state.forward(other)
    assert torch.equal(before[..., :place], after[..., :place])
    assert not torch.equal(before[..., place], after[..., place])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, LENGTH), st.integers(50, 1000))
def test_rows_are_cut_and_nothing_is_moved(num: int, length: int, thousandths: int) -> None:
    ids, labels = make_batch(num, num, length)
    inputs, targets = seen_batch((ids, labels), alibi(thousandths / 1000))
    new_length = max(1, length * thousandths // 1000)
    assert inputs.shape == targets.shape == (num * length // new_length, new_length)
    for whole, cut in ((ids, inputs), (labels, targets)):
        assert torch.equal(cut.flatten(), whole.flatten()[: cut.numel()])
        assert whole.numel() - cut.numel() < new_length
    assert torch.equal(inputs[0], ids[0, :new_length])


def test_decimal_shares_give_whole_lengths() -> None:
    batch = make_batch(length=100)
    for percent in (7, 28, 29, 55, 57, 58):  # their products with 100 may not be exact integers
        assert seen_batch(batch, alibi(percent / 100))[0].shape[1] == percent


def test_the_states_input_determines_the_length_of_sequences() -> None:
    ids, labels = make_batch()
    batch = {"input_ids": torch.zeros(4, 3, dtype=torch.int64), "text": ids, "labels": labels}
    with pytest.raises(ValueError, match=r"a position for each of 4x8 tokens, got int64\[4, 3\]"):
        seen_batch(batch, alibi(0.5), input_field="text", target_field="labels")
    seen = seen_batch((torch.zeros((), dtype=torch.int64), ids, labels), alibi(0.5), input_field=1, target_field=2)
    assert torch.equal(seen[1], ids.reshape(8, 4)) and torch.equal(seen[2], labels.reshape(8, 4))


def test_it_trains_at_twice_the_length_that_it_was_built_for() -> None:
    step = pc.compose(pc.loop_events, [alibi(1)])
    start = step.init(make_state())
    for length in (LENGTH, 2 * LENGTH):
        state = step(start, make_batch(length=length))
        assert state.loss is not None and bool(state.loss.isfinite())
        for name, param in state.params.items():
            assert bool(param.isfinite().all()) and not torch.equal(param, start.params[name])


def test_a_vision_transformer_takes_images_of_any_size_that_its_patches_fit() -> None:
    state = state_of(vit((3, 8, 8), 5, width=8, depth=1, num_heads=2))
    after, _ = applied(state, alibi())
    assert after.forward(torch.zeros(2, 3, 16, 8)).shape == (2, 5)
    with pytest.raises(ValueError, match="patches of 4x4 do not fit images of 6x8"):
        after.forward(torch.zeros(2, 3, 6, 8))


def test_a_quarter_by_default_and_mappings_too() -> None:
    ids, labels = make_batch()
    batch = {"input_ids": ids, "labels": labels, "scale": torch.tensor(2.0)}
    seen = seen_batch(batch, alibi(), input_field="input_ids", target_field="labels")
    assert torch.equal(seen["input_ids"], ids.reshape(16, 2)) and torch.equal(seen["labels"], labels.reshape(16, 2))
    assert seen["scale"].data_ptr() == batch["scale"].data_ptr() and batch["input_ids"] is ids


def test_time_counts_the_loaders_batches_and_evaluation_is_not_cut() -> None:
    state = trained(make_state(), alibi(), num=2)
    assert state.timestamp.sample == 8
    shapes = []
    spy = pc.Algorithm("spy", pc.on("eval_before_forward"), lambda _, s: shapes.append(tuple(s.inputs.shape)) or s)
    pc.evaluate(state, [make_batch()], step=pc.compose(pc.loop_events, [alibi(), spy]))
    assert shapes == [(4, LENGTH)]


@pytest.mark.parametrize("names", [("alibi", "seq_length_warmup"), ("biases", "lengths"), ("seq_length_warmup", "z")])
def test_a_warm_up_is_of_the_rows_that_are_trained_on_whatever_their_names_and_order(names: tuple[str, str]) -> None:
    methods = [alibi(0.5, name=names[0]), seq_length_warmup(1.0, 1, 2, 1, name=names[1])]
    for order in (methods, methods[::-1]):
        assert seen_batch(make_batch(), *order)[0].shape == (8, 1)


def test_labels_of_whole_sequences_are_refused() -> None:
    batch = {"input_ids": make_batch()[0], "labels": make_batch()[1], "class": torch.zeros(4)}
    with pytest.raises(
        ValueError, match=r"expected all tensors to have a position for each of 4x8 tokens, got float32"
    ):
        seen_batch(batch, alibi(), input_field="input_ids", target_field="labels")


def test_inputs_that_are_not_sequences_are_refused() -> None:
    with pytest.raises(TypeError, match=r"alibi: expected sequences, .* got float32\[4, 8\]"):
        seen_batch((torch.zeros(4, 8), torch.zeros(4, 8)), alibi())
