"""Calls written by hand, of what PyTorch's table does not reach."""

from __future__ import annotations

from thunder_cg.sweep.samples import Case

BY_HAND: tuple[Case, ...] = ()
