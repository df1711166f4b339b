"""Decide for every op whether it may be captured, and say why.

The order of the questions: bookkeeping; the user's ``deny=``; the tag of the operator's author; devices; numbers and
sizes known only at run time; the user's ``allow=`` or else the rules, for the op and for what it is made of. ``allow=``
vouches for an operator, so it overrides a rule. It does not override a fact about the call: a number that a graph keeps
is wrong at the next replay, whoever allowed the operator.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

from thunder_cg.analysis import rules
from thunder_cg.analysis.advice import fitting
from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import Op, Ops, Value, process_groups
from thunder_cg.analysis.rules import Cause, Reason
from thunder_cg.analysis.rules.conditions import READS_PAST_VIEW
from thunder_cg.compat.distributed import capture_problem
from thunder_cg.compat.dynamo_records import BEFORE_BREAK
from thunder_cg.compat.operators import (
    SIMILAR,
    is_function,
    is_in_library,
    name_in_library,
    nearest_function,
    nearest_in_library,
)
from thunder_cg.compat.thunder import bound_functions, library_names_of, proxy_shape

Pattern = str | Callable[..., Any]  # an operator, by one of its names or by its function

_AD_HOC = re.compile(r"__ad_hoc_executor_\d+")
_AD_HOC_SUFFIX = re.compile(r"_\d+_\d+$")  # thunder.extend.TemporaryExecutor adds its address and a counter


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens to one op."""

    capture: bool
    reason: Reason
    detail: str  # the reason, for this op: which tensor, which number, which operator inside
    fix: str  # what would change the verdict; empty only for captured ops and bookkeeping
    device: str | None  # that all of the op's tensors are on, such as "cuda:0"; None if there is no such device


@dataclass(frozen=True, slots=True)
class UserRules:
    """The user's own rules: operators by id (``"my_op"``), executor and id (``"my_ex.my_op"``), printed name
    (``"torch.nn.functional.linear"``), name in ``torch.library`` (`library_names_of`), which derivatives have, too, or
    by the function that their symbol calls. `Options` has checked them.
    """

    allow: frozenset[Pattern] = frozenset()
    deny: frozenset[Pattern] = frozenset()

    def allows(self, op: Op) -> bool:
        return bool(self.allow) and any(name in self.allow for name in _patterns(op))

    def denies(self, op: Op) -> Pattern | None:
        """The pattern that denies the op, if one does."""
        return next((name for name in _patterns(op) if name in self.deny), None) if self.deny else None


def shown(pattern: Pattern) -> str:
    """A pattern as the user has written it."""
    return repr(pattern) if isinstance(pattern, str) else getattr(pattern, "__qualname__", repr(pattern))


def unmatched(
    given: Mapping[str, Set[Pattern]], traces: Iterable[Ops], split: Mapping[Pattern, Sequence[str]] | None = None
) -> list[tuple[str, Pattern, str | None]]:
    """The names in ``allow=`` and ``deny=`` that no op of the traces has, nor an op inside of a fusion.

    Args:
        split: operators that Thunder has made of others: what `split_operators` found.

    Returns:
        The option, the name, and what to write instead, if that is known: "did you mean 'torch.tanh'?".
    """
    if not any(given.values()):
        return []
    names = {name for trace in traces for name in _names(trace)}
    return [
        (option, name, _instead(name, (split or {}).get(name), names))
        for option, mine in given.items()
        for name in sorted(mine - names, key=shown)
    ]


def _names(trace: Ops) -> Iterator[Pattern]:
    for op in trace.ops:
        if not op.bookkeeping:
            yield from (name for inner in _walk(op) for name in _patterns(inner))


def split_operators(named: Set[Pattern], before: Ops, after: Ops) -> dict[Pattern, list[str]]:
    """Of the operators that the user names, those that a trace has before Thunder transforms it, and not after that.

    Returns:
        For each name, the names of the operators in the second trace that do what it does.
    """
    names = {*_names(after)}
    found: dict[Pattern, list[str]] = {}
    for op in _with_parts(before.ops):
        function = f"torch.{_last_part(op.name)}"  # what `Options` makes of a function of PyTorch's
        for name in named & {*_patterns(op), function} - names:
            made = dict.fromkeys(f"torch.{(part.id or '').lower()}" for part in _with_parts(op.subs))
            if parts := [each for each in made if each in names]:
                found[name] = parts
    return found


def _with_parts(ops: Iterable[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        yield from _with_parts(op.subs)


def _instead(name: Pattern, parts: Sequence[str] | None, names: Iterable[Pattern]) -> str | None:
    """What to write in the place of a name that no op has."""
    if parts is not None:
        return f"Thunder has split it into {', '.join(map(repr, parts))}; name these"
    close = _nearest(name, names)
    return f"did you mean {close!r}?" if close is not None else None


def _nearest(name: Pattern, names: Iterable[Pattern]) -> str | None:
    """The operator that ``name`` may be a misspelling of, by the last part: not if it is another operator's own name.

    An operator and its derivative are in two traces.
    """
    if not isinstance(name, str):
        return None
    mine, is_derivative = _last_part(name), name.endswith(rules.VJP)
    alike: dict[str, list[str]] = {}
    for other in sorted(other for other in names if isinstance(other, str)):
        if other.endswith(rules.VJP) == is_derivative:
            alike.setdefault(_last_part(other), []).append(other)
    if is_known(name) and mine not in alike:
        return None
    swapped = [each for each in alike if sorted(each) == sorted(mine)]  # letters of a short name
    if close := difflib.get_close_matches(mine, alike, 1, SIMILAR) or swapped:
        found = alike[close[0]]
        as_in_advice = (each for each in found if "::" in each)
        return next(as_in_advice, max(found, key=lambda each: _likeness(name, each)))
    candidates = [nearest_function(name), nearest_in_library(name)]
    candidates += difflib.get_close_matches(mine.lower(), sorted(_known_ids()), 1, SIMILAR)
    return max(filter(None, candidates), key=lambda each: _likeness(mine, _last_part(each)), default=None)


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()


def is_known(name: str) -> bool:
    """Whether an operator of PyTorch's or of ``torch.library`` has this name, whatever a trace has, or may have it."""
    name = name.removesuffix(rules.VJP)
    owner, _, last = name.rpartition(".")
    return is_function(name) or is_in_library(name) or (owner in _OWNERS and last in _known_ids())


def _last_part(name: str) -> str:
    """``op`` of "ns::op", "ns.op.default", "torch.ops.ns.op", and "torch.op"."""
    if "::" in name or name.startswith("torch.ops.") or name.endswith(".default"):
        return name_in_library(name).rpartition("::")[2]
    return name.rpartition(".")[2]


@cache
def _known_ids() -> frozenset[str]:
    return frozenset(str(id_).rsplit(".", 1)[-1] for _, id_ in rules.RULES)


# What a name of an operator that a rule knows may begin with.
_OWNERS = {"", "Tensor", "prims", *(executor for executor, _ in rules.RULES if executor is not None)}


def classify(
    ops: Ops,
    aliasing: Aliasing,
    user: UserRules,
    device_type: str,
    *,
    supports_scalar_updates: bool = False,
    captures_collectives: bool = True,
) -> tuple[Verdict, ...]:
    """One verdict per op, in the same order.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``: what the backend captures.
        supports_scalar_updates: whether the backend can give the kernels of a graph new numbers.
        captures_collectives: whether what communicates may be captured.
    """
    read_past = _read_past(ops, aliasing, user)
    classifier = _Classifier(ops, user, device_type, supports_scalar_updates, captures_collectives, read_past)
    return tuple(classifier.verdict(op) for op in ops.ops)


def _read_past(ops: Ops, aliasing: Aliasing, user: UserRules) -> frozenset[str]:
    """Tensors that may share a storage with one of which an operator reads more of the storage than the tensor."""
    inside = (inner for op in ops.ops for inner in _walk(op) if READS_PAST_VIEW.name in inner.conditions)
    read = [name for inner in inside if not user.allows(inner) for name in inner.inputs[:1]]
    storages = aliasing.sets_of(read)
    return frozenset(name for name, storage in aliasing.sets.items() if storage in storages)


@dataclass(frozen=True, slots=True)
class _Classifier:
    ops: Ops
    user: UserRules
    device_type: str
    supports_scalar_updates: bool
    captures_collectives: bool
    read_past: frozenset[str]

    def verdict(self, op: Op) -> Verdict:
        if op.bookkeeping:
            return Verdict(False, Reason.BOOKKEEPING, "bookkeeping of the trace", "", None)
        devices = _devices(op, self.values)
        device = next(iter(devices)) if len(devices) == 1 else None
        objection = (
            self.user_denies(op)
            or self.is_unsafe(op)
            or self.reads_number(op)
            or self.on_device(op, devices)
            or self.takes_known(op)
            or self.objection(op)
            or self.returns_known(op)
            or self.keeps_storage(op)
        )
        if objection is not None:
            fix = fitting(objection.fix, op.name, self.ops.at(op)) or _allow_fix(op)
            return Verdict(False, objection.reason, objection.detail, fix, device)
        if self.user.allows(op):
            return Verdict(True, Reason.USER_ALLOW, "named in allow=", "", device)
        if op.is_fusion:
            detail = f"all {len(op.subs)} operators inside are allowed"
            if numbers := self.kernel_scalars(op):
                detail += f"; {self.listed(op, sorted(numbers))} are set before each launch"
            return Verdict(True, Reason.FUSION, detail, "", device)
        detail = op.rule.cause.detail if op.rule is not None else "all operators inside are allowed"
        return Verdict(True, Reason.ALLOWED, detail, "", device)

    @property
    def values(self) -> Mapping[str, Value]:
        return self.ops.values

    def listed(self, op: Op, names: Iterable[str]) -> str:
        """Values of the op as the user knows them, at most three."""
        described = ("its result" if name in op.outputs else self.ops.described(name) for name in names)
        found = list(dict.fromkeys(described))
        return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")

    def numbers(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.values[name].kind == "number"]

    def user_denies(self, op: Op) -> Cause | None:
        for inner in _walk(op):
            if (pattern := self.user.denies(inner)) is not None:
                inside = "" if inner is op else f", which is inside {op.name}"
                named = shown(pattern)
                return Cause(Reason.USER_DENY, f"deny= names {named}{inside}", f"remove {named} from deny=")
        return None

    def is_unsafe(self, op: Op) -> Cause | None:
        """Whether the author of an operator says that no graph can hold it. ``allow=`` does not know better."""
        inner = next((inner for inner in _walk(op) if inner.is_tagged_unsafe), None)
        if inner is None:
            return None
        detail = f"{inner.name} is tagged torch.Tag.cudagraph_unsafe by its author"
        return Cause(Reason.UNVERIFIED, detail, "remove the tag where the operator is defined, if it is wrong")

    def reads_number(self, op: Op) -> Cause | None:
        """Whether it reads back a Python number that Dynamo passes as a tensor, since it changes from call to call."""
        if (op.id or "").rpartition(".")[2] not in ("item", "ITEM") or not set(op.inputs) & set(self.ops.args):
            return None
        value = self.values[op.inputs[0]]
        is_dynamos = value.is_dynamos and (value.device, value.dtype) == ("cpu", "float64")
        if not is_dynamos or proxy_shape(value.proxy) != () or ".item" in (self.ops.source(op) or ""):
            return None
        name = value.users_name
        if name == BEFORE_BREAK:
            detail = "it reads a number from before the graph break, and a graph would keep it"
            fix = "keep the number on the device, as a 0-dim tensor"
            return Cause(Reason.RUNTIME_NUMBER, detail, fix)
        detail = f"{name!r} is a Python number that changes from call to call, and a graph would keep it"
        of_module = f"make {name} a 0-dim tensor with register_buffer, and write it in place"
        fix = of_module if name.startswith("self.") else f"pass {name} as a 0-dim tensor on the device"
        few = "if it has few values, set torch._dynamo.config.specialize_float = True, and Dynamo compiles for each"
        return Cause(Reason.RUNTIME_NUMBER, detail, f"{fix}; {few}")

    def on_device(self, op: Op, devices: Mapping[str, str]) -> Cause | None:
        """Whether all tensors are on one device, of the type that is captured."""
        if len(devices) > 1:
            (device, name), (other, other_name), *_ = devices.items()
            described = self.ops.described
            detail = f"{described(name)} is on {device} and {described(other_name)} on {other}"
            return Cause(Reason.MIXED_DEVICES, detail, "keep all its tensors on one device, 0-dim ones too")
        if not devices:
            if numbers := self.numbers(op.names):
                detail = f"it computes with numbers on the host ({self.listed(op, numbers)}), no tensors"
                return Cause(Reason.RUNTIME_NUMBER, detail, "compute with 0-dim tensors on the device instead")
            if op.rule is not None and not op.rule.captures:
                return op.rule.cause
            return Cause(Reason.NOT_ON_DEVICE, "it has no tensors", "nothing to gain: it launches no kernels")
        ((device, name),) = devices.items()
        if device.split(":")[0] == self.device_type:
            return None
        value, fix = "its result", f"let it make its result on a {self.device_type} device, as with device=x.device"
        if name in op.inputs:
            value = self.ops.described(name)
            fix = f"move {value} to a {self.device_type} device before it"
        elif op.rule is not None and not op.rule.captures:  # there, it would be eager for another reason
            fix = f"{op.rule.cause.fix}, on a {self.device_type} device"
        return Cause(Reason.NOT_ON_DEVICE, f"{value} is on {device}; regions form on {self.device_type}", fix)

    def takes_known(self, op: Op) -> Cause | None:
        """Whether everything that a graph keeps is the same at every call."""
        settable = self.kernel_scalars(op)
        if numbers := [name for name in self.numbers(op.inputs) if name not in settable]:
            detail = f"it takes {self.listed(op, numbers)}, which a graph would keep as it was when captured"
            return Cause(Reason.RUNTIME_NUMBER, detail, "pass a 0-dim tensor on the device instead of a Python number")
        if symbolic := [name for name in op.names if self.values[name].symbolic]:
            detail = f"a size of {self.listed(op, symbolic)} is known only at run time"
            fix = 'compile with the default cache="constant values", which makes a trace per shape'
            return Cause(Reason.SYMBOLIC_SHAPE, detail, fix)
        futures = [name for name in op.names if self.values[name].kind == "future"]
        if futures and not op.communicates:
            detail = f"{self.listed(op, futures)} is still being filled by a collective"
            return Cause(Reason.COLLECTIVE, detail, "none needed: regions form on both sides of it")
        return None

    def objection(self, op: Op) -> Cause | None:
        """Why the rules, or the lack of one, keep the op eager, or an op that it is made of."""
        if self.user.allows(op):
            return None
        if (rule := op.rule) is not None and (cause := rule.objection(op.conditions) or self.communication(op)):
            return cause
        if op.is_fusion and not rules.executor_rule(op.executor).fuses:
            detail = f"{op.executor or 'an unknown executor'} is not a fusion executor that the rules know"
            return Cause(Reason.UNKNOWN, detail, _allow_fix(op))
        for sub in op.subs:
            constant = self.is_constant(sub) or (op.is_fusion and self.is_given_numbers(op, sub))
            inner = None if constant else self.objection(sub)
            # The inside of an operator with a rule documents the operator. An unknown name in there proves nothing.
            if inner is not None and not (rule is not None and inner.reason is Reason.UNKNOWN):
                return Cause(inner.reason, f"inside is {sub.name}: {inner.detail}", inner.fix or _allow_fix(sub))
        if rule is None and not op.is_fusion and (op.executor is not None or not op.subs):
            detail = (
                "no rule knows this operator; it may wait for the GPU, draw random numbers, send data to other "
                "processes, or keep state, none of which a replay would repeat"
            )
            return Cause(Reason.UNKNOWN, detail, _allow_fix(op))
        return None

    def communication(self, op: Op) -> Cause | None:
        """Why a graph cannot hold this collective, or its wait."""
        if not op.communicates:
            return None
        if not self.captures_collectives:
            return Cause(Reason.COLLECTIVE, 'capture_collectives is "never"', 'pass capture_collectives="auto"')
        problems = (capture_problem(group, self.device_type) for group in process_groups([op]))
        return next((Cause(Reason.COLLECTIVE, *problem) for problem in problems if problem is not None), None)

    def is_constant(self, op: Op) -> bool:
        """Whether it only computed numbers that were known when the trace was made, such as the shape of a tensor."""
        if op.rule is None or op.rule.cause.reason is not Reason.RUNTIME_NUMBER or self.numbers(op.names):
            return False
        returns_tensor = any(self.values[name].kind == "tensor" for name in op.outputs)
        return not returns_tensor and not any(self.values[name].symbolic for name in op.names)

    def kernel_scalars(self, op: Op) -> set[str]:
        """Numbers that a fusion takes and only passes to its kernels; see `ExecutorRule.kernel_scalars`."""
        if not (self.supports_scalar_updates and op.is_fusion):
            return set()
        numbers = set(self.numbers(op.inputs))
        for sub in op.subs:
            numbers -= {*sub.inputs, *sub.outputs} - _passed_to_kernels(op, sub)
        return numbers

    def is_given_numbers(self, fusion: Op, sub: Op) -> bool:
        """Whether the rules only object to numbers of the operator that its kernels are given."""
        passed = _passed_to_kernels(fusion, sub)
        return bool(passed) and passed <= self.kernel_scalars(fusion)

    def returns_known(self, op: Op) -> Cause | None:
        if self.numbers(op.outputs):
            detail = "it returns a Python number, which a replay would not compute again"
            return Cause(Reason.RUNTIME_NUMBER, detail, "return a 0-dim tensor instead")
        return None

    def keeps_storage(self, op: Op) -> Cause | None:
        """Whether nothing reads more of a result's storage than the result. A graph makes a storage for the result."""
        read = [name for name in op.outputs if name in self.read_past]
        if not read or self.user.allows(op):
            return None
        said = f"as_strided may read the whole storage of {self.listed(op, read)}"
        detail = f"{said}, and an output of a graph has a storage of its own"
        return Cause(Reason.UNVERIFIED, detail, "take slices instead of as_strided with an offset")


def _passed_to_kernels(fusion: Op, sub: Op) -> set[str]:
    """The numbers that the operator only passes to the fusion's kernels."""
    keys = rules.executor_rule(fusion.executor).kernel_scalars.get(sub.id or "", frozenset())
    return {name for key, name in sub.keywords if key in keys}


def _allow_fix(op: Op) -> str:
    """Has the most precise name that ``allow=`` takes and that is the same in the next process."""
    executor, id_ = _stable(op)
    in_library = library_names_of(op.symbol)[:1] if op.symbol is not None else ()
    name = next(iter(in_library), None) or (op.name if op.id is None else f"{executor}.{id_}" if executor else id_)
    said = "if it always launches the same kernels for the same shapes, and does nothing besides, pass"
    return f"{said} allow=[{name!r}] to cudagraph_transform or thunder_cg.thunderfx"


def _stable(op: Op) -> tuple[str | None, str]:
    if op.executor is not None and _AD_HOC.fullmatch(op.executor):
        return None, _AD_HOC_SUFFIX.sub("", op.id or "")
    return op.executor, op.id or ""


def _patterns(op: Op) -> Iterator[Pattern]:
    """All names by which a pattern of the user may match the op, and the functions that its symbol calls."""
    yield op.name
    if op.id is not None:
        executor, id_ = _stable(op)
        yield op.id
        yield id_
        if executor is not None:
            yield f"{executor}.{id_}"
    if op.symbol is not None:
        yield from library_names_of(op.symbol)
        yield from (each for each in bound_functions(op.symbol).values() if isinstance(each, Hashable))


def _walk(op: Op) -> Iterator[Op]:
    """The op and, for a fusion, everything inside of it. The inside of another op only documents the op."""
    yield op
    yield from _with_parts(op.subs) if op.is_fusion else ()


def _devices(op: Op, values: Mapping[str, Value]) -> dict[str, str]:
    """Each device that a tensor of the op is on, with the name of one such tensor."""
    found: dict[str, str] = {}
    for name in (name for inner in _walk(op) for name in inner.names):
        if (device := values[name].device) is not None:
            found.setdefault(device, name)
    return found
