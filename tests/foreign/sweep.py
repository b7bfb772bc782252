"""Run every case of the sweep in every mode, and print unexpected outcomes and a table.

python -m tests.foreign.sweep [pattern of names] [mode ...]
"""

import re
import sys
from collections import Counter

import torch

from tests.foreign.foreign_cases import CASES
from tests.foreign.foreign_libraries import MISSING
from tests.foreign.foreign_modes import MODES, outcome_of


KINDS = ("match", "refused", "obscure", "wrong")


def main(pattern: str = "", *modes: str) -> int:
    """Return the number of unexpected outcomes."""
    torch.set_num_threads(1)
    counts: Counter[tuple[str, str]] = Counter()
    unexpected = 0
    for name, case in CASES.items():
        for mode in modes or MODES:
            if not re.search(pattern, name) or (mode == "inductor" and not case.inductor):
                continue
            found = outcome_of(case, mode)
            counts[mode, found.kind] += 1
            if found.kind != ("match" if case.refusal(mode) is None else "refused"):
                unexpected += 1
                print(f"{name}, {mode}: {found.kind}: {found.detail}", flush=True)
    print(f"{'mode':<14}" + "".join(f"{kind:>9}" for kind in KINDS))
    for mode in modes or MODES:
        print(f"{mode:<14}" + "".join(f"{counts[mode, kind]:>9}" for kind in KINDS))
    missing = f"; not installed: {', '.join(MISSING)}" if MISSING else ""
    print(f"{len(CASES)} cases, torch {torch.__version__}{missing}")
    return unexpected


if __name__ == "__main__":
    sys.exit(min(main(*sys.argv[1:]), 1))
