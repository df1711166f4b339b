"""``cudagraph_transform()``: Thunder's hooks around analysis and run time. It orchestrates and decides nothing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from types import MappingProxyType
from typing import Any, Literal

import torch

from thunder_cg.analysis.aliasing import Aliasing, symbol_has_effect
from thunder_cg.analysis.causes import refuse_eager_ops
from thunder_cg.analysis.classify import UserRules, classify, shown
from thunder_cg.analysis.coalescing import coalesced, of_parallelism
from thunder_cg.analysis.collectives import schedule_collectives
from thunder_cg.analysis.donation import alone, donated
from thunder_cg.analysis.gradients import WrongGradient, lost_or_unsummed, overwritten, put_off, returned
from thunder_cg.analysis.lost import constant, lost, uncalled, unrepeated
from thunder_cg.analysis.ops import Ops, names_in, process_groups, read
from thunder_cg.analysis.partition import PlannedTrace, Region, partition
from thunder_cg.analysis.region_io import RegionIO, region_io
from thunder_cg.analysis.sources import Stacks
from thunder_cg.analysis.undefined import Routes, needed_for, results_reached, routes_of
from thunder_cg.communication import install as trace_collectives
from thunder_cg.compat import thunder as compat
from thunder_cg.compat.attributes import see_attributes_of_pytorch
from thunder_cg.compat.compilation import (
    compilation_began,
    compiled_entries,
    constant_results,
    end_autocast,
    lost_changes,
    on_compile,
)
from thunder_cg.compat.compiled import has_pytorchs_numbers, hooks_on_gradients
from thunder_cg.compat.dtypes import promote_as_pytorch
from thunder_cg.compat.instance_norm import update_statistics_of_instance_norm
from thunder_cg.compat.lines import keep_lines
from thunder_cg.compat.settings import autocast_dtype
from thunder_cg.compat.thunder import TraceCtx, keep_effects_once
from thunder_cg.compat.torch_compile import stacks_of_generated_code
from thunder_cg.compile_log import NamedOperators, log_compiled, warn_of_losses, warn_of_wrong_gradients
from thunder_cg.emit import Emitter, returned_and_saved, taken_names
from thunder_cg.errors import TransformConflictError
from thunder_cg.fastpath.dispatch import install
from thunder_cg.fastpath.prologue import PrologueChecks, with_one_check
from thunder_cg.fastpath.sharing import told_apart
from thunder_cg.options import Options, taken_from
from thunder_cg.report.programs import made_by, refuse_compiled
from thunder_cg.runtime.arena import Arenas
from thunder_cg.runtime.backends import PlanningBackend, resolve
from thunder_cg.runtime.compilation import Compilation, compiling, name_of, note_compile_failure
from thunder_cg.runtime.functions import hash_function, region_function
from thunder_cg.runtime.program import Program, SharedState, program_of
from thunder_cg.runtime.ranks.same_options import SameOptions
from thunder_cg.runtime.region import RuntimeRegion
from thunder_cg.verify import ReplayVerifier


class PartitionProvenance(compat.TraceProvenance):
    """Says of a trace that it was partitioned, and into what."""

    def __init__(self, pss: str, program: Program) -> None:
        super().__init__(pss)
        self.program = program


class CudagraphTransform(compat.Transform):
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

    def __init__(self, options: Options, stand_in: str | None = None) -> None:
        super().__init__()
        trace_collectives()
        keep_lines()
        keep_effects_once(symbol_has_effect)
        promote_as_pytorch()
        see_attributes_of_pytorch()
        update_statistics_of_instance_norm()
        on_compile(_compile_scope, note_compile_failure)
        self.options = options
        self._stand_in = stand_in  # of a plan: the type of device that stands for a CUDA device
        self._rules = UserRules(frozenset(options.allow), frozenset(options.deny))
        self._backend = resolve(options.backend) if stand_in is None else PlanningBackend()
        poison = options.debug or self._backend.poisons
        arenas = Arenas(self._backend, options.max_arenas, poison, options.memory_budget)
        self._shared = SharedState(options, self._backend, arenas)
        self._numbers = count(1)  # of regions
        self._compiling = _Compiling()
        self._named = NamedOperators(self._shared)

    def __deepcopy__(self, memo: Any) -> CudagraphTransform:
        """Itself: its bounds hold for all that it compiles. Lightning copies the backend of ``torch.compile``."""
        return self

    def __repr__(self) -> str:
        """Python that makes one alike: the reproducers that ``thunderfx`` saves have it, and import Thunder alone."""
        fields = type(self.options).__dataclass_fields__.values()
        changed = {f.name: getattr(self.options, f.name) for f in fields if getattr(self.options, f.name) != f.default}
        names = {name: sorted(map(str, value)) for name, value in changed.items() if name in ("allow", "deny")}
        passed = ", ".join(f"{name}={value!r}" for name, value in {**changed, **names}.items())
        return f"__import__('thunder_cg').cudagraph_transform({passed})"

    def transform_module(self, model: compat.ThunderModule) -> None:
        """Gives the compiled module its fast path to the graphs."""
        install(model)

    def transform_traces_pre_prologue(
        self, prologue_trace: TraceCtx, computation_trace: TraceCtx, epilogue_trace: TraceCtx | None, **kwargs: Any
    ) -> tuple[TraceCtx, TraceCtx, TraceCtx | None]:
        """Notes which tensors are parameters and buffers: later passes lose the mark. Checks them all at once.

        Raises:
            TransformConflictError: another transform captures CUDA graphs, too.
        """
        transforms = compat.get_compile_data().transforms
        _refuse_a_second_graph_transform(transforms)
        prologue_trace = told_apart(prologue_trace, computation_trace)
        gc.collect(1)  # Thunder's tracer has just left reference cycles that hold the module; they are young
        self._begin(prologue_trace, computation_trace)
        self._find_wrong_gradients(computation_trace)
        losses = self._losses(computation_trace, epilogue_trace)
        warn_of_losses(self._compiling.compilation, losses, self._shared.warned)
        end_autocast(computation_trace)
        if not any(map(_changes_prologues, transforms[transforms.index(self) + 1 :])):
            prologue_trace = with_one_check(prologue_trace, self._compiling.static)
        return prologue_trace, computation_trace, epilogue_trace

    def transform_trace_post_optimization(self, computation_trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        """Partitions a forward trace, or the backward trace that follows it."""
        start = time.perf_counter()
        if self.options.capture_collectives != "never":
            computation_trace = schedule_collectives(computation_trace)
        forward = self._forward_of(computation_trace)
        computation_trace = self._follow_gradients(computation_trace)
        # The forward whose calls the backward continues. One without regions, or that saves nothing, has ended them.
        continued = forward if forward is not None and forward.regions and _gets_saved(computation_trace) else None
        planned = self._plan(computation_trace, forward)
        names = taken_names(computation_trace)
        compilation = forward.compilation if forward is not None else self._joined()
        program = self._program(planned, continued, names, compilation)
        trace = Emitter(computation_trace, planned, program, continued, names).emit()
        if compat.TraceTag.BACKWARD not in computation_trace.tags:
            self._compiling.forward = (computation_trace.names, weakref.ref(program))
        took = int((time.perf_counter() - start) * 1000)
        log_compiled(program, took, self._shared.warned)
        trace.set_provenance(PartitionProvenance(f"CUDA graph partition (took {took} milliseconds)", program))
        compilation.finish(time.perf_counter() - compilation_began())
        return trace

    def _begin(self, prologue_trace: TraceCtx, computation_trace: TraceCtx) -> None:
        """Notes what the later hooks of a compilation need."""
        data, its = compat.get_compile_data(), self._compiling
        unpacks = (compat.PrimIDs.UNPACK_PARAMETER, compat.PrimIDs.UNPACK_BUFFER)
        symbols = [s for s in prologue_trace.bound_symbols if s.sym.id in unpacks]
        its.static = frozenset(p.name for s in symbols for p in s.flat_proxy_outs)
        checks = PrologueChecks(prologue_trace)
        parameters = {p.name: str(s.args[1]) for s in symbols for p in s.flat_proxy_outs}
        its.names = {**checks.users_names(data.fn), **parameters}
        its.compilation = self._compilation(checks)
        its.stacks = stacks_of_generated_code(data.fn)
        its.forward = None
        its.before = self._read(computation_trace) if self.options.allow or self.options.deny else None

    def _follow_gradients(self, trace: TraceCtx) -> TraceCtx:
        """Of a forward, notes which results the gradient of each argument comes from; drops those that come from none.

        Only in what `thunderfx` compiles: elsewhere gradients are those of uncaptured Thunder, zeros among them. Other
        ranks may define what this one leaves undefined, so nothing changes in a backward that communicates.
        """
        its = self._compiling
        if compat.TraceTag.AUGMENTED_FORWARD in trace.tags:
            data = trace.bound_symbols[-1].args[0]
            is_known = len(data["flat_output"]) == its.results
            its.routes = routes_of(its.reached if is_known else {}, data["flat_args"])
        elif compat.TraceTag.BACKWARD in trace.tags and frozenset() in its.routes:
            (gradients,) = trace.bound_symbols[-1].args
            kept = tuple(None if route == frozenset() else each for each, route in zip(gradients, its.routes))
            ops = self._read(trace)
            if any(op.communicates for op in ops.ops) or names_in(kept) in (names_in(gradients), set()):
                return trace
            *computed, end = needed_for(names_in(kept), ops, Aliasing.of(ops))
            trace = compat.from_trace(trace)
            trace.bound_symbols = [*(op.symbol for op in computed), end.symbol.from_bsym(args=(kept,))]
        return trace

    def _plan(self, trace: TraceCtx, forward: Program | None) -> PlannedTrace:
        """Reads a trace, decides of each op whether to capture it, and orders the ops.

        Args:
            forward: of a backward, the program of its forward.
        """
        ops = self._read(trace, forward.ops if forward is not None else None)
        aliasing = Aliasing.of(ops)
        # A recording with updated scalars is verified, and an eager run beside a replay would communicate twice.
        communicates = any(op.communicates for op in ops.ops)
        updates = self._backend.supports_scalar_updates and not communicates
        self._check_gradients(trace, ops, aliasing)
        verdicts = classify(
            ops,
            aliasing,
            self._rules,
            self._backend.device_type,
            supports_scalar_updates=updates,
            captures_collectives=self.options.capture_collectives != "never",
        )
        self._named.warn_of_unmatched(self._compiling.before, ops, compat.get_compile_data().executors_list)
        self._compiling.before = None  # this was the forward
        plan = partition(ops, verdicts, aliasing)
        if self.options.strict == "ops":
            refuse_eager_ops(ops, plan, aliasing)
        kind = "backward" if compat.TraceTag.BACKWARD in trace.tags else "forward"
        return PlannedTrace(kind, ops, aliasing, plan, *returned_and_saved(trace))

    def _check_gradients(self, trace: TraceCtx, ops: Ops, aliasing: Aliasing) -> None:
        """Warns at the backward of all wrong gradients, those that only its forward tells included."""
        its = self._compiling
        if compat.TraceTag.BACKWARD in trace.tags:
            known = {each.line for each in its.wrong_gradients}
            late = [each for each in put_off(ops, aliasing, its.seen) if each.line not in known]
            warn_of_wrong_gradients(its.compilation, [*its.wrong_gradients, *late])
        elif compat.TraceTag.AUGMENTED_FORWARD in trace.tags:
            saved = names_in(trace.bound_symbols[-1].args[1:])
            its.wrong_gradients += overwritten(ops, aliasing, saved)
            seen = aliasing.sets_of([*ops.args, *names_in(trace.bound_symbols[-1].args[:1])])
            its.seen = frozenset(name for name, of in aliasing.sets.items() if of in seen)
            its.alone = alone(saved, its.seen, aliasing)

    def _find_wrong_gradients(self, trace: TraceCtx) -> None:
        """Of a trace that Thunder is to differentiate. Warns of those for which there may be no backward trace."""
        its = self._compiling
        its.reached, its.results, its.wrong_gradients = {}, 0, ()
        if not _has_gradients(trace):
            return
        ops = self._read(trace)
        aliasing = Aliasing.of(ops)
        if has_pytorchs_numbers(compat.get_compile_data()):
            its.reached, its.results = results_reached(ops, aliasing), len(returned(ops.ops[-1]))
        wrong = lost_or_unsummed(ops, aliasing)
        its.wrong_gradients = tuple(each for each in wrong if not each.may_leave_no_backward)
        if torch.is_grad_enabled():
            warn_of_wrong_gradients(its.compilation, [each for each in wrong if each.may_leave_no_backward])

    def _losses(self, trace: TraceCtx, epilogue: TraceCtx | None) -> Iterator[str]:
        """What Python does and Thunder loses, in words."""
        yield from lost(trace, self._read)
        stacks = self._compiling.stacks or {}
        trains = torch.is_grad_enabled() and _has_gradients(trace)
        inputs = names_in(trace.args or ()) if trains else None
        yield from unrepeated(lost_changes(epilogue, inputs=inputs), stacks)
        yield from constant(constant_results(epilogue))
        if torch.is_grad_enabled():
            yield from uncalled(hooks_on_gradients(compat.get_compile_data().fn))

    def _compilation(self, checks: PrologueChecks) -> Compilation:
        """What the compilation on this thread is for."""
        data = compat.get_compile_data()
        module = data.fn if isinstance(data.fn, torch.nn.Module) else None
        known: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for kind, name, value in checks.users_values(data.fn):
            known[kind][name] = value
        return Compilation(
            name=name_of(data.fn),
            training=module.training if module is not None and not isinstance(module, torch.fx.GraphModule) else None,
            grad=bool(data.is_grad_enabled),
            autocast=autocast_dtype(self._backend.device_type),
            checked=known,
            parameters={name: str(checks.lookups[name].key) for name in self._compiling.static},
            attributes=frozenset(checks.attributes_of_modules(data.fn)),
        )

    def _joined(self) -> Compilation:
        """The compilation on this thread, with what has changed since earlier ones of the function."""
        compilation = self._compiling.compilation
        earlier = (program_of(entry.computation_traces) for entry in compiled_entries())
        compilation.join([(each.compilation, each.replays) for each in earlier if each is not None])
        return compilation

    def _read(self, trace: TraceCtx, forward: Ops | None = None) -> Ops:
        its = self._compiling
        return read(trace, its.static, forward, its.stacks, self._stand_in, its.names)

    def _program(
        self, trace: PlannedTrace, forward: Program | None, taken: set[str], compilation: Compilation
    ) -> Program:
        verifier = ReplayVerifier(trace.ops, self._backend, trace.aliasing)
        planned = [step for step in trace.plan.steps if isinstance(step, Region)]
        before = forward.regions if forward is not None else ()
        kept = frozenset(name for each in before for name in each.names_in_pool)
        regions = [self._region(*each, trace, verifier, taken, kept) for each in zip(planned, region_io(trace))]
        same_options = self._same_options(trace.ops)
        program = Program(trace, regions, forward, self._shared, verifier, compilation, same_options)
        if program.kind == "backward" and not any(op.communicates for op in trace.ops.ops):
            several = any(route and len(route) < self._compiling.results for route in self._compiling.routes)
            program.routes = self._compiling.routes if several else ()
        return program

    def _same_options(self, ops: Ops) -> SameOptions | None:
        """Whether ranks have compiled a trace with the same options; None if the order of its collectives is fixed."""
        if not (groups := process_groups(of_parallelism(ops))):
            return None
        data, options = compat.get_compile_data(), self.options
        executors = (each for each in data.executors_list if not isinstance(each, compat.TemporaryExecutor))
        counted = {
            "allow": f"[{', '.join(sorted(map(shown, options.allow)))}]",
            "deny": f"[{', '.join(sorted(map(shown, options.deny)))}]",
            "executors": str([each.name for each in executors]),
            "capture_collectives": repr(options.capture_collectives),
        }
        return SameOptions(groups, data, counted, needs_answers=options.capture_collectives != "never")

    def _region(
        self,
        planned: Region,
        io: RegionIO,
        trace: PlannedTrace,
        verifier: ReplayVerifier,
        taken: set[str],
        kept: frozenset[str],
    ) -> RuntimeRegion:
        """A region of a trace; ``kept`` is what the forward's regions keep in the pool for a backward."""
        name = next(name for number in self._numbers if (name := f"CUDAGraph{number}") not in taken)
        mine = [trace.ops.ops[i] for i in planned.ops]
        inputs = [*(each.name for each in io.inputs), *io.scalars]
        results = [each.name for each in io.outputs]
        early = {each.name: each.last_use for each in io.outputs if each.last_use is not None}
        launches = coalesced(mine, trace.ops.values)
        backend, donations = self._backend, donated(mine, io, trace.aliasing, kept & self._compiling.alone)

        def function(is_profiled: bool, donates: bool) -> Callable[..., Sequence[Any]]:
            ranges = [f"{op.name} {trace.ops.place(op)}" for op in mine] if is_profiled else ()
            given = donations if donates else ()
            return region_function(name, mine, inputs, results, early, launches, backend, ranges, given)

        hashes = None
        if io.scalars or self.options.verify is not None:
            hash_values = partial(verifier.hash_values, torch.device(planned.device))
            hashes = hash_function(name, mine, inputs, trace.aliasing, backend, hash_values)
        return RuntimeRegion(name, planned, mine, io, function, hashes, frozenset(chain.from_iterable(donations)))

    def _forward_of(self, trace: TraceCtx) -> Program | None:
        """The program of the forward trace that this backward trace belongs to: they share one set of names."""
        if compat.TraceTag.BACKWARD not in trace.tags or self._compiling.forward is None:
            return None
        names, reference = self._compiling.forward
        return reference() if names is trace.names else None


class _Compiling(threading.local):
    """What one compilation, which stays on its thread, has to remember from hook to hook."""

    static: frozenset[str] = frozenset()  # names of parameters and buffers
    compilation: Compilation
    names: Mapping[str, str] = MappingProxyType({})  # what the module calls them, and the user the inputs
    stacks: Stacks | None = None  # of the lines of Dynamo's graphs
    forward: tuple[set[str], weakref.ref[Program]] | None = None
    before: Ops | None = None  # the trace before Thunder transforms it, if options name operators
    wrong_gradients: tuple[WrongGradient, ...] = ()
    # Which results each argument reaches, how many there are, and which ones the gradients come from.
    reached: Mapping[str, frozenset[int]] = MappingProxyType({})
    results = 0
    routes: Routes = ()
    seen: frozenset[str] = frozenset()  # names of the forward in memory that its caller sees
    alone: frozenset[str] = frozenset()  # names that the forward saves, each in memory that nothing else is in


@contextmanager
def _compile_scope(data: Any, statistics: Any) -> Iterator[None]:
    """`compiling`. Raises `OptionError` for what Thunder cannot read; it can read what it has compiled itself."""
    if made_by(data.fn) != "thunder.jit":
        refuse_compiled(data.fn, "thunder.jit")
    with compiling(data, statistics):
        yield


def _has_gradients(trace: TraceCtx) -> bool:
    """Whether an input of a trace requires a gradient."""
    arguments, _ = compat.tree_flatten_with_dataclass((trace.args or (), trace.kwargs or {}))
    unpacked = (proxy for symbol in trace.bound_symbols for proxy in symbol.flat_proxy_outs)
    return any(map(compat.requires_grad, (*arguments, *unpacked)))


def _gets_saved(trace: TraceCtx) -> bool:
    """Whether a backward gets what its forward saved. If that is nothing, Thunder may write two empty collections."""
    return any("saved_for_backward" in {p.name for p in s.flat_proxy_outs} for s in trace.bound_symbols)


def _changes_prologues(transform: compat.Transform) -> bool:
    """Whether it may change what is checked, as those do that shard parameters: they look for a check of each one.

    thunderfx's only drops checks, since Dynamo has guards. These do not see that a parameter's `requires_grad` changed.
    """
    inherited = compat.Transform.transform_traces_pre_prologue
    drops = compat.ExtractionOnlyPrologueTransform
    return type(transform).transform_traces_pre_prologue is not inherited and not isinstance(transform, drops)


def _refuse_a_second_graph_transform(transforms: Sequence[Any]) -> None:
    """Thunder's own graph transform is known by the name of its module: to import that needs a GPU."""
    kinds = [type(each) for each in transforms]
    graphs = [
        kind.__name__
        for kind in kinds
        if getattr(kind, "owns_regions", False) or kind.__module__ == "thunder.transforms.cudagraph"
    ]
    if len(graphs) > 1:
        raise TransformConflictError([kind.__name__ for kind in kinds], graphs)


def cudagraph_transform(
    *,
    allow: Collection[str | Callable[..., Any]] = (),
    deny: Collection[str | Callable[..., Any]] = (),
    backend: str = "auto",
    strict: bool | Literal["ops"] = False,
    verify: Literal["first"] | int | None = None,
    debug: bool = False,
    max_recordings: int = 8,
    max_arenas: int = 16,
    capture_collectives: Literal["auto", "always", "never"] = "auto",
    memory_budget: int | float | None = None,
    select: Literal["all", "measured"] = "all",
) -> CudagraphTransform:
    """A Thunder transform that runs the safe parts of a program as CUDA graphs.

    The first call with a layout of inputs runs eagerly, the second is captured, later ones replay. A call that no graph
    is right for runs eagerly, and :func:`thunder_cg.explain` says why.

    Args:
        allow: operators to capture although no rule knows them, such as ``["my_op"]`` or ``["my_executor.my_op"]``. An
            operator of ``torch.library`` is ``"ns::op"``, ``"ns.op"`` or ``"torch.ops.ns.op"``, with or without an
            overload (``"ns.op.default"``), and each names its derivative, too. Objects serve as well as names: what
            ``torch.library.custom_op`` or ``torch.ops`` has, a symbol of Thunder's, or the function that it calls. A
            name that no operator has is a warning with the nearest name.
        deny: operators to keep eager.
        backend: ``"cuda"``, ``"tape"`` (records and replays on the CPU), ``"auto"``: CUDA graphs where there is a GPU.
        strict: raise :class:`~thunder_cg.errors.CaptureError` at each call that does not replay after its warm-up and
            its capture, of which each layout of inputs has one. A call that brings something new, such as another shape
            or Python number, raises once six before it did and none replayed in between. ``"ops"`` raises also for an
            operator that stays eager, when Thunder compiles. Calls inside another capture or a graphed step, whose
            graph holds them, do not raise. A call of :func:`thunder_cg.thunderfx` that ran without Thunder, in plain
            Python or in Inductor, raises after it ran.
        verify: ``"first"`` replays each new recording beside an eager run of its ops on the same inputs, and compares
            results, written inputs and the device's generator bit for bit; a number N does so for one call in N as
            well, for as long as the process runs. A region that disagrees is eager from then on, the call's result is
            the eager one, and a :class:`~thunder_cg.errors.DisagreementWarning` names the first op whose value differs
            (with ``strict=True`` a `CaptureError`). Ops that are not deterministic have a tolerance. A verified call
            runs the ops once more, and needs the memory of an eager run and of a copy of what the graph writes or
            reuses. State that an operator keeps by itself, outside of the trace, advances with that run, too.
            A region that communicates is not compared: an eager run beside a replay would communicate twice. A call
            is compared by itself: what it returned is not looked at again after later calls.
        debug: fill memory with NaN when nobody may read it any more.
        max_recordings: recordings kept for one compiled function and arena; the one that saves the fewest launches
            per byte goes first, and replays of long ago count less.
        max_arenas: memory pools for each compiled function; a call that finds all of them held by calls in flight runs
            eagerly.
        capture_collectives: ``"auto"`` captures Thunder's collectives if all ranks of their groups agree, before each
            capture and after it; ``"always"`` captures them without asking the other ranks, which have to make the
            same calls; ``"never"`` leaves them eager.
        memory_budget: how much memory the pools of all arenas may have together: bytes, or a share of the device as a
            float of at most 1.0. What a call needs is estimated before it warms up or captures. Past the budget, the
            recordings that save the fewest launches per byte go first; if that is not enough, the call runs eagerly,
            even with ``strict=True``. Workspaces of cuBLAS, and what the driver takes for graphs, come on top:
            :func:`thunder_cg.explain` lists them. With a budget, gradients are copied out of the pools.
        select: ``"measured"`` leaves a region eager whose graph takes at least a tenth longer than its ops, even with
            ``strict=True``; :func:`thunder_cg.explain` has both times. For that, the first 10 calls of each function
            that Thunder compiles, such as of each shape, run eagerly. Then calls warm up and capture, and 10 replays
            are timed, again after each decision. A run's time is the longer one of the device's and the host's, and
            medians are compared. If forward or backward has collectives that are captured, nothing is timed, as ranks
            would decide differently. On the tape no graph pays, save that of a module that is one region. ``"all"``
            captures all regions.

    Returns:
        The transform, for ``thunder.jit(fn, transforms=[...])``. One instance may serve any number of models.

    Raises:
        OptionError: a value that an option cannot have.
        BackendError: the backend does not work on this machine.
    """
    return CudagraphTransform(Options(**locals()))


class CUDAGraphPlugin(compat.Plugin):
    """``thunder.compile(model, plugins=["cudagraph"])``, or ``plugins=[CUDAGraphPlugin(deny=["my_op"])]`` for options.

    Args:
        options: keyword arguments of :func:`cudagraph_transform`.
    """

    policy = compat.PluginPolicy.POST

    def __init__(self, **options: Any) -> None:
        self._options = taken_from(options, "CUDAGraphPlugin", (), may_be_others=False)
        Options(**self._options)  # checks them

    def setup_transforms(self) -> list[compat.Transform]:
        return [cudagraph_transform(**self._options)]


compat.register_plugin("cudagraph", CUDAGraphPlugin)
