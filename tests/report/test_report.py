"""The report says what was decided and counted, and changes nothing."""

from __future__ import annotations

import dataclasses
import json

import pytest
import thunder
import torch

from thunder_cg import cudagraph_transform, explain
from thunder_cg.report import Report


def scaled(x: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x * 2) + 1
    z = y * y.sum().item()
    return torch.tanh(z - 1).exp()


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    """Reports after one, two and five calls."""
    jitted = thunder.jit(scaled, transforms=[cudagraph_transform(backend="tape")])
    taken = []
    for call in range(1, 6):
        jitted(torch.randn(4, 8))
        if call in (1, 2, 5):
            taken.append(explain(jitted))
    return taken


def test_calls_are_counted(reports: list[Report]) -> None:
    assert [(r.traces[0].calls, r.traces[0].eager_calls) for r in reports] == [(1, 1), (2, 1), (5, 1)]
    assert [[(g.captures, g.replays, g.eager_runs) for g in r.traces[0].regions] for r in reports] == [
        [(0, 0, 1)] * 2,
        [(1, 1, 1)] * 2,
        [(1, 4, 1)] * 2,
    ]


def test_bytes_are_those_of_the_values_that_cross(reports: list[Report]) -> None:
    before, after = reports[-1].traces[0].regions
    assert before.bytes_in == 4 * 8 * 4  # x
    assert after.bytes_out == 4 * 8 * 4  # the result
    assert reports[-1].traces[0].arena_bytes > 0


def test_eager_ops_have_a_reason_a_fix_and_the_users_line(reports: list[Report]) -> None:
    eager = [op for op in reports[0].traces[0].ops if op.verdict == "eager"]
    assert all(op.reason and op.detail and op.fix and op.region is None for op in eager)
    (item,) = (op for op in eager if "item" in op.name)
    assert (item.line or "").startswith("test_report.py:") and item.source == "z = y * y.sum().item()"
    (mul,) = (op for op in eager if "mul" in op.name)
    assert mul.detail.startswith(f"it takes the result of Tensor.item at {item.line}, which a graph would keep")


def test_rows_are_the_plan_in_order_and_every_op_once(reports: list[Report]) -> None:
    (trace,) = reports[0].traces
    assert sorted(op.index for op in trace.ops) == list(range(len(trace.ops)))
    names = [op.region for op in trace.ops if op.region]
    assert list(dict.fromkeys(names)) == [region.name for region in trace.regions]
    assert [names.count(region.name) for region in trace.regions] == [region.ops for region in trace.regions]
    assert all(region.split for region in trace.regions[:-1])


def test_to_dict_is_complete_and_survives_json(report: Report, reports: list[Report]) -> None:
    for taken in (report, *reports):
        plain = taken.to_dict()
        assert json.loads(json.dumps(plain)) == plain
        assert plain.keys() == {field.name for field in dataclasses.fields(taken)}
        for written, trace in zip(plain["traces"], taken.traces, strict=True):
            assert written.keys() == {field.name for field in dataclasses.fields(trace)}
            assert [op["name"] for op in written["ops"]] == [op.name for op in trace.ops]


def test_a_report_is_a_moment(reports: list[Report]) -> None:
    assert reports[0].traces[0].calls == 1  # three more reports were taken and four calls made since
    with pytest.raises(dataclasses.FrozenInstanceError):
        reports[0].traces[0].calls = 2  # type: ignore[misc]


def test_a_line_that_thunders_grad_transform_lost_is_found_nearby() -> None:
    jitted = thunder.jit(scaled, transforms=[cudagraph_transform(backend="tape")])
    jitted(torch.randn(4, 8, requires_grad=True))
    (item,) = (op for op in explain(jitted).traces[0].ops if "item" in op.name)
    assert "test_report.py:" in (item.line or "") and item.source == "z = y * y.sum().item()"


def test_values_that_cross_from_step_to_step(reports: list[Report]) -> None:
    (trace,) = reports[0].traces
    regions = {op.index: op.region or op.name for op in trace.ops}
    where = [
        (value.kind, value.nbytes, value.made_by and regions[value.made_by], [regions[i] for i in value.used_by])
        for value in trace.crossings
    ]
    assert where == [
        ("float32[4, 8]", 128, None, ["CUDAGraph1"]),
        ("float32[4, 8]", 128, "CUDAGraph1", ["torch.mul"]),
        ("float32[]", 4, "CUDAGraph1", ["Tensor.item"]),
        ("number", 0, "Tensor.item", ["torch.mul"]),
        ("float32[4, 8]", 128, "torch.mul", ["CUDAGraph2"]),
        ("float32[4, 8]", 128, "CUDAGraph2", ["prims.python_return"]),
    ]
