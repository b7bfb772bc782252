"""A trial's proof: its GPU code is written, keeps the rules, is assembled, and has the eager step's numbers."""

import json
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

import purecompose as pc
from benchmarks.gpu_code.assembling import Assembled, assembled
from benchmarks.gpu_code.graphs import Graph, graphs_of
from benchmarks.gpu_code.interpreting import load
from benchmarks.gpu_code.numbers import largest
from benchmarks.gpu_code.pretend import find, pretend
from benchmarks.gpu_code.rules import broken
from benchmarks.gpu_code.trials import Run
from benchmarks.gpu_code.writing import Code, code_of
from purecompose.transforms.compilation.backends import Compiled
from purecompose.transforms.compilation.parts import ExecutionPlan
from purecompose.transforms.signature import Signature


TOLERANCE = 1e-4
"""Largest difference in full precision. Only quotients of differences, such as gradient noise scales, come near to it;
others are equal to 1e-6. In half precision a difference is a share of what rounding explains, at most 1."""


class Proof(NamedTuple):
    """What was found out about a trial."""

    name: str
    kernels: int = 0
    calls: int = 0
    fallbacks: tuple[str, ...] = ()
    """Names of torch's own kernels that the code calls."""
    faults: tuple[str, ...] = ()
    """Broken rules."""
    binaries: int = 0
    difference: float | None = None
    """The largest one; `None` if the code could not be run."""
    tolerance: float = TOLERANCE
    reason: str = ""
    """Why the code could not be run, or the field with the largest difference."""

    @property
    def has_numbers(self) -> bool:
        """True if the code has the eager step's numbers."""
        return self.difference is not None and self.difference <= self.tolerance

    def __str__(self) -> str:
        what = f"{self.kernels} kernels, {self.calls} calls"
        if self.fallbacks:
            what += f", of torch: {' '.join(self.fallbacks)}"
        if self.difference is None:
            numbers = f"NOT RUN ({self.reason})"
        elif self.has_numbers:
            numbers = f"equal to {self.difference:.0e}{' of rounding' if self.tolerance == 1 else ''}"
        else:
            numbers = f"DIFFERENT: {self.reason} by {self.difference:.1e}"
        rules = f"BREAKS: {'; '.join(self.faults)}" if self.faults else "keeps the rules"
        return f"{self.name}: {what}; {rules}; {self.binaries} assembled; {numbers}"

    @classmethod
    def read(cls, line: str) -> "Proof":
        """Return a proof from a line of JSON that `as_json` returned."""
        values = json.loads(line)
        return cls(**{**values, "fallbacks": tuple(values["fallbacks"]), "faults": tuple(values["faults"])})

    @property
    def as_json(self) -> str:
        """The proof as a line of JSON."""
        return json.dumps(self._asdict())


class _Unrunnable(Exception):
    """The interpreter cannot run a kernel."""


class Prover:
    """Runs trials and collects their proofs. Kernels are interpreted here and assembled in another process."""

    def __init__(self) -> None:
        with _not_interpreting():
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=pretend)
            self._pool.submit(int).result()

    def prove(self, name: str, make: Callable[[], Run]) -> Proof:
        """Return the proof of a trial."""
        torch._dynamo.reset()
        # Dimensions are small here: sums over less than 8 numbers are pointwise kernels by default.
        with warnings.catch_warnings(), find("torch._inductor.config").patch(unroll_reductions_threshold=1):
            warnings.simplefilter("ignore")
            return _Trial(make(), lambda code: self._pool.submit(assembled, [code])).proof(name)

    def close(self) -> None:
        """End the process that assembles."""
        self._pool.shutdown()


@contextmanager
def _not_interpreting() -> Iterator[None]:
    interpret = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret


class _Trial:
    """One trial's code."""

    def __init__(self, run: Run, assemble: Callable[[Code], "Future[list[Assembled]]"]) -> None:
        self.run, self.assemble = run, assemble
        self.codes: list[Code] = []
        self.faults: dict[str, None] = {}
        self.binaries: list[Future[list[Assembled]]] = []

    def proof(self, name: str) -> Proof:
        step, tolerance = self.run.step, 1.0 if self.run.is_half else TOLERANCE
        compiled = pc.compile(step, quiet=True)
        difference, reason = None, ""
        try:
            given = self.run.state, self.run.batches, self._runnable
            found = largest(step, compiled, *given, is_half=self.run.is_half)
            reason = max(found, key=lambda field: found[field])
            difference = found[reason]
        except _Unrunnable as error:
            reason = str(error)
            self._write_all()
        except Exception as error:
            reason = "it does not compile"
            self._break(f"{type(error).__name__}: {error}".splitlines()[0][:300])
        self._check_plans(compiled)
        binaries = [one for future in self.binaries for one in future.result()]
        for one in binaries:
            if one.error:
                self._break(f"{one.kernel} fails to be assembled for sm_{one.target}: {one.error}")
        return Proof(
            name,
            sum(len(code.kernels) for code in self.codes),
            sum(len(code.library_calls) for code in self.codes),
            tuple(dict.fromkeys(name for code in self.codes for name in code.fallbacks)),
            tuple(self.faults),
            len(binaries),
            difference,
            tolerance,
            reason,
        )

    def _break(self, rule: str) -> None:
        self.faults[rule] = None

    def _written(self, graph: fx.GraphModule) -> Code:
        code = code_of(Graph("part", graph, True))
        self.codes.append(code)
        self.binaries.append(self.assemble(code))
        for rule in broken(code, graph):
            self._break(rule)
        return code

    def _runnable(self, graph: fx.GraphModule) -> Compiled:
        source = self._written(graph).source
        try:
            call = load(source)
        except Exception as error:
            raise _unrunnable(error) from error

        def run(args: list[Tensor]) -> Any:
            try:
                return call(args)
            except Exception as error:
                raise _unrunnable(error) from error

        return run

    def _write_all(self) -> None:
        """Write the code of all schedules, from the states of eager steps."""
        state, step, seen = self.run.state, self.run.step, set()
        self.codes.clear()
        self.binaries.clear()
        for batch in self.run.batches:
            form = step.prepare(state, batch).bits, Signature.of(batch)[0]
            if form not in seen:
                for graph in graphs_of(step, state, batch):
                    self._written(graph.module)
            seen.add(form)
            state = step(state, batch)

    def _check_plans(self, compiled: Any) -> None:
        """Check that a step is one graph, or one for each segment, which `segments` cuts to have fewer variants."""
        if not self.run.is_one_graph:
            return
        graphs = compiled._graphs
        plans: list[ExecutionPlan] = [plan for one in graphs._entries.values() for plan in one.plans.values()]
        for plan in plans:
            if len(plan.parts) > graphs.segments.num or plan.host is not None:
                self._break(f"takes {len(plan.parts)} graphs in {graphs.segments.num} segments")


def _unrunnable(error: Exception) -> _Unrunnable:
    return _Unrunnable(f"{type(error).__name__}: {error}".splitlines()[0][:300])
