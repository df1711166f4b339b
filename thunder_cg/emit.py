"""Writes one planned trace: the ops of each region become one symbol, between symbols that begin and end the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder_cg.analysis.ops import names_in
from thunder_cg.analysis.partition import PlannedTrace, Region
from thunder_cg.compat import thunder as compat
from thunder_cg.executor import executor
from thunder_cg.runtime.functions import unused
from thunder_cg.runtime.outputs import copy_out
from thunder_cg.runtime.program import Program


def taken_names(trace: compat.TraceCtx) -> set[str]:
    """Names that a symbol of ours must not have: those of values, and of what the trace's symbols call."""
    called = {name for s in trace.bound_symbols for name in (s.sym.name, *compat.bound_functions(s))}
    return {*trace.names, *called}


def returned_and_saved(trace: compat.TraceCtx) -> tuple[set[str], set[str]]:
    """Names that the trace returns to the caller, and names that it keeps for autograd.

    ``flat_args`` are the arguments, or what in-place updates made of them. Autograd ties the outputs to them, and
    nobody reads them; Thunder drops them again where no backward follows.
    """
    args = trace.bound_symbols[-1].args
    first = args[0] if args else None
    if compat.TraceTag.BACKWARD in trace.tags or not (isinstance(first, dict) and "output" in first):
        return names_in(args), set()
    returned = names_in([v for k, v in first.items() if k != "flat_args"])
    saves = compat.TraceTag.AUGMENTED_FORWARD in trace.tags
    return returned, names_in([args[1:], first["flat_args"]]) if saves else set()


class Emitter:
    """Writes the trace of one program.

    Args:
        trace: the trace that was read.
        planned: what analysis knows of it.
        forward: of a backward, the program of its forward.
        taken: names that no symbol of ours may have; those that are chosen are added.
    """

    def __init__(
        self, trace: compat.TraceCtx, planned: PlannedTrace, program: Program, forward: Program | None, taken: set[str]
    ) -> None:
        self._old, self._ops, self._plan, self._aliasing = trace, planned.ops, planned.plan, planned.aliasing
        self._program, self._forward, self._taken = program, forward, taken
        self._return = trace.bound_symbols[-1]
        self._proxies: dict[str, compat.Proxy] = {name: value.proxy for name, value in planned.ops.values.items()}
        inside = {name for region in program.regions for op in region.ops for name in op.outputs}
        self._hidden = inside.difference(each.name for region in program.regions for each in region.io.outputs)
        # What the caller gets of values that also stay in the pool.
        self._copies: dict[str, compat.Proxy] = {}

    def emit(self) -> compat.TraceCtx:
        trace = compat.from_trace(self._old)
        with compat.tracectx(trace):
            if self._program.regions or self._forward is not None:
                for region in self._program.regions:
                    for output in region.io.outputs:
                        if output.copied_out and output.name in region.names_in_pool:
                            self._add_copy(output.name)
                trace.bound_symbols = self._symbols()
            else:
                trace.bound_symbols = [op.symbol for op in self._ops.ops]
                first = next(i for i, op in enumerate(self._ops.ops) if op.id != "UNPACK_TRIVIAL")
                if self._program.options.strict and compat.TraceTag.BACKWARD not in self._old.tags:
                    begin = self._bind("cudagraph_begin", self._program.begin_without_regions, [], None)
                    trace.bound_symbols.insert(first, begin)
                if self._program.same_options is not None:
                    check = self._bind("cudagraph_check_options", self._program.check_options, [], None)
                    trace.bound_symbols.insert(first, check)
            return compat.del_last_used(trace)

    def _symbols(self) -> list[compat.BoundSymbol]:
        outside = set(self._ops.args)
        unpacking = [
            op
            for op in self._ops.ops
            if op.bookkeeping and op.symbol is not self._return and outside.issuperset(op.inputs)
        ]
        clears = [op for op in unpacking if op.id == "clear_mutable_collection"]
        first = [op for op in unpacking if op.id != "clear_mutable_collection"]
        placed = {op.index for op in (*first, *clears)} | {self._ops.ops[-1].index}
        call = self._handle("call", "call0")
        symbols = [op.symbol for op in first]
        inputs = [self._proxies[name] for name in self._program.inputs.names]
        if self._forward is not None:
            arguments = [self._saved_state(), *inputs]
            symbols.append(self._bind("cudagraph_begin_backward", self._program.begin_backward, arguments, call))
        else:
            symbols.append(self._bind("cudagraph_begin", self._program.begin, inputs, call))
        symbols += [op.symbol for op in clears]
        regions = iter(range(len(self._program.regions)))
        for step in self._plan.steps:
            if isinstance(step, Region):
                symbols += self._region(next(regions), call)
            elif step.op not in placed:
                symbols.append(self._ops.ops[step.op].symbol)
        return symbols + self._ending(call)

    def _region(self, index: int, call: compat.Proxy) -> list[compat.BoundSymbol]:
        region = self._program.regions[index]
        inputs = [self._proxies[name] for name in (*region.input_names, *region.io.scalars)]
        outputs = [
            self._copies.get(each.name, self._proxies[each.name]) if each.copied_out else self._proxies[each.name]
            for each in region.io.outputs
        ]
        subsymbols = [op.symbol for op in region.ops]
        if self._forward is None:
            return [executor.bind(region.name, region.run, [call, *inputs], outputs, subsymbols=subsymbols)]
        # A backward lets go of what was saved, so that an eager run can free it as it goes.
        taken = self._handle("inputs", "inputs0")
        unpack = executor.bind("unpack_inputs", list, [taken], inputs)
        return [
            self._bind("cudagraph_inputs", lambda *values: [*values], inputs, taken),
            executor.bind(region.name, region.run_list, [call, taken], outputs, subsymbols=[unpack, *subsymbols]),
        ]

    def _saved_state(self) -> compat.Proxy:
        """The collection of saved non-tensors, or of both collections where nothing took them apart."""
        for op in self._ops.ops:
            if op.id == "UNPACK_SEQUENCE" and op.inputs == ("saved_for_backward",):
                return self._proxies[op.outputs[1]]
        return self._proxies["saved_for_backward"]

    def _ending(self, call: compat.Proxy) -> list[compat.BoundSymbol]:
        args = list(self._return.args)
        if compat.TraceTag.AUGMENTED_FORWARD not in self._old.tags:
            copies = self._copy_out_what_was_saved()
            if args and isinstance(args[0], dict) and "flat_args" in args[0]:  # Thunder drops them later
                args[0] = {**args[0], "flat_args": compat.tree_map(self._if_known, args[0]["flat_args"])}
            args = [compat.tree_map(self._copied, arg) for arg in args]
            end = self._bind("cudagraph_end_call", self._program.end_call, [call], None)
            return [*copies, end, self._return.from_bsym(args=args)]
        outcome = compat.tree_map(self._copied, args[0])
        tensors, others = args[1]
        self._program.is_continued = bool(names_in(tensors) or others)
        saved = self._handle("saved state", "others0")
        end = self._bind("cudagraph_end_forward", self._program.end_forward, [call, *others], saved)
        return [end, self._return.from_bsym(args=(outcome, (tensors, saved)))]

    def _copy_out_what_was_saved(self) -> list[compat.BoundSymbol]:
        """Copies gradients that are what the forward saved in the pool, or views of that, and that no region makes."""
        if self._forward is None:
            return []
        in_pool = {name for region in self._forward.regions for name in region.names_in_pool}
        copied = {e.name for region in self._program.regions for e in region.io.outputs if e.copied_out}
        saved = self._aliasing.sets_of(in_pool.intersection(self._ops.args))
        names = sorted(name for name in names_in(self._return.args) - copied if self._aliasing.sets.get(name) in saved)
        for name in names:
            self._add_copy(name)
        proxies, copies = [self._proxies[name] for name in names], [self._copies[name] for name in names]
        return [self._bind("cudagraph_copy_out", copy_out, proxies, copies)] if names else []

    def _copied(self, value: Any) -> Any:
        return self._copies.get(value.name, value) if isinstance(value, compat.Proxy) else value

    def _if_known(self, value: Any) -> Any:
        """The value, or None for one that regions only use themselves."""
        return None if isinstance(value, compat.Proxy) and value.name in self._hidden else value

    def _add_copy(self, name: str) -> None:
        self._copies[name] = self._proxies[name].replace(name=self._name(f"{name}_out"))

    def _handle(self, kind: str, wish: str) -> compat.Proxy:
        return compat.Handle(kind, name=self._name(wish))

    def _bind(self, name: str, fn: Any, args: Sequence[Any], output: Any) -> compat.BoundSymbol:
        return executor.bind(self._name(name), fn, args, output)

    def _name(self, wish: str) -> str:
        name = unused(wish, self._taken)
        self._taken.add(name)
        return name
