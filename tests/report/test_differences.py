from __future__ import annotations

from dataclasses import replace

from thunder_cg.report import Outside, Report


def test_what_a_change_did(report: Report) -> None:
    (trace,) = report.traces
    fixed = [op for op in trace.ops if op.name != "Tensor.item"]
    fixed[-2] = replace(fixed[-2], verdict="eager", reason="denied", detail="deny= names it", fix="remove it")
    region = replace(trace.regions[0], bytes_out=1024)
    after = Report(
        (replace(trace, ops=tuple(fixed), regions=(region,), fallbacks={"hooks": 2}, function="FixedNet", entry=1),),
        (Outside("Net", "argwhere", "model.py:3", "its shape depends", 2, "cut"),),
    )
    assert str(after.differences(report)).splitlines() == [
        "Net, FixedNet, forward, compiled version 1:",
        "  regions: 2 -> 1",
        "  captured ops: 2 -> 1",
        "  eager ops: 2 -> 1",
        "  copied out per replay: 2.5 MiB -> 1.0 KiB",
        "  Tensor.item x2 in `if x.item() < 0:` was eager: not there any more",
        "  torch.tanh is eager now: denied: deny= names it; remove it",
        "  calls without graphs no more: strides changed",
        "  calls without graphs now: hooks",
        "  a region failed no more: operation not permitted & <gone>",
        "now in Inductor's pieces: argwhere, its shape depends",
    ]
    back = report.differences(after).lines
    assert "  torch.tanh was eager: now captured" in back
    assert "not any more in Inductor's pieces: argwhere, its shape depends" in back
    assert "  a region fails now: operation not permitted & <gone>" in back


def test_lines_that_moved_and_calls_are_no_difference(report: Report) -> None:
    (trace,) = report.traces
    moved = replace(trace, ops=tuple(replace(op, line="model.py:99") for op in trace.ops), calls=50)
    assert Report((moved,)).differences(report).lines == (
        "The reports do not differ, but in how often the function ran.",
    )


def test_traces_that_come_and_go(report: Report) -> None:
    (trace,) = report.traces
    both = Report((trace, replace(trace, entry=1)))
    title = "Net, forward, compiled version 1: 2 regions with 2 of 4 ops; 2 ops eager"
    assert both.differences(report).lines == (f"new: {title}",)
    assert report.differences(both).lines == (f"gone: {title}",)
