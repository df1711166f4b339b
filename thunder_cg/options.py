"""All settings of a transform, and of a graphed step, in one frozen record each, which checks them once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from thunder_cg.compat.thunder import name_of_operator
from thunder_cg.errors import OptionError

BACKENDS = ("auto", "cuda", "tape")
CAPTURE_COLLECTIVES = ("auto", "always", "never")
SELECT = ("all", "measured")
_TRANSFORM = "cudagraph_transform"


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one transform: :func:`thunder_cg.cudagraph_transform` says what each means.

    Raises:
        OptionError: for the first value that cannot be meant.
    """

    allow: Collection[str | Callable[..., Any]] = frozenset()
    deny: Collection[str | Callable[..., Any]] = frozenset()
    backend: str = "auto"
    strict: bool | Literal["ops"] = False
    verify: Literal["first"] | int | None = None
    debug: bool = False
    max_recordings: int = 8
    max_arenas: int = 16
    capture_collectives: Literal["auto", "always", "never"] = "auto"
    memory_budget: int | float | None = None
    select: Literal["all", "measured"] = "all"

    def __post_init__(self) -> None:
        _check_choice("backend", self.backend, BACKENDS, "choose one of these")
        if not isinstance(self.strict, bool) and self.strict != "ops":
            raise OptionError("strict", self.strict, 'True, False or "ops"', 'pass a bool or "ops"')
        if not isinstance(self.debug, bool):
            raise OptionError("debug", self.debug, "True or False", "pass a bool")
        verify = self.verify
        if not (verify is None or verify == "first" or (type(verify) is int and verify >= 1)):
            fix = 'pass "first" to compare each new recording once, or 100 to compare one call in 100 as well'
            raise OptionError("verify", verify, '"first", a whole number of at least 1, or None', fix)
        _check_choice("capture_collectives", self.capture_collectives, CAPTURE_COLLECTIVES, 'pass "auto"')
        _check_choice("select", self.select, SELECT, 'pass "measured" to leave regions eager whose graphs do not pay')
        _check_bound("max_recordings", self.max_recordings)
        _check_bound("max_arenas", self.max_arenas)
        _check_memory_budget(self.memory_budget)
        for name in ("allow", "deny"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Collection) or not all(map(_is_operator, value)):
                expected = "a collection of operators, or of their names"
                raise OptionError(name, value, expected, 'pass a list such as ["my_op"]')
            object.__setattr__(self, name, frozenset(map(name_of_operator, value)))
        if both := set(self.allow).intersection(self.deny):
            raise OptionError(
                "allow", sorted(map(str, both)), "names that deny= does not hold too", "name each operator once"
            )


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Settings of one graphed step: :func:`thunder_cg.graphed_step` says what each means.

    Raises:
        OptionError: for the first value that cannot be meant.
    """

    modules: tuple[Any, ...]
    optimizers: tuple[Any, ...]
    backend: str
    max_recordings: int
    memory_budget: int | float | None

    def __post_init__(self) -> None:
        for name, kind, expected in (("modules", nn.Module, "a module"), ("optimizers", Optimizer, "an optimizer")):
            for value in getattr(self, name):
                if not isinstance(value, kind):
                    raise OptionError(name, type(value), expected, "pass it, or a list of them", "graphed_step")
        _check_bound("max_recordings", self.max_recordings, "graphed_step")
        _check_memory_budget(self.memory_budget, "graphed_step")
        _check_choice("backend", self.backend, BACKENDS, "choose one of these", "graphed_step")


def taken_from(given: dict[str, Any], function: str, others: Collection[str], *, may_be_others: bool) -> dict[str, Any]:
    """Takes the options of a transform out of ``given``, in which options of others are left.

    Args:
        function: that they were given to, of this package.
        others: the names of the others' options that are known.
        may_be_others: whether a name that nobody knows may be an option of an executor, if it is like no known one.

    Raises:
        OptionError: a name that nobody knows, with the nearest that is known.
    """
    ours = [field.name for field in fields(Options)]
    for name, value in given.items():
        if name in ours or name in others:
            continue
        nearest = next(iter(difflib.get_close_matches(name, [*ours, *others], 1, 0.85 if may_be_others else 0.6)), None)
        if nearest is not None or not may_be_others:
            expected = "an option of cudagraph_transform" + (" or of Thunder" if others else "")
            raise OptionError(name, value, expected, f"did you mean {nearest}=?" if nearest else "drop it", function)
    return {name: given.pop(name) for name in ours if name in given}


def _check_choice(name: str, value: object, choices: Collection[str], fix: str, function: str = _TRANSFORM) -> None:
    if value not in choices:
        raise OptionError(name, value, f"one of {', '.join(map(repr, choices))}", fix, function)


def _check_bound(name: str, bound: object, function: str = _TRANSFORM) -> None:
    if isinstance(bound, bool) or not isinstance(bound, int) or bound < 1:
        raise OptionError(name, bound, "a whole number of at least 1", "pass a number such as 8", function)


def _check_memory_budget(budget: object, function: str = _TRANSFORM) -> None:
    is_share = type(budget) is float and 0 < budget <= 1
    if not (budget is None or is_share or (type(budget) is int and budget >= 1)):
        expected = "bytes as a whole number of at least 1, a share of the device as a float in (0, 1], or None"
        raise OptionError("memory_budget", budget, expected, "pass 2 * 2**30 for 2 GiB, or 0.5", function)


def _is_operator(value: object) -> bool:
    is_name = isinstance(value, str) and value != "" and value == "".join(value.split())
    return is_name or (callable(value) and isinstance(value, Hashable))
