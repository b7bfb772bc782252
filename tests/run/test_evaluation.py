"""Evaluation and prediction: correct numbers, and no effect on training."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import purecompose as pc
from purecompose import Algorithm, Evaluator, Event, compose, evaluate, loop_events, on, predict
from purecompose.batch import WHOLE
from purecompose.loop import eval_events
from purecompose.run.evaluation import run_evaluator
from tests.helpers import (
    assert_same,
    changing,
    copied,
    make_batch,
    make_batches,
    make_cnn,
    make_mlp,
    make_state,
    recorder,
    run_steps,
)


def uneven(num=3):
    return [make_batch(seed, size) for seed, size in zip(range(num), (8, 5, 3), strict=False)]


def by_hand(net, batches):
    """Return (mean loss, accuracy), computed over all examples together."""
    net = net.eval()
    inputs, targets = (torch.cat(members) for members in zip(*batches, strict=True))
    outputs = net(inputs)
    return F.cross_entropy(outputs, targets).item(), (outputs.argmax(1) == targets).double().mean().item()


def test_the_numbers_do_not_depend_on_the_batches():
    net = make_mlp(dropout=0.5)
    found = evaluate(
        make_state(net),
        uneven(),
        {
            "accuracy": pc.metrics.accuracy,
            "loss": pc.metrics.mean_loss(pc.losses.cross_entropy),
            "function": lambda outputs, targets: (outputs.argmax(1) == targets).float(),
        },
    )
    loss, accuracy = by_hand(net, uneven())
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["accuracy"] == accuracy
    assert found["function"] == pytest.approx(accuracy)
    assert all(type(value) is float for value in found.values())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("total", [12, 13, 16])
def test_every_example_counts_once(size, total):
    inputs, targets = make_batch(0, total)
    batches = list(zip(inputs.split(size), targets.split(size), strict=True))
    net = make_mlp()
    found = evaluate(make_state(net), batches, {"accuracy": pc.metrics.accuracy})
    assert found["accuracy"] == pytest.approx(by_hand(net, [(inputs, targets)])[1], rel=1e-6)


def test_the_mean_loss_by_default():
    net = make_mlp()
    assert evaluate(make_state(net), uneven()) == {"loss": pytest.approx(by_hand(net, uneven())[0], rel=1e-6)}


def test_models_with_their_own_loss():
    class OwnLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_mlp()

        def forward(self, inputs, labels):
            return {"loss": F.cross_entropy(self.net(inputs), labels)}

    batches = [{"inputs": inputs, "labels": targets} for inputs, targets in make_batches(3)]
    found = evaluate(make_state(OwnLoss(), loss=pc.losses.model_loss), batches)
    assert found == {"loss": pytest.approx(by_hand(make_mlp(), make_batches(3))[0], rel=1e-6)}


@pytest.mark.parametrize("key", [1, "label", WHOLE])
def test_metrics_get_the_whole_batch_if_it_has_no_target(key):
    batches = [{"x": inputs, "y": targets} for inputs, targets in uneven()]
    net, loss = make_mlp(), pc.losses.cross_entropy if key == WHOLE else pc.losses.model_loss
    state = make_state(net, loss=loss, input_field="x", target_field=key)
    found = evaluate(state, batches, {"accuracy": lambda outputs, batch: outputs.argmax(1) == batch["y"]})
    assert found["accuracy"] == pytest.approx(by_hand(net, uneven())[1], rel=1e-6)


class TokenLoss(torch.nn.Module):
    """A classifier of every position of a sentence, whose own loss leaves out labels of -100."""

    def __init__(self):
        super().__init__()
        self.net = make_mlp()

    def forward(self, inputs, labels):
        logits = self.net(inputs).transpose(1, 2)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def padded_batches():
    """Return two batches of sentences, the first with few labels, the second with many."""
    generator = torch.Generator().manual_seed(3)
    lengths = [torch.tensor([1, 0, 2]), torch.tensor([5, 4])]
    batches = []
    for length in lengths:
        inputs, labels = torch.randn(len(length), 5, 4, generator=generator), torch.zeros(len(length), 5).long()
        batches.append({"inputs": inputs, "labels": labels.masked_fill(torch.arange(5) >= length[:, None], -100)})
    return batches


# Batches have "labels", but no 1 or "label", for which metrics get the whole batch.
@pytest.mark.parametrize("target_field", ["labels", 1, "label"])
@pytest.mark.parametrize("is_given", [False, True])
def test_the_mean_of_a_models_own_loss_counts_the_labels_of_the_batch(target_field, is_given):
    own = pc.losses.ModelLoss(labels="labels")
    state, seen = make_state(TokenLoss(), loss=own, target_field=target_field), []

    def right(outputs, targets):
        seen.append(targets)
        labels = targets["labels"] if isinstance(targets, dict) else targets
        return (outputs["logits"].argmax(1) == labels).float()

    metrics = {"loss": own, "right": right} if is_given else None
    found = evaluate(state, padded_batches(), metrics)
    net = make_mlp()
    logits = torch.cat([net(batch["inputs"]).flatten(0, 1) for batch in padded_batches()])
    labels = torch.cat([batch["labels"].flatten() for batch in padded_batches()])
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    assert all(isinstance(targets, torch.Tensor) == (target_field == "labels") for targets in seen)
    assert len(seen) == (2 if is_given else 0)


def test_a_models_own_loss_may_be_measured_while_another_one_trains():
    class Logits(TokenLoss):
        def forward(self, inputs, labels):
            return super().forward(inputs, labels)["logits"]

    batches = padded_batches()
    trained = make_state(Logits(), input_field=WHOLE, target_field="labels")
    own = make_state(TokenLoss(), loss=pc.losses.cross_entropy, input_field=WHOLE, target_field="labels")
    found = evaluate(own, batches, {"own": pc.losses.ModelLoss(labels="labels")})
    assert found["own"] == pytest.approx(evaluate(trained, batches)["loss"], rel=1e-6)


def test_a_wrong_target_key_is_an_error():
    batches = [{"x": inputs, "y": targets} for inputs, targets in uneven()]
    state = make_state(input_field="x", target_field="label")
    for metrics in (None, {"accuracy": pc.metrics.accuracy}):
        with pytest.raises(KeyError, match="no member 'label'.*target_field"):
            evaluate(state, batches, metrics)
    assert len(predict(state, batches)) == 3


def test_evaluation_mode_uses_the_running_statistics():
    net = make_cnn()
    batches = make_batches(3, shape=(2, 6, 6))
    state = run_steps(compose(loop_events), make_state(net), batches)
    found = evaluate(state, batches)
    trained = pc.to_module(state)
    assert found["loss"] == pytest.approx(by_hand(trained, batches)[0], rel=1e-5)


def test_the_state_and_the_batches_are_unchanged():
    state = run_steps(compose(loop_events), make_state(make_cnn()), make_batches(2, shape=(2, 6, 6)))
    batches = make_batches(2, shape=(2, 6, 6))
    before, batches_before, time = copied(state), copied(batches), state.timestamp
    first = evaluate(state, batches)
    predict(state, batches)
    assert evaluate(state, batches) == first
    assert_same(state, before)
    assert_same(batches, batches_before)
    assert state.timestamp is time


def test_averaged_weights_at_eval_start():
    def zero(state):
        return state.replace(params={name: torch.zeros_like(param) for name, param in state.params.items()})

    state = make_state()
    step = compose(loop_events, [changing("zero", Event.EVAL_START, zero)])
    assert evaluate(state, uneven(), step=step)["loss"] == pytest.approx(torch.tensor(3.0).log().item())
    assert evaluate(state, uneven())["loss"] != evaluate(state, uneven(), step=step)["loss"]


def test_an_algorithm_may_change_evaluation_batches():
    double = changing("double", Event.EVAL_BEFORE_FORWARD, lambda s: s.replace(inputs=2 * s.inputs))
    net = make_mlp()
    found = evaluate(make_state(net), uneven(), step=compose(loop_events, [double]))
    expected = by_hand(net, [(2 * inputs, targets) for inputs, targets in uneven()])
    assert found["loss"] == pytest.approx(expected[0], rel=1e-6)


def test_the_events_of_a_standalone_evaluation():
    log = []
    step = compose(loop_events, [recorder(log, "a", *[e for e in Event if e is not Event.INIT])])
    evaluate(make_state(), uneven(2), step=step)
    inner = [Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD, Event.EVAL_BATCH_END]
    assert [event for _, event in log] == [
        Event.EVAL_STANDALONE_START,
        Event.EVAL_START,
        *inner,
        *inner,
        Event.EVAL_END,
        Event.EVAL_STANDALONE_END,
    ]


def test_the_events_of_a_prediction():
    log = []
    step = compose(loop_events, [recorder(log, "a", *[e for e in Event if e is not Event.INIT])])
    predict(make_state(), uneven(2), step=step)
    inner = [
        Event.PREDICT_BATCH_START,
        Event.PREDICT_BEFORE_FORWARD,
        Event.PREDICT_AFTER_FORWARD,
        Event.PREDICT_BATCH_END,
    ]
    assert [event for _, event in log] == [Event.PREDICT_START, *inner, *inner, Event.PREDICT_END]


def test_predictions_come_batch_by_batch():
    net = make_mlp(dropout=0.5)
    found = predict(make_state(net), uneven())
    for outputs, (inputs, _) in zip(found, uneven(), strict=True):
        torch.testing.assert_close(outputs, net.eval()(inputs))
        assert not outputs.requires_grad
    assert predict(make_state(), []) == []


def test_predictions_in_another_order_than_the_data_are_reported():
    data = TensorDataset(*make_batch())
    with pytest.warns(UserWarning, match="not in the order of its data set: give it shuffle=False"):
        predict(make_state(), DataLoader(data, 4, shuffle=True))
    torch.testing.assert_close(torch.cat(predict(make_state(), DataLoader(data, 4))), make_mlp()(data.tensors[0]))


def test_predictions_need_no_targets():
    inputs = make_batch()[0]
    for batch in [(inputs,), inputs]:
        (found,) = predict(make_state(), [batch])
        torch.testing.assert_close(found, make_mlp()(inputs))


def test_predict_start_transforms_what_predicts():
    zero = changing(
        "zero",
        Event.PREDICT_START,
        lambda s: s.replace(params={name: torch.zeros_like(param) for name, param in s.params.items()}),
    )
    (found,) = predict(make_state(), [make_batch()], step=compose(loop_events, [zero]))
    assert torch.equal(found, torch.zeros(8, 3))


def test_the_result_holds_the_values_and_observers_see_them():
    seen = []

    def observer(event, state):
        seen.append((event, dict(state.metrics)))

    state = make_state()
    evaluator = Evaluator(uneven(), {"accuracy": pc.metrics.accuracy}, label="test")
    end = run_evaluator(evaluator, state, compose(eval_events), [observer])
    assert [event for event, _ in seen] == [Event.EVAL_START, *[Event.EVAL_BATCH_END] * 3, Event.EVAL_END]
    assert seen[-1][1].keys() == {"test/accuracy"}
    assert end.metrics["test/accuracy"].item() == evaluate(state, uneven(), evaluator.metrics)["accuracy"]
    assert state.metrics == {}


def test_changes_at_eval_end_are_kept_in_the_result():
    double = Algorithm(
        "double",
        on(Event.EVAL_END),
        lambda e, s: s.replace(metrics={name: 2 * value for name, value in s.metrics.items()}),
    )
    data, state = uneven(), make_state()
    found = evaluate(state, data, step=compose(loop_events, [double]))
    assert found["loss"] == pytest.approx(2 * evaluate(state, data)["loss"])


def test_no_data_is_an_error():
    for data in ([], iter(())):
        with pytest.raises(ValueError, match="'eval' has no batch; is it an exhausted iterator"):
            evaluate(make_state(), data)


def test_a_step_needs_its_init_for_evaluation_too():
    step = compose(loop_events, [changing("surgery", Event.INIT, lambda s: s)])
    with pytest.raises(RuntimeError, match="surgery: not initialised"):
        evaluate(make_state(), uneven(), step=step)


class Endless:
    """Batches that never end."""

    def __iter__(self):
        return itertools.cycle([make_batch(0), make_batch(1), make_batch(2)])


def test_data_without_an_end_are_bounded_by_a_number_of_batches():
    state, found = make_state(), {"loss": pc.losses.cross_entropy}
    some = pc.evaluate(state, [make_batch(0), make_batch(1)], found)
    assert pc.evaluate(state, Endless(), found, num_batches=2) == some
    evaluator = pc.Evaluator(Endless(), found, num_batches=2)
    history = pc.observers.History()
    end = pc.fit(
        compose(loop_events), make_state(duration="2ep"), [make_batch()], evaluate=evaluator, observers=history
    )
    last = pc.evaluate(end, [make_batch(0), make_batch(1)], found)
    assert history.records[-1]["eval/loss"] == pytest.approx(last["loss"])


class Players(torch.nn.Module):
    """A network of two players, without a usual one."""

    def __init__(self):
        super().__init__()
        self.both = torch.nn.ModuleDict({"G": make_mlp(), "D": make_mlp()})

    def forward(self, inputs, player):
        return self.both[player](inputs)


class UsualPlayers(Players):
    def forward(self, inputs, player="G"):
        return self.both[player](inputs)


class UnusualPlayers(Players):
    def forward(self, inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError


def test_a_network_of_several_players_needs_a_usual_one():
    for net in (Players(), Players().both, UnusualPlayers()):
        with pytest.raises((TypeError, NotImplementedError)) as caught:
            pc.evaluate(make_state(net), [make_batch()])
        assert any("forward(self, inputs, player='G')" in note for note in caught.value.__notes__)
    net = UsualPlayers()
    assert pc.evaluate(make_state(net), [make_batch()]) == pc.evaluate(make_state(net.both["G"]), [make_batch()])


def test_terms_that_only_the_training_loss_has_are_reported():
    traits = {pc.Trait.EDITS_LOSS}
    doubled = lambda state: state.replace(loss=state.loss + state.loss)  # noqa: E731
    penalty = changing("penalty", Event.AFTER_LOSS, doubled, traits=traits)
    step = compose(loop_events, [penalty])
    state = step(step.init(make_state()), make_batch())
    evaluate(state, uneven(), {"accuracy": pc.metrics.accuracy}, step=step)
    match = "the loss of evaluator 'eval' lacks what penalty did to the training loss at AFTER_LOSS"
    with pytest.warns(UserWarning, match=match):
        evaluate(state, uneven(), step=step)
    with pytest.warns(UserWarning, match=match) as told:
        pc.fit(step, make_state(duration="3ep"), [make_batch()], evaluate=Evaluator(uneven()))
    assert len(told) == 1
