"""Parameters gathered layer by layer, in networks that compute with them without recording it."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose._support.device import whole
from purecompose.core.ranks import Ranks
from purecompose.testing.process import in_process_group
from tests.helpers import loss_of


class _Scaled(nn.Linear):
    """A layer whose weight is divided by what a function finds under `no_grad`."""

    def _scale(self) -> Tensor:
        return self.weight.abs().max()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        with torch.no_grad():
            scale = self._scale()
        return nn.functional.linear(input, self.weight / scale, self.bias)


class _ScaledByColumn(_Scaled):
    def _scale(self) -> Tensor:
        return self.weight.abs().mean(0)


class _Nearest(nn.Linear):
    """A codebook: each input is replaced by the nearest row."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        with torch.no_grad():
            nearest = torch.cdist(input, self.weight).argmin(1)
        return input + self.weight[nearest]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:  # noqa: A002
        ctx.save_for_backward(input, weight)
        return input @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        input, weight = ctx.saved_tensors  # noqa: A001
        return grads[0] @ weight, grads[0].t() @ input


class _ByFunction(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return _Product.apply(input, self.weight) + self.bias  # pyright: ignore[reportOperatorIssue]


def _trained(mesh: Any, kind: type[nn.Linear]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(kind(4, 4), nn.Tanh(), nn.Linear(4, 4))
    state = pc.State.create(net, loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1), duration="3ba")
    step: Any = pc.compose(pc.loop_events)
    if mesh is not None:
        step, state = pc.fully_sharded(step, mesh, "layer"), pc.shard(state, mesh)
    batch = torch.randn(8, 4), torch.randn(8, 4)
    for _ in range(3):
        state = step(state, batch)
    return {name: whole(param).clone() for name, param in state.params.items()}


def _all_trained(mesh: Any) -> list[dict[str, Tensor]]:
    return [_trained(mesh, kind) for kind in (_Scaled, _ScaledByColumn, _Nearest, _ByFunction)]


def test_networks_that_do_not_record_what_they_compute_get_whole_parameters() -> None:
    expected = _all_trained(None)
    for found in in_process_group(_all_trained, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-7)


FROZEN = [], ["0.bias", "2.weight"]


def _counting_messages(mesh: Any) -> list[tuple[dict[str, Tensor], list[str]]]:
    return [_trained_counting_messages(mesh, frozen) for frozen in FROZEN]


def _trained_counting_messages(mesh: Any, frozen: list[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the parameters after two steps, and the messages of the second one."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    state = pc.State.create(net, loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1)).replace(frozen=frozen)
    step: Any = pc.compose(pc.loop_events)
    if mesh is not None:
        step, state = pc.fully_sharded(step, mesh, "layer"), pc.shard(state, mesh)
    batch, sent = (torch.randn(8, 4), torch.randn(8, 2)), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather", "scatter_sum"):
            send = getattr(Ranks, name)
            counted = lambda ranks, own, name=name, send=send: (sent.append(name), send(ranks, own))[1]  # noqa: E731
            patch.setattr(Ranks, name, counted)
        state = step(state, batch)
        sent.clear()
        state = step(state, batch)
        messages = sorted(sent)
    return {name: whole(param).clone() for name, param in state.params.items()}, messages


@pytest.mark.parametrize("size", [1, 2])
def test_the_parameters_that_a_function_reads_travel_together(size: int) -> None:
    expected = _counting_messages(None)
    for found in in_process_group(_counting_messages, size):
        for (params, messages), (alone, _) in zip(found, expected, strict=True):
            torch.testing.assert_close(params, alone, rtol=0, atol=2e-7)
            # Two layers forward, the last one's weight backward, and gradients of two layers.
            assert messages == ["gather"] * 3 + ["scatter_sum"] * 2


class _Routed(nn.Module):
    """Two experts of one shape or of two; each example takes one of them, and an expert runs only if it is chosen."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)) for width in widths
        )

    def forward(self, inputs: Tensor) -> Tensor:
        chosen, outputs = (inputs[:, 0] > 0).long(), torch.zeros_like(inputs)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                outputs = outputs.index_put((rows,), expert(inputs[rows]))
        return outputs


def _routed(widths: tuple[int, int], is_mixed: bool) -> tuple[pc.State, tuple[Tensor, Tensor]]:
    """Return a state and a batch, whose halves take one expert each, or both."""
    torch.manual_seed(0)
    state = pc.State.create(_Routed(*widths), loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1), duration="9ba")
    inputs = torch.randn(8, 4)
    inputs[:, 0] = torch.tensor([1.0, -1.0] * 4 if is_mixed else [1.0] * 4 + [-1.0] * 4)
    return state, (inputs, torch.randn(8, 4))


def _attempts(mesh: Any, widths: tuple[int, int], is_mixed: bool) -> list[Any]:
    """Return the losses of an evaluation and of a step, or their errors, first with gather="step"."""
    own, batch = _routed(widths, is_mixed)
    own, found = pc.shard(own, mesh), []
    for gather in ("step", "layer"):
        step = pc.fully_sharded(pc.compose(pc.loop_events), mesh, gather)
        evaluated = lambda step=step: pc.evaluate(own, [batch], step=step)["loss"]  # noqa: E731
        trained = lambda step=step: loss_of(step(own, batch)).item()  # noqa: E731
        for attempt in (evaluated, trained):
            try:
                found.append(attempt())
            except RuntimeError as error:
                found.append(str(error))
    return found


ROUTES = list(itertools.product([(4, 4), (4, 6)], [False, True]))


def _all_attempts(mesh: Any) -> list[list[Any]]:
    return [_attempts(mesh, *route) for route in ROUTES]


def test_examples_that_take_other_layers_are_evaluated_right_or_refused() -> None:
    words = "read different parameters at the same time, this one reads experts."
    for of_rank in in_process_group(_all_attempts, 2):
        for route, (evaluated, trained, by_layer, trained_by_layer) in zip(ROUTES, of_rank, strict=True):
            state, batch = _routed(*route)
            expected, is_mixed = pytest.approx(pc.evaluate(state, [batch])["loss"]), route[1]
            assert evaluated == expected and trained == expected
            if is_mixed:
                assert by_layer == expected and trained_by_layer == pytest.approx(trained)
            else:
                assert words in by_layer and words in trained_by_layer
