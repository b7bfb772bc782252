"""The index that stands for no class is declared by the loss; metrics and methods take it from there."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop_events, losses, metrics
from tests.helpers import make_state


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
        {
            "accuracy": metrics.accuracy,
            "dice": metrics.dice(NUM_CLASSES),
            "iou": metrics.iou(NUM_CLASSES),
            "perplexity": metrics.perplexity(),
        },
    )
    expected = {
        "accuracy": (found == classes).double().mean().item(),
        "dice": float(sum(2 * b / (b + e) for b, e in zip(both, either, strict=True)) / NUM_CLASSES),
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
