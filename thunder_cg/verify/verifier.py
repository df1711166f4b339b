"""The implementation of the hooks of verification: what comes of a trial, and which op is to blame."""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import Op, Ops
from thunder_cg.errors import SkipReason
from thunder_cg.runtime.backend import Backend, Pool
from thunder_cg.runtime.failures import sentence
from thunder_cg.runtime.inputs import MakeBuffers
from thunder_cg.runtime.recording import RegionGraph
from thunder_cg.runtime.region import RuntimeRegion
from thunder_cg.verify.compare import describe_difference, is_tolerable, same
from thunder_cg.verify.hashes import HashGraph, hash_values, hashes_differ
from thunder_cg.verify.trial import Check, Compared, Disturbed, Run, Trial


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A graph that does not do what its ops do."""

    op: Op | None  # the first one whose value differs, if it is known
    difference: str
    where: str = ""  # the op's line in the user's source

    @property
    def reason(self) -> SkipReason:
        """Why the region runs eagerly, and what keeps the rest of it captured."""
        problem = f"its graph disagrees with its ops: {self.difference}"
        if self.op is None:
            return SkipReason(problem, "find the operator to leave eager with deny=[...]")
        first = f"; the first value that differs is made by {self.op.name} {self.where}"
        return SkipReason(problem + first, f"leave the operator eager with deny=[{self.op.deny_name!r}]")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a replay that was to be compared."""

    results: Sequence[Any] | None  # what the call gets; None: the region's ops have to run, and may raise
    disagreement: Disagreement | None = None  # for which the region is quarantined
    remark: str | None = None  # why a difference was tolerated, or why nothing could be compared
    compared: bool = True


Judgement = tuple[Disagreement | None, str | None]  # and why other differences are none

_MORE_RUNS = 4  # of both sides, once they differ
_locks: dict[torch.device, threading.RLock] = {}  # for trials that draw: see Note [Generators of the process]


class ReplayVerifier:
    """Compares replays with eager runs, for one program."""

    hash_values = staticmethod(hash_values)

    def __init__(self, ops: Ops, backend: Backend, aliasing: Aliasing) -> None:
        self._ops, self._backend, self._aliasing = ops, backend, aliasing

    def record(
        self, region: RuntimeRegion, pool: Pool, args: Sequence[Any], place: MakeBuffers, in_pool: Set[int]
    ) -> Check:
        """While the region is recorded: what a comparison needs later, to be kept as the graph's ``check``.

        Args:
            in_pool: the positions of the arguments in the arena, which a replay may overwrite.
        """
        try:
            return Check(in_pool, HashGraph.record(region, self._backend, pool, args, place))
        except Exception:  # the capture of the region will say why
            return Check(in_pool, None)

    def replay(self, region: RuntimeRegion, graph: RegionGraph, args: Sequence[Any]) -> Outcome:
        """Replays ``graph`` for ``args`` and compares. See Note [What is compared].

        Results, written inputs and generators are as one eager run leaves them.
        """
        may_draw = any(op.index in self._aliasing.effects for op in region.ops)
        with _locks.setdefault(region.device, threading.RLock()) if may_draw else nullcontext():
            try:
                trial = Trial(region, graph, args, self._backend, may_draw=may_draw)
            except Exception as error:  # mostly out of memory, which must not cost the call
                return Outcome(graph.replay(args), remark=f"not verified: {sentence(error)}", compared=False)
            try:
                return self._compare(trial)
            except Disturbed as error:
                remark = f"not verified: another thread changed {error} meanwhile"
                return Outcome(trial.replay(rewinds=False).results, remark=remark, compared=False)

    def _compare(self, trial: Trial) -> Outcome:
        """The outcome of a trial. If it raises `Disturbed`, the graph has still to be replayed."""
        try:
            eager = trial.run()
        except Disturbed:
            raise
        except torch.OutOfMemoryError as error:
            return Outcome(trial.replay().results, remark=f"not verified: {sentence(error)}", compared=False)
        except Exception as error:
            trial.rewind()
            return Outcome(None, Disagreement(None, f"its ops raise {sentence(error)}, which a graph does not"))
        if silently := trial.written_without_saying():
            replayed = trial.without_running()
            trial.adopt(eager, replayed, has_run=False, wholly=True)
            op = next((op for op in trial.region.ops if silently in op.inputs), None)
            difference = f"{self._ops.described(silently)} is written by an operator that does not say so"
            return Outcome(replayed.results, Disagreement(op, difference, self._where(op)))
        replayed = trial.replay()
        differing = trial.differing(eager, replayed)
        if not differing:
            return Outcome(replayed.results)
        disagreement, remark = self._explain(trial, eager, replayed, differing)
        trial.adopt(eager, replayed, has_run=True, wholly=disagreement is not None)
        return Outcome(replayed.results, disagreement, remark)

    def _explain(self, trial: Trial, eager: Run, replayed: Run, differing: list[Compared]) -> Judgement:
        """`_judge`, which may fail."""
        is_opaque = any(op.index in self._aliasing.opaque for op in trial.region.ops)
        may_draw_on_host = is_opaque and trial.region.device.type != "cpu"
        try:
            # An unknown operator that draws on the host has done so in the first run, and must not in the others.
            with torch.random.fork_rng(devices=[], enabled=may_draw_on_host):
                return self._judge(trial, eager, replayed, differing)
        except Disturbed:
            raise
        except Exception as error:
            failed = f"{differing[0]} differs, and to find out how failed: {sentence(error)}"
            return Disagreement(None, failed), None

    def _judge(self, trial: Trial, eager: Run, replayed: Run, differing: list[Compared]) -> Judgement:
        """The state is that of the last run."""

        def values(run: Run) -> dict[Compared, Any]:
            found = {of: run.value(of) for of in (*differing, *trial.generators)}
            return {of: v.detach().clone() if isinstance(v, torch.Tensor) else v for of, v in found.items()}

        eagers, graphs = [values(eager)], [values(replayed)]
        eagers += [values(trial.run()) for _ in range(_MORE_RUNS)]
        graphs += [values(trial.replay()) for _ in range(_MORE_RUNS)]
        for of in trial.generators:
            if not all(same(run[of], runs[0][of]) for runs in (eagers, graphs) for run in runs):
                raise Disturbed(of)
        unwritten = trial.never_written([of for of in differing if of.kind == "result"])
        wrong, remarks = [], []
        for of in differing:
            ignored = unwritten.get(of)
            tolerable = is_tolerable([run[of] for run in eagers], [run[of] for run in graphs], ignored)
            if eager.source(of) != replayed.source(of) or not tolerable:
                wrong.append(of)
            elif not (of in unwritten and is_tolerable([eagers[0][of]], [graphs[0][of]], ignored)):
                remarks.append(f"{of} is not deterministic: {describe_difference(eagers[0][of], graphs[0][of])}")
        if not wrong:
            return None, "; ".join(remarks) or None
        op = self._first_op(trial, wrong)
        of = next((of for of in wrong if op is not None and of.name in op.outputs), wrong[0])
        if eager.source(of) == replayed.source(of):
            difference = describe_difference(eagers[0][of], graphs[0][of])
        else:
            difference = f"{_memory_of(replayed.source(of))} in the graph, {_memory_of(eager.source(of))} eagerly"
        return Disagreement(op, f"{of}: {difference}", self._where(op)), None

    def _first_op(self, trial: Trial, wrong: Sequence[Compared]) -> Op | None:
        """The first op whose value differs, of those that the wrong results depend on."""
        ops = trial.region.ops
        results = {of.name for of in wrong} if all(of.kind == "result" for of in wrong) else None
        relevant = self._ancestors(ops, results) if results else {op.index for op in ops}
        once, again = runs = [trial.op_hashes(), trial.op_hashes()]
        filled = trial.op_hashes_on_filled_memory()
        compared = [k for k in range(len(once)) if ops[k].index in relevant]
        unlike: list[int] = []
        while not unlike and len(runs) <= _MORE_RUNS:  # an op may differ now and then
            unlike = [k for k in compared if any(hashes_differ(*run[k], filled[k]) for run in runs)]
            runs.append(trial.op_hashes())
        # Kernels that are not deterministic differ from replay to replay. An op that does not is more likely to blame.
        frozen = [k for k in unlike if not hashes_differ(once[k][1], again[k][1])]
        if unlike:
            return ops[(frozen or unlike)[0]]
        return next((op for op in ops if results and not results.isdisjoint(op.outputs)), None)

    def _ancestors(self, ops: Sequence[Op], names: set[str]) -> set[int]:
        """The ops that these values depend on, also through memory that values share."""
        aliasing, ancestors = self._aliasing, set()
        needed = aliasing.sets_of(names)
        for op in reversed(ops):
            if not needed.isdisjoint(aliasing.sets_of(op.outputs) | aliasing.writes[op.index]):
                ancestors.add(op.index)
                needed |= aliasing.sets_of(op.inputs)
        return ancestors

    def _where(self, op: Op | None) -> str:
        return self._ops.place(op) if op is not None else "at a line unknown to Thunder"


def _memory_of(source: str | None) -> str:
    return f"memory of input {source!r}" if source else "memory of its own"
