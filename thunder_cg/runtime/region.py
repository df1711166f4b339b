"""One region of a program: its ops, and its turn in a call. See Note [Four ways through a call]."""

from __future__ import annotations

import linecache
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from thunder_cg.analysis.ops import Op
from thunder_cg.analysis.partition import Region
from thunder_cg.analysis.region_io import RegionIO
from thunder_cg.errors import CaptureError, CaptureRefused, DisagreementWarning, ReplayRefused
from thunder_cg.runtime.call import Call, Mode
from thunder_cg.runtime.early_outputs import CopiedEarly, EarlyCopier
from thunder_cg.runtime.recording import (
    Guard,
    Outputs,
    RegionGraph,
    Sharing,
    Source,
    address_if_any,
    is_sparse,
    overlaps_itself,
    place,
    plain,
    replaced,
)
from thunder_cg.runtime.sentinels import sentinels
from thunder_cg.runtime.verifier import Disagreement

if TYPE_CHECKING:
    from thunder_cg.runtime.program import Program

LEAF = "an input that is written in place is a leaf that requires grad, which PyTorch does not allow"
_MAX_TRIES = 3  # captures of a region that may fail for a reason that can pass, such as too little memory


@dataclass(frozen=True, slots=True)
class Slot:
    """One result of a region's symbol: an exit, inside or as the copy that leaves."""

    name: str
    leaves: bool


@dataclass(slots=True)
class Stats:
    """Counts of one region. Bytes are those of the last recording, per call."""

    captures: int = 0
    replays: int = 0
    eager_runs: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    verified: int = 0


class RuntimeRegion:
    """One region of a program: its function, and its part in every recording.

    Args:
        watched: for `verify`: the same ops, but returns the fingerprints of their values, in order.
    """

    def __init__(
        self,
        name: str,
        region: Region,
        io: RegionIO,
        function: Callable[..., Sequence[Any]],
        watched: Callable[..., Sequence[Any]] | None = None,
    ) -> None:
        self.name = name
        self.region = region
        self.io = io
        self.device = torch.device(region.device)
        self.slots = tuple(
            Slot(exit.name, leaves)
            for exit in io.outputs_
            for leaves in (False, True)
            if (exit.leaves if leaves else exit.inside)
        )
        self.stats = Stats()
        self.failure: str | None = None  # of its last capture
        self.tries = _MAX_TRIES  # how many captures may still fail; none: it runs eagerly from then on
        self.in_arena: list[int] = []  # inputs in an arena that results may be views of
        leaving = {slot.name for slot in self.slots if slot.leaves}
        self.twice = [i for i, slot in enumerate(self.slots) if not slot.leaves and slot.name in leaving]
        self.disagreement: Disagreement | None = None  # of its graph with its ops: it is quarantined
        self.remark: str | None = None  # what verification found besides
        self.function = function
        self.watched = watched

    @property
    def is_always_verified(self) -> bool:
        """Whether a recording counts only once it has been verified; see Note [Scalars of a graph]."""
        return bool(self.io.numbers)

    @property
    def written(self) -> frozenset[int]:
        return frozenset(i for i, name in enumerate(self.io.inputs) if name in self.io.written)

    def join(self, program: Program, index: int) -> None:
        """Makes it region ``index`` of the program."""
        self.program, self.index = program, index

    def run(self, call: Call, *args: Any) -> Sequence[Any]:
        """The region's turn in a call, with its inputs: what stands behind its symbol in the trace."""
        if call.mode is Mode.REPLAY:
            graph = call.part.graphs[self.index]  # type: ignore[union-attr]
            if graph is not None and self.disagreement is not None:  # while the call was in flight
                self.program.eager(call, f"{self.name} is quarantined", strict=False)
            elif graph is not None:
                if graph.admits(args):
                    try:
                        results = self._verify(call, graph, args) if call.verifies else graph.replay(args)
                        self.stats.replays += 1
                        return results
                    except ReplayRefused as error:
                        self.program.eager(call, f"{self.name} could not be replayed: {_sentence(error)}")
                else:
                    self._miss(call)
        elif self.program.no_leaves and any(is_graded_leaf(args[i]) for i in self.written):
            self.program.eager(call, LEAF, strict=False)  # which raises, where a detached leaf would be written
        elif call.mode is Mode.CAPTURE:
            if self.tries:
                return self._capture(call, args)
            self._forbid_eager()
        elif call.mode is Mode.WARMUP and self.tries:
            return self._warm_up(call, args)
        return self._run(call, args)

    def _verify(self, call: Call, graph: RegionGraph, args: Sequence[Any]) -> Sequence[Any]:
        """A replay that is compared with an eager run, which wins."""
        outcome = self.program.verifier.replay(_Verified(self), graph, args)
        self.stats.verified += outcome.compared
        self.remark = outcome.remark or self.remark
        if not self.program.samples:
            graph.check = None
        results = outcome.results
        if outcome.disagreement is not None:
            self.disagreement, self.tries = outcome.disagreement, 0
            self.failure = f"{outcome.disagreement.problem}; {outcome.disagreement.fix}"
            self.program.quarantine(call, self)
        if results is None:
            results = self._run(call, args)
        if (found := outcome.disagreement) is not None:  # last, since a filter may make an error of the warning
            self._forbid_eager()
            message = f"{self.name} is eager from now on: {found.problem}; {found.fix}"
            warnings.warn(message, DisagreementWarning, stacklevel=2)
        return results

    def _miss(self, call: Call) -> None:
        assert call.recording is not None
        retired = self.program.retire(call.recording)
        reason = f"{self.name}: what an eager operator made is not laid out as when it was captured"
        self.program.eager(call, reason, strict=not retired)

    def _forbid_eager(self) -> None:
        """Raises with ``strict=True``, because the region could not be captured, or was and is quarantined."""
        if self.program.options.strict and self.disagreement is not None:
            raise CaptureError(self.name, self.disagreement.problem, self.disagreement.fix)
        if self.program.options.strict:
            raise CaptureError(self.name, str(self.failure), "deny the operator with deny=[...]")

    def _run(self, call: Call, args: Sequence[Any]) -> Sequence[Any]:
        """Runs the region's ops eagerly. What leaves is no view of the arena's memory."""
        self.stats.eager_runs += 1
        owners = list(args)
        for i in self._inside(call, args):
            owners[i] = call.owned[self.io.inputs[i]]
        results = list(self.function(owners))
        for i in self.twice:  # what leaves becomes a part of autograd's graph, and what stays does not
            results[i] = results[i].detach()
        if held := {_memory(args[i]) for i in self.in_arena} - {0}:
            leaves = [slot.leaves and _memory(result) in held for slot, result in zip(self.slots, results)]
            if any(leaves):
                outputs = Outputs(results.copy(), (), leaves, self.device, torch.Tensor.detach)
                outputs.deliver_owned(results, args)
        self._share(call, results)
        return results

    def _share(self, call: Call, results: Sequence[Any]) -> None:
        """What shares memory with a value that the call owns owns it as well."""
        owned = set(map(_memory, call.owned.values())) - {0}
        for slot, result in zip(self.slots, results):
            if not slot.leaves and _memory(result) in owned:
                call.owned[slot.name] = result

    def _warm_up(self, call: Call, args: Sequence[Any]) -> Sequence[Any]:
        try:
            return self._run_in_arena(call, args)
        except _NotRun as failed:
            self._fail(failed.error)
        self._forbid_eager()
        self.program.fallbacks[f"{self.name} could not be warmed up: {self.failure}"] += 1
        call.mode = Mode.EAGER
        return self._run(call, args)

    def _run_in_arena(self, call: Call, args: Sequence[Any]) -> Sequence[Any]:
        """Runs the region's ops with their memory in the arena, and copies what leaves.

        Where memory runs out, the allocator's cache has been emptied, and the ops may be run again if they have not
        written to what was there before, nor given up memory that they read.

        Raises:
            _NotRun: nothing of it ran.
        """
        assert call.arena is not None
        began = False

        def function(inputs: list[Any], leave: EarlyCopier) -> Sequence[Any]:
            nonlocal began
            began = True
            return self.function(inputs, leave)

        may_rerun = not self.io.written and self.io.alive.issuperset(call.owned)
        while True:
            try:
                pool = call.arena.pool(self.device)
                inside = self._inside(call, args)
                taken = self._take(call, args, inside)
                sources = _sources(self, taken, inside)
                produced = list(pool.warm_up(function, [taken]))
                break
            except Exception as error:
                if not began:
                    raise _NotRun(error) from error
                if not (may_rerun and isinstance(error, torch.OutOfMemoryError)):
                    raise
                may_rerun = False
        self.stats.eager_runs += 1
        gone = {i: produced[i] for i in range(len(produced)) if isinstance(produced[i], CopiedEarly)}
        for i in gone:
            produced[i] = None
        outputs = Outputs(produced, sources, [slot.leaves for slot in self.slots], self.device, pool.alias)
        results: list[Any] = [None] * len(produced)
        alive = self.io.alive  # the memory of other arguments in the arena may be a result's by now
        kept = [arg for i, (n, arg) in enumerate(zip(self.io.inputs, args)) if i not in inside or n in alive]
        handed_out = outputs.deliver_owned(results, args, set(map(_memory, kept)))
        for i, departed in gone.items():
            results[i] = departed.tensor
        for i in outputs.fixed:
            results[i] = produced[i]
            if call.mode is Mode.WARMUP:
                call.owned[self.slots[i].name] = produced[i]
                # What the caller writes to memory that it shares shows in its version, which a backward checks.
                is_shared = _memory(produced[i]) in handed_out
                results[i] = produced[i].detach() if is_shared else pool.alias(produced[i])
        if call.mode is Mode.CAPTURE:  # it runs in every replay, too, so nothing else that it makes has an address
            self._share(call, results)
        return results

    def _inside(self, call: Call, args: Sequence[Any]) -> frozenset[int]:
        """The arguments that are in the arena."""
        return frozenset(i for i, name in enumerate(self.io.inputs) if call.owns(name, args[i]))

    def _take(self, call: Call, args: Sequence[Any], inside: frozenset[int]) -> list[Any]:
        """The region's arguments, each the only owner of its memory if nothing after the region needs it.

        Warm-ups and captures see plain tensors where calls have parameters: a fusion that torch.compile guards by the
        type of its inputs would otherwise be compiled again in the middle of a capture.
        """
        names, alive = self.io.inputs, self.io.alive
        taken = plain(args, self.written)
        for i in inside:
            taken[i] = call.owned[names[i]]
        given_up = [call.owned.pop(name) for name in [n for n in call.owned if n not in alive]]
        assert call.arena is not None
        call.arena.forget(given_up, [*(taken[i] for i in inside), *call.owned.values()])
        return taken

    def _capture(self, call: Call, args: Sequence[Any]) -> Sequence[Any]:
        recording = call.recording
        assert recording is not None
        inside, before = self._inside(call, args), (self.failure, self.tries)
        try:
            return self._record(call, args)
        except _Executed as error:
            raise error.__cause__ from None  # type: ignore[misc]
        except Exception as error:
            self._fail(error)
        self._forbid_eager()
        self.program.fallbacks[f"{self.name} could not be captured: {self.failure}"] += 1
        recording.incomplete = True
        try:
            # In the arena the memory of the warm-up is at hand, unless the capture has given up what the ops read.
            if inside == self._inside(call, args):
                with suppress(_NotRun):
                    return self._run_in_arena(call, args)
            return self._run(call, args)
        except Exception:
            self.failure, self.tries = before  # the operator itself raises: it may do better next time
            raise

    def _fail(self, error: Exception) -> None:
        """Keeps the reason, and whether to try again: what fails in an operator, or is refused, does so again."""
        op = _failing_op(error, self, self.program.ops.ops)
        place = f"{op.name} at {self.program.ops.line(op) or 'an unknown line'}: " if op is not None else ""
        text = place + _sentence(error)
        may_pass = _is_out_of_memory(error) or (op is None and not isinstance(error, CaptureRefused))
        self.tries = self.tries - 1 if may_pass else 0
        again = f" (the next call tries again; {self.tries} of {_MAX_TRIES} tries left)"
        self.failure = text + (again if self.tries else "")

    def _record(self, call: Call, args: Sequence[Any]) -> Sequence[Any]:
        recording = call.recording
        assert call.arena is not None and recording is not None and call.part is not None
        pool = call.arena.pool(self.device)
        names = self.io.inputs
        given, args = args, args[: len(names)]
        verifies = call.verifies or self.is_always_verified
        inside = self._inside(call, args)
        static = inside | frozenset(
            i for i, name in enumerate(names) if args[i] is not None and self.program.is_static(name, recording)
        )
        written = self.written
        _check_inputs(names, args, static, written, self.device)

        leaves = [slot.leaves for slot in self.slots]
        placing = partial(place, pool, args, static, self._same(args, static, inside))
        check = self.program.verifier.record(_Verified(self), pool, args, placing, inside) if verifies else None
        loads, buffers = placing()
        entry = RegionGraph(loads, written)
        entry.scalars = slice(len(names), None)
        entry.check = check
        if self.program.backend.runs_captures:
            entry.load(args)
        taken = self._take(call, args, inside)
        captured = replaced(taken, buffers)
        del taken, buffers
        sources = _sources(self, captured, inside)
        # A result must not get the address of an input that it could be taken for a view of (the sources are kept), and
        # what is read back after a replay must not have been reused on the way.
        kept = [captured[i] for i in written]
        versions = {i: (t, t._version) for i in written - inside if not (t := captured[i]).is_inference()}
        produced: list[Any] = []

        def leaving(made: Sequence[Any]) -> list[torch.Tensor]:
            _check_results([slot.name for slot in self.slots], made)
            produced.extend(made)
            entry.outputs = Outputs(produced, sources, leaves, self.device, pool.alias)
            return entry.outputs.sources()

        try:
            numbers = sentinels(len(self.io.numbers))
            captured += numbers
            entry.graph, _ = pool.capture(self.function, [captured], entry.targets, leaving, numbers)
        finally:
            if captured:  # the function, which empties the list, was not called
                call.owned.update((names[i], captured[i]) for i in inside)
        del _
        outputs = entry.outputs
        outputs.disown()
        entry.touched = frozenset(i for i, (t, version) in versions.items() if t._version != version)
        del kept, versions
        sources.clear()
        entry.guarded, entry.guard = self._late_guard(names, args, inside, static, written)
        entry.fixed = [pool.alias(p) if i in outputs.fixed else None for i, p in enumerate(produced)]
        try:
            results = self._verify(call, entry, given) if verifies else entry.replay(given)
        except ReplayRefused:
            raise
        except Exception as error:
            raise _Executed from error
        self._note(call, entry, produced, static)
        call.part.graphs[self.index] = entry
        return results

    def _same(self, args: Sequence[Any], static: frozenset[int], inside: frozenset[int]) -> dict[int, int]:
        """Arguments that are the same tensor as another one, and that one, where a guard checks that they stay so."""
        first: dict[tuple[int, bool], int] = {}
        found: dict[int, int] = {}
        apart = inside | self.written
        read = [i for i, arg in enumerate(args) if arg is not None and i not in apart]
        for i in sorted(read, key=lambda i: i not in static):  # what is static comes first
            key = id(args[i]), self.io.inputs[i] in self.program.position  # which guard
            if (other := first.setdefault(key, i)) != i and i not in static:
                found[i] = other
        return found

    def _late_guard(
        self,
        names: Sequence[str],
        args: Sequence[Any],
        inside: frozenset[int],
        static: frozenset[int],
        written: frozenset[int],
    ) -> tuple[tuple[int, ...], Guard | None]:
        """The check of what was not there when the call began, because an eager operator makes it."""
        late = [i for i, name in enumerate(names) if name not in self.program.position and i not in inside]
        if late and written:
            late = [i for i in range(len(names)) if i not in inside]
        if not late:
            return (), None
        place = {i: p for p, i in enumerate(late)}
        guard = Guard(
            [args[i] for i in late],
            [place[i] for i in late if i in static],
            frozenset(place[i] for i in written if i in place),
        )
        return tuple(late), guard

    def _note(self, call: Call, entry: RegionGraph, produced: Sequence[Any], static: frozenset[int]) -> None:
        """Writes down what the next regions of the recording, and the report, have to know of this one."""
        recording = call.recording
        assert recording is not None
        for i in entry.outputs.fixed:
            call.owned[self.slots[i].name] = produced[i]
        for i, source in entry.outputs.view_sources().items():
            if source in static:
                recording.static.add(self.slots[i].name)
        if self.disagreement is None:
            self.failure = None
        stats = self.stats
        stats.captures += 1
        stats.replays += 1
        stats.bytes_in, stats.bytes_out = entry.nbytes_in, entry.outputs.nbytes


class _Verified:
    """A region as verification sees it."""

    def __init__(self, region: RuntimeRegion) -> None:
        self.function, self.hash_function = region.function, region.watched
        self.device, self.written = region.device, region.written
        self.ops = [region.program.ops.ops[i] for i in region.region.ops]
        io = region.io
        self.io = SimpleNamespace(
            inputs=[SimpleNamespace(name=name) for name in io.inputs],
            outputs=region.slots,
            scalars=io.numbers,
            alive=io.alive,
        )


def _sources(region: RuntimeRegion, taken: Sequence[Any], inside: frozenset[int]) -> list[Source]:
    """The arguments outside of the arena that results may be views of."""
    names, shared = region.io.inputs, region.io.shared
    return [
        Source.of(i, tensor)
        for i, tensor in enumerate(taken)
        if isinstance(tensor, torch.Tensor) and names[i] in shared and i not in inside
    ]


class _Executed(Exception):
    """A graph failed after it may have run: running its ops again could do their effects twice."""


class _NotRun(Exception):
    """A warm-up failed before the first op."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def keep(*tensors: Any) -> list[Any]:
    """Copies that outlive the arena."""
    kept: list[Any] = []
    for tensor in tensors:
        results = [None]
        device = tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")
        Outputs([tensor], (), [True], device, torch.Tensor.detach).deliver_owned(results, ())
        kept += results
    return kept


def _memory(value: Any) -> int:
    """Where the memory of a plain tensor begins; 0 for anything else."""
    return address_if_any(value) if is_plain(value) else 0


def is_graded_leaf(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_leaf and tensor.requires_grad


def is_plain(tensor: Any) -> bool:
    """Whether a graph can have this as an input; operators return None for a tensor that they do without."""
    return tensor is None or type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _check_inputs(
    names: Sequence[str], args: Sequence[Any], static: frozenset[int], written: frozenset[int], device: torch.device
) -> None:
    for i, (name, arg) in enumerate(zip(names, args)):
        if not is_plain(arg):
            raise TypeError(f"input {name!r} is a {type(arg).__name__}, not a plain tensor")
        # The seed of an attention that ran without a graph is on the host, whatever the trace says.
        if arg is not None and arg.device != device:
            raise CaptureRefused(f"input {name!r} is on {arg.device}, and the graph on {device}")
        if i in written and i not in static and overlaps_itself(arg):
            raise ValueError(f"input {name!r} is written in place and overlaps itself")
    if written and not Sharing.of(args, set(static), written).admits(args):
        raise ValueError("an input that is written in place shares memory with another")


def _check_results(names: Sequence[str], results: Sequence[Any]) -> None:
    for name, result in zip(names, results):
        if is_sparse(result):
            raise CaptureRefused(f"result {name!r} has the layout {result.layout}, which no replay can fill")


def _sentence(error: BaseException) -> str:
    """The error's type and the first sentence of its message; the rest may differ from time to time."""
    if isinstance(error, ReplayRefused):
        error = error.__cause__ or error
    text = str(error).strip().partition("\n")[0].partition(". ")[0]
    return f"{type(error).__name__}: {text or 'no message'}"


def _failing_op(error: BaseException, region: RuntimeRegion, ops: Sequence[Op]) -> Op | None:
    """The op of the region that raised the error, if it was one of them."""
    functions = (region.function.__code__, getattr(region.watched, "__code__", None))
    frames = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    if any(code is EarlyCopier.__call__.__code__ for code, _ in frames):  # no op, but the copy of what one made
        return None
    for code, number in frames:
        if code in functions:
            line = linecache.getline(code.co_filename, number)
            made = set(re.findall(r"\w+", line.partition("=")[0]))
            return next((ops[i] for i in region.region.ops if made.intersection(ops[i].outputs)), None)
    return None


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or what caused it, says so. Drivers have no class for it."""
    if error is None:
        return False
    said = "out of memory" in str(error).lower().replace("_", " ")
    return said or isinstance(error, torch.OutOfMemoryError) or _is_out_of_memory(error.__cause__)
