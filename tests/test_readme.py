"""The README's code runs with the printed results, and its figures are those of the benchmarks' records."""

import json
import pathlib
import re
from collections.abc import Mapping

import pytest

import purecompose as pc


ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.slow
def test_the_readmes_code_blocks_run_one_after_the_other(capsys) -> None:
    assert len(BLOCKS) == 3
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(block, names)  # noqa: S102
    printed = capsys.readouterr().out
    accuracy = float(re.search(r"'accuracy': ([\d.]+)", printed)[1])  # pyright: ignore[reportOptionalSubscript]
    (shown,) = re.findall(r"# \{'accuracy': ([\d.]+)\.\.\.\}", README)
    assert accuracy == pytest.approx(float(shown), abs=0.02)
    assert "AFTER_DATALOADER" in printed and "selective_backprop" in printed
    assert re.search(r"^ok: \d+ kept, \d+ skipped", printed, re.M)  # the laws, on the user-defined method
    assert isinstance(names["eight"], pc.Step)


def rows_of(name: str, **values: object) -> list[Mapping]:
    """Return the rows of a benchmark's record that have these values."""
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def answer(question: str) -> str:
    """Return the second cell of the README's row with this question."""
    (found,) = re.findall(rf"^\| [^|]*{question}[^|]* \| ([^|]*) \|", README, re.M)
    return found


def test_times_of_a_step_are_those_recorded() -> None:
    networks = ("MLP", "ResNet-8", "ViT", "GPT")
    for question, side, of in (
        ("What does a compiled step", "by hand + torch.compile", "of ours donated"),
        ("An uncompiled step", "ours eager", "of by hand"),
    ):
        found = {row["network"]: row[of] for row in rows_of("peers", methods=False, side=side)}
        shares = [1 / found[name] if side.startswith("by hand") else found[name] for name in networks]
        assert re.findall(r"\d\.\d\d", answer(question)) == [f"{share:.2f}" for share in shares]
    (row,) = rows_of("population", batches="shared", side="population, compiled, chunks of 8")
    assert answer("64 small MLPs").startswith(f"{row['of by hand']:.2f} of")


def test_costs_of_records_and_kills_are_those_recorded() -> None:
    kills = rows_of("kill_and_resume")
    totals = [sum(row[name] for row in kills) for name in ("runs", "kills", "differences", "half-written", "lost")]
    assert totals[2:] == [0, 0, 0] and answer(f"{totals[0]} runs, killed {totals[1]} times").startswith("none")
    (mlp,), (cnn,) = rows_of("recording", network="mlp"), rows_of("recording", network="cnn")
    share, milliseconds = 100 * (mlp["recorded / plain"] - 1), [row["ms per batch"] for row in (mlp, cnn)]
    assert answer("record a run") == (
        f"{share:.0f} % of steps of {milliseconds[0]:.1f} ms, nothing measurable of steps of {milliseconds[1]:.0f} ms"
    )
    low, high = map(float, cnn["quartiles"].split())
    assert low < 1 < high
