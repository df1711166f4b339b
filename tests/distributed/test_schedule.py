"""Collectives in the order of `schedule_collectives`: the bits of Thunder's order, one order on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
from ranks import Ranks

BUILDERS = ("ddp", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("fsdp zero2", "tensor parallel")))


def same_bits(builder: str, in_flight: int, at_once: int):
    """How many values differ, and for each trace its collectives before and after, and the operands of each launch."""
    import parallel
    from thunder.core.transform_common import Transform

    from thunder_cg.analysis import collectives
    from thunder_cg.analysis.ops import read

    class Schedules(Transform):
        def __init__(self) -> None:
            self.found = []

        def transform_trace_post_optimization(self, trace, **kwargs):
            new = collectives.schedule_collectives(trace)
            ops = read(new)
            launches = [[ops.ops[i] for i in launch] for launch in collectives.coalesced(ops.ops, ops.values)]
            sizes = [
                [max(ops.values[name].nbytes for name in op.names) for op in launch]
                for launch in launches
                if launch[0].communicates and "wait" not in launch[0].name
            ]
            self.found.append([*(communicating(each) for each in (trace, new)), sizes])
            return new

    def communicating(trace):
        ops = read(trace).ops
        return [(op.name, op.inputs, op.outputs) for op in ops if op.rule is not None and op.rule.is_collective]

    build, shared = parallel.BUILDERS[builder], "tensor" in builder
    theirs = parallel.reference(builder, 5, 1)
    with mock.patch.multiple(collectives, _IN_FLIGHT=in_flight, _COALESCED=at_once):
        schedules = Schedules()
        ours = parallel.train(build(schedules, parallel.transform()), 5, shared=shared)
    return parallel.differing(ours, theirs), schedules.found


@pytest.mark.parametrize("builder", BUILDERS)
def test_same_bits_and_one_order(ranks: Ranks, builder: str) -> None:
    """With little in flight and in one launch; test_parallel.py has the limits that are in force."""
    at_once = 2048
    results = ranks.run(same_bits, builder, 1, at_once)
    for differing, _ in results:
        assert not differing
    traces = results[0][1]
    assert traces == results[1][1] and len(traces) == 2
    for before, after, sizes in traces:
        assert sorted(before) == sorted(after)
        assert all(len(launch) == 1 or sum(launch) <= at_once for launch in sizes)
    assert "tensor" in builder or any(before != after for before, after, _ in traces)
    # Each collective of tensor parallelism is waited for before the next one can begin.
    assert ("tensor" in builder) == all(len(launch) == 1 for *_, sizes in traces for launch in sizes)
    assert "tensor" in builder or all(len(sizes) > 1 for *_, sizes in traces if sizes)


@pytest.fixture(scope="module")
def spawned() -> Iterator[Ranks]:
    """Two processes that hash strings differently, so that sets of them have other orders."""
    pool = Ranks(2, "cpu", spawns=True)
    yield pool
    pool.close()


def hash_and_order(builder: str):
    return hash("a"), same_bits(builder, 1, 2048)


@pytest.mark.nightly
@pytest.mark.parametrize("builder", ["ddp", "fsdp zero2", "fused ddp", "fused fsdp"])
def test_one_order_whatever_the_hashes(spawned: Ranks, builder: str) -> None:
    (first_hash, first), (second_hash, second) = spawned.run(hash_and_order, builder)
    assert first_hash != second_hash
    assert first == second and not first[0] and len(first[1]) == 2
