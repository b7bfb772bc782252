"""Normalised queries and keys, and other activations, in Hugging Face's GPT-2, BERT and RoBERTa."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import algorithms as alg, losses, optim
from purecompose.nn.layers import GatedLinearUnit, SquaredReLU
from tests.algorithms.surgery_checks import applied


# A new name of the argument, which earlier versions do not have.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")

transformers: Any = pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")

VOCABULARY = 11
KINDS = ("gpt2", "bert", "roberta")


def make_net(kind: str) -> Any:
    """Return a network with two layers of three heads; its weights are larger than usual."""
    torch.manual_seed(0)
    common = {"initializer_range": 0.5, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
    if kind == "gpt2":
        rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        config = transformers.GPT2Config(n_positions=16, n_embd=12, n_layer=2, n_head=3, **rates, **common)
        return transformers.GPT2LMHeadModel(config)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
    rates = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0)
    config, network = {
        "bert": (transformers.BertConfig, transformers.BertForMaskedLM),
        "roberta": (transformers.RobertaConfig, transformers.RobertaForMaskedLM),
    }[kind]
    return network(config(max_position_embeddings=18, pad_token_id=1, **sizes, **rates, **common))


def changed(net: nn.Module, *methods: pc.Algorithm) -> Any:
    """Return the network after the methods' INIT, in evaluation mode, and check that they act once."""
    state = pc.State.create(net, loss=losses.model_loss, optimizer=optim.sgd(0.1), input_field="*", duration="8ba")
    for method in methods:
        after, report = applied(state, method)
        assert len(report.replaced) == 2 and not report.made and after.params.keys() == state.params.keys()
        assert applied(after, method)[0].model == after.model
        state = after
    return pc.to_module(state).eval()


def make_ids(num: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, VOCABULARY, (num, length), generator=torch.Generator().manual_seed(0))


def heads_of(net: Any, kind: str, hidden: Tensor) -> tuple[Any, list[Tensor]]:
    """Return the first attention, and its queries, keys and values before the norm, in float64: (N, H, L, 4)."""
    if kind == "gpt2":
        attention = net.transformer.h[0].attn
        layers = (attention.c_attn.weight.double(), attention.c_attn.bias.double())
        parts = (hidden.double() @ layers[0] + layers[1]).chunk(3, -1)
    else:
        attention = getattr(net, kind).encoder.layer[0].attention.self
        layers = [attention.get_submodule(name) for name in ("query", "key", "value")]
        parts = [hidden.double() @ one.weight.double().T + one.bias.double() for one in layers]
    return attention, [part.unflatten(-1, (3, 4)).transpose(1, 2) for part in parts]


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_normalised_attention_is_the_formula(kind: str, scale: float | None) -> None:
    net = make_net(kind).eval()
    hidden = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1))
    _, (query, key, value) = heads_of(net, kind, hidden)
    attention, _ = heads_of(changed(net, alg.qk_norm(0.01, scale=scale)), kind, hidden)
    query, key = (x / (x.square().mean(-1, keepdim=True) + 0.01).sqrt() for x in (query, key))
    logits = query @ key.mT * (0.5 if scale is None else scale)  # 1 / sqrt(4)
    if kind == "gpt2":
        logits = logits.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    expected = (logits.softmax(-1) @ value).transpose(1, 2).flatten(2)
    if kind == "gpt2":
        expected = expected @ attention.c_proj.weight.double() + attention.c_proj.bias.double()
    torch.testing.assert_close(attention(hidden)[0].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_first", [True, False])
def test_gpt2_continues_from_its_cache_also_with_biases(is_first: bool) -> None:
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("linear biases are for transformers 5 and later")
    state = pc.State.create(
        make_net("gpt2"), loss=losses.model_loss, optimizer=optim.sgd(0.1), input_field="*", duration="8ba"
    )
    for method in [alg.qk_norm(), alg.alibi(1)][:: 1 if is_first else -1]:
        state = applied(state, method)[0]
    net: Any = pc.to_module(state).eval()
    ids = make_ids(length=12)
    whole = net(input_ids=ids).logits
    start = net(input_ids=ids[:, :7], use_cache=True)
    rest = net(input_ids=ids[:, 7:], past_key_values=start.past_key_values).logits
    torch.testing.assert_close(torch.cat([start.logits, rest], 1), whole, rtol=1e-4, atol=1e-4)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(input_ids=ids).logits, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_activations(kind: str) -> None:
    net = changed(make_net(kind), alg.activation())
    input = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(1))
    if kind == "gpt2":
        block = net.transformer.h[0].mlp
        hidden = (input @ block.c_fc.weight + block.c_fc.bias).clamp(min=0) ** 2
        expected = hidden @ block.c_proj.weight + block.c_proj.bias
    else:
        block = getattr(net, kind).encoder.layer[0].intermediate
        expected = (input @ block.dense.weight.T + block.dense.bias).clamp(min=0) ** 2
    torch.testing.assert_close(block(input), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_gates(kind: str) -> None:
    state = pc.State.create(
        make_net(kind), loss=losses.model_loss, optimizer=optim.sgd(0.1), input_field="*", duration="8ba"
    )
    net: Any = pc.to_module(applied(applied(state, alg.gated_linear_units())[0], alg.activation())[0])
    units = [module for module in net.modules() if isinstance(module, GatedLinearUnit)]
    assert len(units) == 2 and all(isinstance(unit.act, SquaredReLU) for unit in units)
    if kind == "gpt2":
        assert all(isinstance(block.mlp.act, nn.Identity) for block in net.transformer.h)
