"""A collective can overlap if kernels are launched between its start and its wait."""

from __future__ import annotations

import pytest

from thunder_cg.analysis.ops import Op
from thunder_cg.report.collectives import _overlaps, _wait

WAIT = Op(9, "torch_wait_prim_impl", "torch", "torch_wait_prim_impl", ("p",), ("y",))
OTHER_WAIT = Op(1, "torch_wait_prim_impl", "torch", "torch_wait_prim_impl", ("q",), ("z",))
VIEW = Op(2, "torch.transpose", "torch", "transpose", ("a",), ("b",))
KERNEL = Op(3, "torch.mul", "torch", "mul", ("a", "b"), ("c",))
FRAME = Op(4, "unpack_trivial", None, "UNPACK_TRIVIAL", (), ("a",), bookkeeping=True)


@pytest.mark.parametrize(
    ("later", "overlaps"),
    [
        ([WAIT, KERNEL], False),
        ([OTHER_WAIT, VIEW, FRAME, WAIT, KERNEL], False),
        ([OTHER_WAIT, KERNEL, WAIT], True),
        ([KERNEL], True),
    ],
)
def test_what_lies_before_the_wait(later: list[Op], overlaps: bool) -> None:
    assert _overlaps({"p"}, later) is overlaps
    assert _wait({"p"}, later) is (WAIT if WAIT in later else None)


def test_the_first_wait_of_a_launch_waits_for_all_of_it() -> None:
    later = [OTHER_WAIT, KERNEL, WAIT]
    assert not _overlaps({"p", "q"}, later) and _wait({"p", "q"}, later) is OTHER_WAIT


def test_a_synchronous_collective_overlaps_with_nothing() -> None:
    assert not _overlaps(set(), [KERNEL])
