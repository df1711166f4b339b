"""Names of thunderfx's internals, imported where it is used only. Checked with lightning-thunder 0.2.6."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from traceback import FrameSummary
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from thunder.dynamo import splitter, utils
from thunder.dynamo.compiler import ThunderCompiler, ThunderFXCompiledObject
from thunder.dynamo.utils import SplitReason, SplitReasonType, get_torch_compile_kwargs
from torch._dynamo import cache_size, config, convert_frame, pgo
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.source import AttrSource
from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons
from torch._dynamo.variables import ConstantVariable, builder, misc
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from thunder_cg.compat.torch import tree_leaves

__all__ = [
    "CodeAtLimit",
    "CompiledFunction",
    "ThunderCompiler",
    "at_limit",
    "break_behind",
    "can_trace",
    "can_trace_all",
    "compute_again",
    "dynamo_callback",
    "example",
    "for_splitter",
    "gave_up",
    "get_torch_compile_kwargs",
    "inside_transforms",
    "is_supported",
    "keeping_fallbacks",
    "loses_wait",
    "on_examples",
    "without_gradient",
]

_FALLBACKS = frozenset(utils.auto_register_ops)  # PyTorch's functions that Thunder calls as they are
_LOG_METHODS = re.compile(r"(debug|info|warning|warn|error|critical|fatal|log)(_once|_advice)?")  # they return None


class CompiledFunction(ThunderFXCompiledObject):
    """What Thunder's ``thunderfx`` returns; a ``torch.compile`` around it calls it, and does not compile the original.

    ``generate`` of Transformers has one around the whole model. The signature is that of what was compiled: the
    ``Trainer`` of Transformers drops what a model's forward does not name. A deep copy, as of a model whose forward is
    compiled, is of what was compiled, and is compiled itself.
    """

    def __init__(
        self, backend: ThunderCompiler, function: Callable[..., Any], copied: Callable[[Any], CompiledFunction]
    ) -> None:
        super().__init__(backend, function)
        self._copied = copied
        self.after_call: Callable[[], None] | None = None
        self._count = _Count()
        _scope_dynamo(function)
        module = getattr(function, "_orig_mod", None)
        self.__signature__ = inspect.signature(function if module is None else module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._breaking_the_graph(*args, **kwargs)
        return self._called(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> CompiledFunction:
        return self._copied(memo)

    @torch.compiler.disable(reason="thunder_cg.thunderfx has compiled it")
    def _breaking_the_graph(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(*args, **kwargs)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        result = self._func(*args, **kwargs)
        self._count.calls += 1
        if self.after_call is not None:
            self.after_call()
        return result

    @property
    def calls(self) -> int:
        """How often it was called and returned."""
        return self._count.calls


class _Count:
    """How often something was called. An attribute of what is called would be part of the state of a graphed step."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def dynamo_callback(fn: Any) -> Any | None:
    """What Dynamo calls for a new frame: a compiled module keeps it in an attribute, a function in its closure."""
    if isinstance(fn, torch.nn.Module):
        return getattr(getattr(fn, "dynamo_ctx", None), "callback", None)
    return inspect.getclosurevars(fn).nonlocals.get("callback") if inspect.isfunction(fn) else None


def _scope_dynamo(function: Any) -> None:
    """Has Dynamo trace a compiled function in four ways of its own.

    Dynamo makes a size or a Python float dynamic if it was another one when the same code was compiled last. That may
    have been for another model: those of Transformers share code, and the epsilon of a norm would be read on the host.
    Here it goes by the calls of this function alone. If ``torch.compiler.config.job_id`` names a profile, which keeps
    such a history for later processes, all functions share it.

    With ``dynamic=True``, Dynamo makes all Python floats dynamic, so each epsilon would be read on the host, too. Here
    a float is a constant until it changes.

    Dynamo ends a graph at each call of a logger. Here :func:`_log_after_graph` has it made after the graph.

    Dynamo compiles the same code a few times only, for whatever function: eight blocks of a model, compiled one by one.
    Here the versions of this function count.

    Other functions are not affected, since Dynamo compiles under one lock.
    """
    callback = dynamo_callback(function)
    convert = getattr(callback, "_torchdynamo_orig_backend", None)
    if callback is None or convert is None:
        return
    backend: Any = callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    counts = cache_size._has_same_id_matched_objs

    def counts_own(frame: Any, entry: Any) -> bool:
        return entry.backend is backend and counts(frame, entry)

    shared: Any = None
    own: Any = None

    def convert_scoped(*args: Any, skip: int = 0, **kwargs: Any) -> Any:
        nonlocal shared, own
        if (now := pgo.get_code_state()) is not shared:  # at first, and after `torch._dynamo.reset`
            shared, own = now, defaultdict(pgo.CodeState)
        state = shared if pgo.get_cache_key() is not None else own
        with (
            patch.object(pgo, "_CODE_STATE", state),
            patch.object(misc.LoggingLoggerVariable, "call_method", _log_after_graph),
            patch.object(builder.VariableBuilder, "wrap_symfloat", _wrap_float),
            patch.object(cache_size, "_has_same_id_matched_objs", counts_own),
        ):
            return convert(*args, skip=skip + 1, **kwargs)

    # Dynamo looks for the caller of a frame behind the frames of its own file.
    convert_scoped.__code__ = convert_scoped.__code__.replace(co_filename=convert_frame.__file__)
    for name in ("_torchdynamo_orig_backend", "_clone_with_backend"):  # what others read of it
        setattr(convert_scoped, name, getattr(convert, name))
    callback._torchdynamo_orig_backend = convert_scoped


_call_method_of_logger = misc.LoggingLoggerVariable.call_method


def _log_after_graph(logger: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Has a call of a logger made after the graph that it would end, in each call, if its arguments cannot change."""
    functions = config.ignore_logging_functions
    method = getattr(logger.value, name, None)
    ignored = method in functions or getattr(method, "__func__", None) in functions
    is_later = _LOG_METHODS.fullmatch(name) and not kwargs and all(map(_is_immutable, args))
    if tx.export or ignored or not is_later or logger.source is None:
        return _call_method_of_logger(logger, tx, name, args, kwargs)
    call = misc.DebuggingVariable(method, source=AttrSource(logger.source, name))
    tx.output.root_tx.debug_locals.append((call, [*args]))  # those of an inlined function would be lost
    return ConstantVariable.create(None)


_wrap_symfloat = builder.VariableBuilder.wrap_symfloat


def _wrap_float(self: Any, value: float) -> Any:
    with config.patch(assume_static_by_default=True):
        return _wrap_symfloat(self, value)


def _is_immutable(argument: Any) -> bool:
    """Whether what a variable of Dynamo's stands for is a constant that is the same after the graph."""
    if not argument.is_python_constant():
        return False
    try:
        hash(argument.as_python_constant())
    except TypeError:
        return False
    return True


class CodeAtLimit(NamedTuple):
    """Python code that Dynamo has compiled as often as ``torch._dynamo.config.recompile_limit`` allows.

    It has done so for one function, and compiles the code no more, for any function.

    Attributes:
        function: "f (train.py:3)".
        versions: how often it is compiled, for all functions and instances that have this code.
        limit: the value of the option.
        reason: the condition of a version that a call did not meet for which it was not compiled any more; "" if there
            is no such call, or it is not known.
    """

    function: str
    versions: int
    limit: int
    reason: str


def at_limit(compiled: Any, backend: ThunderCompiler) -> Iterator[CodeAtLimit]:
    """The code of a compiled function that Dynamo compiles no more."""
    own = getattr(getattr(getattr(compiled, "_func", compiled), "_torchdynamo_orig_callable", None), "__code__", None)
    attempts = [each for each in get_compilation_metrics() if "recompile limit" in str(each.fail_reason)]
    refused = {str(each.compile_id): str(each.recompile_reason) for each in attempts}
    for code in filter(None, [reference() for reference in convert_frame.input_codes.seen]):
        entries = _debug_get_cache_entry_list(code)
        mine = [each for each in entries if getattr(each.backend, "compiler_fn", each.backend) is backend]
        if len(entries) < config.recompile_limit or not (code is own or mine):
            continue
        frame = str(entries[0].compile_id.frame_id)
        if len(mine) >= config.recompile_limit or any(each.partition("/")[0] == frame for each in refused):
            last = max(entries, key=lambda entry: entry.compile_id.frame_compile_id or 0).compile_id
            missed = refused.get(f"{last.frame_id}/{(last.frame_compile_id or 0) + 1}", "")
            reason = missed.partition("\n")[0].partition("  #")[0].partition(": ")[2].strip()
            if reason.startswith("BACKEND_MATCH"):  # a call of another function with the same code
                reason = ""
            place = f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
            yield CodeAtLimit(place, len(entries), config.recompile_limit, reason)


def break_behind(ended: Any) -> tuple[str, list[FrameSummary]] | None:
    """Why a graph ended and where; None if that is not known.

    What Dynamo cannot go on from, such as a break in a property, has no reason and only the line that it came from. The
    reason is with another break: of an earlier attempt at the same line, or of what the line calls, compiled later.
    """
    if ended.reason != "step_unsupported":
        return ended.reason, ended.user_stack
    (line,) = ended.user_stack[-1:]
    later = False
    for other in graph_break_reasons:
        later = later or other is ended
        if other.reason == ended.reason or not other.user_stack:
            continue
        if line in other.user_stack:
            return other.reason, other.user_stack
        if later and re.search(rf"\b{re.escape(other.user_stack[0].name)}\b", line.line or ""):
            return other.reason, [*ended.user_stack, *other.user_stack]
    return None


def gave_up(compiled: Any) -> tuple[str, list[FrameSummary]] | None:
    """Why Dynamo compiles nothing of a function and where, such as a graph break in a loop; None if it does."""
    function = getattr(compiled, "_func", compiled)
    module = getattr(function, "_orig_mod", None)
    original = getattr(function, "_torchdynamo_orig_callable", None) if module is None else module.forward
    if (code := getattr(original, "__code__", None)) is None:
        return None
    for each in reversed(get_compilation_metrics()):
        if (each.co_filename, each.co_firstlineno) == (code.co_filename, code.co_firstlineno):
            if each.fail_user_frame_lineno is None or "recompile limit" in str(each.fail_reason):
                return None
            where = FrameSummary(str(each.fail_user_frame_filename), each.fail_user_frame_lineno, code.co_name)
            return str(each.fail_reason), [where]
    return None


def example(value: Any) -> Any:
    """The arguments of a node, or a node, with fake tensors in the place of nodes, as Dynamo has left them there."""
    return map_arg(value, lambda node: node.meta.get("example_value"))


def on_examples(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a function returns for fake tensors. Tensors that it makes itself are fake, too."""
    modes = (leaf.fake_mode for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor))
    with next(modes, nullcontext()):
        return function(*args, **kwargs)


def for_splitter(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of that name that does the same, and that Thunder's splitter takes for an operator of Thunder's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = name.replace(".", "_")
    call.thunder_supported = True  # type: ignore[attr-defined]
    return call


def can_trace(function: Callable[..., Any], node: Node, options: dict[str, Any]) -> bool:
    """Whether Thunder can trace the function, and differentiate it if need be, with the arguments of the node."""
    can, _ = utils.try_execute_thunder_symbol(function, node, options)
    return can


def is_supported(node: Node, options: dict[str, Any]) -> bool:
    """Whether Thunder's symbol for what the node calls takes the node's arguments."""
    supported, _ = utils.is_node_supported_by_thunder(node, options)
    return bool(supported)


def loses_wait(node: Node, options: dict[str, Any]) -> bool:
    """Whether it waits for a collective that Thunder does not trace. Thunder's symbol for a wait does nothing.

    All that Thunder traces is all_reduce, which it waits for itself. What does not follow at once may be traced apart.
    """
    if str(node.target) != "_c10d_functional.wait_tensor":
        return False
    follows = node.args[0] is node.prev and str(node.prev.target) == "_c10d_functional.all_reduce"
    return not (follows and is_supported(node.prev, options))


def operator_name(node: Node) -> str:
    """The name of the function or of the method that a node calls; "" if it has none."""
    return str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))


def fallback_of(node: Node) -> Callable[..., Any] | None:
    """The operator that a node calls, if Thunder only calls it as it is; None for all others."""
    target: Any = getattr(torch.Tensor, str(node.target), None) if node.op == "call_method" else node.target
    return target if target in _FALLBACKS else None


@contextmanager
def keeping_fallbacks(
    objection: Callable[[Node], str | None], rewrite: Callable[[GraphModule], None]
) -> Iterator[None]:
    """Inside, Thunder's splitter keeps operators that Thunder calls as they are, if it can trace them.

    The splitter asks functions and a set of its module, which are replaced. Dynamo compiles under one lock, so no
    other compilation is affected.

    Args:
        objection: says of any node of the graph why Inductor gets it nevertheless.
        rewrite: gets each graph that was split, before its parts are compiled.
    """
    is_supported = utils.is_node_supported_by_thunder
    split = splitter.split_module

    def split_balanced(*args: Any, **kwargs: Any) -> GraphModule:
        whole = split(*args, **kwargs)
        for part in whole.children():
            _restore_grad_mode(part)
        rewrite(whole)
        return whole

    def is_kept(node: Node, options: dict[str, Any]) -> tuple[bool, SplitReason | None]:
        if (problem := objection(node)) is None:
            return is_supported(node, options)
        info = f"node with name: {node.name} and target: {node.target} {problem}"
        return False, SplitReason(SplitReasonType.MISSING_OP_SUPPORT, info)

    with (
        patch.object(utils, "auto_register_ops", frozenset()),
        patch.object(utils, "is_node_supported_by_thunder", is_kept),
        patch.object(splitter, "is_node_supported_by_thunder", is_kept),
        patch.object(splitter, "split_module", split_balanced),
    ):
        yield


def _restore_grad_mode(part: GraphModule) -> None:
    """Has a part of a graph that ends under ``torch.no_grad`` leave the grad mode as it is outside of the graph.

    PyTorch begins each part with the mode of its nodes. Thunder would leave the mode that it ends with to the caller,
    in the call that it is traced in.
    """
    modes = part.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    if modes and modes[-1].args[0] != torch.is_grad_enabled():
        *_, last = (node for node in part.graph.nodes if node.op != "output")
        with part.graph.inserting_after(last):
            part.graph.call_function(torch._C._set_grad_enabled, (torch.is_grad_enabled(),))
        part.recompile()


def compute_again(number: Node, graph: Graph) -> Node | None:
    """Computes a number of a part of a graph from the symbols that the whole graph takes; None if they do not suffice.

    Args:
        graph: the whole one, which gets nodes where it inserts now.
    """
    values = {node: node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")}
    numbers = {node: value for node, value in values.items() if isinstance(value, torch.SymInt)}
    tracer = GraphAppendingTracer(graph)
    symbols = {value.node.expr: Proxy(node, tracer) for node, value in numbers.items() if value.node.expr.is_Symbol}
    value = number.meta["example_value"]
    if not symbols.keys() >= value.node.expr.free_symbols:
        return None
    found = sympy_interp(PythonReferenceAnalysis, symbols, value.node.expr).node
    found.meta.setdefault("example_value", value)
    return found


def without_gradient(graph: Graph) -> frozenset[str]:
    """Names of the nodes that run under ``torch.no_grad``, as Dynamo saw it: also all, if it compiles there."""
    found = set()
    enabled = torch.is_grad_enabled()
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = node.args[0]
        elif not enabled:
            found.add(node.name)
    return frozenset(found)


def can_trace_all(module: GraphModule, options: dict[str, Any]) -> bool:
    """Whether Thunder can trace all of a graph, without fallbacks."""
    can, _ = utils.is_graphmodule_supported_by_thunder(module, options)
    return bool(can) and not any(loses_wait(node, options) for node in module.graph.nodes)


def inside_transforms(graph: Graph) -> frozenset[str]:
    """Names of the nodes inside of transforms of ``torch.func``: their tensors are not what they seem to be."""
    found = set()
    depth = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        depth += name.endswith("_increment_nesting")
        if depth:
            found.add(node.name)
        depth -= name.endswith("_decrement_nesting")
    return frozenset(found)
