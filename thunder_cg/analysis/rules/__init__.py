"""What is known of each operator: whether it may be captured and why, what it aliases, writes and draws.

In come the executor and the id of a symbol; out goes one frozen record, a `Rule`. A symbol without a record stays
eager, and the analysis assumes that it may write or return its inputs, or do anything else. The records are plain data,
in tables by origin: `torch` has PyTorch's operators and their derivatives, `prims` has Thunder's prims, `executors` has
the operators of other executors. Where the arguments of a call matter, a record names its `conditions`, which
`ops.read` evaluates once for each op. Records decide nothing by themselves: `aliasing`, `classify`, `partition` and
`region_io` read them.

Note [How the rules were checked]
    ``python -m thunder_cg.tools.operators`` measures the records through Thunder. It calls PyTorch's own table of
    operators with all its samples (torch.testing._internal.common_methods_invocations.op_db; float32 where an operator
    takes that), other names for the same operators, their in-place forms, and calls written by hand. Each call is
    captured and replayed on three fresh sets of values, forward and backward, and compared bit for bit with uncaptured
    Thunder. An operator that must stay eager is captured by force, through ``allow=``: it fails, is wrong, or is
    refused, as for a number that a replay would not compute again. An operator that Thunder does not compile is
    captured without Thunder. The results, with versions and date, are in ``tools/results/rules-*.json``, one file for
    each machine, and a test compares all records with them. `Evidence` says for each record whether there is such a
    measurement; ``tests/tools/operators/unreached.py`` says why not. The ``tape`` backend runs kernels of the CPU,
    which hardly ever wait for anything, so there are records that only a GPU can confirm.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from thunder_cg.analysis.rules import executors, prims, torch
from thunder_cg.analysis.rules.conditions import IN_PLACE, REDUCES_IN_PLACE, positions
from thunder_cg.analysis.rules.executors import EXECUTORS, executor_rule
from thunder_cg.analysis.rules.record import (
    FIXED_SIZE,
    KEEP_ON_DEVICE,
    VJP,
    AliasedInputs,
    Cause,
    Condition,
    Evidence,
    Key,
    Reason,
    Rule,
)

__all__ = [
    "EXECUTORS", "FIXED_SIZE", "IN_PLACE", "KEEP_ON_DEVICE", "REDUCES_IN_PLACE", "RULES", "VJP", "AliasedInputs",
    "Cause", "Condition", "Evidence", "Key", "Reason", "Rule", "executor_rule", "find", "key_of", "positions",
]  # fmt: skip

_RECORDS = (*torch.RULES, *prims.RULES, *executors.RULES)
RULES: Mapping[Key, Rule] = MappingProxyType({rule.key: rule for rule in _RECORDS})


def key_of(executor: str | None, id: str | None) -> Key:
    """The key that a symbol's record has.

    Thunder's own torch symbols, such as ``"torch.nn.functional.linear"``, do what the torch executor's symbol of the
    same last name does.
    """
    if executor is None and id is not None and id.startswith(("torch.", "Tensor.")):
        named: Key = ("torch", id)
        return named if named in RULES else ("torch", id.rsplit(".", 1)[-1])
    return executor, id


def find(executor: str | None, id: str | None) -> Rule | None:
    """The record of a symbol; None if the symbol is unknown."""
    return RULES.get(key_of(executor, id))
