"""Value embeddings: attention against a formula, new weights and their optimizer, and other methods beside it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import algorithms as alg, losses, optim
from purecompose.nn.layers import ClassesSecond, alibi_slopes
from purecompose.nn.models import GPT, gpt
from tests.algorithms.surgery_checks import applied, check_keeps_all


VOCABULARY, LENGTH = 7, 8


def make_net(**options: Any) -> Any:
    torch.manual_seed(0)
    return ClassesSecond(gpt(VOCABULARY, LENGTH, **{"width": 8, "depth": 3, "num_heads": 2, **options}))


def make_state(net: nn.Module, **options: Any) -> pc.State:
    options = {"optimizer": optim.sgd(0.1, momentum=0.9), "key": 3, "duration": "8ba", **options}
    return pc.State.create(net, loss=losses.cross_entropy, **options)


def make_batch(num: int = 4) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (num, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def by_hand(net: Any, params: dict[str, Tensor], ids: Tensor, *, is_alibi: bool = False) -> Tensor:
    """Return the logits (N, V, L) of the GPT, from matrices only; `mix.weight` says which blocks are changed."""
    inner, slopes = net.net, alibi_slopes(2).view(2, 1, 1)
    hidden = inner.tokens.weight[ids]
    if not is_alibi:
        hidden = hidden + inner.positions.weight[: ids.shape[1]]
    embedded = params["net.values.weight"][ids]
    places = torch.arange(ids.shape[1])
    for number, block in enumerate(inner.blocks):
        query, key, value = block.attention.qkv(block.norm1(hidden)).chunk(3, -1)
        own, other = params.get(f"net.blocks.{number}.attention.mix.weight", (1.0, 0.0))
        value = own * value + other * embedded
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (query, key, value))
        logits = query @ key.mT / 2
        if is_alibi:
            logits = logits - slopes * (places[:, None] - places).abs()
        weights = logits.masked_fill(places > places[:, None], -torch.inf).softmax(-1)
        hidden = hidden + block.attention.out((weights @ value).transpose(1, 2).flatten(2))
        hidden = hidden + block.feed_forward(block.norm2(hidden))
    return inner.head(inner.norm(hidden)).movedim(-1, 1)


@pytest.mark.parametrize("blocks", [(0, -1), (1,), (0, 1, 2)])
def test_values_are_mixed_with_embeddings_in_the_chosen_blocks(blocks: tuple[int, ...]) -> None:
    net, (ids, _) = make_net(), make_batch()
    state, report = applied(make_state(net), alg.value_embeddings(blocks))
    mixes = {f"net.blocks.{number % 3}.attention.mix.weight" for number in blocks}
    assert set(report.made) == {"net.values.weight", *mixes} and report.replaced == ("net",)
    count = sum(state.params[name].numel() for name in report.made)
    assert count == VOCABULARY * 8 + 2 * len(blocks)
    params = {**state.params, "net.values.weight": torch.randn(VOCABULARY, 8)}
    params |= {name: torch.tensor([0.3, 0.7 + at]) for at, name in enumerate(sorted(mixes))}
    changed = state.replace(params=params)
    torch.testing.assert_close(changed.forward(ids), by_hand(net, params, ids), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pc.to_module(changed)(ids), by_hand(net, params, ids), rtol=1e-4, atol=1e-5)


def test_new_weights_are_drawn_with_the_key_and_train() -> None:
    first, again, other = (applied(make_state(make_net(), key=key), alg.value_embeddings())[0] for key in (3, 3, 4))
    name = "net.values.weight"
    assert torch.equal(first.params[name], again.params[name])
    assert not torch.equal(first.params[name], other.params[name])
    assert 0.01 < float(first.params[name].std()) < 0.03
    step = pc.compose(pc.loop_events, [alg.value_embeddings()])
    start = step.init(make_state(make_net()))
    eager, compiled = step(start, make_batch()), pc.compile(step, backend="aot_eager", quiet=True)(start, make_batch())
    moved = [name for name in eager.params if not torch.equal(eager.params[name], start.params[name])]
    assert {name, "net.blocks.0.attention.mix.weight", "net.blocks.2.attention.mix.weight"} <= set(moved)
    for each in eager.params:
        torch.testing.assert_close(compiled.params[each], eager.params[each], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_and_their_memory_are_kept(is_tied: bool) -> None:
    step = pc.compose(pc.loop_events)
    net = make_net(is_tied=is_tied)
    net.net.positions.weight.requires_grad_(False)
    state = step(step.init(make_state(net)), make_batch())
    after, _ = check_keeps_all(state, alg.value_embeddings())
    module: Any = pc.to_module(after)
    assert (module.net.head.weight is module.net.tokens.weight) is is_tied


@pytest.mark.parametrize("methods", [[], [alg.qk_norm()], [alg.alibi(1)]], ids=["plain", "qk_norm", "alibi"])
def test_values_are_mixed_in_the_dtype_of_the_forward_pass(methods: list[pc.Algorithm]) -> None:
    """One example at a time, as by vmap, and a batch give the same gradients in half precision."""
    ends = []
    for each in ([], [alg.per_example_clipping(1e6)]):
        step = pc.compose(pc.loop_events, [*methods, alg.value_embeddings(), *each])
        ends.append(step(step.init(make_state(make_net(), precision="bf16")), make_batch()))
    for name, param in ends[0].params.items():
        torch.testing.assert_close(ends[1].params[name], param, rtol=1e-2, atol=1e-3)
    values, embedded = torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16), torch.zeros(1, 3, 8)
    net: Any = pc.to_module(ends[0])
    mix = net.net.blocks[0].attention.mix
    assert mix(values, embedded).dtype == torch.bfloat16 and mix(values.double(), embedded).dtype == torch.float64


def test_it_comes_after_linear_biases_whatever_the_list() -> None:
    net, (ids, _) = make_net(), make_batch()
    step = pc.compose(pc.loop_events, [alg.value_embeddings(), alg.alibi(1)])
    state = step.init(make_state(net))
    expected = by_hand(net, state.params, ids, is_alibi=True)
    torch.testing.assert_close(state.forward(ids), expected, rtol=1e-4, atol=1e-5)


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"value_embeddings: blocks=\(3,\): net has 3 blocks"):
        applied(make_state(make_net()), alg.value_embeddings((3,)))
    wrong: Any = 1
    with pytest.raises(TypeError, match=r"value_embeddings: blocks: expected numbers of blocks, such as \(0, -1\)"):
        alg.value_embeddings(wrong)
    methods = [alg.stochastic_depth(drop_rate=0.5), alg.value_embeddings()]
    with pytest.raises(ValueError, match="expected a TransformerBlock .*, got StochasticDepth"):
        pc.compose(pc.loop_events, methods).init(make_state(make_net()))
    state = pc.compose(pc.loop_events, methods[::-1]).init(make_state(make_net()))
    assert torch.isfinite(state.forward(make_batch()[0])).all()
    with pytest.warns(UserWarning, match="value_embeddings changed nothing: it looked for GPT"):
        applied(make_state(nn.Linear(2, 2)), alg.value_embeddings())


class Reversed(GPT):
    """A GPT whose blocks run from the last to the first."""

    def through_blocks(self, inputs: Tensor, tokens: Tensor) -> Tensor:
        del tokens
        for block in reversed(self.blocks):
            inputs = block(inputs)
        return inputs


def test_a_network_that_computes_in_its_own_way_is_not_changed() -> None:
    state = make_state(ClassesSecond(Reversed(VOCABULARY, LENGTH, 8, 2, 2, 0.0, is_tied=True)))
    with pytest.warns(UserWarning, match="kept all 1: none"):
        after, report = applied(state, alg.value_embeddings())
    assert after is state and not report.replaced
