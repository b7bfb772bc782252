"""The CTC loss against torch's kernel, and in compiled, mapped and divided steps."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import purecompose as pc
from purecompose import compose, loop_events, losses, optim, population, stack_states
from tests.helpers import assert_close
from tests.transforms.compilation.compile_helpers import assert_runs_agree, compiled


OUTPUTS = torch.randn(5, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TEXTS = torch.tensor([[1, 2, 3], [2, 2, 2], [1, 1, -1], [3, -1, -1], [-1, -1, -1]])  # repeated, short, empty
LENGTHS = torch.tensor([3, 3, 2, 1, 0])
FRAMES = torch.tensor([8, 5, 7, 1, 0])  # the second needs all of its frames


def of_torch(outputs: Tensor, frames: Tensor, reduction: str, **options: Any) -> Tensor:
    logs = outputs.log_softmax(2).transpose(0, 1)
    return F.ctc_loss(logs, TEXTS.clamp(min=0), frames, LENGTHS, reduction=reduction, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("frames", [None, FRAMES], ids=["all frames", "some frames"])
def test_losses_and_gradients_are_those_of_torch(frames: Tensor | None, reduction: str):
    outputs, twin = (OUTPUTS.clone().requires_grad_() for _ in range(2))
    given = TEXTS if frames is None else (TEXTS.int(), LENGTHS.int(), frames.int())
    found = losses.ctc(outputs, given, reduction=reduction)
    expected = of_torch(twin, torch.full((5,), 8) if frames is None else frames, reduction)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(outputs.grad, twin.grad, rtol=1e-12, atol=1e-13)


def test_texts_may_be_padded_by_the_blank():
    assert torch.equal(losses.ctc(OUTPUTS, TEXTS.clamp(min=0)), losses.ctc(OUTPUTS, TEXTS))
    with_last = losses.CTC(blank=3)
    texts = torch.tensor([[0, 1, -1], [2, -1, -1]])
    assert torch.equal(with_last(OUTPUTS[:2], texts.where(texts >= 0, 3)), with_last(OUTPUTS[:2], texts))


def test_another_blank_padded_lengths_and_log_probabilities():
    indices = torch.tensor([[0, 1], [2, 77]])
    logs = OUTPUTS[:2].log_softmax(2)
    expected = F.ctc_loss(
        logs.transpose(0, 1), torch.tensor([[0, 1], [2, 2]]), *torch.tensor([[8, 8], [2, 1]]), blank=3
    )
    torch.testing.assert_close(losses.CTC(blank=3)(logs, (indices, torch.tensor([2, 1]))), expected)


def test_second_derivatives_are_right():
    outputs = OUTPUTS[:, :5].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: losses.ctc(x, (TEXTS, LENGTHS, FRAMES.clamp(max=5))), outputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_text_that_does_not_fit_has_an_infinite_loss_or_none(dtype: torch.dtype):
    outputs = OUTPUTS[:, :4].to(dtype).requires_grad_()  # the second text needs 5 frames
    assert losses.ctc(outputs, TEXTS, reduction="none").isinf().tolist() == [False, True, False, False, False]
    found = losses.CTC(zero_infinity=True)(outputs, TEXTS, reduction="none")
    expected = of_torch(OUTPUTS[:, :4].to(dtype).double(), torch.full((5,), 4), "none", zero_infinity=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for loss in (losses.ctc, losses.CTC(zero_infinity=True)):
        (grad,) = torch.autograd.grad(loss(outputs, TEXTS, reduction="none").sum(), outputs)
        assert grad.isfinite().all() and not grad[1].any()


def test_impossible_classes_have_no_gradient():
    outputs = OUTPUTS.clone().index_fill(2, torch.tensor([3]), -torch.inf).requires_grad_()
    loss = losses.ctc(outputs, TEXTS, reduction="none")
    assert loss.isinf().tolist() == [True, False, False, True, False]
    loss[[1, 2, 4]].sum().backward()
    assert outputs.grad is not None and outputs.grad.isfinite().all() and outputs.grad[1].any()


@pytest.mark.parametrize("targets", [torch.tensor([1, 2, 3]), torch.zeros(4, 3, dtype=torch.int64)])
def test_concatenated_targets_are_refused(targets: Tensor):
    with pytest.raises(ValueError, match=r"targets \(N, S\), got .*pad_sequence\(texts, True, -1\)"):
        losses.ctc(OUTPUTS, targets)


def state_of(seed: int = 0) -> pc.State:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = torch.nn.Linear(4, 4).double()
    return pc.State.create(net, loss=losses.ctc, optimizer=optim.sgd(0.1), key=0)


def test_slices_members_and_compiled_steps_equal_the_step_and_torch():
    batch, step = (OUTPUTS, (TEXTS, LENGTHS, FRAMES)), compose(loop_events)
    state = state_of()
    end = step(state, batch)
    twin = torch.nn.Linear(4, 4).double()
    twin.load_state_dict(dict(state.params))
    of_torch(twin(OUTPUTS), FRAMES, "mean").backward()
    assert_close(end.params, {name: p - 0.1 * p.grad for name, p in twin.named_parameters() if p.grad is not None})
    assert_close(step.replace(microbatches=5)(state, batch).params, end.params)
    assert_runs_agree(step, compiled(step), state, [batch] * 2)
    many = population(step, 2)(stack_states([state, state_of(1)]), batch)
    assert_close({name: rows[0] for name, rows in many.params.items()}, end.params)
