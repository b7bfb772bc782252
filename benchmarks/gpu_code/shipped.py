"""The command `shipped`: proofs of everything that ships, one line each, and their summary."""

import argparse
import pathlib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from benchmarks.gpu_code.pretend import pretend
from benchmarks.gpu_code.proving import Proof, Prover
from benchmarks.gpu_code.trials import trials


def main(args: Sequence[str]) -> int:
    """Prove trials and print a line for each; return 1 if one breaks a rule or has other numbers."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_code/run shipped")
    parser.add_argument("patterns", nargs="*", default=["*"], help="patterns of names, as in 'method mixup*'")
    parser.add_argument("--record", type=pathlib.Path, help="file of proofs; what it has is not proven again")
    parser.add_argument("--list", action="store_true", help="only print the names")
    given = parser.parse_args(args)
    chosen = {k: v for k, v in trials().items() if any(fnmatchcase(k, pattern) for pattern in given.patterns)}
    if not chosen:
        parser.error(f"no trial has a name like {given.patterns}; --list prints all")
    if given.list:
        print(*chosen, sep="\n")
        return 0
    known = recorded(given.record)
    proofs = [proof for name, proof in known.items() if name in chosen]
    pretend()
    prover = Prover()
    for name, make in chosen.items():
        if name in known:
            continue
        proofs.append(prover.prove(name, make))
        print(proofs[-1], flush=True)
        if given.record:
            with given.record.open("a") as file:
                file.write(f"{proofs[-1].as_json}\n")
    prover.close()
    print(summary(proofs))
    return int(any(proof.faults or not proof.has_numbers for proof in proofs))


def recorded(path: pathlib.Path | None) -> dict[str, Proof]:
    """Return the proofs that a file records, by name; none if there is no file."""
    if path is None or not path.exists():
        return {}
    return {proof.name: proof for proof in map(Proof.read, path.read_text().splitlines())}


def summary(proofs: Iterable[Proof]) -> str:
    """Return the shares of trials that keep the rules and that have the eager step's numbers."""
    proofs = list(proofs)
    kept, equal = sum(not proof.faults for proof in proofs), sum(proof.has_numbers for proof in proofs)
    lines = [
        f"{len(proofs)} trials: {kept} ({kept / len(proofs):.1%}) compile under the rules, {equal} "
        f"({equal / len(proofs):.1%}) have the eager step's numbers"
    ]
    lines += [f"  {proof}" for proof in proofs if proof.faults or not proof.has_numbers]
    return "\n".join(lines)
