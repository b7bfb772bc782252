"""Metrics against counts and means in plain Python, and against other divisions of the same examples."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import Tensor

import purecompose as pc
from purecompose.losses import CrossEntropy, Mixture, cross_entropy, model_loss, mse, one_hot
from purecompose.metrics import (
    Metric,
    accuracy,
    as_metric,
    as_metrics,
    balanced_accuracy,
    f1,
    from_function,
    iou,
    is_lower_better,
    mean_loss,
    perplexity,
    top_k,
)


def run(metric: Metric, outputs: Tensor, targets: Tensor, cut: int) -> float:
    acc = metric.init()
    for at in range(0, len(outputs), cut):
        acc = metric.update(acc, outputs[at : at + cut], targets[at : at + cut])
    return metric.compute(acc).item()


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Draw outputs (N, C, ...), indices (N, ...) with some -100 among them, and a batch size."""
    num, classes = draw(st.integers(1, 9)), draw(st.integers(2, 5))
    rest = draw(st.sampled_from([(), (3,)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    outputs = torch.randn(num, classes, *rest, generator=generator, dtype=torch.float64)
    indices = torch.randint(classes, (num, *rest), generator=generator)
    dropped = torch.rand(indices.shape, generator=generator) < 0.2
    return outputs, torch.where(dropped, -100, indices), draw(st.integers(1, 9))


def counted_rows(outputs: Tensor, indices: Tensor) -> list[tuple[list[float], int]]:
    rows = outputs.movedim(1, -1).reshape(-1, outputs.shape[1]).tolist()
    return [(row, label) for row, label in zip(rows, indices.flatten().tolist(), strict=True) if label >= 0]


@given(problems(), st.integers(1, 3))
def test_top_k_counts_positions_ranked_high_enough(problem, k):
    outputs, indices, cut = problem
    k = min(k, outputs.shape[1])
    rows = counted_rows(outputs, indices)
    hits = [sum(other > row[label] for other in row) < k for row, label in rows]
    for targets in (indices, one_hot(indices, outputs)):
        value = run(top_k(k), outputs, targets, cut)
        assert value == pytest.approx(sum(hits) / len(hits)) if hits else math.isnan(value)


def test_accuracy_of_mixed_targets_is_that_of_the_heaviest_class():
    outputs = torch.tensor([[2.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    mixture = Mixture.of(torch.tensor([0, 1])).mixed_with(torch.tensor([1, 0]), torch.tensor(0.3))
    assert accuracy.compute(accuracy.update(accuracy.init(), outputs, mixture)).item() == 0.5


def test_accuracy_leaves_a_positive_ignore_index_out():
    outputs, targets = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 255])
    metric = top_k(1, ignore_index=255)
    assert metric.compute(metric.update(metric.init(), outputs, targets)).item() == 1.0


def test_counts_stay_exact_beyond_single_precision():
    acc = accuracy.init()._replace(total=torch.tensor(2**24), number=torch.tensor(2**24))
    acc = accuracy.update(acc, torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert acc.total.item() == acc.number.item() == 2**24 + 1


@given(problems())
def test_mean_loss_is_the_loss_of_all_examples_together(problem):
    """Also if a batch has no counted target; means of batch means would overweight a short last batch."""
    outputs, indices, cut = problem
    rows = counted_rows(outputs, indices)
    losses = [math.log(sum(math.exp(other) for other in row)) - row[label] for row, label in rows]
    value = run(mean_loss(cross_entropy), outputs, indices, cut)
    assert value == pytest.approx(sum(losses) / len(losses)) if losses else math.isnan(value)


def test_mean_loss_takes_any_loss():
    outputs, targets = torch.randn(7, 2), torch.randn(7, 2)
    assert run(mean_loss(F.mse_loss), outputs, targets, 3) == pytest.approx(mse(outputs, targets).item())
    metric = mean_loss(model_loss)
    acc = metric.update(metric.init(), {"loss": torch.tensor(1.0), "logits": torch.zeros(3, 2)}, None)
    acc = metric.update(acc, {"loss": torch.tensor(5.0), "logits": torch.zeros(1, 2)}, None)
    assert metric.compute(acc).item() == 2.0
    with pytest.raises(TypeError, match="expected a loss"):
        mean_loss(CrossEntropy)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"expected the mean over the batch, a 0-d tensor.*got shape \(3, 2\)"):
        run(mean_loss(lambda outputs, targets: (outputs - targets).square()), outputs, targets, 3)


@given(problems())
def test_a_function_is_averaged_over_examples_whatever_it_returns(problem):
    outputs, _, cut = problem
    expected = sum(abs(number) for number in outputs.flatten().tolist()) / outputs.numel()
    functions = [
        lambda outputs, targets: outputs.abs(),
        lambda outputs, targets: outputs.abs().flatten(1).mean(1),
        lambda outputs, targets: outputs.abs().mean(),
    ]
    for fn in functions:
        assert run(from_function(fn), outputs, outputs, cut) == pytest.approx(expected)


def test_a_function_may_return_bools_and_sees_mixtures_as_dense_targets():
    metric = from_function(lambda outputs, targets: (outputs > 0) == targets)
    outputs, targets = torch.tensor([1.0, -1.0, 2.0, 3.0]), torch.tensor([True, True, True, False])
    assert run(metric, outputs, targets, 3) == 0.5

    for pair in ((outputs[:, None], targets), (outputs, targets[:, None])):
        with pytest.raises(ValueError, match=r"compares each output with each target: .*view_as"):
            metric.update(metric.init(), *pair)

    seen = []
    metric = from_function(lambda outputs, targets: seen.append(targets) or targets.sum(1))
    metric.update(metric.init(), torch.zeros(2, 3), Mixture.of(torch.tensor([0, 2])))
    assert seen[0].tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    "metric",
    [
        from_function(lambda outputs, targets: ((outputs > 0) == targets).float().mean()),
        from_function(lambda outputs, targets: (outputs - targets).abs().mean(1)),
        from_function(F.mse_loss),
        mean_loss(F.mse_loss),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_value_that_is_of_each_output_with_each_target_is_an_error(metric):
    outputs, targets = torch.tensor([[1.0], [-1.0], [2.0], [3.0]]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    with pytest.raises(ValueError, match="compares each output with each target"):
        metric.update(metric.init(), outputs, targets)


@pytest.mark.parametrize(
    "fn",
    [
        lambda outputs, targets: (outputs.squeeze(1) > 0) == targets,
        lambda outputs, targets: ((outputs > 0).view_as(targets) == targets).float().mean(),
        lambda outputs, targets: (outputs - outputs.T).abs().mean(1) + targets,
    ],
)
def test_a_function_that_takes_a_column_and_a_flat_batch_is_not_refused(fn):
    outputs, targets = torch.tensor([[1.0], [-1.0], [2.0], [3.0]]), torch.tensor([1.0, 0.0, 0.0, 0.0])
    metric = from_function(fn)
    found = metric.compute(metric.update(metric.init(), outputs, targets))
    torch.testing.assert_close(found.float(), fn(outputs, targets).float().mean())


@pytest.mark.parametrize("labels", [[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
@pytest.mark.parametrize("scale", [0.0, 1.0])
@pytest.mark.parametrize(
    "fn",
    [
        lambda outputs, targets: ((outputs.squeeze(1) > 0) == targets).float().mean(),
        lambda outputs, targets: ((outputs > 0) == targets.unsqueeze(1)).sum() / len(targets),
        lambda outputs, targets: (outputs.flatten() - targets).square().sum() / len(targets),
        lambda outputs, targets: (outputs[:, 0] - targets).square().sum() / len(targets),
        lambda outputs, targets: (outputs.flatten().sort().values - targets.sort().values).abs().mean(),
    ],
)
def test_a_value_that_the_order_of_a_batch_happens_not_to_change_is_not_refused(fn, scale, labels):
    metric = from_function(fn)
    metric.update(metric.init(), scale * torch.tensor([[1.0], [-1.0], [2.0], [-3.0]]), torch.tensor(labels))


@pytest.mark.parametrize("metric", [accuracy, top_k(2), iou(3)])
def test_several_labels_at_a_position_are_refused(metric):
    outputs, labels = torch.zeros(2, 3), torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    with pytest.raises(ValueError, match=r"expected one class for each position, .*\(outputs > 0\) == targets"):
        metric.update(metric.init(), outputs, labels)
    with pytest.raises(ValueError, match="expected one class for each position"):  # also in the first, watched call
        state = pc.State.create(torch.nn.Linear(4, 3), loss=mse, optimizer=pc.optim.sgd(0.1))
        pc.evaluate(state, [(torch.zeros(2, 4), labels)], {"metric": metric})
    metric.update(metric.init(), outputs, labels / labels.sum(1, keepdim=True))


def test_metrics_keep_no_graph_and_do_not_change_their_accumulator():
    outputs, targets = torch.randn(3, 2, requires_grad=True), torch.tensor([0, 1, 1])
    for metric in (accuracy, mean_loss(cross_entropy), from_function(lambda o, t: o.sum(1))):
        start = metric.init()
        acc = metric.update(start, outputs, targets)
        assert not acc.total.requires_grad
        assert start.total.item() == start.number.item() == 0
        assert math.isnan(metric.compute(start).item())


def test_metrics_map_over_members():
    """No value is read, since vmap would raise."""
    outputs, targets = torch.randn(3, 5, 4), torch.tensor([0, 1, 2, 3, -100])
    for metric in (accuracy, top_k(2), mean_loss(cross_entropy), from_function(lambda o, t: o.sum(1))):

        def value(outputs: Tensor, metric: Metric = metric) -> Tensor:
            return metric.compute(metric.update(metric.init(), outputs, targets))

        # Sums are in float64, of values in float32.
        each = torch.stack([value(o) for o in outputs])
        torch.testing.assert_close(torch.func.vmap(value)(outputs), each, rtol=1e-6, atol=1e-6)


def test_as_metric_takes_metrics_losses_and_functions():
    assert as_metric(accuracy) is accuracy
    outputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, -100, 2, 1, -100])
    expected = cross_entropy(outputs, targets).item()
    # Batches of 2, 2 and 1 have 1, 2 and 0 counted examples: only weights by positions give the whole mean.
    assert run(as_metric(cross_entropy), outputs, targets, 2) == pytest.approx(expected)
    assert run(as_metric(lambda o, t: o.sum(1)), outputs, targets, 2) == pytest.approx(outputs.sum().item() / 5)


# Metrics of torchmetrics


def test_a_metric_of_torchmetrics_is_pure_and_has_the_same_values():
    classification = pytest.importorskip("torchmetrics.classification")
    for theirs in (
        classification.MulticlassF1Score(num_classes=3),
        classification.MulticlassAUROC(num_classes=3),  # its states are lists
        classification.MulticlassCalibrationError(num_classes=3),
    ):
        generator = torch.Generator().manual_seed(0)
        batches = [
            (torch.randn(7, 3, generator=generator).softmax(1), torch.randint(3, (7,), generator=generator))
            for _ in range(3)
        ]
        ours, untouched = as_metric(theirs), copy.deepcopy(theirs.metric_state)
        acc = ours.init("cpu")
        steps = [acc]
        for outputs, targets in batches:
            acc = ours.update(acc, outputs, targets)
            steps.append(acc)
        torch.testing.assert_close(theirs.metric_state, untouched)
        again = ours.update(steps[1], *batches[1])
        torch.testing.assert_close(again, steps[2])  # a later batch does not change an earlier accumulator
        for outputs, targets in batches:
            theirs.update(outputs, targets)
        torch.testing.assert_close(ours.compute(acc), theirs.compute())


def test_a_collection_of_torchmetrics_is_refused():
    torchmetrics = pytest.importorskip("torchmetrics")
    with pytest.raises(TypeError, match="pass members of a collection|without internal state"):
        as_metric(torchmetrics.MetricCollection([torchmetrics.classification.BinaryAccuracy()]))


@pytest.mark.parametrize("name, expected", [("eval/loss", True), ("error", True), ("train/accuracy", False)])
def test_three_names_say_which_values_are_better(name, expected):
    assert is_lower_better(name) is expected


@pytest.mark.parametrize(
    "name", ["neg_mean_squared_error", "neg_log_loss", "false_positive_rate", "eval/l2", "miss_rate", "loss/kl", "f1"]
)
def test_other_names_say_nothing(name):
    assert is_lower_better(name) is None


@pytest.mark.parametrize(
    "metric, expected",
    [
        (accuracy, False),
        (top_k(5), False),
        (iou(2), False),
        (mean_loss(), True),
        (mean_loss(F.mse_loss), True),
        (perplexity(), True),
        (from_function(lambda outputs, targets: outputs, higher_is_better=False), True),
        (from_function(lambda outputs, targets: outputs), None),
    ],
)
def test_metrics_declare_which_values_are_better(metric, expected):
    assert is_lower_better("m", metric) is expected


def test_metrics_of_torchmetrics_declare_which_values_are_better():
    torchmetrics = pytest.importorskip("torchmetrics")
    hamming, score = torchmetrics.HammingDistance("multiclass", num_classes=3), torchmetrics.R2Score()
    assert is_lower_better("accuracy", as_metric(hamming)) is True  # before the name
    assert is_lower_better("error", as_metric(score)) is False


def test_a_part_of_the_loss_that_some_batches_lack_keeps_its_mean():
    metric: Any = mean_loss()
    acc = metric.init()
    for num in (2, 3):
        loss = lambda outputs, targets: (outputs.mean(), {"kl": outputs.max()} if len(outputs) == 2 else {})  # noqa: E731
        acc = metric.update(acc, torch.full((num,), float(num)), None, num_examples=num, loss_fn=loss)
    assert {name: value.item() for name, value in metric.compute(acc).items()} == {"": 2.6, "kl": 2.0}


def test_iou_counts_sets_over_all_batches():
    found, wanted = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    scores, labels = torch.randn(6, 3, 4, 5, generator=found), torch.randint(0, 3, (6, 4, 5), generator=wanted)
    metric, predicted = iou(4), scores.argmax(1)
    outputs = torch.cat([scores, torch.full((6, 1, 4, 5), -9.0)], 1)  # the last class never occurs
    acc = metric.init()
    for part in (slice(0, 1), slice(1, 6)):
        acc = metric.update(acc, outputs[part], labels[part])
    sets = [(predicted == number, labels == number) for number in range(3)]
    expected = [(found & wanted).sum() / (found | wanted).sum() for found, wanted in sets]
    torch.testing.assert_close(metric.compute(acc), torch.stack(expected).mean())
    with pytest.raises(ValueError, match="expected 4 classes"):
        metric.update(acc, scores, labels)


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.abs().mean(1)


def test_metrics_are_given_by_name_in_a_list_or_alone():
    outputs, targets = torch.randn(9, 4), torch.arange(9) % 4
    state = pc.State.create(torch.nn.Identity(), loss=cross_entropy, optimizer=pc.optim.sgd(0.1))
    expected = {
        "accuracy": (outputs.argmax(1) == targets).float().mean().item(),
        "top_3": (outputs.topk(3).indices == targets[:, None]).any(1).float().mean().item(),
        "loss": F.cross_entropy(outputs, targets).item(),
        "absolute": outputs.abs().mean().item(),
    }
    data = [(outputs[:5], targets[:5]), (outputs[5:], targets[5:])]
    for metrics in (["accuracy", "top_3", "loss", absolute], (accuracy, top_k(3), mean_loss(), absolute)):
        assert pc.evaluate(state, data, metrics) == pytest.approx(expected, rel=1e-6)
    for alone in ("accuracy", accuracy, {"accuracy": "accuracy"}):
        assert pc.evaluate(state, data, alone) == pytest.approx({"accuracy": expected["accuracy"]})
    assert [*pc.Evaluator(data, ["accuracy", "loss"]).reported] == ["eval/accuracy", "eval/loss"]
    assert pc.Evaluator(data, "loss").reported["eval/loss"] is not None


def test_names_of_metrics_are_those_of_their_values():
    binary, values = torch.tensor([[2.0], [-1.0], [3.0]]), torch.tensor([[1.0], [1.0], [0.0]])
    classes, indices = torch.randn(3, 4), torch.tensor([0, 3, 1])
    known = {
        "binary_accuracy": (binary, values, 1 / 3),
        "mae": (binary, values, 2.0),
        "mse": (binary, values, 14 / 3),
        "binary_cross_entropy": (binary, values, F.binary_cross_entropy_with_logits(binary, values).item()),
        "cross_entropy": (classes, indices, F.cross_entropy(classes, indices).item()),
        "perplexity": (classes, indices, F.cross_entropy(classes, indices).exp().item()),
    }
    for name, (outputs, targets, value) in known.items():
        assert run(as_metrics(name)[name], outputs, targets, 2) == pytest.approx(value, rel=1e-6), name
    assert run(as_metrics("binary_accuracy")["binary_accuracy"], binary, values[:, 0], 3) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("accuracyy", ValueError, "did you mean 'accuracy'.*There are accuracy, binary_accuracy.*top_5"),
        (["fbeta"], ValueError, "no metric is called 'fbeta'; there are accuracy"),
        ("top_0", ValueError, "no metric is called 'top_0'"),
        (["f1"], ValueError, r"'f1' needs the number of classes: write pc.metrics.f1\(10\)"),
        ([lambda outputs, targets: outputs], TypeError, "has no name: give a mapping"),
        (["accuracy", accuracy], ValueError, "two metrics are called 'accuracy'"),
        ([3], TypeError, "expected a Metric or a function"),
        ({"seen": len}, TypeError, "metric 'seen'.*cannot be called as metric"),
    ],
)
def test_metrics_without_a_name_or_with_an_unknown_one_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        as_metrics(given)


def test_a_metric_of_torchmetrics_has_the_name_of_its_class():
    classification = pytest.importorskip("torchmetrics.classification")
    assert [*as_metrics([classification.MulticlassF1Score(num_classes=3)])] == ["multiclass_f1_score"]


def test_class_averages_are_those_of_counts_over_all_batches():
    outputs, targets = torch.randn(40, 4), torch.randint(3, (40,))  # no example of the last class
    found = outputs.argmax(1)
    recalls = [(found[targets == c] == c).double().mean().item() for c in range(3)]
    assert run(balanced_accuracy(4), outputs, targets, 7) == pytest.approx(sum(recalls) / 3, rel=1e-6)
    sizes = [(found == c).sum().item() + (targets == c).sum().item() for c in range(4)]
    both = [((found == c) & (targets == c)).sum().item() for c in range(4)]
    scores = [2 * both[c] / sizes[c] for c in range(4) if sizes[c]]
    assert run(f1(4), outputs, targets, 7) == pytest.approx(sum(scores) / len(scores), rel=1e-6)
    assert [*as_metrics([f1(4), balanced_accuracy(4)])] == ["f1", "balanced_accuracy"]


def test_class_averages_are_those_of_torchmetrics():
    classification = pytest.importorskip("torchmetrics.classification")
    outputs, targets = torch.randn(50, 3), torch.randint(3, (50,))
    for ours, theirs in ((balanced_accuracy, "Accuracy"), (f1, "F1Score")):
        reference = getattr(classification, f"Multiclass{theirs}")(num_classes=3, average="macro")
        assert run(ours(3), outputs, targets, 20) == pytest.approx(reference(outputs, targets).item(), rel=1e-6)
