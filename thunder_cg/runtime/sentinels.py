"""Sentinels: numbers that stand in a capture for the scalars of each call.

Note [Scalars of a graph]
    A graph bakes in the numbers that its kernels get. A few numbers differ from call to call and still fit a graph:
    arguments that a kernel gets unchanged, such as the seed and the offset of nvFuser's random draws. The capture gets
    a sentinel for each of them, a random number that occurs nowhere else. Where a sentinel is found among the arguments
    of the kernels, each launch puts the call's number. A sentinel that is not found fails the capture. A number may
    also have been used in another way, for example doubled on the host. That shows when the new graph's first replay
    is compared with an eager run.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence, Set

from thunder_cg.errors import CaptureRefused


def sentinels(count: int) -> list[int]:
    """New sentinels. See Note [Scalars of a graph]."""
    return [secrets.randbits(61) | 1 << 61 for _ in range(count)]


def check_sentinels(sentinels: Sequence[int], found: Set[int]) -> None:
    """Raises `CaptureRefused` if one of ``sentinels`` was not ``found`` among the arguments of what was captured."""
    if missing := set(sentinels) - found:
        raise CaptureRefused(f"{len(missing)} of {len(sentinels)} numbers of the call reach no kernel as they are")
