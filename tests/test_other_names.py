"""The names of other libraries are answered by those here, and docs/coming_from.md shows the same table."""

import ast
import inspect
import pathlib
import re
from typing import Any

import pytest
import torch

import purecompose as pc
from purecompose._support.other_names import TABLES, Row, instead_of_name, rows
from tests.pages import run_page


PAGE = pathlib.Path(__file__).parents[1] / "docs/coming_from.md"
ROWS = [row for table in TABLES.values() for row in rows(table)]
PLACES: tuple[Any, ...] = (
    pc, pc.algorithms, pc.functional, pc.optim, pc.schedule, pc.losses, pc.data, pc.observers, pc.State
)  # fmt: skip
COMPOSER: dict[str, str] = {
    "Alibi": "max_sequence_length train_sequence_length_scaling",
    "AugMix": "severity depth width alpha augmentation_set",
    "BlurPool": "replace_convs replace_maxpools blur_first min_channels",
    "ChannelsLast": "",
    "ColOut": "p_row p_col batch resize_target input_key target_key",
    "CutMix": "alpha interpolate_loss uniform_sampling input_key target_key",
    "CutOut": "num_holes length uniform_sampling input_key",
    "DecoupledAdamW": "params lr betas eps weight_decay amsgrad",
    "DecoupledSGDW": "params lr momentum dampening weight_decay nesterov",
    "EMA": "half_life smoothing ema_start update_interval",
    "Factorize": "factorize_convs factorize_linears min_channels latent_channels min_features latent_features",
    "FusedLayerNorm": "optimizers",
    "GatedLinearUnits": "act_fn gated_layer_bias non_gated_layer_bias",
    "GhostBatchNorm": "ghost_batch_size",
    "GradientClipping": "clipping_type clipping_threshold fsdp_enabled",
    "GyroDropout": "p sigma tau",
    "LabelSmoothing": "smoothing target_key",
    "LayerFreezing": "freeze_start freeze_level",
    "LowPrecisionGroupNorm": "apply_at",
    "LowPrecisionLayerNorm": "apply_at",
    "MixUp": "alpha interpolate_loss input_key target_key",
    "NoOpModel": "",
    "ProgressiveResizing": "mode initial_scale finetune_fraction delay_fraction size_increment resize_targets "
    "input_key target_key",
    "RandAugment": "severity depth augmentation_set",
    "SAM": "rho epsilon interval",
    "SelectiveBackprop": "start end keep scale_factor interrupt input_key target_key",
    "SeqLengthWarmup": "duration min_seq_length max_seq_length step_size truncate preserve_end_of_sequence",
    "SqueezeExcite": "latent_channels min_channels",
    "StochasticDepth": "target_layer_name stochastic_method drop_rate drop_distribution drop_warmup",
    "SWA": "swa_start swa_end update_interval schedule_swa_lr anneal_strategy anneal_steps swa_lr",
    "WeightStandardization": "n_last_layers_ignore",
}
"""The classes of Composer's methods, those of its history and its optimizers included, with all their settings."""


def found(path: str) -> Any:
    """Return what is called by this name, or this path, at one of the places with public names."""
    for place in PLACES:
        value: Any = place
        for part in path.split("."):
            value = getattr(value, part, None) if part != "State" or place is pc else value.State
        if value is not None:
            return value
    raise AssertionError(f"nothing is called {path}")


def parameters(function: Any) -> set[str]:
    taken = inspect.signature(function).parameters
    return {"any"} if any(one.kind is one.VAR_KEYWORD for one in taken.values()) else set(taken)


def code_of(row: Row) -> str:
    return "" if row.answer.startswith("none: ") else row.answer.partition("; ")[0]


SETTINGS, NAMES = [row for row in ROWS if row.where], [row for row in ROWS if not row.where]


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.theirs)
def test_each_setting_is_answered_by_the_table(row: Row) -> None:
    answer, code = row.answer.removeprefix("none: "), code_of(row)
    verb = "it does not exist here:" if answer != row.answer else "write"
    for function in row.where:
        called = found(function)
        given = [None] * 2 if function in ("fit", "training", "train") else []
        assert not re.match(r"\w+=", code) or code.partition("=")[0] in parameters(called)
        for name in set(row.names) - parameters(called):
            with pytest.raises(TypeError) as raised:
                called(*given, **{name: 1})
            begin, said = f"got an unexpected keyword argument {name!r}; {verb} ", str(raised.value)
            shorter = re.sub(r"^pc\.[\w.]+\((\w+)(=.*?)\)(?=;|$)", r"\1\2", answer)
            assert said.endswith((begin + answer, begin + shorter))
            assert said.endswith(begin + answer) or shorter.partition("=")[0] in parameters(called)


@pytest.mark.parametrize("row", NAMES, ids=lambda row: row.theirs)
def test_each_name_is_answered_by_the_table(row: Row) -> None:
    for name in row.names:
        for module in (pc, pc.algorithms):
            with pytest.raises(AttributeError, match=f"has no attribute '{name}'; write {re.escape(row.answer)}$"):
                getattr(module, name)


def test_a_name_is_answered_in_one_way() -> None:
    named = [(name.replace("_", "").lower(), "") for row in NAMES for name in row.names]
    answered = named + [(name, function) for row in SETTINGS for name in row.names for function in row.where]
    assert {one for one in answered if answered.count(one) > 1} == set()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.theirs)
def test_code_of_answers_uses_names_and_settings_that_exist(row: Row) -> None:
    code = code_of(row)
    for node in ast.walk(ast.parse(f"f({code})" if re.match(r"\w+=", code) else code or "f")):
        if isinstance(node, ast.Attribute) and (path := ast.unparse(node)).startswith("pc."):
            value = found(path[3:])
            assert value is not None
        if isinstance(node, ast.Call) and (path := ast.unparse(node.func)).startswith("pc."):
            taken = parameters(found(path[3:]))
            assert taken >= {keyword.arg for keyword in node.keywords} or "any" in taken


@pytest.mark.parametrize("name", COMPOSER)
def test_all_methods_and_settings_of_composer_are_known(name: str) -> None:
    place = pc.optim if name.startswith("Decoupled") else pc.algorithms
    with pytest.raises(AttributeError) as raised:
        getattr(place, name)
    factory = getattr(place, re.findall(r"; write pc\.\w+\.(\w+)$", str(raised.value))[0])
    for setting in COMPOSER[name].split():
        if setting not in parameters(factory):
            with pytest.raises(TypeError, match=f"'{setting}'; (write|it does not exist here:) "):
                factory(**{setting: 1})


def test_names_that_nobody_knows_are_plain_errors() -> None:
    with pytest.raises(AttributeError, match="^module 'purecompose.algorithms' has no attribute 'nothing'$"):
        _ = pc.algorithms.nothing  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match="has no attribute 'mixup'; write pc.algorithms.mixup$"):
        _ = pc.mixup  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match="has no attribute '_mixupp'$"):
        _ = pc.algorithms._mixupp  # pyright: ignore[reportAttributeAccessIssue]
    train: Any = pc.train
    with pytest.raises(TypeError, match='argument .epochs.; write duration="3ep"$'):
        train(torch.nn.Linear(1, 1), [], loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1), epochs=3)
    assert instead_of_name("nothing") == "" and not hasattr(torch.nn, "EMA")


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("import_from('purecompose', 'Trainer')", "'purecompose'; write pc.fit(step, state, train)"),
        ("import_from('purecompose.algorithms', 'MixUp')", "write pc.algorithms.mixup"),
        ("pc.metrics.auroc", "write pc.metrics.from_torchmetrics"),
        ("pc.metrics.f2score", "has no attribute 'f2score'"),
        ("pc.Evaluator([], ['precision'])", "write pc.metrics.from_torchmetrics"),
        ("pc.Evaluator([], [pc.metrics.f1])", "call it: f1(num_classes, *"),
        ("pc.optim.adam(iter([torch.ones(1)]), lr=0.1)", "adam() got params (list_iterator); it does"),
        ("pc.optim.sgd(torch.nn.Linear(2, 2))", "sgd() got params (Linear); it does not exist here: an optimizer"),
        ("pc.optim.sgd('fast')", "sgd: lr: expected a number"),
        ("alg.gradient_clipping(1.0)", 'got 1.0 (float); write pc.algorithms.gradient_clipping("norm", 1.0)'),
        ("alg.one_of([alg.mixup(), alg.cutmix()])", "write one_of(a, b), without a list"),
        ("alg.chain([alg.mixup(), alg.cutmix()])", "write chain(a, b), without a list"),
        ("pc.compose([alg.mixup(), Foreign()])", "(Foreign); pc.Algorithm(name"),
        ("pc.compose([Foreign()])", "pc.Algorithm(name, match, apply)"),
        ("pc.compose(pc.loop_events, [Foreign()])", "pc.Algorithm(name, match, apply)"),
        ("state.fit", "a state has no attribute 'fit'; write pc.fit"),
        ("pc.evaluate(state, [(torch.ones(1, 2), torch.ones(1, 1))], step=pc.compose([alg.ema()]))", "step=, if"),
        ("pc.compose([lambda state: alg.mixup()])(state, (torch.ones(1, 2), torch.ones(1, 1)))", "call it, compose(["),
        ("pc.observers.History().plot", 'write history.series("loss"); plt.plot(*history.series("loss"))'),
        ("pc.observers.History()['loss']", "history.series('loss') returns batches and values"),
    ],
)
def test_what_others_write_is_answered(code: str, hint: str) -> None:
    class Foreign:
        def match(self, event: Any, state: Any) -> bool:
            return bool(event and state)

        def apply(self, event: Any, state: Any, logger: Any) -> None:
            del event, state, logger

    def import_from(module: str, name: str) -> None:
        exec(f"from {module} import {name}", {})

    state = pc.State.create(torch.nn.Linear(2, 1), loss=pc.losses.mse, optimizer=pc.optim.sgd(0.1), duration="1ep")
    names = {"pc": pc, "alg": pc.algorithms, "torch": torch, "state": state}
    with pytest.raises((AttributeError, ImportError, TypeError, ValueError, pc.errors.ContractError)) as raised:
        eval(code, {**names, "Foreign": Foreign, "import_from": import_from})
    assert hint in str(raised.value)
    assert isinstance(raised.value, ImportError) is code.startswith("import_from")


def tables() -> dict[str, str]:
    """Return the tables of the page, by their titles."""
    shown = dict[str, str]()
    for title, table in TABLES.items():
        lines = [f"| {title} | here |", "| --- | --- |"]
        for row in rows(table):
            code, mark, explanation = row.answer.partition("; ")
            if len(row.where) == 1 and re.match(r"\w+=", code):
                place = next((place for place in PLACES if hasattr(place, row.where[0])), pc)
                path = "" if place is pc else f"{place.__name__.removeprefix('purecompose.')}."
                code = f"pc.{path}{row.where[0]}({code})"
            theirs = ", ".join(f"`{one}`" for one in row.theirs.split(", ")) if not row.where else f"`{row.theirs}`"
            here = row.answer if row.answer.startswith("none: ") else f"`{code}`{mark}{explanation}"
            lines.append(f"| {theirs} | {here} |")
        shown[title] = "\n".join(lines)
    return shown


def written(text: str) -> str:
    """Return the page with its tables."""
    for title, table in tables().items():
        text, count = re.subn(
            rf"(<!-- names of {title} -->\n\n)(?:\|.*\n)*", lambda found, table=table: found[1] + table + "\n", text
        )
        assert count == 1, f"the page has {count} places for the names of {title}"
    return text


def test_the_page_shows_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    run_page("coming_from.md")
    assert [line.rpartition("; ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "write every=10",
        "write pc.algorithms.ghost_batchnorm",
    ]
    assert PAGE.read_text() == written(PAGE.read_text()), "python -m tests.test_other_names writes them"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
