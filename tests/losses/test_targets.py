"""Target forms and mixtures, against NumPy in float64."""

import numpy as np
import optree
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as torch_pytree

from purecompose.losses.targets import Mixture, class_scores, has_index_targets, num_examples, one_hot


def numpy_one_hot(indices: Tensor, num_classes: int) -> np.ndarray:
    """Return rows of the identity, with the class dim moved to 1; zeros for negative indices."""
    rows = np.eye(num_classes + 1)[np.where(indices.numpy() < 0, num_classes, indices.numpy())]
    return np.moveaxis(rows[..., :num_classes], -1, 1)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, torch.Generator]:
    """Draw logits (N, C, ...) in float64, indices (N, ...) and a generator for further draws of a test."""
    num, classes = draw(st.integers(1, 6)), draw(st.integers(2, 5))
    rest = draw(st.sampled_from([(), (3,), (2, 2)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    outputs = torch.randn(num, classes, *rest, generator=generator, dtype=torch.float64)
    return outputs, torch.randint(classes, (num, *rest), generator=generator), generator


def mix_often(targets: Tensor, generator: torch.Generator, times: int, per_row: bool = True) -> Mixture:
    mixture = Mixture.of(targets)
    for _ in range(times):
        permutation = torch.randperm(len(targets), generator=generator)
        shape = (len(targets),) if per_row else ()
        mixture = mixture.mixed_with(permutation, torch.rand(shape, generator=generator, dtype=torch.float64))
    return mixture


@pytest.mark.parametrize(
    ("outputs", "targets", "expected"),
    [((4, 3), (4,), True), ((4, 3), (4, 3), False), ((4, 3, 5, 5), (4, 5, 5), True), ((4,), (4,), False)],
)
def test_the_form_of_targets_follows_from_their_shape(outputs, targets, expected):
    assert has_index_targets(torch.zeros(outputs), torch.zeros(targets, dtype=torch.int64)) is expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_every_integer_dtype_holds_indices(dtype):
    indices, outputs = torch.tensor([2, 0], dtype=dtype), torch.zeros(2, 3)
    assert has_index_targets(outputs, indices)
    assert one_hot(indices, outputs).tolist() == [[0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("targets", "shapes", "place"),
    [
        (torch.zeros(4, dtype=torch.int64), [(4,), (4, 3), (4, 3, 2), (4, 3)], 1),
        (torch.zeros(4, 2, dtype=torch.int64), [(4, 2), (4, 3), (4, 3, 2)], 2),
        (torch.zeros(4, 3), [(4, 3, 2), (4, 3)], 1),
        (torch.zeros(4, dtype=torch.int64), [(4, 3), (4, 7)], None),
        (torch.zeros(4, dtype=torch.int64), [(5, 3), ()], None),
    ],
)
def test_scores_among_several_outputs_are_those_that_alone_fit(targets, shapes, place):
    outputs = {"nested": tuple(torch.zeros(shape) for shape in shapes)}
    if place is not None:
        assert class_scores(outputs, targets) is outputs["nested"][place]
        return
    with pytest.raises(ValueError, match=r"cannot tell which of the outputs .*interpolate_loss=True"):
        class_scores(outputs, targets)


@given(problems())
def test_one_hot_equals_rows_of_the_identity(problem):
    outputs, indices, generator = problem
    indices = torch.where(torch.rand(indices.shape, generator=generator) < 0.3, -100, indices)
    dense = one_hot(indices, outputs)
    assert dense.dtype == torch.float64
    np.testing.assert_array_equal(dense.numpy(), numpy_one_hot(indices, outputs.shape[1]))


def test_one_hot_leaves_a_positive_ignore_index_out():
    dense = one_hot(torch.tensor([255, 1]), torch.zeros(2, 3), ignore_index=255)
    assert dense.tolist() == [[0, 0, 0], [0, 1, 0]]


def test_num_examples_looks_at_targets_first_and_into_pytrees():
    assert num_examples(torch.zeros(5, 2), torch.zeros(4)) == 4
    assert num_examples(torch.zeros(5, 2), None) == 5
    assert num_examples({"loss": torch.tensor(0.0), "logits": torch.zeros(3, 2)}, {}) == 3
    assert num_examples(None, Mixture.of(torch.zeros(6))) == 6


@given(problems(), st.floats(0, 1))
def test_mixing_once_is_the_closed_form(problem, weight):
    outputs, indices, generator = problem
    permutation = torch.randperm(len(indices), generator=generator)
    hot = numpy_one_hot(indices, outputs.shape[1])
    expected = (1 - weight) * hot + weight * hot[permutation.numpy()]
    for targets in (indices, torch.from_numpy(hot)):
        soft = Mixture.of(targets).mixed_with(permutation, torch.tensor(weight, dtype=torch.float64)).soft(outputs)
        np.testing.assert_allclose(soft.numpy(), expected, rtol=1e-6, atol=1e-7)


@given(problems())
def test_mixing_twice_is_mixing_the_mixed(problem):
    """As MixUp and then CutMix: dense targets are mixed one after the other, each row with its own weight."""
    outputs, indices, generator = problem
    mixture, expected = Mixture.of(indices.clone()), numpy_one_hot(indices, outputs.shape[1])
    for _ in range(2):
        permutation = torch.randperm(len(indices), generator=generator)
        weight = torch.rand(len(indices), generator=generator, dtype=torch.float64)
        mixture = mixture.mixed_with(permutation, weight)
        row = weight.numpy().reshape(-1, *[1] * (expected.ndim - 1))
        expected = (1 - row) * expected + row * expected[permutation.numpy()]
    np.testing.assert_allclose(mixture.soft(outputs).numpy(), expected, rtol=1e-6, atol=1e-7)


def test_regression_targets_are_mixed_unchanged():
    targets = torch.tensor([[1.0], [3.0]])
    mixture = Mixture.of(targets).mixed_with(torch.tensor([1, 0]), 0.25)
    assert mixture.soft(torch.zeros(2, 1)).tolist() == [[1.5], [2.5]]


def test_interpolation_wins_if_any_mixing_asks_for_it():
    mixture, permutation = Mixture.of(torch.tensor([0, 1])), torch.tensor([1, 0])
    assert not mixture.interpolate_loss
    asked = mixture.mixed_with(permutation, 0.1, interpolate_loss=True)
    assert asked.interpolate_loss and asked.mixed_with(permutation, 0.1).interpolate_loss
    assert asked.map(lambda targets: targets).interpolate_loss


def test_of_keeps_mixtures():
    mixture = Mixture.of(torch.tensor([0, 1]))
    assert Mixture.of(mixture) is mixture


@st.composite
def maps(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    """Draw logits (N, C, H, W), indices (N, H, W), a region (N, H, W) or (1, H, W) and a generator."""
    num, classes, height, width = (draw(st.integers(least, 4)) for least in (1, 2, 1, 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    outputs = torch.randn(num, classes, height, width, generator=generator, dtype=torch.float64)
    indices = torch.randint(classes, (num, height, width), generator=generator)
    inside = torch.rand(draw(st.sampled_from([1, num])), height, width, generator=generator) < 0.5
    return outputs, indices, inside, generator


@given(maps(), st.integers(0, 2), st.booleans())
def test_pasting_is_pasting_the_dense_maps(problem, times, per_row):
    outputs, indices, inside, generator = problem
    permutation = torch.randperm(len(indices), generator=generator)
    own = mix_often(indices, generator, times, per_row)
    dense = own.soft(outputs)
    expected = torch.where(inside[:, None], dense[permutation], dense)
    pasted = own.pasted(permutation, inside)
    assert len(pasted.targets) == 4**times
    torch.testing.assert_close(pasted.soft(outputs), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(sum(pasted.weights), torch.ones(len(indices)), check_dtype=False)
    again = Mixture.of(dense).pasted(permutation, inside)
    assert len(again.targets) == 1 and torch.equal(again.targets[0], expected)


def test_pasting_keeps_the_kind_of_mixing():
    masks, inside = torch.zeros(2, 3, 4, dtype=torch.int64), torch.zeros(1, 3, 4, dtype=torch.bool)
    mixture, order = Mixture.of(masks).mixed_with(torch.tensor([1, 0]), 0.5, True), torch.tensor([1, 0])
    assert mixture.pasted(order, inside).interpolate_loss


def test_both_registries_see_the_same_leaves_and_round_trip():
    mixture = Mixture.of(torch.tensor([0, 1])).mixed_with(torch.tensor([1, 0]), 0.25, interpolate_loss=True)
    leaves, spec = torch_pytree.tree_flatten(mixture)
    others, other_spec = optree.tree_flatten(mixture, none_is_leaf=True, namespace="purecompose")  # pyright: ignore
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in others]
    keys = [torch_pytree.keystr(path) for path, _ in torch_pytree.tree_flatten_with_path(mixture)[0]]
    assert keys == [".targets[0]", ".targets[1]", ".weights[0]", ".weights[1]"]
    for back in (torch_pytree.tree_unflatten(leaves, spec), optree.tree_unflatten(other_spec, others)):
        assert isinstance(back, Mixture) and back.interpolate_loss
        assert torch.equal(back.soft(torch.zeros(2, 2)), mixture.soft(torch.zeros(2, 2)))


@given(problems(), st.integers(1, 3))
def test_a_mixture_splits_with_the_batch(problem, size):
    outputs, indices, generator = problem
    mixture = mix_often(indices, generator, 2)
    parts = [
        torch_pytree.tree_map(lambda leaf, at=at: leaf[at : at + size], mixture).soft(outputs[at : at + size])
        for at in range(0, len(indices), size)
    ]
    assert torch.equal(torch.cat(parts), mixture.soft(outputs))


def test_soft_targets_trace_and_map():
    """No value is read, since make_fx and vmap would both raise."""
    outputs, indices = torch.randn(3, 4, 5), torch.randint(5, (3, 4))
    permutation = torch.stack([torch.randperm(4) for _ in range(3)])

    def soft(outputs: Tensor, indices: Tensor, permutation: Tensor, weight: Tensor) -> Tensor:
        return Mixture.of(indices).mixed_with(permutation, weight).soft(outputs)

    members = outputs, indices, permutation, torch.rand(3)
    loop = torch.stack([soft(*member) for member in zip(*members, strict=True)])
    assert torch.equal(torch.func.vmap(soft)(*members), loop)
    first = [member[0] for member in members]
    assert torch.equal(make_fx(soft)(*first)(*first), loop[0])
