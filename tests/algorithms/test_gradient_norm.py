"""The norm of the gradient that the update uses."""

import pytest
import torch

import purecompose as pc
from purecompose import Algorithm, Event, State, Trait, compose, loop_events, on, tree
from purecompose.algorithms._measurements import gradient_norm, norm_of
from purecompose.algorithms._overflow import loss_scaling
from tests.algorithms import method_helpers as helpers


BATCH = helpers.make_batch()


def by_hand() -> dict[str, torch.Tensor]:
    """Return the gradients, computed only by torch."""
    net = pc.to_module(helpers.make_state())
    torch.nn.functional.cross_entropy(net(BATCH[0]), BATCH[1]).backward()
    return {name: param.grad for name, param in net.named_parameters() if param.grad is not None}


def clip(max_norm: float) -> Algorithm:
    def apply(event: Event, state: State) -> State:
        del event
        grads = state.grads or {}
        factor = (max_norm / tree.global_norm(grads)).clamp(max=1.0)
        return state.replace(grads={name: grad * factor for name, grad in grads.items()})

    return Algorithm("clip", on(Event.AFTER_TRAIN_BATCH), apply, traits=frozenset({Trait.CLIPS_GRADIENTS}))


@pytest.mark.parametrize("microbatches", [1, 3])
def test_it_is_the_norm_of_all_gradients(microbatches):
    after = compose(loop_events, [gradient_norm()], microbatches=microbatches)(helpers.make_state(), BATCH)
    expected = torch.cat([grad.flatten() for grad in by_hand().values()]).norm()
    torch.testing.assert_close(after.metrics, {"gradient_norm": expected})


def test_each_parameter_has_its_own_norm():
    after = compose(loop_events, [gradient_norm(total=False, each=True)])(helpers.make_state(), BATCH)
    expected = {f"gradient_norm/{name}": grad.norm() for name, grad in by_hand().items()}
    torch.testing.assert_close(after.metrics, expected)


@pytest.mark.parametrize("clip_first", [True, False])
def test_it_sees_clipped_gradients(clip_first):
    both = [clip(0.01), gradient_norm()] if clip_first else [gradient_norm(), clip(0.01)]
    after = compose(loop_events, both)(helpers.make_state(), BATCH)
    assert after.metrics["gradient_norm"].item() == pytest.approx(0.01, rel=1e-5)


def test_it_sees_unscaled_gradients_under_loss_scaling_and_reports_overflow():
    step = compose(loop_events, [gradient_norm(), loss_scaling()])
    state = step.init(helpers.make_state())
    alone = compose(loop_events, [gradient_norm()])(helpers.make_state(), BATCH)
    assert torch.equal(step(state, BATCH).metrics["gradient_norm"], alone.metrics["gradient_norm"])
    assert not step(state, (BATCH[0] * torch.inf, BATCH[1])).metrics["gradient_norm"].isfinite()


def test_half_precision_is_summed_in_float32():
    large = torch.full((100,), 6e4, dtype=torch.float16)
    assert norm_of([large]).item() == pytest.approx(6e5, rel=1e-3)
    assert norm_of([large]).dtype is torch.float32
    assert norm_of([large, torch.ones(1, dtype=torch.float64)]).dtype is torch.float64
    assert norm_of([]).item() == 0
