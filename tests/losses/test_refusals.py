"""Arguments of losses, targets and metrics that are refused, and the words of the error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from purecompose import losses, metrics
from purecompose.losses import CrossEntropy, Mixture, ModelLoss, cross_entropy, model_loss
from purecompose.metrics import Metric


class Accumulator(nn.Module):
    def compute(self) -> None: ...

    def reset(self) -> None: ...


def updated(metric: Metric, outputs: Any, targets: Any) -> Any:
    return metric.update(metric.init(), outputs, targets)


def scalar(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(outputs, targets)


def number(outputs: Tensor, targets: Tensor) -> Any:
    return 1.0


ROWS, INDICES = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
PAIR, ORDER = Mixture.of(torch.tensor([0, 1])), torch.tensor([1, 0])
INSIDE = torch.zeros(1, 3, 4, dtype=torch.bool)
MODEL = {"loss": torch.tensor(2.0), "logits": torch.zeros(2, 3)}
CLASS_METRICS = (metrics.accuracy, metrics.iou(2))

REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...], type[Exception] | tuple[type[Exception], ...], str]] = [
    # Losses
    (CrossEntropy, (-100, [1.0, -1.0]), ValueError, r"weight\[1\]"),
    (CrossEntropy, (-100, ["a", 1.0]), TypeError, r"weight\[0\]"),
    (CrossEntropy, (-100, [[1.0, 2.0]]), TypeError, r"weight\[0\]"),
    (CrossEntropy, (-100, 2.0), TypeError, "sequence of numbers"),
    *(
        (CrossEntropy(weight=[1.0, 2.0]), (ROWS, targets), ValueError, "2 numbers, expected one for each of the 3")
        for targets in (INDICES, torch.ones(4, 3))
    ),
    (cross_entropy, (ROWS, torch.zeros(4, 2)), ValueError, r"\(4, 2\).*\(4, 3\)"),
    (cross_entropy, (torch.zeros(3), torch.zeros(3)), ValueError, "batch dim"),
    (cross_entropy, (ROWS, torch.full((4,), 3)), (IndexError, RuntimeError), "out of bounds"),
    (cross_entropy, (torch.zeros(4, 1, 5), torch.ones(4, 1, 5)), ValueError, "at least 2 classes.*binary"),
    (losses.mse, (torch.zeros(4, 1), torch.zeros(4)), ValueError, r"unsqueeze\(1\)"),
    (losses.binary_cross_entropy, (torch.zeros(4, 1), torch.zeros(4)), ValueError, r"unsqueeze\(1\)"),
    (losses.BinaryCrossEntropy, ("classes",), ValueError, "expected 'elements' or 'examples'"),
    (losses.BinaryCrossEntropy, ("elements", -1.0), ValueError, "pos_weight"),
    (losses.BinaryCrossEntropy, ("elements", [1.0, "a"]), TypeError, r"pos_weight\[1\]"),
    (losses.BinaryCrossEntropy("elements", [1.0, 2.0]), (ROWS, ROWS), ValueError, "one for each of the 3 classes"),
    (losses.per_example, (model_loss, MODEL, None), ValueError, "per example"),
    (model_loss, ({"logits": ROWS}, None), ValueError, "'loss', got dict with NoneType"),
    (model_loss, ({"loss": torch.zeros(2)}, None, "max"), ValueError, "reduction"),
    (losses.evaluate_loss, (ModelLoss(), MODEL, PAIR.mixed_with(ORDER, 0.5)), TypeError, "mixed targets"),
    (losses.per_example, (nn.CrossEntropyLoss(), ROWS, INDICES), TypeError, "functional.cross_entropy"),
    (losses.per_example, (scalar, ROWS, INDICES), ValueError, r"4 examples.*\(\)"),
    *((losses.check_loss, (wrong,), TypeError, "expected a loss") for wrong in ("mse", None, CrossEntropy, nn.NLLLoss)),
    *(
        (lambda loss: losses.check_loss(loss, per_example=True), (wrong,), TypeError, "reduction")
        for wrong in (model_loss, nn.CrossEntropyLoss(), lambda outputs, targets: outputs)
    ),
    # Targets
    (
        losses.has_index_targets,
        (ROWS, losses.Mixture.of(torch.zeros(4))),
        TypeError,
        r"got Tensor and Mixture; pass `targets.soft",
    ),
    (losses.has_index_targets, (ROWS, torch.zeros(5, dtype=torch.int64)), ValueError, r"\(5,\).*\(4, 3\)"),
    (losses.has_index_targets, (torch.zeros(4, 7, 3), torch.zeros(4, 7).long()), ValueError, "transpose"),
    (losses.has_index_targets, (ROWS, torch.zeros(4)), ValueError, r"float32.*long\(\)"),
    (losses.has_index_targets, (ROWS, torch.zeros(4, dtype=torch.bool)), ValueError, "bool"),
    (losses.has_index_targets, (torch.zeros(3), torch.tensor(1)), ValueError, "unsqueeze"),
    (losses.has_index_targets, ({"logits": ROWS}, INDICES), TypeError, "got dict and Tensor"),
    (losses.one_hot, (torch.tensor([0, 3]), torch.zeros(2, 3)), (IndexError, RuntimeError), "index 3 is out of bounds"),
    (losses.one_hot, (torch.tensor([0]), torch.zeros(1, 1)), ValueError, "at least two classes"),
    (losses.one_hot, (ROWS, ROWS), ValueError, "dense already"),
    (losses.num_examples, (torch.tensor(1.0), None), ValueError, "batch dim"),
    *((Mixture.of, (wrong,), TypeError, "batch dim") for wrong in (torch.tensor(1), [0, 1])),
    (PAIR.mixed_with, (torch.arange(3), 0.5), ValueError, r"got \(3,\) and \(\)"),
    (PAIR.mixed_with, (ORDER, torch.zeros(2, 1)), ValueError, r"\(2, 1\)"),
    (Mixture.of(torch.zeros(2, 3, 4)).pasted, (torch.arange(3), INSIDE), ValueError, r"got \(3,\) and \(\)"),
    *(
        (Mixture.of(torch.zeros(shape)).pasted, (ORDER, INSIDE), ValueError, r"expected targets \(N, ..., 3, 4\)")
        for shape in ((2,), (2, 4), (2, 4, 3))
    ),
    # Metrics
    *((metrics.top_k, (k,), ValueError, "k: expected an int >= 1") for k in (0, -1)),
    *((metrics.top_k, (k,), TypeError, "k: expected an int >= 1") for k in (1.5, True)),
    *(
        (updated, (metric, torch.zeros(shape), torch.ones(shape)), ValueError, r"got shape \(4.*binary_accuracy")
        for metric in CLASS_METRICS
        for shape in ((4, 1), (4, 1, 5, 5), (4,))
    ),
    (updated, (metrics.accuracy, (ROWS, ROWS), INDICES), TypeError, r"got tuple and Tensor; pick .*outputs\[0\]"),
    (updated, (metrics.top_k(5), ROWS, INDICES), ValueError, "top_k: .* at least 5 classes"),
    (updated, (metrics.accuracy, torch.zeros(2, 1), torch.zeros(2, 1)), ValueError, "^metrics.accuracy: .* 2 classes"),
    (updated, (metrics.iou(4), ROWS, INDICES), ValueError, "expected 4 classes"),
    (updated, (metrics.as_metric(lambda o, t: o[:3]), ROWS, INDICES), ValueError, r"4 rows.*\(3, 3\)"),
    (updated, (metrics.as_metric(number), ROWS, INDICES), TypeError, "got float"),
    (metrics.as_metric, (Accumulator(),), TypeError, "Accumulator.*functional"),
    *((metrics.as_metric, (wrong,), TypeError, "expected") for wrong in ("accuracy", 3, None, CrossEntropy)),
]


@pytest.mark.parametrize(("call", "args", "error", "words"), REFUSED)
def test_wrong_arguments_are_refused(call: Callable[..., Any], args: tuple[Any, ...], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call(*args)
