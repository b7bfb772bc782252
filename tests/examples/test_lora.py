"""LoRA: the example's step against a plain loop."""

import pytest
import torch
from torch import Tensor

import purecompose as pc
from examples import lora


pytest.importorskip("transformers", reason="transformers is not installed")


def plain_loop(num_batches: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    net = lora.with_adapters(lora.make_base()).to(dtype)
    batches = [lora.texts(seed, 3) for seed in range(100, 108)]
    optimizer = torch.optim.AdamW([param for param in net.parameters() if param.requires_grad], lr=0.02)
    for i in range(num_batches):
        optimizer.zero_grad()
        net(**batches[i % len(batches)]).loss.backward()
        optimizer.step()
    return {name: param.detach() for name, param in net.named_parameters()}


def test_lora_equals_a_plain_loop():
    step, start, batches = lora.make(torch.float64)
    trained = pc.fit(step, start, batches, duration="10ba")
    torch.testing.assert_close(trained.params, plain_loop(10), rtol=1e-9, atol=1e-9)


def test_adapters_alone_are_trained_and_remembered():
    _, state, _ = lora.make()
    assert all(name.endswith((".down", ".up")) for name in state.context.trainable)
    assert {*state.opt_state["exp_avg"]} == {*state.context.trainable}
