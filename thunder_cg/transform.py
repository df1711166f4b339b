"""``cudagraph_transform()``: Thunder's hooks around analysis and run time. It orchestrates and decides nothing."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Collection
from functools import cached_property
from itertools import count
from typing import Any, Literal

from thunder.core.module import ThunderModule
from thunder.core.prims import PrimIDs
from thunder.core.proxies import AnyProxy, Proxy
from thunder.core.pytree import tree_flatten_with_dataclass, tree_map
from thunder.core.recipe import Plugin, PluginPolicy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, TraceTag, from_trace, tracectx
from thunder.core.transform_common import Transform
from thunder.executors.passes import del_last_used
from thunder.plugins import register_plugin

from thunder_cg.analysis.aliasing import alias_sets
from thunder_cg.analysis.classify import UserRules, classify
from thunder_cg.analysis.ops import Ops, read
from thunder_cg.analysis.partition import Plan, Region, partition
from thunder_cg.analysis.region_io import region_ios
from thunder_cg.executor import executor
from thunder_cg.fastpath.dispatch import install
from thunder_cg.fastpath.prologue import with_one_check
from thunder_cg.options import Options
from thunder_cg.runtime.arena import Arenas
from thunder_cg.runtime.backend import resolve
from thunder_cg.runtime.functions import region_function, watched_function
from thunder_cg.runtime.program import Program
from thunder_cg.runtime.region import RuntimeRegion, keep


class PartitionProvenance(TraceProvenance):
    """Says of a trace that it was partitioned, and into what."""

    def __init__(self, pss: str, program: Program) -> None:
        super().__init__(pss)
        self.program = program


class CudagraphTransform(Transform):
    """Puts the CUDA-graph-safe parts of a trace into regions. Made by :func:`cudagraph_transform`.

    Before::

        def computation(x, t_w):
          t0 = torch.matmul(x, t_w)
          t1 = torch.relu(t0)
          f2 = Tensor.item(t1)
          ...

    After::

        def computation(x, t_w):
          call0 = cudagraph_begin(x, t_w)
          [t1] = CUDAGraph1(call0, x, t_w)
            # t0 = torch.matmul(x, t_w)
            # t1 = torch.relu(t0)
          f2 = Tensor.item(t1)
          ...
          cudagraph_end_call(call0)
    """

    owns_regions = True

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self._rules = UserRules(options.allow, options.deny)
        self._backend = resolve(options.backend)
        self._arenas = Arenas(self._backend, options.max_arenas, options.debug or self._backend.poisons)
        self._numbers = count(1)
        self._compiling = _Compilation()

    def transform_module(self, model: ThunderModule) -> None:
        """Gives the compiled module its short way to the graphs."""
        install(model)

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Notes which tensors are parameters and buffers: later passes lose the mark. Checks them all at once."""
        unpacks = (PrimIDs.UNPACK_PARAMETER, PrimIDs.UNPACK_BUFFER)
        symbols = [s for s in prologue_trace.bound_symbols if s.sym.id in unpacks]
        self._compiling.static = frozenset(p.name for s in symbols for p in s.flat_proxy_outs)
        self._compiling.forward = None
        return with_one_check(prologue_trace, self._compiling.static), computation_trace, epilogue_trace

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        """Partitions a forward trace, or the backward trace that follows it."""
        start = time.perf_counter_ns()
        forward = self._forward_of(computation_trace)
        ops = read(computation_trace, self._compiling.static, forward.ops if forward is not None else None)
        plan = partition(
            ops,
            classify(
                ops,
                self._rules,
                self._backend.device_type,
                supports_scalar_updates=self._backend.supports_scalar_updates,
            ),
        )
        trace, program = _Emission(self, computation_trace, ops, plan, forward).emit()
        if TraceTag.BACKWARD not in computation_trace.tags:
            self._compiling.forward = (computation_trace.names, weakref.ref(program))
        took = (time.perf_counter_ns() - start) // 1_000_000
        trace.set_provenance(PartitionProvenance(f"CUDA graph partition (took {took} milliseconds)", program))
        return trace

    def _forward_of(self, trace: TraceCtx) -> Program | None:
        """The program of the forward trace that this backward trace belongs to: they share one set of names."""
        if TraceTag.BACKWARD not in trace.tags or self._compiling.forward is None:
            return None
        names, reference = self._compiling.forward
        program = reference()
        if program is None or names is not trace.names or not program.regions or not _takes_what_was_saved(trace):
            return None
        return program


class _Compilation(threading.local):
    """What one compilation, which stays on its thread, has to remember from hook to hook."""

    static: frozenset[str] = frozenset()
    forward: tuple[set[str], weakref.ref[Program]] | None = None


class _Handle(AnyProxy):
    """Stands in a trace for an object of the run time, which the trace only hands on."""

    def type_string(self) -> str:
        return f"CUDA graph {self._o}"


class _Emission:
    """Writes one planned trace."""

    def __init__(
        self, transform: CudagraphTransform, trace: TraceCtx, ops: Ops, plan: Plan, forward: Program | None
    ) -> None:
        self._transform = transform
        self._old = trace
        self._ops = ops
        self._plan = plan
        self._forward = forward
        self._backward = TraceTag.BACKWARD in trace.tags
        self._return = trace.bound_symbols[-1]
        self._trains = TraceTag.AUGMENTED_FORWARD in trace.tags
        self._proxies: dict[str, Proxy] = {name: value.proxy for name, value in ops.values.items()}

    @cached_property
    def _roots(self) -> dict[str, str]:
        return alias_sets(self._ops)

    def emit(self) -> tuple[TraceCtx, Program]:
        trace = from_trace(self._old)
        with tracectx(trace):
            program = self._program()
            if program.regions or self._forward is not None:
                trace.bound_symbols = self._symbols(trace, program)
            else:
                trace.bound_symbols = [op.symbol for op in self._ops.ops]
            return del_last_used(trace), program

    def _program(self) -> Program:
        transform = self._transform
        returned, saved = self._outcome()
        edges = region_ios(self._ops, self._plan, returned, saved)
        regions = [step for step in self._plan.steps if isinstance(step, Region)]
        self._copies: dict[str, Proxy] = {}
        runtime: list[RuntimeRegion] = []
        for region, io in zip(regions, edges):
            name = f"CUDAGraph{next(transform._numbers)}"
            made = RuntimeRegion(name, region, io, function=lambda: ())
            ops = [self._ops.ops[i] for i in region.ops]
            inputs = (*io.inputs, *io.numbers)
            results = [slot.name for slot in made.slots]
            leaving = {exit.name: region.ops.index(exit.last) for exit in io.outputs_ if exit.last is not None}
            made.function = region_function(name, ops, inputs, results, leaving, transform._backend)
            if made.is_always_verified or transform.options.verify is not None:
                made.watched = watched_function(name, ops, inputs, self._roots, made.device, transform._backend)
            for exit in io.outputs_:
                if exit.inside and exit.leaves:
                    proxy = self._proxies[exit.name]
                    self._copies[exit.name] = proxy.replace(name=_unused(f"{exit.name}_out", self._old.names))
            runtime.append(made)
        return Program(
            kind="backward" if self._backward else "forward",
            ops=self._ops,
            plan=self._plan,
            regions=runtime,
            saved=frozenset(saved),
            options=transform.options,
            backend=transform._backend,
            arenas=transform._arenas,
            forward=self._forward,
        )

    def _outcome(self) -> tuple[set[str], set[str]]:
        """Names that the trace returns to the caller, and names that it keeps for autograd.

        ``flat_args`` are the arguments, or what in-place updates made of them. Autograd ties the outputs to them, and
        nobody reads them; Thunder drops them again where no backward follows.
        """
        first = self._return.args[0] if self._return.args else None
        if self._backward or not (isinstance(first, dict) and "output" in first):
            return _names(self._return.args), set()
        returned = _names([v for k, v in first.items() if k != "flat_args"])
        return returned, _names([self._return.args[1:], first["flat_args"]]) if self._trains else set()

    def _symbols(self, trace: TraceCtx, program: Program) -> list[BoundSymbol]:
        outside = set(self._ops.args)
        frame = [
            op
            for op in self._ops.ops
            if op.bookkeeping and op.symbol is not self._return and outside.issuperset(op.inputs)
        ]
        clears = [op for op in frame if op.id == "clear_mutable_collection"]
        first = [op for op in frame if op.id != "clear_mutable_collection"]
        placed = {op.index for op in (*first, *clears)} | {self._ops.ops[-1].index}
        symbols = [op.symbol for op in first]
        call = _Handle("call", name=_unused("call0", trace.names))
        inputs = [self._proxies[n] for n in program.inputs]
        if self._forward is not None:
            symbols.append(
                executor.bind("cudagraph_begin_backward", program.begin_backward, [self._others(), *inputs], call)
            )
        else:
            symbols.append(executor.bind("cudagraph_begin", program.begin, inputs, call))
        symbols += [op.symbol for op in clears]
        index = 0
        for step in self._plan.steps:
            if isinstance(step, Region):
                symbols.append(self._region(program, index, call))
                index += 1
            elif step.op not in placed:
                symbols.append(self._ops.ops[step.op].symbol)
        return symbols + self._ending(trace, program, call)

    def _region(self, program: Program, index: int, call: Proxy) -> BoundSymbol:
        region = program.regions[index]
        return executor.bind(
            region.name,
            region.run,
            [call, *(self._proxies[n] for n in (*region.io.inputs, *region.io.numbers))],
            [
                self._copies.get(s.name, self._proxies[s.name]) if s.leaves else self._proxies[s.name]
                for s in region.slots
            ],
            subsymbols=[self._ops.ops[i].symbol for i in region.region.ops],
        )

    def _others(self) -> Proxy:
        """The collection of saved non-tensors, or of both collections where nothing took them apart."""
        for op in self._ops.ops:
            if op.id == "UNPACK_SEQUENCE" and op.inputs == ("saved_for_backward",):
                return self._proxies[op.outputs[1]]
        return self._proxies["saved_for_backward"]

    def _ending(self, trace: TraceCtx, program: Program, call: Proxy) -> list[BoundSymbol]:
        args = list(self._return.args)
        if not self._trains:
            kept = self._keep_what_was_saved(program)
            args = [tree_map(self._leaving, arg) for arg in args]
            end = executor.bind("cudagraph_end_call", program.end_call, [call], None)
            return [*kept, end, self._return.from_bsym(args=args)]
        outcome = tree_map(self._leaving, args[0])
        tensors, others = args[1]
        kept = _Handle("saved", name=_unused("others0", trace.names))
        end = executor.bind("cudagraph_end_forward", program.end_forward, [call, *others], kept)
        return [end, self._return.from_bsym(args=(outcome, (tensors, kept)))]

    def _keep_what_was_saved(self, program: Program) -> list[BoundSymbol]:
        """Copies gradients that are what the forward saved in the arena, or views of that, and that no region makes."""
        if self._forward is None:
            return []
        inside = {slot.name for region in self._forward.regions for slot in region.slots if not slot.leaves}
        leave = {slot.name for region in program.regions for slot in region.slots if slot.leaves}
        saved = {self._roots[name] for name in inside.intersection(self._ops.args)}
        names = sorted(name for name in _names(self._return.args) - leave if self._roots.get(name) in saved)
        for name in names:
            self._copies[name] = self._proxies[name].replace(name=_unused(f"{name}_out", self._old.names))
        proxies, copies = [self._proxies[name] for name in names], [self._copies[name] for name in names]
        return [executor.bind("cudagraph_copy_out", keep, proxies, copies)] if names else []

    def _leaving(self, value: Any) -> Any:
        return self._copies.get(value.name, value) if isinstance(value, Proxy) else value


def _takes_what_was_saved(trace: TraceCtx) -> bool:
    """Where nothing was saved, Thunder may write the two empty collections down as a literal."""
    return any("saved_for_backward" in {p.name for p in s.flat_proxy_outs} for s in trace.bound_symbols)


def _names(tree: Any) -> set[str]:
    return {leaf.name for leaf in tree_flatten_with_dataclass(tree)[0] if isinstance(leaf, Proxy)}


def _unused(wish: str, names: Collection[str]) -> str:
    return next(name for i in count() if (name := wish if i == 0 else f"{wish}_{i}") not in names)


def cudagraph_transform(
    *,
    allow: Collection[str] = (),
    deny: Collection[str] = (),
    backend: str = "auto",
    strict: bool = False,
    verify: Literal["first"] | int | None = None,
    debug: bool = False,
    max_recordings: int = 8,
    max_arenas: int = 16,
) -> CudagraphTransform:
    """A Thunder transform that runs the safe parts of a program as CUDA graphs.

    The first call with a layout of inputs runs eagerly, the second is captured, later ones replay. A call that no graph
    is right for runs eagerly, and :func:`thunder_cg.explain` says why.

    Args:
        allow: operators to capture although no rule knows them, such as ``["my_op"]`` or ``["my_executor.my_op"]``.
        deny: operators to keep eager.
        backend: ``"cuda"``, ``"tape"`` (records and replays on the CPU), ``"auto"``: CUDA graphs where there is a GPU.
        strict: raise :class:`~thunder_cg.errors.CaptureError` instead of running eagerly what could not be captured.
        verify: ``"first"`` replays each new recording beside an eager run of its ops on the same inputs, and compares
            results, written inputs and the device's generator bit for bit; a number N does so for one call in N as
            well, for as long as the process runs. A region that disagrees is eager from then on, the call's result is
            the eager one, and a :class:`~thunder_cg.errors.DisagreementWarning` names the first op whose value differs
            (with ``strict=True`` a `CaptureError`). Ops that are not deterministic have a tolerance. A verified call
            runs the ops once more, and needs the memory of an eager run and of a copy of what the graph writes or
            reuses. State that an operator keeps by itself, outside of the trace, advances with that run, too.
        debug: fill memory with NaN when nobody may read it any more.
        max_recordings: recordings kept for one compiled function and arena; the oldest goes first.
        max_arenas: memory pools for each compiled function; a call that finds all of them held by calls in flight runs
            eagerly.

    Returns:
        The transform, for ``thunder.jit(fn, transforms=[...])``. One instance may serve any number of models.

    Raises:
        OptionError: a value that an option cannot have.
        BackendError: the backend does not work on this machine.
    """
    options = Options.checked(
        allow=allow,
        deny=deny,
        backend=backend,
        strict=strict,
        verify=verify,
        debug=debug,
        max_recordings=max_recordings,
        max_arenas=max_arenas,
    )
    return CudagraphTransform(options)


class CUDAGraphPlugin(Plugin):
    """``thunder.compile(model, plugins=["cudagraph"])``, or ``plugins=[CUDAGraphPlugin(deny=["my_op"])]`` for options.

    Args:
        options: keyword arguments of :func:`cudagraph_transform`.
    """

    policy = PluginPolicy.POST

    def __init__(self, **options: Any) -> None:
        self._options = options

    def setup_transforms(self) -> list[Transform]:
        return [cudagraph_transform(**self._options)]


register_plugin("cudagraph", CUDAGraphPlugin)
