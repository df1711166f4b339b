"""How every form of the report counts: numbers with their nouns and units, and what is alike together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")


def count(number: int, noun: str) -> str:
    """The number with its noun: 1 op, 2,000 ops."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(nbytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least one of it: 1536 is "1.5 KiB"."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.1f} {units[0]}" if units[0] != "B" else f"{nbytes} B"


def grouped(parts: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Those with equal keys together, in the order of the first of each."""
    groups: dict[Hashable, list[T]] = {}
    for part in parts:
        groups.setdefault(key(part), []).append(part)
    return [*groups.values()]
