"""RandAugment: the core, its strengths against the formulas, the factory."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats
from torch import nn

from purecompose import Algorithm, State, compose, loop_events, losses, optim, random
from purecompose.algorithms import colout, cutmix, images, randaugment
from purecompose.algorithms.images import PRIMITIVES, SETS, Primitive, Strength
from purecompose.algorithms.images.batches import one_operation_each
from purecompose.functional import randaugment_batch
from tests.algorithms.images.applying import applied
from tests.algorithms.method_helpers import make_images


SEEDS = st.integers(0, 2**64 - 1)
NAMES = sorted(PRIMITIVES)


def strength(severity: float, share: float, is_up: bool, side: int = 30) -> Strength:
    return Strength(severity, torch.tensor([share]), torch.tensor([is_up]), side, side)


# Strengths


@pytest.mark.parametrize("is_up", [True, False])
@pytest.mark.parametrize(("severity", "share"), [(10, 0.999), (9, 0.5), (3, 0.7), (1, 0.3), (0, 0.9), (7, 0.0)])
def test_amounts_follow_the_table(severity: float, share: float, is_up: bool) -> None:
    s, sign = severity * share, 1 if is_up else -1
    up = lambda above: 1 + above * share * max(severity - 1, 0)  # noqa: E731
    factor = lambda above=1.0: up(above) if is_up else 1 - 0.09 * severity * share  # noqa: E731
    expected = {
        "posterize": 8 - int(s * 4 / 10),
        "rotate": sign * int(s * 30 / 10),
        "solarize": 256 - int(s * 256 / 10),
        "shear_x": sign * s * 0.3 / 10,
        "shear_y": sign * s * 0.3 / 10,
        "translate_x": sign * int(s * 10 / 10),
        "translate_y": sign * int(s * 10 / 10),
        "color": factor(),
        "contrast": factor(),
        "brightness": factor(0.75),
        "sharpness": factor(),
        **dict.fromkeys([name for name in NAMES if name.endswith("_original")], 0.1 + s * 1.8 / 10 if s else 1),
    }
    for name, amount in expected.items():
        got = PRIMITIVES[name].amount(strength(severity, share, is_up)).item()
        assert got == pytest.approx(amount, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("name", NAMES)
def test_no_severity_is_the_identity(name: str) -> None:
    levels = make_images().float()
    none = Strength(0.0, torch.rand(12), torch.rand(12) < 0.5, 8, 8)
    assert torch.equal(PRIMITIVES[name](levels, none), levels)


def test_the_named_sets_of_operations() -> None:
    assert [len(SETS[name]) for name in ("all", "safe", "original")] == [13, 9, 13]
    enhancing = {"color", "contrast", "brightness", "sharpness"}
    assert {one.name for one in SETS["all"]} - {one.name for one in SETS["safe"]} == enhancing
    assert {one.name for one in SETS["original"]} & enhancing == set()


# The core


@given(SEEDS, st.floats(0, 10), st.integers(0, 3), st.sampled_from([1, 2, 3]), st.integers(1, 20))
def test_shape_and_range_are_kept_and_the_arguments_are_unchanged(
    seed: int, severity: float, depth: int, channels: int, num: int
) -> None:
    batch = make_images(num, channels)
    before = batch.clone()
    changed = randaugment_batch(random.key(seed), batch, severity=severity, depth=depth)
    assert changed.shape == batch.shape and changed.dtype == torch.uint8
    assert torch.equal(batch, before)
    assert torch.equal(changed, randaugment_batch(random.key(seed), batch, severity=severity, depth=depth))


@given(SEEDS, st.sampled_from([torch.float16, torch.float32, torch.float64]))
def test_floats_stay_in_their_range(seed: int, dtype: torch.dtype) -> None:
    batch = make_images(dtype=dtype) * 3 - 1
    changed = randaugment_batch(random.key(seed), batch)
    assert changed.dtype == dtype
    assert changed.min() >= batch.min() - 1e-2 and changed.max() <= batch.max() + 1e-2


@given(SEEDS, st.integers(0, 10))
def test_no_operation_and_no_severity_keep_every_bit(seed: int, severity: int) -> None:
    for batch in (make_images(), make_images(dtype=torch.float32) * 2.7 - 0.3):
        assert torch.equal(randaugment_batch(random.key(seed), batch, depth=0, severity=severity), batch)
        assert torch.equal(randaugment_batch(random.key(seed), batch, severity=0), batch)
        assert torch.equal(randaugment_batch(random.key(seed), batch, severity=torch.tensor(0.0)), batch)


@given(SEEDS, st.integers(1, 3))
def test_a_depth_equals_that_many_single_operations_in_sequence(seed: int, depth: int) -> None:
    batch, rng = make_images(), random.Rng(random.key(seed))
    scale = images.Scale.of(batch)
    step_by_step = batch
    for step in range(depth):
        step_by_step = one_operation_each(rng.named(step), step_by_step, scale, SETS["all"], 9.0)
    assert torch.equal(randaugment_batch(rng, batch, depth=depth), step_by_step)


@given(SEEDS)
def test_the_drawn_operation_is_applied_with_the_drawn_strength(seed: int) -> None:
    """The reference goes image by image, from the documented draws."""
    batch, rng = make_images(7), random.Rng(random.key(seed))
    step = rng.named(0)
    shares, coins = random.uniform(step.named("share"), 7), random.bernoulli(step.named("coin"), 0.5, 7)
    order = random.permutation(step.named("choice").named(0).named("order"), 7)
    first, _ = random.permutation(step.named("choice").named(0).named("treatments"), 2).tolist()
    expected = batch.clone()
    for place, image in enumerate(order.tolist()):
        amount = int(shares[image] * 9 * 30 / 10) * (1 if coins[image] else -1)
        bits = 8 - int(shares[image] * 9 * 4 / 10)
        is_turned = (place + first) % 2 == 0
        name, number = ("rotate", amount) if is_turned else ("posterize", bits)
        expected[image] = applied(name, batch[image], number)
    got = randaugment_batch(rng, batch, depth=1, augmentation_set=("rotate", "posterize"))
    assert torch.equal(got, expected)


def test_operations_are_equally_likely() -> None:
    marks = tuple(
        Primitive(str(mark), lambda levels, amount, mark=mark: torch.full_like(levels, mark), lambda s: s.share)
        for mark in range(13)
    )
    batch = torch.full((5, 1, 1, 1), 200, dtype=torch.uint8)
    drawn = [randaugment_batch(random.key(s), batch, depth=1, augmentation_set=marks).flatten() for s in range(1500)]
    for image in torch.stack(drawn).unbind(1):
        assert stats.chisquare(image.bincount(minlength=13).numpy()).pvalue > 1e-3


# The method


def make_state(**options: Any) -> State:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
    net(torch.zeros(1, 3, 8, 8))
    settings = {"optimizer": optim.sgd(0.1), "key": 5, "duration": "9ba", "batches_per_epoch": 3, **options}
    return State.create(net, loss=losses.cross_entropy, **settings)


def after_a_step(method: Algorithm, state: State, batch: Any) -> State:
    step = compose(loop_events, [method])
    return step(step.init(state), batch)


def test_a_step_trains_on_the_images_of_the_core_with_its_key() -> None:
    batch = make_images(dtype=torch.float32), torch.arange(12) % 3
    state = make_state()
    changed = randaugment_batch(state.rng("randaugment"), batch[0], severity=5, depth=1)
    assert not torch.equal(changed, batch[0])
    by_method = after_a_step(randaugment(5, 1), state, batch)
    by_hand = compose(loop_events)(state, (changed, batch[1]))
    assert all(torch.equal(by_method.params[name], by_hand.params[name]) for name in state.params)


def test_images_are_found_by_name_and_others_are_refused() -> None:
    images_of_bytes = make_images()
    state = make_state(input_field="image", target_field="label")
    batch = {"image": images_of_bytes.float(), "label": torch.arange(12) % 3}
    loss = after_a_step(randaugment(), state, batch).loss
    assert loss is not None and torch.isfinite(loss)
    with pytest.raises(TypeError, match=r"randaugment: expected images, one tensor \(N, C, H, W\), got"):
        after_a_step(randaugment(input_field="label"), state, batch)


def test_masks_that_do_not_move_with_their_images_are_reported() -> None:
    images, net = make_images(dtype=torch.float32), torch.nn.Conv2d(3, 2, 3, padding=1)
    state = State.create(net, loss=losses.cross_entropy, optimizer=optim.sgd(0.1), key=0)
    batch = images, (images.sum(1) > 1.5).long()
    with pytest.warns(UserWarning, match=r"randaugment: the targets .* not moved with them by rotate, shear_x"):
        after_a_step(randaugment(), state, batch)
    after_a_step(randaugment(augmentation_set=("color", "contrast")), state, batch)
    itself = State.create(torch.nn.Conv2d(3, 3, 1), loss=losses.mse, optimizer=optim.sgd(0.1), key=0, target_field=0)
    after_a_step(randaugment(), itself, images)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_images_are_changed_one_by_one_before_they_are_mixed(order: tuple[int, ...]) -> None:
    methods = [randaugment(), cutmix(1.0), colout()]
    plan = compose(loop_events, [methods[i] for i in order]).plan(make_state())
    assert plan.order("after_dataloader")[-1] == "cutmix"


@pytest.mark.parametrize("names", ["all", ("equalize",)])
def test_a_nan_pixel_only_affects_its_own_image(names: Any) -> None:
    batch = make_images(4, dtype=torch.float32)
    batch[1, 0, 2, 2] = torch.nan
    for seed in range(5):
        changed = randaugment_batch(random.key(seed), batch, augmentation_set=names)
        assert changed[[0, 2, 3]].isfinite().all()


@given(SEEDS)
def test_half_precision_stays_in_the_range_of_the_batch(seed: int) -> None:
    batch = (make_images(dtype=torch.float32) * 3.3 - 0.7).bfloat16()
    changed = randaugment_batch(random.key(seed), batch)
    assert changed.min() >= batch.min() and changed.max() <= batch.max()


def test_odd_settings_are_named() -> None:
    with pytest.raises(ValueError, match="severity: expected one number"):
        randaugment_batch(random.key(0), make_images(), severity=torch.ones(12))
    with pytest.raises(TypeError, match="names of operations"):
        randaugment(augmentation_set=[["rotate"]])  # pyright: ignore[reportArgumentType]


def test_the_core_compiles_as_a_whole_in_a_users_loop() -> None:
    batch, names = make_images(6), ("rotate", "equalize", "sharpness")

    def changed(key: torch.Tensor) -> torch.Tensor:
        return randaugment_batch(key, batch, depth=1, augmentation_set=names)

    compiled = torch.compile(changed, fullgraph=True, backend="eager")
    for seed in (0, 1):
        assert torch.equal(compiled(random.key(seed)), changed(random.key(seed)))
