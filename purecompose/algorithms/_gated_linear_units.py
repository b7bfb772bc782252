"""Gated linear units: the first half of each feed-forward block becomes a product of two layers."""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from purecompose import surgery
from purecompose._support.checks import check_flag, shown
from purecompose.algorithms._parts.foreign import changed, stand_in
from purecompose.algorithms._parts.surgery import on_drawn_module, surgery_method
from purecompose.core.algorithm import Algorithm, factory
from purecompose.nn.layers._forms import is_plain, is_tied
from purecompose.nn.layers.attention import FeedForward
from purecompose.nn.layers.gated import GatedLinearUnit


__all__ = ["ACTIVATIONS", "apply_gated_linear_units", "gated_linear_units", "gated_linear_units_rules"]

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "gelu": nn.GELU,
        "identity": nn.Identity,
        "relu": nn.ReLU,
        "sigmoid": nn.Sigmoid,
        "silu": nn.SiLU,
        "tanh": nn.Tanh,
    }
)
"""The activations that have a name."""

_BERT, _GPT2, _ROBERTA = (f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "roberta"))


def gated_linear_units_rules(
    act_fn: str | Callable[[Tensor], Tensor] | None = None,
    gated_layer_bias: bool = False,
    non_gated_layer_bias: bool = False,
) -> surgery.Rules:
    """Return the rules of the surgery; see `gated_linear_units` for the settings.

    Raises:
        TypeError, ValueError: A setting of the wrong kind or an unknown name. When they are applied: a block without an
            activation.

    Example:
        >>> from purecompose import random
        >>> from purecompose.nn.model import from_module
        >>> model, params, buffers, _ = from_module(FeedForward(4, 6))
        >>> rules = gated_linear_units_rules("silu")
        >>> sorted(surgery.replace(model, rules, params, buffers, key=random.key(0)).params)
        ['down.bias', 'down.weight', 'up.gate.weight', 'up.linear.weight']
    """
    _check_act(act_fn)
    check_flag(gated_layer_bias, "gated_linear_units: gated_layer_bias")
    check_flag(non_gated_layer_bias, "gated_linear_units: non_gated_layer_bias")

    # What blocks with one first layer have in common, by that layer.
    made: WeakKeyDictionary[nn.Module, GatedLinearUnit] = WeakKeyDictionary()

    def unit(layer: nn.Linear, own_act: Any, site: surgery.Site) -> nn.Module:
        chosen: Any = ACTIVATIONS[act_fn]() if isinstance(act_fn, str) else copy.deepcopy(act_fn)
        act: Callable[[Tensor], Tensor] = own_act if chosen is None else chosen
        if not callable(act):
            raise ValueError(
                f"gated_linear_units: {site.name}: expected an activation, got {shown(act)}; name one by act_fn='gelu'"
            )
        # The weight of transformers' Conv1D is the other way round.
        width, features = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.mT.shape
        new = GatedLinearUnit(features, width, act, gate_bias=gated_layer_bias, linear_bias=non_gated_layer_bias)
        first = made.setdefault(layer, new)
        new.gate, new.linear = first.gate, first.linear
        for part in (new.gate, new.linear):
            part.requires_grad_(layer.weight.requires_grad)
        return new

    def feed_forward(module: FeedForward, site: surgery.Site) -> nn.Module | None:
        if not _computes_as(module, FeedForward) or not _is_free(module.up, nn.Linear, site):
            return None
        return changed(module, up=unit(module.up, module.act, site), act=nn.Identity())

    def intermediate(module: Any, site: surgery.Site) -> nn.Module | None:
        kind = _class_of(module, "BertIntermediate", "RobertaIntermediate")
        if not is_plain(module, kind) or not _is_free(module.dense, nn.Linear, site):
            return None
        return unit(module.dense, module.intermediate_act_fn, site)

    def gpt2(module: Any, site: surgery.Site) -> nn.Module | None:
        kinds = _class_of(module, "GPT2MLP"), _class_of(module.c_fc, "Conv1D")
        if not _computes_as(module, kinds[0]) or not _is_free(module.c_fc, kinds[1], site):
            return None
        return changed(module, c_fc=unit(module.c_fc, module.act, site), act=nn.Identity())

    return {
        GatedLinearUnit: None,
        FeedForward: feed_forward,
        stand_in(_BERT, "BertIntermediate"): intermediate,
        stand_in(_ROBERTA, "RobertaIntermediate"): intermediate,
        stand_in(_GPT2, "GPT2MLP"): gpt2,
    }


apply_gated_linear_units = on_drawn_module("gated_linear_units", gated_linear_units_rules)


@factory
def gated_linear_units(
    act_fn: str | Callable[[Tensor], Tensor] | None = None,
    gated_layer_bias: bool = False,
    non_gated_layer_bias: bool = False,
    *,
    name: str = "gated_linear_units",
) -> Algorithm:
    """Feed-forward blocks with a gate.

        act(W x + b)   becomes   act(G x) * (N x)

    What comes after it, dropout, the second linear layer, the residual and LayerNorm, stays as it is. G and N have the
    shape of W, are new, and come without biases unless asked for; each block has one matrix more than before. For as
    many parameters as before, build the network with 2/3 of the hidden width, a multiple of 8.

    It knows `layers.FeedForward`, of which `models.gpt` and `models.vit` are made, and the blocks of GPT-2, BERT and
    RoBERTa in Hugging Face's transformers. Blocks with a forward of their own stay, and those whose first layer has
    one, hooks, parametrized tensors, or a weight that is another layer's as well. Blocks that have their first layer in
    common have G and N in common, and those of a frozen layer are frozen.

    Events: INIT. Reads and replaces: the model, its parameters and the optimizer's state.

    Args:
        act_fn: The gate's activation: one of `ACTIVATIONS`, or a module or function, of which each block gets a
            copy. By default each block's own.
        gated_layer_bias: Whether G has a bias.
        non_gated_layer_bias: Whether N has a bias.
        name: Names it and the draws of new weights.

    Raises:
        TypeError, ValueError: A setting of the wrong kind or an unknown name. At INIT: a block without an activation.

    Warns:
        UserWarning: At INIT: the network has no feed-forward blocks that it knows.

    Example:
        >>> gated_linear_units("silu")
        gated_linear_units(act_fn='silu', gated_layer_bias=False, non_gated_layer_bias=False)

    References:
        Noam Shazeer: GLU Variants Improve Transformer. 2020. https://arxiv.org/abs/2002.05202
        Yann N. Dauphin, Angela Fan, Michael Auli, David Grangier: Language Modeling with Gated Convolutional Networks.
        2016. https://arxiv.org/abs/1612.08083
    """
    rules = gated_linear_units_rules(act_fn, gated_layer_bias, non_gated_layer_bias)
    settings = {
        "act_fn": act_fn,
        "gated_layer_bias": gated_layer_bias,
        "non_gated_layer_bias": non_gated_layer_bias,
    }
    return surgery_method(name, rules, settings)


def _class_of(module: nn.Module, *names: str) -> type[nn.Module]:
    """Return the module's class, or one that it comes from, with one of the names; `nn.Module` where there is none."""
    return next((kind for kind in type(module).__mro__ if kind.__name__ in names), nn.Module)


def _computes_as(block: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a block's forward is that of a class; hooks may be there, since they stay."""
    return type(block).forward is kind.forward and "forward" not in vars(block)


def _is_free(layer: nn.Module, kind: type[nn.Module], site: surgery.Site) -> bool:
    """Return whether nothing but what the layer computes is lost with it."""
    return is_plain(layer, kind) and not is_tied(layer, site.root)


def _check_act(act_fn: Any) -> None:
    known = ", ".join(map(repr, ACTIVATIONS))
    if isinstance(act_fn, str) and act_fn not in ACTIVATIONS:
        raise ValueError(f"gated_linear_units: act_fn: expected one of {known}, a module or a function, got {act_fn!r}")
    if act_fn is not None and not isinstance(act_fn, str) and (not callable(act_fn) or isinstance(act_fn, type)):
        raise TypeError(
            f"gated_linear_units: act_fn: expected one of {known}, a module or a function, got {shown(act_fn)}"
        )
