"""Arguments that are refused: what declarations exclude, for every function that has some, and a table of the rest."""

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import torch
from torch import nn

from purecompose import algorithms as alg, functional, losses, optim, random
from purecompose.algorithms import FACTORIES, images
from purecompose.algorithms._parts import (
    checked_field,
    checked_patterns,
    checked_period,
    checked_where,
    checked_written_field,
)
from purecompose.algorithms.images import check_value_range
from purecompose.algorithms.images.primitives import check_augmentation_set
from purecompose.nn import layers, models
from purecompose.nn.layers.replacing import check_latent
from purecompose.optim.base import checked_betas
from purecompose.optim.matrices import _checked_coefficients, _checked_eps
from purecompose.schedule import Hparam, hparam, linear
from purecompose.schedule.declared import Within, checks_of, declarations
from purecompose.time.event import named_point
from purecompose.time.predicates import NEVER


def getter(batch: Any) -> Any:
    return batch[0]


# Values that the checks of more than one method exclude, with their errors.
BY_FUNCTION: dict[Any, list[tuple[Any, type[Exception]]]] = {
    named_point: [("soon", ValueError), (-0.1, ValueError), (1.5, ValueError), ("3sec", ValueError), (None, TypeError)],
    checked_period: [("0ba", ValueError), ("5sec", ValueError), ("9sp", ValueError), ([], TypeError)],
    checked_patterns: [("*.bias", TypeError), ([3], TypeError), (None, TypeError)],
    checked_where: [(3, TypeError), ([None], TypeError)],
    checked_field: [(0.5, TypeError), (True, TypeError)],
    checked_written_field: [(0.5, TypeError), (getter, TypeError), ([0, getter], TypeError)],
    check_value_range: [(1.0, TypeError), ((1.0, 0.0), ValueError), (("a", "b"), TypeError)],
    check_augmentation_set: [
        ("rotate", ValueError),
        ("nonsense", ValueError),
        (("nonsense",), ValueError),
        ((), ValueError),
        (3, TypeError),
        ((3,), TypeError),
    ],
    checked_betas: [
        (0.9, TypeError),
        ((0.9,), TypeError),
        ((0.9, 1.0), ValueError),
        ((-0.1, hparam("b", 0.9)), ValueError),
    ],
    _checked_coefficients: [((1.0, 2.0), TypeError), ((1.0, 2.0, math.nan), ValueError)],
    _checked_eps: [(1e-3, TypeError), ((None, None), TypeError), ((-1.0, 0.1), ValueError)],
    check_latent: [(0, ValueError), (1.5, ValueError), ("wide", TypeError)],
}


def outside(declared: Within, *, is_whole: bool) -> list[Any]:
    """Return numbers that are not in a range."""
    if is_whole:
        return [int(one) for one in (declared.low - 1, declared.high + 1) if math.isfinite(one)]
    bounds = [declared.low] * declared.above + [declared.high] * declared.below
    beyond = math.nextafter(declared.low, -math.inf), math.nextafter(declared.high, math.inf)
    return [*bounds, math.nan, *(one for one in beyond if one != math.inf or not declared.or_infinite)]


def excluded(annotation: Any) -> Iterator[tuple[Any, type[Exception]]]:
    """Yield values that an annotation excludes, with their errors."""
    parts = get_args(annotation) if get_origin(annotation) is not Annotated else ()
    parts = [annotation, *(part for part in parts if get_origin(part) in (Annotated, Literal) or part is bool)]
    words = [part for part in parts if get_origin(part) is Literal]
    if bool in parts or words:
        yield "nonsense", ValueError if words else TypeError
        yield from [(1, TypeError), (None, TypeError)] if bool in parts else [("", ValueError)]
    for part in parts:
        if get_origin(part) is not Annotated:
            continue
        kind, declared = part.__origin__, part.__metadata__[0]
        if not isinstance(declared, Within):
            yield from BY_FUNCTION.get(declared, [])
            continue
        kinds = {*(get_args(kind) or (kind,)), *get_args(annotation)}
        yield from ((one, TypeError) for one in ("0.5", True, [], 1j if float in kinds else 0.5))
        yield from ((one, ValueError) for one in outside(declared, is_whole=float not in kinds))
        if torch.Tensor not in kinds:
            yield torch.tensor(0.5), TypeError
        if Hparam in kinds:
            yield linear, TypeError
            yield hparam("setting", declared.low - 1), ValueError
            yield (declared.low - 1) * linear(), ValueError


_OTHERS: list[Any] = [one for module in (functional, images) for one in vars(module).values()]
_OTHERS = [one for one in _OTHERS if inspect.isfunction(one) and one.__module__.startswith("purecompose.algorithms")]
_OPTIMIZERS: list[Any] = [optim.adafactor, optim.adam, optim.adamw, optim.decoupled_adamw, optim.decoupled_sgdw]
_OPTIMIZERS += [optim.lion, optim.muon, optim.rmsprop, optim.sgd]
_METHODS = (*FACTORIES.values(), *_OTHERS, alg.scale_schedule, optim.layerwise)
FUNCTIONS = {one.__name__: (one, declarations(one)) for one in _METHODS}
# The settings of an optimizer are declared as fields of its class.
FUNCTIONS |= {one.__name__: (one, declarations(type(one(0.1)))) for one in _OPTIMIZERS}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_declaration_excludes_is_refused_by_name(name: str) -> None:
    function, annotations = FUNCTIONS[name]
    needed = {"lr": 0.1} if function in _OPTIMIZERS else {}
    for argument in inspect.signature(function).parameters:
        for value, error in excluded(annotations.get(argument)):
            with pytest.raises(error, match=rf"^{name}: {argument}[:=\[]"):
                function(**{**needed, argument: value})


def test_all_arguments_of_methods_are_declared() -> None:
    free = {"name", "half_life", "metrics"}
    for name, factory in FACTORIES.items():
        assert set(inspect.signature(factory).parameters) <= {*checks_of(factory), *free}, name


IMAGES, KEY = torch.zeros(2, 3, 4, 4), random.key(0)
LABELS, MASKS = torch.arange(2), torch.zeros(2, 4, 4, dtype=torch.int64)
ANY: Any = alg
CORE: Any = functional
RESIDUAL = models.ResidualBlock(2, 2)
LAYERS: Any = layers


def select(loss: Any, **settings: Any) -> Any:
    return functional.select_using_loss(KEY, torch.zeros(2, 3), LABELS, lambda inputs: inputs, loss, **settings)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        # Settings that do not go together, or have their own check.
        (lambda: alg.blurpool(False, False), ValueError, "expected replace_convs or replace_maxpools, got neither"),
        (lambda: ANY.ema("1ba", smoothing=0.9), ValueError, "a half_life or a smoothing, got half_life='1ba' and"),
        (lambda: ANY.ema("0ba"), ValueError, "half_life=.*: expected a positive time"),
        (lambda: ANY.ema("10tok"), ValueError, "half_life='10tok': expected batches .ba., updates .up., epochs"),
        (lambda: ANY.ema(0.99), TypeError, r"^ema: half_life=0.99: .* each update keeps is smoothing=0.99$"),
        (lambda: ANY.ema(every=0.5), TypeError, "^ema: every=0.5: .*a share of the run is '0.5dur'"),
        (lambda: ANY.gated_linear_units("swish"), ValueError, "act_fn: expected one of 'gelu', .* got 'swish'"),
        (lambda: ANY.gated_linear_units(nn.ReLU), TypeError, "act_fn: expected one of 'gelu', .* or a function, got"),
        (lambda: alg.gyro_dropout(0.5, 4, 8), ValueError, "expected tau <= sigma, got tau=8, sigma=4"),
        (lambda: alg.per_example_clipping(math.inf, 1.0), ValueError, "max_norm: expected a finite number, the unit"),
        (lambda: alg.progressive_resizing(delay_fraction=0.9), ValueError, "expected delay_fraction"),
        (lambda: alg.selective_backprop(0.9, 0.5), ValueError, "expected start < end"),
        (lambda: alg.seq_length_warmup(0.3, 8, 4), ValueError, "expected min_seq_length <= max_seq_length"),
        (
            lambda: alg.seq_length_warmup(truncate=False, preserve_end_of_sequence=True),
            ValueError,
            "preserve_end_of_sequence=True is for truncated sequences",
        ),
        (lambda: alg.stochastic_depth(drop_warmup=-0.1), ValueError, "stochastic_depth: drop_warmup"),
        (lambda: alg.swa(0.9, 0.9), ValueError, "expected end after start, got 0.9dur and 0.9dur"),
        # Cores.
        (lambda: CORE.colout_batch(KEY, None), TypeError, "inputs: expected a tensor of images"),
        (lambda: CORE.colout_batch(KEY, IMAGES[0, 0]), ValueError, r"got shape \(4, 4\)"),
        (lambda: CORE.colout_batch(torch.zeros(2), IMAGES), TypeError, "colout_batch: expected a key"),
        (lambda: CORE.colout_batch(KEY, IMAGES, resize_target=True), ValueError, "but there are no targets"),
        (lambda: CORE.colout_batch(KEY, IMAGES, ["a"], resize_target=True), TypeError, r"got \['a'\] \(list\)"),
        (lambda: CORE.colout_batch(KEY, IMAGES, LABELS, resize_target=True), ValueError, "the height and width of"),
        (lambda: CORE.colout_batch(KEY, IMAGES, MASKS[..., :3], resize_target=True), ValueError, "the height and"),
        (lambda: CORE.cutmix_batch(KEY, IMAGES, LABELS, bbox="abcd"), ValueError, "bbox: expected integers .* 'abcd'"),
        (lambda: CORE.cutmix_batch(KEY, IMAGES, LABELS, bbox=(0, 0, 1)), ValueError, "top, left, bottom, right"),
        (lambda: CORE.cutmix_batch(KEY, IMAGES, LABELS, bbox=(0, 0.5, 1, 1)), ValueError, "expected integers"),
        (lambda: CORE.cutmix_batch(KEY, IMAGES, LABELS, bbox=torch.zeros(3, 4).long()), ValueError, "integers"),
        (lambda: CORE.cutmix_batch(KEY, IMAGES, LABELS, indices=torch.arange(3)), ValueError, "permutation of shape"),
        (lambda: CORE.cutmix_batch(KEY, torch.zeros(2, 3), LABELS), TypeError, r"\(N, C, H, W\), got float32\[2, 3\]"),
        (lambda: CORE.cutmix_batch(None, IMAGES, LABELS, bbox=(0, 0, 1, 1)), TypeError, "bbox or indices are left out"),
        (lambda: CORE.cutmix_batch(None, IMAGES, LABELS, indices=LABELS), TypeError, "bbox or indices are left out"),
        (lambda: CORE.cutmix_batch(KEY, IMAGES, [0, 1]), TypeError, "got list"),
        (lambda: CORE.cutmix_batch(KEY, IMAGES, torch.arange(3)), ValueError, "inputs of 2 examples and targets of 3"),
        (lambda: CORE.cutmix_batch(KEY, IMAGES, MASKS, interpolate_loss=True), ValueError, "one target per image, got"),
        (lambda: CORE.mixup_batch(KEY, IMAGES, LABELS, indices=torch.arange(3)), ValueError, "permutation of shape"),
        (lambda: CORE.mixup_batch(None, IMAGES, LABELS, mixing=0.5), TypeError, "got None"),
        (lambda: CORE.mixup_batch(torch.zeros(2), IMAGES, LABELS), TypeError, "expected a key"),
        (lambda: CORE.mixup_batch(KEY, {"image": IMAGES}, LABELS), TypeError, "got dict; select it with input_field"),
        (lambda: CORE.mixup_batch(KEY, torch.tensor(1.0), LABELS), TypeError, "0-d"),
        (lambda: CORE.mixup_batch(KEY, IMAGES, [1, 2]), TypeError, "got list"),
        (lambda: CORE.smooth_labels(MASKS[0].float(), LABELS), ValueError, "class indices .* or dense targets"),
        (lambda: CORE.smooth_labels(MASKS[0].float(), torch.zeros(4)), ValueError, "integer dtype"),
        (lambda: CORE.smooth_labels(MASKS[0].float(), [0] * 4), TypeError, "outputs and targets as tensors"),
        (lambda: CORE.smooth_labels(torch.zeros(3, 1), torch.zeros(3, 1)), ValueError, "at least two"),
        (lambda: CORE.smooth_labels(MASKS[0].float(), torch.arange(1, 5)), (RuntimeError, IndexError), "out of bounds"),
        (
            lambda: CORE.resize_batch(None, IMAGES, None, 0.5, mode="crop"),
            TypeError,
            "a key for mode='crop', .*got None",
        ),
        (lambda: CORE.resize_batch(KEY, IMAGES[0, 0], None, 0.5), TypeError, r"images.*got float32\[4, 4\]"),
        (lambda: CORE.resize_batch(KEY, IMAGES, None, 0.5, resize_targets=True), TypeError, "expected masks.*NoneType"),
        (lambda: CORE.resize_batch(KEY, IMAGES, LABELS, 0.5, resize_targets=True), ValueError, "no height and width"),
        (lambda: CORE.choose_by_loss(KEY, torch.zeros(3, 2)), ValueError, r"got shape \(3, 2\)"),
        (lambda: CORE.choose_by_loss(KEY, torch.zeros(0)), ValueError, r"got shape \(0,\)"),
        (lambda: CORE.choose_by_loss(torch.zeros(2), torch.zeros(3)), TypeError, "expected a key"),
        (lambda: select(lambda outputs, targets, reduction: outputs.sum()), ValueError, "one loss for each of 2"),
        (lambda: select(losses.cross_entropy, scale_factor=0.5), ValueError, r"shape \(2, 3\)"),
        (lambda: functional.mixup_batch(KEY, IMAGES, IMAGES, mixing=torch.ones(3)), ValueError, "got .2,. and .3,."),
        (lambda: functional.blur_2d(IMAGES[0, 0]), ValueError, r"blur_2d: expected an input .* got shape \(4, 4\)"),
        (lambda: functional.blur_2d(IMAGES.int()), TypeError, "blur_2d: expected a floating input, got torch.int"),
        (lambda: functional.standardized(torch.zeros(3)), ValueError, "standardized: expected a weight"),
        # Layers.
        (lambda: LAYERS.BlurConv2d(nn.Conv1d(2, 2, 3, 2)), TypeError, "BlurConv2d: expected an nn.Conv2d, got Conv1d"),
        (lambda: LAYERS.BlurConv2d(nn.Conv2d(2, 2, 3, 2), 1), TypeError, "BlurConv2d: blur_first: expected True"),
        (lambda: LAYERS.FactorizedLinear(nn.Linear(4, 8), 5), ValueError, "latent_features: expected an int in"),
        (lambda: LAYERS.FactorizedConv2d(nn.Conv2d(4, 4, 1, groups=2), 1), NotImplementedError, "groups=1, got 2"),
        (lambda: LAYERS.GhostBatchNorm(nn.BatchNorm1d(2), 0), ValueError, "ghost_batch_size: expected an int >= 1"),
        (lambda: LAYERS.StochasticDepth(RESIDUAL, "Sample"), ValueError, "method: expected 'block' or 'sample'"),
        (lambda: LAYERS.StochasticDepth(RESIDUAL, "sample", 1.5), ValueError, "StochasticDepth: drop_rate: .* got 1.5"),
        (lambda: LAYERS.StochasticDepth(nn.Linear(2, 2)), TypeError, "got a Linear"),
        (lambda: LAYERS.SqueezeExcite2d(16, -3), ValueError, "SqueezeExcite2d: latent_channels: .* > 0, got -3"),
        (lambda: LAYERS.SqueezeExcite2d(0), ValueError, "SqueezeExcite2d: num_features: expected an int >= 1, got 0"),
        (lambda: LAYERS.SqueezeExciteConv2d(nn.Conv1d(2, 2, 1)), TypeError, "expected an nn.Conv2d, got Conv1d"),
    ],
)
def test_what_no_declaration_says_is_refused_too(call: Callable[[], Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_every_setting_that_switches_a_method_off_does() -> None:
    """Those of the table of shipped methods are tried by a law; these are others."""
    for method in (
        alg.batch_size_warmup(initial_share=1),
        alg.layer_freezing(1.0),
        alg.progressive_resizing(finetune_fraction=1, delay_fraction=0),
        alg.randaugment(depth=0),
        alg.selective_backprop(full_every=1),
    ):
        assert method.predicate == NEVER, method
