from __future__ import annotations

from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
import thunder
import torch
from torch import nn

from thunder_cg import cudagraph_transform, explain
from thunder_cg.report import ArenaMemory, CollectiveReport, MemoryReport, RecordingMemory, Report, text, units


def test_every_region_has_its_counts_and_bytes(report: Report) -> None:
    said = str(report)
    assert (
        "CUDAGraph1 on cuda:0, 1 op: 1 capture, 2 replays, 1 eager run; copied per replay: 4.0 KiB in, 2.5 MiB out"
        in said
    )
    assert "ended by: Tensor.item at model.py:14" in said
    assert "could not be captured: operation not permitted & <gone>" in said


def test_what_verification_found(report: Report) -> None:
    (trace,) = report.traces
    wrong = replace(trace.regions[1], quarantined=True, verified=1234, remark="result 't1' is not deterministic")
    found = Report((replace(trace, regions=(trace.regions[0], wrong)),))
    for said in (str(found), found._repr_html_()):
        first, *_, second = said.split("CUDAGraph2")
        assert "5 eager runs, 1,234 verified" in second and "copied" not in second and "verified" not in first
        assert "runs eagerly, as verify= found its graph wrong: operation not permitted" in said
        assert "in verification: result " in said
    assert found.to_dict()["traces"][0]["regions"][1]["verified"] == 1234


def test_of_many_regions_the_first_are_shown_and_those_that_run_eagerly(report: Report) -> None:
    (trace,) = report.traces
    fine, failed = (replace(region, split="") for region in trace.regions)
    assert failed.failure and not fine.failure
    said = str(Report((replace(trace, regions=(*[fine] * 40, failed)),)))
    assert said.count("CUDAGraph1 on") == 30 and said.count("CUDAGraph2 on") == 1
    assert "  10 more regions: see explain(fn).traces" in said


def test_calls_and_fallbacks_and_memory(report: Report) -> None:
    assert "5 calls: 2 replayed, 1 warm-up, 1 capture, 1 eager (strides changed: 1)\n" in str(report)


def test_repr_is_the_text_too(report: Report) -> None:
    assert repr(report) == str(report)


def test_structure_is_not_a_problem(report: Report) -> None:
    assert "unpack_trivial" not in str(report)


@pytest.mark.parametrize(
    ("nbytes", "said"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 50, "5120.0 TiB")]
)
def test_size(nbytes: int, said: str) -> None:
    assert units.size(nbytes) == said


def test_collectives_of_a_kind_are_one_line(report: Report) -> None:
    def reduce(nbytes: int, **other: object) -> CollectiveReport:
        fields = {"name": "all_reduce", "group": "dp", "ranks": 2, "captured": True, "overlaps": False, "launch": 0}
        return CollectiveReport(nbytes=nbytes, **(fields | other))  # type: ignore[arg-type]

    each = (
        *(reduce(1024), reduce(2048, overlaps=True), reduce(4096, launch=1)),
        *(reduce(512, captured=False, launch=2), reduce(64, group="<tp>", ranks=4, launch=3)),
    )
    (trace,) = report.traces
    found = Report((replace(trace, collectives=each),))
    lines = [
        "3 all_reduce of 7.0 KiB in 2 launches in the group dp of 2 ranks, captured; 1 can overlap with compute",
        "1 all_reduce of 512 B in the group dp of 2 ranks, eager; 0 can overlap with compute",
        "1 all_reduce of 64 B in the group <tp> of 4 ranks, captured; 0 can overlap with compute",
    ]
    assert [line.strip() for line in str(found).splitlines() if "all_reduce" in line] == lines
    assert all(escape(line) in found._repr_html_() for line in lines)
    assert found.to_dict()["traces"][0]["collectives"][1]["nbytes"] == 2048


def test_entries_that_differ_in_sizes_are_a_line_each(backend, device) -> None:
    model = thunder.jit(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device).requires_grad_(False),
        transforms=[cudagraph_transform(backend=backend)],
    )
    for rows in (2, 2, 3, 3, 3, *range(4, 14)):
        model(torch.randn(rows, 4, device=device))
    said = str(explain(model))
    assert said.count("on cpu, " if device == "cpu" else "on cuda:0, ") == 1
    assert "\n  Sequential, forward, compiled version 1: the same ops; for input float32 (3, 4)" in said
    assert "; 3 calls: 1 replayed, 1 warm-up, 1 capture" in said
    assert said.count(": the same ops; ") == 3
    assert "\n  and 8 more with the same ops: see explain(fn).traces\n" in said
    assert "not captured" not in said.partition("Memory of the graphs")[2]
    for rows in range(4, 14):
        model(torch.randn(rows, 4, device=device))
    assert str(explain(model)).endswith(" more: see explain(fn).memory")


@pytest.mark.nightly
def test_versions_with_other_ops_are_shown_up_to_a_bound() -> None:
    def adds(x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        return sum((each.sin() for each in others), x.sin())

    jitted = thunder.jit(adds, transforms=[cudagraph_transform(backend="tape")])
    for number in range(1, text._MOST_VERSIONS + 3):
        jitted(torch.ones(2), [torch.ones(2)] * number)
    said = str(explain(jitted))
    assert said.count("adds, forward, compiled version ") == text._MOST_VERSIONS
    assert "\n  and 2 more compiled versions with other ops: see explain(fn).traces\n" in said


def test_graphs_that_are_alike_are_folded_in_all_forms(report: Report, tmp_path: Path) -> None:
    """24 layers between graph breaks: what is said of one is said once."""
    (trace,) = report.traces
    regions = tuple(replace(region, failure=None) for region in trace.regions)
    ops = tuple(replace(op, line=None) for op in trace.ops)  # lines may differ
    trace = replace(trace, regions=regions)
    layers = [replace(trace, function=f"Net, graph {n}", ops=ops if n % 2 else trace.ops) for n in range(24)]
    layers[7] = replace(layers[7], calls=9)
    arenas = tuple(ArenaMemory(number, 4096, 0, is_held=False) for number in range(24))
    memory = MemoryReport(arenas, (RecordingMemory("Net", 0, (0,), 1, 0, 0, ()),))
    found = Report(tuple(layers), memory=memory)
    said = str(found)
    assert said.count("CUDAGraph1 on") == 1 and said.count("  pool ") == text._MOST_LINES
    lines = [
        "and 22 more like it, the last of them Net, graph 23, forward, compiled version 0",
        f"Net, graph 7, forward, compiled version 0: the same ops; {text.entry(layers[7])}; {text.calls(layers[7])}",
    ]
    assert all(f"\n  {line}\n" in said for line in lines) and "\n  16 more pools: see explain(fn).memory\n" in said
    found.save(tmp_path / "report.md")
    assert all(f"\n- {line}" in (tmp_path / "report.md").read_text().replace("\\", "") for line in lines)
    page = found._repr_html_()
    assert page.count("<summary>and 23 more with the same ops</summary>") == 1 and page.count("<details open>") == 1
