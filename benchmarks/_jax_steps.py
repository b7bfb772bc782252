"""The networks of `peers.py` in JAX, with the weights of torch's, and one jitted, donated step of SGD with momentum.

Parameters are a flat dictionary by torch's names; images are channels-last, as JAX's users keep them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import optax  # pyright: ignore[reportMissingImports]
from _subjects import Subject


Arrays = dict[str, Any]


def linear(p: Arrays, name: str, x: Any) -> Any:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def mlp(p: Arrays, buffers: Arrays, x: Any) -> tuple[Any, Arrays]:
    x = jax.nn.relu(linear(p, "0", x))
    x = jax.nn.relu(linear(p, "2", x))
    return linear(p, "4", x), buffers


def convolution(p: Arrays, name: str, x: Any, stride: int = 1, padding: str | int = 0) -> Any:
    weight = p[f"{name}.weight"]
    return jax.lax.conv_general_dilated(
        x, weight, (stride, stride), [(padding, padding)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(p: Arrays, old: Arrays, new: Arrays, name: str, x: Any) -> Any:
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    num = x.size // x.shape[-1]
    for key, value in (("running_mean", mean), ("running_var", var * num / (num - 1))):
        new[f"{name}.{key}"] = 0.9 * old[f"{name}.{key}"] + 0.1 * value
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def resnet8(p: Arrays, buffers: Arrays, x: Any) -> tuple[Any, Arrays]:
    new: Arrays = {}

    def normed(conv: str, norm: str, x: Any, stride: int = 1) -> Any:
        padding = p[f"{conv}.weight"].shape[0] // 2
        return batch_norm(p, buffers, new, norm, convolution(p, conv, x, stride, padding))

    x = jax.nn.relu(normed("0", "1", x))
    for number, stride in ((3, 1), (4, 2), (5, 2)):
        inner = jax.nn.relu(normed(f"{number}.branch.0", f"{number}.branch.1", x, stride))
        inner = normed(f"{number}.branch.3", f"{number}.branch.4", inner)
        shortcut = normed(f"{number}.shortcut.0", f"{number}.shortcut.1", x, stride) if stride > 1 else x
        x = jax.nn.relu(inner + shortcut)
    return linear(p, "8", x.mean((1, 2))), new


def layer_norm(p: Arrays, name: str, x: Any) -> Any:
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def blocks(p: Arrays, prefix: str, x: Any, *, is_causal: bool, num_heads: int = 4, depth: int = 2) -> Any:
    for number in range(depth):
        name = f"{prefix}blocks.{number}"
        heads = linear(p, f"{name}.attention.qkv", layer_norm(p, f"{name}.norm1", x))
        query, key, value = jnp.moveaxis(heads.reshape(*x.shape[:2], 3, num_heads, -1), 2, 0)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=is_causal)
        x = x + linear(p, f"{name}.attention.out", mixed.reshape(x.shape))
        hidden = linear(p, f"{name}.feed_forward.up", layer_norm(p, f"{name}.norm2", x))
        x = x + linear(p, f"{name}.feed_forward.down", jax.nn.gelu(hidden, approximate=False))
    return layer_norm(p, f"{prefix}norm", x)


def gpt(p: Arrays, buffers: Arrays, tokens: Any) -> tuple[Any, Arrays]:
    x = p["net.tokens.weight"][tokens] + p["net.positions.weight"]
    return blocks(p, "net.", x, is_causal=True) @ p["net.tokens.weight"].T, buffers


def vit(p: Arrays, buffers: Arrays, images: Any) -> tuple[Any, Arrays]:
    x = convolution(p, "patches", images, stride=p["patches.weight"].shape[0]) + p["patches.bias"]
    x = x.reshape(x.shape[0], -1, x.shape[-1]) + p["positions.weight"]
    return linear(p, "head", blocks(p, "", x, is_causal=False).mean(1)), buffers


NETWORKS = {"MLP": mlp, "ResNet-8": resnet8, "GPT": gpt, "ViT": vit}


def _mixed(key: Any, inputs: Any, dense: Any) -> tuple[Any, Any]:
    """MixUp, where the inputs are numbers, and label smoothing."""
    if jnp.issubdtype(inputs.dtype, jnp.floating):
        for_share, for_order = jax.random.split(key)
        share = jax.random.beta(for_share, 0.2, 0.2)
        share = jnp.minimum(share, 1 - share)
        order = jax.random.permutation(for_order, len(inputs))
        inputs = (1 - share) * inputs + share * inputs[order]
        dense = (1 - share) * dense + share * dense[order]
    return inputs, dense * 0.9 + 0.1 / dense.shape[-1]


def start(network: str, subject: Subject, mix: bool, lr: float, momentum: float) -> tuple[Callable[..., Any], Any, Any]:
    """The step, `(state, batch) -> (state, loss)`, with its first state and the batch."""
    forward, optimizer = NETWORKS[network], optax.sgd(lr, momentum=momentum)
    params = {name: _array(p.detach(), (2, 3, 1, 0)) for name, p in subject.net.named_parameters()}
    buffers = {name: _array(b, ()) for name, b in subject.net.named_buffers() if b.is_floating_point()}

    def loss_fn(params: Arrays, buffers: Arrays, key: Any, inputs: Any, targets: Any) -> Any:
        if mix:
            inputs, dense = _mixed(key, inputs, jax.nn.one_hot(targets, subject.num_classes))
            logits, buffers = forward(params, buffers, inputs)
            return optax.softmax_cross_entropy(logits, dense).mean(), buffers
        logits, buffers = forward(params, buffers, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(), buffers

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        params, buffers, opt_state, key = state
        key, own = jax.random.split(key)
        (loss, buffers), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, buffers, own, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), buffers, opt_state, key), loss

    state = params, buffers, optimizer.init(params), jax.random.key(0)
    return step, state, (_array(subject.inputs, (0, 2, 3, 1)), _array(subject.targets, ()))


def _array(tensor: Any, order: tuple[int, ...]) -> Any:
    """The tensor in JAX; one of four dims with its dims in this order."""
    return jnp.array((tensor.permute(order) if tensor.ndim == 4 else tensor).contiguous().numpy())
