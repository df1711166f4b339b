"""All settings in one frozen record, checked once, when the transform is made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from thunder_cg.errors import OptionError

BACKENDS = ("auto", "cuda", "tape")


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one transform.

    Attributes:
        allow: operators that may be captured although no rule knows them (``"my_op"``, ``"executor.my_op"``).
        deny: operators that stay eager although the rules would capture them.
        backend: ``"cuda"``, ``"tape"`` (a recorder for machines without a GPU), or ``"auto"``: ``cuda`` where there is
            a GPU, else ``tape``.
        strict: raise :class:`~thunder_cg.errors.CaptureError` where a call would otherwise run eagerly.
        verify: compare replays with eager runs on the same inputs, bit for bit: ``"first"`` of each new recording, or a
            number N: also of one call in N, for as long as the process runs. None: never. State that an operator keeps
            by itself, outside of the trace, advances once more in a verified call.
        debug: fill an arena with NaN when it is released, so that memory used too late shows. ``tape`` always does.
        max_recordings: recordings kept per trace pair and arena; past it the oldest goes.
        max_arenas: memory pools per trace pair; a call that finds all of them taken runs eagerly.
    """

    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    backend: str = "auto"
    strict: bool = False
    verify: Literal["first"] | int | None = None
    debug: bool = False
    max_recordings: int = 8
    max_arenas: int = 16

    @classmethod
    def checked(
        cls,
        *,
        allow: Collection[str],
        deny: Collection[str],
        backend: str,
        strict: bool,
        verify: Literal["first"] | int | None,
        debug: bool,
        max_recordings: int,
        max_arenas: int,
    ) -> Options:
        """Builds the record, or raises :class:`OptionError` for the first value that cannot be meant."""
        if backend not in BACKENDS:
            raise OptionError("backend", backend, f"one of {', '.join(map(repr, BACKENDS))}", "choose one of these")
        for name, flag in (("strict", strict), ("debug", debug)):
            if not isinstance(flag, bool):
                raise OptionError(name, flag, "True or False", "pass a bool")
        if not (verify is None or verify == "first" or (type(verify) is int and verify >= 1)):
            fix = 'pass "first" to compare each new recording once, or 100 to compare one call in 100 as well'
            raise OptionError("verify", verify, '"first", a whole number of at least 1, or None', fix)
        for name, bound in (("max_recordings", max_recordings), ("max_arenas", max_arenas)):
            if isinstance(bound, bool) or not isinstance(bound, int) or bound < 1:
                raise OptionError(name, bound, "a whole number of at least 1", "raise it")
        both = _names("allow", allow) & _names("deny", deny)
        if both:
            raise OptionError("allow", sorted(both), "names that deny= does not hold too", "name each operator once")
        return cls(frozenset(allow), frozenset(deny), backend, strict, verify, debug, max_recordings, max_arenas)


def _names(option: str, given: Collection[str]) -> frozenset[str]:
    if isinstance(given, str) or not isinstance(given, Collection) or not all(isinstance(n, str) and n for n in given):
        raise OptionError(option, given, "a collection of operator names", 'pass a list such as ["my_op"]')
    return frozenset(given)
