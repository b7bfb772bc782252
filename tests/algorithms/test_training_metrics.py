"""Metrics of training outputs against manual sums."""

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, compose, loop_events, metrics
from purecompose.algorithms import label_smoothing, mixup, training_metrics
from purecompose.time.predicates import NEVER
from tests.algorithms import method_helpers as helpers


NUM = 4
"""Number of batches in an epoch."""


def make_batches(num: int = 2 * NUM) -> list[tuple[Tensor, Tensor]]:
    """Return different batches; the last one of each epoch is short."""
    generator = torch.Generator().manual_seed(3)
    sizes = [5 if number % NUM == NUM - 1 else 10 for number in range(num)]
    return [(torch.randn(s, 6, generator=generator), torch.randint(4, (s,), generator=generator)) for s in sizes]


def start(net: nn.Module | None = None, **options) -> State:
    return helpers.make_state(net, batches_per_epoch=NUM, **options)


def hits(state: State, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return which examples the network of a state classifies correctly."""
    return pc.to_module(state)(batch[0]).argmax(1) == batch[1]


def expected_runs(period: int | None, batches) -> list[float]:
    """Return the manually computed accuracy so far after each batch of plain training."""
    plain, state, seen, found = compose(loop_events), start(), [], []
    for number, batch in enumerate(batches):
        if period and number % period == 0:
            seen = []
        seen.append(hits(state, batch))
        found.append(torch.cat(seen).double().mean().item())
        state = plain(state, batch)
    return found


@pytest.mark.parametrize(
    ("reset", "period"),
    [("1ep", NUM), ("2ep", 2 * NUM), ("3ba", 3), ("1ba", 1), (None, None), (pc.time.Time(1, "ep"), NUM)],
)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_it_is_the_accuracy_since_the_period_began(reset, period, microbatches):
    batches = make_batches()
    step = compose(loop_events, [training_metrics(reset=reset)], microbatches=microbatches)
    state, found = step.init(start()), []
    for batch in batches:
        state = step(state, batch)
        found.append(state.metrics["train/accuracy"].item())
    assert found == pytest.approx(expected_runs(period, batches), rel=1e-6)


def test_fit_reports_whole_epochs_also_of_unknown_length():
    class Unsized:
        def __iter__(self):
            return iter(make_batches()[:NUM])

    seen: list[float] = []

    def look(event: pc.Event, state: State) -> None:
        if event is pc.Event.BATCH_END:
            seen.append(state.metrics["train/accuracy"].item())

    step = compose(loop_events, [training_metrics()])
    pc.fit(step, helpers.make_state(batches_per_epoch=None), Unsized(), observers=[look])
    assert seen == pytest.approx(expected_runs(NUM, make_batches()[:NUM] * 2), rel=1e-6)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_mixed_targets_count_as_their_heavier_class(microbatches):
    """Compared with the mixed batch, recorded after MixUp; smoothing only acts on the loss."""
    seen = []

    def take(event: pc.Event, state: State) -> State:
        del event
        seen.append((state.inputs, state.targets))
        return state

    spy = pc.Algorithm("spy", pc.on(pc.Event.BATCH_START), take)
    methods = [mixup(0.8), label_smoothing(0.3), training_metrics(), spy]
    step = compose(loop_events, methods, microbatches=microbatches)
    state, right, number = step.init(start()), 0, 0
    for batch in make_batches()[:NUM]:
        before, state = state, step(state, batch)
        inputs, targets = seen[-1]
        outputs = pc.to_module(before)(inputs)
        right += (outputs.argmax(1) == targets.soft(outputs).argmax(1)).sum().item()
        number += len(inputs)
        assert state.metrics["train/accuracy"].item() == pytest.approx(right / number, rel=1e-6)


def test_any_metric_and_function_and_a_loss():
    chosen = {
        "top": metrics.top_k(2),
        "confidence": lambda outputs, targets: outputs.softmax(1).amax(1),
        "loss": pc.losses.cross_entropy,
    }
    step = compose(loop_events, [training_metrics(chosen)], microbatches=2)
    before = step.init(start())
    inputs, targets = batch = make_batches()[0]
    outputs = pc.to_module(before)(inputs)
    found = {name: value.float() for name, value in step(before, batch).metrics.items()}
    torch.testing.assert_close(
        found,
        {
            "train/top": (outputs.topk(2).indices == targets[:, None]).any(1).float().mean(),
            "train/confidence": outputs.softmax(1).amax(1).mean().detach(),
            "train/loss": nn.functional.cross_entropy(outputs, targets).detach(),
        },
    )


def test_a_second_gradient_counts_no_example_twice():
    def again(event: pc.Event, state: State) -> State:
        del event
        grads, _ = state.gradient(state.params)
        return state.replace(grads=grads)

    sam = pc.Algorithm("sam", pc.on(pc.Event.AFTER_TRAIN_BATCH), again)
    step = compose(loop_events, [training_metrics(), sam])
    state = step(step.init(start()), make_batches()[0])
    assert state.slots["training_metrics"]["accuracy"].number.item() == 10


def test_metrics_of_a_model_with_its_own_loss_get_the_batch():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x, y):
            logits = self.linear(x)
            return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}

    right = metrics.from_function(lambda outputs, batch: outputs["logits"].argmax(1) == batch["y"])
    x, y = make_batches()[0]
    step = compose(loop_events, [training_metrics({"accuracy": right})])
    before = step.init(start(Own(), loss=pc.losses.model_loss, target_field="labels"))
    found = step(before, {"x": x, "y": y}).metrics["train/accuracy"].item()
    assert found == pytest.approx((before.forward({"x": x, "y": y})["logits"].argmax(1) == y).float().mean().item())


def test_no_metrics_never_match_and_names_are_checked():
    assert training_metrics({}).match == training_metrics(()).match == NEVER
    with pytest.raises(ValueError, match="no metric is called 'acuracy'; did you mean 'accuracy'"):
        training_metrics(["acuracy"])
    with pytest.raises(TypeError, match="expected a Metric or a function"):
        training_metrics(3)  # pyright: ignore[reportArgumentType]
    assert [*training_metrics([metrics.accuracy, "top_2"]).reported] == ["train/accuracy", "train/top_2"]
    assert [*training_metrics("accuracy").reported] == ["train/accuracy"]
    for reset in ("0.5dur", "0ep", "10sp"):
        with pytest.raises(ValueError, match="training_metrics: reset: expected whole epochs or batches"):
            training_metrics(reset=reset)
