"""The README's code runs with the printed results."""

import pathlib
import re

import pytest
import torch

import purecompose as pc


README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def batches(count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of ten classes that a linear network can separate."""
    keys = pc.random.split(pc.random.key(5), count + 1)
    centres = pc.random.normal(keys[-1], (10, 64))
    made = []
    for key in keys[:-1]:
        where, noise = pc.random.split(key)
        targets = pc.random.randint(where, (size,), 0, 10)
        made.append((centres[targets] + 0.3 * pc.random.normal(noise, (size, 64)), targets))
    return made


@pytest.mark.slow
def test_the_readmes_code_blocks_run_one_after_the_other(capsys) -> None:
    assert len(BLOCKS) == 4
    names: dict[str, object] = {"batches": batches(6, 16), "test_batches": batches(6, 16)}
    for block in BLOCKS:
        exec(block, names)  # noqa: S102
    printed = capsys.readouterr().out
    accuracy = float(re.search(r"'accuracy': ([\d.]+)", printed)[1])  # pyright: ignore[reportOptionalSubscript]
    assert accuracy > 0.9
    assert "AFTER_DATALOADER" in printed and "selective_backprop" in printed
    assert re.search(r"^ok: \d+ kept, \d+ skipped", printed, re.M)  # the laws, on the user-defined method
    state, step = names["state"], names["step"]
    assert isinstance(state, pc.State) and isinstance(step, pc.Step)
    assert "noise" in str(step.plan(state.replace(timestamp=state.timestamp.replace(batch=1, epoch=0))))


def test_the_first_block_is_about_fifteen_lines_of_code() -> None:
    lines = [line for line in BLOCKS[0].splitlines() if line.strip()]
    assert len(lines) <= 16
