import pytest
import torch
import torch.nn.functional as F
from torch import nn

from purecompose import losses
from purecompose.algorithms._seq_length_warmup import seq_length_warmup
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import compose
from purecompose.core.loop import loop_events
from purecompose.core.state import State
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
