"""Leases by themselves: which readers may use donated buffers, and how writes into tensors read are detected."""

import pytest
import torch

from purecompose.errors import SpentStateError
from purecompose.transforms.signature import ABSENT, LASTING, BufferLease, Signature, StateBuffers


def make_buffers(*, is_donated: bool = True) -> StateBuffers:
    params = {"a": torch.ones(2), "b": torch.zeros(3)}
    found = {name: (ABSENT, []) for name in LASTING} | {"params": Signature.of(params)}
    signatures = {name: signature for name, (signature, _) in found.items()}
    return StateBuffers(signatures, {name: tensors for name, (_, tensors) in found.items()}, is_donated=is_donated)


def test_donated_buffers_are_read_as_the_same_copies_every_time() -> None:
    buffers = make_buffers()
    lease = BufferLease(buffers, None, ())
    params = lease.read("params")
    assert lease.read("params") is params
    assert list(params) == ["a", "b"] and params["a"] is not buffers.values["params"][0]
    buffers.values["params"][0].fill_(7)
    assert params["a"].tolist() == [1, 1]


def test_buffers_that_are_not_donated_are_read_without_a_copy() -> None:
    buffers = make_buffers(is_donated=False)
    assert BufferLease(buffers, None, ()).read("params")["a"] is buffers.values["params"][0]


def test_spending_ends_all_leases_with_an_error_that_gives_the_reason() -> None:
    buffers = make_buffers()
    early, late = BufferLease(buffers, None, ()), BufferLease(buffers, None, ())
    params = early.read("params")
    buffers.spend("was eaten by mice", early.generation)
    assert not early.is_live and not late.is_live
    assert early.read("params") is params, "what was read stays"
    for read in (late.check, lambda: late.read("params"), lambda: early.read("slots")):
        with pytest.raises(SpentStateError, match="its memory was eaten by mice"):
            read()
    assert BufferLease(buffers, None, ()).is_live


def test_untouched_only_accepts_unmodified_tensors_that_were_read() -> None:
    lease = BufferLease(make_buffers(), None, ())
    params = lease.read("params")
    assert lease.untouched("slots", {}) is None, "never read"
    found = lease.untouched("params", params)
    assert found is not None and found[0] is params["a"]
    assert lease.untouched("params", dict(params)) is None, "another dictionary"
    params["a"].add_(1)
    assert lease.untouched("params", params) is None, "written into"


@pytest.mark.parametrize("edit", ["replaced", "added", "removed"])
def test_untouched_detects_changes_in_the_dictionary(edit: str) -> None:
    lease = BufferLease(make_buffers(), None, ())
    params = lease.read("params")
    if edit == "replaced":
        params["a"] = torch.ones(2)
    elif edit == "added":
        params["c"] = torch.ones(2)
    else:
        del params["b"]
    assert lease.untouched("params", params) is None
