"""Networks that behave differently in a trace than eagerly: recurrent kernels, cached tables, anomaly detection."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import make_batches, make_state
from tests.transforms.compilation.compile_helpers import assert_runs_agree, made


class Recurrent(nn.Module):
    """A recurrent network over the input's features as time steps."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.body = kind(1, 5, num_layers=2, dropout=0.5, **options)
        self.last = nn.Linear(10 if options.get("bidirectional") else 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x.T[..., None])[0][-1])


@pytest.mark.parametrize(
    "kind, options",
    [(nn.LSTM, {}), pytest.param(nn.LSTM, {"bidirectional": True}, marks=pytest.mark.slow), (nn.GRU, {}), (nn.RNN, {})],
)
def test_recurrent_networks_with_dropout_compile(kind, options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Recurrent(kind, **options)
    step, fast = made()
    assert_runs_agree(step, fast, make_state(net), make_batches(3))


def test_transformers_with_masks_compile():
    class Decoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(1, 4), nn.Linear(4, 3)
            self.core = nn.Transformer(4, 2, 1, 1, 8, dropout=0.2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            hidden = self.enter(x[..., None])
            return self.leave(self.core(hidden, hidden, src_mask=mask, tgt_mask=mask)[:, -1])

    step, fast = made()
    assert_runs_agree(step, fast, make_state(Decoding()), make_batches(3))


def test_a_table_that_forward_caches_outside_of_the_network_stays_real():
    @functools.lru_cache
    def positions(width: int) -> Tensor:
        return torch.arange(width) / width

    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + positions(x.shape[1]))

    step, fast = made()
    net = Positioned()
    fast(make_state(net), make_batches(1)[0])  # the first call anywhere is a traced one
    assert type(positions(4)) is Tensor
    assert_runs_agree(step, fast, make_state(net), make_batches(3))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_step_is_compiled_under_anomaly_detection():
    step, fast = made()
    batches = make_batches(3)
    with torch.autograd.detect_anomaly():
        with pytest.warns(UserWarning, match="anomaly detection does not see into a compiled step"):
            fast(make_state(), batches[0])
        assert_runs_agree(step, fast, make_state(), batches)
        assert torch.is_anomaly_enabled()


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_batch_norms_with_a_mean_over_all_batches_compile(kind):
    def norm() -> nn.Module:
        return kind(3, momentum=None)

    net = nn.Sequential(nn.Linear(4, 3), norm(), nn.Tanh(), nn.Linear(3, 3), norm(), nn.BatchNorm1d(3))
    step, fast = made()
    end = assert_runs_agree(step, fast, make_state(net), make_batches(3))
    assert end.buffers["1.num_batches_tracked"] == end.buffers["4.num_batches_tracked"] == 3
