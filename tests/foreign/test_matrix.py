"""The tables of docs/matrix.md say what happens, for the networks whose library imports."""

import functools

import pytest

import purecompose as pc
from purecompose import tree
from tests.foreign.matrix import MARK, MEANINGS, PAGE, Run, cell, on_the_page, rendered, ways
from tests.foreign.matrix_networks import COLUMNS, HEADS, MISSING
from tests.shipped import SHIPPED


page = functools.cache(on_the_page)


def check_imports(head: str) -> None:
    if head in MISSING:
        pytest.skip(f"{MISSING[head]} does not import")


def test_the_page_has_all_methods_and_networks() -> None:
    assert page().keys() == SHIPPED.keys()
    for cells in page().values():
        assert tuple(cells) == HEADS and {*cells.values()} <= {*MEANINGS}
    tables = rendered(page()).partition("Made with")[0]  # also of libraries that are not installed
    assert PAGE.read_text().partition(MARK)[2].partition("Made with")[0] == "\n" + tables


@pytest.mark.slow
@pytest.mark.parametrize("head", [*COLUMNS, *MISSING])
def test_steps_do_what_the_page_says(head: str) -> None:
    check_imports(head)
    found = {method: cell(method, head) for method in SHIPPED}
    assert found == {method: cells[head] for method, cells in page().items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("blurpool", "timm ResNet"),
        ("mixup", "timm EfficientNet"),
        ("stochastic_depth", "timm ViT"),
        ("alibi", "HF GPT-2"),
        ("per_example_clipping", "HF BERT"),
        ("gyro_dropout", "HF ViT"),
        ("sam", "PyG GIN"),
    ],
)
def test_compiled_steps_agree(method: str, head: str) -> None:
    check_imports(head)
    way = next(ways(method, head))
    run = Run.of([way.algorithm], way.case, "fp32")
    step = pc.compile(pc.compose(pc.loop_events, [way.algorithm]), backend="eager", quiet=True)
    state = run.start
    for batch in way.case.batches()[:2]:
        state = step(state, batch)
    near = tree.differences(state.params, run.end.params, tolerance=lambda _: tree.Tolerance(1e-4, 1e-5))
    assert list(map(str, near)) == []
