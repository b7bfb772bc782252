"""Losses against float64 formulas, mixing against its closed forms, microbatches against the whole."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from scipy.special import log_expit, log_softmax
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    MeanSquaredError,
    Mixture,
    ModelLoss,
    binary_cross_entropy,
    check_loss,
    cross_entropy,
    evaluate_loss,
    model_loss,
    mse,
    num_terms,
    one_hot,
    per_example,
    share_of_mean,
)


@st.composite
def problems(draw: st.DrawFn, ignored: float = 0.0, min_size: int = 1) -> tuple[Tensor, Tensor, torch.Generator]:
    """Draw logits (N, C, ...) in float64, indices (N, ...), a share of them -100, and a generator for the rest."""
    num, classes = draw(st.integers(min_size, 6)), draw(st.integers(2, 5))
    rest = draw(st.sampled_from([(), (3,), (2, 2)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    outputs = torch.randn(num, classes, *rest, generator=generator, dtype=torch.float64)
    indices = torch.randint(classes, (num, *rest), generator=generator)
    dropped = torch.rand(indices.shape, generator=generator) < ignored
    return outputs, torch.where(dropped, -100, indices), generator


def negative_logs(outputs: Tensor, indices: Tensor) -> np.ndarray:
    """Return -log softmax at each index, position by position; NaN where the index is negative."""
    logs = np.moveaxis(log_softmax(outputs.numpy(), axis=1), 1, -1).reshape(-1, outputs.shape[1])
    flat = indices.numpy().ravel()
    losses = [-row[index] if index >= 0 else np.nan for row, index in zip(logs, flat, strict=True)]
    return np.reshape(losses, indices.shape)


def random_mixing(num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randperm(num, generator=generator), torch.rand(num, generator=generator, dtype=torch.float64)


def smooth(targets: Tensor, outputs: Tensor, smoothing: float) -> Tensor:
    hot = one_hot(targets, outputs) if targets.shape != outputs.shape else targets
    return (1 - smoothing) * hot + smoothing / outputs.shape[1]


@given(problems(ignored=0.3))
def test_cross_entropy_equals_the_formula_for_both_forms(problem):
    outputs, indices, _ = problem
    expected = negative_logs(outputs, indices)
    for targets in (indices, indices.int(), one_hot(indices, outputs), one_hot(indices, outputs).long()):
        none = cross_entropy(outputs, targets, reduction="none").numpy()
        np.testing.assert_allclose(none, np.nan_to_num(expected), rtol=1e-12, atol=1e-12)
        assert cross_entropy(outputs, targets, reduction="sum").item() == pytest.approx(np.nansum(expected))
        mean = cross_entropy(outputs, targets).item()
        if np.isnan(expected).all():
            assert math.isnan(mean)
        else:
            assert mean == pytest.approx(np.nanmean(expected))


def test_cross_entropy_of_indices_is_torchs_own_bit_for_bit():
    outputs, targets = torch.randn(64, 10), torch.randint(10, (64,))
    assert torch.equal(cross_entropy(outputs, targets), F.cross_entropy(outputs, targets))


def class_weights(outputs: Tensor) -> list[float]:
    """Return weights 0 for class 0, 0.5 for class 1, and so on."""
    return [0.5 * index for index in range(outputs.shape[1])]


@given(problems(ignored=0.3))
def test_weighted_cross_entropy_is_torchs_for_indices_and_the_same_for_dense_targets(problem):
    outputs, indices, _ = problem
    weight = class_weights(outputs)
    loss_fn, tensor = CrossEntropy(weight=weight), torch.tensor(weight, dtype=outputs.dtype)
    assert loss_fn == CrossEntropy(weight=tensor) == CrossEntropy(weight=tensor.numpy())  # pyright: ignore[reportArgumentType]
    outputs.requires_grad_()
    for reduction in ("none", "sum", "mean"):
        expected = F.cross_entropy(outputs, indices, tensor, reduction=reduction)
        grads = torch.autograd.grad(expected.sum(), outputs)[0].nan_to_num()
        for targets in (indices, indices.int(), one_hot(indices, outputs), one_hot(indices, outputs).long()):
            loss = loss_fn(outputs, targets, reduction)
            torch.testing.assert_close(loss, expected, equal_nan=True)
            torch.testing.assert_close(torch.autograd.grad(loss.sum(), outputs)[0].nan_to_num(), grads)


@pytest.mark.parametrize("is_weighted", [False, True])
@given(problems(ignored=0.3))
def test_smoothed_cross_entropy_is_torchs_for_indices_and_the_same_for_dense_targets(is_weighted, problem):
    outputs, indices, generator = problem
    weight = torch.rand(outputs.shape[1], generator=generator) + 0.1 if is_weighted else None
    loss = CrossEntropy(weight=weight, label_smoothing=0.3)
    for reduction in ("mean", "sum", "none"):
        options = {"reduction": reduction, "label_smoothing": 0.3}
        wide = None if weight is None else weight.double()
        expected = F.cross_entropy(outputs, indices, weight=wide, **options)
        torch.testing.assert_close(loss(outputs, indices, reduction), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        dense = loss(outputs, one_hot(indices, outputs), reduction)
        torch.testing.assert_close(dense, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("weight", [None, (1.0, 0.0, 2.0)])
@pytest.mark.parametrize("dense", [False, True])
def test_without_counted_targets_the_mean_is_nan_and_its_gradient_zero(dense, weight):
    outputs, targets = torch.randn(4, 3, requires_grad=True), torch.full((4,), -100)
    loss = CrossEntropy(weight=weight)(outputs, one_hot(targets, outputs) if dense else targets)
    assert math.isnan(loss.item())
    (grad,) = torch.autograd.grad(loss, outputs)
    assert torch.equal(grad, torch.zeros(4, 3))


@pytest.mark.parametrize("loss_fn", [cross_entropy, CrossEntropy(weight=[1.0, 1.0, 1.0])])
def test_cross_entropy_of_half_precision_logits_keeps_soft_targets_wide(loss_fn):
    outputs = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.bfloat16)
    targets = torch.tensor([[0.9, 0.05, 0.05]])
    exact = -(targets.double().numpy() * log_softmax(outputs.double().numpy(), axis=1)).sum()
    loss = loss_fn(outputs, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact, rel=5e-3)


@given(problems())
def test_mse_and_binary_cross_entropy_equal_their_formulas(problem):
    outputs, _, generator = problem
    targets = torch.rand(outputs.shape, generator=generator, dtype=torch.float64)
    x, t = outputs.numpy(), targets.numpy()
    formulas = {mse: (x - t) ** 2, binary_cross_entropy: -t * log_expit(x) - (1 - t) * log_expit(-x)}
    for loss_fn, expected in formulas.items():
        np.testing.assert_allclose(loss_fn(outputs, targets, reduction="none").numpy(), expected, rtol=1e-9)
        assert loss_fn(outputs, targets).item() == pytest.approx(expected.mean())
        assert loss_fn(outputs, targets, reduction="sum").item() == pytest.approx(expected.sum())
        rows = expected.reshape(len(expected), -1).mean(1)
        np.testing.assert_allclose(per_example(loss_fn, outputs, targets).numpy(), rows, rtol=1e-9)


def test_binary_cross_entropy_takes_class_indices_and_integer_targets():
    outputs, indices = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    dense = torch.eye(3)[indices]
    expected = F.binary_cross_entropy_with_logits(outputs, dense)
    for targets in (indices, dense.long(), dense.bool()):
        assert torch.equal(binary_cross_entropy(outputs, targets), expected)


def test_binary_cross_entropy_may_be_a_mean_over_examples():
    outputs, targets = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0)), torch.rand(4, 3, 2)
    loss_fn, terms = BinaryCrossEntropy(mean_over="examples"), F.binary_cross_entropy_with_logits
    sums = torch.stack([terms(x, t, reduction="sum") for x, t in zip(outputs, targets, strict=True)])
    torch.testing.assert_close(loss_fn(outputs, targets), sums.mean())
    torch.testing.assert_close(loss_fn(outputs, targets, reduction="none"), sums)
    assert num_terms(loss_fn, outputs, targets) == 4


@pytest.mark.parametrize("weight", [3, torch.tensor(3.0), [1.0, 2.0, 4.0], torch.tensor([1.0, 2.0, 4.0])])
@pytest.mark.parametrize("rest", [(), (5,)])
def test_rare_labels_count_more_by_pos_weight(weight, rest):
    outputs, targets = torch.randn(4, 3, *rest), torch.rand(4, 3, *rest).round()
    given = torch.as_tensor(weight).reshape(-1, *[1] * len(rest))
    expected = F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=given, reduction="none")
    torch.testing.assert_close(BinaryCrossEntropy(pos_weight=weight)(outputs, targets), expected.mean())
    by_examples = BinaryCrossEntropy("examples", weight)
    torch.testing.assert_close(by_examples(outputs, targets, "none"), expected.flatten(1).sum(1))
    assert hash(BinaryCrossEntropy(pos_weight=weight)) == hash(BinaryCrossEntropy(pos_weight=weight))
    with pytest.raises(ValueError, match="4 numbers, expected one for each of the 1 classes"):
        BinaryCrossEntropy(pos_weight=[1.0] * 4)(outputs.flatten(1)[:, 0], targets.flatten(1)[:, 0])


@pytest.mark.parametrize("cls", [CrossEntropy, MeanSquaredError, BinaryCrossEntropy, ModelLoss])
def test_losses_compare_and_hash_by_configuration(cls):
    assert cls() == cls() and hash(cls()) == hash(cls())


def test_losses_of_other_configuration_differ():
    assert CrossEntropy(ignore_index=255) != cross_entropy
    assert ModelLoss("total") != model_loss
    assert mse != binary_cross_entropy


def test_model_loss_reads_entries_and_attributes():
    class Outputs:
        total = torch.tensor(3.0)

    assert model_loss({"loss": torch.tensor(2.0)}, None).item() == 2.0
    assert ModelLoss("total")(Outputs(), None).item() == 3.0
    rows = {"loss": torch.tensor([1.0, 3.0])}
    assert model_loss(rows, None).item() == 2.0
    assert per_example(model_loss, rows, None).tolist() == [1.0, 3.0]


@given(problems(), st.floats(0, 0.9), st.booleans(), st.booleans())
def test_mixing_and_label_smoothing_are_the_closed_form(problem, smoothing, dense, interpolate):
    """Mixing and smoothing in either order, from either form, resolved in either way, give one number.

    With y' = (1-a) sum_k w_k onehot(t_k) + a/C the cross entropy is
    (1-a) sum_k w_k (-log p[t_k]) + a mean_c(-log p_c), position by position.
    """
    outputs, indices, generator = problem
    permutation, weight = random_mixing(len(indices), generator)
    targets = one_hot(indices, outputs) if dense else indices

    own, partner = negative_logs(outputs, indices), negative_logs(outputs, indices[permutation])
    row = weight.numpy().reshape(-1, *[1] * (indices.ndim - 1))
    uniform = -log_softmax(outputs.numpy(), axis=1).mean(1)
    expected = (1 - smoothing) * ((1 - row) * own + row * partner) + smoothing * uniform

    mixed_first = Mixture.of(targets).mixed_with(permutation, weight, interpolate)
    mixed_first = mixed_first.map(lambda t: smooth(t, outputs, smoothing))
    smoothed_first = Mixture.of(targets).map(lambda t: smooth(t, outputs, smoothing))
    smoothed_first = smoothed_first.mixed_with(permutation, weight, interpolate)
    for mixture in (mixed_first, smoothed_first):
        none = evaluate_loss(cross_entropy, outputs, mixture, "none").numpy()
        np.testing.assert_allclose(none, expected, rtol=1e-6, atol=1e-6)
        assert evaluate_loss(cross_entropy, outputs, mixture).item() == pytest.approx(expected.mean(), rel=1e-6)
        total = evaluate_loss(cross_entropy, outputs, mixture, "sum").item()
        assert total == pytest.approx(expected.sum(), rel=1e-6)


@given(problems(ignored=0.4), st.booleans())
def test_soft_and_interpolated_cross_entropy_agree_with_ignored_positions(problem, is_weighted):
    outputs, indices, generator = problem
    loss_fn = CrossEntropy(weight=class_weights(outputs)) if is_weighted else cross_entropy
    permutation, weight = random_mixing(len(indices), generator)
    outputs.requires_grad_()
    results = []
    for interpolate in (False, True):
        mixture = Mixture.of(indices).mixed_with(permutation, weight, interpolate)
        loss = evaluate_loss(loss_fn, outputs, mixture)
        results.append((loss, torch.autograd.grad(loss, outputs)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7, equal_nan=True)


def test_interpolation_differs_for_a_loss_not_linear_in_its_target():
    """(x - (t+s)/2)^2 at x=0, t=0, s=2 is 1; the mean of the two losses is 2."""
    outputs, permutation = torch.zeros(2, 1), torch.tensor([1, 0])
    mixture = Mixture.of(torch.tensor([[0.0], [2.0]]))
    assert evaluate_loss(mse, outputs, mixture.mixed_with(permutation, 0.5)).item() == 1.0
    assert evaluate_loss(mse, outputs, mixture.mixed_with(permutation, 0.5, True)).item() == 2.0


def test_a_positive_ignore_index_holds_inside_mixtures():
    loss_fn, outputs = CrossEntropy(ignore_index=255), torch.randn(2, 3)
    targets, permutation = torch.tensor([255, 1]), torch.tensor([1, 0])
    row = torch.log_softmax(outputs, 1)[:, 1]
    for interpolate in (False, True):
        mixture = Mixture.of(targets).mixed_with(permutation, 0.25, interpolate)
        loss = evaluate_loss(loss_fn, outputs, mixture)
        torch.testing.assert_close(loss, -(0.25 * row[0] + 0.75 * row[1]) / 2)


@pytest.mark.parametrize("interpolate", [False, True])
def test_a_partner_without_weight_does_not_make_an_ignored_position_count(interpolate):
    outputs, permutation = torch.randn(2, 3), torch.tensor([1, 0])
    mixture = Mixture.of(torch.tensor([-100, 1])).mixed_with(permutation, torch.tensor(0.0), interpolate)
    loss = evaluate_loss(cross_entropy, outputs, mixture)
    torch.testing.assert_close(loss, -torch.log_softmax(outputs, 1)[1, 1])
    assert num_terms(cross_entropy, outputs, mixture) == 1


def test_a_mixture_of_one_term_is_its_plain_target_bit_for_bit():
    outputs, targets = torch.randn(4, 3), torch.tensor([0, 2, 1, -100])
    plain = cross_entropy(outputs, targets)
    assert torch.equal(evaluate_loss(cross_entropy, outputs, Mixture.of(targets)), plain)


def test_a_plain_function_without_reduction_is_a_loss_for_the_mean():
    assert evaluate_loss(lambda outputs, targets: (outputs - targets).sum(), torch.ones(3), torch.zeros(3)) == 3


def test_a_type_error_inside_a_loss_is_not_hidden():
    def broken(outputs, targets, reduction="mean"):
        raise TypeError("from inside")

    with pytest.raises(TypeError, match="from inside"):
        per_example(broken, torch.zeros(2, 3), torch.zeros(2))


@pytest.mark.parametrize("loss_fn", [cross_entropy, CrossEntropy(weight=[0.5, 0.0, 1.0, 2.0, 1.0])])
def test_losses_trace_and_map(loss_fn):
    """No value is read, since make_fx and vmap would both raise."""
    outputs, indices = torch.randn(3, 4, 5), torch.randint(-1, 5, (3, 4))
    indices = torch.where(indices < 0, -100, indices)
    permutation, weight = torch.stack([torch.randperm(4) for _ in range(3)]), torch.rand(3)

    def all_ways(outputs: Tensor, indices: Tensor, permutation: Tensor, weight: Tensor) -> Tensor:
        mixtures = [Mixture.of(indices).mixed_with(permutation, weight, flag) for flag in (False, True)]
        losses = [evaluate_loss(loss_fn, outputs, targets) for targets in (indices, *mixtures)]
        terms = num_terms(loss_fn, outputs, mixtures[0])
        return torch.stack([*losses, per_example(loss_fn, outputs, indices).sum(), torch.as_tensor(terms)])

    loop = torch.stack([all_ways(*member) for member in zip(outputs, indices, permutation, weight, strict=True)])
    mapped = torch.func.vmap(all_ways)(outputs, indices, permutation, weight)
    torch.testing.assert_close(mapped, loop, equal_nan=True)
    first = outputs[0], indices[0], permutation[0], weight[0]
    torch.testing.assert_close(make_fx(all_ways)(*first)(*first), loop[0], equal_nan=True)


@given(problems(ignored=0.3))
def test_per_example_is_the_mean_over_positions_that_count(problem):
    outputs, indices, _ = problem
    rows = negative_logs(outputs, indices).reshape(len(indices), -1)
    expected = [row[~np.isnan(row)].mean() if not np.isnan(row).all() else 0.0 for row in rows]
    for targets in (indices, one_hot(indices, outputs)):
        losses = per_example(cross_entropy, outputs, targets)
        assert losses.shape == (len(indices),)
        np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-9)


@given(
    problems(ignored=0.5, min_size=2),
    st.integers(1, 3),
    st.sampled_from(["plain", "soft", "interpolated"]),
    st.booleans(),
)
def test_microbatches_add_up_to_the_batch(problem, size, kind, is_weighted):
    """Losses and gradients agree, also if a microbatch has no counted target (its own mean is NaN)."""
    outputs, indices, generator = problem
    loss_fn = CrossEntropy(weight=class_weights(outputs)) if is_weighted else cross_entropy
    permutation, weight = random_mixing(len(indices), generator)
    mixture = Mixture.of(indices).mixed_with(permutation, weight, kind == "interpolated")
    targets = indices if kind == "plain" else mixture
    whole = outputs.clone().requires_grad_()
    expected = evaluate_loss(loss_fn, whole, targets)
    (expected_grad,) = torch.autograd.grad(expected, whole)

    starts = range(0, len(indices), size)
    parts = [take(targets, slice(at, at + size)) for at in starts]
    outputs.requires_grad_()
    pieces = [outputs[at : at + size] for at in starts]
    terms = [num_terms(loss_fn, piece, part) for piece, part in zip(pieces, parts, strict=True)]
    shares = [
        share_of_mean(evaluate_loss(loss_fn, piece, part), term, sum(terms))
        for piece, part, term in zip(pieces, parts, terms, strict=True)
    ]
    loss = torch.stack(shares).sum()
    (grad,) = torch.autograd.grad(loss, outputs)
    torch.testing.assert_close(grad, expected_grad)
    if sum(terms) > 0:
        torch.testing.assert_close(loss, expected)


def take(targets: Tensor | Mixture, rows: slice) -> Tensor | Mixture:
    if isinstance(targets, Tensor):
        return targets[rows]
    split = [tuple(leaf[rows] for leaf in leaves) for leaves in (targets.targets, targets.weights)]
    return Mixture(split[0], split[1], targets.interpolate_loss)


CLASS_WEIGHTS = torch.tensor([1.0, 3.0, 0.5])
TORCHS = {
    "function": F.cross_entropy,
    "with settings": functools.partial(F.cross_entropy, ignore_index=2, weight=CLASS_WEIGHTS, label_smoothing=0.1),
    "likelihood": F.nll_loss,
    "module": torch.nn.CrossEntropyLoss(),
    "weighted module": torch.nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=2, label_smoothing=0.1),
    "likelihood module": torch.nn.NLLLoss(CLASS_WEIGHTS),
}


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("form", ["plain", "dense", "places"])
def test_torchs_own_losses_count_as_torch_does(name, form):
    if form == "dense" and "likelihood" in name:
        pytest.skip("torch takes class indices only")
    loss_fn = TORCHS[name]
    outputs = torch.randn(6, 3, *([4] if form == "places" else [])).log_softmax(1)
    targets = torch.randint(3, (6, *outputs.shape[2:]))
    targets = torch.where(torch.rand(targets.shape) < 0.3, -100 if "settings" not in name else 2, targets)
    if "weighted" in name:
        targets = targets.where(targets >= 0, 2)
    if form == "dense":
        targets = one_hot(targets, outputs).softmax(1)
        loss_fn = loss_fn if "settings" not in name else functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS)
        if name == "weighted module":
            loss_fn = torch.nn.CrossEntropyLoss(CLASS_WEIGHTS)
    parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    terms = [num_terms(loss_fn, outputs[part], targets[part]) for part in parts]
    shares = [
        share_of_mean(loss_fn(outputs[part], targets[part]), term, sum(terms))
        for part, term in zip(parts, terms, strict=True)
    ]
    torch.testing.assert_close(torch.stack(shares).sum(), loss_fn(outputs, targets), equal_nan=True)


@pytest.mark.parametrize("loss_fn", [mse, F.mse_loss, binary_cross_entropy])
def test_a_loss_without_counts_weighs_by_examples(loss_fn):
    outputs, targets = torch.randn(5, 2), torch.rand(5, 2)
    terms = [num_terms(loss_fn, outputs[s], targets[s]) for s in (slice(0, 3), slice(3, 5))]
    assert terms == [3, 2]
    shares = [
        share_of_mean(loss_fn(outputs[s], targets[s]), term, 5)
        for s, term in zip((slice(0, 3), slice(3, 5)), terms, strict=True)
    ]
    torch.testing.assert_close(shares[0] + shares[1], loss_fn(outputs, targets))


def test_a_loss_may_bring_its_own_number_of_terms():
    class Weighted:
        def __call__(self, outputs, targets, reduction="mean"):
            return (outputs * targets).sum() / targets.sum()

        def num_terms(self, outputs, targets):
            return targets.sum()

    assert num_terms(Weighted(), torch.ones(3), torch.tensor([1.0, 2.0, 3.0])) == 6
    assert num_terms(model_loss, {"loss": torch.tensor(1.0), "logits": torch.zeros(7, 2)}, None) == 7


def test_a_model_loss_counts_labels():
    batch = {"labels": torch.tensor([[1, 2, -1], [3, -1, -1]])}
    assert num_terms(ModelLoss(labels="labels", ignore_index=-1), None, batch) == 3
    assert num_terms(ModelLoss(labels="labels", ignore_index=-1, shift=1), None, batch) == 1
    assert num_terms(ModelLoss(labels="labels"), None, batch) == 6
    assert num_terms(model_loss, None, batch) == 6
    assert num_terms(model_loss, None, {**batch, "labels": torch.zeros(2, 3)}) == 2  # labels of a regression
    for wrong, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="shift: expected an int >= 0"):
            ModelLoss(shift=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="labels=1.5"):
        ModelLoss(labels=1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="expected a tensor of labels.*got list"):
        num_terms(ModelLoss(labels="labels"), None, {"labels": [1, 2], "x": torch.zeros(2)})


def test_shares_of_a_half_precision_mean_are_not_rounded_twice():
    share = share_of_mean(torch.tensor(3.0, dtype=torch.bfloat16), torch.tensor(1), torch.tensor(3))
    assert share.dtype == torch.float32 and share.item() == pytest.approx(1.0, rel=1e-6)


def test_check_loss_accepts_losses_that_work():
    for loss_fn in (cross_entropy, mse, binary_cross_entropy, F.cross_entropy, F.mse_loss):
        check_loss(loss_fn, per_example=True)
    check_loss(lambda outputs, targets, **kwargs: outputs, per_example=True)
    for loss_fn in (model_loss, torch.nn.CrossEntropyLoss(), lambda outputs, targets: outputs):
        check_loss(loss_fn)
