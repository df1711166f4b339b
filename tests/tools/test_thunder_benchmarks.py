"""Thunder's own benchmarks get one more transform, and only while they run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import thunder
import thunder.dynamo

from thunder_cg.tools import thunder_benchmarks

SCRIPT = """
import sys
import thunder
import torch
from thunder.dynamo import ThunderCompiler
from thunder.dynamo.compiler import thunderfx

def fn(x):
    return torch.sin(x) * 2 + 1

if __name__ == "__main__":
    backend = ThunderCompiler(executors=None)
    ways = [thunder.jit(fn, transforms=[]), thunderfx(fn), torch.compile(fn, backend=backend)]
    for way in ways:
        for _ in range(3):
            way(torch.randn(4))
    found = [thunder.last_traces(ways[0])[-1]]
    found += [trace for info in backend.subgraph_infos for each in info.thunder_compiled_fns
              for trace in thunder.last_traces(each)[-1:]]
    found += ways[1].last_traces
    print(sys.argv[1:], sum("CUDAGraph" in str(trace) for trace in found), "of", len(found))
"""


@pytest.mark.parametrize(("graphs", "said"), [("thunder_cg", "3 of 3"), ("none", "0 of 3")])
@pytest.mark.nightly_after(1)
def test_all_that_a_benchmark_compiles(
    graphs: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_benchmark.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(thunder_benchmarks.BENCHMARKS, "litgpt", "a_benchmark")
    before = thunder.jit, thunder.dynamo.ThunderCompiler, thunder.dynamo.compiler.thunderfx, sys.argv
    thunder_benchmarks.main(["litgpt", "--graphs", graphs, "--n_layers", "2"])
    assert capsys.readouterr().out == f"['--n_layers', '2'] {said}\n"
    assert before == (thunder.jit, thunder.dynamo.ThunderCompiler, thunder.dynamo.compiler.thunderfx, sys.argv)


def test_an_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        thunder_benchmarks.main(["speed"])
    assert "invalid choice: 'speed'" in capsys.readouterr().err
