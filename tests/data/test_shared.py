"""`data.shared`: each process reads some rows, and all have the batches of one process."""

from typing import Any

import pytest
import torch

from purecompose import tree
from purecompose.testing.process import in_process_group
from tests.data.shared_scenarios import SIZES, epochs, in_buckets, loader, results


pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_process_group(results, request.param, str(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("case", SIZES)
def test_all_processes_have_the_batches_of_one(ranks, case):
    expected = epochs(loader(case))
    for found in ranks:
        assert tree.equal(found[case][0], expected)


def test_all_processes_have_the_padded_batches_of_one(ranks):
    expected = epochs(in_buckets())
    assert {rows.shape[1] for rows, _ in expected} == {4, 8, 12}
    for found in ranks:
        assert tree.equal(found[".buckets"], expected)


@pytest.mark.parametrize("case", ["even", "ragged", "a last batch of one"])
def test_each_process_reads_its_rows_only(ranks, case):
    num, batch_size, _ = SIZES[case]
    for found in ranks:
        sizes = [len(part) for part in torch.arange(num).split(batch_size)]
        own = sum(-(-size // len(ranks)) for size in [*sizes, *sizes[1:]])
        assert found[case][1] <= own + batch_size


def test_the_processes_are_those_of_a_group_or_mesh(ranks):
    for rank, found in enumerate(ranks):
        batches, in_first = found[".members"]
        assert tree.equal(batches, epochs(loader("even")))
        assert in_first == "" if rank == 0 else "is not in the mesh, which has [0]" in in_first


def test_a_run_has_the_bits_of_one_that_reads_everything(ranks):
    for found in ranks:
        ours, theirs = found[".fit"]
        assert tree.equal(ours, theirs)


def test_a_stream_that_each_process_reads_continues_at_its_position(ranks):
    for found in ranks:
        resumed, whole = found[".stream"]
        assert tree.equal(resumed, whole)


def test_all_processes_stop_if_one_cannot_read(ranks):
    words = [found[".errors"]["unreadable"] for found in ranks]
    assert words[1] == "unreadable"
    assert all("process 1 could not read its rows" in text for rank, text in enumerate(words) if rank != 1)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("lengths", "pad samples to one length"),
        ("texts", "samples of numbers and tensors"),
        ("collate", "a function collate"),
        ("longest", "a function collate"),
        ("twice", "share the loader already"),
        ("another loader", "expected a loader from data.loader"),
        ("another mesh", "expected mesh to be a DeviceMesh or a process group, got 2 (int)"),
    ],
)
def test_what_cannot_be_shared_is_refused(ranks, case, words):
    for found in ranks:
        assert words in found[".errors"][case]
