"""Does every method still compute the same, bit for bit, and act at the same places?

    python benchmarks/same_states.py before.json            in one revision: writes the record
    python benchmarks/same_states.py before.json --compare  in another one: exit status 1 if anything differs

For each example of each shipped method, on each task that it accepts: a checksum of the state after 50 steps of four
examples, the text of `step.plan`, and the printed form of the method. No timing.
"""

import argparse
import hashlib
import json
import pathlib
import sys
import warnings
from typing import Any

import torch

from purecompose import State, compose, loop_events, tree
from purecompose.testing import TASKS, Subject, Task


sys.path.append(str(pathlib.Path(__file__).parents[1]))  # for the table of methods

from tests.shipped import SHIPPED  # noqa: E402


STEPS, EXAMPLES = 50, 4


def checksum(state: State) -> str:
    """The first digits of a hash of everything that outlives a step."""
    found = hashlib.sha256()
    for path, leaf in tree.leaves_with_paths(state).items():
        found.update(f"{path} {leaf.dtype} {tuple(leaf.shape)}".encode())
        found.update(leaf.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if leaf.numel() else b"")
    return found.hexdigest()[:16]


def measure(source: str, task: Task) -> dict[str, str]:
    """What one method does on one task."""
    algorithm = Subject.of(source).algorithm
    step = compose(loop_events, [algorithm])
    state = step.init(task.make_state(0, duration=f"{STEPS}ba", batches_per_epoch=10))
    plan = str(step.plan(state))
    for number in range(STEPS):
        state = step(state, task.make_batch(number, EXAMPLES))
    return {"state": checksum(state), "plan": plan, "method": repr(algorithm)}


def record() -> dict[str, Any]:
    """All measurements, by method and task."""
    found: dict[str, Any] = {}
    for row in SHIPPED.values():
        for source in (*row.examples, *([row.neutral] if row.neutral else [])):
            for name in row.accepted:
                found[f"{source} on {name}"] = measure(source, TASKS[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=pathlib.Path, help="the record")
    parser.add_argument("--compare", action="store_true", help="compare with the record instead of writing it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    now = record()
    if not args.compare:
        args.path.write_text(json.dumps(now, indent=1))
        print(f"{len(now)} cases are in {args.path}")
        return
    before = json.loads(args.path.read_text())
    lines = []
    for case in {**before, **now}:
        ours, theirs = before.get(case), now.get(case)
        if ours is None or theirs is None:
            lines.append(f"{case}: {'new' if ours is None else 'gone'}")
            continue
        lines += [f"{case}: another {what}" for what in ours if ours[what] != theirs[what]]
    print("\n".join(lines) or f"{len(now)} cases are the same, bit for bit")
    raise SystemExit(bool(lines))


if __name__ == "__main__":
    main()
