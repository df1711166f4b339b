from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from thunder_cg.report import GraphBreak, Outside, Report


def test_what_a_change_did(report: Report) -> None:
    (trace,) = report.traces
    fixed = [op for op in trace.ops if op.name != "Tensor.item"]
    fixed[-2] = replace(fixed[-2], verdict="eager", reason="denied", detail="deny= names it", fix="remove it")
    region = replace(trace.regions[0], bytes_out=1024)
    after = Report(
        (replace(trace, ops=tuple(fixed), regions=(region,), fallbacks={"hooks": 2}, function="FixedNet", entry=1),),
        (Outside("Net", "argwhere", "model.py:3", "its shape depends", 2, "cut"),),
        breaks=(GraphBreak("Net", "model.py:9", "print(x)", "a call of print", ""),),
    )
    said = str(after.differences(report)).splitlines()
    assert said == [
        "before: CUDA graphs: 2 of 5 calls replayed; 2 regions with 2 of 4 ops; 2 ops eager",
        "after:  CUDA graphs: 2 of 5 calls replayed; 1 region with 1 of 2 ops; 1 op eager",
        "Net, FixedNet, forward, compiled version 1:",
        "  regions: 2 -> 1",
        "  captured ops: 2 -> 1",
        "  eager ops: 2 -> 1",
        "  copied out per replay: 2.5 MiB -> 1.0 KiB",
        "  Tensor.item x2 in `if x.item() < 0:`: eager: data-dependent -> not there",
        "  torch.tanh: captured -> eager: denied: deny= names it; remove it",
        "  calls without graphs, as strides changed: some -> none",
        "  calls without graphs, as hooks: none -> some",
        "  failure of a region: operation not permitted & <gone> -> none",
        "argwhere in Inductor: none -> its shape depends",
        "graph break in `print(x)`: none -> a call of print",
    ]
    back = report.differences(after)
    assert "  torch.tanh: eager: denied -> captured" in back.lines
    assert "argwhere in Inductor: its shape depends -> none" in back.lines
    assert "  failure of a region: none -> operation not permitted & <gone>" in back.lines
    better = {change.what: change.better for change in back.changes}
    assert better["torch.tanh"] and better["argwhere in Inductor"]
    assert better["eager ops"] is better["failure of a region"] is better["copied out per replay"] is False
    assert better["regions"] is better["captured ops"] is None, "there may be fewer ops, as with fusions"


def test_lines_that_moved_and_calls_are_no_difference(report: Report) -> None:
    (trace,) = report.traces
    ops = tuple(replace(op, line="model.py:99") for op in trace.ops)
    moved = replace(trace, ops=ops, calls=50, arena_bytes=trace.arena_bytes + 1)  # shown in KiB and more
    found = Report((moved,)).differences(report)
    said = "The reports do not differ, but in how often the function ran."
    assert found.changes == () and found.lines == (said,) and said in found._repr_html_()


def test_traces_that_come_and_go(report: Report) -> None:
    (trace,) = report.traces
    both = Report((trace, replace(trace, entry=1)))
    title, headline = "Net, forward, compiled version 1", "2 regions with 2 of 4 ops; 2 ops eager"
    assert both.differences(report).lines == (f"{title}: not there -> {headline}",)
    assert report.differences(both).lines == (f"{title}: {headline} -> not there",)


def test_a_file_of_differences(report: Report, tmp_path: Path) -> None:
    """The page itself is tested with those of reports."""
    (trace,) = report.traces
    found = report.differences(replace(report, traces=(replace(trace, fallbacks={}),)))
    report.save(tmp_path / "found.html")
    for name in ("found.html", "found.txt"):
        found.save(tmp_path / name)
        content = (tmp_path / name).read_text(encoding="utf-8")
        assert "calls without graphs, as strides changed" in content and "thunder_cg report" in content.split("\n")[0]
    with pytest.raises(ValueError, match=r"found\.json ends with '\.json'; this is saved as one of \.html, \.txt"):
        found.save(tmp_path / "found.json")
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(FileExistsError, match=r"mine\.html exists"):
        found.save(tmp_path / "mine.html")
