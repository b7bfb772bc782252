"""The index that stands for no class is declared by the loss; metrics and methods take it from there."""

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop_events, losses, metrics
from purecompose.losses.terms import ignore_index_of
from purecompose.testing.process import played
from purecompose.transforms.population import stack_states, unstack_states
from tests.helpers import changing, make_state
from tests.sampling import one_in


IGNORED, NUM_CLASSES = 255, 3


@dataclasses.dataclass(frozen=True)
class OwnLoss:
    """A loss of a user, which declares the index in an attribute."""

    ignore_index: int = IGNORED

    def __call__(self, outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(outputs, targets, ignore_index=self.ignore_index, reduction=reduction)


LOSSES: dict[str, Any] = {
    "library": losses.CrossEntropy(ignore_index=IGNORED),
    "partial": functools.partial(F.cross_entropy, ignore_index=IGNORED),
    "module": nn.CrossEntropyLoss(ignore_index=IGNORED),
    "own": OwnLoss(),
}
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def make_masks(seed: int = 0, size: int = 6, ignored: int = IGNORED) -> tuple[Tensor, Tensor]:
    """Return images (size, 2, 5, 5) and masks; a third of the pixels, and all of the first two masks, do not count."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.randint(NUM_CLASSES, (size, 5, 5), generator=generator)
    masks[torch.rand(masks.shape, generator=generator) < 1 / 3] = ignored
    masks[:2] = ignored
    return torch.randn(size, 2, 5, 5, generator=generator, dtype=torch.float64), masks


def start(loss: Any) -> State:
    torch.manual_seed(1)
    return make_state(nn.Conv2d(2, NUM_CLASSES, 3, padding=1).double(), loss=loss)


@each_loss
def test_metrics_leave_out_what_the_loss_leaves_out(loss):
    state, batches = start(loss), [make_masks(seed) for seed in range(3)]
    outputs = torch.cat([state.forward(images) for images, _ in batches]).movedim(1, -1).flatten(0, -2)
    classes = torch.cat([masks for _, masks in batches]).flatten()
    is_counted = classes != IGNORED
    outputs, classes = outputs[is_counted], classes[is_counted]
    found = outputs.argmax(1)
    both = [((found == c) & (classes == c)).sum() for c in range(NUM_CLASSES)]
    either = [((found == c) | (classes == c)).sum() for c in range(NUM_CLASSES)]
    values = pc.evaluate(
        state,
        batches,
        {"accuracy": metrics.accuracy, "iou": metrics.iou(NUM_CLASSES), "perplexity": metrics.perplexity()},
    )
    expected = {
        "accuracy": (found == classes).double().mean().item(),
        "iou": float(sum(b / e for b, e in zip(both, either, strict=True)) / NUM_CLASSES),
        "perplexity": F.cross_entropy(outputs, classes).exp().item(),
    }
    assert values == pytest.approx(expected, rel=1e-6)
    accuracies = {"own": metrics.top_k(1, ignore_index=0)}  # one that is given prevails
    is_foreground = classes != 0
    share = (found == classes)[is_foreground].sum() / (is_foreground.sum() + (~is_counted).sum())
    assert pc.evaluate(state, batches, accuracies)["own"] == pytest.approx(share.item())


@pytest.mark.parametrize("loss", [LOSSES[name] for name in ("library", "partial", "module")])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_training_metrics_do_the_same_in_slices(loss, microbatches):
    state, batch = start(loss), make_masks()
    step = compose(loop_events, [alg.training_metrics()], microbatches=microbatches)
    is_right = (state.forward(batch[0]).argmax(1) == batch[1])[batch[1] != IGNORED]
    end = step(step.init(state), batch)  # with three slices nothing counts in the first one
    assert end.metrics["train/accuracy"].item() == pytest.approx(is_right.double().mean().item())
    assert end.loss is not None and end.loss.isfinite() and end.params["weight"].isfinite().all()


TORCHS = {
    "function": F.cross_entropy,
    "partial": functools.partial(F.cross_entropy, ignore_index=IGNORED),
    "module": nn.CrossEntropyLoss(ignore_index=IGNORED),
    "weighted": functools.partial(
        F.cross_entropy, ignore_index=IGNORED, weight=torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
    ),
    "smoothed": functools.partial(F.cross_entropy, ignore_index=IGNORED, label_smoothing=0.2),
}
each_torchs = pytest.mark.parametrize("name", TORCHS)


def masks_for(name: str) -> tuple[Tensor, Tensor]:
    return make_masks(ignored=-100 if name == "function" else IGNORED)


@each_torchs
@pytest.mark.parametrize("microbatches", [1, 3])
def test_torchs_losses_leave_out_the_same_with_smoothed_labels(name, microbatches):
    """The loss equals torch's with its own `label_smoothing`, of 1 - (1 - a)(1 - b) if it has one already."""
    loss, (images, masks) = TORCHS[name], masks_for(name)
    step = compose(loop_events, [alg.label_smoothing(0.1)], microbatches=microbatches)
    end = step(step.init(start(loss)), (images, masks))
    outputs = start(loss).forward(images)
    smoothing = 1 - 0.9 * 0.8 if name == "smoothed" else 0.1
    settings = {"ignore_index": ignore_index_of(loss), "label_smoothing": smoothing}
    expected = F.cross_entropy(outputs, masks, **settings)
    if name == "weighted":  # smoothed targets have their own sum of weights, by which the mean divides
        is_counted, weight = masks != IGNORED, TORCHS[name].keywords["weight"]
        total = F.cross_entropy(outputs, masks, weight=weight, reduction="sum", **settings)
        expected = total / (0.9 * weight[masks[is_counted]] + 0.1 * weight.mean()).sum()
    torch.testing.assert_close(end.loss, expected)


@each_torchs
@pytest.mark.parametrize("interpolate_loss", [False, True])
def test_torchs_losses_leave_out_the_same_with_mixed_targets(name, interpolate_loss):
    """The loss is sum_k w_k l(t_k) over positions and terms, divided by what counts in any term."""
    loss, (images, masks) = TORCHS[name], masks_for(name)
    ignored = ignore_index_of(loss)
    share, order = 0.3, torch.arange(len(masks)).roll(1)

    def mixed(state: State) -> State:
        mixture = losses.Mixture.of(state.targets).mixed_with(order, share, interpolate_loss)
        return state.replace(targets=mixture)

    mixer = changing("mixer", pc.Event.AFTER_DATALOADER, mixed)
    ends = [compose(loop_events, [mixer], microbatches=k)(start(loss), (images, masks)) for k in (1, 2)]
    outputs = start(loss).forward(images)
    weight = torch.ones(NUM_CLASSES).double() if name != "weighted" else TORCHS[name].keywords["weight"]
    total, divisor, counted = 0.0, 0.0, torch.zeros_like(masks, dtype=torch.bool)
    for own, targets in ((1 - share, masks), (share, masks[order])):
        settings = {"ignore_index": ignored, "label_smoothing": 0.2 if name == "smoothed" else 0.0}
        total += own * F.cross_entropy(outputs, targets, weight=weight, reduction="sum", **settings)
        is_counted = targets != ignored
        divisor += own * weight[targets[is_counted]].sum()
        counted |= is_counted
    expected = total / (divisor if name == "weighted" else counted.sum())
    for end in ends:
        torch.testing.assert_close(end.loss, expected)


METHODS = {
    "plain": lambda: [],
    "smoothed": lambda: [alg.label_smoothing(0.1)],
    "mixed": lambda: [alg.mixup(0.4)],
    "interpolated": lambda: [alg.mixup(0.4, interpolate_loss=True), alg.label_smoothing(0.1)],
}


@pytest.mark.parametrize("name", one_in(4, ["library", "partial", "module", "weighted"]))
@pytest.mark.parametrize("method", METHODS)
def test_parts_in_which_nothing_counts_have_no_part_in_the_step(name, method):
    """The first slice, and the first process, has nothing that counts."""
    step, batch = compose(loop_events, METHODS[method]()), make_masks()
    state = step.init(start({**LOSSES, **TORCHS}[name]))
    expected, sliced = step(state, batch), step.replace(microbatches=3)
    compiled = pc.compile(sliced, backend="eager", donate=False, quiet=True)(state, batch)
    pair = pc.population(sliced, 2)(stack_states([state, state]), batch)
    ranks = played(step, 3)(lambda one: one(state, batch))
    for end in (sliced(state, batch), compiled, *unstack_states(pair), *ranks):
        torch.testing.assert_close((end.params, end.loss), (expected.params, expected.loss))


def opaque(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return a loss that leaves out an index and does not declare it."""
    return F.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction=reduction)


@pytest.mark.parametrize(
    ("method", "loss", "says"),
    [
        (alg.label_smoothing(0.1), opaque, r"indices below 3 .* index 255 .* declare it: losses\.CrossEntropy\("),
        (alg.mixup(0.5), opaque, r"indices below 3 .* index 255 .* declare it: losses\.CrossEntropy\("),
        (alg.mixup(0.5, interpolate_loss=True), opaque, r"over all positions, .* but its own mean .* counted\("),
        (alg.label_smoothing(0.1), OwnLoss(), r"rows of zeros .* losses\.CrossEntropy\(ignore_index"),
    ],
    ids=["smoothing", "mixing", "interpolating", "indices only"],
)
def test_an_own_loss_is_told_how_to_declare_what_does_not_count(method, loss, says):
    step = compose(loop_events, [method])
    with pytest.raises(Exception, match=".") as caught:
        step(step.init(start(loss)), make_masks())
    assert re.search(says, "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])]))
