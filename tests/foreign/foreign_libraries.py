"""Cases: tiny models, with weights drawn here, of transformers, timm and torchvision, if they are installed."""

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, nn

from purecompose import losses
from tests.foreign.foreign_case import Case, classes


VOCABULARY = 17
TINY = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = {**TINY, "intermediate_size": 16, "max_position_embeddings": 16, "num_labels": 3, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0}  # fmt: skip
LLAMA = {**TINY, "intermediate_size": 16, "num_key_value_heads": 1, "max_position_embeddings": 16, "head_dim": 4,
         "pad_token_id": 0, "use_cache": False}  # fmt: skip
VISION = {"image_size": 16, "patch_size": 8, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 16, "num_labels": 3, "hidden_dropout_prob": 0.0,
          "attention_probs_dropout_prob": 0.0}  # fmt: skip
T5 = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2,
      "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0, "use_cache": False}  # fmt: skip
BART = {"vocab_size": VOCABULARY, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 16,
        "dropout": 0.0, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
        "use_cache": False}  # fmt: skip


def is_installed(name: str) -> bool:
    """Return whether a library imports; an installed torchvision may not fit torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_geometric uses a deprecated function while it is imported
        try:
            importlib.import_module(name)
        except (ImportError, RuntimeError):
            return False
    return True


def from_transformers(model: str, config: str, **options: Any) -> nn.Module:
    library = importlib.import_module("transformers")
    return getattr(library, model)(getattr(library, config)(**options))


def texts(g: Generator, *, length: int = 6, causal: bool = False) -> dict[str, Tensor]:
    ids = 3 + classes(g, 4, length, num=VOCABULARY - 3)
    mask = torch.ones_like(ids)
    mask[1, length - 2 :] = 0
    ids = torch.where(mask > 0, ids, 1)
    labels = torch.where(mask > 0, ids, -100) if causal else classes(g, 4)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def translations(g: Generator) -> dict[str, Tensor]:
    batch = texts(g)
    return {**batch, "labels": torch.where(torch.rand(4, 4, generator=g) < 0.3, -100, 3 + classes(g, 4, 4, num=14))}


def pictures(g: Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 16, 16, generator=g), "labels": classes(g, 4)}


def photos(g: Generator, side: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, side, side, generator=g), classes(g, 4)


def unpacked(net: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    return net(**batch)


def hugging(
    name: str, config: str, make_batch: Callable[[Generator], Any], settings: Mapping[str, Any], **more: Any
) -> Case:
    """A model of transformers that computes its own loss."""
    make = functools.partial(from_transformers, name, config, **settings)
    return Case(name, make, make_batch, losses.model_loss, unpacked, rtol=1e-3, **more)


def transformers_cases() -> list[Case]:
    causal = functools.partial(texts, causal=True)
    gpt2 = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}  # fmt: skip
    distil = {"vocab_size": VOCABULARY, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "dropout": 0.0,
              "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "num_labels": 3,
              "max_position_embeddings": 16}  # fmt: skip
    neox = {**TINY, "intermediate_size": 16, "max_position_embeddings": 16, "use_cache": False}
    opt = {**TINY, "ffn_dim": 16, "max_position_embeddings": 16, "word_embed_proj_dim": 8, "dropout": 0.0,
           "pad_token_id": 1, "use_cache": False}  # fmt: skip
    convnext = {"num_stages": 2, "hidden_sizes": [8, 8], "depths": [1, 1], "num_labels": 3, "patch_size": 2}
    resnet = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "num_labels": 3, "layer_type": "basic"}
    swin = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
            "num_labels": 3, "drop_path_rate": 0.0}  # fmt: skip
    return [
        hugging("BertForSequenceClassification", "BertConfig", texts, BERT, inductor=True),
        hugging("BertForMaskedLM", "BertConfig", causal, {**BERT, "num_labels": 2}),
        hugging("BertForTokenClassification", "BertConfig", lambda g: {**texts(g), "labels": classes(g, 4, 6)}, BERT),
        hugging("DistilBertForSequenceClassification", "DistilBertConfig", texts, distil, adam=True),
        hugging("GPT2LMHeadModel", "GPT2Config", causal, gpt2, adam=True, inductor=True),
        hugging("GPTNeoXForCausalLM", "GPTNeoXConfig", causal, neox),
        hugging("OPTForCausalLM", "OPTConfig", causal, opt),
        hugging("LlamaForCausalLM", "LlamaConfig", causal, LLAMA),
        hugging("MistralForCausalLM", "MistralConfig", causal, LLAMA),
        hugging("Qwen2ForCausalLM", "Qwen2Config", causal, LLAMA),
        hugging("GemmaForCausalLM", "GemmaConfig", causal, LLAMA),
        hugging("T5ForConditionalGeneration", "T5Config", translations, T5),
        hugging("BartForConditionalGeneration", "BartConfig", translations, BART),
        hugging("ViTForImageClassification", "ViTConfig", pictures, VISION),
        hugging("DeiTForImageClassification", "DeiTConfig", pictures, VISION),
        hugging("ConvNextForImageClassification", "ConvNextConfig", pictures, convnext),
        hugging("SwinForImageClassification", "SwinConfig", pictures, swin),
        hugging("ResNetForImageClassification", "ResNetConfig", pictures, resnet,
                sliced="batch normalization sees slices"),
    ]  # fmt: skip


def timm_case(name: str, *, norm: bool = True, side: int = 32, **options: Any) -> Case:
    """A model of timm; with `norm` it has batch normalization."""

    def make() -> nn.Module:
        return importlib.import_module("timm").create_model(name, num_classes=3, **options)

    return Case(f"timm {name}", make, functools.partial(photos, side=side), rtol=1e-3,
                sliced="batch normalization sees slices" if norm else "")  # fmt: skip


def timm_cases() -> list[Case]:
    small = {"img_size": 32, "norm": False}
    return [
        timm_case("test_resnet"),
        timm_case("test_efficientnet", drop_rate=0.0),
        timm_case("convnext_atto", norm=False),
        timm_case("vit_tiny_patch16_224", depth=2, embed_dim=16, num_heads=2, **small),
        timm_case("deit_tiny_patch16_224", **small),
        timm_case("mixer_s32_224", **small),
    ]


def torchvision_cases() -> list[Case]:
    models = importlib.import_module("torchvision.models")
    bn = "batch normalization sees slices"

    def case(name: str, sliced: str = bn, side: int = 32, **options: Any) -> Case:
        make = functools.partial(getattr(models, name), num_classes=3, **options)
        return Case(f"torchvision {name}", make, functools.partial(photos, side=side), rtol=1e-3, sliced=sliced)

    return [
        case("resnet18"),
        case("mobilenet_v3_small", dropout=0.0),
        case("shufflenet_v2_x0_5", side=64),
        case("squeezenet1_1", "", 64, dropout=0.0),
    ]


_FAMILIES = {"transformers": transformers_cases, "timm": timm_cases, "torchvision": torchvision_cases}

CASES = [case for name, make in _FAMILIES.items() if is_installed(name) for case in make()]
MISSING = [name for name in _FAMILIES if not is_installed(name)]
"""Libraries whose cases are left out."""
