"""Populations in chunks in a compiled step: the graph of a chunk of members is built once and called for each chunk.

On a CPU a chunk whose tensors fit into the cache is faster per member than all members together.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from purecompose.transforms.compilation.backends import Compiled
from purecompose.transforms.compilation.boundary import Boundary, Source
from purecompose.transforms.compilation.capture import Captured, fake_mode
from purecompose.transforms.members import own_tensors
from purecompose.transforms.signature import Signature, Spec


def of_chunk(boundary: Boundary, num: int) -> Boundary:
    """Return the boundary of one of `num` chunks of the members."""
    if num == 1:
        return boundary
    signatures = {name: _of_chunk(signature, num) for name, signature in boundary.signatures.items()}
    donated = boundary.donated and {name: signatures[name] for name in boundary.donated}
    return replace(boundary, signatures=signatures, donated=donated)


def in_chunks(captured: Captured, boundary: Boundary, num: int) -> tuple[Captured, Callable[[Compiled], Compiled]]:
    """Return the graph of a chunk with the signatures of all members, and what makes its compiled form run for them.

    Args:
        captured: The graph of a chunk.
        boundary: The boundary at the start, of all members.
        num: The number of chunks.
    """
    if num == 1:
        return captured, lambda call: call
    own = {name: _own(signature) for name, signature in boundary.signatures.items()}
    are_args_own = [own[field][place] for field, place in (*captured.takes, *captured.targets)]
    joined: dict[int, Spec | None] = {}  # for each result, the spec of the joined one if there is a row for each member

    def of_all(spec: Spec, source: Source, is_own: bool) -> Spec:
        if source.field:
            return boundary.signatures[source.field].specs[source.place]
        joined[source.place] = _of_all(spec, num) if is_own else None
        return joined[source.place] or spec

    writes = {
        name: (signature.with_specs(map(of_all, signature.specs, where, _own(signature))), where)
        for name, (signature, where) in captured.writes.items()
    }

    def for_all(call: Compiled) -> Compiled:
        def call_each(args: list[Tensor]) -> list[Tensor]:
            rows = [arg.chunk(num) if is_own else [arg] * num for arg, is_own in zip(args, are_args_own, strict=True)]
            columns = list(zip(*(call(list(chunk)) for chunk in zip(*rows, strict=True)), strict=True))
            return [
                columns[place][0] if spec is None else torch.cat(columns[place], out=spec.empty())
                for place, spec in sorted(joined.items())
            ]

        return call_each

    reads = {name: boundary.signatures[name] for name in captured.reads}
    return captured._replace(reads=reads, writes=writes), for_all


def _own(signature: Signature) -> list[bool]:
    """Return for each tensor of a stacked value whether it has a row for each member."""
    with fake_mode():
        tensors = [spec.empty() for spec in signature.specs]
    own = set(map(id, own_tensors(signature.build(tensors))))
    return [id(tensor) in own for tensor in tensors]


def _of_chunk(signature: Signature, num: int) -> Signature:
    return signature.with_specs(
        spec._replace(shape=torch.Size((spec.shape[0] // num, *spec.shape[1:]))) if is_own else spec
        for spec, is_own in zip(signature.specs, _own(signature), strict=True)
    )


def _of_all(spec: Spec, num: int) -> Spec:
    """Return the spec of the chunks' results joined, one member after the other, each laid out as before."""
    row = torch.empty_like(torch.empty_strided(spec.shape[1:], spec.stride[1:], device="meta"))
    shape = torch.Size((spec.shape[0] * num, *row.shape))
    return spec._replace(shape=shape, stride=(max(row.numel(), 1), *row.stride()))
