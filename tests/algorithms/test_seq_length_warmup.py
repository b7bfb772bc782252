"""Sequence length warm-up: the ramp and the batches of the core, and the algorithm in a step."""

import math
from collections import UserDict
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor, nn

from purecompose import losses
from purecompose.algorithms._seq_length_warmup import seq_length_warmup, set_batch_sequence_length, warmup_length
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import compose
from purecompose.core.state import State
from purecompose.loop import loop_events
from purecompose.losses.targets import Mixture
from purecompose.optim import sgd
from purecompose.surgery.weights import to_module
from purecompose.time.predicates import on


class Bigram(nn.Module):
    """A model that predicts each token from the previous one, and computes its own loss if it gets labels."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return logits.transpose(1, 2)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def make_state(duration="10ba", **options):
    torch.manual_seed(0)
    given = {"loss": losses.cross_entropy, "input_field": "input_ids", "target_field": "labels", **options}
    return State.create(Bigram(), optimizer=sgd(0.3), key=5, duration=duration, **given)


def make_batch(length=16, num=4):
    ids = torch.randint(11, (num, length + 1), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def run(method, state, batch, num, **options):
    """Return the inputs of the network in each step, and the states after the steps."""
    seen, spy = [], Algorithm("spy", on("batch_start"), lambda event, s: seen.append(s.batch) or s)
    step = compose(loop_events, [method, spy], **options)
    states = [step.init(state)]
    for _ in range(num):
        states.append(step(states[-1], batch))
    return seen, states


def test_lengths_follow_the_ramp_and_are_reported():
    seen, states = run(seq_length_warmup(0.5, 2, 12, 3), make_state(), make_batch(), 8)
    lengths = [batch["input_ids"].shape[1] for batch in seen]
    assert lengths == [2, 2, 5, 8, 11, 12, 12, 12]  # and cut to 12 from then on
    for length, state in zip(lengths, states[1:], strict=True):
        assert state.metrics["seq_length_warmup/curr_seq_len"] == length
        assert state.metrics["seq_length_warmup/curr_bs"] == 4


@pytest.mark.parametrize("truncate", [True, False])
def test_a_step_is_gradient_descent_on_the_shortened_batch(truncate):
    batch = make_batch(10)
    _, (state, after) = run(seq_length_warmup(0.5, 4, 8, 1, truncate=truncate), make_state(), batch, 1)
    rows = {key: value[:, :4] if truncate else value.reshape(-1, 4) for key, value in batch.items()}
    net = to_module(state)
    loss = F.cross_entropy(net(rows["input_ids"]), rows["labels"])
    grads = torch.autograd.grad(loss, list(net.parameters()))
    expected = {n: p.detach() - 0.3 * g for (n, p), g in zip(net.named_parameters(), grads, strict=True)}
    torch.testing.assert_close(after.params, expected)
    torch.testing.assert_close(after.loss, loss.detach())
    assert after.metrics["seq_length_warmup/curr_bs"] == (4 if truncate else 10)


def test_a_model_with_its_own_loss_sees_ids_and_labels_cut_alike():
    batch = make_batch()
    batch = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
    state = make_state(loss=losses.ModelLoss(shift=1), input_field=None)
    seen, (start, after) = run(seq_length_warmup(0.5, 5, 16), state, batch, 1)
    assert torch.equal(seen[0]["labels"], batch["labels"][:, :5])
    expected = to_module(start)(input_ids=batch["input_ids"][:, :5], labels=batch["labels"][:, :5])["loss"]
    torch.testing.assert_close(after.loss, expected.detach())


def test_pairs_of_tensors_and_other_names_are_accepted():
    batch = make_batch()
    pair = (batch["input_ids"], batch["labels"])
    seen, _ = run(seq_length_warmup(0.5, 5, 16), make_state(input_field=0, target_field=1), pair, 1)
    assert torch.equal(seen[0][0], pair[0][:, :5]) and torch.equal(seen[0][1], pair[1][:, :5])
    named = {"features": torch.rand(4, 3), "tokens": pair[0], "y": pair[1]}
    seen, _ = run(seq_length_warmup(0.5, 5, 16), make_state(input_field="tokens", target_field="y"), named, 1)
    assert seen[0]["tokens"].shape == (4, 5) and seen[0]["features"].data_ptr() == named["features"].data_ptr()


def test_ends_are_preserved_in_a_step():
    batch = {**make_batch(), "attention_mask": torch.ones(4, 16)}
    seen, _ = run(seq_length_warmup(0.5, 5, 16, preserve_end_of_sequence=True), make_state(), batch, 1)
    expected = torch.cat([batch["input_ids"][:, :4], batch["input_ids"][:, -1:]], 1)
    assert torch.equal(seen[0]["input_ids"], expected)


@pytest.mark.parametrize("inputs", [torch.rand(4, 6), torch.rand(4, 2, 6, 6), torch.ones(4, 6, dtype=torch.bool)])
def test_inputs_that_are_not_sequences_are_refused(inputs):
    state = make_state(input_field=0, target_field=1)
    with pytest.raises(TypeError, match="mine: expected sequences.*got"):
        run(seq_length_warmup(name="mine"), state, (inputs, torch.zeros(4)), 1)


# The core


NUMS, LENGTHS = st.integers(1, 5), st.integers(1, 12)
RANGES = st.tuples(st.integers(1, 40), st.integers(1, 40)).map(sorted)


def ids_of(num, length):
    """Return tokens that are all different."""
    return torch.arange(num * length).reshape(num, length)


# The ramp


@given(st.integers(1, 60), st.integers(0, 10), RANGES, st.integers(1, 50))
def test_the_ramp_is_the_closed_form(total, tenths, bounds, step):
    low, high = bounds
    lengths = [
        warmup_length(batch / total, duration=tenths / 10, min_seq_length=low, max_seq_length=high, step_size=step)
        for batch in range(total + 1)
    ]
    num_steps = math.ceil(Fraction(high - low, step))
    for batch, length in enumerate(lengths):
        elapsed, duration = Fraction(batch, total), Fraction(tenths, 10)
        done = num_steps if elapsed >= duration else math.floor(num_steps * elapsed / duration)
        assert length == min(low + step * done, high)


def test_the_defaults_over_a_thousand_batches():
    lengths = [warmup_length(batch / 1000) for batch in range(1000)]
    assert lengths[0] == 8 and lengths[299] == 968 and set(lengths[300:]) == {1024}
    assert len(set(lengths)) == 17  # few enough to compile each
    fine = [warmup_length(batch / 1000, step_size=8) for batch in range(1000)]
    assert fine[:6] == [8, 8, 8, 16, 16, 24] and fine[299] == 1016 and set(fine[300:]) == {1024}


@pytest.mark.parametrize(
    "settings", [{"duration": 0}, {"max_seq_length": 8}, {"max_seq_length": 10, "step_size": 100}, {"duration": 1e-300}]
)
def test_nothing_divides_by_zero(settings):
    lengths = [warmup_length(batch / 3, **settings) for batch in range(4)]
    assert lengths == sorted(lengths) and lengths[-1] == settings.get("max_seq_length", 1024)


# Truncation


@given(NUMS, LENGTHS, LENGTHS)
def test_truncation_keeps_a_prefix_and_does_not_change_the_batch(num, length, wanted):
    ids = ids_of(num, length)
    batch = {"input_ids": ids, "labels": ids + 1, "attention_mask": torch.ones_like(ids), "name": "x"}
    before = dict(batch)
    short = set_batch_sequence_length(batch, wanted)
    assert all(batch[key] is value for key, value in before.items()) and torch.equal(ids, ids_of(num, length))
    if wanted >= length:
        assert short is batch
        return
    assert list(short) == list(batch) and short["name"] == "x"
    assert torch.equal(short["input_ids"], ids[:, :wanted])
    assert torch.equal(short["labels"], short["input_ids"] + 1)
    assert short["attention_mask"].shape == (num, wanted)
    assert short["input_ids"].is_contiguous()


def test_members_without_positions_are_kept_and_masks_cut_on_both_sides():
    ids = ids_of(3, 8)
    batch = {
        "input_ids": ids,
        "label": torch.arange(3),
        "features": torch.rand(3, 20),
        "position_ids": torch.arange(8)[None],
        "square": torch.rand(8, 8).expand(3, 1, 8, 8),
        "causal": torch.ones(3, 8, 8, dtype=torch.bool),
        "soft": torch.rand(3, 5, 8),
        "embeddings": torch.rand(3, 8, 8),
        "names": ["a", "b", "c"],
        "temperature": torch.tensor(0.5),
    }
    short = set_batch_sequence_length(batch, 4)
    assert short["names"] == batch["names"]
    for key in ("label", "features", "temperature"):
        assert short[key] is batch[key]
    shapes = {key: tuple(short[key].shape) for key in ("position_ids", "square", "causal", "soft", "embeddings")}
    assert shapes == {
        "position_ids": (1, 4),
        "square": (3, 1, 4, 4),
        "causal": (3, 4, 4),
        "soft": (3, 5, 4),
        "embeddings": (3, 4, 8),
    }
    assert torch.equal(short["square"], batch["square"][..., :4, :4])


class Encoding(UserDict):
    """A mapping that is not a dict, with something beside its items, as tokenizers return them."""

    def __init__(self, items, encodings=None):
        super().__init__(items)
        self.encodings = encodings


@dataclass
class Sequences:
    tokens: Tensor
    labels: Tensor


@pytest.mark.parametrize("truncate", [True, False])
def test_batches_of_any_structure_are_cut(truncate):
    ids, short = ids_of(2, 6), ids_of(2, 6)[:, :3] if truncate else torch.arange(12).reshape(4, 3)

    def shortened(batch):
        return set_batch_sequence_length(batch, 3, truncate=truncate)

    pair = shortened((ids, ids))
    assert type(pair) is tuple and all(torch.equal(member, short) for member in pair)
    encoding = shortened(Encoding({"input_ids": ids}, encodings="kept"))
    assert type(encoding) is Encoding and encoding.encodings == "kept" and torch.equal(encoding["input_ids"], short)
    held = shortened(Sequences(ids, ids))
    assert type(held) is Sequences and torch.equal(held.labels, short)
    nested = shortened({"text": {"ids": ids}, "labels": [ids]})
    assert torch.equal(nested["text"]["ids"], short) and torch.equal(nested["labels"][0], short)
    assert torch.equal(shortened(ids), short)
    vectors = torch.rand(2, 6, 5)
    assert shortened({"embeddings": vectors})["embeddings"].shape == (*short.shape, 5)


def test_mixtures_are_cut_term_by_term():
    ids = ids_of(2, 6)
    mixture = Mixture.of(ids).mixed_with(torch.tensor([1, 0]), 0.25)
    _, short = set_batch_sequence_length((ids, mixture), 2)
    assert torch.equal(short.targets[1], ids.flip(0)[:, :2]) and short.weights[1] is mixture.weights[1]


# Ends


def test_the_end_of_a_row_is_kept():
    ids = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 0, 0, 0, 0], [30, 31, 32, 33, 0, 0], [0] * 6])
    mask = torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0], [0] * 6])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids * 10, "one": torch.arange(6)[None]}
    short = set_batch_sequence_length(batch, 3, preserve_end_of_sequence=True)
    assert short["input_ids"].tolist() == [[10, 11, 15], [20, 21, 0], [30, 31, 33], [0, 0, 0]]
    assert short["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]]
    assert torch.equal(short["labels"], short["input_ids"] * 10)
    assert short["one"].tolist() == [[0, 1, 2]]  # common to all rows, whose ends differ


def test_the_end_is_found_if_padding_is_on_the_left():
    batch = {"input_ids": torch.tensor([[0, 0, 7, 8, 9]]), "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])}
    short = set_batch_sequence_length(batch, 4, preserve_end_of_sequence=True)
    assert short["input_ids"].tolist() == [[0, 0, 7, 9]] and short["attention_mask"].tolist() == [[0, 0, 1, 1]]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=4), st.integers(1, 7))
def test_ends_are_those_of_a_loop_over_rows(valid, wanted):
    num = len(valid)
    ids = ids_of(num, 8) + 1
    mask = (torch.arange(8) < torch.tensor(valid)[:, None]).long()
    soft = torch.rand(num, 3, 8)
    batch = {"input_ids": ids, "attention_mask": mask, "soft": soft}
    short = set_batch_sequence_length(batch, wanted, preserve_end_of_sequence=True)
    for row, count in enumerate(valid):
        expected = ids[row, :wanted].tolist()
        dense = soft[row, :, :wanted].clone()
        if count > wanted:
            expected[-1], dense[:, -1] = int(ids[row, count - 1]), soft[row, :, count - 1]
        assert short["input_ids"][row].tolist() == expected
        assert torch.equal(short["soft"][row], dense)
        assert short["attention_mask"][row].tolist() == [1] * min(count, wanted) + [0] * max(0, wanted - count)


# Rows


@given(NUMS, LENGTHS, LENGTHS)
def test_rows_hold_all_tokens_in_order_but_fewer_than_one_row(num, length, wanted):
    ids = ids_of(num, length)
    batch = {"input_ids": ids, "labels": ids + 1, "soft": ids[:, None].expand(-1, 13, -1), "scale": torch.tensor(2.0)}
    rows = set_batch_sequence_length(batch, wanted, truncate=False)
    if wanted >= length:
        assert rows is batch
        return
    kept = rows["input_ids"].flatten()
    assert rows["input_ids"].shape == (num * length // wanted, wanted)
    assert torch.equal(kept, torch.arange(len(kept))) and 0 <= num * length - len(kept) < wanted
    assert torch.equal(rows["labels"], rows["input_ids"] + 1) and rows["scale"] is batch["scale"]
    assert torch.equal(rows["soft"], rows["input_ids"][:, None].expand(-1, 13, -1))


@pytest.mark.parametrize(
    "member",
    [torch.arange(2), torch.rand(2, 5), torch.arange(6)[None], torch.ones(2, 6, 6, dtype=torch.bool), ["a", "b"]],
)
def test_members_that_cannot_be_cut_into_rows_are_refused(member):
    with pytest.raises(ValueError, match="truncate=False: .*use truncate=True"):
        set_batch_sequence_length({"input_ids": ids_of(2, 6), "member": member}, 4, truncate=False)


# Errors


@pytest.mark.parametrize(
    "batch", [{}, {"x": torch.arange(3)}, torch.rand(3, 4), (torch.rand(2, 3, 8, 8),), "text", None]
)
def test_a_batch_without_sequences_is_refused(batch):
    with pytest.raises(TypeError, match=r"expected sequences, token ids as integers \(N, L\)"):
        set_batch_sequence_length(batch, 2)


def test_bad_arguments_are_refused():
    ids = ids_of(2, 6)
    with pytest.raises(ValueError, match="no end is lost"):
        set_batch_sequence_length(ids, 2, truncate=False, preserve_end_of_sequence=True)
    for batch in (ids, {"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones(2, 1, 6, 6)}):
        with pytest.raises(ValueError, match=r"expected an attention_mask \(2, 6\)"):
            set_batch_sequence_length(batch, 2, preserve_end_of_sequence=True)


def test_a_mask_that_all_examples_share_is_cut_on_both_sides():
    ids, mask = torch.arange(12).view(2, 6), torch.ones(6, 6, dtype=torch.bool).tril()
    cut = set_batch_sequence_length({"input_ids": ids, "causal": mask}, 4)
    assert torch.equal(cut["causal"], mask[:4, :4])
    # As many examples as positions: a row for each.
    square = set_batch_sequence_length({"input_ids": torch.arange(36).view(6, 6), "labels": mask}, 4)
    assert torch.equal(square["labels"], mask[:, :4])


def test_embeddings_are_found_behind_a_mask():
    batch = {"attention_mask": torch.ones(2, 6, dtype=torch.bool), "inputs_embeds": torch.ones(2, 6, 5)}
    cut = set_batch_sequence_length(batch, 4)
    assert cut["inputs_embeds"].shape == (2, 4, 5) and cut["attention_mask"].shape == (2, 4)
