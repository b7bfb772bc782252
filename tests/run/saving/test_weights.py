"""Exported weights: other programs read exactly the trained weights."""

import pathlib
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import purecompose as pc
from tests.helpers import assert_same, make_batch, make_cnn, make_mlp, make_state


def in_channels_last(net: nn.Module) -> nn.Module:
    return net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def test_weights_are_a_modules_state_dict(tmp_path: pathlib.Path) -> None:
    state = make_state(in_channels_last(make_cnn()))
    found = load_file(pc.saving.save_weights(state, tmp_path / "net.safetensors"))
    module = pc.to_module(state)
    assert {**dict(module.named_parameters()), **dict(module.named_buffers())}.keys() == found.keys()
    fresh = make_cnn(1)
    fresh.load_state_dict(found)
    inputs = make_batch(shape=(2, 6, 6))[0]
    torch.testing.assert_close(fresh.eval()(inputs), state.forward(inputs))
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]


def test_weights_come_back_into_a_state(tmp_path: pathlib.Path) -> None:
    state = make_state(in_channels_last(make_cnn(1)))
    path = pc.saving.save_weights(state, tmp_path / "net.safetensors")
    like = make_state(make_cnn())
    found = pc.saving.load_weights(path, like)
    assert_same({**found.params, **found.buffers}, {**state.params, **state.buffers})
    assert found.params["0.weight"].stride() == like.params["0.weight"].stride()
    assert found.opt_state is like.opt_state


def test_tied_weights_are_written_under_all_names(tmp_path: pathlib.Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    found = load_file(pc.saving.save_weights(make_state(net), tmp_path / "net"))
    assert list(found) == ["0.bias", "0.weight", "1.bias", "1.weight"]


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_that_are_not_finite_come_back(tmp_path: pathlib.Path, is_tied: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if is_tied:
        net[1].weight = net[0].weight
    state = make_state(net)
    state = state.replace(params={name: torch.full_like(p, torch.nan) for name, p in state.params.items()})
    path = pc.saving.save_weights(state, tmp_path / "net")
    assert_same(pc.saving.load_weights(path, make_state(net)).params, state.params)


def test_weights_that_do_not_fit_are_named(tmp_path: pathlib.Path) -> None:
    state, path = make_state(), tmp_path / "net.safetensors"
    with pytest.raises(FileNotFoundError):
        pc.saving.load_weights(path, state)
    path.write_bytes(b"no tensors")
    with pytest.raises(pc.errors.DamagedError, match="cannot be read as safetensors"):
        pc.saving.load_weights(path, state)
    other = {**state.params, "0.weight": torch.zeros(2), "extra": torch.zeros(1)}
    del other["0.bias"]
    save_file(other, path)
    with pytest.raises(pc.errors.MismatchError) as caught:
        pc.saving.load_weights(path, state)
    assert caught.value.differences == [
        "0.bias: float32[8] here, not in the file",
        "extra: in the file, not here",
        "0.weight: float32[2] in the file, float32[8, 4] here",
    ]
    with pytest.warns(pc.errors.CheckpointWarning, match="extra: in the file, not here"):
        found = pc.saving.load_weights(path, make_state(make_mlp(1)), strict=False)
    assert_same(found.params["3.weight"], state.params["3.weight"])
    assert_same(found.params["0.weight"], make_state(make_mlp(1)).params["0.weight"])


def test_live_weights_are_written_unless_averages_are_put_in_place_first(tmp_path: pathlib.Path) -> None:
    step = pc.compose(pc.loop_events, [pc.algorithms.ema("3ba")])
    state = step.init(make_state())
    for seed in range(3):
        state = step(state, make_batch(seed))
    averaged = pc.to_module(state, weights="ema").state_dict()
    assert not torch.equal(averaged["0.weight"], state.params["0.weight"])
    live = load_file(pc.saving.save_weights(state, tmp_path / "live"))
    written = load_file(pc.saving.save_weights(pc.surgery.with_weights(state, "ema"), tmp_path / "ema"))
    for name, param in state.params.items():
        assert_same(live[name], param)
        assert_same(written[name], averaged[name])
    assert pc.to_module(state).training


def test_a_failed_write_keeps_the_old_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pc.saving.save_weights(make_state(), tmp_path / "net")

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("purecompose.run.saving.folder.sync", fail)
    before = path.read_bytes()
    with pytest.raises(OSError, match="No space"):
        pc.saving.save_weights(make_state(make_mlp(1)), path)
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["net"]


def test_onnx_computes_what_the_state_does(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    state, inputs = make_state(make_cnn()), make_batch(shape=(2, 6, 6))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns about its own code
        path = pc.saving.export_onnx(state, inputs, tmp_path / "net.onnx")
    onnx.checker.check_model(str(path))
    session = reference.ReferenceEvaluator(str(path))
    (found,) = session.run(None, {session.input_names[0]: inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), state.forward(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_files_of_torch_save_are_recognised(tmp_path: pathlib.Path, options: dict[str, bool]) -> None:
    path = tmp_path / "w.pt"
    torch.save(torch.nn.Linear(2, 1).state_dict(), path, **options)
    with pytest.raises(pc.saving.DamagedError, match=r"was written by torch\.save, .*load_state_dict"):
        pc.saving.load_weights(path, make_state())
    with pytest.raises(TypeError, match="expected a path first, got State"):
        pc.saving.load_weights(make_state(), path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(pc.saving.CheckpointError, match="is a file; a checkpoint is a folder"):
        pc.load(path, make_state())
