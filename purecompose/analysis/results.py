"""The results of the cells of an ablation: in memory, and in a folder from which it continues."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from purecompose.analysis.cells import Trainer
from purecompose.data.facts import describe_data
from purecompose.records.layout import read_json, write_json, write_text
from purecompose.run.saving.comparison import describe


_DECISIVE = ("optimizer", "loss", "precision", "program", "microbatches")
"""Parts of a run's description on which a metric depends."""
_FILE, _TABLE = "ablation.json", "ablation.txt"


class Results:
    """The metric of each cell and seed; with a folder, every addition is written to `ablation.json` there.

    Attributes:
        values: The metric, by cell and seed.
        modes: The mode in which each cell was trained.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self.folder, self.settings = folder, dict(settings)
        self.values: dict[str, dict[int, float]] = {}
        self.modes: dict[str, str] = {}

    @classmethod
    def opened(cls, trainer: Trainer, seed: int) -> "Results":
        """Return the results that a folder contains, or empty ones.

        Raises:
            ValueError: They are those of another ablation; the message names the differences.
            FileExistsError: The folder contains something else.
        """
        results = cls(trainer.folder, _settings_of(trainer, seed))
        if trainer.folder is None:
            return results
        file = trainer.folder / _FILE
        if not file.exists():
            if trainer.folder.exists() and any(trainer.folder.iterdir()):
                raise FileExistsError(
                    f"ablate: folder={str(trainer.folder)!r} is not empty and has no {_FILE}; choose another folder"
                )
            trainer.folder.mkdir(parents=True, exist_ok=True)
            results._write()
            return results
        content = read_json(file)
        differences = _differences(content["settings"], results.settings)
        if differences:
            raise ValueError(
                f"ablate: folder={str(trainer.folder)!r} contains another ablation: {'; '.join(differences)}. Choose "
                "another folder, or repeat the earlier call"
            )
        for name, cell in content["cells"].items():
            results.values[name] = {int(seed): value for seed, value in cell["values"].items()}
            results.modes[name] = cell["mode"]
        return results

    def missing(self, name: str, seeds: Sequence[int]) -> list[int]:
        """Return the seeds of a cell without a result."""
        return [seed for seed in seeds if seed not in self.values.get(name, {})]

    def add(self, name: str, values: Mapping[int, float], mode: str) -> None:
        """Add results of a cell."""
        self.values.setdefault(name, {}).update(values)
        self.modes[name] = mode
        self._write()

    def finish(self, text: str) -> None:
        """Write the table of the effects."""
        if self.folder is not None:
            write_text(self.folder / _TABLE, f"{text}\n")

    def _write(self) -> None:
        if self.folder is not None:
            cells = {
                name: {"mode": self.modes[name], "values": {str(seed): value for seed, value in values.items()}}
                for name, values in self.values.items()
            }
            write_json(self.folder / _FILE, {"settings": self.settings, "cells": cells})


def _settings_of(trainer: Trainer, seed: int) -> dict[str, Any]:
    """Return what must be the same for results to be comparable, as text."""
    step = trainer.step(frozenset(trainer.methods))
    state = trainer.initial(step, seed)
    described = describe(state, step)
    network = hashlib.blake2b("\n".join(described["model"]).encode(), digest_size=6).hexdigest()
    facts = {"model": network, **{name: str(described[name]) for name in _DECISIVE}}
    others = {name: words for name, words in described["algorithms"].items() if name not in trainer.methods}
    facts |= {"methods that are never left out": ", ".join(others.values()) or "none"}
    facts |= {"evaluated batches": str(trainer.evaluate.num_batches or "all")}
    facts |= {f"data: {name}": value for name, value in describe_data(trainer.data).items()}
    facts |= {f"evaluation data: {name}": value for name, value in describe_data(trainer.evaluate.data).items()}
    return {
        "metric": trainer.metric,
        "duration": str(state.timestamp.run.duration),
        "methods": ", ".join(map(repr, trainer.methods.values())),
        **facts,
    }


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} was {before.get(name, 'absent')}, and is {now.get(name, 'absent')}"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    ]
