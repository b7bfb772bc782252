"""Weights of tiny models of transformers and PEFT are exchanged with their own `state_dict()` and `save_pretrained`."""

import importlib
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, optim
from tests.foreign.foreign_libraries import BERT, LLAMA, T5, VISION, VOCABULARY, from_transformers
from tests.helpers import assert_same


pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

GPT2 = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "Llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "BERT": ("BertForMaskedLM", "BertConfig", {**BERT, "num_labels": 2}),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "ViT": ("ViTForImageClassification", "ViTConfig", VISION),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
}


def pretrained(name: str) -> Callable[..., nn.Module]:
    def make(seed: int, **options: Any) -> nn.Module:
        torch.manual_seed(seed)
        model, config, settings = MODELS[name]
        return from_transformers(model, config, **{**settings, **options})

    return make


def adapted(seed: int) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    return peft.get_peft_model(pretrained("GPT-2")(seed), config)


def state_of(net: nn.Module) -> State:
    return State.create(net, loss=pc.losses.model_loss, optimizer=optim.sgd(0.1), key=0)


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("name", [*MODELS, "PEFT"])
def test_weights_are_exchanged_with_the_models_own_state_dict(name: str, tmp_path: pathlib.Path) -> None:
    make = adapted if name == "PEFT" else pretrained(name)
    net, fresh, theirs = make(1), make(2), make(3)
    state = state_of(net)
    file = load_file(pc.saving.save_weights(state, tmp_path / "net"))
    assert_same(file, tensors_of(net))
    fresh.load_state_dict(file)
    assert_same(state_of(fresh).params, state.params)

    save_file(tensors_of(theirs), tmp_path / "theirs")
    found = pc.saving.load_weights(tmp_path / "theirs", like=state)
    assert_same(dict(pc.to_module(found).state_dict()), tensors_of(theirs))
    assert found.context.frozen == state.context.frozen
    # A checkpoint, too, restores what another start has.
    pc.save(found, tmp_path / "whole")
    assert_same(pc.load(tmp_path / "whole", like=state).params, found.params)


@pytest.mark.parametrize("name", MODELS)
def test_files_of_save_pretrained_are_read_and_written(name: str, tmp_path: pathlib.Path) -> None:
    theirs, state = pretrained(name)(1), state_of(pretrained(name)(0))
    library: Any = theirs
    # transformers 5 writes some models under the names of older versions, which its own load_state_dict refuses.
    library.save_pretrained(tmp_path, **({"save_original_format": False} if name == "ViT" else {}))
    found = pc.saving.load_weights(tmp_path / "model.safetensors", like=state)
    assert_same(found.params, state_of(theirs).params)
    pc.saving.save_weights(found, tmp_path / "model.safetensors")
    again = getattr(importlib.import_module("transformers"), MODELS[name][0]).from_pretrained(tmp_path)
    assert_same(tensors_of(again), tensors_of(theirs))


def test_rotary_frequencies_are_those_of_the_code(tmp_path: pathlib.Path) -> None:
    old, new = (state_of(pretrained("Llama")(0, rope_parameters={"rope_type": "default", "rope_theta": theta}))
                for theta in (1e4, 1e6))  # fmt: skip
    name = "model.rotary_emb.inv_freq"
    assert not torch.equal(old.buffers[name], new.buffers[name])
    pc.save(old, tmp_path / "one")
    pc.saving.save_weights(old, tmp_path / "net")
    with pytest.warns(pc.errors.CheckpointWarning, match=f"{name}: .* in the checkpoint, .* here"):
        assert_same(pc.load(tmp_path / "one", like=new).buffers, new.buffers)
    with pytest.warns(pc.errors.CheckpointWarning, match=f"{name}: .* in the file, .* here"):
        assert_same(pc.saving.load_weights(tmp_path / "net", like=new).buffers, new.buffers)
