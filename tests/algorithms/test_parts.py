"""Parts of a network: methods on the model leave frozen ones alone, and `where=` chooses parts by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop_events
from purecompose.functional import apply_surgery
from purecompose.nn import models
from tests.helpers import assert_same, make_batches, make_state
from tests.sampling import one_in


class Distillation(nn.Module):
    """A frozen teacher, the first or the last of two equal networks, and a student that learns its outputs."""

    def __init__(self, make_net: Any, *, teacher_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in ("teacher", "student") if teacher_first else ("student", "teacher"):
            self.add_module(name, make_net())
        self.teacher = self.get_submodule("teacher").requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.get_submodule("student")(inputs) - self.teacher(inputs)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2),
        nn.Sequential(nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.ReLU()),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(8, 64),
        nn.Linear(64, 3),
    )


def language() -> nn.Module:
    return models.build("gpt", in_shape=(8,), num_classes=5, seed=0, width=16, depth=2)


def residual() -> nn.Module:
    return models.build("resnet8", in_shape=(3, 8, 8), num_classes=3, seed=0, width=4)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Dropout(0.5)), nn.Linear(8, 3))


METHODS: dict[str, tuple[Any, Any, str]] = {
    "activation": (language, alg.activation, ""),
    "alibi": (language, lambda **options: alg.alibi(1.0, **options), ""),
    "blurpool": (convolutional, lambda **options: alg.blurpool(min_channels=1, **options), ""),
    "factorize": (
        convolutional,
        lambda **options: alg.factorize(min_features=1, latent_features=2, factorize_convs=False, **options),
        "",
    ),
    "gated_linear_units": (language, alg.gated_linear_units, ""),
    "ghost_batchnorm": (convolutional, lambda **options: alg.ghost_batchnorm(2, **options), ""),
    "gyro_dropout": (dropping, lambda: alg.gyro_dropout(0.5, 4, 2), ""),
    "logit_softcap": (language, alg.logit_softcap, ""),
    "low_precision_groupnorm": (convolutional, alg.low_precision_groupnorm, "bf16"),
    "low_precision_layernorm": (language, alg.low_precision_layernorm, "bf16"),
    "qk_norm": (language, alg.qk_norm, ""),
    "squeeze_excite": (convolutional, lambda **options: alg.squeeze_excite(0.5, min_channels=1, **options), ""),
    "stochastic_depth": (residual, lambda **options: alg.stochastic_depth(drop_rate=0.5, **options), ""),
    "value_embeddings": (lambda: nn.Sequential(language()), alg.value_embeddings, ""),
    "weight_standardization": (convolutional, alg.weight_standardization, ""),
}
CHOOSING = ["activation", "alibi", "blurpool", "factorize", "gated_linear_units", "ghost_batchnorm", "squeeze_excite"]
CHOOSING += ["qk_norm", "value_embeddings", "weight_standardization"]


def begun(state: State, method: pc.Algorithm) -> State:
    return compose(loop_events, [method]).init(state)


def part(state: State, name: str) -> str:
    return str(state.model.module.get_submodule(name))


@pytest.mark.parametrize("teacher_first", [True, False])
@pytest.mark.parametrize("name", one_in(3, METHODS))
def test_a_frozen_teacher_is_left_alone(name: str, teacher_first: bool) -> None:
    """The student is changed as it is without a teacher."""
    make_net, make_method, precision = METHODS[name]
    options: dict[str, Any] = {"batches_per_epoch": 4, **({"precision": precision} if precision else {})}
    state = make_state(Distillation(make_net, teacher_first=teacher_first), **options)
    alone = begun(make_state(make_net(), **options), make_method())
    end = begun(state, make_method())
    assert part(end, "teacher") == part(state, "teacher") == part(state, "student") != part(end, "student")
    assert part(end, "student") == part(alone, "")
    plan = compose(loop_events, [make_method()]).plan(state)
    assert "does not change teacher: nothing trains there" in " ".join(str(plan).split())  # lines may be broken
    freed = state.replace(frozen=[])
    assert part(begun(freed, make_method()), "teacher") != part(state, "teacher")
    assert "nothing trains there" not in str(compose(loop_events, [make_method()]).plan(freed))


@pytest.mark.parametrize("name", CHOOSING)
def test_where_chooses_parts_of_the_network(name: str) -> None:
    make_net, make_method, _ = METHODS[name]
    state = make_state(Distillation(make_net))
    for where in ("teacher", "teacher.*", ["teacher.*", "teacher"]):
        end = begun(state, make_method(where=where))
        assert part(end, "student") == part(state, "student")
        assert part(end, "teacher") == part(begun(state.replace(frozen=[]), make_method()), "teacher")
    both = make_method(where="*")
    assert "nothing trains there" not in str(compose(loop_events, [both]).plan(state))
    with pytest.raises(ValueError, match="where='teach' matches no module"):
        begun(state, make_method(where="teach"))


def test_standardization_ignores_the_last_layers_of_the_parts_that_it_changes() -> None:
    state = make_state(Distillation(convolutional, teacher_first=False))
    student: Any = begun(state, alg.weight_standardization(1)).model.module.get_submodule("student")
    assert [type(student[at]).__name__ for at in (0, 2)] == ["StandardizedConv2d", "Conv2d"]


def test_a_method_that_finds_only_frozen_parts_says_so() -> None:
    net = nn.Sequential(nn.Sequential(nn.Conv2d(4, 8, 1)).requires_grad_(False), nn.Linear(8, 3))
    method = alg.squeeze_excite(0.5, min_channels=1)
    with pytest.warns(UserWarning, match="left 1 alone, in parts without trainable parameters or that where= does not"):
        begun(make_state(net), method)


def test_blocks_of_a_frozen_part_have_no_rates() -> None:
    net = apply_surgery(Distillation(residual), alg.stochastic_depth(drop_rate=0.6))
    alone = apply_surgery(residual(), alg.stochastic_depth(drop_rate=0.6))
    rates = {name: buffer.item() for name, buffer in net.named_buffers() if name.endswith("drop_rate")}
    assert rates == {
        f"student.{name}": buffer.item() for name, buffer in alone.named_buffers() if name.endswith("drop_rate")
    }


def test_a_network_without_trainable_parameters_is_changed_as_a_whole() -> None:
    net = convolutional().requires_grad_(False)
    assert "SqueezeExcite" in str(apply_surgery(net, alg.squeeze_excite(0.5, 1)))
    state = make_state(net)
    assert part(begun(state, alg.weight_standardization()), "") != part(state, "")


# Parameters by name


class Two(nn.Module):
    """Two players of one form, whose outputs are added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.first(inputs) + self.second(inputs)


def run(*methods: pc.Algorithm, num: int = 6) -> list[State]:
    """Return the states after INIT and each batch."""
    step = compose(loop_events, methods)
    states = [step.init(make_state(Two(), optimizer=pc.optim.sgd(0.1), duration=f"{num}ba"))]
    for batch in make_batches(num):
        states.append(step(states[-1], batch))
    return states


def of(tensors: dict[str, Tensor], player: str) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{player}.")}
    assert found
    return found


def test_only_chosen_parameters_and_statistics_are_averaged() -> None:
    state = run(alg.ema("2ba", where="first.*"))[-1]
    seen, whole = pc.surgery.with_weights(state, "ema"), pc.surgery.with_weights(run(alg.ema("2ba"))[-1], "ema")
    for field in ("params", "buffers"):
        live, mine = getattr(state, field), getattr(seen, field)
        assert_same(of(mine, "first"), of(getattr(whole, field), "first"))
        assert all(mine[name] is live[name] for name in of(live, "second"))
    assert not torch.equal(seen.buffers["first.1.running_mean"], state.buffers["first.1.running_mean"])


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_only_chosen_gradients_are_clipped(kind: Any) -> None:
    start, plain = run(num=1)
    clipped = run(alg.gradient_clipping(kind, 1e-3, where="first.*"), num=1)[-1]
    excluding = run(alg.gradient_clipping(kind, 1e-3, exclude=["second.*"]), num=1)[-1]
    assert_same(clipped.params, excluding.params)
    assert_same(of(clipped.params, "second"), of(plain.params, "second"))
    moved = [clipped.params[name] - start.params[name] for name in of(start.params, "first")]
    assert (
        0
        < pc.tree.global_norm(moved)
        < pc.tree.global_norm([plain.params[name] - start.params[name] for name in of(start.params, "first")])
    )


def test_only_chosen_weights_decay() -> None:
    decay = alg.decoupled_weight_decay
    assert_same(run(decay(0.1, where="first.*"))[-1].params, run(decay(0.1, exclude=["second.*"]))[-1].params)
    both = decay(0.1, where=["first.*", "second.0.*"], exclude=["first.*"])
    assert_same(run(both)[-1].params, run(decay(0.1, where="second.0.*"))[-1].params)


def test_only_chosen_layers_are_frozen_in_turn() -> None:
    states = run(alg.layer_freezing(0.5, num_stages=2, where="second.*"), num=8)
    assert states[-1].metrics["layer_freezing/layers_frozen"] == 1  # of three, of which the last one never is
    weights = [name for name in states[-1].params if name.endswith("weight")]
    assert [one for one in weights if torch.equal(states[-1].params[one], states[-2].params[one])] == [
        "second.0.weight"
    ]


@pytest.mark.parametrize(
    ("method", "pattern"),
    [
        (lambda where: alg.ema(where=where), "ema: where: 'third.*' matches no trainable parameter"),
        (
            lambda where: alg.gradient_clipping("norm", 1.0, where=where),
            "gradient_clipping: where: 'third.*' matches no",
        ),
        (lambda where: alg.decoupled_weight_decay(where=where), "decoupled_weight_decay: where: 'third.*' matches no"),
        (lambda where: alg.layer_freezing(0.1, where=where), "layer_freezing: where: 'third.*' matches no trainable"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(method: Any, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        run(method("third.*"))
    with pytest.raises(TypeError, match="where: expected patterns of names"):
        method(3)
    shown = repr(method("first.*"))
    assert "where=('first.*',)" in shown and "where" not in repr(method(None))


def test_no_pattern_clips_nothing() -> None:
    plain = run(num=1)[-1]
    assert_same(run(alg.gradient_clipping("norm", 1e-3, where=()), num=1)[-1].params, plain.params)
