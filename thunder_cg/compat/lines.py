"""Has Thunder keep the user's lines where it computes a gradient, in what is compiled with a transform of this package.

Thunder (0.2.6) gives an operator's line to what one of its passes makes of it, but not if that is for the backward.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from thunder.core.compile_data import get_compile_data
from thunder.core.symbol import BoundSymbol
from thunder.core.trace_interpreter import TraceSubstitutionProcessor

__all__ = ["arguments_at", "keep_lines"]

_copy = BoundSymbol.from_bsym


@cache
def keep_lines() -> None:
    """From now on, what computes the gradient of an operator has its line."""
    BoundSymbol.from_bsym = _copied
    TraceSubstitutionProcessor.__init_subclass__ = classmethod(_keeping_lines)


def _copied(bound: Any, **changes: Any) -> Any:
    """A copy of a symbol. A pass that makes several symbols of one gives all of them its line, last of all."""
    if bound.source_filename is not None:
        changes = {key: value for key, value in changes.items() if not key.startswith("source_")}
    return _copy(bound, **changes)


def _keeping_lines(processor: type[Any]) -> None:
    """Has a pass over a trace, which Thunder defines when it runs it, give what it makes of a symbol its line."""
    transforms = getattr(get_compile_data(), "transforms", None) or ()
    if not any(getattr(each, "owns_regions", False) for each in transforms):
        return
    process = processor.process_bsym

    def process_bsym(self: Any, bound: Any) -> None:
        at = bound.source_positions
        if at is not None and not isinstance(at, _LineOf):
            at = _LineOf(at.lineno, tuple(proxy.name for proxy in bound.flat_proxy_args))
        self.new_trace.set_current_source_location(bound.source_filename, at)
        process(self, bound)

    processor.process_bsym = process_bsym


class _LineOf(NamedTuple):
    """The line of what was made of a symbol, with the names of that symbol's arguments."""

    lineno: int
    arguments: tuple[str, ...]


def arguments_at(bound: Any) -> tuple[str, ...]:
    """The arguments of the operator of the user that a symbol was made of; none if it is that operator."""
    at = bound.source_positions
    return at.arguments if isinstance(at, _LineOf) else ()
