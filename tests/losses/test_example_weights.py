"""Weights of examples, in a field of the batch, against weighted means written out in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import Algorithm, Event, State, algorithms as alg, compose, loop_events, losses, metrics, on
from purecompose.losses import Mixture
from purecompose.testing.process import played
from tests.helpers import make_batch, make_mlp


INPUTS, CLASSES = make_batch(1, 12, dtype=torch.float64)
WEIGHTS = torch.tensor([0.5, 0.0, 3.0, 0.1, 1.0, 2.0, 0.7, 0.0, 1.0, 4.0, 0.2, 1.0], dtype=torch.float64)
BATCH = INPUTS, CLASSES, WEIGHTS
OF_CLASSES = torch.tensor([0.05, 0.3, 2.0], dtype=torch.float64)

Reference = Callable[[Tensor], Tensor]


def mean_of(each: Reference, terms: Tensor | None = None) -> Reference:
    """Return sum_i w_i l_i / sum_i w_i c_i as a function of the outputs."""
    return lambda outputs: (WEIGHTS * each(outputs)).sum() / (WEIGHTS if terms is None else WEIGHTS * terms).sum()


def entropies(outputs: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(outputs, CLASSES, reduction="none", **options)


ONE_HOT = F.one_hot(CLASSES, 3).double()
LOSSES: dict[str, tuple[Any, Tensor, Reference]] = {
    "ours": (losses.cross_entropy, CLASSES, mean_of(entropies)),
    "torch's": (F.cross_entropy, CLASSES, mean_of(entropies)),
    "dense": (losses.cross_entropy, ONE_HOT, mean_of(entropies)),
    "smooth": (
        losses.CrossEntropy(label_smoothing=0.2),
        CLASSES,
        mean_of(lambda outputs: entropies(outputs, label_smoothing=0.2)),
    ),
    "classes": (
        losses.CrossEntropy(weight=OF_CLASSES),
        CLASSES,
        mean_of(lambda outputs: entropies(outputs, weight=OF_CLASSES), OF_CLASSES[CLASSES]),
    ),
    "likelihood": (F.nll_loss, CLASSES, mean_of(lambda outputs: F.nll_loss(outputs, CLASSES, reduction="none"))),
    "squares": (losses.mse, ONE_HOT, mean_of(lambda outputs: (outputs - ONE_HOT).square().mean(1))),
    "binary": (
        losses.BinaryCrossEntropy(pos_weight=[1.0, 2.0, 5.0]),
        ONE_HOT,
        mean_of(
            lambda outputs: F.binary_cross_entropy_with_logits(
                outputs, ONE_HOT, pos_weight=outputs.new_tensor([1.0, 2.0, 5.0]), reduction="none"
            ).mean(1)
        ),
    ),
}


def new_state(loss: Any = losses.cross_entropy, **options: Any) -> State:
    settings = {"optimizer": pc.optim.sgd(0.1), "duration": "4ba", "weight_field": 2, **options}
    return State.create(make_mlp(dtype=torch.float64), loss=loss, **settings)


def moved(state: State, reference: Reference) -> dict[str, Tensor]:
    """Return the parameters after a step of plain gradient descent."""
    net = pc.to_module(state)
    grads = torch.autograd.grad(reference(net(INPUTS)), list(net.parameters()))
    return {n: p.detach() - 0.1 * grad for (n, p), grad in zip(net.named_parameters(), grads, strict=True)}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cut", [{}, {"microbatches": 5}, {"microbatch_size": 1}], ids=str)
def test_a_step_takes_the_weighted_mean_whole_and_in_slices(name, cut):
    loss, targets, reference = LOSSES[name]
    state = new_state(loss)
    end = compose(loop_events, **cut)(state, (INPUTS, targets, WEIGHTS))
    torch.testing.assert_close(end.params, moved(state, reference))
    torch.testing.assert_close(end.loss, reference(state.forward(INPUTS)))


@pytest.mark.parametrize("name", ["ours", "classes", "squares"])
@pytest.mark.parametrize("sizes", [[6, 6], [1, 1, 10], [5, 1, 4, 2]], ids=str)
def test_collected_gradients_and_evaluations_are_those_of_the_whole(name, sizes):
    loss, targets, reference = LOSSES[name]
    step = compose(loop_events, [alg.gradient_accumulation(len(sizes))], microbatches=2)
    start = state = step.init(new_state(loss))
    parts = list(zip(*(tensor.split(sizes) for tensor in (INPUTS, targets, WEIGHTS)), strict=True))
    for part in parts:
        state = step(state, part)
    torch.testing.assert_close(state.params, moved(start, reference))
    found = pc.evaluate(start, parts)["loss"]
    assert found == pytest.approx(reference(start.forward(INPUTS)).item(), rel=1e-9)


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_agree_with_one(size):
    plain, start = compose(loop_events, [alg.mixup(0.4), alg.label_smoothing(0.1)], microbatches=2), new_state()
    expected = plain(plain.init(start), BATCH)
    for end in played(plain, size)(lambda step: step(step.init(start), BATCH)):
        torch.testing.assert_close(end.params, expected.params)
        torch.testing.assert_close(end.loss, expected.loss)


def test_a_compiled_step_has_the_weights_of_the_eager_one():
    step, start = compose(loop_events, [alg.mixup(0.4), alg.label_smoothing(0.1)]), new_state()
    compiled = pc.compile(step, backend="eager", donate=False, quiet=True)
    ends = [one(one.init(start), BATCH) for one in (step, compiled)]
    torch.testing.assert_close(ends[0].params, ends[1].params)


@pytest.mark.parametrize("make", [torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double])
@pytest.mark.parametrize("cut", [{}, {"microbatches": 3}], ids=str)
def test_sums_of_weights_are_wide_and_the_loss_keeps_its_dtype(make, cut):
    state = State.create(make_mlp(), loss=losses.cross_entropy, optimizer=pc.optim.sgd(0.1), weight_field=2)
    weights = make(torch.linspace(1.0, 30000.0, 12))  # whose sum is more than float16 holds
    outputs = state.forward(INPUTS.float())
    wide = weights.double()
    expected = (F.cross_entropy(outputs.double(), CLASSES, reduction="none") * wide).sum() / wide.sum()
    end = compose(loop_events, **cut)(state, (INPUTS.float(), CLASSES, weights))
    assert end.loss is not None and end.loss.dtype is torch.float32
    assert end.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    mean = metrics.mean_loss()
    acc = mean.update(mean.init(), outputs, Mixture.weighted(CLASSES, weights), loss_fn=losses.cross_entropy)
    assert acc[""].number.dtype is torch.float64


def played_losses(method: Algorithm, **options: Any) -> list[float]:
    step = compose(loop_events, [method])
    state, seen = step.init(new_state(optimizer=pc.optim.sgd(0.0), **options)), []
    for _ in range(6):
        state = step(state, BATCH)
        assert state.loss is not None
        seen.append(state.loss.item())
    return seen


def test_a_method_that_acts_sometimes_keeps_the_weights():
    mixed, on_host = (played_losses(alg.sometimes(alg.mixup(0.4), 0.5, host=host)) for host in (False, True))
    assert mixed == pytest.approx(on_host, rel=1e-12)
    plain, smooth = (played_losses(alg.label_smoothing(share))[0] for share in (0.0, 0.1))
    chosen = played_losses(alg.sometimes(alg.label_smoothing(0.1), 0.5))
    assert {round(loss, 9) for loss in chosen} == {round(plain, 9), round(smooth, 9)}
    assert played_losses(alg.sometimes(alg.mixup(0.4), 0.0, per_example=True)) == pytest.approx([plain] * 6)
    either = played_losses(alg.one_of(alg.mixup(0.4), alg.label_smoothing(0.1)))
    assert any(loss == pytest.approx(smooth) for loss in either)


def test_a_partner_brings_its_weight():
    mixed, mixture = pc.functional.mixup_batch(pc.random.key(0), INPUTS, Mixture.weighted(CLASSES, WEIGHTS), alpha=0.4)
    share = 1 - mixture.weights[0][0] / WEIGHTS[0]
    candidates = torch.lerp(INPUTS[:, None], INPUTS[None], share)  # of example i with partner j
    partners = (candidates - mixed[:, None]).abs().sum(2).argmin(1)
    assert 0 < share < 1 and sorted(partners.tolist()) == list(range(12))
    torch.testing.assert_close(mixture.weights, ((1 - share) * WEIGHTS, share * WEIGHTS[partners]))
    assert torch.equal(mixture.targets[1], CLASSES[partners])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("loss", [losses.cross_entropy, F.cross_entropy, losses.CrossEntropy(weight=OF_CLASSES)])
def test_the_loss_of_mixed_and_smoothed_targets_divides_by_all_weights(loss, smoothing):
    seen: list[tuple[Tensor, Mixture]] = []

    def look(event: Event, state: State) -> State:
        seen.append((state.outputs.detach(), state.targets))
        return state

    methods = [alg.mixup(0.4), Algorithm("look", on(Event.AFTER_FORWARD), look), alg.label_smoothing(smoothing)]
    step = compose(loop_events, methods)
    end = step(step.init(new_state(loss)), BATCH)
    outputs, mixture = seen[0]
    of_classes = OF_CLASSES if getattr(loss, "weight", None) else torch.ones_like(OF_CLASSES)
    total, terms = outputs.new_zeros(12), outputs.new_zeros(12)
    for classes, weights in zip(mixture.targets, mixture.weights, strict=True):
        dense = (1 - smoothing) * F.one_hot(classes, 3) + smoothing / 3
        total = total - weights * (dense * of_classes * outputs.log_softmax(1)).sum(1)
        terms = terms + weights * (dense * of_classes).sum(1)
    torch.testing.assert_close(end.loss, total.sum() / terms.sum())


def test_whole_weights_count_as_copies_and_a_weight_of_zero_as_absence():
    numbers = torch.tensor([2, 0, 1, 3, 1, 1, 0, 2, 1, 1, 4, 1])
    repeated = tuple(tensor.repeat_interleave(numbers, 0) for tensor in (INPUTS, CLASSES))
    plain = compose(loop_events)(new_state(weight_field=None), repeated)
    weighted = compose(loop_events, microbatches=3)(new_state(), (INPUTS, CLASSES, numbers))
    torch.testing.assert_close(weighted.params, plain.params)


def test_positions_of_an_example_share_its_weight():
    net = nn.Conv1d(4, 3, 1).double()
    inputs, classes = torch.randn(6, 4, 5, dtype=torch.float64), torch.randint(3, (6, 5))
    classes[2], classes[4, 1:] = -100, -100
    weights = torch.tensor([1.0, 2.0, 5.0, 0.5, 3.0, 0.0], dtype=torch.float64)
    options = {"loss": losses.cross_entropy, "optimizer": pc.optim.sgd(0.1), "weight_field": "importance"}
    state = State.create(net, input_field="x", target_field="y", **options)
    each = F.cross_entropy(state.forward(inputs), classes, reduction="none")
    expected = (each * weights[:, None]).sum() / ((classes >= 0) * weights[:, None]).sum()
    for slices in (1, 3):
        end = compose(loop_events, microbatches=slices)(state, {"x": inputs, "y": classes, "importance": weights})
        torch.testing.assert_close(end.loss, expected)


def test_an_evaluation_has_weights_if_its_batches_do():
    state = new_state()
    outputs = state.forward(INPUTS)
    right = (outputs.argmax(1) == CLASSES).double()
    named = {"loss": "loss", "plain": "accuracy", "weighted": metrics.weighted("accuracy")}
    found = pc.evaluate(state, [tuple(part[:5] for part in BATCH), tuple(part[5:] for part in BATCH)], named)
    assert found["loss"] == pytest.approx(mean_of(entropies)(outputs).item(), rel=1e-9)
    assert found["plain"] == pytest.approx(right.mean().item())
    assert found["weighted"] == pytest.approx(((right * WEIGHTS).sum() / WEIGHTS.sum()).item())
    without = pc.evaluate(state, [(INPUTS, CLASSES)], named)
    assert without["loss"] == pytest.approx(entropies(outputs).mean().item(), rel=1e-9)
    assert [without["plain"], without["weighted"]] == pytest.approx([right.mean().item()] * 2)


@pytest.mark.parametrize("metric", [metrics.balanced_accuracy(3), metrics.perplexity(), metrics.top_k(2)])
def test_a_weighted_metric_counts_examples_as_often_as_their_weights(metric):
    numbers = torch.tensor([2, 0, 1, 3, 1, 1, 0, 2, 1, 1, 4, 1])
    state = new_state()
    found = pc.evaluate(state, [(INPUTS, CLASSES, numbers)], {"one": metrics.weighted(metric)})
    repeated = tuple(tensor.repeat_interleave(numbers, 0) for tensor in (INPUTS, CLASSES))
    assert found == pytest.approx(pc.evaluate(state, [repeated], {"one": metric}), rel=1e-6)


def test_metrics_of_training_see_targets_without_weights():
    step = compose(loop_events, [alg.training_metrics(["accuracy"])], microbatches=3)
    found, plain = (step(step.init(state), BATCH) for state in (new_state(), new_state(weight_field=None)))
    assert found.metrics["train/accuracy"] == plain.metrics["train/accuracy"]
    torch.testing.assert_close(Mixture.weighted(CLASSES, WEIGHTS).unweighted(), CLASSES)
    step = compose(loop_events, [alg.training_metrics([metrics.weighted("accuracy")])], microbatches=3)
    start = step.init(new_state())
    right = (start.forward(INPUTS).argmax(1) == CLASSES).double()
    expected = (right * WEIGHTS).sum() / WEIGHTS.sum()
    torch.testing.assert_close(step(start, BATCH).metrics["train/accuracy"], expected)


def test_members_of_a_population_have_the_weights_of_the_batch():
    states = pc.stack_states([new_state(), new_state(key=1)])
    end = pc.population(compose(loop_events), 2)(states, BATCH)
    for one, start in zip(pc.unstack_states(end), pc.unstack_states(states), strict=True):
        torch.testing.assert_close(one.params, moved(start, mean_of(entropies)))


def by_rows(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


class Divided:
    def denominators(self, targets: Tensor) -> int:
        return len(targets)

    def __call__(self, outputs: Tensor, targets: Tensor, denominators: Any) -> Tensor:
        return outputs.sum() / denominators


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss": by_rows}, TypeError, "losses per example"),
        ({"loss": nn.CrossEntropyLoss()}, TypeError, "losses per example"),
        ({"loss": losses.over_batch(by_rows)}, TypeError, "has no loss of each example"),
        ({"loss": losses.model_loss}, TypeError, "has no loss of each example"),
        ({"loss": Divided()}, TypeError, "has no loss of each example"),
        ({"target_field": None}, ValueError, "expected a target besides the input"),
        ({"target_field": 0}, ValueError, "expected a target besides the input"),
        ({"weight_field": 0.5}, TypeError, "weight_field=0.5"),
    ],
)
def test_states_whose_examples_cannot_have_weights_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        new_state(**options)


def test_batches_and_methods_without_weights_are_refused_in_training():
    with pytest.raises(KeyError, match="no member 2"):
        compose(loop_events)(new_state(), (INPUTS, CLASSES))
    with pytest.raises(ValueError, match=r"one weight for each example, a tensor of shape \(12,\), got \(12, 1\)"):
        compose(loop_events)(new_state(), (INPUTS, CLASSES, WEIGHTS[:, None]))
    step = compose(loop_events, [alg.mixup(0.4, target_field=1)])
    with pytest.raises(ValueError, match="mixed without the weights"):
        step(step.init(new_state()), BATCH)
    with pytest.raises(TypeError, match="not a sum over examples"):
        metrics.weighted("loss")
    maps = Mixture.weighted(torch.zeros(2, 4, 4).long(), torch.ones(2))
    with pytest.raises(ValueError, match="leave out weight_field"):
        maps.pasted(torch.tensor([1, 0]), torch.ones(1, 4, 4, dtype=torch.bool))
