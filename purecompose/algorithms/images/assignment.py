"""Random assignment of k treatments to images, with equal probabilities and nearly equal frequencies.

Images and treatments are put in random orders, and the image at position p gets the treatment at position p mod k. So
for each image every treatment has probability 1 / k, as in an independent draw, and in a batch of n images each
treatment occurs at least floor(n / k) and at most ceil(n / k) times. This bound is the reason for the scheme: with
ceil(n / k) positions for each treatment, all shapes are known before the draw, and images need not be treated k times
to keep one result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from purecompose import random
from purecompose._support.functorch import is_fake, is_transforming


def assigned(rng: random.Rng, num: int, num_treatments: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return the images of each treatment, and the positions of their results.

    Args:
        rng: The source of the draws.
        num: The number of images, at least 1.
        num_treatments: The number of treatments k.
        device: The device of the returned indices.

    Returns:
        For each treatment the indices of its images, int64; and for each image its position in the concatenation of
        these lists, (num,). All lists have the same length: the last image of a list may belong to another one, and its
        result here is not used.
    """
    order = random.permutation(rng.named("order"), num)
    treatments = random.permutation(rng.named("treatments"), num_treatments)
    capacity = -(-num // num_treatments)
    rounds = num_treatments * torch.arange(capacity, device=order.device)
    places = (treatments.argsort().unsqueeze(1) + rounds).clamp(max=num - 1)
    lists = [order.index_select(0, row).to(device) for row in places.unbind()]
    place = order.argsort()
    owner = treatments.index_select(0, place % num_treatments)
    return lists, (owner * capacity + place // num_treatments).to(device)


def treated(
    rng: random.Rng, images: Tensor, treatments: Sequence[Callable[[Tensor, Tensor], Tensor]], *, num_groups: int = 1
) -> Tensor:
    """Apply one of the treatments to each image.

    Args:
        rng: The source of the draws.
        images: (N, ...), N at least 1.
        treatments: Functions `(images (n, ...), their indices (n,)) -> images (n, ...)`.
        num_groups: The number of consecutive groups of equal size, to which treatments are assigned independently.
    """
    num_lists, size = len(treatments) * num_groups, len(images) // num_groups
    lists: list[Any] = [None] * num_lists
    places = []
    for group in range(num_groups):
        own, found_at = assigned(rng.named(group), size, len(treatments), images.device)
        capacity = len(own[0])
        for treatment, chosen in enumerate(own):
            lists[treatment * num_groups + group] = chosen + group * size
        places.append(found_at // capacity * (capacity * num_groups) + group * capacity + found_at % capacity)
    homes = _homes(torch.cat(places), len(lists) * len(lists[0])).split(len(lists[0]))
    num, together = len(images), None
    for number, treatment in enumerate(treatments):
        own = slice(number * num_groups, (number + 1) * num_groups)
        chosen, home = torch.cat(lists[own]), torch.cat(homes[own])
        if can_read(home):
            chosen = home = chosen[home < num]
        if not len(chosen):
            continue
        changed = treatment(images.index_select(0, chosen), chosen)
        if together is None:
            # If indices cannot be read, unused results are not filtered out, but written into one extra row.
            together = changed.new_empty((num + (not can_read(home)), *changed.shape[1:]))
        # Write each result immediately, so that a compiled step computes it in place.
        together = _put(together, home, changed)
    assert together is not None
    return together if len(together) == num else together[:num].clone()  # a copy, so that the extra row is freed


def _put(together: Tensor, home: Tensor, changed: Tensor) -> Tensor:
    # In place, since this tensor is not shared yet. Not when traced or mapped; Inductor makes it in place again.
    return together.index_put((home,), changed) if _is_traced(home) else together.index_put_((home,), changed)


def _homes(places: Tensor, length: int) -> Tensor:
    """Return, for each position in the lists, the image whose result it provides, or the number of images for none.

    The result has shape (length,). Each image's result comes from one position, also if the image is in several lists.
    """
    num = len(places)
    return places.new_full((length,), num).scatter(0, places, torch.arange(num, device=places.device))


def can_read(tensor: Tensor) -> bool:
    """Return whether values can be read on the host without waiting for a device."""
    return not _is_traced(tensor) and tensor.device.type == "cpu" and type(tensor) is Tensor


def _is_traced(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or is_transforming() or is_fake(tensor)
