"""Collectives in the order of `schedule_collectives`: the bits of Thunder's order, one order on all ranks."""

from __future__ import annotations

from unittest import mock

import pytest
from ranks import Ranks

BUILDERS = ("ddp", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("fsdp zero2", "tensor parallel")))


def same_bits(builder: str, limit: int):
    """How many values differ, and the collectives of each trace with their operands, before and after."""
    import parallel
    from thunder.core.transform_common import Transform

    from thunder_cg.analysis import collectives
    from thunder_cg.analysis.ops import read

    class Schedules(Transform):
        def __init__(self) -> None:
            self.found = []

        def transform_trace_post_optimization(self, trace, **kwargs):
            new = collectives.schedule_collectives(trace)
            self.found.append([communicating(each) for each in (trace, new)])
            return new

    def communicating(trace):
        ops = read(trace).ops
        return [(op.name, op.inputs, op.outputs) for op in ops if op.rule is not None and op.rule.is_collective]

    build, shared = parallel.BUILDERS[builder], "tensor" in builder
    theirs = parallel.reference(builder, 5, 1)
    with mock.patch.object(collectives, "_IN_FLIGHT", limit):
        schedules = Schedules()
        ours = parallel.train(build(schedules, parallel.transform()), 5, shared=shared)
    return parallel.differing(ours, theirs), schedules.found


@pytest.mark.parametrize("builder", BUILDERS)
def test_same_bits_and_one_order(ranks: Ranks, builder: str) -> None:
    """With as little in flight as can be; test_parallel.py has the limit that is in force."""
    results = ranks.run(same_bits, builder, 1)
    for differing, _ in results:
        assert not differing
    traces = results[0][1]
    assert traces == results[1][1] and len(traces) == 2
    for before, after in traces:
        assert sorted(before) == sorted(after)
    assert "tensor" in builder or any(before != after for before, after in traces)
