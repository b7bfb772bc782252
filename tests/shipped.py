"""The table of shipped algorithms, with the settings and tasks for laws and property tests, one row each.

A test compares the table with the factories, so that a new algorithm cannot be left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hypothesis import strategies as st
from torch import nn

from purecompose._support import specs
from purecompose.algorithms import FACTORIES
from purecompose.core.algorithm import Algorithm
from purecompose.nn.layers.transformer import FeedForward, SelfAttention
from purecompose.nn.models.transformer import GPT
from purecompose.schedule import cosine, hparam, linear
from purecompose.schedule.declared import Within, alternatives, declarations
from purecompose.testing.tasks import TASKS, Residual, Task


FULL_TASKS = tuple(name for name, task in TASKS.items() if not task.is_half and name != "gpt")
"""Names of the tasks in full precision, without gpt, which is for methods that need this network."""


@dataclass(frozen=True)
class Row:
    """A shipped algorithm.

    Args:
        name: Name of its factory.
        examples: Source texts, as for `Subject.of`, on which all laws run.
        neutral: Source text with settings that change nothing; `None` if there are none.
        tasks: Names of the `TASKS` that it accepts in full precision, with "gpt" only for a method that needs this
            network; names of tasks in half precision only for a method that does nothing elsewhere. See `accepted`.
        fixed: Settings that `algorithms` takes from the examples, since they depend on each other or on the tasks'
            small networks.
        needs: Types of layers, one of which a network must contain, for methods that replace or use them.
        is_alone: True if the algorithm excludes all others, so that it is in no list of several.
    """

    name: str
    examples: tuple[str, ...]
    neutral: str | None = None
    tasks: tuple[str, ...] = FULL_TASKS
    fixed: tuple[str, ...] = ()
    needs: tuple[type[nn.Module], ...] = ()
    is_alone: bool = False

    def algorithms(self) -> st.SearchStrategy[Algorithm]:
        """Return a strategy for the algorithm with any `settings`."""
        return self.settings().map(lambda settings: FACTORIES[self.name](**settings))

    def settings(self) -> st.SearchStrategy[dict[str, Any]]:
        """Return a strategy for arguments: those of an example, some replaced by other values that are declared."""
        examples = [specs.by_name(specs.parse_one(text), FACTORIES).kwargs for text in self.examples]
        annotations = declarations(FACTORIES[self.name]).items()
        others = {name: _declared(f"{self.name}/{name}", one) for name, one in annotations if name not in self.fixed}
        changed = st.fixed_dictionaries({}, optional=others)
        return st.builds(lambda example, other: {**example, **other}, st.sampled_from(examples), changed)

    @property
    def accepted(self) -> tuple[str, ...]:
        """The names of the `TASKS` on which laws are tried: all that it accepts, but "gpt" only if `tasks` names it."""
        return tuple(
            name for name, task in TASKS.items() if self.accepts(task) and (name != "gpt" or name in self.tasks)
        )

    def accepts(self, task: Task) -> bool:
        """Return whether it accepts such inputs, acts in the task's precision, and finds the layers that it needs."""
        named = [TASKS[name] for name in self.tasks]
        if task.kind not in {one.kind for one in named}:
            return False
        if not task.is_half and all(one.is_half for one in named):
            return False
        return not self.needs or any(isinstance(module, self.needs) for module in task.make_net(0).modules())


_SCHEDULES = st.sampled_from([linear(), linear(0.0, 1.0, t_max="0.5dur"), cosine(), cosine(warmup="0.25dur")])


def _declared(name: str, annotation: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for a setting as it is declared, without values if the declaration does not enumerate them."""
    choices, checks, others = alternatives(annotation)
    values = st.sampled_from(choices) if choices else st.nothing()
    for check in checks:
        declared = getattr(check, "__self__", None)  # of a range; other checks are plain functions
        if isinstance(declared, Within):
            numbers = _numbers(declared, is_whole=check == declared.whole)
            values |= numbers
            if check == declared.scalar:
                hparams = numbers.map(lambda number: hparam(name, number))
                values |= hparams | st.builds(lambda one, other: one * other, numbers | hparams, _SCHEDULES)
    return st.none() | values if type(None) in others and not values.is_empty else values


def _numbers(declared: Within, *, is_whole: bool) -> st.SearchStrategy[Any]:
    """Return a strategy for numbers of a range that is cut off at 10; in steps of a hundredth if they are not whole."""
    low, high = declared.low, min(declared.high, 10)
    if is_whole:
        return st.integers(int(low), int(high))
    parts = st.integers(int(declared.above), 100 - int(declared.below))
    return parts.map(lambda part: low + (high - low) * part / 100)


_UNMIXED_IDS = ("vectors", "soft", "images", "frozen", "zero_head", "double", "bf16_weights")
_NO_BATCHNORM = ("vectors", "soft", "tokens", "frozen", "zero_head", "double", "bf16_weights")

_ROWS = (
    Row("activation", examples=("activation()", "activation('tanh')"), tasks=("tokens",), needs=(FeedForward,)),
    Row("alibi", examples=("alibi(0.6)", "alibi(1)"), tasks=("tokens",), needs=(SelfAttention,)),
    Row(
        "alternating_flip",
        examples=("alternating_flip()", "alternating_flip(mirror_targets=False)"),
        tasks=("images",),
        fixed=("mirror_targets",),
    ),
    Row(
        "augmix",
        # Few operations, because each is compiled for every step of a chain; RandAugment's examples have all of them.
        examples=(
            "augmix(3, width=2, augmentation_set=('rotate', 'equalize', 'color'))",
            "augmix(5, depth=1, width=2, augmentation_set=('shear_x', 'brightness'))",
        ),
        neutral="augmix(0)",
        tasks=("images",),
        fixed=("width",),
    ),
    Row(
        "batch_size_warmup",
        examples=("batch_size_warmup(1.0, 0.25)", "batch_size_warmup(0.6, 0, 1)"),
        neutral="batch_size_warmup(0)",
    ),
    Row(
        "blurpool",
        examples=("blurpool(min_channels=4)", "blurpool(blur_first=False, min_channels=1)"),
        tasks=("images",),
        needs=(nn.Conv2d,),
        fixed=("min_channels", "replace_convs"),
    ),
    Row("channels_last", examples=("channels_last()",), tasks=("images",), needs=(nn.Conv2d,)),
    Row(
        "colout",
        examples=("colout(0.2, 0.4)", "colout(0.5, 0.2, resize_target=False)"),
        neutral="colout(0, 0)",
        tasks=("images",),
        fixed=("resize_target",),
    ),
    Row(
        "cutmix",
        examples=("cutmix(1.0)", "cutmix(0.5, interpolate_loss=True, uniform_sampling=True)"),
        neutral="cutmix(0)",
        tasks=("images",),
    ),
    Row(
        "cutout",
        examples=("cutout()", "cutout(2, 0.7, uniform_sampling=True, per_example=True)"),
        neutral="cutout(0)",
        tasks=("images",),
    ),
    Row(
        "decoupled_weight_decay",
        examples=("decoupled_weight_decay(0.01)", "decoupled_weight_decay(0.05, 2, ('*bias',))"),
        neutral="decoupled_weight_decay(0.0)",
    ),
    Row("ema", examples=("ema('2ba')", "ema(smoothing=0.9, every='2ba')"), fixed=("smoothing",)),
    Row(
        "factorize",
        examples=(
            "factorize(min_channels=4, latent_channels=0.5, min_features=3, latent_features=1)",
            "factorize(factorize_convs=False, min_features=1, latent_features=0.25)",
        ),
        neutral="factorize(False, False)",
        fixed=("min_channels", "min_features", "factorize_convs", "factorize_linears"),
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
        examples=("gradient_accumulation(2)", "gradient_accumulation(3)", "gradient_accumulation(2, where='*weight')"),
        neutral="gradient_accumulation(1)",
    ),
    Row(
        "gradient_clipping",
        examples=(
            "gradient_clipping('norm', 0.1)",
            "gradient_clipping('value', 0.01)",
            "gradient_clipping('adaptive', 0.01, exclude=('*.bias',))",
        ),
        neutral="gradient_clipping('norm', 1e999)",  # infinity, as a literal
    ),
    Row("gradient_noise_scale", examples=("gradient_noise_scale()", "gradient_noise_scale(0)")),
    Row(
        "gradient_norm", examples=("gradient_norm()", "gradient_norm(each=True)"), neutral="gradient_norm(total=False)"
    ),
    Row(
        "gyro_dropout",
        examples=("gyro_dropout(0.5, 4, 2)", "gyro_dropout(0.3)"),
        neutral="gyro_dropout(0)",
        fixed=("sigma", "tau"),
    ),
    Row(
        "initialize",
        examples=("initialize('dirac')", "initialize('zeros', '5.*')", "initialize('orthogonal', '[58].*')"),
        tasks=("images",),
        needs=(nn.Conv2d,),
        fixed=("how", "where"),
    ),
    Row("label_smoothing", examples=("label_smoothing(0.1)", "label_smoothing(1)"), neutral="label_smoothing(0)"),
    Row(
        "layer_freezing",
        examples=("layer_freezing(0.0, num_stages=None)", "layer_freezing(0.3, num_stages=3)"),
        neutral="layer_freezing(freeze_level=0)",
    ),
    Row(
        "logit_softcap",
        examples=("logit_softcap()", "logit_softcap(0.5)"),
        neutral="logit_softcap(1e999)",
        needs=(nn.Linear,),
    ),
    Row(
        "lookahead",
        # Short intervals, so that it acts in short runs.
        examples=("lookahead(every=1)", "lookahead(0.8, every=2)"),
        neutral="lookahead(1)",
    ),
    Row(
        "loss_scaling",
        examples=("loss_scaling()", "loss_scaling(1024.0, growth_factor=4.0, growth_interval=1)"),
        neutral="loss_scaling(1.0, growth_factor=1.0, backoff_factor=1.0)",
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
    ),
    Row("no_op_model", examples=("no_op_model()",), is_alone=True),
    Row(
        "patch_whitening",
        examples=("patch_whitening('0')", "patch_whitening('3', frozen=False)", "patch_whitening('0', frozen='2ba')"),
        tasks=("images",),
        needs=(nn.Conv2d,),
        fixed=("layer", "frozen"),
    ),
    Row(
        "per_example_clipping",
        examples=("per_example_clipping(0.5)", "per_example_clipping(0.5, 0.3, chunk_size=2)"),
        neutral="per_example_clipping(1e999)",
        tasks=_NO_BATCHNORM,
    ),
    Row("pool_first", examples=("pool_first()", "pool_first(norms=False)"), tasks=("images",), needs=(nn.MaxPool2d,)),
    Row(
        "progressive_resizing",
        examples=("progressive_resizing()", "progressive_resizing('crop', 0.5, 0.1, 0, 1)"),
        neutral="progressive_resizing(initial_scale=1)",
        tasks=("images",),
        fixed=("initial_scale", "finetune_fraction", "delay_fraction", "resize_targets"),
    ),
    Row("qk_norm", examples=("qk_norm()", "qk_norm(0.01, scale=0.3)"), tasks=("tokens",), needs=(SelfAttention,)),
    Row(
        "randaugment",
        examples=("randaugment(9, 1)", "randaugment(5, 2, ('rotate', 'equalize', 'sharpness'))"),
        neutral="randaugment(0)",
        tasks=("images",),
        fixed=("depth",),
    ),
    Row(
        "random_crop",
        examples=("random_crop(1)", "random_crop(2, 'zeros', crop_targets=False)"),
        neutral="random_crop(0)",
        tasks=("images",),
        fixed=("padding", "crop_targets"),
    ),
    Row("sam", examples=("sam()", "sam(0.5, every=2)"), neutral="sam(0)"),
    Row("schedule_free", examples=("schedule_free()", "schedule_free(0.0)")),
    Row(
        "selective_backprop",
        examples=(
            "selective_backprop(0, 1.0, full_every=0)",
            "selective_backprop(0, 1.0, keep=0.5, full_every=2)",
            "selective_backprop(0.5, 0.9, keep=0.3)",
        ),
        neutral="selective_backprop(keep=1)",
        fixed=("start", "end", "scale_factor"),
    ),
    Row(
        "seq_length_warmup",
        examples=("seq_length_warmup(0.6, 2, 5, 1)", "seq_length_warmup(1.0, 2, 5, 1, truncate=False)"),
        neutral="seq_length_warmup(0)",
        tasks=("tokens",),
        fixed=("min_seq_length", "max_seq_length", "preserve_end_of_sequence"),
    ),
    Row("skip_nonfinite", examples=("skip_nonfinite()",)),
    Row(
        "squeeze_excite",
        examples=("squeeze_excite(0.5, 4)", "squeeze_excite(3, min_channels=1)"),
        tasks=("images",),
        needs=(nn.Conv2d,),
        fixed=("min_channels",),
    ),
    Row(
        "stochastic_depth",
        examples=("stochastic_depth(drop_rate=0.5)", "stochastic_depth('sample', 0.5, drop_warmup=0.5)"),
        neutral="stochastic_depth(drop_rate=0.0)",
        tasks=("images",),
        needs=(Residual,),
    ),
    Row("swa", examples=("swa(0.25, 0.75, '1ba')", "swa('1ba', 1.0, '1ba')"), fixed=("swa_lr",)),
    Row(
        "test_time_averaging",
        examples=("test_time_averaging()", "test_time_averaging(shift=1)"),
        neutral="test_time_averaging(False)",
        tasks=("images",),
        fixed=("shift",),
    ),
    Row(
        "training_metrics",
        examples=("training_metrics()", "training_metrics(reset='2ba')"),
        neutral="training_metrics(())",
    ),
    Row("value_embeddings", examples=("value_embeddings()", "value_embeddings((1,))"), tasks=("gpt",), needs=(GPT,)),
    Row(
        "weight_standardization",
        examples=("weight_standardization()", "weight_standardization(1)"),
        tasks=("images",),
        needs=(nn.Conv2d,),
        fixed=("n_last_layers_ignore",),
    ),
)

SHIPPED: Mapping[str, Row] = MappingProxyType({row.name: row for row in _ROWS})
"""The rows by the name of the factory."""


def algorithms(name: str | None = None, *, task: Task = TASKS["vectors"]) -> st.SearchStrategy[Algorithm]:
    """Return a strategy for shipped algorithms with any valid settings, by default any that accepts the task."""
    rows = [row for row in SHIPPED.values() if (row.accepts(task) if name is None else row.name == name)]
    return st.one_of([row.algorithms() for row in rows])


def algorithm_lists(*, task: Task = TASKS["vectors"], max_size: int = 3) -> st.SearchStrategy[list[Algorithm]]:
    """Return a strategy for lists of compatible shipped algorithms with different names, in any order."""
    rows = [row for row in SHIPPED.values() if row.accepts(task) and not row.is_alone]
    each = st.one_of([row.algorithms() for row in rows])
    return st.lists(each, max_size=max_size, unique_by=lambda algorithm: algorithm.name)
