"""Losses of two views and of a teacher, against loops over examples and the formulas of the papers."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop_events, losses
from purecompose.losses import Distillation, InfoNCE
from tests.helpers import make_batch, make_mlp


VIEWS = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def by_loops(views: Tensor, temperature: float, *, both: bool) -> tuple[float, float]:
    """Return the loss and the share of vectors that find the other view."""
    vectors = [(i, v, (views[i, v] / views[i, v].norm()).tolist()) for i in range(len(views)) for v in range(2)]
    total, hits = 0.0, 0
    for i, v, own in vectors:
        rated = {}
        for j, w, other in vectors:
            if (j, w) != (i, v) and (both or w != v):
                rated[j, w] = math.exp(sum(a * b for a, b in zip(own, other, strict=True)) / temperature)
        total -= math.log(rated[i, 1 - v] / sum(rated.values()))
        hits += max(rated, key=rated.__getitem__) == (i, 1 - v)
    return total / len(vectors), hits / len(vectors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_views_of_half_precision_are_compared_in_single_precision(dtype):
    loss, parts = InfoNCE(0.05)(VIEWS.to(dtype))
    assert loss.dtype is parts["accuracy"].dtype is torch.float32
    assert loss.item() == pytest.approx(InfoNCE(0.05)(VIEWS.to(dtype).double())[0].item(), rel=1e-5)


@pytest.mark.parametrize("labels", [losses.cross_entropy, F.cross_entropy])
def test_a_student_learns_from_positions_that_the_loss_of_labels_counts(labels):
    student, teacher = VIEWS.unbind(1)
    classes = torch.tensor([0, -100, 2, 3, -100, 1])
    kept = classes >= 0
    loss, parts = Distillation(2.0, 0.3, labels)((student, teacher), classes)
    expected, of_kept = Distillation(2.0, 0.3)((student[kept], teacher[kept]), classes[kept])
    torch.testing.assert_close((loss, parts), (expected, of_kept))


@pytest.mark.parametrize("negatives", ["both", "other"])
@pytest.mark.parametrize("temperature", [0.1, 0.7])
def test_views_are_compared_with_all_others(negatives, temperature):
    expected, accuracy = by_loops(VIEWS, temperature, both=negatives == "both")
    forms = VIEWS, (VIEWS[:, 0], VIEWS[:, 1]), {"image": VIEWS[:, 0], "text": VIEWS[:, 1]}
    for outputs in forms:
        loss, parts = InfoNCE(temperature, negatives=negatives)(outputs)
        assert loss.item() == pytest.approx(expected, rel=1e-9)
        assert parts["accuracy"].item() == pytest.approx(accuracy) and [*parts] == ["accuracy"]


class TwoViews(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return torch.stack([super().forward(input), super().forward(1.1 * input)], 1)


def contrasted(loss: Any, **options: Any) -> State:
    settings = {"optimizer": pc.optim.sgd(0.1), "duration": "4ba", "target_field": None, **options}
    return State.create(TwoViews(*make_mlp(dtype=torch.float64)), loss=loss, **settings)


@pytest.mark.parametrize("negatives", ["both", "other"])
def test_slices_and_compiled_steps_compare_the_whole_batch(negatives):
    inputs, _ = make_batch(1, 12, dtype=torch.float64)
    start = contrasted(InfoNCE(0.5, negatives=negatives, learned=True))
    net = TwoViews(*make_mlp(dtype=torch.float64))
    expected, _ = by_loops(net(inputs), 0.5, both=negatives == "both")
    steps: list[Any] = [compose(loop_events, microbatches=k) for k in (1, 4)]
    steps.append(pc.compile(steps[0], backend="eager", donate=False, quiet=True))
    ends = [step(start, inputs) for step in steps]
    for end in ends:
        assert end.loss is not None and end.loss.item() == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(end.params, ends[0].params)
        assert sorted(end.metrics) == ["loss/accuracy", "loss/temperature"]
    assert not torch.equal(ends[0].params["loss.log_temperature"], start.params["loss.log_temperature"])


def test_a_temperature_may_be_scheduled():
    inputs, _ = make_batch(1, 12, dtype=torch.float64)
    scheduled = contrasted(InfoNCE(pc.hparam("temperature", 0.5)))
    step = compose(loop_events)
    torch.testing.assert_close(step(scheduled, inputs).params, step(contrasted(InfoNCE(0.5)), inputs).params)


def test_methods_that_change_targets_are_refused_where_none_are_read():
    state = contrasted(losses.info_nce, target_field=1)
    for method in (alg.mixup(0.2), alg.cutmix(1.0), alg.label_smoothing(0.1)):
        with pytest.raises(TypeError, match="reads no targets"):
            compose(loop_events, [method]).init(state)


LABELS = torch.tensor([0, 2, 1, -100, 2, 0])


def logits(seed: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def taught(student: Tensor, teacher: Tensor, labels: Tensor, temperature: float, alpha: float) -> tuple[float, ...]:
    """Return loss, soft and hard part of the labels that count, example by example."""
    soft = hard = 0.0
    counted = [i for i, label in enumerate(labels.tolist()) if label >= 0]
    for i in counted:
        wanted, given = (one[i].div(temperature).softmax(0).tolist() for one in (teacher, student))
        soft += temperature**2 * sum(p * (math.log(p) - math.log(q)) for p, q in zip(wanted, given, strict=True))
        hard -= math.log(student[i].softmax(0)[labels[i]].item())
    soft, hard = soft / len(counted), hard / len(counted)
    return alpha * soft + (1 - alpha) * hard, soft, hard


@pytest.mark.parametrize(("temperature", "alpha"), [(2.0, 0.5), (4.0, 0.9), (1.0, 0.0)])
def test_a_student_learns_from_labels_and_a_teacher(temperature, alpha):
    student, teacher = logits(0), logits(1)
    expected = taught(student, teacher, LABELS, temperature, alpha)
    loss = Distillation(temperature, alpha)
    for outputs, targets in (((student, teacher), LABELS), (student, [LABELS, teacher])):
        value, parts = loss(outputs, targets)
        assert [value.item(), parts["soft"].item(), parts["hard"].item()] == pytest.approx(expected, rel=1e-9)


def test_a_teacher_alone_needs_no_labels_and_gets_no_gradient():
    student, teacher = logits(0).requires_grad_(), logits(1).requires_grad_()
    value, parts = Distillation(3.0, alpha=1)((student, teacher), None)
    expected = taught(student, teacher, torch.zeros(6).long(), 3.0, 1.0)
    assert value.item() == pytest.approx(expected[0], rel=1e-9) and [*parts] == ["soft"]
    assert torch.autograd.grad(value, [student, teacher], allow_unused=True)[1] is None


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = make_mlp(dtype=torch.float64), make_mlp(1, dtype=torch.float64)
        self.teacher.requires_grad_(False)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(inputs), self.teacher(inputs)


def test_slices_add_up_with_mixed_and_smoothed_labels():
    batch = make_batch(1, 12, dtype=torch.float64)
    batch[1][3:6] = -100
    start = State.create(Pair(), loss=losses.distillation, optimizer=pc.optim.sgd(0.1), duration="4ba")
    for methods in ([], [alg.mixup(0.3), alg.label_smoothing(0.1)], [alg.mixup(0.3, interpolate_loss=True)]):
        steps: list[Any] = [compose(loop_events, methods, microbatches=k) for k in (1, 5)]
        steps.append(pc.compile(steps[0], backend="eager", donate=False, quiet=True))
        ends = [step(step.init(start), batch) for step in steps]
        for end in ends[1:]:
            torch.testing.assert_close(end.params, ends[0].params)
            torch.testing.assert_close(end.loss, ends[0].loss)
        assert all(torch.equal(ends[0].params[name], start.params[name]) for name in start.params if "teacher" in name)


def test_outputs_of_a_teacher_may_be_a_member_of_the_batch():
    inputs, labels = make_batch(1, 12, dtype=torch.float64)
    teacher = make_mlp(1, dtype=torch.float64)(inputs).detach()
    options = {"loss": losses.distillation, "optimizer": pc.optim.sgd(0.1), "duration": "4ba"}
    by_field = State.create(make_mlp(dtype=torch.float64), input_field="x", target_field=["y", "teacher"], **options)
    batch = {"x": inputs, "y": labels, "teacher": teacher}
    expected = compose(loop_events)(State.create(Pair(), **options), (inputs, labels))
    for k in (1, 3):
        end = compose(loop_events, microbatches=k)(by_field, batch)
        found = {f"student.{name}": param for name, param in end.params.items()}
        torch.testing.assert_close(found, {name: expected.params[name] for name in found})
        torch.testing.assert_close(end.metrics["loss/soft"], expected.metrics["loss/soft"])
    assert pc.evaluate(by_field, [batch])["loss/hard"] == pytest.approx(expected.metrics["loss/hard"].item())


def test_examples_of_a_distillation_may_have_weights():
    batch = make_batch(1, 12, dtype=torch.float64)
    weights = torch.rand(12, dtype=torch.float64)
    start = State.create(Pair(), loss=losses.distillation, optimizer=pc.optim.sgd(0.1), weight_field=2)
    each = losses.distillation(start.forward(batch[0]), batch[1], "none")
    end = compose(loop_events, microbatches=3)(start, (*batch, weights))
    torch.testing.assert_close(end.loss, (weights * each).sum() / weights.sum())


ROWS = torch.zeros(2, 3)
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: InfoNCE(0.0), ValueError, "temperature"),
    (lambda: InfoNCE(negatives="none"), ValueError, "expected 'both' or 'other'"),
    (lambda: InfoNCE(pc.hparam("t", 0.1), learned=True), TypeError, "temperature"),
    (lambda: losses.info_nce(torch.zeros(4, 3)), ValueError, r"expected outputs \(N, 2, D\)"),
    (lambda: losses.info_nce((ROWS, torch.zeros(3, 3))), ValueError, r"two of shape \(N, D\)"),
    (lambda: Distillation(-1.0), ValueError, "temperature"),
    (lambda: Distillation(alpha=1.5), ValueError, "alpha"),
    (lambda: losses.distillation(ROWS, torch.zeros(2).long()), TypeError, r"expected outputs \(student, teacher\)"),
    (lambda: losses.distillation((ROWS, torch.zeros(2, 4)), None), ValueError, "logits of one shape"),
    (lambda: Distillation(loss=losses.mse)((ROWS, ROWS), ROWS), ValueError, r"a loss of shape \(2,\)"),
]


@pytest.mark.parametrize(("make", "error", "message"), REFUSED)
def test_wrong_settings_and_outputs_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_parts_of_a_loss_are_zero_where_a_label_does_not_count():
    each = losses.distillation((logits(0), logits(1)), LABELS, "none")
    assert each[3] == 0 and (each[[0, 1, 2, 4, 5]] > 0).all()
