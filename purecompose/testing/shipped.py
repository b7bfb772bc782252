"""The table of shipped algorithms, with the settings and tasks for laws and property tests, one row each.

A test compares the table with the factories, so that a new algorithm cannot be left out.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

from hypothesis import strategies as st
from torch import nn

from purecompose.algorithms import FACTORIES
from purecompose.algorithms._gated_linear_units import ACTIVATIONS
from purecompose.algorithms.images import PRIMITIVES
from purecompose.core.algorithm import Algorithm
from purecompose.nn.layers.transformer import FeedForward, SelfAttention
from purecompose.schedule import Hparam, Scalar, cosine, hparam, linear
from purecompose.schedule.declared import Within, declarations
from purecompose.testing.tasks import FULL_TASKS, TASKS, Residual, Task


Settings = st.SearchStrategy[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A shipped algorithm.

    Args:
        name: Name of its factory.
        examples: Source texts, as for `Subject.of`, on which all laws run.
        neutral: Source text with settings that change nothing; `None` if there are none.
        tasks: Names of the `TASKS` that it accepts in full precision; names of tasks in half precision only for a
            method that does nothing elsewhere. See `accepted`.
        settings: Strategy for valid keyword arguments, including edge values; the simplest are the common ones. By
            default the values that the factory declares.
        on_images: Strategy for inputs that are images, if it differs.
        needs: Types of layers, one of which a network must contain, for methods that replace or use them.
        is_alone: True if the algorithm excludes all others, so that it is in no list of several.
    """

    name: str
    examples: tuple[str, ...]
    neutral: str | None = None
    tasks: tuple[str, ...] = FULL_TASKS
    settings: Settings | None = None
    on_images: Settings | None = None
    needs: tuple[type[nn.Module], ...] = ()
    is_alone: bool = False

    def algorithms(self, kind: str = "vectors") -> st.SearchStrategy[Algorithm]:
        """Return a strategy for the algorithm with any valid settings for inputs of this kind (see `tasks.KINDS`)."""
        return self.settings_for(kind).map(lambda settings: FACTORIES[self.name](**settings))

    def settings_for(self, kind: str) -> Settings:
        """Return a strategy for valid keyword arguments on inputs of this kind."""
        own = self.on_images if kind == "images" and self.on_images is not None else self.settings
        return _settings(self.name) if own is None else own

    @property
    def accepted(self) -> tuple[str, ...]:
        """The names of all the `TASKS` that it accepts, on which laws are tried."""
        return tuple(name for name, task in TASKS.items() if self.accepts(task))

    def accepts(self, task: Task) -> bool:
        """Return whether it accepts such inputs, acts in the task's precision, and finds the layers that it needs."""
        named = [TASKS[name] for name in self.tasks]
        if task.kind not in {one.kind for one in named}:
            return False
        if not task.is_half and all(one.is_half for one in named):
            return False
        return not self.needs or any(isinstance(module, self.needs) for module in task.make_net(0).modules())


_SCHEDULES = (linear(), linear(0.0, 1.0, t_max="0.5dur"), cosine(), cosine(warmup="0.25dur"))


def _scalars(name: str, numbers: st.SearchStrategy[float]) -> st.SearchStrategy[Scalar]:
    """Return a strategy for scalars: numbers, hparams, schedules and their products."""
    defaults = _or_floats([0.25, 0.0, 1.0], 1e-6, 1)
    hparams = defaults.map(lambda default: hparam(name, default))
    schedules = st.sampled_from(_SCHEDULES)
    products = st.builds(lambda h, s: h * s, hparams, schedules)
    return st.one_of(numbers, hparams, schedules, products, schedules.map(lambda s: 0.5 * s))


def _or_floats(common: list[Any], low: float, high: float, **bounds: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for common values, which are the simplest, and any number of the range."""
    return st.sampled_from(common) | st.floats(low, high, **bounds)


def _within(declared: Within, default: Any, *, is_whole: bool) -> st.SearchStrategy[Any]:
    """Return a strategy for numbers of a range; the default and the bounds are the simplest. It is cut off at 10."""
    high = declared.high if declared.high < math.inf else max(10, default or 0)
    if is_whole:
        common = [] if default is None else [default]
        return st.sampled_from([*common, int(declared.low)]) | st.integers(int(declared.low), int(min(high, 10)))
    bounds = [declared.low] * (not declared.above) + [high] * (declared.high < math.inf and not declared.below)
    common = [*([] if default is None else [default]), *bounds, *(int(one) for one in bounds if one == int(one))]
    return _or_floats(common, declared.low, high, exclude_min=declared.above, exclude_max=declared.below)


def _declared(name: str, annotation: Any, default: Any) -> st.SearchStrategy[Any] | None:
    """Return a strategy for a setting as it is declared, or `None` if the declaration does not enumerate its values."""
    if annotation is bool:
        return st.booleans()
    if get_origin(annotation) is Literal:
        return st.sampled_from([default, *get_args(annotation)])
    if get_origin(annotation) is not Annotated or not isinstance(annotation.__metadata__[0], Within):
        return None
    kinds, declared = get_args(annotation.__origin__) or (annotation.__origin__,), annotation.__metadata__[0]
    numbers = _within(declared, default, is_whole=float not in kinds)
    values = _scalars(name, numbers) if Hparam in kinds else numbers
    return st.none() | values if type(None) in kinds else values


def _settings(
    name: str,
    *joint: Settings,
    always: Mapping[str, st.SearchStrategy[Any]] = MappingProxyType({}),
    **others: st.SearchStrategy[Any] | None,
) -> Settings:
    """Return a strategy for keyword arguments of a factory, as its signature declares them.

    Args:
        name: The name of the factory.
        *joint: Strategies for arguments that depend on each other.
        always: Strategies for arguments that are not left out.
        **others: Strategies for arguments of which these networks, or the declaration, allow other values; `None`
            for arguments that keep their default.
    """
    defaults = {one: parameter.default for one, parameter in inspect.signature(FACTORIES[name]).parameters.items()}
    found = {
        one: _declared(f"{name}/{one}", annotation, None if defaults[one] is inspect.Parameter.empty else defaults[one])
        for one, annotation in declarations(FACTORIES[name]).items()
    }
    optional = {one: values for one, values in {**found, **others}.items() if values is not None and one not in always}
    parts = st.tuples(st.fixed_dictionaries({**always}, optional=optional), *joint)
    return parts.map(lambda given: {one: value for part in given for one, value in part.items()})


_EXCLUDED = st.sampled_from([(), ("*bias",), ("*weight", "*")])
_BETAS = _or_floats([0.2, 1.0, 1, 0, 0.0], 1e-6, 1e6)
"""Parameters of a Beta distribution; numbers that float32 rounds to 0 are not valid."""

_FRACTIONS = _or_floats([0.0, 0.25, 0.5, 0.75, 1.0], 0, 1)
_KEPT_WINDOWS = st.just([0.0, 1.0]) | st.tuples(_FRACTIONS, _FRACTIONS).filter(lambda w: w[0] != w[1]).map(sorted)
_WINDOWS = _KEPT_WINDOWS.map(lambda window: {"start": window[0], "end": window[1]})
_SMALL: dict[str, st.SearchStrategy[Any]] = {  # the networks' layers have three to sixteen features
    "min_features": st.integers(1, 3),
    "latent_features": _or_floats([1, 0.25, 1.0], 0.01, 0.5),
}
_SMALL_CONVS: dict[str, Any] = {
    "min_channels": st.integers(1, 4),
    "latent_channels": _or_floats([1, 2, 0.25, 0.5, 1.0], 0.01, 0.99),
    "factorize_linears": None,
}
_SHARES_OF_RUN = st.sampled_from([(0.2, 0.5), (0.5, 0.5), (0.0, 0.0), (1.0, 0.0), (0, 1)]) | st.floats(0, 1).flatmap(
    lambda finetune: st.floats(0, 1 - finetune).map(lambda delay: (finetune, delay))
)
_LENGTHS = st.sampled_from([(2, 5), (5, 5), (8, 1024)]) | st.tuples(st.integers(1, 6), st.integers(1, 6)).map(
    lambda pair: (min(pair), max(pair))
)
_BANKS = st.sampled_from([(256, 16), (4, 2), (1, 1)]) | st.integers(1, 12).flatmap(
    lambda sigma: st.tuples(st.just(sigma), st.integers(1, sigma))
)
_DECAYS = _or_floats([1e-5, 0.0, 1e-3], 0, 0.05)
_SETS = st.lists(st.sampled_from(sorted(PRIMITIVES)), min_size=1, max_size=3).map(tuple)
_LENGTH_UNITS = st.sampled_from(["1ba", "2ba", "1ep", "0.5dur", "9sp"])
_UNMIXED_IDS = ("vectors", "soft", "images", "frozen", "zero_head", "double", "bf16_weights")
_NO_BATCHNORM = ("vectors", "soft", "tokens", "frozen", "zero_head", "double", "bf16_weights")


_ROWS = (
    Row("alibi", examples=("alibi(0.6)", "alibi(1)"), tasks=("tokens",), needs=(SelfAttention,)),
    Row(
        "augmix",
        # Few operations, because each is compiled for every step of a chain; RandAugment's examples have all of them.
        examples=(
            "augmix(3, width=2, augmentation_set=('rotate', 'equalize', 'color'))",
            "augmix(5, depth=1, width=2, augmentation_set=('shear_x', 'brightness'))",
        ),
        neutral="augmix(0)",
        tasks=("images",),
        settings=_settings(
            "augmix",
            depth=st.sampled_from([-1, 1, 2]),
            width=st.integers(1, 3),
            alpha=_or_floats([1.0, 0.2, 2], 0.01, 100),
            augmentation_set=_SETS,
            value_range=st.sampled_from([None, (-2.0, 2.0)]),
        ),
    ),
    Row(
        "batch_size_warmup",
        examples=("batch_size_warmup(1.0, 0.25)", "batch_size_warmup(0.6, 0, 1)"),
        neutral="batch_size_warmup(0)",
        settings=_settings("batch_size_warmup", multiple=st.none() | st.sampled_from([1, 2, 100])),
    ),
    Row(
        "blurpool",
        examples=("blurpool(min_channels=4)", "blurpool(blur_first=False, min_channels=1)"),
        tasks=("images",),
        settings=_settings("blurpool", always={"min_channels": st.integers(1, 4)}, replace_convs=None),
        needs=(nn.Conv2d,),
    ),
    Row("channels_last", examples=("channels_last()",), tasks=("images",), needs=(nn.Conv2d,)),
    Row(
        "colout",
        examples=("colout(0.2, 0.4)", "colout(0.5, 0.2, per_example=True, resize_target=False)"),
        neutral="colout(0, 0)",
        tasks=("images",),
        settings=_settings(
            "colout",
            p_row=_or_floats([0.15, 0.5, 0, 0.0], 0, 0.5),
            p_col=_or_floats([0.15, 0.5, 0, 0.0], 0, 0.5),
            resize_target=st.sampled_from(["auto", False]),
        ),
    ),
    Row(
        "cutmix",
        examples=("cutmix(1.0)", "cutmix(0.5, interpolate_loss=True, uniform_sampling=True, per_example=True)"),
        neutral="cutmix(0)",
        tasks=("images",),
        settings=_settings("cutmix", alpha=_scalars("cutmix/alpha", _BETAS)),
    ),
    Row(
        "cutout",
        examples=("cutout()", "cutout(2, 0.7, uniform_sampling=True, per_example=True, fill=(0.5, -1.0))"),
        neutral="cutout(0)",
        tasks=("images",),
        settings=_settings("cutout", num_holes=st.integers(0, 4), fill=st.sampled_from([0.0, 0, -1.5, (0.5, 2)])),
    ),
    Row(
        "decoupled_weight_decay",
        examples=("decoupled_weight_decay(0.01)", "decoupled_weight_decay(0.05, 2, ('*bias',))"),
        neutral="decoupled_weight_decay(0.0)",
        settings=_settings(
            "decoupled_weight_decay",
            weight_decay=_DECAYS
            | _DECAYS.map(lambda default: hparam("weight_decay", default))
            | _DECAYS.map(lambda top: top * linear()),
            min_dims=st.sampled_from([0, 2, 9]),
            exclude=_EXCLUDED,
        ),
    ),
    Row(
        "ema",
        examples=("ema('2ba')", "ema(smoothing=0.9, every='2ba')"),
        settings=_settings(
            "ema",
            st.fixed_dictionaries({"half_life": st.sampled_from(["2ba", "1ep", "5sp", "0.25dur"])})
            | st.fixed_dictionaries({"smoothing": _or_floats([0.9, 0.0, 1.0, 1], 0, 1)}),
            smoothing=None,
            start=st.sampled_from([0.0, "1ba", "1ep", 0.5, 1.0]),
            every=_LENGTH_UNITS,
        ),
    ),
    Row(
        "factorize",
        examples=(
            "factorize(min_channels=4, latent_channels=0.5, min_features=3, latent_features=1)",
            "factorize(factorize_convs=False, min_features=1, latent_features=0.25)",
        ),
        neutral="factorize(False, False)",
        settings=_settings("factorize", always=_SMALL, **_SMALL_CONVS, factorize_convs=None),
        on_images=_settings("factorize", always=_SMALL, **_SMALL_CONVS),
    ),
    Row(
        "fused_layernorm",
        examples=("fused_layernorm()",),
        tasks=("bf16_tokens",),  # in full precision it does nothing, and warns
        needs=(nn.LayerNorm,),
    ),
    Row(
        "gated_linear_units",
        examples=("gated_linear_units()", "gated_linear_units('silu', True, True)"),
        tasks=("tokens",),
        settings=_settings("gated_linear_units", act_fn=st.sampled_from([None, *ACTIVATIONS])),
        needs=(FeedForward,),
    ),
    Row(
        "ghost_batchnorm",
        examples=("ghost_batchnorm(2)", "ghost_batchnorm()"),
        tasks=("images",),
        needs=(nn.BatchNorm2d,),
    ),
    Row(
        "gradient_accumulation",
        examples=("gradient_accumulation(2)", "gradient_accumulation(3)"),
        neutral="gradient_accumulation(1)",
        settings=_settings("gradient_accumulation", always={"num_steps": st.integers(1, 5)}),
    ),
    Row(
        "gradient_clipping",
        examples=(
            "gradient_clipping('norm', 0.1)",
            "gradient_clipping('value', 0.01)",
            "gradient_clipping('adaptive', 0.01, exclude=('*.bias',))",
        ),
        neutral="gradient_clipping('norm', 1e999)",  # infinity, as a literal
        settings=_settings(
            "gradient_clipping",
            always={
                "clipping_type": st.sampled_from(["norm", "value", "adaptive"]),
                # Not infinity, whose repr is not a literal.
                "clipping_threshold": _scalars("gradient_clipping/threshold", _or_floats([1.0, 0.1, 1], 1e-6, 1e6)),
            },
            exclude=_EXCLUDED,
        ),
    ),
    Row("gradient_noise_scale", examples=("gradient_noise_scale()", "gradient_noise_scale(0)")),
    Row(
        "gradient_norm", examples=("gradient_norm()", "gradient_norm(each=True)"), neutral="gradient_norm(total=False)"
    ),
    Row(
        "gyro_dropout",
        examples=("gyro_dropout(0.5, 4, 2)", "gyro_dropout(0.3, feature_dim=-1)"),
        neutral="gyro_dropout(0)",
        settings=_settings(
            "gyro_dropout",
            _BANKS.map(lambda bank: {"sigma": bank[0], "tau": bank[1]}),
            sigma=None,
            tau=None,
            p=_or_floats([0.5, 0.2, 0, 0.0], 0, 0.9),
            feature_dim=st.sampled_from([None, 1, -1]),
        ),
    ),
    Row("label_smoothing", examples=("label_smoothing(0.1)", "label_smoothing(1)"), neutral="label_smoothing(0)"),
    Row(
        "layer_freezing",
        examples=("layer_freezing(0.0, num_stages=None)", "layer_freezing(0.3, num_stages=3)"),
        neutral="layer_freezing(freeze_level=0)",
    ),
    Row(
        "lookahead",
        # Short intervals, so that it acts in short runs.
        examples=("lookahead(every=1)", "lookahead(0.8, every=2)"),
        neutral="lookahead(1)",
        settings=_settings("lookahead", every=st.integers(1, 6)),
    ),
    Row(
        "loss_scaling",
        examples=("loss_scaling()", "loss_scaling(1024.0, growth_factor=4.0, growth_interval=1)"),
        neutral="loss_scaling(1.0, growth_factor=1.0, backoff_factor=1.0)",
        settings=_settings(
            "loss_scaling",
            # Not so large that a float32 gradient of a small network overflows.
            init_scale=_or_floats([2.0**16, 2.0**10, 1.0, 3.0], 2.0**-20, 2.0**20),
            growth_factor=_or_floats([2.0, 1.0, 1], 1, 4),
            backoff_factor=_or_floats([0.5, 1.0, 1], 0.1, 1),
            growth_interval=st.integers(1, 4) | st.just(2000),
        ),
    ),
    Row(
        "low_precision_groupnorm",
        examples=("low_precision_groupnorm()",),
        tasks=("bf16_images",),  # in full precision it does nothing, and warns
        needs=(nn.GroupNorm,),
    ),
    Row(
        "low_precision_layernorm",
        examples=("low_precision_layernorm()",),
        tasks=("bf16_tokens",),  # in full precision it does nothing, and warns
        needs=(nn.LayerNorm,),
    ),
    Row(
        "mixup",
        examples=("mixup(0.2)", "mixup(0.3, interpolate_loss=True, per_example=True)"),
        neutral="mixup(0)",
        tasks=_UNMIXED_IDS,
        settings=_settings("mixup", always={"alpha": _scalars("mixup/alpha", _BETAS)}),
    ),
    Row("no_op_model", examples=("no_op_model()",), is_alone=True),
    Row(
        "per_example_clipping",
        examples=("per_example_clipping(0.5)", "per_example_clipping(0.5, 0.3, chunk_size=2)"),
        neutral="per_example_clipping(1e999)",
        tasks=_NO_BATCHNORM,
        settings=_settings(
            "per_example_clipping",
            always={"max_norm": _scalars("per_example_clipping/max_norm", _or_floats([1.0, 1, 0.1], 1e-3, 1e3))},
            # Noise far above the bound would drive the weights out of the range of float32.
            noise_multiplier=_scalars("per_example_clipping/noise_multiplier", _or_floats([0.0, 0, 0.5], 0, 1)),
            chunk_size=st.sampled_from([None, 1, 3]),
        ),
    ),
    Row(
        "progressive_resizing",
        examples=("progressive_resizing()", "progressive_resizing('crop', 0.5, 0.1, 0, 1)"),
        neutral="progressive_resizing(initial_scale=1)",
        tasks=("images",),
        settings=_settings(
            "progressive_resizing",
            _SHARES_OF_RUN.map(lambda shares: {"finetune_fraction": shares[0], "delay_fraction": shares[1]}),
            finetune_fraction=None,
            delay_fraction=None,
            initial_scale=_or_floats([0.5, 1, 1.0], 0.5, 1),  # the CNN needs images of at least half the size
        ),
    ),
    Row(
        "randaugment",
        examples=("randaugment(9, 1)", "randaugment(5, 2, ('rotate', 'equalize', 'sharpness'))"),
        neutral="randaugment(0)",
        tasks=("images",),
        settings=_settings(
            "randaugment",
            depth=st.integers(0, 2),
            augmentation_set=st.sampled_from(["all", "safe", "original"]) | _SETS,
            value_range=st.sampled_from([None, (-2.0, 2.0), (-1.0, (1.0, 2.0))]),
        ),
    ),
    Row(
        "sam",
        examples=("sam()", "sam(0.5, every=2)"),
        neutral="sam(0)",
        settings=_settings(
            "sam",
            rho=_scalars("sam/rho", _or_floats([0.05, 0.5, 0, 0.0], 1e-6, 10)),
            epsilon=_or_floats([1e-12, 1e-30, 1.0], 1e-12, 1),
            every=st.integers(1, 4),
        ),
    ),
    Row(
        "schedule_free",
        examples=("schedule_free()", "schedule_free(0.0)"),
        settings=_settings("schedule_free", beta=_or_floats([0.9, 0.98, 0.0], 0, 0.99)),
    ),
    Row(
        "selective_backprop",
        examples=(
            "selective_backprop(0, 1.0, full_every=0)",
            "selective_backprop(0, 1.0, keep=0.5, full_every=2)",
            "selective_backprop(0.5, 0.9, keep=0.3)",
        ),
        neutral="selective_backprop(keep=1)",
        settings=_settings("selective_backprop", _WINDOWS, start=None, end=None, scale_factor=None),
        on_images=_settings(
            "selective_backprop", _WINDOWS, start=None, end=None, scale_factor=_or_floats([1.0, 0.5, 1], 0.5, 1)
        ),
    ),
    Row(
        "seq_length_warmup",
        examples=("seq_length_warmup(0.6, 2, 5, 1)", "seq_length_warmup(1.0, 2, 5, 1, truncate=False)"),
        neutral="seq_length_warmup(0)",
        tasks=("tokens",),
        settings=_settings(
            "seq_length_warmup",
            _LENGTHS.map(lambda lengths: {"min_seq_length": lengths[0], "max_seq_length": lengths[1]}),
            min_seq_length=None,
            max_seq_length=None,
            step_size=st.sampled_from([1, 2, 100]),
            preserve_end_of_sequence=None,
        ),
    ),
    Row("skip_nonfinite", examples=("skip_nonfinite()",)),
    Row(
        "squeeze_excite",
        examples=("squeeze_excite(0.5, 4)", "squeeze_excite(3, min_channels=1)"),
        tasks=("images",),
        settings=_settings(
            "squeeze_excite",
            always={"min_channels": st.integers(1, 4)},  # the networks have four channels, fewer than by default
            latent_channels=st.sampled_from([64, 1, 0.01, 1.0]) | st.integers(1, 8) | st.floats(0.01, 0.99),
        ),
        needs=(nn.Conv2d,),
    ),
    Row(
        "stochastic_depth",
        examples=("stochastic_depth(drop_rate=0.5)", "stochastic_depth('sample', 0.5, drop_warmup=0.5)"),
        neutral="stochastic_depth(drop_rate=0.0)",
        tasks=("images",),
        settings=_settings(
            "stochastic_depth",
            drop_rate=_scalars("drop_rate", _or_floats([0.2, 1.0, 0, 0.0], 0, 1)),
            drop_warmup=st.sampled_from([0.0, 0.5, "2ba", "1ep"]),
        ),
        needs=(Residual,),
    ),
    Row(
        "swa",
        examples=("swa(0.25, 0.75, '1ba')", "swa('1ba', 1.0, '1ba')"),
        settings=_settings(
            "swa",  # without swa_lr, which rejects the hparam that is the tasks' learning rate
            start=st.sampled_from([0.25, 0.0, "1ba", 0.5]),
            end=st.sampled_from([0.75, 1.0, "5ba"]),
            every=_LENGTH_UNITS,
            swa_lr=None,
            anneal_strategy=None,
            anneal_steps=None,
        ),
    ),
    Row(
        "training_metrics",
        examples=("training_metrics()", "training_metrics(reset='2ba')"),
        neutral="training_metrics(())",
        settings=_settings(
            "training_metrics",
            metrics=st.sampled_from([("accuracy",), ()]),  # the networks have too few classes for top_5
            reset=st.sampled_from(["1ep", "2ep", "1ba", "3ba", None]),
        ),
    ),
    Row(
        "weight_standardization",
        examples=("weight_standardization()", "weight_standardization(1)"),
        tasks=("images",),
        settings=_settings("weight_standardization", n_last_layers_ignore=st.integers(0, 1)),
        needs=(nn.Conv2d,),
    ),
)

SHIPPED: Mapping[str, Row] = MappingProxyType({row.name: row for row in _ROWS})
"""The rows by the name of the factory."""
