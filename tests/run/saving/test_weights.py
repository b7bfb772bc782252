"""Weights in files: those of a network's `state_dict()`, under all names of tied tensors."""

import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations

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


class Rotary(nn.Module):
    """Has a table that is not persistent, a plain constant, a list of tensors, and a persistent buffer."""

    inv_freq: Tensor
    mean: Tensor

    def __init__(self, theta: float = 1e4, scale: float = 5.0) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("inv_freq", theta ** -torch.linspace(0, 1, 4), persistent=False)
        self.register_buffer("mean", torch.tensor([0.0, 0.5, 0.25, 1.0]))
        self.scale = torch.tensor(scale)
        self.tables = [torch.full((2,), scale)]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head((inputs - self.mean) * self.inv_freq * self.scale + self.tables[0].sum())


class Tied(nn.Module):
    """One matrix under three names, as embedding, decoder and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decode, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.decode.weight = self.head.weight = self.embed.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.decode(self.embed(inputs)))


class Various(nn.Module):
    """Containers of parameters, a frozen one, a complex one, integer and scalar buffers, and a module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(2), torch.randn(3, 1)])
        self.named = nn.ParameterDict({"one": torch.randn(2)})
        self.fixed = nn.Parameter(torch.randn(2), requires_grad=False)
        self.waves = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([[True], [False]]))
        self.register_buffer("nothing", None)
        self.first = self.second = nn.Linear(2, 2)


def seeded(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return make()

    return made


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "batch norm": make_cnn,
    "channels last": lambda seed: make_cnn(seed).to(memory_format=torch.channels_last),  # pyright: ignore
    "settings": seeded(Rotary),
    "ties": seeded(Tied),
    "various": seeded(Various),
    "weight norm": seeded(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)), nn.Tanh())),
    "spectral norm": seeded(lambda: nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)))),
    "orthogonal": seeded(lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)))),
    "attention": seeded(lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8), 2, nn.LayerNorm(8))),
    "recurrent": seeded(lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2)),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*it becomes a buffer")


def written(tensors: dict[str, Tensor], path: pathlib.Path) -> pathlib.Path:
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path)
    return path


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_exchanged_with_the_networks_own_state_dict(name: str, tmp_path: pathlib.Path) -> None:
    net, fresh, theirs = (NETWORKS[name](seed) for seed in (1, 2, 3))
    state = make_state(net)
    file = load_file(pc.saving.save_weights(state, tmp_path / "net"))
    assert_same(file, dict(net.state_dict()))
    fresh.load_state_dict(file)
    assert_same(dict(make_state(fresh).params), dict(state.params))

    like = make_state(net)
    found = pc.saving.load_weights(written(dict(theirs.state_dict()), tmp_path / "theirs"), like)
    assert_same(dict(pc.to_module(found).state_dict()), dict(theirs.state_dict()))
    assert_same(found.params, make_state(theirs).params)
    assert_same(like.params, state.params)  # not written into
    assert {name: t.stride() for name, t in found.params.items()} == {n: t.stride() for n, t in state.params.items()}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["embed.weight", "decode.weight", "head.weight"])
def test_one_name_of_a_tied_tensor_is_enough(name: str, strict: bool, tmp_path: pathlib.Path) -> None:
    theirs, state = NETWORKS["ties"](1), make_state(NETWORKS["ties"](0))
    names = {name, "embed.bias", "decode.bias"}
    path = written({key: value for key, value in theirs.state_dict().items() if key in names}, tmp_path / "net")
    assert_same(pc.saving.load_weights(path, state, strict=strict).params, make_state(theirs).params)


def test_names_that_are_tied_here_and_differ_in_the_file_are_refused(tmp_path: pathlib.Path) -> None:
    net = NETWORKS["ties"](0)
    path = written({**net.state_dict(), "head.weight": torch.ones(4, 4)}, tmp_path / "net")
    with pytest.raises(
        pc.errors.MismatchError, match=r"embed.weight: another value than head.weight in the file, tied"
    ):
        pc.saving.load_weights(path, make_state(net))


def test_a_file_may_have_a_narrower_dtype(tmp_path: pathlib.Path) -> None:
    narrow, wide = make_cnn(1).bfloat16(), make_state(make_cnn(0))
    path = written(dict(narrow.state_dict()), tmp_path / "net")
    found = pc.saving.load_weights(path, wide)
    assert found.params["0.weight"].dtype is torch.float32
    assert_same(found.params, make_state(narrow.float()).params)
    with pytest.raises(pc.errors.MismatchError, match="0.weight: float32.* in the file, bfloat16.* here"):
        pc.saving.load_weights(pc.saving.save_weights(wide, path), make_state(make_cnn().bfloat16()))


def test_a_compatible_older_form_is_read_as_by_torch(tmp_path: pathlib.Path) -> None:
    net, state = NETWORKS["weight norm"](1), make_state(NETWORKS["weight norm"](0))
    old = {"0.bias": "0.bias", "0.weight_g": "0.parametrizations.weight.original0"}
    old |= {"0.weight_v": "0.parametrizations.weight.original1"}
    path = written({name: net.state_dict()[new] for name, new in old.items()}, tmp_path / "net")
    assert_same(pc.saving.load_weights(path, state).params, make_state(net).params)


def test_settings_of_the_code_are_kept_and_their_differences_reported(tmp_path: pathlib.Path) -> None:
    trained, state = make_state(Rotary(theta=1e4, scale=0.0)), make_state(Rotary(theta=1e6))
    path = pc.saving.save_weights(trained, tmp_path / "net")
    assert sorted(load_file(path)) == ["head.bias", "head.weight", "mean"]
    expected = r"inv_freq: float32\[4\] \(1, .*\) #\w+ in the file, float32\[4\] \(1, .*\) #\w+ here"
    with pytest.warns(pc.errors.CheckpointWarning, match=expected) as caught:
        found = pc.saving.load_weights(path, state)
    assert str(caught[0].message).count(" in the file, ") == 3
    assert "build them with the values to use, or make them persistent buffers" in str(caught[0].message)
    assert_same(found.params, trained.params)
    assert found.buffers["scale"] == 5 and found.buffers["tables.0"].tolist() == [5, 5]
    assert_same(found.buffers["inv_freq"], state.buffers["inv_freq"])


def test_a_table_in_a_file_of_another_program_is_compared(tmp_path: pathlib.Path) -> None:
    state = make_state(Rotary())
    both: dict[str, Any] = dict(pc.to_module(state).state_dict())
    path = written({**both, "inv_freq": state.buffers["inv_freq"]}, tmp_path / "net")
    assert_same(pc.saving.load_weights(path, state).buffers, state.buffers)
    with pytest.warns(pc.errors.CheckpointWarning, match="inv_freq: .* in the file"):
        found = pc.saving.load_weights(written({**both, "inv_freq": torch.zeros(4)}, path), state)
    assert_same(found.buffers, state.buffers)


def test_the_tensors_of_a_loss_are_not_those_of_the_network(tmp_path: pathlib.Path) -> None:
    state = make_state(nn.Linear(4, 3), loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])))
    path = pc.saving.save_weights(state, tmp_path / "net")
    assert sorted(load_file(path)) == ["bias", "weight"]
    assert_same(pc.saving.load_weights(path, state).buffers, state.buffers)
