"""A collective can overlap if kernels are launched between its start and its wait."""

from __future__ import annotations

import pytest

from thunder_cg.analysis.ops import Op, Ops, Value
from thunder_cg.report.collectives import _overlaps, _wait

START = Op(0, "torch_all_reduce_prim_impl", "torch", "torch_all_reduce_prim_impl", ("x",), ("p",))
WAIT = Op(9, "torch_wait_prim_impl", "torch", "torch_wait_prim_impl", ("p",), ("y",))
OTHER_WAIT = Op(1, "torch_wait_prim_impl", "torch", "torch_wait_prim_impl", ("q",), ("z",))
VIEW = Op(2, "torch.transpose", "torch", "transpose", ("a",), ("b",))
KERNEL = Op(3, "torch.mul", "torch", "mul", ("a", "b"), ("c",))
FRAME = Op(4, "unpack_trivial", None, "UNPACK_TRIVIAL", (), ("a",), bookkeeping=True)
VALUES = {name: Value(name, "future" if name in "pq" else "tensor") for name in "abcpqxyz"}


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
    ops = Ops((START, *later), VALUES, ("a", "x"))
    assert _overlaps(ops, START, later) is overlaps
    assert _wait(ops, START, later) is (WAIT if WAIT in later else None)


def test_a_synchronous_collective_overlaps_with_nothing() -> None:
    values = VALUES | {"p": Value("p", "tensor")}
    assert not _overlaps(Ops((START, KERNEL), values, ("x",)), START, [KERNEL])
