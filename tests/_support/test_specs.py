"""Calls written as text: they are parsed back exactly, and nothing is executed."""

import inspect
import keyword

import pytest
from hypothesis import given, strategies as st

from purecompose._support.specs import Call, SpecError, build, by_name, describe, parse, parse_one
from purecompose.algorithms import FACTORIES


names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name) and name != "none"
)

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
literals = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
calls = st.builds(Call, names, st.lists(literals, max_size=2).map(tuple), st.dictionaries(names, literals, max_size=3))


@given(st.lists(calls, max_size=4).map(tuple), st.sampled_from([",", ", ", " ,\n  ", ",\t"]))
def test_written_calls_are_read_back(written: tuple[Call, ...], separator: str) -> None:
    assert parse(separator.join(map(str, written))) == written


@given(st.text(max_size=40))
def test_any_text_is_a_list_of_calls_or_a_spec_error(text: str) -> None:
    try:
        found = parse(text)
    except SpecError:
        return
    assert parse(",".join(map(str, found))) == found


@pytest.mark.parametrize("text", ["", "  ", "none", " None\n"])
def test_the_list_may_be_empty(text: str) -> None:
    assert parse(text) == ()


def test_arguments_are_literals_with_their_types() -> None:
    call = parse_one("sb(0.3, keep=-1, name='a,b', on=True, sizes=(1, [2.5]), to={'x': None})")
    assert call == Call("sb", (0.3,), {"keep": -1, "name": "a,b", "on": True, "sizes": (1, [2.5]), "to": {"x": None}})


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("0.1dur", ("0.1dur",)),
        ("[3ep, 10m], {5BA: 1h20m}, .5dur", (["3ep", "10m"], {"5BA": "1h20m"}, ".5dur")),
        ("1_000sp, 2.tok, 7sec, 1ba", ("1_000sp", "2.tok", "7sec", "1ba")),
        (r"""'3ep 4ba', 'it\'s 3ep', "3ep' 4ba" """, ("3ep 4ba", "it's 3ep", "3ep' 4ba")),
        # Text that Python reads as numbers stays numbers.
        ("1e5, 2j, 0x1f, 1_0, 0b1, 3.", (1e5, 2j, 31, 10, 1, 3.0)),
    ],
)
def test_times_need_no_quotes(text: str, arguments: tuple[object, ...]) -> None:
    assert parse_one(f"f({text})") == Call("f", arguments)


@given(st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3})?(ep|ba|sp|tok|dur|sec)", fullmatch=True))
def test_a_time_is_read_the_same_with_and_without_quotes(text: str) -> None:
    assert parse(f"f({text}, x=({text},))") == parse(f"f('{text}', x=('{text}',))")


@pytest.mark.parametrize("text", ["f(\ufb01)", "f(_)", "f(___)", "f(ep)"])
def test_names_are_not_read_as_times(text: str) -> None:
    with pytest.raises(SpecError, match="is not a literal"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("mixup(alpha=x)", "mixup: alpha=x is not a literal"),
        ("mixup(alpha=1+1)", "is not a literal"),
        ("mixup(*[1])", "is not a literal"),
        ("mixup(**{'a': 1})", "write the arguments out"),
        ("alg.mixup()", "got alg.mixup()"),
        ("mixup, 3", "got 3"),
        ("mixup(alpha=0.2", "was never closed"),
        ("mixup label", "invalid syntax; expected names separated by commas"),
        ("cosine(warmup=0.1durr)", "a time is a number and ep, ba, up, sp, tok, dur or sec"),
        ("f(-3ep)", "-'3ep' is not a literal"),
        ("0.1dur", "got '0.1dur'"),
        ("3ep(4)", "got '3ep'(4)"),
        ("f(3ep=1)", "invalid decimal literal"),
        ("mixup(a=1, a=2)", "mixup: a is given twice"),
        ("a\0b", "null"),
        ("(" * 5000, "cannot read"),
    ],
)
def test_errors_name_the_problem(text: str, part: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text)
    message = str(caught.value)
    assert part in message
    assert "\n" not in message and len(message) < 300


def test_text_is_not_executed(tmp_path) -> None:
    target = tmp_path / "written"
    for text in (f"open({str(target)!r}, 'w')", f"mixup(alpha=open({str(target)!r}, 'w'))"):
        with pytest.raises(SpecError):
            build(parse_one(text), FACTORIES, "algorithm")
    assert not target.exists()


@pytest.mark.parametrize("text", ["", "a, b"])
def test_one_call_is_one_call(text: str) -> None:
    with pytest.raises(SpecError, match="expected one name"):
        parse_one(text)


def test_a_factory_gets_the_arguments() -> None:
    built = build(parse_one("mixup(0.4, name='again')"), FACTORIES, "algorithm")
    assert built.name == "again"
    assert built.config["alpha"] == 0.4


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("mixpu", ["no algorithm is called 'mixpu'", "did you mean 'mixup'?", "label_smoothing"]),
        ("zzz", ["no algorithm is called 'zzz'; known: activation, alibi", "selective_backprop"]),
        ("mixup(alfa=1)", ["mixup has no parameter 'alfa'", "did you mean 'alpha'?", "interpolate_loss"]),
        ("mixup(zzz=1)", ["mixup has no parameter 'zzz'; it has alpha"]),
        ("mixup(1, 2, 3)", ["mixup: too many positional arguments", "mixup(alpha=0.2, *,"]),
        ("mixup(1, alpha=2)", ["mixup: multiple values for argument 'alpha'"]),
        ("mixup(alpha=-1)", ["mixup", "-1"]),
        ("selective_backprop(keep='x')", ["selective_backprop", "'x'"]),
    ],
)
def test_errors_of_a_factory_are_reported_with_its_name(text: str, parts: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        build(parse_one(text), FACTORIES, "algorithm")
    for part in parts:
        assert part in str(caught.value)


def test_factories_that_take_any_keyword_get_it() -> None:
    assert build(parse_one("make(b=2)"), {"make": lambda **given: given}, "thing") == {"b": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(1, 2, c=3)", "f(a=1, b=2, c=3)"),
        ("f(b=2)", "f(b=2)"),
        ("f(1, 2, 3)", "f(1, 2, 3)"),
        ("f(1, a=2)", "f(1, a=2)"),
        ("rest(1, 2)", "rest(1, 2)"),
        ("first(1)", "first(1)"),
        ("other(1)", "other(1)"),
    ],
)
def test_arguments_get_their_names_where_they_can(text: str, expected: str) -> None:
    def f(a, b=0, *, c=0): ...
    def rest(a, *others): ...
    def first(a, /): ...

    assert str(by_name(parse_one(text), {"f": f, "rest": rest, "first": first})) == expected


def test_a_signature_is_shown_without_annotations() -> None:
    def made(first: int, /, second: "str" = "x", *, third: float = 1.0) -> None: ...

    assert describe("made", inspect.signature(made)) == "made(first, /, second='x', *, third=1.0)"
