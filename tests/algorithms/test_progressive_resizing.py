from typing import Any

import pytest
import torch
from torch import nn

import purecompose as pc
from purecompose.algorithms._colout import colout
from purecompose.algorithms._progressive_resizing import progressive_resizing
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import compose
from purecompose.core.loop import loop_events
from purecompose.core.state import State
from purecompose.optim import sgd
from purecompose.time.event import Event
from purecompose.time.predicates import on


def make_state(duration="10ba", **options):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    return State.create(
        net, loss=pc.losses.cross_entropy, optimizer=sgd(0.1), key=5, **{"duration": duration, **options}
    )


def make_batch(height=32, width=32, num=4):
    generator = torch.Generator().manual_seed(height)
    return torch.rand(num, 3, height, width, generator=generator), torch.arange(num) % 2


def run(step, state, batch, num):
    """Return the sizes that the network saw, and the states after each step."""
    seen, spy = [], Algorithm("spy", on("batch_start"), lambda event, s: seen.append(s.inputs.shape[2:]) or s)
    spying = step.replace(algorithms=[*step.algorithms, spy])
    states = [spying.init(state)]
    for _ in range(num):
        states.append(spying(states[-1], batch))
    return list(map(tuple, seen)), states


def test_sizes_follow_the_schedule_and_are_reported():
    step = compose(loop_events, [progressive_resizing()])
    sizes, states = run(step, make_state(), make_batch(32, 24), 10)
    assert [height for height, _ in sizes] == [16] * 6 + [20, 28, 32, 32]  # 21.3 and 26.7 between
    assert all(width % 4 == 0 for _, width in sizes) and sizes[0] == (16, 12) and sizes[-1] == (32, 24)
    metrics = [state.metrics for state in states[1:9]]
    assert [(m["progressive_resizing/height"], m["progressive_resizing/width"]) for m in metrics[:8]] == sizes[:8]
    assert metrics[6]["progressive_resizing/scale_factor"].item() == pytest.approx(0.5 + 0.5 * 0.1 / 0.3)
    assert not any(name.startswith("progressive_resizing") for name in states[9].metrics)


@pytest.mark.parametrize(
    ("run_length", "moves_within"),
    [({"duration": "2ep", "batches_per_epoch": 10}, True), ({"duration": "80sp"}, True), ({"duration": "2ep"}, False)],
)
def test_the_scale_changes_within_epochs_if_their_length_is_known(run_length, moves_within):
    step = compose(loop_events, [progressive_resizing(delay_fraction=0)])
    if moves_within:
        sizes, _ = run(step, make_state(**run_length), make_batch(), 10)
        assert sizes[0] == (16, 16) and len(set(sizes)) > 2
    else:
        state = step.init(make_state(**run_length))
        with pytest.warns(UserWarning, match="epochs have no known length"):
            state = step(state, make_batch())
        state = state.replace(timestamp=state.timestamp.advance_epoch())
        after = step(state, make_batch())
        assert after.metrics["progressive_resizing/scale_factor"].item() == pytest.approx(0.5 + 0.5 * 0.5 / 0.8)


@pytest.mark.parametrize("duration", [None, "60sec"])
def test_a_run_of_unknown_length_is_refused(duration):
    step = compose(loop_events, [progressive_resizing()])
    with pytest.raises(pc.errors.MatchError, match="progressive_resizing: .*(no duration|wall-clock)"):
        step(step.init(make_state(duration)), make_batch())


def test_masks_in_a_step_and_members_by_key():
    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 1)

        def forward(self, images):
            return self.conv(images)

    images, _ = make_batch(16, 16)
    batch = {"x": images, "y": torch.randint(0, 5, (4, 16, 16)), "other": images}
    state = State.create(
        Pixels(), loss=pc.losses.cross_entropy, optimizer=sgd(0.1), duration="4ba", input_field="x", target_field="y"
    )
    seen = []
    spy = Algorithm("spy", on("before_train_batch"), lambda event, s: seen.append(s.batch) or s)
    methods = [progressive_resizing("crop", resize_targets=True), progressive_resizing("crop")]
    for named in (*methods, progressive_resizing("crop", resize_targets=True, input_field="x", target_field="y")):
        step = compose(loop_events, [named, spy], microbatches=2)
        loss = step(step.init(state), batch).loss
        assert loss is not None and torch.isfinite(loss)
        assert seen[-1]["x"].shape == (4, 3, 8, 8) and seen[-1]["y"].shape == (4, 8, 8)
        assert seen[-1]["other"].data_ptr() == images.data_ptr() and batch["x"] is images


@pytest.mark.parametrize("method", [progressive_resizing("crop", 0.5), colout(0.5, 0.5)])
@pytest.mark.parametrize("named", [True, False])
def test_a_model_that_computes_its_own_loss_needs_no_target(method, named):
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 1)

        def forward(self, x):
            return {"loss": self.conv(x).square().mean()}

    settings: dict[str, Any] = {"input_field": "x"} if named else {}
    state = State.create(Energy(), loss=pc.losses.ModelLoss(), optimizer=sgd(0.1), key=0, duration="4ba", **settings)
    images, _ = make_batch(8, 8)
    seen = []
    spy = Algorithm("spy", on("before_train_batch"), lambda event, s: seen.append(s.inputs) or s)
    step = compose(loop_events, [method, spy])
    step(step.init(state), {"x": images} if named else images)
    # Rows of the images are not mistaken for masks.
    assert seen[0].shape == (4, 3, 4, 4) and all(torch.isin(seen[0][row], images[row]).all() for row in range(4))


# Settings


def test_a_scale_of_zero_starts_with_the_smallest_size():
    sizes = []
    spy = Algorithm("spy", on(Event.BEFORE_FORWARD), lambda event, state: sizes.append(state.inputs.shape[2:]) or state)
    step = compose(loop_events, [progressive_resizing(initial_scale=0), spy])
    state = step.init(make_state())
    for _ in range(9):
        state = step(state, (torch.randn(2, 3, 16, 16), torch.tensor([0, 1])))
    assert sizes[0] == (4, 4) and sizes[-1] == (16, 16) and sizes == sorted(sizes)
