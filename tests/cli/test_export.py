"""`export`: files that other programs read compute what the run's network does, for other batch sizes too."""

import pathlib
from collections.abc import Callable

import pytest
import torch

import purecompose as pc
from purecompose.cli import load_run


Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporters


def test_files_compute_what_the_network_does(run: Run) -> None:
    reference = pytest.importorskip("onnx.reference")
    safetensors = pytest.importorskip("safetensors.torch")
    command = ("train", "--model", "cnn(width=4)", "--duration", "30ba", "--algorithms", "ema(half_life='3ba')")
    assert run(*command, "--quiet", "--out", "a")[0] == 0
    status, out, err = run("export", "a", "--out", "net.onnx", "--out", "net.pt2", "--out", "net.safetensors")
    assert status == 0 and out.splitlines()[1].endswith("ba00000030 in net.pt2"), err
    loaded = load_run("a")
    inputs, net = next(iter(loaded.test_data))[0][:5], pc.to_module(loaded.state).eval()
    with torch.no_grad():
        expected = net(inputs)
        torch.testing.assert_close(torch.export.load("net.pt2").module()(inputs), expected)
        session = reference.ReferenceEvaluator("net.onnx")
        (found,) = session.run(None, {session.input_names[0]: inputs.numpy()})
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)
        net.load_state_dict(safetensors.load_file("net.safetensors"))
        assert torch.equal(net(inputs), expected)
        assert run("export", "a", "--out", "ema.pt2", "--weights", "ema")[0] == 0
        averaged = pc.to_module(loaded.state, weights="ema").eval()(inputs)
        torch.testing.assert_close(torch.export.load("ema.pt2").module()(inputs), averaged)
        assert not torch.allclose(averaged, expected)
    status, _, err = run("export", "a", "--out", "ema.pt2", "--weights", "swa")
    assert status == 2 and "--weights: weights='swa': expected the name of an algorithm" in err


def test_a_text_model_is_exported(run: Run) -> None:
    pathlib.Path("book.txt").write_text("to be or not to be, " * 60)
    command = ("train", "--data", "book.txt", "--length", "16", "--model", "gpt(width=8,depth=1,num_heads=1)")
    assert run(*command, "--duration", "2ba", "--quiet", "--out", "a")[0] == 0
    status, _, err = run("export", "a", "--out", "net.pt2")
    assert status == 0, err
    loaded = load_run("a")
    inputs = torch.zeros(3, 16, dtype=torch.long)
    with torch.no_grad():
        expected = pc.to_module(loaded.state).eval()(inputs)
        torch.testing.assert_close(torch.export.load("net.pt2").module()(inputs), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "net.pkl"], "--out: net.pkl: expected a file name that ends in .onnx, .pt2, .safetensors"),
        (["--out", "no/net.pt2"], "--out: no/net.pt2: there is no folder no"),
        (["--out", "net.pt2"], "trained a population; only a single network can be exported"),
        (["--out", "net.pt2", "--checkpoint", "bset"], "trained a population"),
        ([], "the following arguments are required: --out"),
    ],
)
def test_what_cannot_be_exported_is_refused(arguments: list[str], message: str, run: Run) -> None:
    pathlib.Path("a").mkdir()
    pathlib.Path("a/config.toml").write_text("seeds = 2")
    status, _, err = run("export", "a", *arguments)
    assert status == 2 and message in err and err.count("\n") == 1
