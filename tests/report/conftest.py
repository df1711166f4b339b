"""A report with everything in it: two regions, one that failed, eager ops that are alike, a fusion, fallbacks."""

from __future__ import annotations

import pytest

from thunder_cg.report import CauseReport, OpReport, RegionReport, Report, TraceReport


def op(index: int, name: str, verdict: str = "capture", region: str | None = None, **changed: object) -> OpReport:
    fields: dict[str, object] = {
        "executor": "torch",
        "reason": "allowed",
        "detail": "",
        "fix": "",
        "line": f"model.py:{10 + index}",
        "source": None,
        "fused": (),
    }
    return OpReport(index=index, name=name, verdict=verdict, region=region, **(fields | changed))  # type: ignore[arg-type]


@pytest.fixture
def report() -> Report:
    item = {
        "verdict": "eager",
        "reason": "data-dependent",
        "detail": "the host waits for <f51>",
        "fix": "keep it in a tensor",
        "line": "model.py:14",
        "source": "if x.item() < 0:",
    }
    ops = (
        op(0, "unpack_trivial", "bookkeeping", line=None, executor=None, reason="bookkeeping"),
        op(1, "unpack_trivial", "bookkeeping", line=None, executor=None, reason="bookkeeping"),
        op(2, "TorchCompile0", region="CUDAGraph1", fused=("add", "mul")),
        op(3, "Tensor.item", **item),  # type: ignore[arg-type]
        op(5, "Tensor.item", **(item | {"detail": "the host waits for <f52>"})),  # type: ignore[arg-type]
        op(4, "torch.tanh", region="CUDAGraph2", line=None),
        op(6, "return", "bookkeeping", line=None, executor=None, reason="bookkeeping"),
    )
    regions = (
        RegionReport("CUDAGraph1", "cuda:0", 1, "Tensor.item at model.py:14", 1, 3, 1, 4096, 2_621_440, None),
        RegionReport("CUDAGraph2", "cuda:0", 1, "", 0, 0, 5, 0, 0, "operation not permitted & <gone>"),
    )
    cause = CauseReport(
        name="Tensor.item",
        place="at model.py:14",
        source="if x.item() < 0:",
        eager_ops=2,
        added_regions=1,
        reason="data-dependent",
        detail="the host waits for <f51>",
        fix="keep it in a tensor",
    )
    trace = TraceReport("Net", 0, "forward", ops, regions, 5, 2, {"strides changed": 1}, 1536, warm_ups=1)
    return Report((trace,), causes=(cause,))
