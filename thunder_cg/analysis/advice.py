"""What to do about a number that is read from a tensor, or a size that depends on it, by what the line does with it."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache

from thunder_cg.analysis.rules import FIXED_SIZE, KEEP_ON_DEVICE
from thunder_cg.analysis.sources import SourceLine
from thunder_cg.errors import SkipReason

_BRANCH = "choose with torch.where(condition, a, b), which computes both, or branch outside of the compiled function"
_NO_GRADIENT = "; in training under torch.no_grad(), as a number has no gradient"
NUMBER_OF_DYNAMO = SkipReason(
    "takes a number that is read from a tensor, which Thunder does not take from a graph of Dynamo's",
    "keep the number on the device, as a 0-dim tensor",
)
_COMPUTED = "leave the read out: operators take a 0-dim tensor in the place of a number"
_CLAMPED = f"torch.clamp(value, min=...) in the place of max(), with max= for min(), of a 0-dim tensor{_NO_GRADIENT}"
_UNBOUND = f"Tensor.unbind in the place of tolist(), which gives 0-dim tensors{_NO_GRADIENT}"
_SPLIT = (
    "keep the mask, and sum torch.where(mask.unsqueeze(-1), x, 0.0) for each part, in the place of a split: "
    "no graph splits by sizes that tensors hold"
)
SLICE = (
    "x[i + torch.arange(n)] is x[i : i + n] for a 0-dim tensor i and fixed n; if the length changes, compute with "
    "all elements, and mask the rest, before layers that mix positions, too"
)
_SIZED = "compute with the largest size, and mask the rest"
_CHOSEN = "call each of them, and choose with torch.where"
_LOOPED = "loop as often as the longest case needs, and keep what counts with torch.where"
_LOGGED = "return the 0-dim tensor, or write it into a buffer, and log or keep what it holds after the call"
_RETURNED = "return the 0-dim tensor, and read it after the call"
_CHECKED = "return the condition as a 0-dim tensor, and check it after the call"

_MASKED = (
    "torch.where(mask, x, 0.0), with mask.unsqueeze(-1) for rows, in the place of x[mask]: it keeps the shape of x, "
    "with zeros where x[mask] has nothing; a bias makes them other numbers, so mask once more before a sum, and a mean "
    "divides it by mask.sum()"
)
_ROWS = (
    "nonzero_static(mask, size=n) in the place of nonzero and torch.where(mask), with n rows always, filled up "
    f"with -1, the index of the last element; or {_MASKED}"
)
DRAWN = (
    "choose with torch.where(torch.rand((), device=x.device) < p, a, b), which computes both, or draw and branch "
    "outside of the compiled function"
)
_OF_SIZE = {  # by what is in the name of the operator, in the line, or in the message of an error
    "cross_entropy": "cross_entropy(logits, torch.where(mask, target, -100)) in the place of "
    "cross_entropy(logits[mask], target[mask]): it leaves out its ignore_index, which is -100, of the mean, too",
    "ctc_loss": "return the log-probabilities, and call ctc_loss on them outside of the compiled function",
    "bincount": "(x[:, None] == torch.arange(n)).sum(0) in the place of bincount",
    "repeat": "x[torch.searchsorted(counts.cumsum(0), torch.arange(n), right=True)] in the place of "
    "repeat_interleave(x, counts)",
    "nonzero": _ROWS,
    "argwhere": _ROWS,
    "only specifying a condition": _ROWS,  # torch.where(mask)
    "unique": FIXED_SIZE,
}

RECURRENT = (
    "set torch._dynamo.config.allow_rnn = True, with which the layer is left to Inductor; it has to get a padded tensor"
)
PACKS = "pack_padded_|pad_packed_|pack_sequence"  # functions of packed sequences, as a regular expression
PADDED = (
    "give the layer the padded tensor: of a layer that is not bidirectional, outputs up to each length are the same; "
    "mask those after it; the last state is the output at length - 1, or one for each layer"
)

_READS = ("item", "tolist", "float", "int", "bool")  # methods, and then what may also be called with numbers
_CHANGES = frozenset({"round", "abs", "str", "tuple", "list"})  # what they return is the number still
_LISTS = frozenset({"append", "extend"})  # of tensors, maybe, that are computed with the number
_LOGS = _LISTS | frozenset({"print", "log", "debug", "info", "warning", "add_scalar", "write", "format"})
_SPLITS = frozenset({"split", "split_with_sizes"})
_SIZES = frozenset({
    "zeros", "ones", "empty", "arange", "linspace", "eye", "rand", "randn", "new_zeros", "new_ones", "new_empty",
    "view", "reshape", "expand", "repeat", "tile", "chunk", "narrow", "unflatten", "pad", "one_hot", "topk",
})  # fmt: skip

_LONGEST = 40  # characters of an expression that is quoted
_Parents = dict[ast.AST, ast.AST]


def fitting(fix: str, operator: str, line: SourceLine | None) -> str:
    """What of a rule's fix is for this operator on this line."""
    if fix == KEEP_ON_DEVICE:
        return for_read(line)
    return for_size(f"{operator} {(line and line.text) or ''}") if fix == FIXED_SIZE else fix


def for_read(line: SourceLine | None = None) -> str:
    """What to do about the read of a number on a line, by what becomes of the number."""
    if line is None:
        return KEEP_ON_DEVICE
    is_branch = (line.text or "").startswith(("if ", "elif ", "while ", "assert "))
    uses = (use for read in _reads(line) for use in _use(read, _parents(_text(line))))
    fix = next(uses, for_branch(line) if is_branch else next(_implied(line), KEEP_ON_DEVICE))
    return f"{fix}{_for_training(line)}" if fix == _COMPUTED else fix


def for_branch(line: SourceLine | None = None) -> str:
    """What to do about a branch on what a tensor holds."""
    nodes = () if line is None else _parents(_text(line))
    branches = (node for node in nodes if isinstance(node, (ast.If, ast.While, ast.Assert)))
    return next((_of_branch(each) for each in branches if line is not None and each.lineno == line.number), _BRANCH)


def _of_branch(branch: ast.If | ast.While | ast.Assert) -> str:
    if isinstance(branch, ast.While):
        return _LOOPED
    inner = [] if isinstance(branch, ast.Assert) else [*branch.body, *branch.orelse]
    if all(isinstance(each, ast.Raise) for each in inner):
        return _CHECKED
    calls = [each.value for each in inner if isinstance(each, ast.Expr) and _called(each.value) in _LOGS - _LISTS]
    return _LOGGED if len(calls) == len(inner) else _BRANCH


def for_size(said: str) -> str:
    """What to do about a result of a size that is not known: ``said`` has the operator's name in it."""
    return next((fix for name, fix in _OF_SIZE.items() if name in said), _MASKED)


def _for_training(line: SourceLine) -> str:
    """What to add for training, with the form to copy if the expression is short. ``detach`` would not do: Thunder
    (0.2.6) does not trace it by itself, or not of a 0-dim tensor on the CPU."""
    functions = [getattr(each, "func", None) for each in _reads(line) if _called(each) == "item"]
    tensors = [ast.unparse(each.value) for each in functions if isinstance(each, ast.Attribute)]
    if not tensors or len(tensors[0]) > _LONGEST:
        return _NO_GRADIENT
    return f"; in training with torch.no_grad(): number = {tensors[0]}, as a number has no gradient"


def _reads(line: SourceLine) -> list[ast.Call]:
    calls = [node for node in _parents(_text(line)) if isinstance(node, ast.Call) and _called(node) in _READS]
    here = [node for node in calls if node.lineno <= line.number <= (node.end_lineno or 0)]
    return sorted(here, key=lambda node: _READS.index(_called(node)))


def _implied(line: SourceLine) -> Iterator[str]:
    """What to do about a read that the line does not call by its name: of an index, or for text."""
    for node in _parents(_text(line)):
        if getattr(node, "lineno", 0) != line.number:
            continue
        if isinstance(node, ast.FormattedValue):
            yield _LOGGED
        elif isinstance(node, ast.Slice) and any(map(_is_computed, (node.lower, node.upper))):
            yield SLICE
        elif _called(node) == "range" and isinstance(node, ast.Call) and any(map(_is_computed, node.args)):
            yield _LOOPED


def _is_computed(bound: ast.AST | None) -> bool:
    """Whether a bound may be a tensor, as ``lengths.max()`` is."""
    return isinstance(bound, ast.Call) and _called(bound) not in ("len", "size")


def _text(line: SourceLine) -> str:
    return "".join(linecache.getlines(line.file))


def _use(value: ast.expr, parents: _Parents, *, follows: bool = True) -> Iterator[str]:
    """What to do about a number that an expression has, by the expressions and the statement around it.

    Args:
        follows: whether to look for what becomes of a variable that it is assigned to.
    """
    advice = _UNBOUND if _called(value) == "tolist" else ""
    node: ast.AST = value
    while not isinstance(node, ast.stmt) and (parent := parents.get(node)) is not None:
        if node in (getattr(parent, "test", None), *getattr(parent, "ifs", ())):
            yield _of_branch(parent) if isinstance(parent, (ast.If, ast.While, ast.Assert)) else _BRANCH
        elif isinstance(parent, ast.Slice):
            yield SLICE
        elif isinstance(parent, (ast.Return, ast.Lambda)):
            yield advice or _RETURNED
        elif isinstance(parent, ast.FormattedValue):
            yield _LOGGED
        elif isinstance(parent, ast.Subscript):
            is_called = getattr(parents.get(parent), "func", None) is parent
            advice = _CHOSEN if is_called else _COMPUTED
        elif isinstance(parent, ast.BinOp):
            advice = advice or _COMPUTED
        elif isinstance(parent, (ast.Call, ast.keyword)):
            advice = _of_argument(_called(parent), advice)
        elif isinstance(parent, (ast.Assign, ast.AnnAssign)):
            (target,) = parent.targets[:1] if isinstance(parent, ast.Assign) else [parent.target]
            if isinstance(target, ast.Name) and follows and advice in ("", _COMPUTED, _UNBOUND):
                uses = _uses_of(target, parents)
                # ``x = x * number`` may be a tensor, which may be returned and kept.
                no_uses = {_RETURNED, _LOGGED} if advice == _COMPUTED else ()
                yield from (use for use in uses if (use == _SPLIT or advice != _UNBOUND) and use not in no_uses)
            elif isinstance(target, (ast.Attribute, ast.Subscript)) and not advice:
                yield _LOGGED
        node = parent
    yield from [advice] if advice else []


def _of_argument(function: str, before: str) -> str:
    """What to do about an argument of a function, if ``before`` was to be done about the argument's own expression."""
    if function in ("max", "min"):
        return _CLAMPED
    if function in _LOGS and not (before and function in _LISTS):
        return _LOGGED
    if function in _SPLITS:
        return _SPLIT
    if function in _SIZES or function == "range":
        return _LOOPED if function == "range" else _SIZED
    return before or ("" if function in _CHANGES or function in _READS else _COMPUTED)


def _uses_of(target: ast.Name, parents: _Parents) -> Iterator[str]:
    """The same for a variable that holds the number, by the lines after it."""
    names = [node for node in parents if isinstance(node, ast.Name) and node.id == target.id]
    for node in sorted(names, key=lambda node: (node.lineno, node.col_offset)):
        if node.lineno > target.lineno and _function(node, parents) is _function(target, parents):
            yield from _use(node, parents, follows=False)


def _function(node: ast.AST, parents: _Parents) -> ast.AST | None:
    while not isinstance(node, ast.FunctionDef) and node in parents:
        node = parents[node]
    return node


def _called(node: ast.AST) -> str:
    """The last part of the name of the function that is called; "" if it has none."""
    function = getattr(node, "func", None)
    return str(getattr(function, "attr", "") or getattr(function, "id", ""))


@lru_cache(maxsize=2)
def _parents(text: str) -> _Parents:
    """The parent of each node of a file, or of a cell of a notebook. Nothing if it cannot be read."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
