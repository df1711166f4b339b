"""What `thunderfx` gives Dynamo as a backend."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from inspect import signature
from operator import getitem
from traceback import FrameSummary
from types import CodeType
from typing import Any
from unittest.mock import patch

import thunder
import torch
from torch.fx import GraphModule, Node

from thunder_cg.analysis.sources import SourceLine, called_from, described, line_of, user_frames, users
from thunder_cg.compat.compiled import NAME, OPTIONS
from thunder_cg.compat.dynamo import (
    CompiledFunction,
    GraphInputs,
    ThunderCompiler,
    get_torch_compile_kwargs,
    inputs_of,
    inputs_of_modules,
    users_names,
)
from thunder_cg.compat.dynamo_records import DynamoBreak
from thunder_cg.compat.dynamo_scope import TensorifyScalarRestartAnalysis
from thunder_cg.compat.fx import compute_without_inference_mode, is_collective
from thunder_cg.compat.lines import is_torchs
from thunder_cg.compat.operators import library_names
from thunder_cg.compat.splitter import keeping_fallbacks
from thunder_cg.compat.thunder import ThunderModule, get_default_executors, owns_regions
from thunder_cg.dynamo.fallbacks import objections
from thunder_cg.dynamo.hooks import is_moved
from thunder_cg.dynamo.layouts import keeping_layouts
from thunder_cg.dynamo.nodes import copied
from thunder_cg.dynamo.numbers import pass_as_tensors, specialize_floats, take_out_numbers, take_out_numbers_of_parts
from thunder_cg.dynamo.pieces import join_pieces
from thunder_cg.dynamo.rewrites import rewrite
from thunder_cg.dynamo.sizes import SizesOfGraph, numbers_that_count
from thunder_cg.dynamo.writes import makes_only_views, order_counts
from thunder_cg.errors import CaptureError, CudagraphError, OptionError, SkipReason, TransformConflictError
from thunder_cg.kernels import torchs_derivatives
from thunder_cg.options import taken_from
from thunder_cg.progress import Stage
from thunder_cg.report.breaks import graph_breaks, is_same
from thunder_cg.report.programs import graph_name, jitted_parts, outside_of, part_name, refuse_compiled
from thunder_cg.runtime.compilation import NAMES, OF_MODULES, name_of, with_advice
from thunder_cg.transform import cudagraph_transform

_logger = logging.getLogger(__name__)

_FIRST_CALLS = 3  # of which the log says if none ran in Thunder
_APART = "compile what comes before it and after it as functions of their own"
_OF_ANOTHER = "a value of another piece"  # of the graph


class Compiler(ThunderCompiler):
    """Gives Inductor less of a graph of Dynamo's than Thunder's own compiler does.

    Attributes:
        function: the user's name of what it compiles.
        failures: how many of Dynamo's graphs it could not compile, each of which is a call that raised.
        failure: what was raised last.
        parameters: of the user's function, by position, if it is a module of PyTorch's, called with ``*args``.
        inputs: what its graphs are for, by their numbers.
        left: functions of which Dynamo compiles nothing because of hooks on gradients, and why.
        sizes: what calls its graphs whose sizes may change, by their numbers.
        succeeded: trials of operators that its graphs share, since a function compiled anew is mostly as before.
    """

    function = "a function"
    failures = 0
    failure: str | None = None
    parameters: Sequence[str] = ()
    is_moved = staticmethod(is_moved)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inputs: dict[int, GraphInputs] = {}
        self.left: dict[CodeType, DynamoBreak] = {}
        self.sizes: dict[int, SizesOfGraph] = {}
        self.succeeded: set[Any] = set()

    def __call__(self, module: GraphModule, *inputs: Any) -> Any:
        """Compiles one of Dynamo's graphs.

        Raises:
            CaptureError: with ``strict="ops"``, Inductor got an operator of it.
        """
        only_views = makes_only_views(module.graph)
        names, of_graph = users_names(module.graph, self.parameters), inputs_of(module.graph, self.inputs.values())
        of_modules = frozenset(inputs_of_modules(module.graph))
        compute_without_inference_mode(module.graph)
        as_it_was = copied(module)
        try:
            specialize_floats(module)
            rewrite(module, self.thunder_options)
            put_back, with_tensors = take_out_numbers(module), pass_as_tensors(module)
            counted = numbers_that_count(module)
            compiled = self._split(module, objections(module, self.thunder_options), *inputs)
        except TensorifyScalarRestartAnalysis:
            raise
        except Exception as error:
            # Errors of this package say what Inductor would get wrong, too, such as the gradients of collectives.
            if isinstance(error, CudagraphError) or any(map(is_collective, as_it_was.graph.nodes)):
                self._note_failure(error, _line_of_operator(module, str(error)))
                raise
            problem = f"is in a graph that Thunder's splitter does not take: {described(error)}"
            try:
                compiled = self._split(as_it_was, lambda _: SkipReason(problem, _APART), *inputs)
            except Exception:
                self._note_failure(error, _line_of_operator(module, str(error)))
                raise error from None
            module, put_back, with_tensors, counted = as_it_was, _as_it_is, _as_it_is, []
        number = len(self.subgraph_infos) - 1
        self.inputs[number] = of_graph
        self._name_parts(names, of_modules)
        if "ops" in self._strict:
            for outside in (each for each in outside_of("the graph", self.subgraph_infos[-1]) if each.cost):
                where = f"{outside.operator} at {outside.line or 'a line unknown to Dynamo'}"
                problem = f"runs eagerly, as Inductor got it and no trace has it: {outside.reason}"
                fix = outside.fix or "use an operator that Thunder traces"
                raise CaptureError(where, problem, fix, option='strict="ops"')
        whole = put_back(with_tensors(module if only_views else _called_directly(compiled)))
        if not (counted and self._may_leave_thunder(as_it_was)):
            return whole
        parts = self.subgraph_infos[-1].thunder_compiled_fns or ()
        self.sizes[number] = SizesOfGraph(graph_name(self.function, number), counted, parts, whole, as_it_was)
        return self.sizes[number]

    def _may_leave_thunder(self, module: GraphModule) -> bool:
        """Whether calls of a graph may run in PyTorch: not if ``strict`` is set, nor beside ranks that run it here."""
        return not (any(self._strict) or self._is_symbolic or any(map(is_collective, module.graph.nodes)))

    @property
    def _strict(self) -> list[Any]:
        """The option of this name, of each transform that has it."""
        options = (getattr(each, "options", None) for each in self.thunder_options.get("transforms") or ())
        return [getattr(each, "strict", False) for each in options]

    def note_dynamos_failure(self, error: Exception, stack: Sequence[FrameSummary]) -> None:
        """Keeps what Dynamo raised before it had a graph."""
        self._note_failure(error, users([SourceLine(frame.filename, frame.lineno or 0) for frame in stack]))

    def _note_failure(self, error: Exception, stack: Sequence[SourceLine]) -> None:
        """Keeps what was raised, and where, which is empty if it is not known. Notes on the error what to try."""
        self.failures += 1
        problem = described(error, at=called_from(stack))
        line = stack[-1] if stack else line_of(error)
        self.failure = with_advice(error, self.function, problem, line, is_of_dynamo=True)

    def _split(self, module: GraphModule, objection: Callable[[Node], SkipReason | None], *inputs: Any) -> Any:
        """Thunder's own ``__call__``, with fusions of consecutive operators where `order_counts`.

        Args:
            objection: says of a node why it is left to Inductor.
        """
        join = partial(join_pieces, is_symbolic=self._is_symbolic)
        fusions = {"fusion_type": "consecutive"} if order_counts(module.graph) else {}
        with (
            patch.dict(self.thunder_options, fusions),
            keeping_fallbacks(objection, take_out_numbers_of_parts, join, keeping_layouts, self.succeeded),
            Stage(lambda: "splitting a graph of Dynamo's"),
        ):
            return super().__call__(module, *inputs)

    @property
    def _is_symbolic(self) -> bool:
        """Whether a trace is for all sizes; else it is for one set of sizes."""
        return "symbolic" in str(self.thunder_options.get("cache")).lower()

    def _name_parts(self, names: Mapping[str, str], of_modules: Set[str]) -> None:
        """Notes on what Thunder will compile of the last graph what the report calls it, for the log and profiles.

        Args:
            names: what the user calls inputs of the graph.
            of_modules: those of them that modules have.
        """
        graph = graph_name(self.function, len(self.subgraph_infos) - 1)
        nodes = self.subgraph_infos[-1].original_graph_module.graph.find_nodes(op="placeholder")
        of_graph = {node.name for node in nodes}
        parts = self.subgraph_infos[-1].thunder_compiled_fns or ()
        for number, jitted in enumerate(parts):
            module = thunder.compile_data(jitted).fn
            if isinstance(module, GraphModule):
                taken = {node.name for node in module.graph.find_nodes(op="placeholder")}
                said = {**dict.fromkeys(taken - of_graph, _OF_ANOTHER), **names}
                module.meta |= {NAME: part_name(graph, number, len(parts)), NAMES: said, OF_MODULES: of_modules}


def _as_it_is(compiled: Any) -> Any:
    return compiled


def _called_directly(whole: GraphModule) -> Callable[..., Any]:
    """What calls the only piece of a split graph, if Thunder has compiled it; else the graph.

    Each module on the way to a piece has several functions pass on all inputs, which may be hundreds of parameters.
    """
    *nodes, output = whole.graph.nodes
    inputs, rest = ([node for node in nodes if (node.op == "placeholder") is yes] for yes in (True, False))
    call, *items = rest or [output]
    piece: Any = whole.get_submodule(call.target) if call.op == "call_module" else None
    if not isinstance(piece, ThunderModule) or call.kwargs or not all(arg in inputs for arg in call.args):
        return whole
    order = [inputs.index(arg) for arg in call.args]
    is_in_order = order == [*range(len(inputs))]

    def results_of(args: Sequence[Any]) -> Any:
        return piece(*(args if is_in_order else [args[i] for i in order]))  # which runs its hooks

    if output.args[0] == (call,) and not items:
        return lambda *args: (results_of(args),)
    if output.args[0] != tuple(items) or any(item.target is not getitem or item.args[0] is not call for item in items):
        return whole
    places = [item.args[1] for item in items]
    return lambda *args: tuple(map(results_of(args).__getitem__, places))


def _line_of_operator(module: GraphModule, message: str) -> list[SourceLine]:
    """Where the operator of ``torch.library`` was called that an error of Inductor's names; empty if there is none."""
    for node in module.graph.nodes:
        if library_names(node.target) and str(node.target) in message:
            return user_frames(node.stack_trace)
    return []


def thunderfx(fn: Callable[..., Any], **options: Any) -> CompiledFunction:
    """See :func:`thunder_cg.thunderfx`."""
    refuse_compiled(fn, "thunderfx")
    ours = taken_from(options, "thunderfx", {*OPTIONS, *signature(torch.compile).parameters}, may_be_others=True)
    for name in ("mode", "options"):
        if options.get(name) not in (None, "default"):
            raise OptionError(name, options[name], "nothing, as it is for Inductor", "drop it", "thunderfx")
    given = options.pop("transforms", None) or ()
    if graphs := [type(each).__name__ for each in given if owns_regions([each])]:
        fix = "thunder_cg.thunderfx has one itself; pass its options, as in thunderfx(fn, allow=[...])"
        raise TransformConflictError([type(each).__name__ for each in given], [*graphs, "its own"], fix)
    transforms = [*given, cudagraph_transform(**ours)]
    return compile_with(fn, transforms=transforms, **options)


def compile_with(fn: Callable[..., Any], **options: Any) -> CompiledFunction:
    """Compiles with the options of Thunder's own ``thunderfx``, and with fewer cuts. Graphs are up to a transform."""
    transforms = [*options.get("transforms", ())]  # Thunder adds to the list that it gets

    def copied(memo: Any) -> CompiledFunction:
        return compile_with(copy.deepcopy(fn, memo), **{**options, "transforms": transforms})

    given = options.get("executors")
    executors = [*(get_default_executors() if given is None else given)]
    if torchs_derivatives.executor not in executors:
        options = {**options, "executors": [torchs_derivatives.executor, *executors]}
    for_dynamo = get_torch_compile_kwargs(**options)
    backend = Compiler(**{name: value for name, value in options.items() if name not in for_dynamo})
    backend.function, backend.parameters = name_of(fn), _parameters(fn)
    compiled = CompiledFunction(backend, torch.compile(fn, backend=backend, **for_dynamo), copied)
    is_strict = any(getattr(getattr(each, "options", None), "strict", False) for each in transforms)
    compiled.after_call = _SeesPlainPython(backend, is_strict)
    return compiled


def _parameters(fn: Any) -> tuple[str, ...]:
    """Of a module of PyTorch's own, what its forward gets by position."""
    forward = getattr(fn, "forward", None) if isinstance(fn, torch.nn.Module) else None
    names = signature(forward).parameters if forward is not None else {}
    is_torchs_own = is_torchs(getattr(getattr(forward, "__code__", None), "co_filename", ""))
    return tuple(names) if is_torchs_own and "args" not in names else ()


class _SeesPlainPython:
    """Sees after a call whether anything ran that Thunder had compiled, and logs each graph break once.

    If nothing ran, `CaptureError` with ``strict``; else the log warns once if none of the first calls did.

    What has an ``__dict__`` would be part of the state of a graphed step, and these numbers change.
    """

    __slots__ = ("_backend", "_breaks", "_calls", "_graphs", "_is_done", "_is_strict", "_ran")

    def __init__(self, backend: Compiler, is_strict: bool) -> None:
        self._backend, self._is_strict, self._is_done, self._calls, self._ran = backend, is_strict, False, 0, 0
        self._breaks, self._graphs = set[tuple[str | None, str]](), 0

    def __call__(self) -> None:
        if len(self._backend.subgraph_infos) > self._graphs:
            self._log_breaks()
        if self._is_done:
            return
        before, self._calls = self._ran, self._calls + 1
        self._ran = sum(thunder.compile_stats(jitted).calls for jitted in jitted_parts(self._backend))
        problem = "ran without Thunder, in plain Python or in Inductor"
        fix = "print(thunder_cg.explain(fn)) says why, at which line, and what to change"
        if self._ran == before and self._is_strict:
            raise CaptureError(f"{self._backend.function}, call {self._calls}", f"it {problem}", fix)
        if not self._is_strict and (self._ran or self._calls == _FIRST_CALLS):
            self._is_done = True
            if not self._ran:
                _logger.warning(
                    "%s: all of the first %d calls %s; %s", self._backend.function, _FIRST_CALLS, problem, fix
                )

    def _log_breaks(self) -> None:
        """Warns of the graph breaks of new graphs."""
        graphs = self._backend.subgraph_infos
        for number in range(self._graphs, len(graphs)):
            for each in graph_breaks(graph_name(self._backend.function, number), graphs[number]):
                if not any(each.reason == reason and is_same(each.line, line) for line, reason in self._breaks):
                    self._breaks.add((each.line, each.reason))
                    line = each.line or "a line unknown to Dynamo"
                    _logger.warning("%s: graph break at %s: %s; %s", each.function, line, each.reason, each.fix)
        self._graphs = len(graphs)
