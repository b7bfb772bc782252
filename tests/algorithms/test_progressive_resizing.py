"""Progressive resizing: scales and images of the core, and the algorithm in a step."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, strategies as st
from scipy import stats
from torch import nn

import purecompose as pc
from purecompose import random, tree
from purecompose.algorithms._erasing import colout
from purecompose.algorithms._progressive_resizing import progressive_resizing, progressive_scale, resize_batch
from purecompose.core.algorithm import Algorithm
from purecompose.core.compose import compose
from purecompose.core.state import State
from purecompose.loop import loop_events
from purecompose.losses.targets import Mixture
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


# The core


SIDES = st.integers(1, 40)
SCALES = st.floats(0, 1, exclude_min=True, exclude_max=True)
INCREMENTS = st.none() | st.integers(1, 9)
SHARES = st.floats(0, 1).flatmap(lambda f: st.tuples(st.just(f), st.floats(0, 1 - f)))
KEY = random.key(3)


def numbered(*shape, dtype=torch.float32):
    """Return images whose pixels are all different; all images are alike."""
    height, width = shape[-2:]
    return torch.arange(height * width).reshape(height, width).expand(shape).to(dtype)


# The scale


@given(SHARES, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_the_scale_grows_from_the_initial_one_to_one(shares, initial, first, second):
    def scale(elapsed):
        return progressive_scale(elapsed, initial_scale=initial, finetune_fraction=shares[0], delay_fraction=shares[1])

    assert scale(min(first, second)) <= scale(max(first, second))
    assert initial <= scale(first) <= 1
    if first >= 1 - shares[0]:
        assert scale(first) == 1
    elif first <= shares[1]:
        assert scale(first) == initial


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 100))
def test_the_scale_is_the_closed_form(finetune, delay, elapsed):
    given_f, given_d, t = Fraction(finetune, 10), Fraction(delay, 10), Fraction(elapsed, 100)
    u = min(max((t - given_d) / (1 - given_f - given_d), 0), 1)
    expected = Fraction(1, 4) + Fraction(3, 4) * u
    scale = progressive_scale(
        elapsed / 100, initial_scale=0.25, finetune_fraction=finetune / 10, delay_fraction=delay / 10
    )
    assert scale == pytest.approx(float(expected))


@pytest.mark.parametrize(("finetune", "delay"), [(0.5, 0.5), (0.3, 0.7), (0.9, 0.1), (0, 1), (1, 0)])
def test_without_time_between_delay_and_fine_tuning_the_scale_jumps(finetune, delay):
    scales = [progressive_scale(i / 1000, finetune_fraction=finetune, delay_fraction=delay) for i in range(1001)]
    assert set(scales) <= {0.5, 1.0} and scales[-1] == 1 and sum(scale == 0.5 for scale in scales) == 1000 * delay


# Sizes


@pytest.mark.parametrize("size", [(31, 31), (32, 32), (32, 16)])
@pytest.mark.parametrize("mode", ["resize", "crop"])
@pytest.mark.parametrize("scale", [0.5, 0.75, 0.3])
def test_without_an_increment_sides_are_rounded_down(size, mode, scale):
    inputs, targets = torch.rand(2, 3, *size), torch.zeros(2)
    small, same = resize_batch(KEY, inputs, targets, scale, mode=mode)
    assert small.shape == (2, 3, int(size[0] * scale), int(size[1] * scale)) and same is targets


def test_a_side_loses_no_pixel_to_rounding():
    assert 0.29 * 100 < 29
    assert resize_batch(None, torch.zeros(1, 1, 100, 100), None, 0.29)[0].shape[-1] == 29


@given(SIDES, SIDES, SCALES, st.integers(1, 9), st.sampled_from(["resize", "crop"]))
@example(1, 2, math.nextafter(1.0, 0.0), 3, "resize")
def test_sides_are_the_nearest_multiples_that_fit(height, width, scale, increment, mode):
    small, _ = resize_batch(KEY, torch.zeros(1, 1, height, width), None, scale, mode=mode, size_increment=increment)
    for old, new in zip((height, width), small.shape[2:], strict=True):
        assert 1 <= new <= old
        if increment > old:
            assert max(1, int(old * scale)) <= new <= max(1, int(old * scale + 1e-9))  # rounding errors remove none
        elif new < old:
            assert new % increment == 0
        wanted = old * scale
        if increment <= old and increment / 2 <= wanted:
            assert abs(new - wanted) <= increment / 2 + 1e-9


@pytest.mark.parametrize("scale", [1, 1.0, 1.5])
@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_a_scale_of_one_returns_the_very_same_objects(scale, mode):
    inputs, targets = torch.rand(2, 3, 8, 8), torch.rand(2, 8, 8)
    same = resize_batch(KEY, inputs, targets, scale, mode=mode, resize_targets=True)
    assert same[0] is inputs and same[1] is targets
    pinned = resize_batch(KEY, inputs, None, 0.9, mode=mode, size_increment=4)  # 7.2 is nearer to 8
    assert pinned[0] is inputs and pinned[1] is None


# Pixels


@given(SIDES, SIDES, st.integers(1, 3), SCALES)
def test_bilinear_is_antialiased(height, width, channels, scale):
    """Each new pixel is the mean weighted by a tent that reaches to the centres of its neighbours."""
    inputs = torch.rand(2, channels, height, width, dtype=torch.float64)
    small, _ = resize_batch(None, inputs, None, scale)

    def tents(old, new):
        middles = (torch.arange(new, dtype=torch.float64) + 0.5) * (old / new)
        pixels = torch.arange(old, dtype=torch.float64) + 0.5
        weights = (1 - (pixels - middles[:, None]).abs() * (new / old)).clamp(min=0)
        return weights / weights.sum(1, keepdim=True)

    expected = tents(height, small.shape[2]) @ inputs @ tents(width, small.shape[3]).T
    torch.testing.assert_close(small, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("mode", ["resize", "crop"])
def test_dtypes_are_kept_and_values_equal_those_of_wide_dtypes(dtype, mode):
    inputs = (255 * torch.rand(2, 3, 9, 9)).to(dtype)
    small, _ = resize_batch(KEY, inputs, None, 0.5, mode=mode)
    wide, _ = resize_batch(KEY, inputs.double(), None, 0.5, mode=mode)
    assert small.dtype is dtype
    tolerance = {torch.uint8: 0.51, torch.float16: 0.1, torch.bfloat16: 0.6}.get(dtype, 1e-4)
    torch.testing.assert_close(small.double(), wide, atol=tolerance, rtol=0)


@given(st.integers(0, 2**32), st.integers(2, 12), st.integers(2, 12), SCALES)
def test_a_crop_is_a_window_and_repeats_itself(seed, height, width, scale):
    inputs = numbered(3, 2, height, width)
    small, _ = resize_batch(random.key(seed), inputs, None, scale, mode="crop")
    top, left = divmod(int(small[0, 0, 0, 0]), width)
    window = inputs[:, :, top : top + small.shape[2], left : left + small.shape[3]]
    assert torch.equal(small, window)
    assert torch.equal(resize_batch(random.key(seed), inputs, None, scale, mode="crop")[0], small)


def test_crops_are_at_every_position_equally_often():
    keys = random.split(random.key(1), 3000)
    inputs = numbered(1, 1, 8, 6)
    small = torch.func.vmap(lambda key: resize_batch(key, inputs, None, 0.5, mode="crop")[0])(keys)
    counts = torch.bincount(small[:, 0, 0, 0, 0].long(), minlength=48).reshape(8, 6)
    assert counts[5:].sum() == 0 and counts[:, 4:].sum() == 0
    assert stats.chisquare(counts[:5, :4].flatten().numpy()).pvalue > 0.01


# Targets


@given(st.integers(0, 2**32), st.integers(2, 12), st.integers(2, 12), SCALES, INCREMENTS)
def test_a_crop_cuts_the_same_window_out_of_masks(seed, height, width, scale, increment):
    inputs = numbered(2, 1, height, width)
    settings = {"mode": "crop", "resize_targets": True, "size_increment": increment}
    small, masks = resize_batch(random.key(seed), inputs, inputs.long()[:, 0], scale, **settings)
    assert masks.dtype is torch.int64 and torch.equal(small[:, 0].long(), masks)
    _, dense = resize_batch(random.key(seed), inputs, inputs, scale, **settings)
    assert torch.equal(dense, small)


@pytest.mark.parametrize("mode", ["resize", "crop"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float64])
def test_masks_of_another_size_change_by_the_same_factor(mode, dtype):
    inputs, masks = torch.rand(2, 3, 24, 32), torch.randint(0, 5, (2, 12, 64)).to(dtype)
    small, resized = resize_batch(KEY, inputs, masks, 0.75, mode=mode, resize_targets=True)
    assert small.shape == (2, 3, 18, 24) and resized.shape == (2, 9, 48) and resized.dtype is dtype
    assert set(resized.unique().tolist()) <= set(masks.unique().tolist())


def test_a_crop_of_masks_at_half_the_size_shows_the_same_place():
    for seed in range(20):
        inputs = numbered(1, 1, 16, 16)
        masks = inputs[:, 0, ::2, ::2].long()
        small, window = resize_batch(random.key(seed), inputs, masks, 0.5, mode="crop", resize_targets=True)
        top, left = divmod(int(small[0, 0, 0, 0]), 16)
        assert window.shape == (1, 4, 4) and divmod(int(window[0, 0, 0]), 16) == (top // 2 * 2, left // 2 * 2)


def test_masks_are_resized_to_the_nearest_and_mixtures_term_by_term():
    inputs, masks = torch.rand(2, 3, 10, 10), torch.randint(0, 9, (2, 10, 10))
    mixture = Mixture.of(masks).mixed_with(torch.tensor([1, 0]), 0.25)
    _, small = resize_batch(None, inputs, masks, 0.6, resize_targets=True)
    expected = F.interpolate(masks[:, None].double(), (6, 6), mode="nearest-exact")[:, 0].long()
    assert torch.equal(small, expected)
    _, mixed = resize_batch(None, inputs, mixture, 0.6, resize_targets=True)
    assert torch.equal(mixed.targets[1], expected.flip(0)) and torch.equal(mixed.weights[1], mixture.weights[1])


def test_by_default_targets_of_the_images_size_are_masks():
    images = torch.rand(2, 3, 8, 12)
    masks, dense = torch.randint(0, 5, (2, 8, 12)), torch.rand(2, 4, 8, 12)
    labels, other = torch.arange(2), torch.randint(0, 5, (2, 4, 12))
    for targets in (masks, dense, Mixture.of(masks).mixed_with(torch.tensor([1, 0]), 0.25)):
        auto = resize_batch(None, images, targets, 0.5)[1]
        asked = resize_batch(None, images, targets, 0.5, resize_targets=True)[1]
        assert tree.equal(auto, asked) and not tree.equal(auto, targets)
        assert resize_batch(None, images, targets, 0.5, resize_targets=False)[1] is targets
    for targets in (labels, other, None, {"label": labels, "name": "x"}, [other]):
        assert resize_batch(None, images, targets, 0.5)[1] is targets
    both = resize_batch(None, images, {"mask": masks, "label": labels}, 0.5)[1]
    assert both["mask"].shape == (2, 4, 6) and both["label"] is labels


# Errors


def test_whole_numbers_of_32_bits_keep_their_value_and_complex_ones_are_refused():
    inputs = torch.full((1, 1, 8, 8), 2**24 + 1, dtype=torch.int32)
    small, _ = resize_batch(None, inputs, None, 0.5, resize_targets=False)
    assert small.dtype == torch.int32 and (small == 2**24 + 1).all()
    with pytest.raises(TypeError, match="expected real images"):
        resize_batch(None, torch.zeros(1, 1, 8, 8, dtype=torch.complex64), None, 0.5, resize_targets=False)
