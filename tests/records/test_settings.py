import enum
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from purecompose.records.layout import checked_settings, to_toml


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | TEXT
VALUES = SCALARS | st.lists(SCALARS.filter(lambda one: one is not None), max_size=3)
FLAT = st.dictionaries(TEXT, VALUES, max_size=5)


@given(st.dictionaries(TEXT, VALUES | FLAT, max_size=6))
def test_a_file_in_toml_reads_back_as_it_was_given(config: dict) -> None:
    def known(settings: dict) -> dict:
        return {n: known(v) if isinstance(v, dict) else v for n, v in settings.items() if v is not None}

    # By repr, in which NaN is NaN, -0.0 is not 0.0 and True is not 1; tables come last.
    expected = known(config)
    ordered = {n: v for n, v in expected.items() if not isinstance(v, dict)} | expected
    order = [n for n, v in expected.items() if not isinstance(v, dict)]
    order += [n for n in expected if n not in order]
    read = tomllib.loads(to_toml(checked_settings(config, "test")))
    assert repr(read) == repr({n: ordered[n] for n in order})


def test_paths_tuples_and_enum_members_become_types_of_toml() -> None:
    class Color(enum.StrEnum):
        RED = "red"

    class Size(enum.IntEnum):
        LARGE = 3

    settings = checked_settings({"data": Path("a/b"), "betas": (0.9, 0.99), "color": Color.RED, "size": Size.LARGE}, "")
    assert tomllib.loads(to_toml(settings)) == {"data": "a/b", "betas": [0.9, 0.99], "color": "red", "size": 3}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([1], "here: expected settings by name, a mapping"),
        ({1: 2}, r"here: expected names of settings as strings, got 1 \(int\)"),
        ({"net": object()}, "here: net: expected a string, a number, a bool or a list"),
        ({"model": {"width": 1j}}, r"here: model.width: .* got 1j \(complex\)"),
        ({"model": {"deep": {"deeper": 1}}}, r"here: model.deep: .* \(dict\)"),
        ({"list": [1, None]}, r"here: list\[1\]: .* None"),
    ],
)
def test_values_that_toml_cannot_represent_are_refused(config: object, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        checked_settings(config, "here")  # pyright: ignore[reportArgumentType]
