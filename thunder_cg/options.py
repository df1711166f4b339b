"""All settings in one frozen record, checked once, when the transform is made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any, Literal

from thunder_cg.compat.thunder import name_of_operator
from thunder_cg.errors import OptionError

BACKENDS = ("auto", "cuda", "tape")
CAPTURE_COLLECTIVES = ("auto", "always", "never")
SELECT = ("all", "measured")


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
        if self.backend not in BACKENDS:
            raise OptionError(
                "backend", self.backend, f"one of {', '.join(map(repr, BACKENDS))}", "choose one of these"
            )
        if not isinstance(self.strict, bool) and self.strict != "ops":
            raise OptionError("strict", self.strict, 'True, False or "ops"', 'pass a bool or "ops"')
        if not isinstance(self.debug, bool):
            raise OptionError("debug", self.debug, "True or False", "pass a bool")
        verify = self.verify
        if not (verify is None or verify == "first" or (type(verify) is int and verify >= 1)):
            fix = 'pass "first" to compare each new recording once, or 100 to compare one call in 100 as well'
            raise OptionError("verify", verify, '"first", a whole number of at least 1, or None', fix)
        if self.capture_collectives not in CAPTURE_COLLECTIVES:
            allowed = ", ".join(map(repr, CAPTURE_COLLECTIVES))
            raise OptionError("capture_collectives", self.capture_collectives, f"one of {allowed}", 'pass "auto"')
        if self.select not in SELECT:
            fix = 'pass "measured" to leave regions eager whose graphs do not pay'
            raise OptionError("select", self.select, f"one of {', '.join(map(repr, SELECT))}", fix)
        for name in ("max_recordings", "max_arenas"):
            bound = getattr(self, name)
            if isinstance(bound, bool) or not isinstance(bound, int) or bound < 1:
                raise OptionError(name, bound, "a whole number of at least 1", "raise it")
        check_memory_budget(self.memory_budget, "cudagraph_transform")
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


def check_memory_budget(budget: object, function: str) -> None:
    """Raises `OptionError` if ``memory_budget=`` of ``function`` cannot be meant."""
    is_share = type(budget) is float and 0 < budget <= 1
    if not (budget is None or is_share or (type(budget) is int and budget >= 1)):
        expected = "bytes as a whole number of at least 1, a share of the device as a float in (0, 1], or None"
        raise OptionError("memory_budget", budget, expected, "pass 2 * 2**30 for 2 GiB, or 0.5", function)


def _is_operator(value: object) -> bool:
    return bool(value) if isinstance(value, str) else callable(value) and isinstance(value, Hashable)
