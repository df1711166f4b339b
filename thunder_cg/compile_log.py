"""What the log and warnings say of a trace when Thunder compiles it, each thing once."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from thunder_cg.analysis.causes import is_root
from thunder_cg.analysis.classify import Pattern, is_known, shown, split_operators, unmatched
from thunder_cg.analysis.gradients import WrongGradient
from thunder_cg.analysis.ops import Ops
from thunder_cg.analysis.rules import Reason
from thunder_cg.analysis.sources import users_level
from thunder_cg.compat.thunder import get_compile_data
from thunder_cg.errors import WrongGradientWarning
from thunder_cg.runtime.compilation import Compilation
from thunder_cg.runtime.program import Program, SharedState

_logger = logging.getLogger(__name__)

# The log does not warn of operators that are eager for these reasons.
_FINE = {Reason.BOOKKEEPING, Reason.USER_DENY, Reason.TOO_SMALL}
_MOST_PLACES = 3  # of one operator, in a warning
_POSITION = re.compile(r"\[\d+\]")
_NO_FIXES = ("none needed", "nothing to gain")


def log_compiled(program: Program, took: int, warned: set[str]) -> None:
    """Says what was compiled in how many milliseconds, and warns of each cause of an eager operator that has a fix.

    Args:
        warned: what a warning was about.
    """
    verdicts = [v for op, v in zip(program.ops.ops, program.plan.verdicts) if not op.bookkeeping]
    captured = sum(verdict.capture for verdict in verdicts)
    regions = f"{len(program.regions)} region{'s' * (len(program.regions) != 1)}"
    said = f"{regions} with {captured} of {len(verdicts)} ops, planned in {took} ms"
    _logger.info("%s: compiled: %s", program.label, said)
    fine = _FINE | ({Reason.COLLECTIVE} if program.options.capture_collectives == "never" else set())
    # What no warning was about: places and reasons, by the operator and the reason without positions, as of layers.
    causes: dict[tuple[str, str], dict[str, list[str]]] = {}
    for op, verdict in zip(program.ops.ops, program.plan.verdicts):
        if verdict.capture or verdict.reason in fine or not verdict.fix or verdict.fix.startswith(_NO_FIXES):
            continue
        if not is_root(program.ops, program.plan, op):
            continue
        why, place = f"{verdict.detail}; {verdict.fix}", program.ops.place(op)
        if (about := f"{op.name} {place}: {why}") not in warned:
            warned.add(about)
            causes.setdefault((op.name, _POSITION.sub("[...]", why)), {}).setdefault(why, []).append(place)
    for (name, cause), found in causes.items():
        places = [*dict.fromkeys(place for each in found.values() for place in each)]
        more = f" and {len(places) - _MOST_PLACES:,} more" if len(places) > _MOST_PLACES else ""
        why = cause if len(found) > 1 else next(iter(found))
        _logger.warning("%s: %s %s%s is eager: %s", program.label, name, ", ".join(places[:_MOST_PLACES]), more, why)


def warn_of_losses(compilation: Compilation, found: Iterable[str], warned: set[str]) -> None:
    """Says what Python does and Thunder loses."""
    for said in dict.fromkeys(found):
        compilation.differs.append(said)
        if said not in warned:
            warned.add(said)
            _logger.warning("%s: %s", compilation.name, said)


def warn_of_wrong_gradients(compilation: Compilation, found: Iterable[WrongGradient]) -> None:
    """Says which gradients Thunder computes otherwise than PyTorch."""
    is_of_dynamo = isinstance(get_compile_data().fn, torch.fx.GraphModule)
    for each in found:
        named = str(each.in_thunderfx() if is_of_dynamo else each)
        compilation.differs.append(named)
        said = f"Thunder computes another gradient, writes too late or raises, with and without graphs: {named}"
        warnings.warn(said, WrongGradientWarning, stacklevel=users_level())


class NamedOperators:
    """The operators that the options ``allow=`` and ``deny=`` name."""

    def __init__(self, shared: SharedState) -> None:
        self._options, self._split = shared.options, shared.split
        self._checked: set[Pattern] = set()  # that ops have, or that a warning was about

    def warn_of_unmatched(self, before: Ops | None, ops: Ops, executors: Sequence[Any]) -> None:
        """Says of each name that no operator of a trace has, or one that Thunder has split.

        Args:
            before: the trace before Thunder has transformed it, if that is known.
        """
        names = {option: getattr(self._options, option) - self._checked for option in ("allow", "deny")}
        named = names["allow"] | names["deny"]
        if before is not None:
            self._split.update(split_operators(named, before, ops))
        registered = {
            name
            for executor in executors
            for id_ in getattr(executor, "opmap", ())
            for name in (str(id_), f"{executor.name}.{id_}")
        }
        missing = unmatched(names, [ops], self._split)
        # A name of an operator that another trace may have is no mistake.
        wrong = [
            each
            for each in missing
            if each[1] in self._split
            or (isinstance(each[1], str) and not is_known(each[1]) and each[1] not in registered)
        ]
        self._checked |= named - {name for _, name, _ in missing} | {name for _, name, _ in wrong}
        for option, name, instead in wrong:
            hint = f"; {instead}" if instead else ""
            said = f"{option}= names {shown(name)}, and the trace has no such operator{hint}"
            warnings.warn(said, UserWarning, stacklevel=users_level())
