"""Functions that ``thunderfx`` has compiled, and what Dynamo says of them. Checked with lightning-thunder 0.2.6.

Imported where it is used only, since Dynamo takes long to import.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from traceback import FrameSummary
from types import CodeType
from typing import Any, NamedTuple

import torch
from thunder.dynamo.compiler import ThunderCompiler, ThunderFXCompiledObject
from thunder.dynamo.utils import get_torch_compile_kwargs
from torch._dynamo import config, convert_frame
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons
from torch._guards import CompileContext
from torch.fx.experimental.symbolic_shapes import sym_or

from thunder_cg.compat.distributed import default_group
from thunder_cg.compat.dynamo_hooks import MOVED
from thunder_cg.compat.dynamo_records import BEFORE_BREAK, DynamoBreak, Recompilation, RecompileLimit
from thunder_cg.compat.dynamo_scope import scope_dynamo
from thunder_cg.compat.lines import is_torchs


class CompiledFunction(ThunderFXCompiledObject):
    """What Thunder's ``thunderfx`` returns; a ``torch.compile`` around it calls it, and does not compile the original.

    ``generate`` of Transformers has one around the whole model. The signature is that of what was compiled: the
    ``Trainer`` of Transformers drops what a model's forward does not name. A deep copy, as of a model whose forward is
    compiled, is of what was compiled, and is compiled itself.
    """

    def __init__(self, backend: Any, function: Callable[..., Any], copied: Callable[[Any], CompiledFunction]) -> None:
        super().__init__(backend, function)
        self._copied = copied
        self.after_call: Callable[[], None] | None = None
        self._count = _Count()
        scope_dynamo(function, backend.is_moved, backend.left)
        module = getattr(function, "_orig_mod", None)
        self.__signature__ = inspect.signature(function if module is None else module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._breaking_the_graph(*args, **kwargs)
        return self._called(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        fix = "take it from the module, or compile only its forward: model.forward = thunderfx(model.forward)"
        raise AttributeError(f"what thunderfx returns is a function, without the attribute {name!r}; {fix}")

    def __deepcopy__(self, memo: Any) -> CompiledFunction:
        return self._copied(memo)

    @torch.compiler.disable(reason="thunder_cg.thunderfx has compiled it")
    def _breaking_the_graph(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(*args, **kwargs)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        if _default_group.has_changed():
            torch._dynamo.reset()
        try:
            result = self._func(*args, **kwargs)
        except BackendCompilerFailed as error:  # which hides the notes of what the compiler raised
            vars(error).setdefault("__notes__", []).extend(getattr(error.inner_exception, "__notes__", ()))
            raise
        except TorchDynamoException as error:
            self._backend.note_dynamos_failure(error, getattr(error, "real_stack", None) or ())
            raise
        self._count.calls += 1
        if self.after_call is not None:
            self.after_call()
        return result

    @property
    def counts(self) -> tuple[int, int]:
        """How often it was called and returned, and how often Dynamo or Thunder raised while it compiled."""
        return self._count.calls, self._backend.failures

    @counts.setter
    def counts(self, counts: tuple[int, int]) -> None:
        self._count.calls, self._backend.failures = counts


_MODE = "the same mode: "  # begins a condition such as "the same mode: num_threads"
_OF_MODULES = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_OF_HOOK = re.compile(
    r"([\w.]+)\._\w*hooks\[list\(dict\.keys\(.*?_hooks\)\)\[\d+\]\](?:\.__closure__\[\d+\]\.cell_contents)?"
)
_GLOBAL = re.compile(r"\bG\['(?:__import_\w+'\]\.)?(\w+)(?:'\])?")


def users_names(graph: torch.fx.Graph, parameters: Sequence[str] = ()) -> dict[str, str]:
    """What the user calls the inputs of a graph of Dynamo's, such as ``past[0]``, by the names of their nodes.

    Args:
        parameters: of the user's function, by position, if Dynamo calls it with ``*args``.
    """
    said = {}
    for node in graph.find_nodes(op="placeholder"):
        name = getattr(getattr(node, "_dynamo_source", None), "name", "")
        name = name() if callable(name) else name  # torch before 2.10 has a method
        if _LEFT.search(name):
            said[node.name] = BEFORE_BREAK
        name = _with_names(name, parameters)
        parts = re.fullmatch(r"[LG]\['([a-zA-Z]\w*)'\](.*)", name)
        if parts is not None and "__" not in name and "(" not in name:  # sizes have numbers of their own
            owner, rest = parts.groups()
            owner = "self" if owner == "fn" and _OF_MODULES.match(rest) else owner  # a Sequential
            if owner == "kwargs" and (keyword := re.fullmatch(r"\['([a-zA-Z]\w*)'\](.*)", rest)) is not None:
                owner, rest = keyword.groups()  # what a caller has passed by this name
            said[node.name] = owner + _OF_MODULES.sub(r".\1", rest)
    return said


def inputs_of_modules(graph: torch.fx.Graph) -> Iterator[str]:
    """The inputs of a graph of Dynamo's that attributes of modules lead to, parameters and buffers among them."""
    for node in graph.find_nodes(op="placeholder"):
        kind = getattr(getattr(node, "_dynamo_source", None), "guard_source", None)
        kind = kind() if callable(kind) else kind  # torch before 2.10 has a method
        if kind is not None and (kind.is_unspecialized_nn_module() or kind.is_specialized_nn_module()):
            yield node.name


_LEFT = re.compile(r"___as_tensor\(___stack\d+\)\.item\(\)|L\['___stack\d+'\]|___stack\d+")


def _with_names(said: str, parameters: Sequence[str]) -> str:
    """Text of Dynamo's with the user's names for ``args[0]`` and so on."""
    for i, name in enumerate(parameters):
        said = said.replace(f"L['args'][{i}]", f"L['{name}']").replace(f"args[{i}]", name)
    return said


Shapes = tuple[tuple[int | None, ...], ...]  # None for a size that may change


class GraphInputs(NamedTuple):
    """What one of Dynamo's graphs is for.

    Attributes:
        code: a number of the Python code that it is of.
        symbols: how many sizes and numbers may change from call to call.
        shapes: of its tensors.
        left: those of earlier graphs of the code, which it leaves to them.
    """

    code: int
    symbols: int
    shapes: Shapes
    left: frozenset[Shapes]

    def succeeds(self, earlier: GraphInputs) -> bool:
        """Whether a later graph is for all calls of an earlier one. A size that may change is neither 0 nor 1."""
        if self.code != earlier.code or self.symbols <= earlier.symbols or len(self.shapes) != len(earlier.shapes):
            return False
        if earlier.shapes in self.left:
            return False
        return all(
            len(mine) == len(its) and all(m == i or (m is None and i not in (0, 1)) for m, i in zip(mine, its))
            for mine, its in zip(self.shapes, earlier.shapes)
        )


def inputs_of(graph: torch.fx.Graph, earlier: Iterable[GraphInputs]) -> GraphInputs:
    """Those of a graph that Dynamo compiles now. Dynamo gets a guard that leaves the shapes of earlier graphs to them.

    Dynamo asks its newest version first: a full batch after the first smaller one would be traced and captured again.
    """
    compiling = CompileContext.current_compile_id()
    values = [(node.meta.get("example_value"), node) for node in graph.find_nodes(op="placeholder")]
    free = sum(isinstance(v, (torch.SymInt, torch.SymFloat)) or _is_float(node) for v, node in values)
    tensors = [value for value, node in values if isinstance(value, torch.Tensor) and not _is_float(node)]
    shapes = tuple(tuple(size if isinstance(size, int) else None for size in each.shape) for each in tensors)
    code = compiling.frame_id if compiling is not None else None
    examples = (getattr(node.meta.get("grapharg"), "example", None) for _, node in values)
    if any(hasattr(each, "_dynamo_dynamic_range") for each in examples):
        earlier = ()  # `mark_dynamic` has set that, which allows no such guard
    left = {each.shapes for each in earlier if each.code == code and _leave(tensors, each.shapes)}
    return GraphInputs(-1 if code is None else code, free, shapes, frozenset(left))


def _leave(tensors: Sequence[torch.Tensor], shapes: Shapes) -> bool:
    """Leaves these shapes of tensors of a graph to another graph, if sizes that may change tell them apart."""
    if [each.dim() for each in tensors] != [*map(len, shapes)]:
        return False
    sizes = zip((size for each in tensors for size in each.shape), (size for shape in shapes for size in shape))
    differ: list[Any] = [now != other for now, other in sizes if other is not None]
    symbolic = [each for each in differ if isinstance(each, torch.SymBool)]
    is_told_apart = not any(each is True for each in differ) and any(each.node.hint for each in symbolic)
    return is_told_apart and bool(sym_or(*symbolic))  # this is the guard


def _is_float(node: torch.fx.Node) -> bool:
    """Whether it is a number of Python's that Dynamo passes as a tensor."""
    return bool(getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False))


class _Count:
    """How often something was called. An attribute of what is called would be part of the state of a graphed step."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class _DefaultGroup:
    """Of the ranks. Dynamo takes for constant which rank this one is, also in meshes, and whether there is a group."""

    def __init__(self) -> None:
        self._last: Any = self  # at the last call: nothing yet

    def has_changed(self) -> bool:
        """Whether it is another one than at the last call."""
        before, self._last = self._last, default_group()
        return before is not self and before is not self._last


_default_group = _DefaultGroup()


def recompile_limits(compiled: Any, backend: ThunderCompiler) -> Iterator[RecompileLimit]:
    """The code of a compiled function that Dynamo compiles no more, for any function that has it."""
    own = getattr(getattr(getattr(compiled, "_func", compiled), "_torchdynamo_orig_callable", None), "__code__", None)
    attempts = [each for each in get_compilation_metrics() if "recompile limit" in str(each.fail_reason)]
    refused = {str(each.compile_id): str(each.recompile_reason) for each in attempts}
    for code in _codes():
        entries, mine = _debug_get_cache_entry_list(code), _entries(code, backend)
        if len(entries) < config.recompile_limit or not (code is own or mine):
            continue
        frame = str(entries[0].compile_id.frame_id)
        if len(mine) >= config.recompile_limit or any(each.partition("/")[0] == frame for each in refused):
            last = max(entries, key=lambda entry: entry.compile_id.frame_compile_id or 0).compile_id
            reason, _ = _condition(refused.get(f"{last.frame_id}/{(last.frame_compile_id or 0) + 1}", ""), backend)
            yield RecompileLimit(_place_of(code, backend), len(entries), config.recompile_limit, reason)


def recompilations(backend: ThunderCompiler) -> Iterator[Recompilation]:
    """What Dynamo has compiled more than once with this backend, each time but the first."""
    reasons = {str(each.compile_id): str(each.recompile_reason or "") for each in get_compilation_metrics()}
    for code in _codes():
        for entry in reversed(_entries(code, backend)):
            condition, line = _condition(reasons.get(str(entry.compile_id), ""), backend)
            if condition:
                yield Recompilation(_place_of(code, backend), condition, line, 1, condition.startswith(_MODE))


def _codes() -> list[CodeType]:
    """The Python code that Dynamo has met."""
    return [code for code in (reference() for reference in convert_frame.input_codes.seen) if code is not None]


def _entries(code: CodeType, backend: ThunderCompiler) -> list[Any]:
    """What it has been compiled to with this backend."""
    entries = _debug_get_cache_entry_list(code)
    return [each for each in entries if getattr(each.backend, "compiler_fn", each.backend) is backend]


_ATTRIBUTE = re.compile(r"object\.__getattribute__\(([\w.]+), '(\w+)'\)")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(\w+)_at_(\d+)")


def _place(file: str, line: int | None, name: str, backend: ThunderCompiler) -> str:
    """``"f (train.py:3)"``, or what the user compiled if the code is PyTorch's, around a module of PyTorch's."""
    if is_torchs(file) and hasattr(backend, "function"):
        return str(backend.function)
    if (rest := _RESUMED.fullmatch(name)) is not None:
        return f"{rest[1]} (from {Path(file).name}:{rest[2]} on)"
    return f"{name} ({Path(file).name}:{line})"


def _place_of(code: CodeType, backend: ThunderCompiler) -> str:
    return _place(code.co_filename, code.co_firstlineno, code.co_name, backend)


def _condition(reason: str, backend: ThunderCompiler) -> tuple[str, str]:
    """The condition and its line in Dynamo's "0/1: n == 4   # y = x + n  # code/train.py:8 in f"."""
    condition, _, source = reason.partition("\n")[0].partition("  #")
    condition = condition.partition(": ")[2].strip()
    # What is in parentheses is no line of the user's.
    found = re.match(r".*?([^/\\\s]+:\d+) in [^\s)]+( \(.*\))?$", source.strip())
    condition = _with_names(_LEFT.sub(BEFORE_BREAK, condition), getattr(backend, "parameters", ()))
    condition = _GLOBAL.sub(r"\1", condition.replace("GLOBAL_STATE changed: ", _MODE).strip())
    condition = condition.replace(f"{_MODE}grad_mode", f"{_MODE}whether gradients are enabled")
    condition = _ATTRIBUTE.sub(r"\1.\2", condition)
    condition = _OF_HOOK.sub(r"a variable of a hook of \1", _OF_MODULES.sub(r".\1", condition))
    is_of_another = condition.startswith("BACKEND_MATCH")  # a call of another function with the same code
    return ("" if is_of_another else condition), (found[1] if found else "")


def break_behind(ended: Any) -> DynamoBreak:
    """Why a graph ended and where.

    What Dynamo cannot go on from, such as a break in a property, has no reason and only the line that it came from. The
    reason is with another break: of an earlier attempt at the same line, or of what the line calls, compiled later.
    """
    if ended.reason != "step_unsupported":
        return DynamoBreak(ended.reason, ended.user_stack)
    (line,) = ended.user_stack[-1:]
    later = False
    for other in graph_break_reasons:
        later = later or other is ended
        if other.reason == ended.reason or not other.user_stack:
            continue
        if line in other.user_stack:
            return DynamoBreak(other.reason, other.user_stack)
        if later and re.search(rf"\b{re.escape(other.user_stack[0].name)}\b", line.line or ""):
            return DynamoBreak(other.reason, [*ended.user_stack, *other.user_stack])
    return DynamoBreak(None, ended.user_stack)


def _has_no_graph(entry: Any) -> bool:
    """Whether what Dynamo made of code calls none of its graphs, nor what comes after a graph break."""
    return not any(name.startswith(("__compiled_fn", "__resume_at")) for name in entry.code.co_names)


def resumed(backend: ThunderCompiler) -> Iterator[DynamoBreak]:
    """Graph breaks that Dynamo goes on after with this backend, also those with no operator and so no graph before.

    What comes after is code of its own, unless it only returns what the line with the break does.
    """
    codes = _codes()
    names = {(code.co_filename, code.co_name): code for code in codes}
    rests = ((code, rest) for code in codes if (rest := _RESUMED.fullmatch(code.co_name)) is not None)
    lines = {(code.co_filename, int(rest[2])) for code, rest in rests if _entries(code, backend)}
    for each in graph_break_reasons:
        found = break_behind(each)
        start = names.get((found.stack[0].filename, found.stack[0].name)) if found.stack else None
        only_calls = start is not None and any(map(_has_no_graph, _entries(start, backend)))
        if only_calls or not lines.isdisjoint((frame.filename, frame.lineno) for frame in found.stack):
            yield found._replace(function=_place_of(start, backend) if start is not None else "")


def gave_up(compiled: Any, backend: Any, ends: Collection[tuple[str, int | None]]) -> Iterator[DynamoBreak]:
    """What Dynamo compiles nothing of, as with a graph break in a loop. The function's first line precedes PyTorch's.

    Args:
        ends: files and lines at which graphs of this function end. What follows them is code of its own for Dynamo, and
            so is what they call.
    """
    function = getattr(compiled, "_func", compiled)
    module = getattr(function, "_orig_mod", None)
    original = getattr(function, "_torchdynamo_orig_callable", None) if module is None else module.forward
    code = getattr(original, "__code__", None)
    own = (code.co_filename, code.co_firstlineno) if code is not None else None
    by_code = getattr(backend, "left", {})  # a plain thunderfx has none
    hooks = {str(found.stack[-1]): (each, found) for each, found in reversed(by_code.items())}  # once for a line
    for left, found in hooks.values():
        yield found._replace(function="" if left is code else _place_of(left, backend))
    last = {(each.co_filename, each.co_firstlineno, each.co_name): each for each in get_compilation_metrics()}
    for (file, line, name), each in last.items():
        failed_at = each.fail_user_frame_filename, each.fail_user_frame_lineno
        if failed_at[1] is None or any(said in str(each.fail_reason) for said in (MOVED, "recompile limit")):
            continue
        is_own, is_rest = (file, line) == own, _RESUMED.fullmatch(name or "") and (file, line) in ends
        if is_own or is_rest or failed_at in ends:
            start, end = (FrameSummary(str(at), number, str(name)) for at, number in ((file, line), failed_at))
            where = [start, end] if is_torchs(end.filename) else [end]
            function = "" if is_own else _place(str(file), line, str(name), backend)
            yield DynamoBreak(str(each.fail_reason), where, function)
