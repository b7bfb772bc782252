"""Which image gets which of k treatments: at random, each with the same chance, and each about equally often.

Images are put in a random order, and treatments too; the image at place p gets the treatment at place p mod k. So every
treatment has a share of 1 / k for every image, as if it were drawn independently, and a batch of n images has each of
them at least floor(n / k) and at most ceil(n / k) times. That bound is what it is for: with ceil(n / k) places for each
treatment all shapes are known before anything is drawn, and no image is treated k times to keep one result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from purecompose import random
from purecompose._support.functorch import is_fake, is_transforming


__all__ = ["assigned", "can_read", "treated"]


def assigned(rng: random.Rng, num: int, num_treatments: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return the images of each treatment, and where they are found afterwards.

    Args:
        rng: The place of the draws.
        num: How many images, at least 1.
        num_treatments: k.
        device: Where the indices are wanted.

    Returns:
        For each treatment the indices of its images, int64; and for each image its place in the concatenation of
        those, (num,). The lists are of one length: the last image of one may not be its own, and nothing reads what
        becomes of that.
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
    """Apply to each image one of the treatments.

    Args:
        rng: The place of the draws.
        images: (N, ...), N at least 1.
        treatments: Functions `(images (n, ...), their indices (n,)) -> images (n, ...)`.
        num_groups: Groups of equal size, one after the other, which are assigned apart: what an image of one group gets
            says nothing about another group.
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
            # A row more takes what is not read, where numbers cannot be read.
            together = changed.new_empty((num + (not can_read(home)), *changed.shape[1:]))
        # Into its rows at once, so that a compiled step makes it there.
        together = _put(together, home, changed)
    assert together is not None
    return together if len(together) == num else together[:num].clone()  # in memory of its own size


def _put(together: Tensor, home: Tensor, changed: Tensor) -> Tensor:
    # In place, since no one else has this tensor yet; traced and mapped without, which Inductor makes in place again.
    return together.index_put((home,), changed) if _is_traced(home) else together.index_put_((home,), changed)


def _homes(places: Tensor, length: int) -> Tensor:
    """For each place in the lists the image whose result is wanted from it, (length,); for none, the number of images.

    Only one image has a place in the list of every treatment.
    """
    num = len(places)
    return places.new_full((length,), num).scatter(0, places, torch.arange(num, device=places.device))


def can_read(tensor: Tensor) -> bool:
    """Return whether numbers are there to be read, and reading them waits for no device."""
    return not _is_traced(tensor) and tensor.device.type == "cpu" and type(tensor) is Tensor


def _is_traced(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or is_transforming() or is_fake(tensor)
