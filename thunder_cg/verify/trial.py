"""`verify`: a replay beside an eager run of the same region, on the same inputs, compared bit for bit.

Note [What is compared]
    The ops run first, on copies of what they write, then the graph. Compared are all results, the inputs that the
    region writes, and the device's generator if it may draw. Wherever they differ, the call gets what the ops made: the
    results, the inputs and the generator are as one eager run leaves them. Results are copied before the next run, as
    an operator may return memory of its own, which it writes again.

Note [Generators of the process]
    All threads draw from the same ones, and to compare draws the device's is set back. So none is for a region that
    draws nothing, and trials that draw on one device take turns. Whoever else draws meanwhile is seen: a run does not
    find the generator as the last one left it, or equal runs leave it in different states. Then nothing has been
    compared, and the graph draws from where the generator is, so that no more draws are repeated.

Note [What is no disagreement]
    Kernels that are not deterministic (atomic additions, some attention and convolution backwards) differ from run to
    run. So after a difference both sides run a few times more. A result may differ if the ops differ from themselves
    *and the graph from itself*: a kernel that is not deterministic is so in a graph, too, while an operator that reads
    a Python variable freezes in it. Then the graph may be as far off as four times the spread of the eager runs, and
    no farther than sqrt(eps) of the result's dtype times the largest value: 3e-4 of it in float32, 3 % in float16, 9 %
    in bfloat16. Beyond that it is not rounding. Integers and booleans have no tolerance, and neither has a difference
    that is the same in every run, such as that of a library which chose another algorithm for the graph. Memory that a
    kernel never writes, such as the seed of an attention without dropout, is found by filling memory before a run, and
    ignored.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import Op, Ops
from thunder_cg.runtime.backend import Backend, Graph, Pool, copy_all, sentinels
from thunder_cg.runtime.cuda.copy_nodes import span
from thunder_cg.runtime.early_outputs import EarlyCopier
from thunder_cg.runtime.recording import (
    Load,
    Placing,
    RegionGraph,
    address,
    address_if_any,
    overlaps_itself,
    plain,
    replaced,
)

if TYPE_CHECKING:
    from thunder_cg.runtime.region import RuntimeRegion

_MORE_RUNS = 4  # of both sides, once they differ
_SPREADS = 4  # how many times the spread of the eager runs is tolerated

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NOT_TAKEN = -(2**63)  # the fingerprint of what has none
_MIXER = 0x1E3779B97F4A7C15  # odd, and without a pattern
_CHUNK = 2**22  # elements that a fingerprint looks at at a time
_Hashes = list[list[int]]  # what `fingerprints` took, the sure ones and the doubtful ones
_turns: dict[torch.device, threading.RLock] = {}  # of trials that draw: see Note [Generators of the process]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A graph that does not do what its ops do."""

    op: Op | None  # the first whose value differs
    difference: str
    where: str = ""

    @property
    def problem(self) -> str:
        said = f"its graph disagrees with its ops: {self.difference}"
        return f"{said}; the first value that differs is made by {self.op.name} {self.where}" if self.op else said

    @property
    def fix(self) -> str:
        """What keeps the rest of the region captured."""
        if self.op is None:
            return "find the operator to leave eager with deny=[...]"
        name = self.op.id if self.op.id and self.op.executor else self.op.name
        return f"leave the operator eager with deny=[{name!r}]"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a verified replay."""

    results: Sequence[Any] | None  # None: the ops have to run, and may raise
    disagreement: Disagreement | None = None
    remark: str | None = None  # why a difference was tolerated, or why nothing could be compared
    compared: bool = True


@dataclass(frozen=True, slots=True)
class Check:
    """What has to be kept of a recorded region to verify it later.

    Attributes:
        inside: the arguments in the arena; a replay may reuse their memory.
        prints: the graph that takes the fingerprints of all values, None if there could not be one.
    """

    inside: frozenset[int]
    prints: _ValueHashes | None

    @classmethod
    def record(
        cls, region: RuntimeRegion, pool: Pool, args: Sequence[Any], placing: Placing, inside: frozenset[int]
    ) -> Check:
        """Records what is needed, while the region's arguments still own their memory."""
        try:
            return cls(inside, _ValueHashes.record(region, pool, args, placing))
        except Exception:  # the capture of the region will say why
            return cls(inside, None)


@dataclass(frozen=True, slots=True)
class _ValueHashes:
    """A second graph of a region, which takes a fingerprint of each op's values.

    It is recorded together with the first, because what an operator wrongly freezes, such as a Python variable, may
    have changed by the time of a disagreement.
    """

    graph: Graph
    loads: tuple[Load, ...]
    taken: tuple[torch.Tensor, ...]

    @classmethod
    def record(cls, region: RuntimeRegion, pool: Pool, args: Sequence[Any], placing: Placing) -> _ValueHashes:
        assert region.watched is not None
        loads, buffers = placing()
        captured = replaced(plain(args, region.written), buffers)
        targets = [load.target for load in loads]
        if region.program.backend.runs_captures:
            copy_all(targets, [load.source(args) for load in loads])
        numbers = sentinels(len(region.io.scalars))
        captured += numbers
        graph, taken = pool.capture(region.watched, [captured], targets, sentinels=numbers)
        return cls(graph, tuple(loads), tuple(map(pool.alias, taken)))

    def take(self, args: Sequence[Any], numbers: Sequence[int]) -> list[_Hashes]:
        self.graph.replay([load.source(args) for load in self.loads], numbers=numbers)
        return [taken.tolist() for taken in self.taken]


class _Disturbed(Exception):
    """Another thread has drawn while a trial ran, which is no comparison then."""

    def __init__(self, generator: str) -> None:
        super().__init__(f"another thread changed {generator} meanwhile")


def verified(
    region: RuntimeRegion, graph: RegionGraph, check: Check, args: Sequence[Any], ops: Ops, backend: Backend
) -> Outcome:
    """Replays ``graph`` for ``args`` and compares. See Note [What is compared]."""
    has_effect = not region.program.aliasing.effects.isdisjoint(region.region.ops)
    generators = [_generator(region.device)] if has_effect else []
    with _turns.setdefault(region.device, threading.RLock()) if generators else nullcontext():
        try:
            trial = _Trial(region, graph, check, args, generators)
        except Exception as error:  # out of memory, mostly: the call does not suffer for it
            return Outcome(graph.replay(args), remark=f"not verified: {_said(error)}", compared=False)
        try:
            return _tried(trial, ops, backend)
        except _Disturbed as error:
            return Outcome(trial.replay(rewinds=False).results, remark=f"not verified: {error}", compared=False)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[device.index if device.index is not None else 0]


def _tried(trial: _Trial, ops: Ops, backend: Backend) -> Outcome:
    """What comes of a trial.

    Raises:
        _Disturbed: nothing, and the graph has still to be replayed.
    """
    region = trial.region
    try:
        eager = trial.run()
    except _Disturbed:
        raise
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            return Outcome(trial.replay().results, remark=f"not verified: {_said(error)}", compared=False)
        trial.rewind()
        return Outcome(None, Disagreement(None, f"its ops raise {_said(error)}, which a graph does not"))
    if silently := trial.written_without_saying():
        made = trial.without_running()
        trial.adopt(eager, made, has_run=False, wholly=True)
        difference = f"input {silently!r} is written by an operator that does not say so"
        op = next((ops.ops[i] for i in region.region.ops if silently in ops.ops[i].inputs), None)
        return Outcome(made.results, Disagreement(op, difference, _where(op, ops)))
    replayed = trial.replay()
    differing = trial.differing(eager, replayed)
    if not differing:
        return Outcome(replayed.results)
    is_opaque = not region.program.aliasing.opaque.isdisjoint(region.region.ops)
    may_draw_on_host = region.device.type != "cpu" and is_opaque
    try:
        # What an operator that nobody knows draws there, the first run has drawn.
        with torch.random.fork_rng(devices=[], enabled=may_draw_on_host):
            disagreement, remark = _judged(trial, eager, replayed, differing, ops, backend)
    except _Disturbed:
        raise
    except Exception as error:
        difference = f"{trial.name(differing[0])} differs, and to find out how failed: {_said(error)}"
        disagreement, remark = Disagreement(None, difference), None
    trial.adopt(eager, replayed, has_run=True, wholly=disagreement is not None)
    return Outcome(replayed.results, disagreement, remark)


def _judged(
    trial: _Trial, eager: _Run, replayed: _Run, differing: list[_Place], ops: Ops, backend: Backend
) -> tuple[Disagreement | None, str | None]:
    """Whether differences are disagreements, and why not. Leaves results and state as the last run did."""

    def values(run: _Run) -> dict[_Place, Any]:
        return {at: _kept(run.at(at)) for at in (*differing, *trial.generators)}

    eagers, graphs = [values(eager)], [values(replayed)]
    eagers += [values(trial.run()) for _ in range(_MORE_RUNS)]
    graphs += [values(trial.replay()) for _ in range(_MORE_RUNS)]
    for at in trial.generators:
        if not all(_same(run[at], runs[0][at]) for runs in (eagers, graphs) for run in runs):
            raise _Disturbed(trial.name(at))
    unwritten = trial.never_written([at for at in differing if at.kind == "result"], backend)
    wrong = []
    remarks = []
    for at in differing:
        one, other = eagers[0][at], graphs[0][at]
        if eager.source(at) != replayed.source(at) or not _is_tolerable(
            [run[at] for run in eagers], [run[at] for run in graphs], unwritten.get(at)
        ):
            wrong.append(at)
        elif not (at in unwritten and _is_tolerable([one], [other], unwritten[at])):
            remarks.append(f"{trial.name(at)} is not deterministic: {_difference(one, other)}")
    if not wrong:
        return None, "; ".join(remarks) or None
    op = _first_op(trial, wrong, ops, backend)
    at = next((at for at in wrong if op is not None and trial.slot(at) in op.outputs), wrong[0])
    if eager.source(at) == replayed.source(at):
        difference = _difference(eagers[0][at], graphs[0][at])
    else:
        difference = f"{_memory_of(replayed.source(at))} in the graph, {_memory_of(eager.source(at))} eagerly"
    return Disagreement(op, f"{trial.name(at)}: {difference}", _where(op, ops)), None


def _memory_of(source: str | None) -> str:
    return f"memory of input {source!r}" if source else "memory of its own"


@dataclass(frozen=True, slots=True)
class _Place:
    """Something to compare: a result, a written input or a generator, by its position."""

    kind: str
    index: int


@dataclass(slots=True)
class _Run:
    """What a run of the region made."""

    results: list[Any]
    written: dict[int, torch.Tensor]  # by argument
    generators: Sequence[torch.Tensor]
    sources: Sequence[str | None] = ()  # of each result: the input that it shares memory with
    memory: dict[int, torch.UntypedStorage] = field(default_factory=dict)  # what it wrote, by the original's address

    def at(self, place: _Place) -> Any:
        return getattr(self, {"result": "results", "input": "written", "generator": "generators"}[place.kind])[
            place.index
        ]

    def source(self, place: _Place) -> str | None:
        return self.sources[place.index] if place.kind == "result" else None


class _Trial:
    """Runs of one region's ops and of its graph that all begin with the same inputs and generators."""

    def __init__(
        self,
        region: RuntimeRegion,
        graph: RegionGraph,
        check: Check,
        args: Sequence[Any],
        generators: Sequence[torch.Generator],
    ) -> None:
        self._region, self._graph, self._check, self._args = region, graph, check, args
        self._written = [i for i in sorted(region.written) if args[i] is not None]
        written = {address(args[i]) for i in self._written}
        names, alive = region.names, region.io.alive
        reused = {address(args[i]) for i in check.inside if names[i] not in alive}
        storages = {address(t): t.untyped_storage() for t in args if isinstance(t, torch.Tensor)}
        self._images = {at: (storages[at], storages[at].clone()) for at in (written | reused) - {0}}
        self._writable = written - {0}
        self._lasting = storages.keys() - self._images.keys()  # memory that no replay writes
        self._has_replayed = False
        self._others = {i: t for i, t in enumerate(args) if isinstance(t, torch.Tensor) and address(t) not in written}
        self._prints = self._fingerprints()
        self._generators = generators
        self.generators = [_Place("generator", i) for i in range(len(generators))]
        self._before = self._states()
        self._left: list[torch.Tensor] | None = self._before  # by the last run; None: it did not come to its end

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        """Sets the generators, unless somebody else has drawn since the last run."""
        now = self._states()
        for at, state, left in zip(self.generators, now, self._left or ()):
            if not torch.equal(state, left):
                raise _Disturbed(self.name(at))
        for generator, old, new in zip(self._generators, now, states):
            if not torch.equal(old, new):
                generator.set_state(new)
        self._left = list(states)

    def rewind(self) -> None:
        """The state that the call began with."""
        self._set(self._before)
        self._restore()

    def _restore(self) -> None:
        if self._has_replayed:
            for storage, image in self._images.values():
                storage.copy_(image)  # by storage: autograd counts no write

    def run(self, fn: Callable[[list[Any]], Sequence[Any]] | None = None) -> _Run:
        """Runs the ops, on copies of what they write."""
        memory = {at: self._images[at][1].clone() for at in self._writable}
        one = {id(arg): self._moved(arg, memory) for arg in self._args}
        inputs = [one[id(arg)] for arg in self._args]
        written = {i: inputs[i] for i in self._written}
        with self._region.program.backend.capture_lock if self._generators else nullcontext():
            self.rewind()
            self._left = None
            results = list((fn or self._region.function)(inputs.copy()))
            self._left = self._states()
        sources = self._sources(results, inputs)
        self._copy(results, self._lasting | {storage.data_ptr() for storage in memory.values()})
        return _Run(results, written, self._left, sources, memory)

    def _sources(self, results: Sequence[Any], args: Sequence[Any]) -> list[str | None]:
        """The inputs that results share memory with, but for those in the arena, whose memory has other uses."""
        names = [(i, name) for i, name in enumerate(self._region.names) if i not in self._check.inside]
        found = {address_if_any(args[i]): name for i, name in reversed(names)}
        return [found.get(at) if (at := address_if_any(result)) else None for result in results]

    def _copy(self, results: list[Any], lasting: Set[int]) -> None:
        """Moves results to copies of their memory, one by one, but for memory that is ``lasting``."""
        groups: dict[int, list[int]] = {}
        for i, result in enumerate(results):
            if self._is_here(result):
                groups.setdefault(address_if_any(result), []).append(i)
        for at in groups.keys() - lasting - {0}:
            memory = {at: results[groups[at][0]].untyped_storage().clone()}
            for i in groups[at]:
                results[i] = self._moved(results[i], memory)

    @staticmethod
    def _moved(arg: Any, memory: dict[int, torch.UntypedStorage]) -> Any:
        """``arg``, in the copy of its memory if there is one."""
        if not isinstance(arg, torch.Tensor):
            return arg
        storage = memory.get(address(arg))
        if storage is None:
            return arg.detach().requires_grad_(arg.requires_grad)
        moved = torch.empty(0, dtype=arg.dtype, device=arg.device)
        moved.set_(storage, arg.storage_offset(), arg.size(), arg.stride())
        moved = moved.conj() if arg.is_conj() else moved
        return moved._neg_view() if arg.is_neg() else moved

    def replay(self, *, rewinds: bool = True) -> _Run:
        """Replays the graph, on the real inputs, whose versions advance the first time."""
        with self._uncounted() if self._has_replayed else nullcontext():
            if rewinds:
                self.rewind()
            else:
                self._restore()
            self._has_replayed = True
            self._left = None
            results = list(self._graph.replay(self._args))
            self._left = self._states()
        written = {i: self._args[i] for i in self._written}
        return _Run(results, written, self._left, self._sources(results, self._args))

    def without_running(self) -> _Run:
        """The results of a replay, still to be filled."""
        results = self._graph.without_running(self._args)
        return _Run(results, {}, (), self._sources(results, self._args))

    def prints(self) -> Iterator[tuple[_Hashes, _Hashes]]:
        """The fingerprints of each op's values, in an eager run and in the graph; nothing if there are none."""
        region, graph = self._region, self._check.prints
        if graph is None or region.watched is None:
            return
        eager = [taken.tolist() for taken in self.run(region.watched).results]
        self.rewind()
        self._left = None
        taken = graph.take(self._args, self._args[self._graph.numbers])
        self._left = self._states()
        yield from zip(eager, taken)

    def filled_prints(self, backend: Backend) -> Sequence[_Hashes | None]:
        """Those of an eager run on memory that was filled before, where there can be one."""
        watched = self._region.watched
        run = self.run_on_filled_memory(watched, backend) if watched is not None else None
        return [None] * len(self._region.region.ops) if run is None else [taken.tolist() for taken in run.results]

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        tensors = tuple(t for i in self._written if not (t := self._args[i]).is_inference())
        with _unsafe_preserve_version_counter(tensors):
            yield

    def written_without_saying(self) -> str | None:
        """The name of an input that the ops have changed although it is not among those they write."""
        changed = [i for i, old, new in zip(self._others, self._prints, self._fingerprints()) if old != new]
        return self._region.names[changed[0]] if changed else None

    def _fingerprints(self) -> list[int]:
        if not self._others:
            return []
        return torch.stack([_fingerprint(t) for t in self._others.values()]).tolist()

    def differing(self, eager: _Run, replayed: _Run) -> list[_Place]:
        """Where two runs differ."""
        places = [
            *(_Place("result", i) for i in range(len(eager.results))),
            *(_Place("input", i) for i in self._written),
            *self.generators,
        ]
        return [at for at in places if not self._agree(at, eager, replayed)]

    def _agree(self, at: _Place, eager: _Run, replayed: _Run) -> bool:
        one, other = eager.at(at), replayed.at(at)
        # The seed of an attention lives on the host, where no replay changes it, and in some captures on the device.
        tensors = [t for t in (one, other) if isinstance(t, torch.Tensor)]
        elsewhere = at.kind == "result" and not all(map(self._is_here, tensors))
        return elsewhere or (_same(one, other) and eager.source(at) == replayed.source(at))

    def adopt(self, eager: _Run, replayed: _Run, *, has_run: bool, wholly: bool) -> None:
        """Makes of what a replay returned, and of the call's state, what the eager run made.

        Args:
            has_run: whether a graph ran, so that versions have advanced.
            wholly: what cannot be copied into a replay's result, as it is laid out in another way or shares other
                memory, takes its place. No graph may follow in this call then.
        """
        with torch.no_grad():
            for at, memory in eager.memory.items():
                self._images[at][0].copy_(memory)
            originals = {memory.data_ptr(): self._images[at][0] for at, memory in eager.memory.items()}
            for i, (made, result) in enumerate(zip(eager.results, replayed.results)):
                here = self._is_here(made) and self._is_here(result)
                if here and _are_alike(made, result) and eager.sources[i] == replayed.sources[i]:
                    if not _same(made, result):
                        _writable(result).copy_(_writable(made))
                elif wholly:
                    replayed.results[i] = self._moved(made, originals) if address_if_any(made) in originals else made
        with suppress(_Disturbed):  # then they stay where they are
            self._set(eager.generators)
        if not has_run:
            tensors = [t for i in self._written if not (t := self._args[i]).is_inference()]
            torch.autograd.graph.increment_version(tensors)

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device == self._region.device

    def slot(self, at: _Place) -> str:
        """The name of a result or input; none for a generator."""
        if at.kind == "generator":
            return ""
        return self._region.slots[at.index].name if at.kind == "result" else self._region.names[at.index]

    def name(self, at: _Place) -> str:
        """What to call it in a message."""
        if at.kind == "generator":
            return f"the state of the {self._generators[at.index].device} generator"
        return f"{'result' if at.kind == 'result' else 'written input'} {self.slot(at)!r}"

    @property
    def region(self) -> RuntimeRegion:
        return self._region

    def never_written(self, places: Sequence[_Place], backend: Backend) -> dict[_Place, torch.Tensor]:
        """Of each result: where its memory holds what was there before the ops ran."""
        run = self.run_on_filled_memory(self._region.function, backend) if places else None
        found = {at: made for at in places if run is not None and self._is_here(made := run.at(at))}
        return {at: _bits(made) == _ones(made) for at, made in found.items()}

    def run_on_filled_memory(self, fn: Callable[..., Sequence[Any]], backend: Backend) -> _Run | None:
        """Runs the ops on memory that was filled with ones; None where they do not run so."""
        pool = backend.pool(self._region.device)
        try:
            self.run(lambda inputs: pool.warm_up(_keeping_all(fn), [inputs]))
            pool.poison()
            return self.run(lambda inputs: pool.warm_up(_keeping_all(fn), [inputs]))
        except _Disturbed:
            raise
        except Exception:  # a compiled fusion may not run under a mode
            return None
        finally:
            pool.close()


_aten = torch.ops.aten
_EMPTY = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_permuted,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}


class _Keep(TorchDispatchMode):
    """Keeps all that operators make, so that no memory is used twice, and fills what is empty with ones."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._made.append(made)
        if func.overloadpacket in _EMPTY:
            _bits(made).fill_(_ones(made))
        return made


def _keeping_all(fn: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    def run(inputs: list[Any], leave: EarlyCopier) -> Sequence[Any]:
        with _Keep():
            return fn(inputs)  # nothing leaves

    return run


def _first_op(trial: _Trial, wrong: Sequence[_Place], ops: Ops, backend: Backend) -> Op | None:
    """The first op whose value differs, of those that what is wrong depends on."""
    mine = [ops.ops[i] for i in trial.region.region.ops]
    results = {trial.slot(at) for at in wrong} if all(at.kind == "result" for at in wrong) else None
    relevant = _ancestors(mine, results, trial.region.program.aliasing) if results else {op.index for op in mine}
    once, again, filled = list(trial.prints()), list(trial.prints()), trial.filled_prints(backend)
    unlike = [
        k for k, (eager, graph) in enumerate(once) if mine[k].index in relevant and _differ(eager, graph, filled[k])
    ]
    # Kernels that are not deterministic differ in the graph, too: an op that does not is to blame before them.
    frozen = [k for k in unlike if not _differ(once[k][1], again[k][1])]
    if unlike:
        return mine[(frozen or unlike)[0]]
    return next((op for op in mine if results and not results.isdisjoint(op.outputs)), None)


def _differ(one: _Hashes, other: _Hashes, filled: _Hashes | None = None) -> bool:
    """Whether fingerprints of an op differ, doubtful ones only if they are the same on filled memory."""
    sure = zip(one[0], other[0])
    doubtful = zip(one[1], other[1], filled[1]) if filled is not None else ()
    pairs = [*sure, *((a, b) for a, b, on_filled in doubtful if a == on_filled)]
    return any(a != b for a, b in pairs if _NOT_TAKEN not in (a, b))


def _ancestors(mine: Sequence[Op], names: set[str], aliasing: Aliasing) -> set[int]:
    """The ops that these values depend on, also through memory that they share."""
    found = set()
    needed = aliasing.sets_of(names)
    for op in reversed(mine):
        if not needed.isdisjoint(aliasing.sets_of(op.outputs) | aliasing.writes[op.index]):
            found.add(op.index)
            needed |= aliasing.sets_of(op.inputs)
    return found


def _where(op: Op | None, ops: Ops) -> str:
    line = (op and ops.line(op)) or "at a line unknown to Thunder"
    return line if line.startswith(("near ", "at ")) else f"at {line}"


def _said(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


# Bits


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers: -0.0 is not 0.0, and a NaN is itself."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_AS_INTEGERS[tensor.element_size()])


def _ones(tensor: torch.Tensor) -> int:
    """What `_bits` has of memory filled with ones."""
    return 255 if tensor.element_size() == 1 else -1


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same but for their values."""
    same = one.device == other.device and one.layout == other.layout
    return same and (one.layout is not torch.strided or _metadata(one) == _metadata(other))


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tuple(s for s, n in zip(tensor.stride(), tensor.size()) if n != 1) if tensor.numel() else ()
    return tuple(tensor.size()), strides, tensor.dtype


def _same(one: Any, other: Any) -> bool:
    """Equal, and tensors bit for bit and laid out alike."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _are_alike(one, other) and torch.equal(_bits(one), _bits(other))
    return one is other or (type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other))


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or the stretch of memory below one that overlaps itself."""
    return tensor.as_strided((span(tensor),), (1,)) if overlaps_itself(tensor) else tensor


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A number that changes with the bits of the tensor, their order and its strides, without much memory."""
    total = torch.full((), hash(_metadata(tensor)), dtype=torch.int64, device=tensor.device)
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:  # expanded: the same memory again and again
            tensor = tensor.narrow(dim, 0, 1)
    bits = _bits(tensor).reshape(-1)
    # Each place has an odd number of its own: sums over rows and columns would not tell a matrix from its mirror image.
    places = torch.arange(1, min(bits.numel(), _CHUNK) + 1, device=tensor.device) * _MIXER
    weights = (places ^ (places >> 32)) | 1
    for chunk in bits.split(_CHUNK):
        total = total * 31 + (chunk * weights[: chunk.numel()]).sum()
    return total


def fingerprints(device: torch.device, *values: Any) -> torch.Tensor:
    """The fingerprints of an op's values, of a graph's or of an eager run's: a row of sure ones, one of doubtful ones.

    Doubtful are integers beside floating-point values: seeds and the like may never be written.
    """
    floats = any(isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)
    none = torch.full((), _NOT_TAKEN, dtype=torch.int64, device=device)
    taken = [(none, none)]
    for value in values:
        if not isinstance(value, torch.Tensor) or value.device != device:
            taken.append((none, none))
        elif floats and not (value.is_floating_point() or value.is_complex()):
            taken.append((none, _fingerprint(value)))
        else:
            taken.append((_fingerprint(value), none))
    return torch.stack([torch.stack(row) for row in zip(*taken)])


# Differences


def _is_tolerable(eagers: Sequence[Any], graphs: Sequence[Any], ignored: torch.Tensor | None) -> bool:
    """See Note [What is no disagreement]. ``ignored``: elements that nobody wrote."""
    one, other = eagers[0], graphs[0]
    runs = [*eagers, *graphs]
    if not all(isinstance(t, torch.Tensor) and _are_alike(t, one) for t in runs):
        return False
    unlike = _bits(one) != _bits(other)
    if ignored is not None:
        unlike &= ~(ignored & (_bits(one) != _ones(one)))
    if not unlike.any():
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    if all(_same(e, one) for e in eagers) or all(_same(g, other) for g in graphs):
        return False
    values = [_numbers(e) for e in eagers]
    graph = _numbers(other)
    unlike = unlike.reshape(graph.shape)
    finite = values[0].isfinite()
    if not all(torch.equal(v.isfinite() | ~unlike, finite | ~unlike) for v in (*values, graph)):
        return False
    unlike &= finite
    stacked = torch.stack(values)[:, finite]
    spread = float((stacked.amax(0) - stacked.amin(0)).nan_to_num().max()) if finite.any() else 0.0
    scale = float(values[0][finite].abs().max()) if finite.any() else 0.0
    far = float((graph - values[0])[unlike].abs().max()) if unlike.any() else 0.0
    return far <= min(_SPREADS * spread, math.sqrt(torch.finfo(one.dtype).eps) * scale)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64)


def _difference(eager: Any, graph: Any) -> str:
    """How many elements differ, by how much, and where first."""
    if not (isinstance(eager, torch.Tensor) and isinstance(graph, torch.Tensor)):
        return f"{graph!r} in the graph, {eager!r} eagerly"
    if not _are_alike(eager, graph):
        said = [f"{t.dtype} {tuple(t.shape)} with strides {t.stride()}" for t in (graph, eager)]
        return f"{said[0]} in the graph, {said[1]} eagerly"
    unlike = (_bits(eager) != _bits(graph)).reshape(*eager.shape, -1).any(-1)
    first = tuple(unlike.nonzero()[0].tolist())
    far = float((_numbers(graph) - _numbers(eager)).abs().max())
    values = f"{graph[first].item()!r} in the graph, {eager[first].item()!r} eagerly"
    count = f"{int(unlike.sum())} of {eager.numel()} elements differ"
    return f"{count}, by up to {far:.3g}, first at {first}: {values}"
