"""The training methods. Each module has factories that return an `Algorithm`, and their functional cores.

A setting of the wrong type or out of range, and a field for writing that can only be read, raise a `TypeError` or
`ValueError` that names it; docstrings list the other errors.

All cores are also exported from `purecompose.functional`.
"""

from collections.abc import Callable

from purecompose._support import publish
from purecompose.algorithms._alibi import alibi as alibi
from purecompose.algorithms._around_updates import lookahead as lookahead, sam as sam, schedule_free as schedule_free
from purecompose.algorithms._averages import ema as ema, swa as swa
from purecompose.algorithms._batch_sizes import (
    batch_size_warmup as batch_size_warmup,
    gradient_accumulation as gradient_accumulation,
)
from purecompose.algorithms._combined import (
    COMBINED as COMBINED,
    chain as chain,
    during as during,
    every as every,
    named as named,
    one_of as one_of,
    sometimes as sometimes,
)
from purecompose.algorithms._convolutions import (
    blurpool as blurpool,
    channels_last as channels_last,
    pool_first as pool_first,
    squeeze_excite as squeeze_excite,
    weight_standardization as weight_standardization,
)
from purecompose.algorithms._cutmix import cutmix as cutmix
from purecompose.algorithms._dropout import gyro_dropout as gyro_dropout, stochastic_depth as stochastic_depth
from purecompose.algorithms._erasing import colout as colout, cutout as cutout
from purecompose.algorithms._image_operations import augmix as augmix, randaugment as randaugment
from purecompose.algorithms._initial_weights import initialize as initialize, patch_whitening as patch_whitening
from purecompose.algorithms._layer_freezing import layer_freezing as layer_freezing
from purecompose.algorithms._linear_layers import (
    activation as activation,
    factorize as factorize,
    gated_linear_units as gated_linear_units,
)
from purecompose.algorithms._measurements import (
    gradient_noise_scale as gradient_noise_scale,
    gradient_norm as gradient_norm,
    training_metrics as training_metrics,
)
from purecompose.algorithms._optimizer_settings import (
    decoupled_weight_decay as decoupled_weight_decay,
    gradient_clipping as gradient_clipping,
    scale_schedule as scale_schedule,
)
from purecompose.algorithms._overflow import loss_scaling as loss_scaling, skip_nonfinite as skip_nonfinite
from purecompose.algorithms._per_example_clipping import per_example_clipping as per_example_clipping
from purecompose.algorithms._progressive_resizing import progressive_resizing as progressive_resizing
from purecompose.algorithms._replacements import (
    fused_layernorm as fused_layernorm,
    ghost_batchnorm as ghost_batchnorm,
    low_precision_groupnorm as low_precision_groupnorm,
    low_precision_layernorm as low_precision_layernorm,
    no_op_model as no_op_model,
)
from purecompose.algorithms._selective_backprop import selective_backprop as selective_backprop
from purecompose.algorithms._seq_length_warmup import seq_length_warmup as seq_length_warmup
from purecompose.algorithms._targets import label_smoothing as label_smoothing, mixup as mixup
from purecompose.algorithms._transformers import (
    logit_softcap as logit_softcap,
    qk_norm as qk_norm,
    value_embeddings as value_embeddings,
)
from purecompose.algorithms._views import (
    alternating_flip as alternating_flip,
    random_crop as random_crop,
    test_time_averaging as test_time_averaging,
)
from purecompose.core.algorithm import Algorithm


publish(__name__)


GROUPS: dict[str, tuple[Callable[..., Algorithm], ...]] = {
    "On the batch": (
        alternating_flip,
        augmix,
        colout,
        cutmix,
        cutout,
        gyro_dropout,
        label_smoothing,
        mixup,
        progressive_resizing,
        randaugment,
        random_crop,
        selective_backprop,
        seq_length_warmup,
    ),
    "On the model": (
        activation,
        alibi,
        blurpool,
        channels_last,
        factorize,
        fused_layernorm,
        gated_linear_units,
        ghost_batchnorm,
        logit_softcap,
        low_precision_groupnorm,
        low_precision_layernorm,
        no_op_model,
        pool_first,
        qk_norm,
        squeeze_excite,
        stochastic_depth,
        value_embeddings,
        weight_standardization,
    ),
    "On gradients and numbers": (
        gradient_accumulation,
        gradient_clipping,
        gradient_noise_scale,
        gradient_norm,
        loss_scaling,
        per_example_clipping,
        sam,
        skip_nonfinite,
        training_metrics,
    ),
    "On weights and the run": (
        batch_size_warmup,
        decoupled_weight_decay,
        ema,
        initialize,
        layer_freezing,
        lookahead,
        patch_whitening,
        schedule_free,
        swa,
        test_time_averaging,
    ),
}
"""Factories, grouped by the part of training that they change."""

FACTORIES: dict[str, Callable[..., Algorithm]] = {
    name: factory for name, factory in sorted((made.__name__, made) for group in GROUPS.values() for made in group)
}
"""Map from the name of each factory to the factory, for choosing methods by name, as the command line does."""

BY_NAME: dict[str, Callable[..., Algorithm]] = {**FACTORIES, **COMBINED}
"""The factories, and the functions that make methods of methods, by name."""
