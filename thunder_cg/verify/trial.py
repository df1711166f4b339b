"""Runs of one region's ops and of its graph that all begin with the same inputs and the same state of the generator.

Note [What is compared]
    The ops run first, on copies of what they write, then the graph. Compared are all results, the inputs that the
    region writes, and the device's generator if the region may draw. Where they differ, the call gets what the ops
    made. Results are copied before the next run, because an operator may return memory of its own, which it writes
    again.

Note [Generators of the process]
    All threads draw from the same generators, and to compare draws the device's generator is set back. A region that
    draws nothing leaves the generators alone, and trials that draw on one device exclude each other. If another thread
    draws, a run does not find the generator as the last run left it, or equal runs leave it in different states. Then
    nothing has been compared, and the graph draws from the present state, so that no more draws are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_cg.compat.tensors import preserve_version_counter
from thunder_cg.compat.torch import TorchDispatchMode
from thunder_cg.runtime.backend import Backend
from thunder_cg.runtime.early_outputs import EarlyCopier
from thunder_cg.runtime.recording import RegionGraph
from thunder_cg.runtime.region import RuntimeRegion
from thunder_cg.runtime.tensors import address, address_if_any, flat, on_other_memory, overlaps_itself
from thunder_cg.verify.compare import bits, ones, same, same_layout
from thunder_cg.verify.hashes import HashGraph, OpHashes, hash_tensor

_aten = torch.ops.aten
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_permuted, _aten.empty_strided}
_EMPTY |= {_aten.new_empty, _aten.new_empty_strided}


@dataclass(frozen=True, slots=True)
class Check:
    """What is kept of a recorded region for later comparisons."""

    in_pool: Set[int]  # the arguments in the arena; a replay may reuse their memory
    hashes: HashGraph | None  # None: it could not be captured


class Disturbed(Exception):
    """Another thread has changed what the message names while a trial ran, so the trial compares nothing."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What is compared, by its position and its name in the trace."""

    kind: str  # "result", "written input" or "generator"
    index: int
    name: str
    described: str  # as the user knows it

    def __str__(self) -> str:
        return f"written {self.described}" if self.kind == "written input" else self.described


@dataclass(slots=True)
class Run:
    """What a run of the region made."""

    results: list[Any]
    written: dict[int, torch.Tensor]  # the inputs that it may write, by argument
    generators: Sequence[torch.Tensor]  # their states at its end
    sources: Sequence[str | None]  # of each result, the input that it shares memory with
    memory: dict[int, torch.UntypedStorage] = field(default_factory=dict)  # copies of what it wrote, by its address

    def value(self, of: Compared) -> Any:
        values: dict[str, Any] = {"result": self.results, "written input": self.written, "generator": self.generators}
        return values[of.kind][of.index]

    def source(self, of: Compared) -> str | None:
        return self.sources[of.index] if of.kind == "result" else None


class Trial:
    """Runs of one region's ops and of its graph, for the arguments of one call. See Note [What is compared]."""

    def __init__(
        self, region: RuntimeRegion, graph: RegionGraph, args: Sequence[Any], backend: Backend, *, may_draw: bool
    ) -> None:
        check: Check = graph.check
        self.region, self._graph, self._check, self._args, self._backend = region, graph, check, args, backend
        self._inputs = [each.name for each in region.io.inputs]
        self._written = [i for i in sorted(region.written) if args[i] is not None]
        self._versioned = tuple(t for i in self._written if not (t := args[i]).is_inference())
        written = {address(args[i]) for i in self._written}
        reused = {address(args[i]) for i in check.in_pool if self._inputs[i] not in region.io.alive}
        storages = {address(t): t.untyped_storage() for t in args if isinstance(t, torch.Tensor)}
        self._images = {at: (storages[at], storages[at].clone()) for at in (written | reused) - {0}}
        self._writable = written - {0}
        self._lasting = storages.keys() - self._images.keys()  # memory that no replay writes
        self._has_replayed = False
        self._others = {i: t for i, t in enumerate(args) if isinstance(t, torch.Tensor) and address(t) not in written}
        self._hashes_before = self._hash_others()
        of_device = torch.cuda.default_generators if region.device.type == "cuda" else [torch.default_generator]
        self._generators = [of_device[region.device.index or 0]] if may_draw else []  # states of these are compared
        self.generators = [
            Compared("generator", 0, str(g.device), f"the state of the {g.device} generator") for g in self._generators
        ]
        self._before = self._states()
        self._left: list[torch.Tensor] | None = self._before  # by the last run; None: it did not come to its end

    def run(self, fn: Callable[[list[Any]], Sequence[Any]] | None = None) -> Run:
        """Runs the ops, or ``fn``, on copies of what they write."""
        memory = {at: self._images[at][1].clone() for at in self._writable}
        moved = {id(arg): _moved(arg, memory) for arg in self._args}
        inputs = [moved[id(arg)] for arg in self._args]
        written = {i: inputs[i] for i in self._written}
        with self._backend.capture_lock if self._generators else nullcontext():
            self.rewind()
            self._left = None
            results = list((fn or self.region.function)(inputs.copy()))
            self._left = self._states()
        sources = self._sources(results, inputs)
        self._copy(results, self._lasting | {storage.data_ptr() for storage in memory.values()})
        return Run(results, written, self._left, sources, memory)

    def replay(self, *, rewinds: bool = True) -> Run:
        """Replays the graph, on the real inputs. Their versions advance only the first time."""
        with preserve_version_counter(self._versioned) if self._has_replayed else nullcontext():
            if rewinds:
                self._set_states(self._before)
            self._restore()
            self._has_replayed = True
            self._left = None
            results = list(self._graph.replay(self._args))
            self._left = self._states()
        written = {i: self._args[i] for i in self._written}
        return Run(results, written, self._left, self._sources(results, self._args))

    def without_running(self) -> Run:
        """The results of a replay, still to be filled."""
        results = self._graph.unfilled_results(self._args)
        return Run(results, {}, (), self._sources(results, self._args))

    def run_on_filled_memory(self, fn: Callable[..., Sequence[Any]]) -> Run | None:
        """Runs ``fn`` on memory that was filled with ones; None if it does not run so."""
        pool = self._backend.pool(self.region.device)

        def keeping_all(inputs: list[Any], copier: EarlyCopier) -> Sequence[Any]:  # no result is copied early
            with _Keep():
                return fn(inputs)

        try:
            self.run(lambda inputs: pool.warm_up(keeping_all, [inputs]))
            pool.poison()
            return self.run(lambda inputs: pool.warm_up(keeping_all, [inputs]))
        except Disturbed:
            raise
        except Exception:  # a compiled fusion may not run under a mode
            return None
        finally:
            pool.close()

    def op_hashes(self) -> list[tuple[OpHashes, OpHashes]]:
        """The value hashes of each op, in an eager run and in the graph; nothing if there are none."""
        hash_function, graph = self.region.hash_function, self._check.hashes
        if graph is None or hash_function is None:
            return []
        eager = [hashes.tolist() for hashes in self.run(hash_function).results]
        self.rewind()
        self._left = None
        replayed = graph.replay(self._args, self._args[self._graph.scalars])
        self._left = self._states()
        return list(zip(eager, replayed))

    def op_hashes_on_filled_memory(self) -> Sequence[OpHashes | None]:
        """Those of an eager run on memory that was filled before, where there can be one."""
        hash_function = self.region.hash_function
        run = self.run_on_filled_memory(hash_function) if hash_function is not None else None
        return [None] * len(self.region.ops) if run is None else [hashes.tolist() for hashes in run.results]

    def rewind(self) -> None:
        """Restores the state that the call began with."""
        self._set_states(self._before)
        self._restore()

    def _restore(self) -> None:
        if self._has_replayed:
            for storage, image in self._images.values():
                storage.copy_(image)  # by storage: autograd counts no write

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set_states(self, states: Sequence[torch.Tensor]) -> None:
        """Sets the generators, unless somebody else has drawn since the last run."""
        now = self._states()
        for of, state, left in zip(self.generators, now, self._left or ()):
            if not torch.equal(state, left):
                raise Disturbed(of)
        for generator, old, new in zip(self._generators, now, states):
            if not torch.equal(old, new):
                generator.set_state(new)
        self._left = list(states)

    def _sources(self, results: Sequence[Any], args: Sequence[Any]) -> list[str | None]:
        """The inputs that results share memory with, but for inputs in the arena, whose memory may be reused."""
        names = [(i, name) for i, name in enumerate(self._inputs) if i not in self._check.in_pool]
        by_address = {address_if_any(args[i]): name for i, name in reversed(names)}
        return [by_address.get(at) if (at := address_if_any(result)) else None for result in results]

    def _copy(self, results: list[Any], lasting: Set[int]) -> None:
        """Replaces results by copies, one storage after the other, but for memory that is ``lasting``."""
        groups: dict[int, list[int]] = {}
        for i, result in enumerate(results):
            if self._is_here(result):
                groups.setdefault(address_if_any(result), []).append(i)
        for at in groups.keys() - lasting - {0}:
            memory = {at: results[groups[at][0]].untyped_storage().clone()}
            for i in groups[at]:
                results[i] = _moved(results[i], memory)

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device == self.region.device

    def written_without_saying(self) -> str | None:
        """The name of an input that the ops have changed although it is not among those they write."""
        changed = [i for i, old, new in zip(self._others, self._hashes_before, self._hash_others()) if old != new]
        return self._inputs[changed[0]] if changed else None

    def _hash_others(self) -> list[int]:
        if not self._others:
            return []
        return torch.stack([hash_tensor(t) for t in self._others.values()]).tolist()

    def differing(self, eager: Run, replayed: Run) -> list[Compared]:
        """Where two runs differ."""
        described, inputs = self.region.describe, self._inputs
        results = [each.name for each in self.region.io.outputs]
        compared = [Compared("result", i, name, described(name)) for i, name in enumerate(results)]
        compared += [Compared("written input", i, inputs[i], described(inputs[i])) for i in self._written]
        compared += self.generators
        return [of for of in compared if not self._agree(of, eager, replayed)]

    def _agree(self, of: Compared, eager: Run, replayed: Run) -> bool:
        one, other = eager.value(of), replayed.value(of)
        # The seed of an attention is on the host, where no replay changes it, and in some captures on the device.
        tensors = [t for t in (one, other) if isinstance(t, torch.Tensor)]
        elsewhere = of.kind == "result" and not all(map(self._is_here, tensors))
        return elsewhere or (same(one, other) and eager.source(of) == replayed.source(of))

    def never_written(self, compared: Sequence[Compared]) -> dict[Compared, torch.Tensor]:
        """Of each result: where its memory holds what was there before the ops ran."""
        run = self.run_on_filled_memory(self.region.function) if compared else None
        values = {of: value for of in compared if run is not None and self._is_here(value := run.value(of))}
        return {of: bits(value) == ones(value) for of, value in values.items()}

    def adopt(self, eager: Run, replayed: Run, *, has_run: bool, wholly: bool) -> None:
        """Makes the results of a replay, and the call's state, what the eager run made.

        If a graph ``has_run``, versions have advanced. With ``wholly``, an eager result takes the place of a replay's
        result that it cannot be copied into. No graph may follow in this call then.
        """
        with torch.no_grad():
            for at, memory in eager.memory.items():
                self._images[at][0].copy_(memory)
            originals = {memory.data_ptr(): self._images[at][0] for at, memory in eager.memory.items()}
            for i, (value, result) in enumerate(zip(eager.results, replayed.results)):
                here = self._is_here(value) and self._is_here(result)
                if here and same_layout(value, result) and eager.sources[i] == replayed.sources[i]:
                    if not same(value, result):
                        one, other = (flat(t) if overlaps_itself(t) else t for t in (result, value))
                        one.copy_(other)
                elif wholly:
                    replayed.results[i] = _moved(value, originals) if address_if_any(value) in originals else value
        with suppress(Disturbed):  # then the generators stay where they are
            self._set_states(eager.generators)
        if not has_run:
            torch.autograd.graph.increment_version(self._versioned)


def _moved(arg: Any, memory: dict[int, torch.UntypedStorage]) -> Any:
    """``arg``, in the copy of its memory if there is one."""
    if not isinstance(arg, torch.Tensor):
        return arg
    storage = memory.get(address(arg))
    if storage is None:
        return arg.detach().requires_grad_(arg.requires_grad)
    return on_other_memory(arg, storage, int(arg.storage_offset()))


class _Keep(TorchDispatchMode):
    """Keeps all that operators make, so that no memory is used twice, and fills what is empty with ones."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._kept.append(output)
        if func.overloadpacket in _EMPTY:
            bits(output).fill_(ones(output))
        return output
