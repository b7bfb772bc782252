"""The decorator `laws`, in runs of pytest on users' files."""

import textwrap
from typing import NamedTuple

import pytest

from purecompose.testing import checking


assert checking  # imported here to remain loaded after the runs within this process
pytest_plugins = ["pytester"]


ALGORITHMS = """
from purecompose import Algorithm, Event, on

seen = []

def scale(factor):
    def apply(event, state):
        return state.replace(params={name: factor() * param for name, param in state.params.items()})
    return apply

def grow():
    seen.append(1)
    return 1 - 0.001 * len(seen)

good = Algorithm("good", on(Event.BATCH_END), scale(lambda: 0.99))
bad = Algorithm("bad", on(Event.BATCH_END), scale(grow))

def refuse(event, state):
    raise TypeError("no such batch")

unusable = Algorithm("unusable", on(Event.BATCH_END), refuse)

def three(event, state):
    if state.num_examples == 3:
        raise KeyError("three")
    return state

crashing = Algorithm("crashing", on(Event.BATCH_END), three)
idle = Algorithm("idle", lambda event, state: False, scale(grow))
"""
HEAD = """
import pytest
from purecompose.testing.checking import laws
from user_algorithms import *

FEW = dict(laws=["input_untouched", "deterministic"], tasks=["vectors"], max_examples=3)
"""


class Run(NamedTuple):
    returncode: int
    stdout: str


def run_pytest(pytester: pytest.Pytester, source: str, *options: str) -> Run:
    pytester.makepyfile(user_algorithms=ALGORITHMS, test_user=HEAD + textwrap.dedent(source))
    pytester.syspathinsert()
    result = pytester.runpytest_inprocess("-v", "-rs", "-p", "no:cacheprovider", "-W", "error", *options)
    return Run(int(result.ret), "\n".join(result.outlines))


def lines_with(text: str, word: str) -> list[str]:
    return [
        line.split("::")[1].split(" - ")[0].split()[0]
        for line in text.splitlines()
        if f" {word}" in line and "::" in line
    ]


GOOD_AND_BAD = """
    @laws(good, **FEW)
    def test_good(law):
        law()

    @laws("user_algorithms:bad", **FEW)
    def test_bad(law):
        law()
"""


def test_each_law_is_a_test_with_its_name(pytester) -> None:
    done = run_pytest(pytester, GOOD_AND_BAD)
    assert done.returncode == 1, done.stdout
    assert lines_with(done.stdout, "PASSED") == [
        "test_good[input_untouched]", "test_good[deterministic]", "test_bad[input_untouched]",
    ]  # fmt: skip
    assert "LawViolation: the law deterministic is broken" in done.stdout
    assert "BATCH_END" in done.stdout and "closure" in done.stdout
    # The traceback only shows the author's test: no frame of the library or of Hypothesis.
    assert "purecompose/testing" not in done.stdout and "hypothesis/core.py" not in done.stdout
    assert done.stdout.count("test_user.py:1") >= 1


def test_a_test_body_that_does_not_call_the_law_still_tests_it(pytester) -> None:
    done = run_pytest(
        pytester,
        """
        @laws(bad, **FEW)
        def test_empty(law): ...
        """,
    )
    assert "1 failed, 1 passed" in done.stdout and "test_empty[deterministic]" in done.stdout


def test_bodies_fixtures_and_classes(pytester) -> None:
    done = run_pytest(
        pytester,
        """
        from purecompose.testing.report import Status

        @pytest.fixture
        def answer():
            return 42

        class TestGood:
            @laws(good, **FEW)
            def test_method(self, answer, law, tmp_path):
                assert answer == 42 and tmp_path.exists() and law.outcome is None
                first = law()
                assert first.status is Status.KEPT and first.num_acted == 3 and law() is first
        """,
    )
    assert "2 passed" in done.stdout, done.stdout


def test_laws_that_do_not_apply_are_skipped_and_undecidable_ones_fail(pytester) -> None:
    done = run_pytest(
        pytester,
        """
        from purecompose import identity

        @laws(good, laws=["neutral_setting"], tasks=["vectors"])
        def test_no_neutral(law): law()

        @laws(identity(), **FEW)
        def test_neutral(law): law()

        @laws(idle, laws=["deterministic"], tasks=["vectors"], max_examples=2)
        def test_idle(law): law()

        @laws(crashing, laws=["deterministic"], tasks=["vectors"])
        def test_crashing(law): law()

        @laws(unusable, laws=["deterministic"])
        def test_unusable(law): law()
        """,
    )
    assert "3 failed, 3 skipped" in done.stdout
    assert "no neutral settings given" in done.stdout and "it never acts" in done.stdout
    assert "vacuous: it never acted" in done.stdout
    assert "raised     KeyError: 'three'" in done.stdout and "user_algorithms.py:" in done.stdout
    assert "vectors: TypeError: no such batch" in done.stdout


def test_a_wrong_argument_is_an_error_on_import(pytester) -> None:
    done = run_pytest(pytester, '@laws(good, laws=["determinstic"])\ndef test_good(law): law()')
    assert done.returncode == 2 and "did you mean 'deterministic'" in done.stdout
