from __future__ import annotations

from dataclasses import replace
from html import escape

import pytest
import thunder
import torch
from torch import nn

from thunder_cg import cudagraph_transform, explain
from thunder_cg.report import CollectiveReport, Report, text, units


def test_empty_report_says_what_to_do() -> None:
    assert "first call" in str(Report(()))


def test_first_lines_answer_how_much_and_why_not(report: Report) -> None:
    assert str(report).splitlines()[:7] == [
        "CUDA graphs: 2 of 5 calls replayed; 2 regions with 2 of 4 ops; 2 ops eager",
        "Not replayed: 1 warm-up; 1 capture; 1 x strides changed",
        "What is not in a graph, by line of source, the most expensive first:",
        "  model.py:14: if x.item() < 0:",
        "      Tensor.item makes 2 ops eager, adds 1 region: data-dependent",
        "        why: the host waits for <f51>",
        "        to change it: keep it in a tensor",
    ]


def test_every_region_has_its_counts_and_bytes(report: Report) -> None:
    said = str(report)
    assert (
        "CUDAGraph1 on cuda:0, 1 op: 1 capture, 3 replays, 1 eager run; copied per replay: 4.0 KiB in, 2.5 MiB out"
        in said
    )
    assert "ended by: Tensor.item at model.py:14" in said
    assert "could not be captured: operation not permitted & <gone>" in said


def test_what_verification_found(report: Report) -> None:
    (trace,) = report.traces
    wrong = replace(trace.regions[1], quarantined=True, verified=1234, remark="result 't1' is not deterministic")
    found = Report((replace(trace, regions=(trace.regions[0], wrong)),))
    for said in (str(found), found._repr_html_()):
        assert "5 eager runs, 1,234 verified; copied" in said and "verified" not in said.split("CUDAGraph2")[0]
        assert "runs eagerly, as verify= found its graph wrong: operation not permitted" in said
        assert "in verification: result " in said
    assert found.to_dict()["traces"][0]["regions"][1]["verified"] == 1234


def test_calls_and_fallbacks_and_memory(report: Report) -> None:
    assert "5 calls, 2 of them without graphs (strides changed: 1); its memory pools hold 1.5 KiB" in str(report)


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


def test_headline_says_what_ran(backend, device) -> None:
    """Not what was planned: of a model that never replays, the reason comes first."""
    graphs = cudagraph_transform(backend=backend)
    model = thunder.jit(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device), transforms=[graphs])

    def lines() -> list[str]:
        return str(explain(model)).splitlines()[:2]

    x = torch.randn(2, 4, device=device, requires_grad=True)
    assert lines() == [text.NOTHING_COMPILED]
    model(x).sum().backward()
    said = "2 regions with 21 of 21 ops; 0 ops eager"
    assert lines() == [
        f"CUDA graphs: 0 of 1 call and 0 of 1 backward replayed; {said}",
        "Not replayed: 2 warm-ups; the next call with inputs of the same shapes and strides will capture",
    ]
    for _ in range(4):
        model(x).sum().backward()
    assert lines() == [
        f"CUDA graphs: 3 of 5 calls and 3 of 5 backwards replayed; {said}",
        "Not replayed: 2 warm-ups; 2 captures",
    ]
    assert str(explain(model)).splitlines()[2].endswith("there is nothing to change.")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        model(x).sum().backward()
    assert lines()[1].startswith("Not replayed: 2 warm-ups; 2 captures; 1 x saved-tensor hooks are active")
    assert lines()[1] in explain(model)._repr_html_() and "nothing to change" not in str(explain(model))


def test_a_function_that_thunder_cannot_compile(backend) -> None:
    """A module's report has what Thunder raised and where, and only the advice that is for it."""

    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dim() == 2:
                return torch.relu(x) * 2
            return x * 2 if x.sum() > 0 else x

    model = thunder.jit(Branches(), transforms=[cudagraph_transform(backend=backend)])
    for _ in range(2):
        with pytest.raises(NotImplementedError):
            model(torch.ones(3))
    said = str(explain(model))
    line = Branches.forward.__code__.co_firstlineno + 3
    assert said.startswith(
        "Nothing is compiled. Thunder raised while it compiled, in 2 of 2 calls: NotImplementedError at "
        f"test_text.py:{line}: casting a TensorProxy to a Python boolean is not supported"
    )
    assert "To try: for a branch on what a tensor holds" in said and "thunderfx" in said and "torch.library" not in said
    assert escape(said) in explain(model)._repr_html_()
    model(torch.ones(3, 3))  # what compiles does not hide what does not
    for said in (str(explain(model)), explain(model)._repr_html_()):
        assert "Thunder raised while it compiled, in 2 of 3 calls: NotImplementedError at test_text.py:" in said
        assert "0 of 1 call replayed" in said
    function = thunder.jit(Branches().forward, transforms=[cudagraph_transform(backend=backend)])
    with pytest.raises(NotImplementedError):
        function(torch.ones(3))
    said = str(explain(function))
    assert (
        "in 1 of 1 call; its error says where. To try: for a branch" in said
        and "for an operator of torch.library" in said
    )


def test_a_function_with_nothing_to_capture(backend) -> None:
    compiled = thunder.jit(lambda x: x.item() + 1, transforms=[cudagraph_transform(backend=backend)])
    for _ in range(3):
        compiled(torch.ones(()))
    said = str(explain(compiled))
    assert said.startswith("CUDA graphs: none, in 3 calls; 0 regions with 0 of 2 ops; 2 ops eager")
    assert "nothing in it is captured, so its calls are not counted" in said


def test_entries_that_differ_in_sizes_are_a_line_each(backend, device) -> None:
    model = thunder.jit(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device).requires_grad_(False),
        transforms=[cudagraph_transform(backend=backend)],
    )
    for rows in (2, 2, 3, 3, 3, *range(4, 14)):
        model(torch.randn(rows, 4, device=device))
    said = str(explain(model))
    assert said.count("on cpu, " if device == "cpu" else "on cuda:0, ") == 1
    assert "\n\nSequential, forward, compiled version 1: as compiled version 0; for input float32 (3, 4)" in said
    assert "; 3 calls, 1 of them without graphs" in said
    assert said.endswith("\n  2 more: see explain(fn).memory")
