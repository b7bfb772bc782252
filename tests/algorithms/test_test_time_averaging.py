"""Test-time averaging: the views against torch's padding, means against plain calls, and its place in evaluations."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import purecompose as pc
from purecompose import Evaluator, State, algorithms as alg, compose, evaluate, loop_events, losses, optim, predict
from purecompose.functional import average_over_views
from tests.helpers import assert_same


class Net(nn.Module):
    """A network whose outputs depend on each pixel in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(0.3))
        self.head = nn.Linear(4 * 6 * 6, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.hidden(images).flatten(1))


def images(num: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num, 2, 6, 6, generator=torch.Generator().manual_seed(num)).to(dtype)


def data() -> list[Any]:
    return [(images(num), torch.arange(num) % 3) for num in (4, 5)]


def make_state(net: nn.Module | None = None, **options: Any) -> State:
    torch.manual_seed(0)
    options = {"loss": losses.cross_entropy, "optimizer": optim.sgd(0.1), "duration": "4ba", **options}
    return State.create(net or Net(), **options)


def by_hand(net: Any, given: Tensor, *, mirror: bool = True, shift: int = 0) -> Tensor:
    """Return the mean over views as a plain program computes it: by padding and cutting."""

    def both(one: Tensor) -> Tensor:
        return 0.5 * net(one) + 0.5 * net(one.flip(-1)) if mirror else net(one)

    if not shift:
        return both(given)
    height, width = given.shape[-2:]
    padded = F.pad(given, (shift,) * 4, "reflect")
    moved = [padded[..., start : start + height, start : start + width] for start in (0, 2 * shift)]
    return 0.5 * both(given) + 0.25 * both(moved[0]) + 0.25 * both(moved[1])


SETTINGS: list[dict[str, Any]] = [{}, {"shift": 1}, {"mirror": False, "shift": 2}, {"shift": 5}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_views_are_those_of_a_plain_program(settings: dict[str, Any]) -> None:
    net = Net().eval()
    with torch.no_grad():
        torch.testing.assert_close(average_over_views(net, images(), **settings), by_hand(net, images(), **settings))


def test_weights_and_borders_of_a_single_row() -> None:
    def corner(views: Tensor) -> Tensor:
        return views[0, 0, 0, :1]

    given = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 128.0, 256.0]]).view(1, 1, 3, 3)
    # Up-left, the corner is the middle; down-right, it is the reflection, the middle again; mirrored, the same pixel of
    # the middle's column for a shift, and the right corner without one.
    assert average_over_views(corner, given).item() == (1 + 4) / 2
    assert average_over_views(corner, given, mirror=False, shift=1).item() == 1 / 2 + 16 / 4 + 16 / 4
    # Mirrored after the shift: the right end of the first row, reflected to column 1, and column 1 of the moved row.
    assert average_over_views(corner, given, shift=1).item() == (1 + 4) / 4 + (16 + 16) / 8 + (16 + 16) / 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_outputs_keep_their_structure_and_dtypes_and_maps_are_mirrored_back(dtype: torch.dtype) -> None:
    def fn(views: Tensor) -> Any:
        return {"maps": views, "means": (views.mean((1, 2, 3)), "text"), "columns": views[:, 0, 0]}

    given = images(dtype=dtype)
    found = average_over_views(fn, given)
    assert torch.equal(found["maps"], given) and found["means"][1] == "text"
    assert found["means"][0].dtype == dtype
    torch.testing.assert_close(found["means"][0], given.mean((1, 2, 3)))
    torch.testing.assert_close(found["columns"], (given[:, 0, 0] + given[:, 0, 0].flip(-1)) / 2)  # no maps: (N, W)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("settings", SETTINGS[:3])
def test_evaluation_and_prediction_use_means(settings: dict[str, Any], compiled: bool) -> None:
    state, step = make_state(), compose(loop_events, [alg.test_time_averaging(**settings)])
    step = pc.compile(step, backend="eager", quiet=True) if compiled else step
    net = pc.to_module(state).eval()
    with torch.no_grad():
        expected = [by_hand(net, inputs, **settings) for inputs, _ in data()]
    for outputs, own in zip(predict(state, data(), step=step), expected, strict=True):
        torch.testing.assert_close(outputs, own)
        assert not torch.allclose(outputs, net(images(len(own))), rtol=1e-3)
    loss = F.cross_entropy(torch.cat(expected), torch.cat([targets for _, targets in data()]))
    assert evaluate(state, data(), step=step)["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_training_is_the_same_bit_for_bit_and_evaluators_of_fit_use_means() -> None:
    method = alg.test_time_averaging(shift=1)
    plain, history = compose(loop_events, []), pc.observers.History()
    ends = []
    for step in (plain, compose(loop_events, [method])):
        history = pc.observers.History()
        ends.append(pc.fit(step, make_state(), data() * 2, evaluate=Evaluator(data()), observers=[history]))
    assert_same(ends[0].replace(metrics={}), ends[1].replace(metrics={}))
    _, values = history.series("eval/loss")
    step = compose(loop_events, [method])
    assert values[-1] == pytest.approx(evaluate(ends[1], data(), step=step)["loss"], rel=1e-6)
    assert values[-1] != pytest.approx(evaluate(ends[1], data())["loss"], rel=1e-4)


@pytest.mark.parametrize("first", [False, True])
def test_averaged_weights_serve_for_all_views(first: bool) -> None:
    methods = [alg.ema("2ba"), alg.test_time_averaging(shift=1)]
    step = compose(loop_events, methods[::-1] if first else methods)
    state = step.init(make_state())
    for batch in data() * 2:
        state = step(state, batch)
    net = pc.to_module(state, weights="ema").eval()
    with torch.no_grad():
        expected = by_hand(net, images(), shift=1)
    torch.testing.assert_close(predict(state, data()[:1], step=step)[0], expected)


def test_members_of_a_population_are_evaluated_as_alone() -> None:
    states = [make_state(key=key) for key in (0, 1)]
    step = compose(loop_events, [alg.test_time_averaging()])
    many = predict(pc.stack_states(states), data(), step=pc.population(step, 2))[0]
    alone = torch.stack([predict(state, data(), step=step)[0] for state in states])
    torch.testing.assert_close(many, alone)


def test_a_field_of_a_batch_that_the_network_reads_whole() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, pixels: Tensor, scale: Tensor) -> Tensor:
            return self.net(pixels) * scale[:, None]

    net = Scaled()
    state = make_state(net, input_field="inputs", target_field="labels")
    step = compose(loop_events, [alg.test_time_averaging(input_field=_pixels())])
    inputs = {"pixels": images(), "scale": torch.arange(4.0)}
    found = predict(state, [{"inputs": inputs, "labels": torch.arange(4) % 3}], step=step)[0]
    net.eval()
    with torch.no_grad():
        expected = (net(images(), inputs["scale"]) + net(images().flip(-1), inputs["scale"])) / 2
    torch.testing.assert_close(found, expected)


def _pixels() -> Any:
    def put(batch: Any, value: Tensor) -> Any:
        return {**batch, "inputs": {**batch["inputs"], "pixels": value}}

    return (lambda batch: batch["inputs"]["pixels"]), put


def test_no_view_is_computed_without_need() -> None:
    calls = []

    def noting(views: Tensor) -> Tensor:
        calls.append(views)
        return views.sum((1, 2, 3))

    for mirror, shift, number in ((True, 0, 2), (True, 1, 6), (False, 1, 3), (False, 0, 1)):
        calls.clear()
        average_over_views(noting, images(), mirror=mirror, shift=shift)
        assert len(calls) == number


@pytest.mark.parametrize(
    ("fn", "given", "shift", "error", "words"),
    [
        (lambda views: views.mean((1, 2, 3)), images()[0], 0, TypeError, "expected images, one tensor"),
        (lambda views: views.mean((1, 2, 3)), images(), 6, ValueError, "a shift of less than the images' sides, got 6"),
        (lambda views: views, images(), 1, ValueError, "are maps of the images .*: leave out shift="),
        (lambda views: views.sum((1, 2, 3)).long(), images(), 0, TypeError, "expected outputs that are floating"),
    ],
)
def test_what_cannot_be_averaged_is_refused(fn: Any, given: Tensor, shift: int, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        average_over_views(fn, given, shift=shift)


def test_pytest_does_not_take_the_factory_for_a_test() -> None:
    assert vars(alg.test_time_averaging)["__test__"] is False
