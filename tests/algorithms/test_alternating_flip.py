"""Alternating flip: every second epoch of every image, whatever the order, batches, form and device of the data."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import Event, algorithms as alg, compose, loop_events, random
from purecompose.algorithms._views import _content
from purecompose.functional import alternating_flip_batch
from tests.algorithms.method_helpers import spy
from tests.helpers import assert_same


NUM, BATCH = 60, 10
KEY = random.key(5)


def pictures(num: int = NUM, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return images (num, 3, 6, 6), of which none is its own mirror image."""
    pixels = torch.randint(0, 256, (num, 3, 6, 6), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    return pixels if dtype == torch.uint8 else (pixels / 255).to(dtype)


def is_mirrored(images: Tensor, originals: Tensor) -> list[bool]:
    """Return which images are mirrored originals; the others must be the originals."""
    found = [torch.equal(image, original.flip(-1)) for image, original in zip(images, originals, strict=True)]
    for flipped, image, original in zip(found, images, originals, strict=True):
        assert flipped or torch.equal(image, original)
    return found


def flags(epoch: int | Tensor = 0, images: Tensor | None = None, key: Tensor = KEY, **settings: Any) -> list[bool]:
    images = pictures() if images is None else images
    return is_mirrored(alternating_flip_batch(key, images, epoch=epoch, **settings), images)


# The core


def test_two_epochs_have_both_forms_of_each_image_and_half_begin_mirrored() -> None:
    first = flags()
    assert NUM * 0.3 < sum(first) < NUM * 0.7
    assert flags(1) == [not one for one in first] and flags(2) == first
    assert flags(torch.tensor(3)) == flags(1)
    other = alternating_flip_batch(random.key(6), pictures(), epoch=0)
    assert is_mirrored(other, pictures()) != first


def test_an_example_begins_by_a_bit_of_the_key_that_belongs_to_its_number() -> None:
    numbers = torch.arange(1000, 1000 + NUM)
    begins = [random.fold_in(KEY, int(number))[0].item() < 0 for number in numbers]
    assert flags(examples=numbers) == begins
    assert flags(examples=numbers.to(torch.int32)) == begins
    assert flags(1, examples=numbers) == [not one for one in begins]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_hash_does_not_depend_on_the_batch_or_on_the_order_of_memory(dtype: torch.dtype) -> None:
    images = pictures(dtype=dtype)
    whole = flags(images=images)
    assert 0 < sum(whole) < NUM
    order = torch.randperm(NUM, generator=torch.Generator().manual_seed(0))
    assert flags(images=images[order]) == [whole[i] for i in order]
    assert [flags(images=images[i : i + 1])[0] for i in range(NUM)] == whole
    lasting = images.contiguous(memory_format=torch.channels_last)
    assert flags(images=lasting) == whole
    assert alternating_flip_batch(KEY, lasting, epoch=0).is_contiguous(memory_format=torch.channels_last)
    assert flags(images=images[:, :, ::2]) != whole  # other images have other draws


def test_images_that_differ_in_one_bit_or_in_the_order_of_pixels_have_separate_draws() -> None:
    blank = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    images = blank.repeat(64, 1, 1, 1)
    images.view(64, 64)[range(64), range(64)] = 1
    marked = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)  # to see what is mirrored
    for some in (images, marked + images, images.float(), marked + 2 * images):
        begins = [flags(images=one.unsqueeze(0) if one.ndim == 3 else one)[0] for one in some]
        assert 16 < sum(begins) < 48


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.float32, torch.float64, torch.int64])
def test_images_of_two_colours_have_different_hashes(dtype: torch.dtype) -> None:
    bits = (torch.arange(2**14).unsqueeze(1) >> torch.arange(16)) & 1
    assert len(_content(bits.to(dtype).view(-1, 1, 4, 4)).unique()) == len(bits)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 cannot read bits under vmap")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # while Inductor is imported
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
def test_compiled_code_and_vmap_give_the_same_bits(dtype: torch.dtype) -> None:
    images = pictures(16, dtype)

    def call(images: Tensor) -> Tensor:
        return alternating_flip_batch(KEY, images, epoch=torch.tensor(0))

    expected = call(images)
    assert torch.equal(torch.compile(call)(images), expected)
    both = torch.stack([images, images.roll(1, 0)])
    assert torch.equal(torch.func.vmap(call)(both), torch.stack([expected, expected.roll(1, 0)]))


def test_masks_are_mirrored_with_their_images_and_labels_are_not() -> None:
    images, labels, masks = pictures(), torch.arange(NUM), pictures()[:, 0].long()
    changed, targets = alternating_flip_batch(KEY, images, {"mask": masks, "label": labels}, epoch=0)
    assert torch.equal(targets["mask"], changed[:, 0].long()) and targets["label"] is labels
    assert alternating_flip_batch(KEY, images, labels, epoch=0)[1] is labels
    assert alternating_flip_batch(KEY, images, masks, epoch=0, mirror_targets=False)[1] is masks
    small = masks[:, ::2, ::2]
    _, targets = alternating_flip_batch(KEY, images, small, epoch=0, mirror_targets=True)
    assert is_mirrored(targets, small) == flags()


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"examples": torch.zeros(NUM)}, TypeError, "expected the examples' numbers, integers"),
        ({"examples": torch.zeros(NUM, dtype=torch.bool)}, TypeError, "expected the examples' numbers, integers"),
        ({"examples": torch.arange(3)}, ValueError, f"expected {NUM} examples' numbers"),
        ({"targets": torch.arange(NUM), "mirror_targets": True}, ValueError, "expected masks"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        alternating_flip_batch(KEY, pictures(), epoch=0, **settings)


# In a step


def seen_in_epochs(*methods: Any, epochs: str = "4ep", **options: Any) -> list[dict[int, bool]]:
    """Train on shuffled data, and return which images each epoch has had mirrored, by their labels."""
    seen: list[Any] = []
    spying = spy(seen, Event.BEFORE_FORWARD)
    data = pc.data.arrays(pictures(dtype=torch.float32), torch.arange(NUM), batch_size=BATCH, shuffle=True)
    step = compose(loop_events, [*methods, spying], **options)
    pc.fit(step, state_of(epochs), data)
    return by_epoch(seen)


def by_epoch(seen: list[Any]) -> list[dict[int, bool]]:
    rows = [
        (int(label), flag)
        for images, labels in seen
        for label, flag in zip(labels, is_mirrored(images, pictures(dtype=torch.float32)[labels]), strict=True)
    ]
    assert len(rows) % NUM == 0
    return [dict(rows[start : start + NUM]) for start in range(0, len(rows), NUM)]


def state_of(epochs: str, **options: Any) -> pc.State:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 36, NUM))
    options = {"loss": pc.losses.cross_entropy, "optimizer": pc.optim.sgd(0.01), "key": 5, **options}
    return pc.State.create(net, duration=epochs, **options)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_every_image_is_mirrored_in_every_second_epoch_of_shuffled_data(microbatches: int) -> None:
    epochs = seen_in_epochs(alg.alternating_flip(), microbatches=microbatches)
    assert len(epochs) == 4
    assert all(len(epoch) == NUM for epoch in epochs)
    assert NUM * 0.3 < sum(epochs[0].values()) < NUM * 0.7
    for label, begins in epochs[0].items():
        assert [epoch[label] for epoch in epochs] == [begins, not begins, begins, not begins]


def test_it_comes_before_other_augmentations_wherever_it_is_listed() -> None:
    plain = seen_in_epochs(alg.alternating_flip(), epochs="1ep")
    seen: list[Any] = []
    noise = pc.Algorithm(
        "noise",
        pc.on(Event.AFTER_DATALOADER),
        lambda event, state: state.replace(inputs=state.inputs + random.uniform(state.rng("noise"), (1,))),
        traits=frozenset({pc.Trait.AUGMENTS_EXAMPLES}),
    )
    step = compose(loop_events, [noise, alg.alternating_flip(), spy(seen, Event.BEFORE_FORWARD)])
    data = pc.data.arrays(pictures(dtype=torch.float32), torch.arange(NUM), batch_size=BATCH, shuffle=True)
    pc.fit(step, state_of("1ep"), data)
    for images, labels in seen:
        for image, label in zip(images, labels, strict=True):
            original = pictures(dtype=torch.float32)[label]
            expected = original.flip(-1) if plain[0][int(label)] else original
            assert (image - expected).std() < 1e-5  # the same number has been added to all pixels
    order = compose(loop_events, [alg.mixup(), alg.cutout(), alg.alternating_flip()]).plan(state_of("1ep"), seen[0])
    assert order.order(Event.AFTER_DATALOADER) == ("alternating_flip", "cutout", "mixup")


def test_a_resumed_run_continues_with_the_same_images(tmp_path: Any) -> None:
    data = pc.data.arrays(pictures(dtype=torch.float32), torch.arange(NUM), batch_size=BATCH, shuffle=True)
    whole: list[Any] = []
    end = pc.fit(
        compose(loop_events, [alg.alternating_flip(), spy(whole, Event.BEFORE_FORWARD)]), state_of("4ep"), data
    )
    resumed: list[Any] = []
    step = compose(loop_events, [alg.alternating_flip(), spy(resumed, Event.BEFORE_FORWARD)])
    half = next(state for state in pc.training(step, state_of("4ep"), data) if state.timestamp.batch == 9)
    again = pc.fit(step, pc.saving.load(pc.saving.save(half, tmp_path / "half"), half), data)
    assert by_epoch(resumed) == by_epoch(whole)
    assert_same(again, end)


def test_numbers_of_a_field_serve_where_the_loader_changes_pixels() -> None:
    seen: list[Any] = []
    step = compose(loop_events, [alg.alternating_flip(2), spy(seen, Event.BEFORE_FORWARD)])
    numbers, state = torch.arange(NUM), step.init(state_of("4ep", batches_per_epoch=1))
    found = []
    for epoch in range(4):
        given = pictures(dtype=torch.float32) + epoch  # an augmentation in the loader
        state = step(state, (given, torch.arange(NUM), numbers))
        found.append(is_mirrored(seen[-1][0], given))
    begins = flags(examples=numbers, key=state.slots["alternating_flip"])
    assert found == [begins, [not one for one in begins]] * 2
    other = step.init(state_of("4ep", key=6)).slots["alternating_flip"]
    assert flags(examples=numbers, key=other) != begins


def test_one_compiled_variant_serves_all_epochs() -> None:
    data = pc.data.arrays(pictures(dtype=torch.float32), torch.arange(NUM), batch_size=BATCH, shuffle=True)
    step = compose(loop_events, [alg.alternating_flip()])
    compiled = pc.compile(step, backend="eager", quiet=True)
    assert_same(pc.fit(compiled, state_of("3ep"), data), pc.fit(step, state_of("3ep"), data))
    assert len(compiled.variants()) == 1


def test_large_images_with_equal_borders_are_told_apart() -> None:
    images = torch.zeros(64, 3, 512, 512)
    images[:, :, 100:400, 100:400] = torch.rand(64, 3, 1, 1)
    images[:, :, 100:400, 250:400] = 0.0
    changed = alternating_flip_batch(random.key(0), images, epoch=0)
    mirrored = (changed != images).flatten(1).any(1)
    assert 16 <= mirrored.sum() <= 48
