"""The files in a run's folder; each is written completely or not at all."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from purecompose.run.saving.folder import CHECKPOINTS as CHECKPOINTS, written


CONFIG, VERSIONS, PLAN, COMMAND = "config.toml", "versions.json", "plan.txt", "command.txt"
RECORDS, HISTORY = "records.jsonl", "history.json"
RESULT, CURVES, REPORT = "result.json", "curves.png", "report.html"
LOCK = ".lock"


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8, in one move."""
    with written(path) as new:
        new.write_bytes(text.encode("utf-8", "replace"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON, in one move.

    Numbers that are not finite become the strings "nan", "inf" and "-inf"; tensors become lists.
    """
    write_text(path, json.dumps(_finite(content), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if hasattr(value, "tolist"):  # a tensor, or a NumPy number
        return _finite(value.tolist())
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
