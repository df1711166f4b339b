"""Decide for every op whether it may be captured, and say why.

The order of the questions: the trace's frame; the user's ``deny=``; devices; numbers and sizes known only at run
time; the user's ``allow=`` or else the rule tables, for the op and for what it is made of. ``allow=`` vouches for an
operator, so it lifts a row of the tables, but not a fact about this call: a number baked into a graph would be wrong
at the next replay whoever allowed it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from thunder_cg.analysis import rules
from thunder_cg.analysis.aliasing import alias_sets
from thunder_cg.analysis.ops import Op, Ops, Value
from thunder_cg.analysis.rules import Reason, Rule
from thunder_cg.errors import OptionError

__all__ = ["UserRules", "Verdict", "classify"]

_AD_HOC = re.compile(r"__ad_hoc_executor_\d+")
_AD_HOC_SUFFIX = re.compile(
    r"_\d+_\d+$"
)  # thunder.extend.TemporaryExecutor adds its address and a counter to each name


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens to one op."""

    capture: bool
    reason: Reason
    detail: str
    """The reason, for this op: which tensor, which number, which operator inside."""
    fix: str
    """What would change the verdict; empty only for what is captured and for the trace's frame."""
    device: str | None
    """The device that the op's tensors are all on, such as ``"cuda:0"``; None if there is no such device."""


@dataclass(frozen=True, slots=True)
class UserRules:
    """The user's own rows: operators by id (``"my_op"``), executor and id (``"my_ex.my_op"``), or printed name
    (``"torch.nn.functional.linear"``).

    Raises:
        OptionError: for a pattern that cannot be a name, or is in both.
    """

    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for option, patterns in (("allow", self.allow), ("deny", self.deny)):
            for pattern in patterns:
                if not isinstance(pattern, str) or not pattern or pattern != "".join(pattern.split()):
                    raise OptionError(
                        option, pattern, "names without spaces", 'write "id", "executor.id" or "torch.add"'
                    )
        both = self.allow & self.deny
        if both:
            raise OptionError("allow", sorted(both), "names that deny= does not hold too", "name each operator once")

    def allows(self, op: Op) -> bool:
        return bool(self.allow) and any(name in self.allow for name in _names(op))

    def denies(self, op: Op) -> str | None:
        """The pattern that denies the op, if one does."""
        return next((name for name in _names(op) if name in self.deny), None) if self.deny else None


def classify(
    ops: Ops, user: UserRules, device_type: str, *, supports_scalar_updates: bool = False
) -> tuple[Verdict, ...]:
    """One verdict per op, in the same order.

    Args:
        ops: A trace.
        user: The user's rows.
        device_type: ``"cuda"`` or ``"cpu"``: what the backend captures.
        supports_scalar_updates: whether the backend can give the kernels of a graph new numbers.
    """
    judge = _Judge(ops.values, user, device_type, supports_scalar_updates, _shown_beyond(ops, user))
    return tuple(judge.verdict(op) for op in ops.ops)


def _shown_beyond(ops: Ops, user: UserRules) -> frozenset[str]:
    """Tensors that may share a storage with one that an operator shows more of than the tensor's own elements."""
    shown = [
        name
        for op in ops.ops
        for inner in _walk(op)
        if "beyond" in inner.traits and not user.allows(inner)
        for name in inner.inputs[:1]
    ]
    if not shown:
        return frozenset()
    root = alias_sets(ops)
    storages = {root[name] for name in shown if name in root}
    return frozenset(name for name in root if root[name] in storages)


@dataclass(frozen=True, slots=True)
class _Judge:
    values: Mapping[str, Value]
    user: UserRules
    device_type: str
    supports_scalar_updates: bool
    shown_beyond: frozenset[str]

    def verdict(self, op: Op) -> Verdict:
        if op.bookkeeping:
            return Verdict(False, Reason.BOOKKEEPING, "bookkeeping of the trace", "", None)
        devices = _devices(op, self.values)
        device = next(iter(devices)) if len(devices) == 1 else None
        objection = (
            self.user_denies(op)
            or self.on_device(op, devices)
            or self.takes_known(op)
            or self.objection(op)
            or self.returns_known(op)
            or self.keeps_storage(op)
        )
        if objection is not None:
            return Verdict(False, objection.reason, objection.detail, objection.fix or _allow_fix(op), device)
        return self.capture(op, device)

    def capture(self, op: Op, device: str | None) -> Verdict:
        if self.user.allows(op):
            return Verdict(True, Reason.USER_ALLOW, "named in allow=", "", device)
        if op.is_fusion:
            detail = f"all {len(op.subs)} operators inside are allowed"
            if numbers := self.kernel_scalars(op):
                detail += f"; {_listed(sorted(numbers))} are set before each launch"
            return Verdict(True, Reason.FUSION, detail, "", device)
        row = rules.ALLOW.get(rules.find(op.executor, op.id))
        return Verdict(True, Reason.ALLOWED, row.detail if row else "all operators inside are allowed", "", device)

    def user_denies(self, op: Op) -> Rule | None:
        for inner in _walk(op):
            pattern = self.user.denies(inner)
            if pattern is not None:
                inside = "" if inner is op else f", which is inside {op.name}"
                return Rule(Reason.USER_DENY, f"deny= names {pattern!r}{inside}", "", f"remove {pattern!r} from deny=")
        return None

    def on_device(self, op: Op, devices: Mapping[str, str]) -> Rule | None:
        """All tensors on one device, and that one of the type that is captured?"""
        if len(devices) > 1:
            (device, name), (other, other_name), *_ = devices.items()
            detail = f"{name!r} is on {device} and {other_name!r} on {other}"
            return Rule(Reason.MIXED_DEVICES, detail, "", "keep all its tensors on one device, 0-dim ones too")
        if not devices:
            numbers = [n for n in (*op.inputs, *op.outputs) if self.values[n].kind == "number"]
            if numbers:
                detail = f"it computes with numbers on the host ({_listed(numbers)}), no tensors"
                return Rule(Reason.RUNTIME_NUMBER, detail, "", "compute with 0-dim tensors on the device instead")
            denied = rules.DENY.get(rules.find(op.executor, op.id))
            return denied or Rule(
                Reason.NOT_ON_DEVICE, "it has no tensors", "", "nothing to gain: it launches no kernels"
            )
        ((device, name),) = devices.items()
        if device.split(":")[0] == self.device_type:
            return None
        fix = f"move {name!r} to a {self.device_type} device before it"
        return Rule(Reason.NOT_ON_DEVICE, f"{name!r} is on {device}; regions form on {self.device_type}", "", fix)

    def takes_known(self, op: Op) -> Rule | None:
        """Is everything that a graph would bake in the same at every call?"""
        settable = self.kernel_scalars(op)
        numbers = [name for name in op.inputs if self.values[name].kind == "number" and name not in settable]
        if numbers:
            detail = f"it takes {_listed(numbers)}, which a graph would keep as it was when captured"
            return Rule(
                Reason.RUNTIME_NUMBER, detail, "", "pass a 0-dim tensor on the device instead of a Python number"
            )
        symbolic = [name for name in (*op.inputs, *op.outputs) if self.values[name].symbolic]
        if symbolic:
            detail = f"a size of {_listed(symbolic)} is known only at run time"
            fix = 'compile with the default cache="constant values", which makes a trace per shape'
            return Rule(Reason.SYMBOLIC_SHAPE, detail, "", fix)
        futures = [name for name in (*op.inputs, *op.outputs) if self.values[name].kind == "future"]
        if futures:
            detail = f"{_listed(futures)} is still being filled by a collective"
            return Rule(Reason.COLLECTIVE, detail, "", "none needed: regions form on both sides of it")
        return None

    def objection(self, op: Op) -> Rule | None:
        """What the tables, or the lack of a row, say against the op and what it is made of."""
        if self.user.allows(op):
            return None
        key = rules.find(op.executor, op.id)
        denied = _denied(op)
        if denied is not None:
            return denied
        if op.is_fusion and op.executor not in rules.FUSION_EXECUTORS:
            return _unknown(op, f"{op.executor or 'an unknown executor'} is not a fusion executor that the rules know")
        allowed = key in rules.ALLOW
        for sub in op.subs:
            constant = self.is_constant(sub) or (op.is_fusion and self.is_given_numbers(op, sub))
            inner = None if constant else self.objection(sub)
            # What an allowed symbol is made of documents it; an unknown name in there proves nothing.
            if inner is not None and not (allowed and inner.reason is Reason.UNKNOWN):
                return Rule(
                    inner.reason, f"inside is {sub.name}: {inner.detail}", inner.source, inner.fix or _allow_fix(sub)
                )
        if not allowed and not op.is_fusion and (op.executor is not None or not op.subs):
            return _unknown(
                op, "no rule knows this operator, so it may do anything: wait, draw, communicate, keep state"
            )
        return None

    def is_constant(self, op: Op) -> bool:
        """Did it only compute numbers that were known when the trace was made, such as the shape of a tensor?"""
        denied = _denied(op)
        return (
            denied is not None
            and denied.reason is Reason.RUNTIME_NUMBER
            and not any(self.values[name].kind == "tensor" for name in op.outputs)
            and not any(
                self.values[name].kind == "number" or self.values[name].symbolic for name in (*op.inputs, *op.outputs)
            )
        )

    def kernel_scalars(self, op: Op) -> set[str]:
        """Numbers that a fusion takes and only hands to its kernels, as `rules.KERNEL_SCALARS` says."""
        if not (self.supports_scalar_updates and op.is_fusion):
            return set()
        numbers = {name for name in op.inputs if self.values[name].kind == "number"}
        for sub in op.subs:
            numbers -= {*sub.inputs, *sub.outputs} - _handed_on(op, sub)
        return numbers

    def is_given_numbers(self, fusion: Op, sub: Op) -> bool:
        """Is what the rules have against the operator no more than numbers, which its kernels are given?"""
        given = _handed_on(fusion, sub)
        return bool(given) and given <= self.kernel_scalars(fusion)

    def returns_known(self, op: Op) -> Rule | None:
        numbers = [name for name in op.outputs if self.values[name].kind == "number"]
        if numbers:
            detail = f"it returns {_listed(numbers)}, a Python number, which a replay would not compute again"
            return Rule(Reason.RUNTIME_NUMBER, detail, "", "return a 0-dim tensor instead")
        return None

    def keeps_storage(self, op: Op) -> Rule | None:
        """Are the storages of its results, which a graph makes anew, seen only through the results?"""
        seen = [name for name in op.outputs if name in self.shown_beyond]
        if not seen or self.user.allows(op):
            return None
        detail = f"more of the storage of {_listed(seen)} is shown by as_strided, and what leaves a graph has its own"
        return Rule(Reason.UNVERIFIED, detail, "", "take slices instead of as_strided with an offset")


def _handed_on(fusion: Op, sub: Op) -> set[str]:
    """What the operator only hands to the fusion's kernels."""
    keys = rules.KERNEL_SCALARS.get((fusion.executor, sub.id), frozenset())
    return {name for key, name in sub.keywords if key in keys}


def _denied(op: Op) -> Rule | None:
    key = rules.find(op.executor, op.id)
    if key in rules.DENY:
        return rules.DENY[key]
    return next((rule for trait, rule in rules.DENY_IF.get(key, {}).items() if trait in op.traits), None)


def _unknown(op: Op, detail: str) -> Rule:
    return Rule(Reason.UNKNOWN, detail, "", _allow_fix(op))


def _allow_fix(op: Op) -> str:
    return f"if it only launches kernels on the current stream, cudagraph_transform(allow=[{_pattern(op)!r}])"


def _pattern(op: Op) -> str:
    """The most telling of the names that ``allow=`` takes and that the next process will print as well."""
    if op.id is None:
        return op.name
    executor, id_ = _stable(op)
    return f"{executor}.{id_}" if executor else id_


def _stable(op: Op) -> tuple[str | None, str]:
    if op.executor is not None and _AD_HOC.fullmatch(op.executor):
        return None, _AD_HOC_SUFFIX.sub("", op.id or "")
    return op.executor, op.id or ""


def _names(op: Op) -> Iterator[str]:
    """Everything that a pattern of the user may call the op."""
    yield op.name
    if op.id is not None:
        executor, id_ = _stable(op)
        yield op.id
        yield id_
        if executor is not None:
            yield f"{executor}.{id_}"


def _walk(op: Op) -> Iterator[Op]:
    """The op and, for a fusion, everything inside of it: what a claimed symbol is made of only documents it."""
    yield op
    if op.is_fusion:
        for sub in op.subs:
            yield from _walk_all(sub)


def _walk_all(op: Op) -> Iterator[Op]:
    yield op
    for sub in op.subs:
        yield from _walk_all(sub)


def _devices(op: Op, values: Mapping[str, Value]) -> dict[str, str]:
    """Each device that a tensor of the op is on, with the name of one such tensor."""
    found: dict[str, str] = {}
    for inner in _walk(op):
        for name in (*inner.inputs, *inner.outputs):
            device = values[name].device
            if device is not None:
                found.setdefault(device, name)
    return found


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
