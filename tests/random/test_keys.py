"""Keys: the laws of split, fold_in and names, and the pytree form of `Rng`."""

import dataclasses

import torch
from hypothesis import given, strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree

from purecompose.random import Rng, bits, fold_in, key, salt, split


seeds = st.integers(0, 2**64 - 1)
names = st.one_of(st.text(max_size=8), st.integers(0, 2**32 - 1))


@given(seeds)
def test_key_holds_the_seed(seed: int) -> None:
    number, offset = key(seed).tolist()
    assert number % 2**64 == seed
    assert offset == 0
    assert key(seed).dtype == torch.int64


@given(seeds, st.integers(0, 9))
def test_split_folds_in_the_numbers(seed: int, num: int) -> None:
    folded = [fold_in(key(seed), index).tolist() for index in range(num)]
    assert split(key(seed), num).tolist() == folded


@given(seeds, st.integers(0, 9), st.integers(0, 9))
def test_split_has_the_prefix_law(seed: int, few: int, more: int) -> None:
    few, more = sorted((few, more))
    assert split(key(seed), few).shape == (few, 2)
    assert torch.equal(split(key(seed), more)[:few], split(key(seed), few))


def test_keys_of_a_tree_are_distinct() -> None:
    root = key(0)
    made = [root, *split(root, 100), *(fold_in(root, -i) for i in range(1, 100)), *split(split(root)[1], 100)]
    assert len({tuple(k.tolist()) for k in made}) == len(made)


@given(st.integers(-(2**63), 2**63 - 1))
def test_fold_in_takes_tensors(data: int) -> None:
    assert torch.equal(fold_in(key(1), torch.tensor(data)), fold_in(key(1), data))


def test_fold_in_reads_all_64_bits() -> None:
    assert not torch.equal(fold_in(key(1), 5), fold_in(key(1), 5 + 2**32))
    assert torch.equal(fold_in(key(1), -1), fold_in(key(1), 2**64 - 1))


def test_split_and_fold_in_map_and_trace() -> None:
    keys = split(key(0), 4)
    assert torch.equal(torch.func.vmap(split)(keys), torch.stack([split(k) for k in keys]))
    epochs = torch.arange(4)
    folded = torch.stack([fold_in(k, int(i)) for k, i in zip(keys, epochs, strict=True)])
    assert torch.equal(torch.func.vmap(fold_in)(keys, epochs), folded)
    traced = make_fx(lambda k, i: fold_in(split(k)[1], i))(keys[0], epochs[0])
    assert torch.equal(traced(keys[2], epochs[3]), fold_in(split(keys[2])[1], 3))


def test_salts_are_stable() -> None:
    """Recorded values: a change here changes every run's draws, and needs a line in the change log."""
    assert salt() == 0
    assert salt("mixup") == 1118444557
    assert salt("mixup", 0) == 3189673528


@given(st.lists(names, max_size=4))
def test_names_chain(chain: list[str | int]) -> None:
    rng = Rng(key(0))
    for name in chain:
        rng = rng.named(name)
    assert rng.draw == salt(*chain)
    assert 0 <= salt(*chain) < 2**32


def test_numbered_siblings_never_collide() -> None:
    parent = Rng(key(0)).named("dropout")
    assert len({parent.named(i).draw for i in range(20_000)}) == 20_000


def test_a_number_is_not_its_text() -> None:
    assert len({salt(name) for name in (1, "1", "int 1", -1, 2**32 + 1, "")}) == 6


@given(names, names)
def test_a_salt_on_the_device_mixes_as_on_the_host(first: str | int, second: str | int) -> None:
    host = Rng(key(4)).named(first)
    device = dataclasses.replace(host, draw=torch.tensor(host.draw))
    assert int(device.named(second).draw) == host.named(second).draw
    assert torch.equal(bits(device, 5), bits(host, 5))


def test_rng_splits_and_folds_by_name() -> None:
    rng = Rng(key(0))
    parts = split(rng, 3)
    assert len({rng.draw, *(part.draw for part in parts)}) == 4
    assert [part.draw for part in split(rng, 5)[:3]] == [part.draw for part in parts]
    assert all(part.key is rng.key for part in parts)
    assert fold_in(rng, "noise").draw == rng.named("noise").draw


def test_rng_is_a_pytree_of_its_tensors() -> None:
    rng = Rng(key(0), draw=5).per_example(torch.arange(3))
    leaves, spec = _pytree.tree_flatten(rng)
    assert [leaf.shape for leaf in leaves] == [(2,), (3, 2)]
    again = _pytree.tree_unflatten(leaves, spec)
    assert again.draw == 5
    assert torch.equal(bits(again, 3), bits(rng, 3))
    paths = [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(rng)[0]]
    assert paths == [".key", ".examples"]


def test_rng_passes_through_vmap() -> None:
    keys = split(key(0), 3)
    rngs = Rng(keys, draw=salt("noise"))
    mapped = torch.func.vmap(lambda rng: bits(rng, 5))(rngs)
    assert torch.equal(mapped, torch.stack([bits(Rng(k, salt("noise")), 5) for k in keys]))


def test_names_and_examples_have_streams_of_their_own() -> None:
    """The salt is added to the upper words of seed and offset; an example's key is folded in."""
    rng = Rng(fold_in(key(7), 3)).named("noise")
    seed, offset = fold_in(rng.key, 4).tolist()
    shift = salt("noise") << 32
    expected = [(number + shift + 2**63) % 2**64 - 2**63 for number in (seed, offset)]
    assert rng.per_example(4).streams().tolist() == expected
    assert rng.per_example(torch.tensor([2, 4])).streams()[1].tolist() == expected
