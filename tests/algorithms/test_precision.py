"""Half precision: which tensors are narrow and which stay wide."""

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import compose, loop_events, tree
from purecompose._support.device import AUTOCAST, PRECISIONS
from tests.helpers import assert_close, make_batch, make_cnn, make_mlp, make_state


NARROW = list(AUTOCAST.items())
DIGITS = {"bf16": 2**-7, "fp16": 2**-10}


class Watching(nn.Module):
    """A network of two layers that records the dtypes inside it."""

    seen: list[torch.dtype] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.seen.append(hidden.dtype)
        return self.second(hidden.tanh())


def test_the_known_precisions():
    assert PRECISIONS == ("fp32", "tf32", "bf16", "fp16")


@pytest.mark.parametrize(("precision", "dtype"), NARROW)
def test_the_forward_pass_is_narrow_and_all_else_wide(precision, dtype):
    state = make_state(Watching(), precision=precision)
    Watching.seen.clear()
    end = compose(loop_events).fold(state, make_batch())
    assert set(Watching.seen) == {dtype}
    wide = [*end.params.values(), *(end.grads or {}).values(), *tree.leaves(end.opt_state), end.loss, end.outputs]
    assert {tensor.dtype for tensor in wide} == {torch.float32}
    assert state.forward(make_batch()[0]).dtype is torch.float32


@pytest.mark.parametrize(("precision", "dtype"), NARROW)
def test_outputs_equal_those_of_torchs_autocast(precision, dtype):
    net, (inputs, _) = make_mlp(), make_batch()
    with torch.autocast("cpu", dtype):
        expected = net(inputs)
    assert expected.dtype is dtype
    assert torch.equal(make_state(net, precision=precision).forward(inputs), expected.float())


@pytest.mark.parametrize("precision", AUTOCAST)
@pytest.mark.parametrize("make_net", [make_mlp, make_cnn])
def test_a_step_is_that_of_fp32_up_to_rounding(precision, make_net):
    batch = make_batch(shape=(2, 6, 6) if make_net is make_cnn else (4,))
    step = compose(loop_events)
    exact, narrow = (step.fold(make_state(make_net(), precision=p), batch) for p in ("fp32", precision))
    assert exact.grads is not None and narrow.grads is not None
    largest = max(grad.abs().max().item() for grad in exact.grads.values())
    assert_close(exact.grads, narrow.grads, rtol=0.1, atol=20 * DIGITS[precision] * largest)
    assert not torch.equal(torch.stack([exact.loss]), torch.stack([narrow.loss]))  # pyright: ignore


@pytest.mark.parametrize("precision", AUTOCAST)
def test_a_loss_beyond_the_narrow_range_is_finite(precision):
    """cross_entropy works on widened outputs: 1e6 exceeds float16."""
    state = make_state(precision=precision, loss=lambda o, t, reduction="mean": 1e6 * pc.losses.cross_entropy(o, t))
    loss = compose(loop_events).fold(state, make_batch()).loss
    assert loss is not None and loss.dtype is torch.float32 and 1e5 < loss.item() < 1e7


@pytest.mark.parametrize("precision", AUTOCAST)
def test_a_half_precision_network_keeps_its_own_dtype_in_the_other_precision(precision):
    """Only what autocast narrows is widened: outputs of another half dtype are the network's own choice."""
    (other,) = (dtype for name, dtype in NARROW if name != precision)

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).to(other)

    assert make_state(Chooses(), precision=precision).forward(make_batch()[0]).dtype is other
