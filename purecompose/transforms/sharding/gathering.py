"""Messages of sharded states: parameters are gathered, and gradients summed and divided."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from purecompose._support.shards import is_shard, local, place_of, placed
from purecompose.core.ranks import Ranks


@dataclass(frozen=True)
class Placing:
    """How parameters are divided among processes.

    Attributes:
        owners: The processes among which the rows of each parameter are divided.
        copies: The groups of processes that hold the same rows, along the mesh's other dimensions.
        is_by_layer: True if they are gathered layer by layer, and False if all together for each gradient.
    """

    owners: Ranks
    copies: tuple[Ranks, ...] = ()
    is_by_layer: bool = False

    def comparing(self) -> "Placing":
        """Return the same placing, whose processes compare messages before they are sent."""
        return replace(self, owners=self.owners.comparing(), copies=tuple(one.comparing() for one in self.copies))

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors whole, on each process."""
        found: dict[str, Tensor] = dict(tensors)
        shards = {name: tensor for name, tensor in tensors.items() if is_shard(tensor)}
        for names in _messages(shards):
            parts = [_padded(local(shards[name]), self._size(shards[name])) for name in names]
            rows = self.owners.gather(_flat(parts)).view(self.owners.size, -1)
            for name, own in zip(names, rows.split([part.numel() for part in parts], dim=1), strict=True):
                shape = shards[name].shape
                found[name] = own.reshape(-1, *shape[1:])[: shape[0]]
        return found

    def sum_gradients(self, parts: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums over all processes, each divided like the parameter of its name.

        Args:
            parts: This process's parts of the gradients, whole.
            like: The parameters.
        """
        # In the order of the backward pass, in which a compiled step sends them.
        shards = {name: parts[name] for name in reversed([*parts]) if is_shard(like[name])}
        found: dict[str, Tensor] = {name: part for name, part in parts.items() if name not in shards}
        for group in (self.owners, *self.copies):
            found |= zip(found, group.reduced([*found.values()], "sum"), strict=True)
        own: dict[str, Tensor] = {}
        for names in _messages(shards):
            rows = [_padded(shards[name], self._size(like[name]) * self.owners.size) for name in names]
            flat = torch.cat([part.reshape(self.owners.size, -1) for part in rows], dim=1) if len(rows) > 1 else rows[0]
            sums = self.owners.scatter_sum(flat.reshape(-1))
            sizes = [part.numel() // self.owners.size for part in rows]
            for name, part in zip(names, sums.split(sizes), strict=True):
                own[name] = part.reshape(-1, *like[name].shape[1:])
        for group in self.copies:  # of equally many rows in all processes, whose messages have to be the same
            own |= zip(own, group.reduced([*own.values()], "sum"), strict=True)
        for name, part in own.items():
            found[name] = placed(part[: local(like[name]).shape[0]], place_of(like[name]))
        return {name: found[name] for name in parts}

    def _size(self, tensor: Tensor) -> int:
        """Return how many rows each process holds, but for the last ones, which may hold fewer."""
        return -(-tensor.shape[0] // self.owners.size)


_LARGE = 2**20
"""Bytes of a tensor for which a message of its own costs less than copying it into a common one."""


def _messages(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of the tensors that travel together: each large one by itself, the small ones of a dtype."""
    small: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() * tensor.element_size() >= _LARGE:
            yield [name]
        else:
            small.setdefault(tensor.dtype, []).append(name)
    yield from small.values()


def _padded(tensor: Tensor, num_rows: int) -> Tensor:
    missing = num_rows - tensor.shape[0]
    return pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, missing]) if missing else tensor


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)
