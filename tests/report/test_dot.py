"""`dump_dot` writes the graph of a region."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import thunder
import torch
from support import programs

from thunder_cg import CudagraphError, OptionError, dump_dot, explain, graphed_step
from thunder_cg.errors import ForeignFileError
from thunder_cg.report import StepReport
from thunder_cg.runtime.tape import TapeGraph


def test_the_graph_of_a_region(transform: Callable[..., Any], device: str, tmp_path: Path) -> None:
    def fn(x):
        return torch.relu(torch.sin(x) @ x.t()) + 1

    jfn, x, path = thunder.jit(fn, transforms=[transform()]), torch.randn(3, 3, device=device), tmp_path / "a.dot"
    with pytest.raises(OptionError, match="expected a region, and nothing is captured"):
        dump_dot(jfn, "CUDAGraph1", path)
    jfn(x)
    with pytest.raises(
        OptionError, match=r"dump_dot\(region='CUDAGraph1'\): .*; call the function twice with the same"
    ):
        dump_dot(jfn, "CUDAGraph1", path)
    with pytest.raises(OptionError, match=r"region='relu'\): expected one of 'CUDAGraph1'"):
        dump_dot(jfn, "relu", path)
    jfn(x)
    path.write_text("digraph mine {}")
    with pytest.raises(ForeignFileError, match=r"a\.dot exists, and thunder_cg did not write it"):
        dump_dot(jfn, "CUDAGraph1", path)
    assert path.read_text() == "digraph mine {}"
    path.unlink()
    for _ in range(2):  # the second time, the file is its own
        explain(jfn).dump_dot("CUDAGraph1", path)
    mark, said = path.read_text().split("\n", 1)
    assert mark == "// thunder_cg: the graph of CUDAGraph1"
    assert said.startswith("digraph ") and said.rstrip().endswith("}")
    graph = programs(jfn)[0].newest_graph("CUDAGraph1").graph
    if isinstance(graph, TapeGraph):
        labels = re.findall(r'(\d+) \[shape=box, label="([^"\\]+)', said)
        assert [name.partition(".")[0] for _, name in labels] == [
            "aten::sin",
            "aten::mm",
            "aten::relu",
            "aten::add",
            "copies out",
        ]
        assert re.findall(r"(\d) -> (\d);", said) == [("0", "1"), ("1", "2"), ("2", "3"), ("3", "4")]
    graph.close(may_wait=True)
    with pytest.raises(CudagraphError, match="has been destroyed"):
        graph.write_dot(str(path))


def test_the_graph_of_a_backward(transform: Callable[..., Any], device: str, tmp_path: Path) -> None:
    jfn, x = thunder.jit(lambda x: torch.tanh(torch.sin(x)), transforms=[transform()]), torch.ones(2, device=device)
    for _ in range(2):
        jfn(x.requires_grad_()).sum().backward()
    forward, backward = (program.regions[0].name for program in programs(jfn))
    for region in (forward, backward):
        dump_dot(jfn, region, tmp_path / region)
    assert (tmp_path / forward).read_text() != (tmp_path / backward).read_text()


@pytest.mark.nightly
def test_the_graph_of_a_step(device: str, backend: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2).to(device)
    step = graphed_step(lambda x: model(x).sum(), modules=[model], backend=backend)
    path, x = tmp_path / "step.dot", torch.ones(2, 2, device=device)
    with pytest.raises(OptionError, match="expected a region, and nothing is captured"):
        dump_dot(step, "Graph 0", path)
    for _ in range(4):
        step(x)
    assert "\nGraph 0: " in str(explain(step))
    with pytest.raises(OptionError, match=r"region='Graph 7'\): expected one of 'Graph 0'"):
        dump_dot(step, "Graph 7", path)
    explain(step).dump_dot("Graph 0", path)
    mark, said = path.read_text().split("\n", 1)
    assert mark == "// thunder_cg: the graph of Graph 0" and said.startswith("digraph ")
    assert backend == "cuda" or "aten::addmm" in said
    explain(step).save(saved := tmp_path / "step.json")
    with pytest.raises(CudagraphError, match=r"^StepReport.dump_dot: this report has no function"):
        StepReport.load(saved).dump_dot("Graph 0", path)
