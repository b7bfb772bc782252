"""The report of a batch: methods, losses of examples, conspicuous examples, norms of layers."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import purecompose as pc
from purecompose import algorithms as alg, compose, loop_events, optim
from purecompose.analysis import explain, explain_batch
from purecompose.analysis.explaining import shown_as
from tests.analysis.forms import FORMS, Form, digests, recorded
from tests.helpers import decay, loss_of, make_batch, make_batches, make_mlp, make_state, noise


LR = 0.1


def explained(batch=None, algorithms=(), **options):
    step = compose(loop_events, algorithms)
    state = step.init(make_state(optimizer=optim.sgd(LR), **options))
    return explain_batch(step, state, make_batch() if batch is None else batch), state


def test_norms_of_layers_are_those_of_a_plain_loop() -> None:
    found, state = explained()
    net = pc.to_module(state)
    inputs, targets = make_batch()
    loss = F.cross_entropy(net(inputs), targets)
    loss.backward()
    assert found.loss == pytest.approx(loss.item())
    for layer in found.layers:
        module = net.get_submodule(layer.name)
        assert isinstance(module, nn.Linear) and module.weight.grad is not None and module.bias.grad is not None
        grad = torch.cat([module.weight.grad.flatten(), module.bias.grad]).norm().item()
        weights = torch.cat([module.weight.flatten(), module.bias]).norm().item()
        assert layer[1:] == pytest.approx((weights, grad, LR * grad), rel=1e-5)
    assert [layer.name for layer in found.layers] == ["0", "3"]


def test_losses_of_examples_are_those_before_the_step_and_any_method() -> None:
    found, state = explained(algorithms=[noise(scale=5.0)], net=make_mlp(dropout=0.5))
    inputs, targets = make_batch()
    expected = F.cross_entropy(state.forward(inputs), targets, reduction="none")
    assert found.losses is not None
    torch.testing.assert_close(found.losses, expected)
    order = [one.index for one in found.examples]
    assert order == expected.argsort(descending=True).tolist()
    assert all(one.loss == pytest.approx(expected[one.index].item()) for one in found.examples)


def test_the_live_state_is_left_as_it_is() -> None:
    step = compose(loop_events, [decay()])
    state = step.init(make_state())
    before = state.copy()
    found = explain_batch(step, state, make_batch())
    assert pc.tree.equal(state, before) and found.state is not None
    assert pc.tree.diff(found.state, step(state, make_batch())) == []
    assert found.trace["decay", "batch_end"].amounts["params['0.weight']"] == pytest.approx(0.01, rel=1e-3)


def test_a_loss_of_whole_batches_is_measured_example_by_example() -> None:
    def total(outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        if reduction == "none":
            raise ValueError("only means")
        return F.cross_entropy(outputs, targets)

    found, state = explained(loss=total)
    inputs, targets = make_batch()
    assert found.losses is not None
    torch.testing.assert_close(found.losses, F.cross_entropy(state.forward(inputs), targets, reduction="none"))


def test_a_program_without_such_losses_has_the_rest_of_the_report() -> None:
    step, state, data = FORMS["gan"]()
    found = explain_batch(step, step.init(state), next(iter(data)))
    assert found.losses is None and found.unknown and "the losses of single examples are not known" in str(found)
    assert {layer.name for layer in found.layers} >= {"G.0", "D.0"}
    assert all(layer.update > 0 for layer in found.layers)


@pytest.mark.parametrize(
    ("field", "value", "note"),
    [(0, math.nan, "inputs are not finite"), (0, 1e6, "times the typical"), (1, -math.inf, "targets are not finite")],
)
def test_conspicuous_examples_come_first(field: int, value: float, note: str) -> None:
    batch = torch.randn(16, 4), torch.randn(16, 3).softmax(1)
    batch[field][5, 1] = value
    found, _ = explained(batch)
    worst = found.examples[0]
    assert worst.index == 5 and any(note in words for words in worst.notes) and worst.dataset_index is None
    assert found.num_examples == 16 and len(found.examples) == 8
    assert not found.examples[1].notes


def test_a_batch_of_a_run(tmp_path: Path) -> None:
    step, state, data = FORMS["ema"]()
    run, states = recorded(Form(step, state, data), tmp_path)
    before = digests(tmp_path)
    found = explain(run, "21ba")
    assert (found.batch, found.epoch) == (21, 1)
    assert found.state is not None and pc.tree.diff(found.state, states[21]) == []
    places = data.order(state.key, 1)[8 * 4 : 8 * 5]
    first = found.examples[0]
    assert first.dataset_index == places[first.index] and f"number {first.dataset_index} of the data" in first.name
    assert digests(tmp_path) == before
    # A batch with a checkpoint before and after it, and the first one.
    assert explain(run, 64).loss == float(loss_of(states[64])) and explain(run, 1).batch == 1
    with pytest.raises(ValueError, match="no batch led there; the first one is 1"):
        explain(run, 0)


def test_a_run_of_a_compiled_step_is_explained_uncompiled(tmp_path: Path) -> None:
    form = Form(pc.compile(compose(loop_events, [alg.ema("3ba")]), backend="eager"), make_state(), make_batches(5))
    run, states = recorded(form, tmp_path)
    found = explain(run, 7)
    assert found.loss == pytest.approx(float(loss_of(states[7])), rel=1e-5) and found.trace["ema", "batch_end"].ran


def test_the_page_has_all_parts(tmp_path: Path) -> None:
    inputs = torch.rand(4, 3, 5, 6)
    inputs[2, 0, 0, 0] = math.inf
    net = nn.Sequential(nn.Flatten(), nn.Linear(90, 3))
    found, _ = explained((inputs, torch.tensor([0, 1, 2, 0])), [noise("<noise>")], net=net)
    page = found.write(tmp_path / "page.html").read_text()
    assert page.count("data:image/png;base64,") == 4 and "inputs are not finite" in page
    assert "&lt;noise&gt;" in page and "<noise>" not in page and "batch[0]" in page
    assert "<script" not in page and "Batch 1" in page


def test_images_are_pictures_and_texts_are_decoded() -> None:
    image_module = pytest.importorskip("PIL.Image")
    import base64
    import io

    for channels, mode in ((1, "L"), (3, "RGB")):
        pixels = torch.arange(channels * 6, dtype=torch.uint8).reshape(channels, 2, 3)
        content = base64.b64decode(shown_as(pixels, None).picture.partition(",")[2])
        image = image_module.open(io.BytesIO(content))
        assert (image.mode, image.size) == (mode, (3, 2))
        assert list(image.tobytes()) == pixels.permute(1, 2, 0).flatten().tolist()
    assert shown_as(torch.tensor([1, 2]), lambda tokens: "".join("abc"[i] for i in tokens)).words == "bc"
    assert shown_as(torch.zeros(20), None) == ("float32[20] from 0 to 0", "")
    assert shown_as(torch.arange(12), None).words == "0 1 2 3 4 5 6 7 8 9 10 11"
    assert shown_as(None, None) == ("", "")


def test_examples_along_another_dimension() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.linear(inputs[-1])

    inputs, targets = torch.randn(5, 5, 3), torch.arange(5) % 2
    inputs[2, 4] = math.nan
    found, _ = explained((inputs, targets), net=Last(), batch_dim=1)
    assert found.examples[0].index == 4 and found.examples[0].notes[0] == "inputs are not finite"
