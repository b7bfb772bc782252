"""CutMix: the core and its drawn box against plain loops over pixels, and the algorithm in a step."""

import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from scipy import stats
from torch import Tensor, nn

from purecompose import losses, random, tree
from purecompose.algorithms._cutmix import cutmix, cutmix_batch, cutmix_box
from purecompose.core.compose import compose
from purecompose.core.state import State
from purecompose.loop import loop_events
from purecompose.losses.targets import Mixture
from purecompose.random import Rng
from purecompose.surgery.weights import to_module
from tests.algorithms.method_helpers import LR, make_state, one_step


def image_state(net: nn.Module | None = None, **settings: Any) -> State:
    return make_state(net or nn.Sequential(nn.Flatten(), nn.Linear(2 * 6 * 6, 4)), **settings)


def image_batch(kind="index", num=8):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(num, 2, 6, 6, generator=generator)
    if kind == "soft":
        return images, torch.randn(num, 4, generator=generator).softmax(1)
    return images, torch.randint(0, 4, (num, 6, 6) if kind == "maps" else (num,), generator=generator)


def by_hand(state, batch, **settings):
    """Take one step on the images of `cutmix_batch` with the documented key, with soft targets made here."""
    images, targets = batch
    mixed, mixture = cutmix_batch(state.rng("cutmix"), images, targets, **settings)
    assert isinstance(mixture, Mixture)
    hot = [target if target.is_floating_point() else F.one_hot(target, 4).float() for target in mixture.targets]
    soft = sum(weight[:, None] * target for weight, target in zip(mixture.weights, hot, strict=True))
    net = to_module(state)
    loss = -(soft * torch.log_softmax(net(mixed), 1)).sum(1).mean()
    grads = torch.autograd.grad(loss, list(net.parameters()))
    moved = {n: (p - LR * g).detach() for (n, p), g in zip(net.named_parameters(), grads, strict=True)}
    return loss.detach(), moved


@pytest.mark.parametrize("kind", ["index", "soft"])
@given(
    alpha=st.floats(0.1, 3),
    interpolate_loss=st.booleans(),
    uniform_sampling=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_step_is_the_core_and_its_soft_targets(kind, alpha, interpolate_loss, uniform_sampling, seed):
    settings = {"uniform_sampling": uniform_sampling}
    state, batch = image_state().replace(key=random.key(seed)), image_batch(kind)
    after = one_step(cutmix(alpha, interpolate_loss=interpolate_loss, **settings), state, batch)
    loss, params = by_hand(state, batch, alpha=alpha, **settings)
    torch.testing.assert_close(after.loss, loss)
    torch.testing.assert_close(after.params, params)


def test_maps_are_trained_on_as_they_are_pasted():
    state, (images, masks) = image_state(nn.Conv2d(2, 4, 3, padding=1)), image_batch("maps")
    after = one_step(cutmix(), state, (images, masks))
    mixed, pasted = cutmix_batch(state.rng("cutmix"), images, masks)
    assert isinstance(pasted, torch.Tensor) and not torch.equal(pasted, masks)
    plain = compose(loop_events)(state, (mixed, pasted))
    assert tree.equal((after.params, after.loss), (plain.params, plain.loss))


def test_maps_have_no_losses_to_mix():
    step = compose(loop_events, [cutmix(interpolate_loss=True)])
    state = step.init(image_state(nn.Conv2d(2, 4, 3, padding=1)))
    with pytest.raises(ValueError, match="interpolate_loss=True: expected one target per image") as caught:
        step(state, image_batch("maps"))
    assert any("cutmix at" in note for note in caught.value.__notes__)


# Errors


def test_losses_without_support_for_mixtures_are_refused_at_init():
    with pytest.raises(TypeError, match="mine: .*ModelLoss"):
        compose(loop_events, [cutmix(name="mine")]).init(image_state(loss=losses.model_loss))
    state = image_state(loss=lambda outputs, targets: F.cross_entropy(outputs, targets))
    compose(loop_events, [cutmix()]).init(state)
    with pytest.raises(TypeError, match="reduction"):
        compose(loop_events, [cutmix(interpolate_loss=True)]).init(state)


def test_a_step_refuses_inputs_that_are_not_images():
    step = compose(loop_events, [cutmix(name="mine")])
    with pytest.raises(TypeError, match=r"mine: expected images, one tensor \(N, C, H, W\), got float32\[8, 72\]"):
        step(step.init(image_state()), (torch.zeros(8, 72), torch.zeros(8, dtype=torch.long)))


# The core


SEEDS = st.integers(0, 2**64 - 1)
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
SETTINGS = st.fixed_dictionaries({"alpha": st.floats(0.05, 5), "uniform_sampling": st.booleans()})


def make_images(shape, seed=0, dtype=torch.float32) -> Tensor:
    images = torch.rand(shape, generator=torch.Generator().manual_seed(seed % 2**32), dtype=torch.float64) * 255
    return images.to(dtype)


def by_hand_of_core(images: Tensor, order: Tensor, boxes: list[list[int]]) -> Tensor:
    """Paste pixel by pixel."""
    mixed = images.clone()
    for i, (top, left, bottom, right) in enumerate(boxes):
        for row in range(top, bottom):
            for column in range(left, right):
                mixed[i, ..., row, column] = images[order[i], ..., row, column]
    return mixed


def drawn(seed, shape, **settings) -> tuple[Tensor, list[list[int]]]:
    """Return the order and the box of a key for each image, drawn under the documented names."""
    num, _, height, width = shape
    order = random.permutation(Rng(random.key(seed)).named("permutation"), num)
    return order, [cutmix_box(random.key(seed), height, width, **settings).tolist()] * num


def many_boxes(seed, num, size, **settings) -> Tensor:
    """Return the boxes of several keys, (num, 4)."""
    return torch.func.vmap(lambda key: cutmix_box(key, size, size, **settings))(random.split(random.key(seed), num))


def area_of(box) -> int:
    return max(box[2] - box[0], 0) * max(box[3] - box[1], 0)


@given(SEEDS, SIZES, SETTINGS, st.sampled_from([torch.float32, torch.uint8, torch.bfloat16, torch.int64]))
def test_pastes_pixel_by_pixel_and_does_not_change_its_arguments(seed, shape, settings, dtype):
    images, targets = make_images(shape, seed, dtype), torch.arange(shape[0]) % 3
    before = images.clone(), targets.clone()
    mixed, mixture = cutmix_batch(random.key(seed), images, targets, **settings)
    again, _ = cutmix_batch(random.key(seed), images, targets, **settings)
    assert torch.equal(mixed, again) and mixed.dtype is dtype
    assert torch.equal(images, before[0]) and torch.equal(targets, before[1])

    order, boxes = drawn(seed, shape, **settings)
    assert torch.equal(mixed, by_hand_of_core(images, order, boxes))
    assert isinstance(mixture, Mixture)
    assert torch.equal(mixture.targets[0], targets) and torch.equal(mixture.targets[1], targets[order])
    # The weight is the share of the area that was pasted, to the last bit.
    expected = [float(Fraction(area_of(box), shape[2] * shape[3])) for box in boxes]
    assert torch.equal(mixture.weights[1], torch.tensor(expected))
    assert torch.equal(mixture.weights[0], 1 - torch.tensor(expected))


@given(SEEDS, st.integers(1, 20), st.integers(1, 20), st.floats(0.05, 5), st.booleans())
def test_a_drawn_box_is_inside_and_as_long_as_the_formula_has_it(seed, height, width, alpha, uniform_sampling):
    box = cutmix_box(random.key(seed), height, width, alpha=alpha, uniform_sampling=uniform_sampling).tolist()
    ratio = random.beta(Rng(random.key(seed)).named("area"), alpha, alpha).sqrt()
    for start, stop, size in ((box[0], box[2], height), (box[1], box[3], width)):
        side = 2 * (int(size * ratio) // 2)
        assert 0 <= start <= stop <= size and stop - start <= side
        if 0 < start and stop < size:
            assert stop - start == side
        elif not uniform_sampling:
            assert stop - start >= side // 2  # the centre is in the image


def test_uniform_sampling_takes_all_pixels_alike_and_the_default_those_in_the_middle():
    size, num = 6, 20_000
    shares = {}
    for uniform_sampling in (True, False):
        boxes = many_boxes(1, num, size, uniform_sampling=uniform_sampling)
        place = torch.arange(size)
        rows = (place >= boxes[:, :1]) & (place < boxes[:, 2:3])
        columns = (place >= boxes[:, 1:2]) & (place < boxes[:, 3:])
        shares[uniform_sampling] = (rows[:, :, None] & columns[:, None, :]).double().mean(0)
    spread = shares[True].std() / (shares[True].mean() * (1 - shares[True].mean()) / num) ** 0.5
    assert spread < 2.5  # in standard errors, of 36 correlated frequencies
    middle, corners = shares[False][2:4, 2:4], shares[False][[0, 0, -1, -1], [0, -1, 0, -1]]
    assert middle.min() > 1.2 * corners.max()


@pytest.mark.parametrize("alpha", [0.3, 1.0, 3.0])
def test_the_boxs_area_follows_a_beta_distribution_before_it_is_cut(alpha):
    # Only boxes of a large image that touch no edge; shorter boxes touch it less often, so only sides are compared.
    boxes = many_boxes(2, 2000, 10**6, alpha=alpha, uniform_sampling=True)
    areas = torch.func.vmap(lambda key: random.beta(Rng(key).named("area"), alpha, alpha))
    ratio = areas(random.split(random.key(2), 2000))
    is_whole = (boxes[:, 0] > 0) & (boxes[:, 2] < 10**6)
    sides = (boxes[:, 2] - boxes[:, 0])[is_whole] / 10**6
    torch.testing.assert_close(sides**2, ratio[is_whole], rtol=0, atol=1e-5)
    assert stats.kstest(ratio.double().numpy(), stats.beta(alpha, alpha).cdf).pvalue > 0.01


@given(SEEDS, st.sampled_from([0, torch.tensor(0.0)]))
def test_an_empty_box_changes_nothing(seed, alpha):
    images, targets = make_images((5, 2, 4, 6)), torch.tensor([0, 1, 1, 3, 2])
    mixed, mixture = cutmix_batch(random.key(seed), images, targets, alpha=alpha)
    assert torch.equal(mixed, images) and isinstance(mixture, Mixture)
    assert torch.equal(mixture.weights[0], torch.ones(5))
    assert torch.equal(mixture.soft(torch.zeros(5, 4)), F.one_hot(targets, 4).float())


@given(SEEDS, st.lists(st.integers(0, 5), min_size=4, max_size=4), st.booleans())
def test_a_given_box_is_taken(seed, places, as_tensor):
    top, bottom, left, right = *sorted(places[:2]), *sorted(places[2:])
    images, targets, order = make_images((3, 2, 5, 5), seed), torch.arange(3), torch.tensor([1, 2, 0])
    box = (top, left, bottom, right)
    mixed, mixture = cutmix_batch(
        None, images, targets, bbox=torch.tensor(box) if as_tensor else box, indices=order, alpha=0
    )
    assert torch.equal(mixed, by_hand_of_core(images, order, [list(box)] * 3)) and isinstance(mixture, Mixture)
    assert mixture.weights[1].tolist() == pytest.approx([area_of(box) / 25] * 3)


def test_boxes_in_a_tensor_are_clipped_and_count_as_clipped():
    images, targets, order = make_images((3, 2, 5, 4)), torch.arange(3), torch.tensor([1, 2, 0])
    for box, clipped in (([-3, 2, 2, 9], [0, 2, 2, 4]), ([1, 1, 1, 4], [0] * 4), ([4, 3, 2, 1], [0] * 4)):
        mixed, mixture = cutmix_batch(None, images, targets, bbox=torch.tensor(box), indices=order)
        assert torch.equal(mixed, by_hand_of_core(images, order, [clipped] * 3))
        assert isinstance(mixture, Mixture) and mixture.weights[1].tolist() == pytest.approx(
            [area_of(clipped) / 20] * 3
        )


# Maps


@given(SEEDS, SIZES, SETTINGS, st.sampled_from(["index", "dense"]))
def test_maps_are_pasted_as_the_images_are(seed, shape, settings, kind):
    num, _, height, width = shape
    images = make_images(shape, seed)
    masks = make_images((num, height, width) if kind == "index" else (num, 3, height, width), seed + 1)
    masks = masks.long() if kind == "index" else masks
    before = masks.clone()
    mixed, pasted = cutmix_batch(random.key(seed), images, masks, **settings)
    order, boxes = drawn(seed, shape, **settings)
    assert torch.equal(mixed, by_hand_of_core(images, order, boxes))
    assert isinstance(pasted, Tensor) and torch.equal(pasted, by_hand_of_core(masks, order, boxes))
    assert pasted.dtype is masks.dtype and torch.equal(masks, before)


@given(SEEDS, SIZES, st.integers(1, 12), st.integers(1, 12), SETTINGS, st.sampled_from(["index", "dense"]))
def test_the_box_is_scaled_to_maps_of_another_size(seed, shape, map_height, map_width, settings, kind):
    num, _, height, width = shape
    images = make_images(shape, seed)
    masks = make_images((num, map_height, map_width) if kind == "index" else (num, 3, map_height, map_width), seed + 1)
    masks = masks.long() if kind == "index" else masks
    _, pasted = cutmix_batch(random.key(seed), images, masks, **settings)
    order, boxes = drawn(seed, shape, **settings)
    expected = masks.clone()
    for i, (top, left, bottom, right) in enumerate(boxes):
        for row, column in itertools.product(range(map_height), range(map_width)):
            centre = Fraction(2 * row + 1, 2 * map_height) * height, Fraction(2 * column + 1, 2 * map_width) * width
            if top <= centre[0] < bottom and left <= centre[1] < right:
                expected[i, ..., row, column] = masks[order[i], ..., row, column]
    assert isinstance(pasted, Tensor) and torch.equal(pasted, expected)


@pytest.mark.parametrize(("size", "is_map"), [((2, 3), True), ((8, 12), True), ((2, 4), False)], ids=str)
def test_numbers_in_two_dims_are_maps_if_they_have_the_proportions_of_the_images(size, is_map):
    _, found = cutmix_batch(
        None, make_images((2, 1, 4, 6)), torch.rand(2, *size), bbox=(0, 0, 2, 6), indices=torch.tensor([1, 0])
    )
    assert isinstance(found, Tensor) is is_map
    assert is_map or (isinstance(found, Mixture) and found.weights[1].tolist() == [0.5, 0.5])


@given(SEEDS, st.booleans())
def test_mixed_maps_are_pasted_in_their_dense_form(seed, is_each):
    """Weights of a mixture that differ between examples are pasted with the pixels."""
    generator = torch.Generator().manual_seed(seed % 2**32)
    images, masks = make_images((4, 1, 5, 5)), torch.randint(3, (4, 5, 5), generator=generator)
    share = torch.rand(4 if is_each else (), generator=generator)
    once = Mixture.of(masks).mixed_with(torch.tensor([2, 0, 3, 1]), share)
    _, mixture = cutmix_batch(random.key(seed), images, once)
    order, boxes = drawn(seed, (4, 1, 5, 5))
    outputs = torch.zeros(4, 3, 5, 5)
    assert isinstance(mixture, Mixture)
    torch.testing.assert_close(mixture.soft(outputs), by_hand_of_core(once.soft(outputs), order, boxes))


# Transforms


def test_gradients_go_back_to_where_the_pixels_come_from():
    images, order = make_images((2, 1, 2, 2)).requires_grad_(), torch.tensor([1, 0])
    mixed, _ = cutmix_batch(None, images, torch.arange(2), bbox=(0, 0, 1, 1), indices=order)
    (grad,) = torch.autograd.grad(mixed[0].sum(), images)
    assert grad.flatten(1).tolist() == [[0, 1, 1, 1], [1, 0, 0, 0]]
