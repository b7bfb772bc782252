"""Methods on linear layers: factorization, and gated linear units and activations in feed-forward blocks."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from purecompose import surgery
from purecompose._support.specs import shown
from purecompose.algorithms._parts import Where, changed, stand_in, surgery_method
from purecompose.core.algorithm import Algorithm, Trait, factory
from purecompose.nn.layers.replacing import (
    FactorizedConv2d,
    FactorizedLinear,
    check_latent,
    computes_as,
    is_plain,
    is_tied,
    latent_size,
    max_latent,
)
from purecompose.nn.layers.transformer import FeedForward, GatedLinearUnit, SquaredReLU
from purecompose.schedule.declared import Within


Least: TypeAlias = Annotated[int, Within(1)]
Latent: TypeAlias = Annotated[float, check_latent]


@factory
def factorize(
    factorize_convs: bool = True,
    factorize_linears: bool = True,
    min_channels: Least = 256,
    latent_channels: Latent = 0.25,
    min_features: Least = 256,
    latent_features: Latent = 128,
    *,
    where: Where = None,
    name: str = "factorize",
) -> Algorithm:
    """Replace wide layers by products of two thinner ones.

        linear, in -> out                      in -> k without bias, k -> out
        convolution, in -> out, kernel h x w   in -> k with h x w, its stride, padding and dilation; k -> out with 1 x 1

    The factors come from the truncated singular value decomposition of the layer's weight, so that the network
    continues from the closest function of this rank; at full rank it is the same function. The bias is kept.

    A layer is replaced if the smaller of its numbers of inputs and outputs (channels or features) reaches a minimum; if
    the two factors need fewer multiplications than the layer, k < F out / (F + out) with F the number of inputs of one
    output; and if it has one group, a weight that is not shared, no hooks, and no forward set on the instance.

    Events: INIT, after the methods that look for complete layers (`Trait.REPLACES_LAYERS`). Reads and replaces: the
    model, its parameters and the optimizer's state.

    Args:
        factorize_convs: Replace convolutions.
        factorize_linears: Replace linear layers.
        min_channels: The least number of input channels and of output channels of a convolution that is replaced.
        latent_channels: The number of channels between the factors of a convolution, k: an integer of at least 1, or,
            if below 1, a share of the smaller of its numbers of input and output channels, rounded down, at least 1.
        min_features: As `min_channels`, for the features of linear layers.
        latent_features: As `latent_channels`, for the features of linear layers.
        where: Patterns (`fnmatch`) of modules to change, with all that they contain; by default all but frozen parts.
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no layers that factorizing makes faster.

    Example:
        >>> factorize(factorize_linears=False, latent_channels=0.5).config["latent_channels"]
        0.5

    References:
        Xiangyu Zhang et al.: Accelerating Very Deep Convolutional Networks for Classification and Detection. TPAMI
        2016. https://arxiv.org/abs/1505.06798
    """

    def conv(module: nn.Conv2d, site: surgery.Site) -> nn.Module | None:
        smaller = min(module.in_channels, module.out_channels)
        latent = latent_size(latent_channels, smaller)
        is_wanted = _is_itself(module, nn.Conv2d) and module.groups == 1 and smaller >= min_channels
        return FactorizedConv2d(module, latent) if is_wanted and _is_worth_it(module, latent, site) else None

    def linear(module: nn.Linear, site: surgery.Site) -> nn.Module | None:
        smaller = min(module.in_features, module.out_features)
        latent = latent_size(latent_features, smaller)
        is_wanted = _is_itself(module, nn.Linear) and smaller >= min_features
        return FactorizedLinear(module, latent) if is_wanted and _is_worth_it(module, latent, site) else None

    rules: dict[type[nn.Module], surgery.Rule | None] = {FactorizedConv2d: None, FactorizedLinear: None}
    if factorize_convs:
        rules[nn.Conv2d] = conv
    if factorize_linears:
        rules[nn.Linear] = linear
    is_neutral = not factorize_convs and not factorize_linears
    traits = frozenset({Trait.REQUIRED_ON_LOAD})
    method = surgery_method(name, rules, where, is_neutral=is_neutral, traits=traits)
    # Methods that look for complete layers would otherwise find the factors.
    return dataclasses.replace(method, runs_after=(Trait.REPLACES_LAYERS,))


def _is_itself(module: nn.Module, kind: type[nn.Module]) -> bool:
    return type(module) is kind and is_plain(module, kind)


def _is_worth_it(module: nn.Linear | nn.Conv2d, latent: int, site: surgery.Site) -> bool:
    # Factors of a weight that is shared with another layer would add parameters instead of saving them.
    return latent <= max_latent(module) and not is_tied(module, site.root)


ACTIVATIONS: Mapping[str, type[nn.Module]] = MappingProxyType(
    {
        "gelu": nn.GELU,
        "identity": nn.Identity,
        "relu": nn.ReLU,
        "sigmoid": nn.Sigmoid,
        "silu": nn.SiLU,
        "squared_relu": SquaredReLU,
        "tanh": nn.Tanh,
    }
)
"""Map from the names of activations to their modules."""

_BERT, _GPT2, _ROBERTA = (f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "roberta"))


def _checked_name(act_fn: Any, where: str) -> str:
    if not isinstance(act_fn, str):
        raise TypeError(f"{where}: expected a str, one of {', '.join(map(repr, ACTIVATIONS))}, got {shown(act_fn)}")
    return _checked_act(act_fn, where)


def _checked_act(act_fn: Any, where: str) -> Any:
    """Require the name of an activation, a module or function, or `None` for that of the block."""
    is_known = act_fn in ACTIVATIONS if isinstance(act_fn, str) else callable(act_fn) and not isinstance(act_fn, type)
    if act_fn is not None and not is_known:
        known = ", ".join(map(repr, ACTIVATIONS))
        error = ValueError if isinstance(act_fn, str) else TypeError
        raise error(f"{where}: expected one of {known}, a module or a function, got {shown(act_fn)}")
    return act_fn


@factory
def gated_linear_units(
    act_fn: Annotated[str | Callable[[Tensor], Tensor] | None, _checked_act] = None,
    gated_layer_bias: bool = False,
    non_gated_layer_bias: bool = False,
    *,
    where: Where = None,
    name: str = "gated_linear_units",
) -> Algorithm:
    """Add a gate to feed-forward blocks.

        act(W x + b)   becomes   act(G x) * (N x)

    The rest of the block is unchanged. G and N have the shape of W, are newly initialised, and have no biases by
    default. To keep the number of parameters, build the network with 2/3 of the hidden width.

    It supports `layers.FeedForward`, used by `models.gpt` and `models.vit`, and the blocks of GPT-2, BERT and RoBERTa
    in Hugging Face's transformers. Blocks are not replaced if they override forward, or if their first layer does so or
    has hooks, parametrized tensors, or a weight that is shared with another layer.

    Events: INIT. Reads and replaces: the model, its parameters and the optimizer's state.

    Args:
        act_fn: The gate's activation: a name as for `activation`, or a module or function, which is copied for each
            block; by default that of the block.
        gated_layer_bias: Give G a bias.
        non_gated_layer_bias: Give N a bias.
        where: Patterns (`fnmatch`) of modules to change, with all that they contain; by default all but frozen parts.
        name: Name of the algorithm and of the draws of new weights.

    Raises:
        TypeError, ValueError: A setting of the wrong type or an unknown name. At INIT: a block without an activation.

    Warns:
        UserWarning: At INIT: the network has no supported feed-forward blocks.

    Example:
        >>> gated_linear_units("silu")
        gated_linear_units(act_fn='silu', gated_layer_bias=False, non_gated_layer_bias=False)

    References:
        Noam Shazeer: GLU Variants Improve Transformer. 2020. https://arxiv.org/abs/2002.05202
        Yann N. Dauphin et al.: Language Modeling with Gated Convolutional Networks. 2016.
        https://arxiv.org/abs/1612.08083
    """
    # Maps a first layer to its replacement, which is shared by all blocks that share the layer.
    made: WeakKeyDictionary[nn.Module, GatedLinearUnit] = WeakKeyDictionary()

    def unit(layer: nn.Linear, own_act: Any, site: surgery.Site) -> nn.Module:
        chosen: Any = ACTIVATIONS[act_fn]() if isinstance(act_fn, str) else copy.deepcopy(act_fn)
        act: Callable[[Tensor], Tensor] = own_act if chosen is None else chosen
        if not callable(act):
            raise ValueError(
                f"gated_linear_units: {site.name}: expected an activation, got {shown(act)}; name one by act_fn='gelu'"
            )
        # The weight of transformers' Conv1D is transposed.
        width, features = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.mT.shape
        new = GatedLinearUnit(features, width, act, gate_bias=gated_layer_bias, linear_bias=non_gated_layer_bias)
        first = made.setdefault(layer, new)
        new.gate, new.linear = first.gate, first.linear
        for part in (new.gate, new.linear):
            part.requires_grad_(layer.weight.requires_grad)
        return new

    def feed_forward(module: FeedForward, site: surgery.Site) -> nn.Module | None:
        if not computes_as(module, FeedForward) or not _is_free(module.up, nn.Linear, site):
            return None
        return changed(module, up=unit(module.up, module.act, site), act=nn.Identity())

    def intermediate(module: Any, site: surgery.Site) -> nn.Module | None:
        kind = _class_of(module, "BertIntermediate", "RobertaIntermediate")
        if not is_plain(module, kind) or not _is_free(module.dense, nn.Linear, site):
            return None
        return unit(module.dense, module.intermediate_act_fn, site)

    def gpt2(module: Any, site: surgery.Site) -> nn.Module | None:
        kinds = _class_of(module, "GPT2MLP"), _class_of(module.c_fc, "Conv1D")
        if not computes_as(module, kinds[0]) or not _is_free(module.c_fc, kinds[1], site):
            return None
        return changed(module, c_fc=unit(module.c_fc, module.act, site), act=nn.Identity())

    rules = {
        GatedLinearUnit: None,
        FeedForward: feed_forward,
        stand_in(_BERT, "BertIntermediate"): intermediate,
        stand_in(_ROBERTA, "RobertaIntermediate"): intermediate,
        stand_in(_GPT2, "GPT2MLP"): gpt2,
    }
    method = surgery_method(name, rules, where)
    if not isinstance(act_fn, nn.Module):
        return method
    # A module is a setting here, which a resumed run must not change.
    config = {"act_fn": act_fn, "gated_layer_bias": gated_layer_bias, "non_gated_layer_bias": non_gated_layer_bias}
    return dataclasses.replace(method, config=config | ({} if where is None else {"where": tuple(where)}))


@factory
def activation(
    act_fn: Annotated[str, _checked_name] = "squared_relu", *, where: Where = None, name: str = "activation"
) -> Algorithm:
    """Replace the activations of feed-forward blocks.

        down(old(up(x)))   becomes   down(act(up(x))),   with act(x) = max(0, x)^2 for "squared_relu"

    Parameters of the old activation are removed. In a block with a gated linear unit, the activation of the gate is
    replaced. It supports the blocks of `gated_linear_units` that do not override forward.

    Events: INIT. Reads and replaces: the model only.

    Args:
        act_fn: The new activation: "gelu", "identity", "relu", "sigmoid", "silu", "squared_relu" or "tanh".
        where: Patterns (`fnmatch`) of modules to change, with all that they contain; by default all but frozen parts.
        name: Name of the algorithm.

    Warns:
        UserWarning: At INIT: the network has no supported feed-forward blocks.

    Example:
        >>> activation()
        activation(act_fn='squared_relu')

    References:
        David R. So et al.: Primer: Searching for Efficient Transformers for Language Modeling. NeurIPS 2021.
        https://arxiv.org/abs/2109.08668
    """

    def rule(attribute: str, *classes: str) -> surgery.Rule:
        """Return the rule for classes of these names, by the attribute that is their activation."""

        def block(module: Any, site: surgery.Site) -> nn.Module | None:
            del site
            is_gated = any(isinstance(child, GatedLinearUnit) for child in module.children())  # it has the activation
            if is_gated or not computes_as(module, _class_of(module, *classes)):
                return None
            new: dict[str, Any] = {attribute: ACTIVATIONS[act_fn]()}
            return changed(module, **new)

        return block

    intermediate = rule("intermediate_act_fn", "BertIntermediate", "RobertaIntermediate")
    rules = {
        FeedForward: rule("act", "FeedForward"),
        GatedLinearUnit: rule("act", "GatedLinearUnit"),
        stand_in(_BERT, "BertIntermediate"): intermediate,
        stand_in(_ROBERTA, "RobertaIntermediate"): intermediate,
        stand_in(_GPT2, "GPT2MLP"): rule("act", "GPT2MLP"),
    }
    return surgery_method(name, rules, where)


def _class_of(module: nn.Module, *names: str) -> type[nn.Module]:
    """Return the first class in the module's MRO with one of the names, or `nn.Module` if there is none."""
    return next((kind for kind in type(module).__mro__ if kind.__name__ in names), nn.Module)


def _is_free(layer: nn.Module, kind: type[nn.Module], site: surgery.Site) -> bool:
    """Return whether the layer can be replaced without losing hooks, an overridden forward or a shared weight."""
    return is_plain(layer, kind) and not is_tied(layer, site.root)
