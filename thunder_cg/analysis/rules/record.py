"""The types of the rule tables."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thunder_cg.compat.settings import Settings

# Executor and id of a symbol. Prims and Thunder's own torch symbols have the executor None.
Key = tuple[str | None, str | None]

# Thunder runs some derivatives through torch.autograd. It names them after the operator, with this suffix.
VJP = "_vjp"


# What changes a read of a tensor's contents, and a result whose size depends on them; `advice` has what fits a line.
KEEP_ON_DEVICE = "keep the value on the device, as a 0-dim tensor, or read it outside of the compiled function"
FIXED_SIZE = "compute with a fixed size and a mask, or call it outside of the compiled function"


class Reason(enum.Enum):
    """Why an op is captured or eager; the value is how a report says it."""

    ALLOWED = "allowed"
    USER_ALLOW = "allowed by the user"
    FUSION = "a fusion of allowed operators"

    BOOKKEEPING = "bookkeeping of the trace"
    USER_DENY = "denied by the user"
    NOT_ON_DEVICE = "not on the device that is captured"
    MIXED_DEVICES = "moves between devices"
    RUNTIME_NUMBER = "a number known only at run time"
    SYMBOLIC_SHAPE = "a size known only at run time"
    DATA_DEPENDENT = "depends on what tensors hold"
    HOST_SYNC = "waits for the device"
    RANDOM_STATE = "touches generator state on the host"
    COLLECTIVE = "communicates between processes"
    DTENSOR = "works on DTensors, which no graph can take"
    SIDE_EFFECT = "changes something outside of tensors"
    UNVERIFIED = "not shown to be safe in a capture"
    UNKNOWN = "no rule knows it"
    TOO_SMALL = "too small a region to gain"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an op has its verdict, and what changes the verdict."""

    reason: Reason
    detail: str
    fix: str = ""  # what the user can change in their code; empty if only allow= helps
    source: str = ""  # where the detail can be looked up, besides the measurement

    @property
    def captures(self) -> bool:
        return self.reason is Reason.ALLOWED


CAPTURED = Cause(Reason.ALLOWED, "it only launches kernels on the current stream")


CAPTURED_COLLECTIVE = Cause(
    Reason.ALLOWED,
    "NCCL's kernels are captured with their wait; the ranks of the group agree on that at each capture",
    source="ProcessGroupNCCL; measured on two H200s",
)


class Evidence(enum.Enum):
    """Whether the operator sweep measured what a record says; see Note [How the rules were checked]."""

    MEASURED = "measured by the operator sweep"
    MEASURED_ON_GPU = "measured by the operator sweep; only a GPU shows that it must stay eager"
    NOT_MEASURED = "not measured"
    KNOWN = "known from source code, documentation or a trial by hand"


class AliasedInputs(enum.Enum):
    """The inputs that an output may be a view of, or that an operator may write."""

    FIRST = "the first tensor"
    LAST = "the last tensor"
    PAIRWISE = "for each output, the input at the same position"
    ALL = "any tensor"


FIRST, LAST, PAIRWISE, ALL = AliasedInputs


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor among the arguments or results of a bound symbol."""

    shape: tuple[Any, ...]  # sizes known only at run time are no ints
    dtype: str  # Thunder's name, such as "float32" or "bool8"
    device: str  # "cpu" or "cuda"


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a bound symbol, as conditions see them: tensors are `TensorArgument` records, other values that
    are known only at run time are opaque objects."""

    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    results: Any = None
    operator: Arguments | None = None  # of a derivative, the arguments of its operator
    positions: Mapping[str, int] = field(default_factory=dict)  # of parameters, by name

    def argument(self, name: str) -> Any:
        """The argument for the parameter ``name``; None if it is not given. A derivative has those of its operator."""
        of = self.operator or self
        position = self.positions.get(name, len(of.positional))
        return of.keywords.get(name, of.positional[position] if position < len(of.positional) else None)

    def position(self, index: int) -> Any:
        """The positional argument at ``index``; None if there are fewer."""
        return self.positional[index] if index < len(self.positional) else None


@dataclass(frozen=True, slots=True)
class Condition:
    """What else is true of an operator when a predicate holds for its arguments."""

    name: str
    when: str  # when the predicate holds, as a sentence
    predicate: Callable[[Arguments], bool]
    cause: Cause | None = None  # why the op stays eager then; None if the verdict does not change
    evidence: Evidence = Evidence.KNOWN
    aliases: AliasedInputs | None = None
    writes: AliasedInputs | None = None
    draws: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """All that is known of one operator."""

    key: Key
    cause: Cause  # the verdict, and why
    evidence: Evidence
    aliases: AliasedInputs | None = None  # inputs that an output may share memory with
    writes: AliasedInputs | None = None  # inputs that may be written
    draws: bool = False  # it draws from a generator or advances one; draws keep their order
    communicates: bool = False  # with other processes; what communicates keeps its order
    launches_kernels: bool = True  # False: nothing or hardly ever, so a region of only such operators gains nothing
    settings: Settings = Settings.ALL  # settings of PyTorch's by which its kernels may be chosen
    conditions: tuple[Condition, ...] = ()  # in the order in which they are asked

    @property
    def captures(self) -> bool:
        return self.cause.captures

    @property
    def is_collective(self) -> bool:
        return self.communicates or self.cause.reason is Reason.COLLECTIVE

    # Below, names are those of the conditions that hold for an op.

    def holding(self, names: Collection[str]) -> list[Condition]:
        return [condition for condition in self.conditions if condition.name in names] if names else []

    def objection(self, names: Collection[str]) -> Cause | None:
        """Why the op stays eager."""
        if not self.captures:
            return self.cause
        return next((c.cause for c in self.holding(names) if c.cause is not None), None)

    def aliased(self, names: Collection[str]) -> AliasedInputs | None:
        """Inputs that an output of the op may share memory with."""
        return self.aliases or next((c.aliases for c in self.holding(names) if c.aliases is not None), None)

    def written(self, names: Collection[str]) -> AliasedInputs | None:
        """Inputs that the op may write."""
        return self.writes or next((c.writes for c in self.holding(names) if c.writes is not None), None)


@dataclass(frozen=True, slots=True)
class ExecutorRule:
    """What is known of an executor as a whole."""

    fuses: bool = False  # a fusion of this executor is as safe as the worst operator inside of it
    is_pure: bool = False  # its operators neither write an input nor return a view of one
    # Those results of its fusions that `needless_copies` finds are dense, and really share memory with nothing.
    keeps_reduced_apart: bool = False
    # Of prims inside of its fusions, the keywords whose numbers are arguments of the fusion's kernels. A graph can be
    # given new numbers before each launch. Every recording that makes use of this is verified before it counts.
    kernel_scalars: Mapping[str, frozenset[str]] = field(default_factory=dict)


def rows(executor: str | None, names: str, cause: Cause, evidence: Evidence, **columns: Any) -> Iterable[Rule]:
    """A record for each of the names, which are separated by spaces."""
    return [Rule((executor, name), cause, evidence, **columns) for name in names.split()]
