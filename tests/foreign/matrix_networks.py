"""The networks of the matrix: the library's own, and small ones of other libraries as far as they import."""

import functools
import importlib
from typing import Any

import torch
from torch import Generator, Tensor, nn

from purecompose import batch as batches
from purecompose.nn import layers, models
from tests.foreign import foreign_libraries
from tests.foreign.foreign_case import Case, classes
from tests.foreign.foreign_libraries import VOCABULARY, is_installed, photos


__all__ = ["COLUMNS", "HEADS", "MISSING", "Logits"]


class Logits(nn.Module):
    """A network of transformers with outputs (N, C, ...): its logits, without its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any, **inputs: Any) -> Tensor:
        return self.net(*args, **inputs).logits.movedim(-1, 1)


def sentences(g: Generator) -> tuple[Tensor, Tensor]:
    ids = classes(g, 4, 7, num=VOCABULARY)
    return ids[:, :-1], ids[:, 1:]


def own_gpt() -> nn.Module:
    return layers.ClassesSecond(models.gpt(VOCABULARY, 6, width=8, depth=2, num_heads=2, dropout=0.1))


def own_vit() -> nn.Module:
    return models.vit((3, 32, 32), 3, patch_size=8, width=16, depth=2, num_heads=2, dropout=0.1)


class GraphNet(nn.Module):
    """Layers of torch_geometric, and the mean over each graph's nodes."""

    def __init__(self) -> None:
        super().__init__()
        library = importlib.import_module("torch_geometric.nn")
        self.layers, self.head = library.GIN(4, 8, 2, dropout=0.1), nn.Linear(8, 3)
        self.pool = library.global_mean_pool

    def forward(self, graphs: Any) -> Tensor:
        nodes = self.layers(graphs.x, graphs.edge_index)
        return self.head(self.pool(nodes, graphs.batch, graphs.num_graphs))


def graphs(g: Generator) -> Any:
    library = importlib.import_module("torch_geometric.data")

    def graph() -> Any:
        edges = torch.randint(5, (2, 8), generator=g)
        return library.Data(x=torch.randn(5, 4, generator=g), edge_index=edges, y=classes(g, 1))

    return library.Batch.from_data_list([graph() for _ in range(4)])


def part(batch: Any, start: int, stop: int) -> Any:
    return type(batch).from_data_list(batch[start:stop])


SPLITTER = batches.Splitter(lambda batch: batch.num_graphs, part)
GRAPHS = {"input_field": batches.AS_ARGUMENT, "target_field": "y", "splitter": SPLITTER}


def torchvision_resnet() -> nn.Module:
    resnet = importlib.import_module("torchvision.models.resnet")
    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=3)


def cases() -> dict[str, tuple[str, Case | None]]:
    """Return the library and the case of each column; no case for libraries that do not import."""
    foreign = {case.name: case for case in foreign_libraries.CASES}
    found = {
        "ResNet-8": ("", Case("resnet8", functools.partial(models.resnet8, 3, 3, width=8), photos)),
        "ViT": ("", Case("vit", own_vit, photos)),
        "GPT": ("", Case("gpt", own_gpt, sentences)),
        "torchvision ResNet": ("torchvision", Case("torchvision ResNet", torchvision_resnet, photos)),
        "timm ResNet": ("timm", foreign.get("timm test_resnet")),
        "timm ViT": ("timm", foreign.get("timm vit_tiny_patch16_224")),
        "timm EfficientNet": ("timm", foreign.get("timm test_efficientnet")),
        "HF BERT": ("transformers", foreign.get("BertForSequenceClassification")),
        "HF GPT-2": ("transformers", foreign.get("GPT2LMHeadModel")),
        "HF Llama": ("transformers", foreign.get("LlamaForCausalLM")),
        "HF T5": ("transformers", foreign.get("T5ForConditionalGeneration")),
        "HF ViT": ("transformers", foreign.get("ViTForImageClassification")),
        "PyG GIN": ("torch_geometric", Case("PyG GIN", GraphNet, graphs, options=GRAPHS)),
    }
    return {head: (name, case if not name or is_installed(name) else None) for head, (name, case) in found.items()}


_CASES = cases()
HEADS = tuple(_CASES)
"""The heads of the columns."""

COLUMNS: dict[str, Case] = {head: case for head, (_, case) in _CASES.items() if case is not None}
"""The networks with their batches, by the heads of their columns."""

MISSING: dict[str, str] = {head: name for head, (name, case) in _CASES.items() if case is None}
"""The libraries of the other columns, which do not import."""
