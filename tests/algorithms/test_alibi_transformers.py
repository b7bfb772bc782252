"""Linear biases and gated units in Hugging Face's GPT-2, BERT and RoBERTa, small ones with weights drawn here."""

import copy
import math
import pickle
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import purecompose as pc
from purecompose import losses, optim
from purecompose.algorithms import alibi, gated_linear_units
from purecompose.nn.layers import GatedLinearUnit
from tests.algorithms.surgery_checks import applied, hooked, patched


# A new name of the argument, which earlier versions do not have.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


transformers: Any = pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")

if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("linear biases are for transformers 5 and later", allow_module_level=True)

VOCABULARY, LENGTH = 11, 8
KINDS = ("gpt2", "bert", "roberta")
BY = ("eager", "sdpa")


def make_net(kind: str, by: str = "sdpa", *, dropout: float = 0.0, **options: Any) -> Any:
    """Return a network with two layers of three heads, and eight positions."""
    # Larger weights than usual, so that logits are as large as biases.
    common = {
        "initializer_range": 0.5,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "attn_implementation": by,
        **options,
    }
    torch.manual_seed(0)
    if kind == "gpt2":
        rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
        config = transformers.GPT2Config(n_positions=LENGTH, n_embd=12, n_layer=2, n_head=3, **rates, **common)
        return transformers.GPT2LMHeadModel(config)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
    rates = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), dropout)
    if kind == "bert":
        config = transformers.BertConfig(max_position_embeddings=LENGTH, **sizes, **rates, **common)
        return transformers.BertForMaskedLM(config)
    config = transformers.RobertaConfig(max_position_embeddings=LENGTH + 2, pad_token_id=1, **sizes, **rates, **common)
    return transformers.RobertaForMaskedLM(config)


def make_state(net: nn.Module, **options: Any) -> pc.State:
    options = {"optimizer": optim.sgd(0.1, momentum=0.9), "key": 3, "duration": "8ba", "input_field": "*", **options}
    return pc.State.create(net, loss=losses.model_loss, target_field="labels", **options)


def with_biases(net: nn.Module) -> Any:
    """Return the network after the surgery as a separate module."""
    return pc.to_module(applied(make_state(net), alibi())[0]).eval()


def make_ids(num: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (num, length), generator=torch.Generator().manual_seed(seed))


def bert_by_hand(attention: nn.Module, hidden: Tensor, is_valid: Tensor) -> Tensor:
    """Return BERT's first attention output with biases -m |i - j|, in float64; `is_valid` (N, L) marks the tokens."""
    slopes = torch.tensor([2.0**-4, 2.0**-8, 2.0**-2], dtype=torch.float64)  # of three heads

    def heads(name: str) -> Tensor:
        layer: Any = attention.get_submodule(name)
        projected = hidden.double() @ layer.weight.double().T + layer.bias.double()
        return projected.unflatten(-1, (3, 4)).transpose(1, 2)

    places = torch.arange(hidden.shape[1])
    logits = heads("query") @ heads("key").mT / math.sqrt(4)
    logits = logits - slopes.view(3, 1, 1) * (places[:, None] - places).abs()
    weights = logits.masked_fill(~is_valid[:, None, None, :], -math.inf).softmax(-1)
    return (weights @ heads("value")).transpose(1, 2).flatten(2)


def attention_of(net: Any) -> Any:
    return net.bert.encoder.layer[0].attention.self


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(BY), st.integers(1, 14), st.integers(0, 3))
def test_bert_with_padding_is_the_formula(by: str, length: int, num_padded: int) -> None:
    net = with_biases(make_net("bert", by))
    is_valid = torch.ones(2, length, dtype=torch.bool)
    is_valid[1, max(1, length - num_padded) :] = False
    seen: list[Any] = []
    hook = lambda module, args, kwargs, output: seen.append((args[0], output[0]))  # noqa: E731
    attention_of(net).register_forward_hook(hook, with_kwargs=True)
    net(input_ids=make_ids(2, length), attention_mask=is_valid.long())
    (hidden, mixed) = seen[0]
    expected = bert_by_hand(attention_of(net), hidden, is_valid)
    torch.testing.assert_close(mixed.double()[is_valid], expected[is_valid], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_of_computing_agree_and_padding_is_not_seen(kind: str) -> None:
    eager, sdpa = (with_biases(make_net(kind, by)) for by in BY)
    ids, mask = make_ids(2, 13), torch.ones(2, 13, dtype=torch.int64)
    mask[1, 9:] = 0
    first, second = (net(input_ids=ids, attention_mask=mask).logits for net in (eager, sdpa))
    is_token = mask == 1
    torch.testing.assert_close(first[is_token], second[is_token], rtol=1e-4, atol=1e-5)
    alone = sdpa(input_ids=ids[1:, :9], attention_mask=mask[1:, :9]).logits
    torch.testing.assert_close(second[1:, :9], alone, rtol=1e-4, atol=1e-5)
    plain = sdpa(input_ids=ids).logits
    torch.testing.assert_close(plain, eager(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain[0], second[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by", BY)
def test_gpt2_is_causal_and_continues_from_its_cache(by: str) -> None:
    net, ids = with_biases(make_net("gpt2", by)), make_ids(2, 12)
    whole = net(input_ids=ids).logits
    other = ids.clone()
    other[:, 7] = (ids[:, 7] + 1) % VOCABULARY
    torch.testing.assert_close(net(input_ids=other).logits[:, :7], whole[:, :7], rtol=0, atol=0)
    start = net(input_ids=ids[:, :9], use_cache=True)
    for place in range(9, 12):
        start = net(input_ids=ids[:, place : place + 1], past_key_values=start.past_key_values, use_cache=True)
        torch.testing.assert_close(start.logits[:, 0], whole[:, place], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by", BY)
def test_gpt2_with_a_cache_of_one_size(by: str) -> None:
    net, ids = with_biases(make_net("gpt2", by)), make_ids(2, 12)
    whole = net(input_ids=ids).logits
    cache = transformers.StaticCache(config=net.config, max_cache_len=20)
    for first, last in ((0, 7), (7, 8), (8, 12)):
        logits = net(input_ids=ids[:, first:last], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(logits, whole[:, first:last], rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    fixed = net.generate(ids, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(fixed, net.generate(ids, **options))


def test_other_embeddings_of_gpt2_stay() -> None:
    _, report = applied(make_state(make_net("gpt2")), alibi())
    assert report.dropped == ("transformer.wpe.weight",)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_do_not_count(kind: str) -> None:
    net, ids = with_biases(make_net(kind)), make_ids()
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1)).expand(2, -1)
    assert torch.equal(net(input_ids=ids, position_ids=order + 1).logits, net(input_ids=ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_dropped_and_trained(kind: str) -> None:
    before = make_state(make_net(kind))
    step = pc.compose(pc.loop_events, [alibi(0.5)])
    after = step.init(before)
    gone = before.params.keys() - after.params.keys()
    assert len(gone) == 1 and all("wpe" in name or "position_embeddings" in name for name in gone)
    assert all(after.params[name] is before.params[name] for name in after.params)
    assert applied(after, alibi())[0] is after
    assert step.init(before).model == after.model
    ids = make_ids(4, 16)
    trained = step(after, {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)})
    assert trained.loss is not None and torch.isfinite(trained.loss)
    assert any(not torch.equal(trained.params[name], after.params[name]) for name in after.params)
    net = pc.to_module(trained).eval()
    expected = net(input_ids=ids).logits
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(input_ids=ids).logits, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gated_units(kind: str) -> None:
    net = make_net(kind)
    state, report = applied(make_state(net), gated_linear_units())
    assert len(report.replaced) == 2 and len(report.dropped) == 4 and len(report.made) == 4
    unit = next(module for module in state.model.module.modules() if isinstance(module, GatedLinearUnit))
    width = 48 if kind == "gpt2" else 20
    assert (unit.gate.in_features, unit.gate.out_features) == (12, width)
    assert applied(state, gated_linear_units())[0] is state
    module = pc.to_module(state).eval()
    units = [(name, one) for name, one in module.named_modules() if isinstance(one, GatedLinearUnit)]
    own = net.get_submodule(units[0][0].rpartition(".c_fc")[0] or units[0][0])
    act = own.act if kind == "gpt2" else own.intermediate_act_fn
    input = torch.randn(2, 3, 12)
    expected = act(input @ units[0][1].gate.weight.T) * (input @ units[0][1].linear.weight.T)
    torch.testing.assert_close(units[0][1](input), expected, rtol=1e-5, atol=1e-6)
    if kind == "gpt2":
        mlp: Any = module.get_submodule(units[0][0].rpartition(".")[0])
        torch.testing.assert_close(mlp(input), expected @ mlp.c_proj.weight + mlp.c_proj.bias, rtol=1e-4, atol=1e-6)


LAYERS = {
    "gpt2": ("GPT2MLP", "c_fc"),
    "bert": ("BertIntermediate", "dense"),
    "roberta": ("RobertaIntermediate", "dense"),
}


def of_kind(net: nn.Module, *kinds: str) -> list[Any]:
    """Return the modules of classes with these names."""
    return [module for module in net.modules() if type(module).__name__ in kinds]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [hooked, patched])
@pytest.mark.parametrize("is_inside", [True, False])
def test_gated_units_do_not_replace_modules_that_do_more_than_their_class(
    kind: str, change: Any, is_inside: bool
) -> None:
    net, (block, layer) = make_net(kind), LAYERS[kind]
    first, second = of_kind(net, block)
    change(getattr(first, layer) if is_inside else first)
    names = {module: name for name, module in net.named_modules()}
    _, report = applied(make_state(net), gated_linear_units())
    stays = kind != "gpt2" or is_inside or change is patched  # hooks of a block that is kept are kept, too
    assert report.replaced == tuple(names[one] for one in ([second] if stays else [first, second]))


@pytest.mark.parametrize("kind", KINDS)
def test_gated_units_of_one_frozen_layer_are_one_and_frozen(kind: str) -> None:
    net, (block, layer) = make_net(kind), LAYERS[kind]
    first, second = of_kind(net, block)
    setattr(second, layer, getattr(first, layer).requires_grad_(False))
    state, report = applied(make_state(net), gated_linear_units(where="*"))
    units = of_kind(pc.to_module(state), "GatedLinearUnit")
    assert len(units) == 2 and units[0].gate is units[1].gate and units[0].linear is units[1].linear
    assert len(report.made) == 2 and state.context.frozen == set(report.made)


@pytest.mark.parametrize("kind", KINDS)
def test_forwards_on_instances_would_win_over_biases(kind: str) -> None:
    for names in (
        ("GPT2Attention", "BertSelfAttention", "RobertaSelfAttention"),
        ("BertEmbeddings", "RobertaEmbeddings"),
    ):
        net = make_net(kind)
        found = of_kind(net, *names)
        if not found:
            assert kind == "gpt2"
            continue
        patched(found[0])
        with pytest.raises(ValueError, match=f"a {type(found[0]).__name__} of transformers: .* set on the instance"):
            with_biases(net)


def test_cross_attention_has_no_distances() -> None:
    state = make_state(make_net("gpt2", add_cross_attention=True))
    _, report = applied(state, alibi())
    assert not any("crossattention" in name for name in report.replaced) and len(report.replaced) == 3


def test_unsupported_settings_are_refused_with_a_reason() -> None:
    relative = make_net("bert", position_embedding_type="relative_key")
    with pytest.raises(ValueError, match="expected absolute positions, got 'relative_key'"):
        with_biases(relative)
    other = make_net("gpt2")
    other.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="got 'flash_attention_2'; load the network with attn_implementation='sdpa'"):
        with_biases(other)
    net = with_biases(make_net("bert"))
    with pytest.raises(
        ValueError, match=r"expected an attention mask \(N, 1, queries, keys\), got a torch.bool tensor"
    ):
        attention_of(net)(torch.zeros(2, 3, 12), attention_mask=torch.ones(2, 3, dtype=torch.bool))


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state(make_net("bert"))
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(ValueError, match="expected version 5 or later, got 4.57.1"):
        applied(state, alibi())


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind: str, by: str) -> None:
    net, ids = with_biases(make_net(kind, by)), make_ids(2, 12)
    expected = net(input_ids=ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        mixed = net(input_ids=ids).logits
    whole = copy.deepcopy(net).to(torch.bfloat16)(input_ids=ids).logits
    for logits in (mixed, whole):
        assert logits.dtype == torch.bfloat16
        assert (logits.float() - expected).norm() < 0.05 * expected.norm()
