"""Tiny models of transformers, with weights drawn here, train and compile without changes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, losses, optim, tree


transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY, LENGTH = 13, 6


def gpt2(dropout: float = 0.0, **options: Any) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        **options,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def bert(dropout: float = 0.0, problem_type: str | None = "single_label_classification", **options: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
        problem_type=problem_type,
        **options,
    )
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


def batch_for(make_net: Any) -> dict[str, Tensor]:
    """Return sequences; the second half of the examples is padded by two tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[2:, -2:] = 0
    labels = tokens.masked_fill(mask == 0, -100) if make_net is gpt2 else tokens[:, 0] % 3
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def make_state(make_net: Any, dropout: float = 0.0, key: int = 0, **options: Any) -> State:
    net, optimizer = make_net(dropout, **options), optim.sgd(0.1)
    return State.create(net, loss=losses.model_loss, optimizer=optimizer, key=key, duration="4ba", batches_per_epoch=2)


def assert_near(one: State, other: State) -> None:
    near = tree.differences(one.params, other.params, tolerance=lambda _: tree.Tolerance(1e-4, 1e-6))
    assert list(map(str, near)) == []


def test_a_config_that_forward_completes_is_named():
    """BERT stores the kind of its loss in its config in the first pass, unless it is set before."""
    step = pc.compose(pc.loop_events, [])
    state = step.init(make_state(bert, problem_type=None))
    with pytest.warns(UserWarning, match=r"forward changed config\.problem_type"):
        after = step(state, batch_for(bert))
    told = step(step.init(make_state(bert)), batch_for(bert))
    assert tree.equal(after.params, told.params)


@pytest.mark.parametrize("make_net", [gpt2, bert])
def test_gradients_of_examples_with_padding_are_clipped_together_as_one_by_one(make_net):
    """A mask of padding is read, to find out whether it is needed, and has no single value under vmap."""
    batch = batch_for(make_net)
    methods = [pc.algorithms.per_example_clipping(0.1, chunk_size=size) for size in (None, 1)]
    steps = [pc.compose(pc.loop_events, [method]) for method in methods]
    together, one_by_one = (step(step.init(make_state(make_net)), batch) for step in steps)
    assert_near(together, one_by_one)


def assert_compiled_is_eager(state: State, batch: dict[str, Tensor], backend: str) -> None:
    step = pc.compose(pc.loop_events, [])
    state = step.init(state)
    compiled = pc.compile(step, backend=backend, donate=False, quiet=True)(state, batch)
    assert_near(compiled, step(state, batch))


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
TOKENS = {"vocab_size": VOCABULARY}
DEFAULTS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {**TOKENS, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "BertForMaskedLM": {**TOKENS, **SIZES},
    "T5ForConditionalGeneration": {**TOKENS, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2,
                                   "decoder_start_token_id": 0},
    "ViTForImageClassification": {**SIZES, "image_size": 8, "patch_size": 4},
    "LlamaForCausalLM": {**TOKENS, **SIZES},
}  # fmt: skip
"""The sizes of small networks; all else is as the configurations have it: caches of keys and values, dropout."""


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script", "ignore:forward changed config.problem_type")
@pytest.mark.parametrize("name", DEFAULTS)
def test_networks_of_default_configurations_compile(name, backend):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    net = kind(kind.config_class(**DEFAULTS[name]))
    tokens = torch.randint(3, VOCABULARY, (4, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    if name == "ViTForImageClassification":
        batch = {"pixel_values": torch.randn(4, 3, 8, 8), "labels": tokens[:, 0] % 2}
    optimizer = optim.sgd(0.1)
    state = State.create(net, loss=losses.model_loss, optimizer=optimizer, duration="4ba", batches_per_epoch=2)
    assert_compiled_is_eager(state, batch, backend)


@pytest.mark.parametrize("make_net", [gpt2, bert])
def test_built_in_metrics_read_logits_and_labels(make_net):
    net, batch = make_net(), batch_for(make_net)
    step = pc.compose(pc.loop_events, [pc.algorithms.training_metrics()], microbatches=2)
    state = step.init(make_state(make_net))
    metrics = {"accuracy": pc.metrics.accuracy, "perplexity": pc.metrics.perplexity()}
    found = pc.evaluate(state, [batch], metrics)
    with torch.no_grad():
        outputs = net.eval()(**batch)
    logits, labels = outputs.logits, batch["labels"]
    if make_net is gpt2:
        logits, labels = logits[:, :-1], labels[:, 1:]
    hits = (logits.argmax(-1) == labels)[labels != -100].double().mean()
    assert found["accuracy"] == pytest.approx(hits.item())
    assert found["perplexity"] == pytest.approx(outputs.loss.exp().item(), rel=1e-5)
    assert step(state, batch).metrics["train/accuracy"].item() == pytest.approx(hits.item())  # there is no dropout
    pair = pc.stack_states([state, state])
    both = pc.evaluate(pair, [batch], metrics, step=pc.population(step, 2))
    assert both["accuracy"] == pytest.approx([hits.item()] * 2)
