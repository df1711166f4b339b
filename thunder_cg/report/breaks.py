"""What Dynamo does not compile: graph breaks, where it could not go on, and functions that it compiles no more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thunder_cg.analysis.advice import DRAWN, PACKS, PADDED, RECURRENT, for_branch, for_read, for_size
from thunder_cg.analysis.sources import SourceLine, called_from, users
from thunder_cg.compat.dynamo_records import DynamoBreak, DynamoGuard, Recompilation

ITEM = "Tensor.item() reads what a tensor holds into Python"
_UNKNOWN = (
    "what this line calls, or a loop that it begins, has a graph break that Dynamo cannot go on from",
    'TORCH_LOGS="graph_breaks" in the environment has Dynamo say which',
)
_LOGGER = (
    "log without keywords, and only what does not change, such as text and numbers: thunder_cg.thunderfx does it after "
    "the graph; or do not log at all, with torch._dynamo.config.ignore_logging_functions"
)
_PRINT = (
    "print after the call, or have Dynamo print after the graph, with "
    "torch._dynamo.config.reorderable_logging_functions.add(print)"
)
_DEEPCOPY = (
    "copy before the call; a model of Transformers copies its configuration to make a cache: pass use_cache=False, or "
    "a cache that is made before the call"
)
_CONTEXT = "enter it around the call of the compiled function, or do what is done in it outside of the function"
_LOCK = (
    "do what is done in it outside of the compiled function; a model of Transformers has a lock around what it does "
    "once for hidden states or attentions, which LLaVA and SegFormer always need: call it once, with the same "
    "arguments, before it is compiled"
)
_REQUIRES_GRAD = (
    "leave it out, as what is computed with a parameter has a gradient anyway; a Wav2Vec2 of Transformers, or the "
    "like, leaves it out after model.freeze_feature_encoder()"
)
_COLLECTIVE = (
    "a function of torch.distributed that Dynamo does not trace",
    "call it outside of the compiled function, or compile with thunder.jit, which traces it",
)
_FULLY_SHARD = (
    "the hooks of fully_shard, which Dynamo does not trace",
    "Dynamo compiles the forward of each layer that is called, if the layer's class is in your code; put a sharded "
    "layer of torch.nn, such as nn.Sequential, into a module of your own, and call fully_shard on that",
)
_CHECK = (
    "check before the call; TRANSFORMERS_DISABLE_TORCH_CHECK=1 in the environment leaves out the checks of Transformers"
)
_SKIPPED = "Attempted to call function marked as skipped"
_BUILTINS_NAME = re.compile(r"the (?:Python )?builtin `(?:<unknown module>\.)?([\w.]+?)\.?`")
_SIZED = re.compile(r"Operator `([\w.]+?)(?:\.default)?`(?:'s output shape depends| does not have a meta kernel)")
_OF_NONZERO = re.compile("nonzero|argwhere|cross_entropy")
_BUILTIN = "call it outside of the compiled function, and pass what it returns as a tensor"
_CHANGES = "change it after the call, with what the call returns"
_WARN = (
    "warn before or after the call, or have Dynamo warn after the graph, with "
    "torch._dynamo.config.reorderable_logging_functions.add(warnings.warn)"
)
_OUTSIDE = "do what this line does outside of the compiled function, before or after the call"
_ASYNC = "leave out async_op=True and the wait: in a graph, collectives begin early and are waited for late anyway"
_GRADIENT = (
    "compile what comes before it, and call torch.autograd.grad or backward outside of the compiled function; a whole "
    "training step is one graph in thunder_cg.graphed_step"
)
_PARAMETER = (
    "make parameters before the call; module.to(...), half() and float() make them, too, even of the same dtype: "
    "convert before the call"
)
# What is in Dynamo's message, whether in its first line, the reason, if that line does not say it well, and the fix.
_KNOWN = (
    ("builtin `print`", False, "print()", _PRINT),
    *((sign, False, "a packed sequence, which Dynamo does not trace", PADDED) for sign in PACKS.split("|")),
    ("Attempted to wrap RNN", True, "nn.LSTM, nn.GRU or nn.RNN", RECURRENT),
    ("async_op=True", True, "", _ASYNC),
    ("copy.deepcopy", True, "", _DEEPCOPY),
    ("logging.Logger method", True, "", _LOGGER),
    ("`torch.nn.Parameter()` constructor", True, "new parameters, which Dynamo does not trace", _PARAMETER),
    ("setattr() on Tensor.requires_grad", True, "", _REQUIRES_GRAD),
    ("enter a `lock` context manager", False, "", _LOCK),
    ("Unsupported context manager", True, "", _CONTEXT),
    ("type: _GeneratorContextManager;", False, "a context manager, which Dynamo does not trace", _CONTEXT),
    ("of class `Work`", False, "", _ASYNC),
    ("UnspecializedPythonVariable", False, "a branch on a random number of Python's", DRAWN),
)
_VAGUE = ("Unsupported method call", "Unsupported function call")  # of Dynamo's titles
_NO_HELP = (
    *("Please report an issue", "It may be possible to write", "This graph break is fundamental"),
    "Your code may result in an error",
)


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """One graph break. What comes before it and what comes after it can have no region in common.

    Attributes:
        function: the compiled function, and the number of the graph that ends there.
        line: where that is in the user's code, and from where it is called: "model.py:38, called from train.py:7".
        source: the text of that line.
        reason: in Dynamo's words.
        fix: what would change it.
        part: what Dynamo compiles nothing of because of it, such as "f (train.py:3)"; "" if it goes on after it.
    """

    function: str
    line: str | None
    source: str | None
    reason: str
    fix: str
    part: str = ""


def is_same(line: str | None, other: str | None) -> bool:
    """Whether a graph break at ``line`` is at ``other`` too, seen from fewer callers: where a function breaks, so does
    what calls it.
    """
    return f"{other}, ".startswith(f"{line}, ")


def recompilations(backend: Any) -> Iterator[Recompilation]:
    """What Dynamo has compiled more than once, those together that are about one value."""
    from thunder_cg.compat import dynamo  # Dynamo is imported by now

    alike: dict[tuple[str, str, str], list[Recompilation]] = {}
    for each in dynamo.recompilations(backend):
        alike.setdefault((each.function, each.line, DynamoGuard.of(each.condition).value), []).append(each)
    return (replace(first, count=1 + len(others)) for first, *others in alike.values())


def graph_breaks(label: str, graph: Any) -> Iterator[GraphBreak]:
    """The graph break that ended one of Dynamo's graphs, if one did."""
    ended = getattr(graph.original_graph_module, "compile_subgraph_reason", None)
    if ended is not None and ended.graph_break:
        from thunder_cg.compat.dynamo import break_behind  # Dynamo is imported by now

        yield _graph_break(label, break_behind(ended))


def _graph_break(after: str, found: DynamoBreak) -> GraphBreak:
    frames = _users_frames(found)
    reason, fix = _understood(found.reason, frames, found.stack) if found.reason is not None else _UNKNOWN
    if frames and "torch._check_tensor_all" in (frames[-1].text or ""):
        fix = _CHECK
    return GraphBreak(after, called_from(frames), frames[-1].text if frames else None, reason, fix)


def breaks_without_graph(label: str, compiled: Any, backend: Any) -> Iterator[GraphBreak]:
    """The graph breaks at which no graph ends: no operator comes before, or Dynamo compiles nothing of the function."""
    from thunder_cg.compat.dynamo import break_behind, gave_up, resumed  # Dynamo is imported by now

    infos = (getattr(each.original_graph_module, "compile_subgraph_reason", None) for each in backend.subgraph_infos)
    known = {where for each in infos if each is not None and each.graph_break for where in _where(break_behind(each))}
    for found in resumed(backend):
        if (where := _where(found))[0] not in known:
            known.update(where)
            yield _graph_break(f"the start of {found.function or label}", found)
    ends = {place for _, places in known for place in places}
    for found in gave_up(compiled, backend, ends):
        frames, said = _users_frames(found), found.reason or ""
        reason, fix = _understood(said, frames, found.stack)
        why = "in a loop" if "graph break in loop" in said else "where Dynamo cannot go on"
        part = found.function or label
        nothing = f"so Dynamo compiles nothing of {found.function or 'the function'}"
        reason = f"{reason}, {why}, {nothing}, and has not looked for more graph breaks after this one"
        source = frames[-1].text if frames else None
        yield GraphBreak(f"the start of {part}", called_from(frames), source, reason, fix, part)


def _users_frames(found: DynamoBreak) -> list[SourceLine]:
    return users([SourceLine(frame.filename, frame.lineno or 0) for frame in found.stack])


def _where(found: DynamoBreak) -> list[tuple[str, tuple[tuple[str, int | None], ...]]]:
    """What makes a graph break the same as another: the first line of its reason, files and lines; without one, all
    at these lines are."""
    places = tuple((frame.filename, frame.lineno) for frame in found.stack)
    return [((found.reason or "").partition("\n")[0], places), ("", places)]


def _understood(said: str, frames: Sequence[SourceLine], stack: Sequence[Any]) -> tuple[str, str]:
    """The reason and the fix in Dynamo's message, which has hints on lines of their own.

    Args:
        frames: those of the user's, the last one is where.
        stack: all.
    """
    first, *rest = [line.strip() for line in said.strip().splitlines()] or [""]
    files = [frame.filename for frame in stack if first.startswith(_SKIPPED)]
    if any("/torch/distributed/fsdp/" in file for file in files):
        return _FULLY_SHARD
    if any("/torch/distributed/" in file for file in files):
        return _COLLECTIVE
    line, is_read = (frames[-1].text or "") if frames else "", "_local_scalar_dense" in said
    if any(each in first for each in ("jump", "Data-dependent branching", "Could not guard on data-dependent")):
        return "a branch on what a tensor holds", for_branch(*frames[-1:])
    if (is_tolist := "tolist()" in first or (is_read and ".tolist()" in line)) or is_read or ".item()" in first:
        return ITEM.replace("item", "tolist") if is_tolist else ITEM, for_read(*frames[-1:])
    if "Data dependent operator" in first:
        named = re.search(r"Operator `([\w.]+?)(?:\.default)?`", said)
        return f"{named[1] if named else 'an operator'} reads what a tensor holds", for_read(*frames[-1:])
    if "torch.autograd.grad" in first or "Tensor.backward()" in first:
        return "a gradient, which Thunder computes of a whole graph only", _GRADIENT
    if first.startswith(_SKIPPED) and (name := _BUILTINS_NAME.search(said)) is not None:
        return _of_builtin(name[1].replace("torch._VariableFunctionsClass.", "torch."))
    for sign, is_first, reason, fix in _KNOWN:
        if sign in (first if is_first else said):
            return reason or first, fix
    if (sized := _SIZED.search(said)) is not None:  # traced, it would be left to Inductor
        operator = re.sub(r"aten\._?unique\w*", "torch.unique", sized[1])
        about = " ".join(_OF_NONZERO.findall(line)) if operator == "aten.nonzero" else operator  # x[mask] calls it, too
        fix = for_size(about) if operator.startswith(("aten.", "torch.")) else _OUTSIDE
        users = "nonzero returns, which x[mask] and torch.where(mask) call," if operator == "aten.nonzero" else ""
        return f"the size of what {users or f'{operator} returns'} depends on what tensors hold", fix
    explained = next((line.partition(": ")[2] for line in rest if line.startswith("Explanation: ")), "")
    first = explained.rstrip(".") if first in _VAGUE and explained else first
    hints = [line.removeprefix("Hint: ") for line in rest if line.startswith("Hint: ")]
    return first, next((hint for hint in hints if not hint.startswith(_NO_HELP)), _OUTSIDE)


def _of_builtin(name: str) -> tuple[str, str]:
    """The reason and the fix of a call of what is written in C."""
    if name == "_warnings.warn":
        return "warnings.warn()", _WARN
    fix = _CHANGES if name.partition(".")[0] in ("list", "dict", "set") else _BUILTIN
    fix = f"{fix}; draw with torch.rand" if "andom" in name else fix
    return f"{name}(), which Dynamo does not trace", fix
