"""Selective backprop on language models: batches that are mappings, losses of tokens, losses of the model's own."""

import collections
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from purecompose import losses, random, tree
from purecompose.algorithms._selective_backprop import (
    choose_by_loss,
    model_losses,
    select_using_loss,
    selective_backprop,
)
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import compose
from purecompose.loop import loop_events
from purecompose.surgery.weights import to_module
from purecompose.time.predicates import on
from tests.algorithms.method_helpers import make_state


VOCABULARY, LENGTH = 7, 6


@dataclasses.dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class ModelOutput(collections.OrderedDict):
    """An output as in Hugging Face: a mapping whose entries are attributes, without `update`."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def update(self, *args, **kwargs):
        raise TypeError("you cannot use update")


def as_dict(loss, logits):
    return {"loss": loss, "logits": logits}


def as_model_output(loss, logits):
    return ModelOutput(loss=loss, logits=logits)


class TinyGPT(nn.Module):
    """One causal layer; with labels it computes the next-token loss, as Hugging Face's models do."""

    def __init__(self, output: Any = Output, *, shift: int = 1, reduction: str = "mean"):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.output, self.shift, self.reduction = output, shift, reduction

    def forward(self, input_ids, attention_mask=None, labels=None):
        length = input_ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = self.embedding(input_ids)
        padding = None if attention_mask is None else attention_mask == 0
        attended, _ = self.attention(hidden, hidden, hidden, key_padding_mask=padding, attn_mask=causal)
        logits = self.head(hidden + attended)
        if labels is None:
            return self.output(None, logits)
        predicted = logits[:, : length - self.shift].transpose(1, 2)
        return self.output(F.cross_entropy(predicted, labels[:, self.shift :], reduction=self.reduction), logits)


def make_batch(num=8, seed=0):
    """Return sentences of 3 to 6 tokens, padded at the end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (num, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (num, 1), generator=generator)).long()
    labels = torch.where(mask == 1, ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "name": [f"text {i}" for i in range(num)]}


def texts(batch):
    return {name: value for name, value in batch.items() if name != "name"}


def token_loss(outputs, targets, reduction="mean"):
    return losses.cross_entropy(outputs.logits.transpose(1, 2), targets, reduction)


def row_losses(logits, labels, shift=0):
    """Return the loss of each row; torch's mean leaves out -100."""
    pairs = zip(logits[:, : logits.shape[1] - shift], labels[:, shift:], strict=True)
    return torch.stack(
        [F.cross_entropy(row, target) if (target != -100).any() else row.sum() * 0 for row, target in pairs]
    )


def always(**settings):
    return selective_backprop(0.0, 1.0, full_every=0, **settings)


def selected(state, batch, algorithm=None):
    seen = []
    spy = Algorithm("spy", on("before_forward"), lambda event, s: seen.append(s.batch) or s)
    step = compose(loop_events, [algorithm or always(), spy])
    step(step.init(state), batch)
    return seen[0]


def own_loss_state(net=None, **settings):
    shift = settings.pop("shift", 1)
    return make_state(net or TinyGPT(), loss=losses.ModelLoss(labels="labels", shift=shift), **settings)


def rows_of(batch, chosen):
    return {"name": [batch["name"][i] for i in chosen], **{k: v[chosen] for k, v in texts(batch).items()}}


# Losses of outputs and targets


@pytest.mark.parametrize("input_field", [["input_ids", "attention_mask"], "*"])
@given(seed=st.integers(0, 1000), num=st.integers(1, 9), keep=st.floats(0.1, 1, exclude_max=True))
@settings(max_examples=10)
def test_rows_are_ranked_by_the_mean_over_the_tokens_that_count(input_field, seed, num, keep):
    class Net(TinyGPT):
        def forward(self, input_ids, attention_mask=None, labels=None, name=None):
            return super().forward(input_ids, attention_mask)

    batch = make_batch(num, seed)

    def rowwise(outputs, targets, reduction="mean"):
        example_losses = row_losses(outputs.logits, targets)
        return example_losses if reduction == "none" else example_losses.mean()

    state = make_state(Net(), loss=rowwise, input_field=input_field, target_field="labels")
    logits = to_module(state)(**batch).logits
    expected = choose_by_loss(state.rng("selective_backprop"), row_losses(logits, batch["labels"]), keep=keep)
    by_hand = rows_of(batch, expected)
    assert tree.equal(texts(selected(state, batch, always(keep=keep))), texts(by_hand))
    # A loss per token gives the same, because padding does not enter the rows' means.

    @dataclasses.dataclass(frozen=True)
    class TokenLoss:
        def __call__(self, outputs, targets, reduction="mean"):
            return token_loss(outputs, targets, reduction)

        def counted(self, outputs, targets):
            return losses.cross_entropy.counted(outputs.logits.transpose(1, 2), targets)

    found = selected(
        make_state(Net(), loss=TokenLoss(), input_field=input_field, target_field="labels"), batch, always(keep=keep)
    )
    assert tree.equal(found, by_hand)


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 1000))
def test_padding_does_not_change_what_is_selected(num, extra, seed):
    """There are ignored positions at the end; with a mean over all positions long rows would be preferred."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, VOCABULARY, LENGTH, generator=generator)
    targets = torch.randint(VOCABULARY, (num, LENGTH), generator=generator)
    longer = torch.cat([logits, torch.randn(num, VOCABULARY, extra, generator=generator)], 2)
    padded = F.pad(targets, (0, extra), value=-100)
    ids = torch.arange(num)
    plain = select_using_loss(random.key(seed), (logits, ids), targets, lambda x: x[0], losses.cross_entropy)
    found = select_using_loss(random.key(seed), (longer, ids), padded, lambda x: x[0], losses.cross_entropy)
    assert torch.equal(found[0][1], plain[0][1]) and torch.equal(found[1][:, :LENGTH], plain[1])


# Losses of the model's own


@given(st.integers(1, 6), st.integers(0, 2), st.integers(0, 1000), st.sampled_from([Output, as_dict, as_model_output]))
def test_model_losses_are_those_of_each_row(num, shift, seed, output):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num, LENGTH, VOCABULARY, generator=generator)
    labels = torch.randint(VOCABULARY, (num, LENGTH), generator=generator)
    labels = torch.where(torch.rand(num, LENGTH, generator=generator) < 0.5, -100, labels)
    loss_fn = losses.ModelLoss(labels="labels", shift=shift)
    for own in (torch.tensor(1.0), None):
        found = model_losses("test", loss_fn, output(own, logits), {"labels": labels})
        torch.testing.assert_close(found, row_losses(logits, labels, shift))


def test_classes_of_whole_sentences_rank_by_their_own_losses():
    logits, labels = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, -100, 2, 1])
    found = model_losses("test", losses.ModelLoss(labels=1), as_dict(torch.tensor(1.0), logits), (None, labels))
    torch.testing.assert_close(found, F.cross_entropy(logits, labels, reduction="none"))


@pytest.mark.parametrize("output", [Output, as_dict, as_model_output])
def test_a_models_own_loss_ranks_by_its_logits(output):
    batch = make_batch()
    texts_alone = texts(batch)
    state = own_loss_state(TinyGPT(output))
    logits = to_module(own_loss_state())(**texts_alone).logits
    ranking = row_losses(logits, batch["labels"], 1)
    chosen = choose_by_loss(state.rng("selective_backprop"), ranking)
    assert tree.equal(selected(state, texts_alone), {name: value[chosen] for name, value in texts_alone.items()})
    # It trains on the model's own loss of the chosen rows, and the clock counts all tokens.
    step, plain = compose(loop_events, [always()]), compose(loop_events)
    after = step(step.init(state), texts_alone)
    expected = plain(state, selected(state, texts_alone))
    assert tree.equal((after.params, after.loss), (expected.params, expected.loss))
    assert after.timestamp.token == 8 * LENGTH and after.timestamp.sample == 8


@pytest.mark.parametrize("trailing", ["as the labels", "as the shifted labels"])
def test_a_model_that_returns_losses_per_token_ranks_by_them(trailing):
    batch = texts(make_batch())
    shift = 0 if trailing == "as the labels" else 1
    state = own_loss_state(TinyGPT(shift=shift, reduction="none"), shift=shift)
    logits = to_module(state)(**batch).logits
    chosen = choose_by_loss(state.rng("selective_backprop"), row_losses(logits, batch["labels"], shift))
    assert tree.equal(selected(state, batch), {name: value[chosen] for name, value in batch.items()})


def test_other_losses_that_a_model_returns_are_taken_as_they_are():
    loss_fn, batch = losses.ModelLoss(labels="labels", shift=1), {"labels": torch.zeros(3, 4, dtype=torch.int64)}
    own = torch.tensor([3.0, 1.0, 2.0])
    assert model_losses("test", loss_fn, {"loss": own}, batch) is own
    pieces = torch.arange(6.0).reshape(3, 2)  # not of the labels' shape: a mean over all
    assert model_losses("test", loss_fn, {"loss": pieces}, batch).tolist() == [0.5, 2.5, 4.5]


# Errors, early


def test_a_models_own_loss_without_labels_is_refused_at_init():
    step = compose(loop_events, [selective_backprop()])
    with pytest.raises(TypeError, match=r"losses per example, got ModelLoss.*labels='labels', shift=1"):
        step.init(make_state(TinyGPT(), loss=losses.model_loss))


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda loss, logits: {"loss": loss}, r"'logits' for labels int64\[8, 6\], got dict with none"),
        (lambda loss, logits: as_dict(loss, logits[:, 1:]), r"got dict with float32\[8, 5, 7\] there"),
        (lambda loss, logits: Output(loss, logits.transpose(1, 2)), r"got Output with float32\[8, 7, 6\] there"),
    ],
)
def test_outputs_without_fitting_logits_are_refused_in_the_first_step(output, words):
    # The selection itself would start halfway through the run.
    step = compose(loop_events, [selective_backprop(start=0.5)])
    with pytest.raises(ValueError, match=f"selective_backprop: the model's own loss is one number.*{words}"):
        step(step.init(own_loss_state(TinyGPT(output))), texts(make_batch()))


def test_labels_that_the_batch_lacks_or_that_are_none_are_refused_in_the_first_step():
    step = compose(loop_events, [selective_backprop(start=0.5)])
    state = step.init(own_loss_state())
    batch = texts(make_batch())
    with pytest.raises(KeyError, match="no member 'labels'"):
        step(state, {name: value for name, value in batch.items() if name != "labels"})
    with pytest.raises(TypeError, match="a tensor of labels in the batch, got list"):
        model_losses("test", losses.ModelLoss(labels="labels"), {"logits": torch.zeros(2, 3)}, {"labels": [0, 1]})


@pytest.mark.parametrize("ignored", [0.0, torch.inf])
def test_token_losses_beside_every_input_leave_out_what_has_no_label(ignored):
    loss_fn = losses.ModelLoss(labels="labels", shift=1)
    labels = torch.tensor([[5, 1, -100, -100], [5, 1, 2, 3]])
    own = torch.tensor([[3.0, ignored, ignored, ignored], [2.0, 2.0, 2.0, ignored]])
    rows = model_losses("sb", loss_fn, {"loss": own}, {"labels": labels})
    assert rows.tolist() == [3.0, 2.0]
